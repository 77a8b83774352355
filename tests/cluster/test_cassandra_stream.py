"""The stream of single writes, over a driver in the test's hand."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cassandra
import pytest

from counter.errors import WriteTimeoutError
from counter.limits import MILLISECOND, SECOND
from counter.metrics import Calls
from counter.storage.cassandra import connection as driver_connection
from counter.storage.cassandra.connection import CassandraConnection, Stream
from counter.storage.cassandra.options import CassandraOptions


class Response:
    """The driver's, as far as the stream knows it."""

    _paging_state = None

    def __init__(self) -> None:
        self.succeed: Callable[[], None] = lambda: None
        self.fail: Callable[[BaseException], None] = lambda error: None
        # Held by the driver's own response until it is answered.
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

    def send(self, timeout_us: int | None, statement: str, paging_state: bytes | None) -> Response:
        if statement == "bad":
            raise cassandra.InvalidRequest("it is bad")
        return self.sent.setdefault(statement, Response())


async def test_each_write_has_its_own_end() -> None:
    """Called once, in the loop, in any order; errors are the service's own."""
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


async def test_the_writes_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest waits, and goes in order as room is made."""
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
        options = CassandraOptions([("missing", 1)], read_timeout_us=read_timeout_us)
        self.connection = connection = CassandraConnection(options)
        connection._cluster = SimpleNamespace(shutdown=lambda: self.ends.append(EOFError()))
        connection._execute = self.driver.send  # type: ignore[assignment,method-assign]
        connection.stream.send("a", None, self.ends.append)
        self.task = asyncio.create_task(connection.close())


async def test_closing_waits_for_writes_in_flight() -> None:
    """Its callback runs, and the driver is released only then."""
    closing = Closing(60 * SECOND)
    await asyncio.sleep(0)
    assert closing.ends == []
    closing.driver.sent["a"].succeed()
    await closing.task
    assert [type(end) for end in closing.ends] == [type(None), EOFError]


async def test_closing_does_not_wait_for_ever() -> None:
    """A node may never answer."""
    closing = Closing(MILLISECOND)
    await closing.task
    assert [type(end) for end in closing.ends] == [EOFError]
