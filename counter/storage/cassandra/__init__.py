"""The store of a cluster: Apache Cassandra, through cassandra-driver.

It has no transactions: marks, events, decisions and counts are separate writes, and one that timed
out may land later. The core's protocol allows for that. ``tables.py`` describes each table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from counter.config.store_kinds import StoreDefaults
from counter.consistency import gap_of
from counter.core.clock_guard import ClockGuard
from counter.limits import HOUR, MILLISECOND, SECOND
from counter.storage.server_kind import ServerKind
from counter.storage.shared.startup_retry import StartupRetry

if TYPE_CHECKING:
    from counter.config.settings import Settings
    from counter.ports import Clock, KeyStore, Store


class CassandraKind(ServerKind):
    """The kind of store of Cassandra."""

    name, title, driver = "cassandra", "Cassandra", "cassandra.cluster"
    start = "set --contact-points right, start Cassandra"
    look = "look at Cassandra's nodes: nodetool status"
    address, backed_up_by, compares_slowly = "contact_points", "nodetool snapshot", True
    defaults = StoreDefaults(
        write_timeout=2 * SECOND,
        write_wait_max=2 * SECOND,
        clock_skew_max=500 * MILLISECOND,
        time_bucket=HOUR,
        event_buckets_max=64,
        shards=16,
        rollup=False,
    )

    def problems(self, settings: Settings) -> Iterator[str]:
        if not settings.contact_points:
            yield (
                "store is cassandra and contact_points is empty:"
                " give --contact-points host[:port],host[:port]"
            )
        for name, placement in settings.placements().items():
            # The number of data centers of a plain number is known only after connecting.
            gap = gap_of(name, placement, dict(placement.replication))
            if gap is not None:
                yield gap

    def warnings(self, settings: Settings) -> Iterator[str]:
        for name, placement in settings.placements().items():
            if max(copies for _, copies in placement.replication) == 1:
                yield (
                    f"dataset {name!r} has one copy: if a node is lost, its data is lost;"
                    " with three nodes, give --replication 3"
                )

    def open(self, settings: Settings, clock: Clock, *, to_audit: bool = False) -> Store:
        self.require_driver()
        from counter.storage.cassandra.options import options_of
        from counter.storage.cassandra.store import CassandraStore

        return CassandraStore(options_of(settings), clock)

    @asynccontextmanager
    async def opened_keys(
        self, settings: Settings, clock: Clock
    ) -> AsyncIterator[tuple[KeyStore, ClockGuard | None]]:
        self.require_driver()
        from counter.storage.cassandra.options import options_of
        from counter.storage.cassandra.store import KeysAlone

        alone = KeysAlone(options_of(settings), clock)
        await StartupRetry(settings.start_timeout).run(alone.open)
        try:
            yield alone.keys, ClockGuard(alone.session, clock)
        finally:
            await alone.close()

    async def apply_schema(self, settings: Settings) -> Sequence[str]:
        self.require_driver()
        from counter.storage.cassandra.schema import apply_schema

        return await apply_schema(settings)
