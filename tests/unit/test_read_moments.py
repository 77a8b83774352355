"""Reads that something comes between: each speaks of one moment, and says which."""

from dataclasses import replace

import pytest

from counter.core.read import Count, CountReader
from counter.storage.shared.memory_cache import MemoryCache
from counter.types import Checkpoint, CounterUpdate, Namespace, Pending, WindowRow
from counter.windows import window_of
from tests.rollup.world import CLOSING, WINDOW, World, begun
from tests.support.parts import followed

EVENTUALLY = 1_000 * CLOSING


one_or_many = pytest.mark.parametrize("many", [False, True], ids=["one", "many"])


async def count_by(
    reader: CountReader, namespace: Namespace, max_staleness_us: int, *, many: bool
) -> Count:
    """The count of ``c`` by the way for one counter, or for many."""
    if many:
        return (await reader.read(namespace, ["c"], max_staleness_us))[0]
    return await reader.read_one(namespace, "c", max_staleness_us)


@one_or_many
async def test_a_rollup_between_two_steps_of_a_read_loses_nothing(many: bool) -> None:
    """An older watermark fits a newer checkpoint, not the other way round."""
    world, namespace = await begun(shards=1)
    worker = world.process().worker
    await world.add("c", 5)
    world.clock.advance(CLOSING)
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    with followed(world.store, "watermarks", "heads", by=worker.tick):
        found = await count_by(reader, namespace, EVENTUALLY, many=many)
    (watermark_us,) = await world.store.rollups.watermarks(namespace)
    assert watermark_us > world.clock.now_us() - CLOSING
    assert found.count == 5 or found.as_of_us < world.clock.now_us() - CLOSING


async def settled_once(world: World, namespace: Namespace) -> int:
    """A counter with 100 settled and 7 in a row after it; the row's window."""
    (watermark_us,) = await world.store.rollups.watermarks(namespace)
    window_us = window_of(watermark_us, WINDOW) - WINDOW
    settled = Checkpoint(window_us - 1, 100)
    row = WindowRow(window_us, False, 7)
    update = CounterUpdate("c", (row,), Checkpoint(watermark_us, 107), settled)
    await world.store.rollups.apply(namespace, [update], through_us=watermark_us)
    return window_us


async def test_a_recount_begins_with_the_settled_count() -> None:
    world, namespace = await begun(shards=1)
    window_us = await settled_once(world, namespace)
    recount = Pending(window_us - 5 * WINDOW, window_of(world.clock.now_us(), WINDOW))
    other = Pending(window_us + WINDOW, window_of(world.clock.now_us(), WINDOW))
    await world.store.recounts.write_pending(namespace, [("c", recount), ("c", other)])
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    assert (await reader.read_one(namespace, "c", EVENTUALLY)).count == 107


async def test_a_cached_count_has_the_time_of_its_storage() -> None:
    """However far the rollup has come since."""
    world, namespace = await begun(shards=1)
    cache = MemoryCache(world.clock)
    reader = CountReader(world.store, cache, world.clock)
    first = await reader.read_one(namespace, "c", EVENTUALLY)
    await world.add("c", 5)
    world.clock.advance(CLOSING)
    await world.process().worker.tick()
    await cache.put_many(namespace, [("c", Checkpoint(first.as_of_us, first.count))])
    alone = await reader.read_one(namespace, "c", EVENTUALLY)
    (among,) = await reader.read(namespace, ["c"], EVENTUALLY)
    for again in (alone, among):
        assert (again.count, again.as_of_us) == (0, first.as_of_us)


@one_or_many
async def test_only_an_accurate_count_can_include_adds_after_its_as_of(many: bool) -> None:
    """From a token that is ahead, and of a moment during the read."""
    world, namespace = await begun(shards=1)
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)

    async def meanwhile() -> None:
        world.clock.advance(1_000)
        await world.add("c", 3)

    await world.api.add(namespace, "c", 2, world.token(age_us=-1_000_000))
    with followed(world.store, "watermarks", "heads", by=meanwhile):
        began_us = world.clock.now_us()
        accurate = await count_by(reader, namespace, 0, many=many)
    assert (accurate.count, accurate.as_of_us) == (5, began_us)
    eventual = await count_by(reader, namespace, EVENTUALLY, many=many)
    assert (eventual.count, eventual.as_of_us < began_us) == (0, True)


@one_or_many
async def test_a_count_that_was_read_is_in_the_cache(many: bool) -> None:
    world, namespace = await begun(shards=1)
    await world.add("c", 5)
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    for _ in range(2):
        await count_by(reader, namespace, EVENTUALLY, many=many)
    assert reader.lookups == {"hit": 1, "miss": 1}


@one_or_many
async def test_an_accurate_read_looks_at_events_whatever_its_clock_shows(many: bool) -> None:
    """A clock that was set back takes every stored count for a fresh one."""
    world, namespace = await begun(shards=1)
    namespace = replace(namespace, dataset=replace(namespace.dataset, clock_skew_max_us=0))
    await world.add("c", 5)
    world.clock.advance(2 * CLOSING)
    await world.process().worker.tick()
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    assert (await reader.read_one(namespace, "c", EVENTUALLY)).count == 5
    await world.add("c", 2)
    world.clock.advance(-2 * CLOSING)
    assert (await count_by(reader, namespace, 0, many=many)).count == 7
