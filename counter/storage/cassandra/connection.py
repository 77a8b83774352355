"""One connection to the cluster: statements go out together and come back together.

Everything else in this package speaks in bound statements and rows; the driver's sessions, threads
and exceptions end here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import cassandra
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import (
    EXEC_PROFILE_DEFAULT,
    Cluster,
    ExecutionProfile,
    NoHostAvailable,
    Session,
)
from cassandra.policies import (
    ConstantReconnectionPolicy,
    ConstantSpeculativeExecutionPolicy,
    DCAwareRoundRobinPolicy,
    RoundRobinPolicy,
    TokenAwarePolicy,
)
from cassandra.query import PreparedStatement, tuple_factory

from counter.errors import StartupError
from counter.limits import SECOND
from counter.storage.cassandra.bridge import Bridge, Gathering
from counter.storage.cassandra.failures import translated, untold
from counter.storage.cassandra.options import CassandraOptions, Tls

#: Statements on their way at once; a connection of the driver carries 32,768.
IN_FLIGHT_MAX: Final = 1_024
#: A call's statements go out in groups of so many.
_GROUP: Final = 256
#: An idempotent statement is sent to a second replica after so long.
_SPECULATE_AFTER_S: Final = 0.1
_RECONNECT_AFTER_S: Final = 1.0
_CONNECT_TIMEOUT_S: Final = 5.0
#: A compare-and-set that timed out is settled and run again so often.
_CAS_ATTEMPTS_MAX: Final = 5

_Row = tuple[Any, ...]
_T = TypeVar("_T")


class Connection:
    """Runs statements; every exception of the driver leaves as the service's own."""

    def __init__(self, options: CassandraOptions) -> None:
        self._options = options
        self._preparing: dict[tuple[str, int], asyncio.Task[PreparedStatement]] = {}
        self._in_flight = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def open(self) -> None:
        """Connect. Raises StartupError, saying what to do."""
        loop = asyncio.get_running_loop()
        self._bridge = Bridge(loop)
        self._cluster = self._new_cluster()
        try:
            self._session: Session = await asyncio.to_thread(self._cluster.connect)
        except Exception as error:
            await asyncio.to_thread(self._cluster.shutdown)
            raise StartupError(self._cannot_connect(error)) from error

    async def close(self) -> None:
        """Let go of every connection; what was sent may still arrive."""
        await asyncio.to_thread(self._cluster.shutdown)

    async def prepare(self, cql: str, consistency: int, *, idempotent: bool = True) -> Any:
        """Prepare *cql*; many who ask at once for the same get one. The caller keeps it.

        Statements are idempotent unless they compare: each carries its own write timestamp.
        """
        key = (cql, consistency)
        preparing = self._preparing.get(key)
        if preparing is None:
            preparing = asyncio.create_task(self._prepare(cql, consistency, idempotent))
            preparing.add_done_callback(lambda _: self._preparing.pop(key, None))
            self._preparing[key] = preparing
        return await asyncio.shield(preparing)

    async def _prepare(self, cql: str, consistency: int, idempotent: bool) -> PreparedStatement:
        made = await self._blocking(self._session.prepare, cql)
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

    async def compare_and_set(
        self, statement: Any, settle: Callable[[], Awaitable[_Row | None]], mine: bytes, at: int
    ) -> tuple[bool, _Row | None]:
        """Run a compare-and-set; whether it was applied, and the row that *settle* would show.

        *statement* writes *mine*, which nobody else ever writes, into the column that *settle*, a
        SERIAL read, has at position *at*. One that timed out may have been applied: the SERIAL
        read completes what is under way, or keeps it from ever being. It is told by *mine*.
        """
        for _ in range(_CAS_ATTEMPTS_MAX):
            (result,) = await self._send((statement,), None, raw=True)
            if not isinstance(result, BaseException):
                if result[0][0]:
                    return True, None
                row = await settle()
                return row is not None and row[at] == mine, row
            if not untold(result):
                raise translated(result)
            row = await settle()
            if row is not None and row[at] == mine:
                return True, row
        raise translated(result)

    async def ddl(self, cql: str) -> None:
        """Run a schema statement and wait until all nodes agree on the schema."""
        await self._blocking(lambda: self._session.execute(cql, timeout=60.0))

    async def simple(self, cql: str) -> Sequence[_Row]:
        """Run a statement that is not worth preparing."""
        found: Sequence[_Row] = await self._blocking(lambda: list(self._session.execute(cql)))
        return found

    async def _blocking(self, work: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return await asyncio.to_thread(work, *arguments)
        except Exception as error:
            raise translated(error) from error

    async def _send(
        self, statements: Sequence[Any], timeout_us: int | None, *, raw: bool = False
    ) -> list[Any]:
        """Send at once; results in order, errors translated unless *raw*."""
        if not statements:
            return []
        await self._take(len(statements))
        try:
            future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            gathering = Gathering(self._bridge, future, len(statements))
            timeout_s = (timeout_us or self._options.read_timeout_us) / SECOND
            execute = self._session.execute_async
            for index, statement in enumerate(statements):
                try:
                    response = execute(statement, timeout=timeout_s)
                except Exception as error:
                    gathering.fail(error, index)
                    continue
                response.add_callbacks(
                    gathering.succeed,
                    gathering.fail,
                    callback_args=(index, response),
                    errback_args=(index,),
                )
            results = await future
        finally:
            self._give_back(len(statements))
        if raw:
            return results
        return [
            translated(result) if isinstance(result, BaseException) else result
            for result in results
        ]

    async def _take(self, count: int) -> None:
        """Wait for room, in order of arrival."""
        if not self._waiting and self._in_flight + count <= IN_FLIGHT_MAX:
            self._in_flight += count
            return
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
        while self._waiting:
            wanted, turn = self._waiting[0]
            if not turn.cancelled():
                if self._in_flight + wanted > IN_FLIGHT_MAX:
                    return
                self._in_flight += wanted
                turn.set_result(None)
            self._waiting.popleft()

    def _new_cluster(self) -> Cluster:
        options = self._options
        local = options.local_datacenter
        nearest = DCAwareRoundRobinPolicy(local) if local else RoundRobinPolicy()
        profile = ExecutionProfile(
            load_balancing_policy=TokenAwarePolicy(nearest),
            speculative_execution_policy=ConstantSpeculativeExecutionPolicy(_SPECULATE_AFTER_S, 1),
            row_factory=tuple_factory,
            request_timeout=options.read_timeout_us / SECOND,
        )
        auth = None
        if options.username is not None:
            auth = PlainTextAuthProvider(options.username, options.password or "")
        return Cluster(
            list(options.contact_points),
            execution_profiles={EXEC_PROFILE_DEFAULT: profile},
            auth_provider=auth,
            ssl_context=_tls_context(options.tls) if options.tls else None,
            reconnection_policy=ConstantReconnectionPolicy(_RECONNECT_AFTER_S, max_attempts=None),
            connect_timeout=_CONNECT_TIMEOUT_S,
            control_connection_timeout=_CONNECT_TIMEOUT_S,
            idle_heartbeat_interval=5,
            idle_heartbeat_timeout=5,
        )

    def _cannot_connect(self, error: Exception) -> str:
        points = ", ".join(f"{host}:{port}" for host, port in self._options.contact_points)
        causes: list[BaseException] = [error]
        if isinstance(error, NoHostAvailable):
            causes = list(error.errors.values()) or causes
        for cause in causes:
            if isinstance(cause, cassandra.AuthenticationFailed):
                return (
                    f"Cassandra at {points} refuses the user {self._options.username!r}:"
                    " check COUNTER_CASSANDRA_USERNAME and COUNTER_CASSANDRA_PASSWORD"
                )
            if isinstance(cause, ssl.SSLError):
                return f"no TLS connection to Cassandra at {points}: {cause}; check --tls-ca"
        text = " ".join(str(causes[0]).split())[:200]
        return f"cannot reach Cassandra at {points} ({text}); check --contact-points"


def _tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca))
    # Nodes are known by address; their certificates are told by the authority that signed them.
    context.check_hostname = False
    if tls.cert is not None:
        context.load_cert_chain(str(tls.cert), str(tls.key) if tls.key else None)
    return context
