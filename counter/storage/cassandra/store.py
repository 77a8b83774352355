"""The Cassandra store, put together from its parts; API keys alone, for commands; and the settings
of nodes that durability depends on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from counter.api_keys import ApiKey
from counter.capabilities import Capabilities
from counter.errors import CounterError, SliceMissingError, StartupError, StoreUnavailableError
from counter.ports import Clock
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.control import CassandraControl
from counter.storage.cassandra.control_keyspace import OP, Row
from counter.storage.cassandra.decisions import CassandraDecisions, CassandraLeases
from counter.storage.cassandra.events import CassandraEvents
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.rollups import CassandraRecounts, CassandraRollups
from counter.storage.cassandra.schema import check_overlap, replicas_in
from counter.storage.cassandra.session import CassandraSession
from counter.storage.cassandra.slices import CassandraPartitionSizes
from counter.storage.shared.key_documents import KeyReader, key_document, key_from

_ALL: Final = "SELECT id, document, used FROM {control}.api_keys WHERE everyone = 0"
_ROW: Final = "SELECT document, op FROM {control}.api_keys WHERE everyone = 0 AND id = ?"
_CREATE: Final = (
    "INSERT INTO {control}.api_keys (everyone, id, document, op) VALUES (0, ?, ?, ?) IF NOT EXISTS"
)
_CHANGE: Final = (
    "UPDATE {control}.api_keys SET document = ?, op = ? WHERE everyone = 0 AND id = ?"
    " IF document = ?"
)
_FORGET: Final = "DELETE FROM {control}.api_keys WHERE everyone = 0 AND id = ? IF document = ?"
#: With the use itself as write timestamp: it only moves forward. No compare-and-set looks at it.
_USED: Final = (
    "UPDATE {control}.api_keys USING TIMESTAMP ? SET used = ? WHERE everyone = 0 AND id = ?"
)


class CassandraKeys:
    """:class:`counter.api_keys.KeyStore`."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        self._key_reader = KeyReader()

    async def api_keys(self) -> Sequence[ApiKey]:
        try:
            rows = await self._session.control.read(_ALL)
        except SliceMissingError as error:
            raise StoreUnavailableError(
                f"keyspace {self._session.control.keyspace!r} has no table of API keys:"
                " run `counter schema apply`"
            ) from error
        # A use alone is what is left of a key that was forgotten meanwhile.
        return self._key_reader.keys(row for row in rows if row[1] is not None)

    async def create_api_key(self, key: ApiKey) -> bool:
        applied, _ = await self._session.control.compare(
            _CREATE, (key.id, key_document(key), OP), seen_by=(_ROW, (key.id,))
        )
        return applied

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        row = await self._key_row(old)
        if row is None:
            return False
        applied, _ = await self._session.control.compare(
            _CHANGE, (key_document(new), OP, old.id, row[0]), seen_by=(_ROW, (old.id,))
        )
        return applied

    async def forget_api_key(self, key: ApiKey) -> bool:
        row = await self._key_row(key)
        if row is None:
            return False
        applied, row = await self._session.control.compare(
            _FORGET, (key.id, row[0]), seen_by=(_ROW, (key.id,))
        )
        return applied or row is None or row[0] is None

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        for key_id, used_us in uses:
            await self._session.control.write(_USED, used_us, used_us, key_id)

    async def _key_row(self, key: ApiKey) -> Row | None:
        """The row of *key*; None where it is not as *key* says."""
        row = await self._session.control.settled(_ROW, key.id)
        if row is None or row[0] is None or key_from(key.id, row[0], None) != key:
            return None
        return row


class KeysAlone:
    """Nothing but the keys: what a command needs."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        self.session = CassandraSession(options, clock)
        self.keys = CassandraKeys(self.session)

    async def open(self) -> None:
        """As :meth:`counter.ports.Store.open`."""
        await self.session.open()

    async def close(self) -> None:
        """Let go."""
        await self.session.close()


#: No namespace has this id.
_NO_NAMESPACE: Final = 0
_PING: Final = (
    "INSERT INTO {keyspace}.names (namespace, bucket, counter) VALUES (?, 0, 'ping')"
    " USING TTL 60 AND TIMESTAMP ?"
)


class CassandraSeparateWrites:
    """:class:`counter.ports.SeparateWrites`, of which each part has its own."""

    def __init__(self, events: CassandraEvents, rollups: CassandraRollups) -> None:
        self.mark, self.mark_atomic = rollups.mark, rollups.mark_atomic
        self.dirty_atomic, self.unlist = rollups.dirty_atomic, rollups.unlist
        self.rewrite, self.void = events.rewrite, events.void


class CassandraStore:
    """:class:`counter.ports.Store` over a cluster, without transactions. Any number of processes
    share it."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        self.session = session = CassandraSession(options, clock)
        self.events = CassandraEvents(session)
        self.rollups = CassandraRollups(session)
        self.recounts = CassandraRecounts(session)
        self.decisions = CassandraDecisions(session)
        self.separate_writes = CassandraSeparateWrites(self.events, self.rollups)
        self.control = CassandraControl(session)
        self.leases = CassandraLeases(session)
        self.keys = CassandraKeys(session)
        self.partition_sizes = CassandraPartitionSizes(session)
        self.capabilities = Capabilities(
            partition_sizes=self.partition_sizes,
            server_warnings=partial(node_warnings, session.connection),
        )
        self.tally, self.queues, self.close = session.tally, session.queues, session.close

    async def open(self) -> None:
        await self.session.open()
        try:
            await self.session.load_datasets()
            self._must_have_datasets()
            await self._must_overlap()
        except BaseException:
            await self.close()
            raise

    async def ping(self) -> None:
        """Write a row that expires to each dataset, as its events are written."""
        states = list(self.session.states.values())
        now_us = self.session.clock.now_us()
        statements = [await self.session.to_write(state.dataset, _PING) for state in states]
        await self.session.connection.rows(
            [each.bind((_NO_NAMESPACE, now_us)) for each in statements]
        )

    def _must_have_datasets(self) -> None:
        """Raise StartupError where a dataset of the settings is not in the schema."""
        existing = {state.dataset.name for state in self.session.states.values()}
        for dataset, _ in self.session.options.datasets:
            if dataset.name not in existing:
                raise StartupError(
                    f"keyspace {self.session.options.keyspace!r} has no dataset {dataset.name!r}:"
                    " run `counter schema apply`"
                )

    async def _must_overlap(self) -> None:
        """Raise StartupError if this process could miss what another one acknowledged."""
        for state in self.session.states.values():
            replication = await self.session.connection.replication(state.keyspace)
            if replication is None:
                raise StartupError(
                    f"Cassandra has no keyspace {state.keyspace!r}: run `counter schema apply`"
                )
            replicas = replicas_in(replication, self.session.connection.nodes_by_datacenter())
            home = self.session.options.local_datacenter
            check_overlap(state.dataset.name, state.placement, replicas, home)
            state.is_spread = sum(count > 0 for count in replicas.values()) > 1


_GRANT: Final = "GRANT SELECT ON system_views.settings"
#: Answered by each node for itself. Until 4.0 the name of the period ended with its unit.
_SETTINGS: Final = (
    "SELECT name, value FROM system_views.settings WHERE name IN ('commitlog_sync',"
    " 'commitlog_sync_period', 'commitlog_sync_period_in_ms', 'disk_failure_policy')"
)


async def node_warnings(connection: CassandraConnection) -> Sequence[str]:
    """Return what the operator should know about the settings of the nodes that are up in the
    local data center. A node that does not answer is one of the warnings."""
    nodes = connection.near_nodes()
    if not nodes:
        return ("no Cassandra node can be asked for its settings: commitlog_sync is unknown",)
    answers = await asyncio.gather(
        *(connection.ask(node, _SETTINGS) for node in nodes), return_exceptions=True
    )
    found: dict[str, list[str]] = defaultdict(list)
    for node, answer in zip(nodes, answers, strict=True):
        if isinstance(answer, CounterError):
            detail = f"commitlog_sync cannot be read: {answer.detail}; {_GRANT} to the service"
            found[detail].append(node.address)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            for each in _warnings_of(dict(answer)):
                found[each].append(node.address)
    return tuple(
        f"Cassandra at {', '.join(sorted(addresses))}: {warning}"
        for warning, addresses in found.items()
    )


def _warnings_of(settings: Mapping[str, str | None]) -> Iterator[str]:
    """Yield the warnings about a node with these *settings*."""
    if settings.get("disk_failure_policy") == "best_effort":
        yield (
            "disk_failure_policy = best_effort: it answers without what a failed disk holds, and"
            " acknowledged adds may be missing; set disk_failure_policy: stop_paranoid"
        )
    sync = settings.get("commitlog_sync")
    if sync is None:
        yield "it does not report commitlog_sync"
    if sync != "periodic":
        return
    period = settings.get("commitlog_sync_period")
    period = period or f"{settings.get('commitlog_sync_period_in_ms')}ms"
    yield (
        f"commitlog_sync = periodic: an add is acknowledged before it is on disk, and may be lost"
        f" if within {period} of it most of its replicas lose power (or one does while another"
        " one is down); set commitlog_sync: group or batch in cassandra.yaml, or leave it if no"
        " two replicas share their power"
    )
