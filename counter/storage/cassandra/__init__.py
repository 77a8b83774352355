"""The store of a cluster: Apache Cassandra, through cassandra-driver.

It has no transactions: marks, events, decisions and counts are separate writes, and one that timed
out may land later. The core's protocol allows for that. ``tables.py`` describes each table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from counter.config.store_kinds import StoreDefaults
from counter.core.clock_guard import ClockGuard
from counter.limits import HOUR, MILLISECOND, SECOND
from counter.quantities import spell_duration
from counter.storage.cassandra.settings import CassandraSettings
from counter.storage.server_kind import ServerKind
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import CounterType, NamespaceSettings, PayloadCheck

if TYPE_CHECKING:
    from counter.api_keys import KeyStore
    from counter.ports import Clock, Store

#: Reads of one rolled-up count, above which the cache should keep it for longer.
_TIMES_MAX: Final = 10


class CassandraKind(ServerKind[CassandraSettings]):
    """The kind of store of Cassandra."""

    name, title, driver = "cassandra", "Cassandra", "cassandra.cluster"
    start = "set --contact-points right, start Cassandra"
    look = "look at Cassandra's nodes: nodetool status"
    settings, backed_up_by = CassandraSettings, "nodetool snapshot"
    defaults = StoreDefaults(
        write_timeout=2 * SECOND,
        write_wait_max=2 * SECOND,
        clock_skew_max=500 * MILLISECOND,
        time_bucket=HOUR,
        event_buckets_max=64,
        shards=16,
        rollup=False,
    )

    def advice(self, namespace: NamespaceSettings) -> Iterator[str]:
        if namespace.counter_type is CounterType.BEST_EFFORT:
            return
        if namespace.payload_check is PayloadCheck.STRICT:
            yield (
                "payload_check is strict: over Cassandra each add is a compare-and-set, several"
                " times dearer than what rates are measured with; use guard where that is too much"
            )
        cache_us, window_us = namespace.cache_ttl_us, namespace.rollup_window_us
        # 0 turns the cache off on purpose.
        if 0 < cache_us * _TIMES_MAX < window_us:
            window = spell_duration(window_us)
            yield (
                f"cache_ttl is {spell_duration(cache_us)} and rollup_window is {window}: Cassandra"
                f" is asked for the same count up to {window_us // cache_us} times before the next"
                f" one is rolled up; make cache_ttl {window}"
            )

    def open(self, settings: CassandraSettings, clock: Clock, *, to_audit: bool = False) -> Store:
        self.require_driver()
        from counter.storage.cassandra.store import CassandraStore

        return CassandraStore(settings.options(), clock)

    @asynccontextmanager
    async def opened_keys(
        self, settings: CassandraSettings, clock: Clock
    ) -> AsyncIterator[tuple[KeyStore, ClockGuard | None]]:
        self.require_driver()
        from counter.storage.cassandra.store import KeysAlone

        alone = KeysAlone(settings.options(), clock)
        await StartupRetry(settings.start_timeout).run(alone.open)
        try:
            yield alone.keys, ClockGuard(alone.session, clock)
        finally:
            await alone.close()

    async def apply_schema(self, settings: CassandraSettings) -> Sequence[str]:
        self.require_driver()
        from counter.storage.cassandra.schema import apply_schema

        return await apply_schema(settings)
