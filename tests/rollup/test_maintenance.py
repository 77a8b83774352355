"""Slices are made, retired and dropped once, whoever looks after them, and never too early."""

import asyncio
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.errors import StoreUnavailableError
from counter.limits import MINUTE, SLICES_AHEAD
from counter.types import CounterType
from tests.rollup.world import CLOSING, DATASET, SETTINGS, World

SLICES_KEPT = DATASET.retention_us // DATASET.slice_us + 1 + SLICES_AHEAD


@given(st.integers(0, 2**32))
def test_several_may_look_after_the_slices_at_once(seed: int) -> None:
    """A lease may move in the middle of it: what one has done the other leaves alone."""

    async def play() -> None:
        world = World()
        await world.begin(shards=1)
        processes = [world.process(seed=seed + each) for each in range(3)]
        for _ in range(12):
            world.clock.advance(DATASET.slice_us)
            for _ in range(3):
                await asyncio.gather(*(each.worker.tick() for each in processes))
        slices = await world.store.slices(DATASET)
        starts = [each.start_us for each in slices]
        assert starts == list(range(starts[0], starts[-1] + 1, DATASET.slice_us))
        assert await world.store.dropped_before(DATASET) == starts[0]
        assert SLICES_KEPT - 1 <= len(slices) <= SLICES_KEPT + 1

    asyncio.run(play())


async def test_the_shards_are_rolled_up_though_the_slices_cannot_be_looked_after() -> None:
    """Slices are made ahead: there is time, and the trouble is told."""
    world = World()
    namespace = await world.begin()
    await world.add("c", 5)
    a = world.process()
    world.clock.advance(CLOSING)
    failing = patch.object(
        world.store, "slices", side_effect=StoreUnavailableError("a planted fault")
    )
    with failing, pytest.raises(StoreUnavailableError):
        await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 5}
    assert a.worker.trouble == "a planted fault"


async def test_best_effort_counters_hold_no_slice_back() -> None:
    """They have no events, and nobody rolls them up."""
    world = World()
    await world.begin(shards=1)
    settings = replace(SETTINGS, counter_type=CounterType.BEST_EFFORT)
    best_effort = await world.api.namespaces.create("b", settings)
    before = await world.store.watermarks(best_effort)
    a = world.process()
    for _ in range(12):
        world.clock.advance(DATASET.slice_us)
        for _ in range(3):
            await a.worker.tick()
    assert await world.store.watermarks(best_effort) == before
    assert await world.store.dropped_before(DATASET) > 0


async def test_watermarks_are_not_read_while_the_clock_says_that_nothing_is_due() -> None:
    """There is one for each shard of each namespace."""
    world = World()
    namespace = await world.begin(shards=1)
    a = world.process()
    # Past the end of a slice, which is retired then.
    world.clock.advance(DATASET.slice_us + MINUTE)
    for _ in range(3):
        await a.worker.tick()
    retired = [each.retired_at_us for each in await world.store.slices(DATASET)]
    assert any(retired)
    with patch.object(world.store, "watermarks", side_effect=AssertionError):
        await a.worker.tick()
    assert namespace.name == "n"


async def test_a_shard_that_lags_behind_holds_the_slices_back() -> None:
    """However old they are: its events are not summed yet."""
    world = World()
    namespace = await world.begin(shards=2)
    await world.add_many(10)
    a = world.process()
    works = world.store.advance

    async def fails_for_one(of: object, shard: int, through_us: int) -> None:
        if shard == 1:
            raise StoreUnavailableError("a planted fault")
        await works(namespace, shard, through_us)

    with patch.object(world.store, "advance", fails_for_one):
        for _ in range(12):
            world.clock.advance(DATASET.slice_us)
            with pytest.raises(StoreUnavailableError):
                await a.worker.tick()
    slices = await world.store.slices(DATASET)
    behind_us = (await world.store.watermarks(namespace))[1]
    assert not any(each.retired_at_us for each in slices if each.start_us > behind_us)
    assert await world.store.dropped_before(DATASET) == 0
    for _ in range(9):
        await a.worker.tick()
    assert await world.store.dropped_before(DATASET) > 0
    assert await world.rolled_up(namespace) == {f"c{each}": each for each in range(10)}


async def test_a_slice_that_must_stay_keeps_the_later_ones() -> None:
    """Two workers' clocks differ: the earlier slice may have been retired by the later time."""
    world = World()
    with patch.object(world.store, "retire_slice"):
        await world.begin(shards=1)
        a = world.process()
        world.clock.advance(DATASET.retention_us + 3 * DATASET.slice_us)
        await a.worker.tick()
    first, second, *_ = await world.store.slices(DATASET)
    now_us = world.clock.now_us()
    await world.store.retire_slice(DATASET, first.start_us, now_us + MINUTE)
    await world.store.retire_slice(DATASET, second.start_us, now_us - MINUTE)
    await a.worker.tick()
    assert await world.store.dropped_before(DATASET) == 0
    world.clock.advance(2 * MINUTE)
    for _ in range(2):
        await a.worker.tick()
    assert await world.store.dropped_before(DATASET) >= second.end_us
