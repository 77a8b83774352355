"""Group commit and the stream of single writes, over a commit and a driver in the test's hand."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import cassandra
import pytest

from counter.errors import WriteTimeoutError
from counter.limits import MILLISECOND, SECOND
from counter.metrics import Calls
from counter.storage.cassandra import CassandraOptions
from counter.storage.cassandra import connection as driver_connection
from counter.storage.cassandra.connection import Connection, Stream
from counter.storage.cassandra.gathering import Batch, Gatherer

_Batch = Batch[str, int, str]
_Put = Coroutine[Any, Any, list[str | BaseException | None]]


class Commits:
    """Batches as they were begun; the test ends them."""

    def __init__(self) -> None:
        self.begun: list[_Batch] = []

    def __call__(self, batches: Sequence[_Batch]) -> None:
        self.begun += batches

    @property
    def items(self) -> list[tuple[str, list[int]]]:
        return [(batch.key, batch.items) for batch in self.begun]

    def end_all(self) -> None:
        begun, self.begun = self.begun, []
        for batch in begun:
            batch.succeed([f"{batch.key}{item}" for item in batch.items])


@pytest.fixture
def commits() -> Commits:
    return Commits()


@pytest.fixture
def gatherer(commits: Commits) -> Gatherer[str, int, str]:
    return Gatherer(commits, rows_max=3, at_once=2)


async def begin(*puts: _Put) -> list[asyncio.Task[list[str | BaseException | None]]]:
    """All *puts* in one turn of the loop, and that turn over."""
    tasks = [asyncio.create_task(put) for put in puts]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_items_of_one_turn_travel_together(
    gatherer: Gatherer[str, int, str], commits: Commits
) -> None:
    """Those of one key, whoever puts them; each caller gets results for its own, in order."""
    one, two = await begin(
        gatherer.put([("a", 1), ("b", 2)]), gatherer.put([("b", 3), ("a", 4), ("c", 5)])
    )
    assert commits.items == [("a", [1, 4]), ("b", [2, 3]), ("c", [5])]
    commits.end_all()
    assert await one == ["a1", "b2"]
    assert await two == ["b3", "a4", "c5"]


async def test_what_comes_while_a_batch_is_under_way_gathers(
    gatherer: Gatherer[str, int, str], commits: Commits
) -> None:
    """It goes when that one is back, and other keys wait for nobody."""
    tasks = await begin(gatherer.put([("a", 1)]))
    tasks += await begin(gatherer.put([("a", 2)]))
    tasks += await begin(gatherer.put([("a", 3), ("b", 4)]))
    assert commits.items == [("a", [1]), ("b", [4])]
    assert gatherer.waiting == 2
    commits.end_all()
    await asyncio.sleep(0)
    assert commits.items == [("a", [2, 3])]
    assert gatherer.waiting == 0
    commits.end_all()
    assert [await task for task in tasks] == [["a1"], ["a2"], ["a3", "b4"]]


async def test_a_full_batch_does_not_wait(
    gatherer: Gatherer[str, int, str], commits: Commits
) -> None:
    """Up to so many are under way at once; none is larger than it may be."""
    tasks = await begin(gatherer.put([("a", 1)]))
    tasks += await begin(gatherer.put([("a", n) for n in range(2, 10)]))
    assert commits.items == [("a", [1]), ("a", [2, 3, 4])]
    commits.begun.pop(0).end(None)
    await asyncio.sleep(0)
    assert commits.items == [("a", [2, 3, 4]), ("a", [5, 6, 7])]
    commits.end_all()
    await asyncio.sleep(0)
    assert commits.items == [("a", [8, 9])]
    commits.end_all()
    assert await tasks[0] == [None]
    assert await tasks[1] == [f"a{n}" for n in range(2, 10)]


async def test_a_failure_concerns_its_own_batch(
    gatherer: Gatherer[str, int, str], commits: Commits
) -> None:
    """Its items have the error in place of a result, all others what they came to."""
    (task,) = await begin(gatherer.put([("a", 1), ("b", 2), ("a", 3)]))
    error = WriteTimeoutError("late")
    commits.begun[0].end(error)
    commits.begun[1].succeed(["done"])
    assert await task == [error, "done", error]


async def test_a_caller_that_gives_up_leaves_its_items(
    gatherer: Gatherer[str, int, str], commits: Commits
) -> None:
    """They are committed with the others', who get their results."""
    one, two = await begin(gatherer.put([("a", 1)]), gatherer.put([("a", 2)]))
    one.cancel()
    await asyncio.sleep(0)
    commits.end_all()
    assert await two == ["a2"]
    assert one.cancelled()


async def test_nothing_to_put_is_put_at_once(
    gatherer: Gatherer[str, int, str], commits: Commits
) -> None:
    assert await gatherer.put([]) == []
    assert commits.begun == []


class Response:
    """The driver's, as far as the stream knows it."""

    def __init__(self) -> None:
        self.succeed: Callable[[], None] = lambda: None
        self.fail: Callable[[BaseException], None] = lambda error: None
        # What the driver's own holds, and lets go of when it was answered.
        self._timer: Any = None
        self._callbacks: list[Any] = []
        self._errbacks: list[Any] = []

    def add_callbacks(
        self,
        callback: Callable[..., None],
        errback: Callable[..., None],
        callback_args: tuple[Any, ...],
        errback_args: tuple[Any, ...],
    ) -> None:
        self.succeed = lambda: callback(None, *callback_args)
        self.fail = lambda error: errback(error, *errback_args)


class Driver:
    """Statements as they were sent, each with its response."""

    def __init__(self) -> None:
        self.sent: dict[str, Response] = {}

    def send(self, statement: str, timeout_us: int | None) -> Response:
        if statement == "bad":
            raise cassandra.InvalidRequest("it is bad")
        return self.sent.setdefault(statement, Response())


async def test_each_write_has_its_own_end() -> None:
    """Told once, in the loop, in whatever order they end; errors are the service's own."""
    driver, ends = Driver(), dict[str, BaseException | None]()
    writes = Stream(driver.send)
    for name in ("slow", "quick", "failing", "bad"):
        writes.send(name, 5, lambda error, name=name: ends.update({name: error}))  # type: ignore[misc]
    assert ends == {}
    await asyncio.to_thread(driver.sent["quick"].succeed)
    await asyncio.to_thread(driver.sent["failing"].fail, cassandra.OperationTimedOut())
    await asyncio.sleep(0)
    assert set(ends) == {"quick", "failing", "bad"}
    assert ends["quick"] is None
    assert isinstance(ends["failing"], WriteTimeoutError)
    driver.sent["slow"].succeed()
    await asyncio.sleep(0)
    assert ends["slow"] is None


async def test_a_write_that_is_answered_twice_ends_once() -> None:
    """By the node that was asked first, and by the one that was asked when the first was slow."""
    driver, ends = Driver(), list[BaseException | None]()
    Stream(driver.send).send("a", None, ends.append)
    driver.sent["a"].fail(cassandra.OperationTimedOut())
    driver.sent["a"].succeed()
    await asyncio.sleep(0)
    driver.sent["a"].succeed()
    await asyncio.sleep(0)
    assert [type(end) for end in ends] == [WriteTimeoutError]


async def test_writes_and_those_that_failed_are_tallied() -> None:
    driver, calls = Driver(), Calls()
    writes = Stream(driver.send, calls)
    for name in ("good", "failing", "bad"):
        writes.send(name, None, lambda _: None)
    driver.sent["good"].succeed()
    driver.sent["failing"].fail(cassandra.OperationTimedOut())
    await asyncio.sleep(0)
    assert (sum(calls.seconds.counts), calls.errors) == (3, 2)


async def test_no_more_are_under_way_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait, and go in order as room is made."""
    monkeypatch.setattr(driver_connection, "STREAM_IN_FLIGHT_MAX", 2)
    driver, ends = Driver(), list[BaseException | None]()
    writes = Stream(driver.send)
    for name in "abcd":
        writes.send(name, None, ends.append)
    assert list(driver.sent) == ["a", "b"]
    driver.sent["b"].succeed()
    await asyncio.sleep(0)
    assert list(driver.sent) == ["a", "b", "c"]
    driver.sent["a"].succeed()
    driver.sent["c"].succeed()
    await asyncio.sleep(0)
    assert list(driver.sent) == ["a", "b", "c", "d"]
    assert len(ends) == 3


class Closing:
    """A connection without a cluster that has one write under way, and is being closed."""

    def __init__(self, read_timeout_us: int) -> None:
        self.driver, self.ends = Driver(), list[BaseException | None]()
        options = CassandraOptions([("nobody", 1)], read_timeout_us=read_timeout_us)
        self.connection = connection = Connection(options)
        connection._cluster = SimpleNamespace(shutdown=lambda: self.ends.append(EOFError()))
        connection._execute = lambda _, statement, *__: self.driver.send(statement, None)  # type: ignore[method-assign]
        connection.stream.send("a", None, self.ends.append)
        self.task = asyncio.create_task(connection.close())


async def test_who_closes_waits_for_what_is_under_way() -> None:
    """Its end is told, and the driver is let go of only then."""
    closing = Closing(60 * SECOND)
    await asyncio.sleep(0)
    assert closing.ends == []
    closing.driver.sent["a"].succeed()
    await closing.task
    assert [type(end) for end in closing.ends] == [type(None), EOFError]


async def test_who_closes_does_not_wait_for_ever() -> None:
    """A node may never answer."""
    closing = Closing(MILLISECOND)
    await closing.task
    assert [type(end) for end in closing.ends] == [EOFError]
