"""The adapter for DynamoDB if requests are lost, late, throttled or partly done."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from counter.api_keys import ApiKey, Scope
from counter.errors import (
    NamespaceUnknownError,
    OverloadedError,
    SliceMissingError,
    StoreUnavailableError,
    UnavailableError,
)
from counter.limits import MINUTE, SECOND
from counter.storage.dynamodb.layout import COUNTS, HEAD, ROW, checkpoint_from, partition, row_from
from counter.storage.dynamodb.store import DynamodbStore
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SETTINGS,
    SLICE,
    add,
    atomic,
    make_namespace,
    make_slices,
    tail,
)
from counter.testing.clock import FakeClock
from counter.types import (
    Checkpoint,
    CounterUpdate,
    Decision,
    Mark,
    Namespace,
    Outcome,
    Pending,
    Reservation,
    Span,
    WindowRow,
    Written,
)
from counter.windows import settling_time
from tests.simulation.dynamodb_expressions import of_type
from tests.simulation.dynamodb_server import Done, Server, error_of
from tests.simulation.dynamodb_store import CalmStore, options_for
from tests.simulation.weather import UNMET, Met, Weather

_T = TypeVar("_T")
LATE_US = 9 * SECOND
EVENTS = "counter_default.events_"


class Lab:
    """A server, and the requests that the test has not delivered yet."""

    def __init__(self, seed: int = 1) -> None:
        self.clock = FakeClock(NOW)
        self.held: list[Callable[[], object]] = []
        self.server = Server(self._at, self.clock.now_us, Weather(Random(seed), delay_us=0))

    def _at(self, delay_us: int, call: Callable[..., object], *args: Any) -> None:
        if delay_us >= SECOND:
            self.held.append(partial(call, *args))
        else:
            asyncio.get_running_loop().call_soon(call, *args)

    async def store(self) -> CalmStore:
        """Return another process's store."""
        made = CalmStore(DATASET, self.clock, self.server)
        await made.open()
        await make_slices(made)
        return made

    async def outcome(self, call: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a call that times out if nothing else happens."""
        task = asyncio.get_running_loop().create_task(call)
        for _ in range(100):
            await asyncio.sleep(0)
        if not task.done():
            # The time-out is the first of the pending events.
            self.held.pop(0)()
        return await task

    async def land(self) -> None:
        """Have everything arrive that is on its way."""
        while self.held:
            self.held.pop(0)()
        for _ in range(10):
            await asyncio.sleep(0)

    def note(self, wanted: str) -> list[Mapping[str, Any]]:
        """Return the list to which requests of an operation are added from now on."""
        execute, found = self.server.execute, list[Mapping[str, Any]]()

        def noted(operation: str, request: Mapping[str, Any], done: Done) -> None:
            if operation == wanted:
                found.append(request)
            execute(operation, request, done)

        setattr(self.server, "execute", noted)  # noqa: B010
        return found

    def after_each_write(self, look: Callable[[], object]) -> None:
        """Call *look* after each write of an item, also within a transaction."""
        for table in self.server.tables.values():
            setattr(table, "put", partial(_looked_at, table.put, look))  # noqa: B010


def _looked_at(put: Callable[..., None], look: Callable[[], object], *args: Any) -> None:
    put(*args)
    look()


@pytest.fixture
def lab() -> Lab:
    return Lab()


def meet(store: CalmStore, table: str, met: Met, nth: int = 1) -> None:
    """Have the *nth* request of *store* from now on on a table meet something."""
    left = [UNMET] * (nth - 1) + [met]

    def next_of(name: str, _: bool) -> Met:
        return left.pop(0) if left and name.startswith(table) else UNMET

    store.simulated.meet = next_of


async def appended(store: CalmStore, namespace: Namespace) -> Written | UnavailableError:
    """Return the outcome of one add, always the same."""
    [outcome] = await store.events.append(namespace, [add()])
    return outcome


async def test_every_read_sees_written_data(lab: Lab) -> None:
    """No replica is asked that may be behind, for an item, for several, or for a partition."""
    store = await lab.store()
    namespace, decision = await make_namespace(store), Decision(Outcome.VOID, b"")
    assert await appended(store, namespace) is Written.NEW
    assert list(await store.events.find(namespace, [add()])) == [add()]
    assert await tail(store, namespace) == (False, 1)
    await store.decisions.decide(namespace, [add()], decision)
    assert await store.decisions.decided(namespace, [add()]) == decision


async def test_an_add_without_a_response_is_unknown_until_it_is_resolved(lab: Lab) -> None:
    """The driver does not report its own write as a replay."""
    store = await lab.store()
    namespace = await make_namespace(store)
    meet(store, EVENTS, Met(loses=True))
    assert isinstance(await lab.outcome(appended(store, namespace)), StoreUnavailableError)
    assert await appended(store, namespace) is Written.REPLAYED


async def test_an_add_that_lands_after_it_was_made_void_does_not_count(lab: Lab) -> None:
    store = await lab.store()
    namespace = await make_namespace(store)
    meet(store, EVENTS, Met(hold_us=LATE_US))
    assert isinstance(await lab.outcome(appended(store, namespace)), StoreUnavailableError)
    await store.separate_writes.void(namespace, [add()])
    await lab.land()
    assert await tail(store, namespace) == (False, 0)
    assert await appended(store, namespace) is Written.LATE


async def test_a_creation_that_lands_after_a_deletion_makes_no_namespace(lab: Lab) -> None:
    """Its item is still there, and refuses it."""
    store, other = await lab.store(), await lab.store()
    # The first one looks whether it exists.
    meet(store, "counter.namespaces", Met(hold_us=LATE_US), nth=2)
    with pytest.raises(StoreUnavailableError):
        await lab.outcome(store.control.create_namespace("tests", SETTINGS, NOW))
    namespace = await make_namespace(other)
    assert await other.control.delete_namespace(namespace)
    await lab.land()
    assert await other.control.namespaces() == []


@pytest.mark.parametrize("kind", ["add", "atomic add"])
async def test_a_throttled_add_is_refused_and_not_written(lab: Lab, kind: str) -> None:
    store = await lab.store()
    namespace, events = await make_namespace(store), atomic(("c", 1), ("d", 2))
    lab.server.writes_max = 0
    if kind == "add":
        assert isinstance(await appended(store, namespace), OverloadedError)
    else:
        with pytest.raises(OverloadedError):
            await store.events.append_atomic(namespace, events)
    lab.server.calm()
    assert await tail(store, namespace) == (False, 0)
    assert await appended(store, namespace) is Written.NEW


async def test_a_recount_is_pending_until_its_result_is_seen() -> None:
    """A query that meets a transaction may see a part of its writes."""
    for seed in range(16):
        lab, answers = Lab(seed), list[Mapping[str, Any]]()
        store = await lab.store()
        namespace, pending = await make_namespace(store), Pending(NOW - MINUTE, NOW)
        await store.recounts.write_pending(namespace, [("c", pending)])
        queries = lab.note("query")
        await store.rollups.heads(namespace, ["c"])
        lab.server.page, lab.server.weather.delay_us = 100, 1
        lab.after_each_write(partial(lab.server.execute, "query", queries[0], answers.append))
        update = CounterUpdate("c", (), Checkpoint(NOW, 7), pending_done=(pending,))
        await store.rollups.apply(namespace, [update], through_us=NOW)
        assert all(answer["Items"] for answer in answers), f"seed {seed}"


async def test_a_checkpoint_is_the_sum_of_its_rows_at_each_moment(lab: Lab) -> None:
    """Another worker may read a counter between any two writes of a rollup, or after a crash."""
    store = await lab.store()
    namespace, sums = await make_namespace(store), list[tuple[int, int]]()
    data = next(table for name, table in lab.server.tables.items() if name.endswith(".data"))
    counter = data.partition(partition(namespace, COUNTS, "c"))

    def look() -> None:
        items = [{each: of_type(cell)[1] for each, cell in item.items()}
                 for item in counter.items.values()]  # fmt: skip
        head = next((item for item in items if item["sk"] == HEAD), {})
        last, settled = checkpoint_from(head, "c"), checkpoint_from(head, "s")
        rows = [row_from(item) for item in items if item["sk"].startswith(ROW)]
        kept = [each.total for each in rows if settled.time_us < each.window_us <= last.time_us]
        sums.append((settled.count + sum(kept), last.count))

    lab.after_each_write(look)
    rows = [WindowRow(NOW + at * MINUTE, False, 10**at) for at in range(5)]
    first = CounterUpdate("c", tuple(rows[:3]), Checkpoint(rows[2].window_us, 111))
    settled = Checkpoint(rows[1].window_us, 11)
    last = CounterUpdate("c", tuple(rows[3:]), Checkpoint(rows[4].window_us, 11_111), settled)
    for each in (first, last):
        await store.rollups.apply(namespace, [each], through_us=each.checkpoint.time_us)
    assert {counted for _, counted in sums} == {0, 111, 11_111}
    assert [pair for pair in sums if pair[0] != pair[1]] == []
    assert len(counter.items) == 4


@pytest.mark.parametrize("seed", range(4))
async def test_a_change_that_a_proxy_sends_twice_is_made(seed: int) -> None:
    """Whichever of the two is answered: the second one finds the write of the first."""
    lab = Lab(seed)
    store = await lab.store()
    namespace = await make_namespace(store)
    weather, key = lab.server.weather, ApiKey("k", "", bytes(32), ("*",), Scope.READ, NOW)
    weather.repeated, weather.hint_us = 1.0, 1
    assert await store.control.update_namespace(namespace, namespace.changed(SETTINGS, NOW))
    assert await store.keys.create_api_key(key)
    changed = replace(key, label="another")
    assert await store.keys.change_api_key(key, changed)
    assert await store.keys.forget_api_key(changed)
    assert await appended(store, namespace) is Written.NEW
    for outcome, cancelled in (
        (None, Outcome.CANCELLED_VOID),
        (Outcome.APPLIED, Outcome.CANCELLED),
        (Outcome.VOID, Outcome.CANCELLED_VOID),
    ):
        token, never = [add(outcome or "new")], Decision(Outcome.CANCELLED_VOID, b"")
        if outcome is not None:
            await store.decisions.decide(namespace, token, Decision(outcome, b""))
        assert await store.decisions.cancel(namespace, token, never) == (cancelled, b"")


async def test_an_add_whose_item_a_transaction_holds_is_refused_and_not_written(lab: Lab) -> None:
    store = await lab.store()
    namespace = await make_namespace(store)
    [(table, key)] = await store.events._places(namespace, [add()])
    lab.server._held.add((table, key))
    with patch("counter.storage.dynamodb.driver._PAUSE_S", 0):
        assert isinstance(await appended(store, namespace), OverloadedError)
    lab.server._held.clear()
    assert await appended(store, namespace) is Written.NEW


async def test_a_write_gives_up_after_the_write_timeout(lab: Lab) -> None:
    store = await lab.store()
    namespace, given_up_us = await make_namespace(store), list[int | None]()
    call = store.simulated._call

    async def noted(operation: str, timeout_us: int | None = None, **request: Any) -> Any:
        if operation != "query":
            given_up_us.append(timeout_us)
        return await call(operation, timeout_us, **request)

    with patch.object(store.simulated, "_call", noted):
        await appended(store, namespace)
        await store.events.append_atomic(namespace, atomic(("c", 1), ("d", 2)))
        await store.separate_writes.mark(namespace, [Mark(NOW, "c")])
        await store.separate_writes.unlist(namespace, "c", NOW)
        await store.decisions.decide(namespace, [add()], Decision(Outcome.VOID, b""))
        await store.decisions.cancel(namespace, [add()], Decision(Outcome.CANCELLED, b""))
        await store.decisions.reserve(namespace, b"n", Reservation(NOW, NOW + MINUTE))
        await store.decisions.reserve(
            namespace, b"n", Reservation(NOW + 1, NOW + MINUTE, replaces_us=NOW)
        )
    assert given_up_us == [namespace.dataset.write_timeout_us] * 10


async def test_a_store_is_closed_when_its_marks_are_written(lab: Lab) -> None:
    store = await lab.store()
    namespace = await make_namespace(store)
    meet(store, "counter_default.dirty", Met(hold_us=LATE_US))
    marking = asyncio.ensure_future(store.separate_writes.mark(namespace, [Mark(NOW, "c")]))
    for _ in range(20):
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(store.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    # Other requests that it waits for can still be sent.
    await store.ping()
    # Before its time-out, which is behind it.
    lab.held.pop()()
    await closing
    assert await marking == {}
    with pytest.raises(StoreUnavailableError, match="not connected"):
        await store.ping()


async def test_no_request_begins_while_the_connections_are_closed(lab: Lab) -> None:
    store, refused = await lab.store(), list[bool]()

    async def ask() -> None:
        with pytest.raises(StoreUnavailableError, match="not connected"):
            await store.ping()
        refused.append(True)

    store.simulated._open.push_async_callback(ask)
    await store.close()
    assert refused == [True]


@pytest.mark.parametrize("numbers", ["tokens", "namespace ids", "dataset ids"])
async def test_a_new_life_issues_no_number_again(lab: Lab, numbers: str) -> None:
    store = await lab.store()
    meet(store, f"counter.{numbers}", Met(loses=True))
    with pytest.raises(StoreUnavailableError):
        await lab.outcome(store.control.begin_new_life(NOW))


async def test_a_store_that_does_not_know_its_slices_is_not_open(lab: Lab) -> None:
    await lab.store()
    other = CalmStore(DATASET, lab.clock, lab.server)
    meet(other, "counter.slices", Met(loses=True))
    with pytest.raises(StoreUnavailableError):
        await lab.outcome(other.open())


async def test_an_add_into_a_table_in_deletion_is_refused(lab: Lab) -> None:
    """DynamoDB still writes to it: the record of the slice says that it is dropped."""
    store, other = await lab.store(), await lab.store()
    namespace, late = await make_namespace(store), add(at=FIRST_SLICE)
    lab.clock.advance(FIRST_SLICE + SLICE + DATASET.retention_us + SECOND - NOW)
    execute = lab.server.execute

    def lingering(operation: str, request: Mapping[str, Any], done: Done) -> None:
        if operation == "delete_table":
            done({})
        else:
            execute(operation, request, done)

    with patch.object(lab.server, "execute", lingering):
        assert await other.control.drop_slice(DATASET, FIRST_SLICE)
        [outcome] = await store.events.append(namespace, [late])
    assert isinstance(outcome, SliceMissingError)


def test_a_store_has_a_driver_of_its_own() -> None:
    options = options_for()
    assert DynamodbStore(options, FakeClock(NOW)).driver.options is options


async def test_a_mark_that_fails_unexpectedly_is_answered(lab: Lab) -> None:
    store, failures = await lab.store(), list[Mapping[str, Any]]()
    namespace, mark = await make_namespace(store), Mark(NOW, "c")
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    with patch.object(store.simulated, "write_many", side_effect=ValueError("no such thing")):
        found = await store.separate_writes.mark(namespace, [mark])
    assert "unexpectedly" in found[mark].detail
    await asyncio.sleep(0)
    gc.collect()
    assert [str(each["exception"]) for each in failures] == ["no such thing"]


async def test_rows_that_are_settled_during_a_read_are_read_again(lab: Lab) -> None:
    """Some of them are deleted when the query comes to them."""
    store, other = await lab.store(), await lab.store()
    namespace = await make_namespace(store)
    rows = [WindowRow(NOW + at * MINUTE, False, 1) for at in range(4)]
    last = Checkpoint(rows[3].window_us, 4)
    update = CounterUpdate("c", tuple(rows), last)
    await store.rollups.apply(namespace, [update], through_us=last.time_us)
    settling = CounterUpdate("c", (), last, Checkpoint(rows[1].window_us, 2))
    query = store.simulated.query

    async def interrupted(*args: Any, **named: Any) -> Any:
        await other.rollups.apply(namespace, [settling], through_us=last.time_us)
        return await query(*args, **named)

    with (
        patch.object(store.simulated, "query", interrupted),
        patch.object(store.simulated, "get", wraps=store.simulated.get) as get,
    ):
        [found] = await store.rollups.rows(namespace, ["c"], Span.after(0, last.time_us))
    assert list(found) == rows[2:]
    assert get.await_count == 3


async def test_a_namespace_that_is_deleted_before_it_is_listed_takes_no_more(lab: Lab) -> None:
    store, other = await lab.store(), await lab.store()
    namespace = await make_namespace(store)
    assert await other.control.delete_namespace(namespace)
    assert await store.control.namespaces() == []
    with pytest.raises(NamespaceUnknownError):
        await appended(store, namespace)


async def test_a_schema_whose_expiry_is_not_set_is_not_applied(lab: Lab) -> None:
    execute = lab.server.execute

    def failing(operation: str, request: Mapping[str, Any], done: Done) -> None:
        if operation == "update_time_to_live":
            done(error_of(operation, "InternalServerError"))
        else:
            execute(operation, request, done)

    with patch.object(lab.server, "execute", failing), pytest.raises(StoreUnavailableError):
        await lab.store()


async def test_a_name_is_free_when_no_process_takes_adds_for_the_old_namespace(lab: Lab) -> None:
    """Neither for the process that deleted it, nor for one that has only just seen it."""
    store, other = await lab.store(), await lab.store()
    assert await store.control.delete_namespace(await make_namespace(store))
    for each in (store, other):
        with pytest.raises(UnavailableError, match="was deleted just now"):
            await each.control.create_namespace("tests", SETTINGS, NOW)
    lab.clock.advance(settling_time(DATASET))
    assert await other.control.create_namespace("tests", SETTINGS, NOW)
