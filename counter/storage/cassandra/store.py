"""The Cassandra store, put together from its parts."""

from __future__ import annotations

from typing import Final

from counter.errors import StartupError
from counter.storage.cassandra.control import CassandraControl
from counter.storage.cassandra.counts import CassandraCounts
from counter.storage.cassandra.crowds import CassandraCrowds
from counter.storage.cassandra.decisions import CassandraDecisions
from counter.storage.cassandra.events import CassandraEvents
from counter.storage.cassandra.keys import CassandraKeys
from counter.storage.cassandra.leases import CassandraLeases
from counter.storage.cassandra.marks import CassandraMarks
from counter.storage.cassandra.placing import check_overlap, replicas_in
from counter.storage.cassandra.schema import check_version

#: No namespace has this id.
_NOBODY: Final = 0
_PING: Final = (
    "INSERT INTO {keyspace}.names (namespace, bucket, counter) VALUES (?, 0, 'ping')"
    " USING TTL 60 AND TIMESTAMP ?"
)


class CassandraStore(
    CassandraEvents,
    CassandraMarks,
    CassandraCounts,
    CassandraDecisions,
    CassandraControl,
    CassandraLeases,
    CassandraKeys,
    CassandraCrowds,
):
    """:class:`counter.ports.Store` over a cluster, without transactions. Any number of processes
    share it."""

    async def open(self) -> None:
        await self._connection.open()
        try:
            await check_version(self._connection, self._control)
            await self._load_datasets()
            self._must_have_datasets()
            await self._must_overlap()
        except BaseException:
            await self._connection.close()
            # They belong to that session; when it is opened again, there is another one.
            self._statements.clear()
            self._control.forget_statements()
            raise

    async def close(self) -> None:
        await self._connection.close()

    async def ping(self) -> None:
        """Write a row that expires to each dataset, as its events are written."""
        shelves = list(self._shelves.values())
        now_us = self._clock.now_us()
        statements = [await self._to_write(shelf.dataset, _PING) for shelf in shelves]
        await self._connection.rows([each.bind((_NOBODY, now_us)) for each in statements])

    def _must_have_datasets(self) -> None:
        """Raise StartupError where a dataset of the settings is not in the schema."""
        standing = {shelf.dataset.name for shelf in self._shelves.values()}
        for dataset, _ in self._options.datasets:
            if dataset.name not in standing:
                raise StartupError(
                    f"keyspace {self._options.keyspace!r} has no dataset {dataset.name!r}:"
                    " run `counter schema apply`"
                )

    async def _must_overlap(self) -> None:
        """Raise StartupError if this process could miss what another one acknowledged."""
        for shelf in self._shelves.values():
            replication = await self._connection.replication(shelf.keyspace)
            if replication is None:
                raise StartupError(
                    f"Cassandra has no keyspace {shelf.keyspace!r}: run `counter schema apply`"
                )
            replicas = replicas_in(replication, self._connection.nodes_by_datacenter())
            home = self._options.local_datacenter
            check_overlap(shelf.dataset.name, shelf.placement, replicas, home)
            shelf.is_spread = sum(count > 0 for count in replicas.values()) > 1
