"""Sessions of a real PostgreSQL server that stop between any two statements of its functions.

One goes on at a time, until it stops, ends or waits for a lock; meanwhile the caller waits. Calls
are allowed while another loop runs.
"""

import asyncio
import re
from asyncio import events
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar
from unittest.mock import patch

import asyncpg

from counter.storage.postgresql import schema
from counter.storage.postgresql.database import PostgresqlOptions
from counter.testing.clock import FakeClock
from counter.types import Dataset
from tests.support.postgresql import FreshStore
from tests.support.times import START_US

T = TypeVar("T")
#: How long a session may go on before somebody looks whether it waits for a lock.
_LOOK_S: Final = 0.01
#: After that a run is taken for one that never ends.
_PATIENCE_S: Final = 20.0
#: Where a session stops: at the numbers that the caller holds the lock of.
_TURN: Final = """
CREATE FUNCTION turn() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    stops text := current_setting('turns.stops', true);
    number integer;
BEGIN
    IF stops IS NULL OR stops = '' THEN
        RETURN;
    END IF;
    number := current_setting('turns.number')::integer + 1;
    PERFORM set_config('turns.number', number::text, true);
    IF stops LIKE '%,' || number || ',%' THEN
        RAISE NOTICE 'turn %', number;
        PERFORM pg_advisory_xact_lock_shared(
            current_setting('turns.session')::integer, number);
    END IF;
END $$;
"""
_BEGINS: Final = re.compile(r" +(PERFORM|SELECT|INSERT|DELETE|UPDATE|EXECUTE|RETURN|\w+ :=)")
#: Whether $1 waits for a lock that is not the caller's, and whether it waits for itself.
_WAITS: Final = """
WITH RECURSIVE ahead (pid) AS (
    SELECT unnest(pg_blocking_pids($1)) UNION SELECT unnest(pg_blocking_pids(pid)) FROM ahead
) SELECT coalesce(bool_or(pid <> pg_backend_pid()), false), coalesce(bool_or(pid = $1), false)
FROM ahead
"""


def with_turns(text: str) -> str:
    """Return functions that may stop before each of their statements."""
    lines: list[str] = []
    is_inside = may_begin = False
    for line in text.splitlines():
        if is_inside and may_begin and _BEGINS.match(line):
            lines.append("PERFORM turn();")
        lines.append(line)
        if line == "BEGIN":
            is_inside = may_begin = True
        elif line.startswith("END $$"):
            is_inside = False
        elif not line.strip().startswith("--"):
            may_begin = line.endswith((";", "THEN", "ELSE"))
    return "\n".join(lines)


class Backend:
    """One session."""

    def __init__(self, server: "Server", connection: asyncpg.Connection, number: int) -> None:
        self._server = server
        self._connection = connection
        self._number = number
        self._turns: asyncio.Queue[None] = asyncio.Queue()
        self._closed = asyncio.Event()
        self._held: list[int] = []
        self._running: asyncio.Task[Any] | None = None
        self._in_transaction = False
        #: Whether it waits for a lock.
        self.waits = False
        #: The result or the error of its statement.
        self.ended = False
        self.rows: Sequence[Any] = ()
        self.error: Exception | None = None
        connection.add_log_listener(self._heard)
        connection.add_termination_listener(lambda _: self._closed.set())

    @property
    def is_closed(self) -> bool:
        """Whether the session is over."""
        return self._closed.is_set()

    @property
    def holds_transaction(self) -> bool:
        """Whether its statement has ended, and its transaction has not."""
        return self.ended and self._in_transaction and self.error is None

    async def begin(
        self, sql: str, arguments: Sequence[Any], stops: Sequence[int], holds_commit: bool
    ) -> None:
        """Run *sql* to the first of *stops*, numbers of turns; its transaction may stay open."""
        self.rows, self.error, self.ended = (), None, False
        self._held = sorted(stops)
        self._in_transaction = holds_commit or bool(stops)
        for each in self._held:
            await self._server.control.fetch(f"SELECT pg_advisory_lock({self._number}, {each})")
        try:
            if self._in_transaction:
                given = f",{','.join(map(str, self._held))}," if stops else ""
                await self._connection.execute(
                    f"BEGIN; SET LOCAL turns.stops = '{given}'; SET LOCAL turns.number = 0;"
                    f" SET LOCAL turns.session = {self._number}"
                )
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            self.error = error
            await self._end()
            return
        # An earlier statement may have been canceled at its stop.
        self._turns = asyncio.Queue()
        self._running = asyncio.create_task(self._connection.fetch(sql, *arguments))
        await self._go_on(bounded="drop_slice" in sql)

    async def go(self) -> None:
        """Continue from its stop."""
        await self._let_go(self._held.pop(0))
        await self._go_on()

    async def look(self) -> None:
        """See whether it goes on, if it waited for a lock."""
        if self.waits:
            await self._go_on()

    async def commit(self) -> None:
        """Commit. The outcome may become an error."""
        self._in_transaction = False
        try:
            await self._connection.execute("COMMIT")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            self.error = error

    async def kill(self) -> None:
        """Have the server terminate the session, whatever it does."""
        await self._server.control.fetch(
            "SELECT pg_terminate_backend($1, 10000)", self._connection.get_server_pid()
        )
        await self._closed.wait()
        if self._running is not None:
            await self._go_on()
        elif self.holds_transaction:
            self.error = asyncpg.ConnectionDoesNotExistError("the session was terminated")

    async def cancel(self) -> None:
        """Let the server cancel the statement, or roll it back."""
        if self._running is None:
            await self._undo()
            return
        pid = self._connection.get_server_pid()
        await self._server.control.fetch("SELECT pg_cancel_backend($1)", pid)
        await asyncio.wait((self._running,))
        await self._go_on()

    async def close(self) -> None:
        """Leave."""
        if not self.is_closed:
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._connection.close(timeout=_PATIENCE_S)

    def _heard(self, _: object, message: asyncpg.PostgresLogMessage) -> None:
        """Note the stop; stops undone by an exception in a function are met again."""
        if int(message.message.removeprefix("turn ")) in self._held:
            self._turns.put_nowait(None)

    async def _go_on(self, *, bounded: bool = False) -> None:
        """Wait until it stops, ends or waits for a lock, which with *bounded* the server ends."""
        if self._running is None:
            raise RuntimeError("the session runs no statement")
        while True:
            turn = asyncio.create_task(self._turns.get())
            ends = (self._running, turn)
            done, _ = await asyncio.wait(ends, timeout=_LOOK_S, return_when="FIRST_COMPLETED")
            turn.cancel()
            if self._running in done:
                await self._take()
                return
            if turn in done:
                self.waits = False
                return
            pid = self._connection.get_server_pid()
            waits, for_itself = await self._server.control.fetchrow(_WAITS, pid)
            if waits and not for_itself and not bounded:
                self.waits = True
                return

    async def _take(self) -> None:
        """Note the outcome of the statement."""
        running, self._running = self._running, None
        if running is None:
            raise RuntimeError("the session runs no statement")
        try:
            self.rows = running.result()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            self.error = error
            await self._undo()
        await self._end()

    async def _undo(self) -> None:
        if self._in_transaction and not self.is_closed:
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._connection.execute("ROLLBACK")
        self._in_transaction = False
        self.error = self.error or asyncpg.QueryCanceledError("canceled before it committed")

    async def _end(self) -> None:
        self.waits, self.ended = False, True
        while self._held:
            await self._let_go(self._held.pop())

    async def _let_go(self, turn: int) -> None:
        await self._server.control.fetch(f"SELECT pg_advisory_unlock({self._number}, {turn})")


class Server:
    """A schema on a server with functions that have turns, and a set clock."""

    control: asyncpg.Connection
    #: Waits for no lock of a table.
    reader: asyncpg.Connection

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn, self.name = dsn, name
        self._loop = asyncio.SelectorEventLoop()
        self._spare: list[Backend] = []
        self._made = 0
        self._clock_us = -1
        self.do(self._open())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of *work*; no other loop runs during it."""
        outer = events._get_running_loop()
        events._set_running_loop(None)
        try:
            return self._loop.run_until_complete(asyncio.wait_for(work, _PATIENCE_S))
        finally:
            events._set_running_loop(outer)

    def fresh(self, dataset: Dataset) -> None:
        """Empty the tables."""
        self.do(self._restart_ids())
        self.do(self._apply(dataset, keeps=True))
        self._clock_us = -1

    def backend(self) -> Backend:
        """Return a session that is idle."""
        while self._spare:
            backend = self._spare.pop()
            if not backend.is_closed:
                return backend
        return self.do(self._connect())

    def give_back(self, backend: Backend) -> None:
        """Keep *backend*, which is idle or closed, for the next session."""
        self._spare.append(backend)

    async def set_clock(self, us: int) -> None:
        if us != self._clock_us:
            self._clock_us = us
            await self.control.execute(f"UPDATE {self.name}.test_clock SET us = {us}")

    def close(self) -> None:
        """End all sessions."""
        for each in self._spare:
            self.do(each.close())
        self.do(self.control.close())
        self.do(self.reader.close())
        self._loop.close()

    async def _open(self) -> None:
        settings = {"synchronous_commit": "off"}
        self.control = await asyncpg.connect(self._dsn, server_settings=settings)
        self.reader = await asyncpg.connect(self._dsn, server_settings={"lock_timeout": "5ms"})

    async def _restart_ids(self) -> None:
        """Use the ids of a new schema: the distribution of work depends on them."""
        for each in ("namespaces", "datasets"):
            await self.control.execute(f"ALTER TABLE {self.name}.{each} ALTER id RESTART")

    async def _connect(self) -> Backend:
        self._made += 1
        settings = {"deadlock_timeout": "5ms", "synchronous_commit": "off"}
        connection = await asyncpg.connect(self._dsn, server_settings=settings)
        return Backend(self, connection, self._made)

    async def _apply(self, dataset: Dataset, *, keeps: bool) -> None:
        """Apply the schema with turns; *keeps* the tables without their rows."""
        plain = schema._sql

        def turned(name: str) -> str:
            text = plain(name)
            if name == "holds.sql":
                return with_turns(text)
            if name != "functions.sql":
                return text
            return _TURN + with_turns(text.replace("'50ms'", "'5ms'"))

        options = PostgresqlOptions(self._dsn, schema=self.name)
        store = FreshStore(options, FakeClock(START_US), [dataset], keeps_schema=keeps)
        with patch.object(schema, "_sql", turned):
            await store.open()
        await store.close()

    def make(self, dataset: Dataset) -> None:
        """Make the schema again."""
        self.do(self._apply(dataset, keeps=False))
        self.do(self.control.execute(f"ALTER TABLE {self.name}.test_clock SET UNLOGGED"))
