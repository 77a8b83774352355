"""Slices are made, retired and dropped once, by any worker, and never too early."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.errors import SliceMissingError, StoreUnavailableError, TokenTooOldError
from counter.limits import MINUTE, PAST_SLICES_PER_STEP, SECOND, SLICES_AHEAD
from counter.ops.audit import Auditor, State
from counter.storage.memory import MemoryStore
from counter.testing.clock import FakeClock
from counter.types import CounterType, Dataset, Slice
from counter.windows import closing_lag, slice_of, slice_start
from rollup.maintenance import Maintenance
from tests.rollup.world import CLOSING, DATASET, SETTINGS, Process, World, begun
from tests.support.app import running
from tests.support.parts import failing
from tests.support.rest import fresh

SLICES_KEPT = DATASET.retention_us // DATASET.slice_us + 1 + SLICES_AHEAD


@given(st.integers(0, 2**32))
def test_several_may_look_after_the_slices_at_once(seed: int) -> None:
    """A lease may move in the middle of it: finished work is not repeated."""

    async def play() -> None:
        world, _ = await begun(shards=1)
        processes = [world.process(seed=seed + each) for each in range(3)]
        for _ in range(12):
            world.clock.advance(DATASET.slice_us)
            for _ in range(3):
                await asyncio.gather(*(each.worker.tick() for each in processes))
        slices = await world.store.control.slices(DATASET)
        starts = [each.start_us for each in slices]
        assert starts == list(range(starts[0], starts[-1] + 1, DATASET.slice_us))
        assert await world.store.control.dropped_before(DATASET) == starts[0]
        assert SLICES_KEPT - 1 <= len(slices) <= SLICES_KEPT + 1

    asyncio.run(play())


async def test_the_shards_are_rolled_up_though_the_slices_cannot_be_looked_after() -> None:
    """Slices are made ahead: there is time, and the error is logged."""
    world, namespace = await begun()
    await world.add("c", 5)
    a = world.process()
    world.clock.advance(CLOSING)
    error = StoreUnavailableError("a planted fault")
    with failing(world.store, "slices", error), pytest.raises(StoreUnavailableError):
        await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 5}
    assert a.worker.trouble == "a planted fault"


async def test_slices_of_every_dataset_are_made_though_nothing_can_be_dropped() -> None:
    """Without slices ahead writes fail; drops can wait."""
    world = World()
    other = replace(DATASET, id=2, name="other")
    store = MemoryStore(world.clock, [DATASET, other])
    maintenance = Maintenance(store, world.clock)
    await maintenance.run_once()
    world.clock.advance(DATASET.slice_us)
    fails = patch.object(maintenance, "_drop_slices", side_effect=StoreUnavailableError("no"))
    with fails, pytest.raises(StoreUnavailableError):
        await maintenance.run_once()
    for dataset in (DATASET, other):
        last = (await store.control.slices(dataset))[-1]
        assert last.end_us > world.clock.now_us() + SLICES_AHEAD * DATASET.slice_us


async def test_nothing_is_dropped_while_slices_cannot_be_made() -> None:
    world = World()
    maintenance = Maintenance(world.store, world.clock)
    fails = patch.object(maintenance, "make_slices", side_effect=StoreUnavailableError("no"))
    with fails, patch.object(maintenance, "_drop_slices") as drop:
        with pytest.raises(StoreUnavailableError):
            await maintenance.run_once()
        drop.assert_not_called()


async def test_the_store_is_purged_each_minute_and_at_once_if_more_is_left() -> None:
    world = World()
    maintenance = Maintenance(world.store, world.clock)
    with patch.object(world.store.control, "purge", side_effect=[True, False, False]) as purge:
        for advance_us, calls in ((0, 1), (0, 2), (MINUTE - 1, 2), (1, 3)):
            world.clock.advance(advance_us)
            await maintenance.run_once()
            assert purge.await_count == calls


async def test_best_effort_counters_hold_no_slice_back() -> None:
    """They have no events, and are not rolled up."""
    world, _ = await begun(shards=1)
    settings = replace(SETTINGS, counter_type=CounterType.BEST_EFFORT)
    best_effort = await world.api.namespaces.create("b", settings)
    before = await world.store.rollups.watermarks(best_effort)
    a = world.process()
    await world.pass_slices(a)
    assert await world.store.rollups.watermarks(best_effort) == before
    assert await world.store.control.dropped_before(DATASET) > 0


async def test_watermarks_are_not_read_while_the_clock_says_that_nothing_is_due() -> None:
    """There is one for each shard of each namespace."""
    world, namespace = await begun(shards=1)
    a = world.process()
    # Past the end of a slice, which is retired then.
    world.clock.advance(DATASET.slice_us + MINUTE)
    for _ in range(3):
        await a.worker.tick()
    retired = [each.retired_at_us for each in await world.store.control.slices(DATASET)]
    assert any(retired)
    with patch.object(world.store.rollups, "watermarks", side_effect=AssertionError):
        await a.worker.tick()
    assert namespace.name == "n"


async def test_a_shard_that_lags_behind_holds_the_slices_back() -> None:
    """However old they are: its events are not summed yet."""
    world, namespace = await begun(shards=2)
    await world.add_many(10)
    a = world.process()
    works = world.store.rollups.advance

    async def fails_for_one(of: object, shards: Sequence[int], through_us: int) -> None:
        if 1 in shards:
            raise StoreUnavailableError("a planted fault")
        await works(namespace, shards, through_us)

    with patch.object(world.store.rollups, "advance", fails_for_one):
        for _ in range(12):
            world.clock.advance(DATASET.slice_us)
            with pytest.raises(StoreUnavailableError):
                await a.worker.tick()
    slices = await world.store.control.slices(DATASET)
    behind_us = (await world.store.rollups.watermarks(namespace))[1]
    assert not any(each.retired_at_us for each in slices if each.start_us > behind_us)
    assert await world.store.control.dropped_before(DATASET) == 0
    for _ in range(9):
        await a.worker.tick()
    assert await world.store.control.dropped_before(DATASET) > 0
    assert await world.rolled_up(namespace) == {f"c{each}": each for each in range(10)}


async def test_a_namespace_that_an_old_copy_of_the_directory_lacks_holds_the_slices_back() -> None:
    """Its events would go before they are counted."""
    world = World()
    a = world.process()
    await a.namespaces.refresh()
    await world.begin(shards=1)
    await world.add("c", 5)
    for _ in range(12):
        world.clock.advance(DATASET.slice_us)
        await a.worker.maintenance.run_once()
    assert await world.store.control.dropped_before(DATASET) == 0


async def test_a_slice_that_must_stay_keeps_the_later_ones() -> None:
    """Two workers' clocks differ: the earlier slice may have been retired by the later time."""
    world = World()
    with patch.object(world.store.control, "retire_slice"):
        await world.begin(shards=1)
        a = world.process()
        world.clock.advance(DATASET.retention_us + 3 * DATASET.slice_us)
        await a.worker.tick()
    first, second, *_ = await world.store.control.slices(DATASET)
    now_us = world.clock.now_us()
    await world.store.control.retire_slice(DATASET, first.start_us, now_us + MINUTE)
    await world.store.control.retire_slice(DATASET, second.start_us, now_us - MINUTE)
    await a.worker.tick()
    assert await world.store.control.dropped_before(DATASET) == 0
    world.clock.advance(2 * MINUTE)
    for _ in range(2):
        await a.worker.tick()
    assert await world.store.control.dropped_before(DATASET) >= second.end_us


async def test_after_a_gap_only_the_slices_that_retention_reaches_are_made_and_all_together() -> (
    None
):
    """Regression: a start after a week made each slice of that week in a transaction of its own."""
    world, namespace = await begun(shards=1)
    await world.add("c", 5)
    calls: list[int] = []
    works = world.store.control.make_slices

    async def noted(dataset: Dataset, *slices: Slice) -> None:
        calls.append(len(slices))
        await works(dataset, *slices)

    unmade = world.token(age_us=-DATASET.retention_us)
    world.clock.advance(100 * DATASET.retention_us)
    a = world.process()
    with patch.object(world.store.control, "make_slices", noted):
        await a.worker.tick()
    assert calls == [SLICES_KEPT]
    now_us = world.clock.now_us()
    made = [each.start_us for each in (await world.store.control.slices(DATASET))[-SLICES_KEPT:]]
    assert made[0] + DATASET.slice_us > now_us - DATASET.retention_us >= made[0]
    with pytest.raises(TokenTooOldError) as too_old:
        await world.api.add(namespace, "c", 1, unmade)
    assert too_old.value.applied is None
    await world.add("c", 2)
    world.clock.advance(CLOSING)
    for _ in range(12):
        await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 7}
    assert await world.store.control.dropped_before(DATASET) > 0


async def test_a_long_gap_is_filled_in_steps_after_the_current_slices() -> None:
    """Until its slice exists a token of the gap has no outcome; from then on it is void."""
    dataset = replace(DATASET, retention_us=400 * MINUTE, slice_us=MINUTE, time_bucket_us=MINUTE)
    world, namespace = await begun(dataset, shards=1)
    await world.add("c", 5)
    first = await world.store.control.slices(dataset)
    world.clock.advance(300 * MINUTE)
    token = world.token(age_us=100 * MINUTE)
    a = world.process()
    calls: list[list[Slice]] = []
    works = world.store.control.make_slices

    async def noted(of: Dataset, *slices: Slice) -> None:
        calls.append(list(slices))
        await works(of, *slices)

    with patch.object(world.store.control, "make_slices", noted):
        await a.worker.tick()
        before = await world.store.control.slices(dataset)
        past = calls[0][-PAST_SLICES_PER_STEP:]
        assert calls[0][: -len(past)] == list(before[-SLICES_AHEAD - 3 :])
        assert past == list(before[len(first) :][: len(past)])
        assert min(await world.store.rollups.watermarks(namespace)) > token.generation_time_us
        with pytest.raises(SliceMissingError) as missing:
            await world.api.add(namespace, "c", 1, token)
        assert missing.value.applied is None
        await world.add("c", 2)
        await world.api.recount(namespace, "c", 0, 2**60)
        [verdict] = await Auditor(world.store).audit(namespace, ["c"])
        assert verdict.state is not State.WRONG
        assert [each.count for each in await world.api.reader.read(namespace, ["c"], 0)] == [7]
        while len(before) < len(after := await _after_a_tick(world, a, dataset)):
            before = after
    assert max(map(len, calls)) <= PAST_SLICES_PER_STEP + SLICES_AHEAD + 3
    assert sum(map(len, calls)) + len(first) == len(before)
    assert all(one.end_us == other.start_us for one, other in pairwise(before))
    for _ in range(2):
        with pytest.raises(TokenTooOldError) as too_old:
            await world.api.add(namespace, "c", 1, token)
        assert too_old.value.applied is False
        await world.roll_up(a)
    [verdict] = await Auditor(world.store).audit(namespace, ["c"])
    assert verdict.state is State.RIGHT
    assert await world.rolled_up(namespace) == {"c": 7}


async def _after_a_tick(world: World, process: Process, dataset: Dataset) -> Sequence[Slice]:
    await process.worker.tick()
    return await world.store.control.slices(dataset)


async def test_a_gap_is_filled_though_the_slices_before_it_are_dropped() -> None:
    """A start makes only the slices that adds need, and a worker may come much later."""
    world, _ = await begun(shards=1)
    old = await world.store.control.slices(DATASET)
    world.clock.advance(DATASET.retention_us)
    maintenance = Maintenance(world.store, world.clock)
    await maintenance.make_slices(DATASET, past_max=0)
    for each in old:
        await world.store.control.drop_slice(DATASET, each.start_us)
    dropped_us = await world.store.control.dropped_before(DATASET)
    assert (await world.store.control.slices(DATASET))[0].start_us > dropped_us > 0
    await maintenance.make_slices(DATASET)
    slices = await world.store.control.slices(DATASET)
    assert slices[0].start_us == dropped_us
    assert all(one.end_us == other.start_us for one, other in pairwise(slices))


@pytest.mark.parametrize("past_us", [0, SECOND])
async def test_no_window_is_open_in_a_slice_that_is_left_for_later(past_us: int) -> None:
    """A slow clock or write may need one more slice, which readers would not look for."""
    world, _ = await begun(shards=1)
    size_us, lag_us = DATASET.slice_us, closing_lag(DATASET)
    now_us = world.clock.now_us()
    world.clock.advance(DATASET.retention_us + size_us - now_us % size_us + past_us)
    maintenance = Maintenance(world.store, world.clock)
    await maintenance.make_slices(DATASET, past_max=0)
    slices = await world.store.control.slices(DATASET)
    oldest_us = world.clock.now_us() - size_us - lag_us
    oldest = slice_of(slices, oldest_us)
    assert oldest.start_us == slice_start(oldest_us, size_us)
    with pytest.raises(SliceMissingError):
        slice_of(slices, oldest.start_us - 1)


async def test_a_hole_between_slices_is_filled() -> None:
    """A clock that was ahead for a moment has left slices far ahead, and none of now."""
    world, namespace = await begun(shards=1)
    ahead = FakeClock(world.clock.now_us() + 10 * DATASET.retention_us)
    await Maintenance(world.store, ahead).run_once()
    world.clock.advance((SLICES_AHEAD + 1) * DATASET.slice_us)
    await world.process().worker.tick()
    await world.add("c", 2)
    assert [each.count for each in await world.api.reader.read(namespace, ["c"], 0)] == [2]


async def test_a_single_process_fills_a_gap_with_one_slice(fast_dir: Path) -> None:
    """However long it is: nothing can be written there any more, and tokens of it are void."""
    async with running("sqlite", fast_dir) as app:
        dataset = (await app.store.control.datasets())[0]
        await app.rest.add("c", 1, fresh(app.clock.now_us()))
        before = await app.store.control.slices(dataset)
        for _ in range(2):
            app.clock.advance(dataset.retention_us // 2)
            within = fresh(app.clock.now_us() - dataset.slice_us * 5 // 2)
            await app.restart()
            slices = await app.store.control.slices(dataset)
            assert len(slices) <= len(before) + 1 + SLICES_AHEAD + 2
            assert all(a.end_us == b.start_us for a, b in pairwise(slices))
            answer = await app.rest.add("c", 1, within)
            assert (answer.status_code, answer.json()["applied"]) == (410, False)
            before = slices
        await app.rest.add("c", 1, fresh(app.clock.now_us()))
        assert await app.rest.count("c") == 2
