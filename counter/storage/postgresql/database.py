"""Connect to PostgreSQL, run statements, and convert its errors to the service's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import asyncpg

from counter.errors import (
    NamespaceUnknownError,
    SliceMissingError,
    StoreUnavailableError,
)
from counter.limits import MILLISECOND, SECOND
from counter.storage.postgresql.hosts import Hosts, refusal
from counter.storage.postgresql.session import NotPrimaryError, PooledConnection
from counter.storage.shared.write_deadline import write_within

if TYPE_CHECKING:
    from counter.storage.postgresql.settings import PostgresqlSettings

_log = logging.getLogger("counter.postgresql")
_T = TypeVar("_T")
#: Deadlocks and failed serializations: the server undid the statement, and it can be run again.
_ATTEMPTS_MAX: Final = 5
_UNDONE: Final = ("40P01", "40001")
#: The schema or a part of it is missing.
_NO_SCHEMA: Final = ("3F000", "42P01", "42883")
_NAMESPACE_DELETED: Final = "CN001"
_NO_PARTITION: Final = "23514"
#: The connection failed, or did not answer in time.
_BROKEN: Final = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
#: How long the server may take to confirm that a statement is cancelled and the connection is
#: reset. After that the connection is dropped.
_RELEASE_S: Final = 0.5
#: How long connections may take to end on shutdown, before they are dropped.
_CLOSE_S: Final = 1.0
_STATEMENTS_KEPT: Final = 100


@dataclass(frozen=True, slots=True)
class PostgresqlOptions:
    """Where the database is. *timeout_us* bounds each call: the wait for a connection, and the
    statement."""

    dsn: str = field(repr=False)
    schema: str = "counter"
    connections_max: int = 8
    timeout_us: int = 10 * SECOND


def postgresql_options(settings: PostgresqlSettings) -> PostgresqlOptions:
    """Return what *settings* say about PostgreSQL."""
    return PostgresqlOptions(
        dsn="" if settings.dsn is None else settings.dsn.get_secret_value(),
        schema=settings.keyspace,
        connections_max=settings.postgresql_connections,
    )


class PostgresqlDatabase:
    """A pool of connections. Each call runs one statement, which is a transaction of its own."""

    def __init__(self, options: PostgresqlOptions) -> None:
        self.options = options
        #: Parameters of the DSN that have no effect.
        self.ignored: Sequence[str] = ()
        self._pool: asyncpg.Pool | None = None
        self._releasing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect. Raises StartupError and StoreUnavailableError."""
        hosts = Hosts(self.options.dsn)
        self.ignored = hosts.ignored
        try:
            self._pool = await self._connect(hosts.connect)
        except (*_BROKEN, ValueError, asyncpg.PostgresError) as error:
            raise refusal(error) or unavailable(error) from error

    async def _connect(self, connect: Callable[..., Awaitable[PooledConnection]]) -> asyncpg.Pool:
        """Return a pool that keeps prepared statements, unless a pooler is in between: that may run
        each statement over another session of the server."""
        timeout_s = self.options.timeout_us / SECOND
        probe = await connect(
            connection_class=PooledConnection,
            timeout=timeout_s,
            command_timeout=timeout_s,
            statement_cache_size=0,
        )
        try:
            # A pooler names no process of the server to its clients.
            process = await probe.fetchval("SELECT pg_backend_pid()")
            is_direct = process == probe.get_server_pid()
        finally:
            await probe.close(timeout=timeout_s)
        return await asyncpg.create_pool(
            connect=connect,
            connection_class=PooledConnection,
            # With a minimum the pool reconnects by itself, and logs each failure with a trace.
            min_size=0,
            max_size=self.options.connections_max,
            timeout=timeout_s,
            command_timeout=timeout_s,
            statement_cache_size=_STATEMENTS_KEPT if is_direct else 0,
            # Also end statements whose client has disconnected. A pooler refuses such settings.
            server_settings=(
                {
                    # No function or operator that another role made is found.
                    "search_path": "pg_catalog, pg_temp",
                    "statement_timeout": str(self.options.timeout_us // MILLISECOND),
                    # Without it a server may not say that a wait for a standby was cancelled.
                    "client_min_messages": "warning",
                }
                if is_direct
                else None
            ),
            reset=_keep,
        )

    async def close(self) -> None:
        """Close the connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await pool.close()
            except (*_BROKEN, asyncpg.PostgresError) as error:
                _log.warning("PostgreSQL: its connections were dropped: %s", _text(error))

    async def rows(self, sql: str, *arguments: Any) -> Sequence[Any]:
        """Return the rows of *sql*, in which ``{s}`` is the schema."""
        sql = sql.replace("{s}", self.options.schema)
        return await self._run(lambda connection: connection.fetch(sql, *arguments))

    async def row(self, sql: str, *arguments: Any) -> Any:
        """Return the first row; None if there is none."""
        rows = await self.rows(sql, *arguments)
        return rows[0] if rows else None

    async def value(self, sql: str, *arguments: Any) -> Any:
        """Return the first column of the first row; None if there is none."""
        row = await self.row(sql, *arguments)
        return None if row is None else row[0]

    async def confirm(self) -> None:
        """Wait until the synchronous standby has what was found: a transaction that wrote nothing
        does not wait by itself."""
        await self.rows("SELECT {s}.wait_as_a_write()")

    async def transaction(self, work: Callable[[asyncpg.Connection], Awaitable[_T]]) -> _T:
        """Return the result of *work*, which runs in a transaction and may be run again.

        Its names are of the schema, and of PostgreSQL, which is always searched first.
        """

        async def run(connection: asyncpg.Connection) -> _T:
            async with connection.transaction():
                await connection.execute(f"SET LOCAL search_path = {self.options.schema}, pg_temp")
                return await work(connection)

        return await self._run(run)

    async def _run(self, work: Callable[[asyncpg.Connection], Awaitable[_T]]) -> _T:
        pool = self._pool
        if pool is None:
            raise StoreUnavailableError("PostgreSQL: not connected", retry_after_us=SECOND)
        for attempt in range(_ATTEMPTS_MAX):
            try:
                async with asyncio.timeout(self.options.timeout_us / SECOND):
                    connection = await pool.acquire()
                    try:
                        result: _T = await connection.run(work)
                        return result
                    finally:
                        releasing = asyncio.create_task(_release(pool, connection))
                        self._releasing.add(releasing)
                        releasing.add_done_callback(self._releasing.discard)
                        await asyncio.shield(releasing)
            except asyncpg.PostgresError as error:
                if error.sqlstate not in _UNDONE or attempt == _ATTEMPTS_MAX - 1:
                    raise _converted(error) from error
            except _BROKEN as error:
                if isinstance(error, NotPrimaryError):
                    # The next statements find the primary.
                    await pool.expire_connections()
                raise unavailable(error) from error
            await asyncio.sleep(0)
        raise AssertionError  # The last attempt returns or raises.


def within(timeout_us: int) -> AbstractAsyncContextManager[None]:
    """Bound a write, as :func:`write_within`."""
    return write_within("PostgreSQL", timeout_us)


async def _release(pool: asyncpg.Pool, connection: asyncpg.Connection) -> None:
    """Give *connection* back. No caller may cancel this: the pool's own task would go on, and log
    its failure with a trace."""
    # What came of the statement is known whatever happens now: a connection that cannot be reset,
    # or cancelled in time, is dropped by the pool.
    with suppress(*_BROKEN, asyncpg.PostgresError):
        await pool.release(connection, timeout=_RELEASE_S)


async def _keep(_connection: object) -> None:
    """Skip the session reset on release; sessions set no state."""


def _converted(error: asyncpg.PostgresError) -> Exception:
    if error.sqlstate == _NAMESPACE_DELETED:
        return NamespaceUnknownError(str(error))
    if error.sqlstate == _NO_PARTITION:
        return SliceMissingError(
            "no time slice holds an event; slices are made ahead by the maintenance task, and"
            " dropped after retention",
            retry_after_us=SECOND,
        )
    return unavailable(error)


def _text(error: BaseException) -> str:
    return str(error) or "no answer in time"


def missing(time_us: int) -> SliceMissingError:
    """Return the error for an instant that no slice holds."""
    return SliceMissingError(f"no time slice holds the instant {time_us} µs", retry_after_us=SECOND)


def lacks_schema(error: StoreUnavailableError) -> bool:
    """Return whether *error* is that the schema, or a part of it, does not exist."""
    return getattr(error.__cause__, "sqlstate", None) in _NO_SCHEMA


def unavailable(error: BaseException) -> StoreUnavailableError:
    """Convert *error*, with the fix if that is known."""
    hint = ""
    state = getattr(error, "sqlstate", "")
    if state in _NO_SCHEMA:
        hint = ": run `counter schema apply`"
    elif state == "53100":
        hint = ": make room on the disk of the server"
    elif state == "53300":
        hint = ": raise max_connections, or lower postgresql_connections"
    elif state == "42501":
        hint = ": give the service's role the rights that docs/how-to/use-postgresql.md lists"
    return StoreUnavailableError(f"PostgreSQL: {_text(error)}{hint}", retry_after_us=SECOND)
