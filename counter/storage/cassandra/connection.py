"""One connection to the cluster: statements go out together and come back together.

Everything else in this package speaks in bound statements and rows; the driver's sessions, threads
and exceptions end here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import cassandra
from cassandra.cluster import EXEC_PROFILE_DEFAULT, ResponseFuture, Session
from cassandra.pool import Host
from cassandra.query import BatchStatement, PreparedStatement, SimpleStatement

from counter import limits
from counter.background import retrieve
from counter.errors import (
    OverloadedError,
    StartupError,
    StoreUnavailableError,
    UnavailableError,
    invariant,
)
from counter.limits import SECOND
from counter.metrics import Calls, StoreTally
from counter.storage.cassandra import driver
from counter.storage.cassandra.driver import is_outcome_unknown, translated
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.shared.bridge import Bridge

#: Sends a statement, from the page that the paging state names.
Send = Callable[[Any, bytes | None], ResponseFuture]
#: Called with the rows of a statement, None if there are none, or with its error.
Done = Callable[[Any], None]

_DONE: Final = -1


class Asked:
    """A statement that was sent, with all its pages; *done* is called once, in the event loop.

    It can be answered more than once: by the node that was asked first and by the one that was
    asked when the first was slow, or by a node when its time was already over. The first answer to
    each page counts.
    """

    __slots__ = ("_bridge", "_done", "_page", "_rows", "_send", "_statement")

    def __init__(self, bridge: Bridge, statement: Any, send: Send, done: Done) -> None:
        self._bridge = bridge
        self._statement = statement
        self._send = send
        self._done = done
        self._rows: Sequence[Any] | None = None
        self._ask(0, None)

    def _ask(self, page: int, paging_state: bytes | None) -> None:
        self._page = page
        try:
            response = self._send(self._statement, paging_state)
        except Exception as error:
            self._bridge.call(self._receive, page, error, None)
            return
        answered = (page, response)
        response.add_callbacks(
            self._succeed, self._fail, callback_args=answered, errback_args=answered
        )

    # Called by the driver's threads, or at once.

    def _succeed(self, rows: Sequence[Any] | None, page: int, response: ResponseFuture) -> None:
        # Each page is requested separately. The response would ask for the next one itself, but
        # then a late answer to this page would pass for an answer to that one.
        paging_state = response._paging_state
        let_go(response)
        self._bridge.call(self._receive, page, rows, paging_state)

    def _fail(self, error: BaseException, page: int, response: ResponseFuture) -> None:
        let_go(response)
        self._bridge.call(self._receive, page, error, None)

    # In the event loop again.

    def _receive(self, page: int, result: Any, paging_state: bytes | None) -> None:
        if page != self._page:
            return
        if isinstance(result, BaseException):
            self._page = _DONE
            self._done(result)
            return
        if result:
            self._rows = result if self._rows is None else [*self._rows, *result]
        if paging_state:
            self._ask(page + 1, paging_state)
        else:
            self._page = _DONE
            self._done(self._rows)


def let_go(response: ResponseFuture) -> None:
    """Break the reference cycles of an answered *response*, so that it is freed without the garbage
    collector: at thousands of statements a second, collecting is a good part of all work."""
    timer, response._timer = response._timer, None
    if timer is not None:
        # It stays in the driver's queue until its time, and does nothing there.
        timer.callback = _nothing
    response._callbacks.clear()
    response._errbacks.clear()


def _nothing() -> None:
    pass


async def gathered(
    bridge: Bridge, statements: Sequence[Any], send: Send, ended: Callable[[int], None]
) -> list[Any]:
    """Send all *statements*, and return the rows of each, or its error in their place. *ended* is
    called with their number when all are back: the caller may have been cancelled before."""
    results: list[Any] = [None] * len(statements)
    left = len(statements)
    future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def done(index: int, result: Any) -> None:
        nonlocal left
        results[index] = result
        left -= 1
        if not left:
            ended(len(results))
            if not future.done():
                future.set_result(results)

    for index, statement in enumerate(statements):
        Asked(bridge, statement, send, partial(done, index))
    return await future


_log = logging.getLogger("counter.cassandra")

#: Statements on their way at once; a connection of the driver carries 32,768.
IN_FLIGHT_MAX: Final = 1_024
#: A call's statements go out in groups of so many.
_GROUP: Final = 256
_DDL_TIMEOUT_S: Final = 60.0
_DDL_ATTEMPTS_MAX: Final = 3
_AGREEMENT_TIMEOUT_S: Final = 10.0
#: A statement is prepared by one node; where that one does not answer, by the next.
_PREPARE_ATTEMPTS_MAX: Final = 3
#: A compare-and-set of unknown outcome is settled and run again for as long as so many reads may
#: take, after a pause that is drawn up to this, which doubles: others contend for the same row.
_CAS_READS: Final = 2
_CAS_PAUSE_S: Final = 0.05
_CAS_PAUSE_MAX_S: Final = 1.0
#: How a SERIAL read that lost to others fails: a time-out of a read is StoreUnavailableError.
_CONTENDED: Final = (StoreUnavailableError, OverloadedError)

_NOW: Final = "SELECT now() FROM system.local"
#: 15 October 1582, where the time of a UUID begins, to 1970, in units of 100 ns.
_UUID_EPOCH: Final = 0x01B21DD213814000

_Row = tuple[Any, ...]


class CassandraConnection:
    """Runs statements; every exception of the driver leaves as the service's own."""

    def __init__(self, options: CassandraOptions) -> None:
        self._options = options
        #: A call is a statement, or statements that were sent together.
        self.tally = StoreTally(("write", "read", "compare_and_set"))
        #: Sends writes that end each on its own.
        self.stream = Stream(self._send_write, self.tally.calls["write"])
        self._preparing: dict[tuple[str, int], asyncio.Task[PreparedStatement]] = {}
        self._has_failed = False
        self._in_flight = 0
        self._empty = asyncio.Event()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def open(self) -> None:
        """Connect. Raises StartupError, saying what to do, or StoreUnavailableError where it may
        succeed another time."""
        driver.quieten()
        self._bridge = Bridge(asyncio.get_running_loop())
        try:
            self._cluster = driver.new_cluster(self._options)
        except (OSError, cassandra.DriverException) as error:
            # No node was asked yet: the settings are wrong, so another try would not help.
            raise StartupError(str(driver.cannot_connect(self._options, error))) from error
        try:
            with driver.tried_again(self._has_failed):
                self._session: Session = await asyncio.to_thread(self._cluster.connect)
            driver.check_datacenters(self._cluster, self._options)
        except BaseException as error:
            self._has_failed = True
            await asyncio.to_thread(self._cluster.shutdown)
            if isinstance(error, StartupError) or not isinstance(error, Exception):
                raise
            # A data center that is not there has no node to connect to.
            driver.check_datacenters(self._cluster, self._options)
            raise driver.cannot_connect(self._options, error) from error
        # Every write says its own timestamp.
        self._session.use_client_timestamp = False
        # How long a node may take to prepare a statement; the driver has no other way to say it.
        self._session._default_timeout = self._options.read_timeout_us / SECOND

    async def close(self) -> None:
        """Wait for what was sent, and let go of every connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(2 * self._options.read_timeout_us / SECOND):
                await self.stream.wait_until_ended()
                while self._in_flight:
                    self._empty.clear()
                    await self._empty.wait()
        await asyncio.to_thread(self._cluster.shutdown)

    async def prepare(self, cql: str, consistency: int, *, idempotent: bool = True) -> Any:
        """Prepare *cql*; many who ask at once for the same get one. The caller keeps it.

        Statements are idempotent unless they compare: each carries its own write timestamp.
        """
        key = (cql, consistency)
        preparing = self._preparing.get(key)
        if preparing is None:
            preparing = asyncio.create_task(self._prepare(cql, consistency, idempotent))
            preparing.add_done_callback(partial(self._prepared, key))
            self._preparing[key] = preparing
        return await asyncio.shield(preparing)

    def _prepared(self, key: tuple[str, int], preparing: asyncio.Task[PreparedStatement]) -> None:
        del self._preparing[key]
        retrieve(preparing)

    async def _prepare(self, cql: str, consistency: int, idempotent: bool) -> PreparedStatement:
        for attempt in range(1, _PREPARE_ATTEMPTS_MAX + 1):
            try:
                made = await asyncio.to_thread(self._session.prepare, cql)
                break
            except cassandra.OperationTimedOut as error:
                if attempt == _PREPARE_ATTEMPTS_MAX:
                    raise translated(error, wrote=False) from error
            except Exception as error:
                raise translated(error, wrote=False) from error
        made.consistency_level = consistency
        made.serial_consistency_level = cassandra.ConsistencyLevel.SERIAL
        made.is_idempotent = idempotent
        return made

    async def run(self, statements: Sequence[Any], timeout_us: int | None = None) -> list[Any]:
        """Send all *statements* at once: the rows of each, or the error in their place."""
        if len(statements) <= _GROUP:
            return await self._send(statements, timeout_us)
        results: list[Any] = []
        groups = (statements[at : at + _GROUP] for at in range(0, len(statements), _GROUP))
        for part in await asyncio.gather(*(self._send(group, timeout_us) for group in groups)):
            results += part
        return results

    async def rows(self, statements: Sequence[Any], timeout_us: int | None = None) -> list[Any]:
        """The rows of each of *statements*; raises the first error."""
        results = await self.run(statements, timeout_us)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def one(self, statement: Any, timeout_us: int | None = None) -> Sequence[_Row]:
        """The rows of one statement."""
        (rows,) = await self.rows((statement,), timeout_us)
        return rows or ()

    async def settled(self, statements: Sequence[Any]) -> list[Any]:
        """The rows of each of *statements*, SERIAL reads; raises the first error that lasts.

        SERIAL operations on one row contend: those that fail by it time out. Each that failed is
        run again after a random pause, for as long as :meth:`compare_and_set` would try.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CAS_READS * self._options.read_timeout_us / SECOND
        pause_s = _CAS_PAUSE_S
        results = await self.run(statements)
        while failed := [at for at, each in enumerate(results) if isinstance(each, BaseException)]:
            for at in failed:
                if not isinstance(results[at], _CONTENDED) or loop.time() >= until_s:
                    raise results[at]
            await asyncio.sleep(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, _CAS_PAUSE_MAX_S)
            again = await self.run([statements[at] for at in failed])
            for at, result in zip(failed, again, strict=True):
                results[at] = result
        return results

    async def compare_and_set(
        self, statement: Any, settle: Callable[[], Awaitable[_Row | None]], mine: Any
    ) -> tuple[bool, _Row | None]:
        """Run a compare-and-set; whether it was applied, and the row that *settle* would show.

        *statement* writes *mine*, which no other statement writes, into the column that *settle*, a
        SERIAL read, has last. One that timed out may have been applied: the SERIAL read completes
        what is under way. If it does not show *mine*, the statement is run again;
        if the first one lands after all, either the second finds *mine* there, or the first finds
        its condition broken. So a state that was left must never come back.

        Retries, also after contended reads, for a few seconds. Callers with a shorter deadline use
        :func:`counter.storage.cassandra.driver.within`.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _CAS_READS * self._options.read_timeout_us / SECOND
        pause_s = _CAS_PAUSE_S
        while True:
            (result,) = await self._send((statement,), None, raw=True)
            failure: BaseException | None = None
            if isinstance(result, BaseException):
                failure = translated(result)
                if not is_outcome_unknown(result):
                    raise failure
            elif result[0][0]:
                return True, None
            try:
                row = await settle()
            except UnavailableError as error:
                # Running it again gives the same answer.
                failure = failure or error
            else:
                # Where it was refused too: the driver sends it to another node where the first
                # one's connection breaks.
                is_mine = row is not None and row[-1] == mine
                if is_mine or failure is None:
                    return is_mine, row
            if loop.time() >= until_s:
                raise failure
            await asyncio.sleep(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, _CAS_PAUSE_MAX_S)

    async def ddl(self, cql: str) -> None:
        """Run a schema statement, one that may be run twice, and wait until all nodes agree.

        Where another process is doing the same, this one's may have nothing to do and yet not be
        known to every node: so it waits in any case.
        """
        for attempt in range(1, _DDL_ATTEMPTS_MAX + 1):
            try:
                await asyncio.to_thread(self._session.execute, cql, timeout=_DDL_TIMEOUT_S)
                break
            except Exception as error:
                if attempt == _DDL_ATTEMPTS_MAX or not is_outcome_unknown(error):
                    raise translated(error) from error
        control = self._cluster.control_connection
        try:
            agreed = await asyncio.to_thread(
                control.wait_for_schema_agreement, wait_time=_AGREEMENT_TIMEOUT_S
            )
        except Exception as error:
            raise translated(error) from error
        if not agreed:
            _log.warning("after %d s the nodes do not agree on the schema", _AGREEMENT_TIMEOUT_S)

    async def simple(self, cql: str) -> Sequence[_Row]:
        """Run a read that is not worth preparing."""
        return await self.one(SimpleStatement(cql, is_idempotent=True))

    async def replication(self, keyspace: str) -> Mapping[str, str] | None:
        """How *keyspace* is replicated, as CQL says it; None if there is no such keyspace."""
        cql = f"SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '{keyspace}'"
        rows = await self.simple(cql)
        return rows[0][0] if rows else None

    def nodes_by_datacenter(self) -> Mapping[str, int]:
        """How many nodes each data center has, whether they are up or not."""
        return Counter(host.datacenter for host in self._cluster.metadata.all_hosts())

    @property
    def waiting(self) -> int:
        """How many statements wait for room."""
        return sum(count for count, _ in self._waiting) + self.stream.waiting

    def near_nodes(self) -> list[Host]:
        """The nodes that statements are sent to and that are up, in an order that stays."""
        pools = sorted(self._session.get_pools(), key=lambda pool: str(pool.host))
        return [pool.host for pool in pools if not pool.is_shutdown]

    async def ask(self, node: Host, cql: str) -> Sequence[_Row]:
        """The rows of a read that *node* itself answers, of what it alone knows."""
        send = partial(self._execute, None, host=node)
        (rows,) = await self._gather((SimpleStatement(cql, is_idempotent=True),), send)
        if isinstance(rows, BaseException):
            raise translated(rows, wrote=False) from rows
        return rows or ()

    async def clock_of(self, node: Host, now: Callable[[], int]) -> tuple[int, int, int]:
        """*now* before, the time that *node* gives, and *now* after, in microseconds. A node counts
        whole milliseconds."""
        # Called by the driver's thread when the answer is there: the event loop may be busy.
        profile = self._session.execution_profile_clone_update(
            EXEC_PROFILE_DEFAULT,
            row_factory=lambda _names, rows: [(rows[0][0], now())],
        )
        send = partial(self._execute, None, execution_profile=profile, host=node)
        before_us = now()
        (rows,) = await self._gather((SimpleStatement(_NOW),), send)
        if isinstance(rows, BaseException):
            raise translated(rows, wrote=False) from rows
        ((made, after_us),) = rows
        return before_us, (made.time - _UUID_EPOCH) // 10, after_us

    async def _send(
        self, statements: Sequence[Any], timeout_us: int | None, *, raw: bool = False
    ) -> list[Any]:
        """Send at once; results in order, errors translated unless *raw*."""
        if not statements:
            return []
        began_s = time.perf_counter()
        results = await self._gather(statements, partial(self._execute, timeout_us))
        took_s = time.perf_counter() - began_s
        failed = sum(isinstance(each, BaseException) for each in results)
        self.tally.calls[_operation(statements[0], raw=raw)].ended(took_s, failed)
        if not raw:
            for index, result in enumerate(results):
                if isinstance(result, BaseException):
                    results[index] = translated(result, wrote=_writes(statements[index]))
        return results

    async def _gather(self, statements: Sequence[Any], send: Send) -> list[Any]:
        count = len(statements)
        if self._waiting or self._in_flight + count > IN_FLIGHT_MAX:
            waiting = len(self._waiting)
            if waiting >= limits.STORE_CALLS_WAITING_MAX:
                detail = f"{waiting} calls wait for Cassandra, and no more may: send the same later"
                return [OverloadedError(detail, retry_after_us=SECOND)] * count
            await self._wait_for_room(count)
        else:
            self._in_flight += count
        return await gathered(self._bridge, statements, send, self._give_back)

    def _execute(
        self, timeout_us: int | None, statement: Any, paging_state: bytes | None, **more: Any
    ) -> ResponseFuture:
        timeout_s = (timeout_us or self._options.read_timeout_us) / SECOND
        execute = self._session.execute_async
        return execute(statement, timeout=timeout_s, paging_state=paging_state, **more)

    def _send_write(
        self, timeout_us: int | None, statement: Any, paging_state: bytes | None
    ) -> ResponseFuture:
        return self._execute(timeout_us, statement, paging_state)

    async def _wait_for_room(self, count: int) -> None:
        """Wait for room for *count* statements, in order of arrival, and take it."""
        invariant(count <= IN_FLIGHT_MAX, f"{count} statements at once never find room")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(count)
            raise

    def _give_back(self, count: int) -> None:
        self._in_flight -= count
        if not self._in_flight:
            self._empty.set()
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if self._in_flight + wanted > IN_FLIGHT_MAX:
                    return
                self._in_flight += wanted
                turn.set_result(None)
            self._waiting.popleft()


def _operation(statement: Any, *, raw: bool) -> str:
    """What the tally calls it."""
    if raw:
        return "compare_and_set"
    return "write" if _writes(statement) else "read"


def _writes(statement: Any) -> bool:
    """Whether *statement* is anything but a read."""
    if isinstance(statement, BatchStatement):
        return True
    prepared = getattr(statement, "prepared_statement", None)
    cql = statement.query_string if prepared is None else prepared.query_string
    return not cql.lstrip().upper().startswith("SELECT")


#: Statements on their way at once; the others wait, and may become fewer by gathering.
STREAM_IN_FLIGHT_MAX: Final = 1_024

#: Sends a statement, which may take so many microseconds, from a page on.
SendOne = Callable[[int | None, Any, bytes | None], ResponseFuture]
#: Called with None when a write is done, otherwise with its error.
Ended = Callable[[BaseException | None], None]


class Stream:
    """Sends statements, and reports the end of each in the event loop that sent it."""

    def __init__(self, send: SendOne, calls: Calls | None = None) -> None:
        """*calls* counts what was sent, and what of it failed."""
        self._send = send
        self._calls = calls or Calls()
        self._waiting: deque[tuple[Any, int | None, Ended]] = deque()
        self._in_flight = 0
        #: Of the loop that sends.
        self._bridge: Bridge | None = None
        #: Set when nothing is under way, if a task waits for that.
        self._all_ended: asyncio.Event | None = None

    def send(self, statement: Any, timeout_us: int | None, done: Ended) -> None:
        """Send *statement* as soon as there is room. *done* is called once, and never at once."""
        self._waiting.append((statement, timeout_us, done))
        self._send_waiting()

    @property
    def waiting(self) -> int:
        """How many statements wait for room."""
        return len(self._waiting)

    async def wait_until_ended(self) -> None:
        """Wait until all that was sent has ended, and its end is reported."""
        while self._waiting or self._in_flight:
            self._all_ended = self._all_ended or asyncio.Event()
            await self._all_ended.wait()

    def _send_waiting(self) -> None:
        bridge = self._bridge = self._bridge or Bridge(asyncio.get_running_loop())
        while self._waiting and self._in_flight < STREAM_IN_FLIGHT_MAX:
            statement, timeout_us, done = self._waiting.popleft()
            self._in_flight += 1
            ended = partial(self._ended, done, time.perf_counter())
            Asked(bridge, statement, partial(self._send, timeout_us), ended)

    def _ended(self, done: Ended, began_s: float, result: Any) -> None:
        error = result if isinstance(result, BaseException) else None
        self._in_flight -= 1
        self._calls.ended(time.perf_counter() - began_s, error is not None)
        done(None if error is None else translated(error))
        self._send_waiting()
        if self._all_ended is not None and not self._in_flight:
            self._all_ended.set()
            self._all_ended = None
