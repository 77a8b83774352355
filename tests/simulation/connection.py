"""The adapter's own connection, with the simulated cluster in the driver's place."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, copy_context
from typing import Any, Final

from cassandra import ConsistencyLevel
from cassandra.query import BatchStatement, BoundStatement, SimpleStatement

from counter.limits import MILLISECOND, SECOND
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.shared.bridge import Bridge
from tests.simulation.cluster import Cluster
from tests.simulation.cql import Statement, parse, schema_of
from tests.simulation.loop import run_in
from tests.simulation.weather import CENTERS, UNMET, Met


class _Bound(BoundStatement):  # type: ignore[misc]
    """A bound statement that keeps its values as they are."""

    serial_consistency_level = ConsistencyLevel.SERIAL
    is_idempotent = True
    keyspace = custom_payload = _routing_key = None

    def __init__(self, prepared: "_Prepared", values: Sequence[Any]) -> None:
        self.prepared_statement = prepared
        self.values = values
        self.consistency_level = prepared.consistency_level


class _Prepared:
    """A prepared statement; its id is its meaning."""

    def __init__(self, cql: str, consistency: int) -> None:
        self.query_string = cql
        self.query_id: Statement = parse(cql)
        self.consistency_level = consistency

    def bind(self, values: Sequence[Any]) -> _Bound:
        return _Bound(self, values)


class _Response:
    """The response of the driver for a statement."""

    _paging_state = None
    # Held by the driver's own response until it is answered.
    _timer = None
    _callbacks: Final[list[Any]] = []
    _errbacks = _callbacks

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_awaited = False

    def add_callbacks(
        self,
        succeed: Callable[..., None],
        fail: Callable[..., None],
        callback_args: tuple[Any, ...],
        errback_args: tuple[Any, ...],
    ) -> None:
        self._is_awaited = True
        self._succeed, self._succeed_args = succeed, callback_args
        self._fail, self._fail_args = fail, errback_args

    def finish(self, result: Any) -> None:
        """Tell in the process that asked: at once if it is awake, and never if it crashed."""
        if not self._is_awaited:
            return
        if isinstance(result, BaseException):
            run_in(self._context, self._fail, result, *self._fail_args)
        else:
            run_in(self._context, self._succeed, result, *self._succeed_args)


def _about(statement: Any) -> tuple[str, bool]:
    """The table of a bound statement, or of the first one of a batch; whether it updates rows."""
    if isinstance(statement, BatchStatement):
        first = statement._statements_and_parameters[0][1]
    else:
        first = statement.prepared_statement.query_id
    return first.table, first.verb == "update"


class _Direct(Bridge):
    """Calls at once: everything is in the loop already."""

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)


class SimulatedConnection(CassandraConnection):
    """Statements go to the simulated cluster, their results come back by the bridge."""

    def __init__(self, options: CassandraOptions, cluster: Cluster) -> None:
        super().__init__(options)
        self._simulated = cluster
        #: The number of the data center that the process is in.
        self._home = CENTERS.index(options.local_datacenter or CENTERS[0])
        #: Called before a statement is sent, with its table, and whether it updates rows.
        self.meet: Callable[[str, bool], Met] = lambda *_: UNMET

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bridge = _Direct(self._loop)

    async def close(self) -> None:
        """There is nothing to let go of."""

    async def _prepare(self, cql: str, consistency: int, idempotent: bool) -> Any:
        # The driver may send idempotent statements twice.
        assert idempotent != (" IF " in cql), f"idempotent: {idempotent}: {cql}"
        return _Prepared(cql, consistency)

    async def settled(self, statements: Sequence[Any]) -> list[Any]:
        levels = {each.consistency_level for each in statements}
        assert levels <= {ConsistencyLevel.SERIAL}, "only a SERIAL read settles"
        return await super().settled(statements)

    def _execute(
        self, timeout_us: int | None, statement: Any, paging_state: bytes | None, **more: Any
    ) -> Any:
        response = _Response(copy_context())
        if isinstance(statement, SimpleStatement):
            self._loop.call_soon(lambda: response.finish(self._system(statement)))
        else:
            met = self.meet(*_about(statement))
            if not met.vanishes:
                timeout_us = timeout_us or self._options.read_timeout_us
                self._simulated.execute(
                    *(statement, timeout_us, response.finish),
                    *(met.hold_us, met.loses, met.abandons),
                    self._home,
                )
        return response

    async def ddl(self, cql: str) -> None:
        made = schema_of(cql)
        await asyncio.sleep(self._simulated.weather.delay() / SECOND)
        if made is not None:
            self._simulated.create_table(*made)
        elif cql.startswith("DROP TABLE IF EXISTS "):
            self._simulated.drop_table(cql.rsplit(maxsplit=1)[-1])
        elif not cql.startswith("CREATE KEYSPACE"):
            raise NotImplementedError(cql)

    async def replication(self, keyspace: str) -> Mapping[str, str] | None:
        # As a placement's default is.
        replicas = dict.fromkeys(self.nodes_by_datacenter(), "1")
        return {"class": "NetworkTopologyStrategy", **replicas}

    def nodes_by_datacenter(self) -> Mapping[str, int]:
        return Counter(CENTERS[node.center] for node in self._simulated.nodes)

    def near_nodes(self) -> list[Any]:
        """No nodes that could be asked about their settings."""
        return []

    async def node_clocks(self) -> list[int]:
        """The clocks of the nodes after a round trip; they count milliseconds."""
        weather = self._simulated.weather
        await asyncio.sleep(weather.delay() / SECOND)
        now_us = self._simulated.now_us()
        found = [
            (now_us + node.offset_us) // MILLISECOND * MILLISECOND for node in self._simulated.nodes
        ]
        await asyncio.sleep(weather.delay() / SECOND)
        return found

    def _system(self, statement: SimpleStatement) -> list[tuple[Any, ...]]:
        """Rows of ``system_schema``."""
        words = statement.query_string.replace("'", " ").split()
        tables = [tuple(name.split(".")) for name in self._simulated.schemas]
        if "system_schema.tables" in words:
            keyspace = words[words.index("keyspace_name") + 2]
            names = [name for space, name in tables if space == keyspace]
            if "table_name" in words[words.index("WHERE") :]:
                wanted = words[-1]
                names = [name for name in names if name == wanted]
            return [(name,) for name in names]
        return []
