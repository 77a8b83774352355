"""The parts between the driver's threads and the event loop, without a cluster."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from cassandra import OperationTimedOut, Unavailable, WriteTimeout
from cassandra.cluster import NoHostAvailable
from cassandra.connection import ConnectionShutdown
from cassandra.policies import DCAwareRoundRobinPolicy
from cassandra.protocol import ErrorMessage, OverloadedErrorMessage

from counter.errors import (
    OverloadedError,
    StoreUnavailableError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.limits import SECOND
from counter.storage.cassandra import driver as driver_setup
from counter.storage.cassandra.connection import CassandraConnection, gathered, let_go
from counter.storage.cassandra.driver import (
    SparingSpeculation,
    is_outcome_unknown,
    quieten,
    translated,
    within,
)
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.shared.bridge import Bridge
from counter.storage.shared.directory import Coalesced
from tests.support.virtual import virtually


class Response:
    """A response of the driver, which answers as often as it likes."""

    def __init__(self, paging_state: bytes | None) -> None:
        self._paging_state: bytes | None = None
        # Held by the driver's own response until it is answered.
        self._timer: Any = None
        self._callbacks: list[Any] = []
        self._errbacks: list[Any] = []
        self.asked_from = paging_state
        self.succeed: Callable[..., None]
        self.fail: Callable[..., None]

    def add_callbacks(
        self,
        callback: Callable[..., None],
        errback: Callable[..., None],
        callback_args: tuple[Any, ...],
        errback_args: tuple[Any, ...],
    ) -> None:
        self.succeed = lambda rows: callback(rows, *callback_args)
        self.fail = lambda error: errback(error, *errback_args)

    def answer(self, rows: Sequence[Any], next_page: bytes | None = None) -> None:
        self._paging_state = next_page
        self.succeed(rows)


class Driver:
    """Sends nothing, and keeps its requests."""

    def __init__(self) -> None:
        self.sent: list[Response] = []

    def send(self, statement: Any, paging_state: bytes | None) -> Response:
        if isinstance(statement, Exception):
            raise statement
        self.sent.append(Response(paging_state))
        return self.sent[-1]


@pytest.fixture
def driver() -> Driver:
    return Driver()


async def sent(driver: Driver, statements: Sequence[Any]) -> asyncio.Task[list[Any]]:
    """The results of *statements*, which end together."""
    ended: list[int] = []

    async def results() -> list[Any]:
        bridge = Bridge(asyncio.get_running_loop())
        found = await gathered(bridge, statements, driver.send, ended.append)
        assert ended == [len(statements)]
        return found

    task = asyncio.create_task(results())
    await asyncio.sleep(0)
    return task


async def test_results_are_in_the_order_of_the_statements(driver: Driver) -> None:
    """Whatever the order of the responses; an error takes the place of its result."""
    refused, lost = RuntimeError("refused"), OperationTimedOut()
    results = await sent(driver, ["a", refused, "b", "c"])
    a, b, c = driver.sent
    c.answer(["C"])
    b.fail(lost)
    a.answer([])
    assert await results == [None, refused, lost, ["C"]]


async def test_all_pages_of_a_statement_are_asked_for(driver: Driver) -> None:
    """Each from the end of the one before."""
    results = await sent(driver, ["a"])
    driver.sent[0].answer([1, 2], b"2")
    await asyncio.sleep(0)
    driver.sent[1].answer([3], b"3")
    await asyncio.sleep(0)
    driver.sent[2].answer([])
    assert [each.asked_from for each in driver.sent] == [None, b"2", b"3"]
    assert await results == [[1, 2, 3]]


async def test_a_statement_that_two_nodes_answer_counts_once(driver: Driver) -> None:
    """The second callback must not end another statement, nor count as a page."""
    results = await sent(driver, ["a", "b"])
    a, b = driver.sent
    a.answer([1], b"1")
    a.answer([1], b"1")
    a.fail(OperationTimedOut())
    await asyncio.sleep(0)
    assert len(driver.sent) == 3
    driver.sent[2].answer([2])
    driver.sent[2].answer([2])
    a.answer([1])
    await asyncio.sleep(0)
    assert not results.done()
    b.fail(OperationTimedOut())
    b.answer([3])
    found, lost = await results
    assert found == [1, 2]
    assert isinstance(lost, OperationTimedOut)


async def test_a_page_that_fails_fails_its_statement(driver: Driver) -> None:
    """A part of the rows is not a result."""
    results = await sent(driver, ["a"])
    driver.sent[0].answer([1], b"1")
    await asyncio.sleep(0)
    driver.sent[1].fail(OperationTimedOut())
    (found,) = await results
    assert isinstance(found, OperationTimedOut)


async def test_results_from_many_threads_all_arrive() -> None:
    """However they fall between two turns of the loop."""
    loop = asyncio.get_running_loop()
    bridge = Bridge(loop)
    futures = [loop.create_future() for _ in range(4_000)]

    def resolve(part: list[asyncio.Future[int]], first: int) -> None:
        for number, future in enumerate(part, first):
            bridge.call(future.set_result, number)

    threads = [
        threading.Thread(target=resolve, args=(futures[at : at + 1_000], at))
        for at in range(0, 4_000, 1_000)
    ]
    for thread in threads:
        thread.start()
    assert await asyncio.gather(*futures) == list(range(4_000))


async def test_a_call_while_one_is_under_way_gets_one_that_begins_later() -> None:
    """The running one's result may be old by then; any number of callers share the next."""
    begun: asyncio.Queue[asyncio.Event] = asyncio.Queue()
    numbers = count(1)

    async def work() -> int:
        number, may_end = next(numbers), asyncio.Event()
        begun.put_nowait(may_end)
        await may_end.wait()
        return number

    coalesced = Coalesced(work)
    first = asyncio.create_task(coalesced())
    running = await begun.get()
    others = [asyncio.create_task(coalesced()) for _ in range(3)]
    await asyncio.sleep(0)
    others[0].cancel()
    running.set()
    assert await first == 1
    (await begun.get()).set()
    assert await others[1] == await others[2] == 2
    assert begun.empty()


async def test_an_error_goes_to_every_caller_of_that_call() -> None:
    """And to no later caller."""
    errors = [ValueError("first"), None]

    async def work() -> str:
        if error := errors.pop(0):
            raise error
        return "second"

    coalesced = Coalesced(work)
    failed = await asyncio.gather(coalesced(), coalesced(), return_exceptions=True)
    assert [str(each) for each in failed] == ["first", "first"]
    assert await coalesced() == "second"


def seconds_sent(policy: SparingSpeculation, statements: int, *, every: int) -> int:
    """How many of *statements* are sent a second time if each *every*-th is slow."""
    sent = 0
    for number in range(statements):
        plan = policy.new_plan(None, None)
        if plan.next_execution(None) > 0 and number % every == 0:
            assert plan.next_execution(None) == -1
            sent += 1
    return sent


def test_one_slow_node_of_three_costs_each_of_its_statements_a_second_send() -> None:
    assert seconds_sent(SparingSpeculation(), 30_000, every=3) == 10_000


def test_if_all_nodes_are_slow_few_statements_are_sent_twice() -> None:
    """That would make it worse."""
    assert seconds_sent(SparingSpeculation(), 10_000, every=1) < 5_000


UNKNOWN = [
    OperationTimedOut(),
    WriteTimeout("late", write_type=1),
    ConnectionShutdown("gone"),
    ErrorMessage(0x1700, "unknown", None),
    NoHostAvailable("none", {"a": Unavailable("no"), "b": ConnectionShutdown("gone")}),
]
KNOWN = [
    Unavailable("no", required_replicas=2, alive_replicas=1),
    OverloadedErrorMessage(0x1001, "busy", None),
    NoHostAvailable("none", {"a": Unavailable("no")}),
    NoHostAvailable("none", ["a"]),
]


@pytest.mark.parametrize("error", UNKNOWN)
def test_errors_after_a_possible_write_have_an_unknown_outcome(error: Exception) -> None:
    assert is_outcome_unknown(error)


@pytest.mark.parametrize("error", KNOWN)
def test_refusals_have_a_known_outcome(error: Exception) -> None:
    assert not is_outcome_unknown(error)


@pytest.mark.parametrize("error", [*UNKNOWN, *KNOWN])
@pytest.mark.parametrize("wrote", [True, False], ids=["write", "read"])
def test_every_failure_of_the_store_has_retry_advice(error: Exception, wrote: bool) -> None:
    """In the service's own terms."""
    ours = translated(error, wrote=wrote)
    assert isinstance(ours, UnavailableError)
    assert ours.retry_after_us
    assert ours.detail


def test_a_timed_out_read_is_not_an_unknown_outcome() -> None:
    """A read changes nothing."""
    assert isinstance(translated(OperationTimedOut()), WriteTimeoutError)
    assert isinstance(translated(OperationTimedOut(), wrote=False), StoreUnavailableError)


def test_a_busy_cluster_is_overloaded() -> None:
    """Behind whatever the driver wraps it in."""
    busy = OverloadedErrorMessage(0x1001, "busy", None)
    assert isinstance(translated(NoHostAvailable("none", {"a": busy})), OverloadedError)


def test_an_excluded_node_is_reported() -> None:
    """Also if the driver went on to ask nodes that are down."""
    alone = Unavailable("no", required_replicas=2, alive_replicas=1)
    for error in (alone, NoHostAvailable("none", {"a": ConnectionShutdown("gone"), "b": alone})):
        assert "1 of the 2 replicas" in str(translated(error))


def test_an_error_of_the_program_is_not_translated() -> None:
    """The driver's error for a wrong statement is not translated."""
    error = TypeError("wrong number of cells")
    assert translated(error) is error


class Contended(CassandraConnection):
    """Other processes set the same row until some time; before, compare-and-sets time out."""

    def __init__(self, until_s: float) -> None:
        super().__init__(CassandraOptions([("missing", 1)], read_timeout_us=2 * SECOND))
        self.answer = True
        self.tries: list[float] = []
        self._until_s = until_s

    async def _send(
        self, statements: Sequence[Any], timeout_us: int | None, *, raw: bool = False
    ) -> list[Any]:
        self.tries.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.01)
        if self.tries[-1] < self._until_s:
            return [ErrorMessage(0x1700, "unknown", None)]
        return [[(self.answer,)]]

    async def set(self) -> bool:
        async def settle() -> tuple[bytes]:
            return (b"theirs",)

        applied, _ = await self.compare_and_set("set", settle, b"ours")
        return applied


class Ring(DCAwareRoundRobinPolicy):  # type: ignore[misc]
    """Three nodes, always in the same order, each with a connection."""

    def __init__(self) -> None:
        super().__init__("dc1")
        self.connections = {
            name: SimpleNamespace(in_flight=0, heard_s=0.0) for name in ("a", "b", "c")
        }
        pools = {name: SimpleNamespace(_connection=each) for name, each in self.connections.items()}
        self.cluster = SimpleNamespace(sessions=[SimpleNamespace(_pools=pools)], metadata=None)

    def populate(self, cluster: Any, hosts: Any) -> None:
        """It knows its nodes."""

    def make_query_plan(self, working_keyspace: str | None = None, query: Any = None) -> Any:
        return iter(self.connections)


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    monkeypatch.setattr(driver_setup, "_SILENCE_LOOK_S", 0.0)
    return Ring()


def asked(ring: Ring, now_s: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes in the order in which a statement is sent to them."""
    policy = driver_setup.SilentLast(ring)
    policy.populate(ring.cluster, [])
    monkeypatch.setattr(driver_setup, "monotonic", lambda: now_s)
    return list(policy.make_query_plan())


def test_a_silent_node_with_pending_requests_is_asked_last(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one that was not asked, nor one that answers something, however much it owes."""
    assert asked(ring, 100.0, monkeypatch) == ["a", "b", "c"]
    for each in ring.connections.values():
        each.in_flight, each.heard_s = 5, 99.9
    ring.connections["a"].heard_s = 99.0
    assert asked(ring, 100.0, monkeypatch) == ["b", "c", "a"]
    ring.connections["a"].in_flight = 0
    assert asked(ring, 100.0, monkeypatch) == ["a", "b", "c"]


def test_if_all_nodes_are_silent_their_order_stays(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is this process, or all are slow: none is spared."""
    for each in ring.connections.values():
        each.in_flight = 5
    assert asked(ring, 100.0, monkeypatch) == ["a", "b", "c"]


def test_a_node_that_has_no_connection_is_not_silent(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver knows that it is down."""
    ring.cluster.sessions[0]._pools["a"]._connection = None
    assert asked(ring, 100.0, monkeypatch) == ["a", "b", "c"]


def test_a_contended_row_is_retried_for_a_while() -> None:
    """Not for a few tries, which would all fall into the same moment."""
    connection = Contended(until_s=3.5)
    assert virtually(connection.set())
    assert len(connection.tries) > 5


def test_a_contended_read_is_repeated() -> None:
    """A read contends as well: that it failed does not show who set the row."""
    connection = Contended(until_s=0)
    readings = [UnavailableError("unknown"), UnavailableError("unknown"), None]

    async def settle() -> tuple[bytes]:
        if error := readings.pop(0):
            raise error
        return (b"theirs",)

    connection.answer = False
    result = virtually(connection.compare_and_set("set", settle, b"ours"))
    assert result == (False, (b"theirs",))
    assert len(connection.tries) == 3


def test_a_compare_and_set_is_not_tried_for_ever() -> None:
    """As long as two readings may take, and in the end it says why."""
    connection = Contended(until_s=1_000)
    with pytest.raises(StoreUnavailableError, match="unknown"):
        virtually(connection.set())
    assert 3.9 < connection.tries[-1] < 5
    assert len(connection.tries) < 60


def test_a_shorter_deadline_bounds_it() -> None:
    """The outcome is unknown, whatever step it has reached."""
    connection = Contended(until_s=1_000)

    async def answered() -> float:
        with pytest.raises(WriteTimeoutError, match=r"took longer than 0\.7 s"):
            async with within(700_000):
                await connection.set()
        return asyncio.get_running_loop().time()

    assert virtually(answered()) == 0.7


def test_the_driver_logs_a_node_that_is_down_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Once, not at each try to reach it again."""
    for _ in range(2):
        quieten()
    log = logging.getLogger("cassandra.cluster")
    try:
        raise ConnectionRefusedError("refused")
    except OSError:
        log.warning("[control connection] Error connecting to %s:", "a", exc_info=True)
    log.warning("Error attempting to reconnect to %s, scheduling retry", "a")
    (record,) = caplog.records
    assert record.getMessage() == "[control connection] Error connecting to a: refused"
    assert record.exc_info is None


def test_an_answered_response_has_no_reference_cycle() -> None:
    """Otherwise only the garbage collector would free it."""
    response = Response(None)
    timer = SimpleNamespace(callback=response.answer)
    response._timer, response._callbacks = timer, [response.answer]
    alive = weakref.ref(response)
    let_go(response)
    timer.callback()
    gc.disable()
    try:
        del response
        assert alive() is None
    finally:
        gc.enable()
