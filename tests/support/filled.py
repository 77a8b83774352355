"""A data directory with a few counters in it, rolled up, without a running service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.core.service import CounterService
from counter.limits import HOUR, MILLISECOND, MINUTE, SECOND
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import SqliteStore
from counter.types import CounterType
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker
from tests.support.waiting import eventually

#: Real time passes these windows while a test looks on. A busy machine is in time, too.
DATASET = replace(
    Settings().dataset(),
    write_timeout_us=2 * SECOND,
    retention_us=HOUR,
    slice_us=10 * MINUTE,
    time_bucket_us=10 * MINUTE,
)
SETTINGS = replace(
    Settings().default_namespace(),
    accept_limit_us=2 * SECOND,
    rollup_window_us=100 * MILLISECOND,
    shards=2,
    key_ttl_us=10 * MINUTE,
)
COUNTERS = {"a/1": 3, "a/2": 30, "b": -7}


@asynccontextmanager
async def opened(data: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(data, SystemClock(), [DATASET])
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def fill(data: Path) -> None:
    """Three counters, rolled up, and a namespace that keeps no events."""
    clock = SystemClock()
    async with opened(data) as store:
        service = CounterService(store, MemoryCache(clock), clock)
        await Maintenance(store, clock).run_once()
        namespace = await service.namespaces.create("videos", SETTINGS)
        kept_not = replace(SETTINGS, counter_type=CounterType.BEST_EFFORT)
        await service.namespaces.create("likes", kept_not)
        for name, delta in COUNTERS.items():
            (token,) = await service.issue_tokens(1)
            await service.add(namespace, name, delta, token)
        worker = RollupWorker(store, MemoryCache(clock), clock, service.namespaces)

        async def rolled_up() -> bool:
            await worker.tick()
            heads = await store.rollups.heads(namespace, list(COUNTERS))
            return all(head is not None for head in heads)

        await eventually(rolled_up, "all is rolled up")
