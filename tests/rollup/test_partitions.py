"""The next slice has as many event buckets as the last ones needed."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.capabilities import PartitionSize
from counter.errors import StoreUnavailableError
from counter.storage.sqlite.settings import SqliteSettings
from counter.testing.clock import FakeClock
from counter.types import Namespace, Slice
from counter.windows import shard_of, slice_start
from rollup.leases import MAINTENANCE, slot_of
from rollup.partitions import (
    EVENT_BYTES,
    SLICES_COUNTED,
    SLICES_REMEMBERED,
    Partitions,
    buckets_after,
)
from tests.rollup.world import CLOSING, DATASET, WINDOW, Process, World, begun
from tests.support.times import START_US

#: A partition is to hold ten events.
TARGET = 10 * EVENT_BYTES
SLICE = DATASET.slice_us
HOT = replace(DATASET, event_buckets_max=8)


@pytest.fixture(autouse=True)
def small_partitions() -> Iterator[None]:
    with patch("rollup.partitions.PARTITION_BYTES_MAX", TARGET):
        yield


@pytest.mark.parametrize(
    ("standing", "events", "expected"),
    [
        (1, 0, 1),
        (1, 10, 1),
        (1, 11, 2),
        (1, 20, 2),
        (1, 21, 4),
        (1, 70, 8),
        (1, 81, 8),
        (2, 20, 2),
        (2, 21, 4),
        (8, 21, 8),
        (8, 20, 4),
        (8, 0, 4),
        (4, 10, 2),
        (2, 5, 1),
        (2, 6, 2),
        (16, 1_000, 8),
    ],
)
def test_a_number_is_raised_at_once_and_lowered_by_half(
    standing: int, events: int, expected: int
) -> None:
    """To a power of two, up to the bound; lowered if a quarter of the room suffices."""
    size = events * EVENT_BYTES
    assert buckets_after(HOT, standing, size, TARGET, may_lower=True) == expected
    kept = buckets_after(HOT, standing, size, TARGET, may_lower=False)
    assert kept == max(expected, min(standing, 8))


@given(
    least=st.integers(1, 12),
    most=st.integers(1, 256),
    standing=st.integers(1, 256),
    size=st.integers(0, 10**12),
    may_lower=st.booleans(),
)
def test_a_number_stays_between_the_settings_and_does_not_swing(
    least: int, most: int, standing: int, size: int, may_lower: bool
) -> None:
    """Lowering and raising have different thresholds."""
    dataset = replace(DATASET, event_buckets=least, event_buckets_max=most)
    number = buckets_after(dataset, standing, size, TARGET, may_lower=may_lower)
    assert least <= number <= max(least, most)
    again = buckets_after(dataset, number, size, TARGET, may_lower=may_lower)
    was_in_bounds = least <= standing <= max(least, most)
    if number > standing:
        assert again == number
    elif number < standing and was_in_bounds:
        assert may_lower
        assert number >= standing // 2
        assert again <= number
    if size > number * TARGET:
        assert number == max(least, most)


async def pass_slice(
    world: World, *processes: Process, adds: int = 0, counter: str = "hot"
) -> None:
    """Add in several windows, share the counts, and go on to the next slice."""
    for number in range(adds):
        await world.add(counter)
        if number % 4 == 3:
            world.clock.advance(WINDOW)
    world.clock.advance(CLOSING)
    for each in processes:
        await each.worker.tick()
    for each in processes:
        await each.worker.check_partitions()
    now_us = world.clock.now_us()
    world.clock.advance(SLICE - now_us % SLICE)
    for each in processes:
        await each.worker.tick()


async def numbers(world: World) -> list[int]:
    return [each.event_buckets for each in await world.store.control.slices(HOT)]


async def test_a_hot_counter_has_the_next_slice_made_with_more() -> None:
    """Existing slices stay; a token stays in its place, and every count is right."""
    world, namespace = await begun(HOT)
    a = world.process()
    await pass_slice(world, a, adds=35)
    assert await numbers(world) == [1, 1, 1, 1, 4]
    for _ in range(3):
        for _ in range(7):
            token = world.token()
            for _ in range(2):
                await world.api.add(namespace, "hot", 1, token)
        await pass_slice(world, a)
    assert await numbers(world) == [1, 1, 1, 1, 4, 4, 4, 4]
    for _ in range(7):
        token = world.token()
        for _ in range(2):
            await world.api.add(namespace, "hot", 1, token)
    raised = world.store.tables.state_of(HOT).tables[
        (await world.store.control.slices(HOT))[4].start_us
    ]
    assert len({bucket for _, _, bucket in raised[namespace.id]}) > 1
    await world.roll_up(a)
    assert await world.rolled_up(namespace) == {"hot": 35 + 4 * 7}
    read = await world.api.reader.read_one(namespace, "hot", max_staleness_us=0)
    assert read.count == 35 + 4 * 7


async def test_slices_follow_the_counts_of_another_worker() -> None:
    """Each sees its own shards; the slices are one worker's business."""
    world, _ = await begun(HOT, shards=64)
    a, b = await world.shared("a", "b")
    maker, other = (a, b) if a.worker._holds(MAINTENANCE) else (b, a)
    namespace = world.api.namespaces.get("n")
    names = (f"c{n}" for n in range(1_000))
    theirs = next(name for name in names if _rolls(other, namespace, name))
    for _ in range(35):
        await world.add(theirs)
    world.clock.advance(CLOSING)
    await world.turns(a, b)
    for each in (other, maker):
        await each.worker.tick()
        await each.worker.check_partitions()
    for each in (other, maker):
        outlook = each.worker.partitions.outlooks["default"]
        assert (outlook.buckets_now, outlook.buckets_next) == (1, 4)
        assert outlook.largest_bytes_now == 35 * EVENT_BYTES
        assert outlook.largest_bytes_expected == 35 * EVENT_BYTES / 4
    world.clock.advance(SLICE)
    await world.turns(a, b)
    await maker.worker.tick()
    assert await numbers(world) == [1, 1, 1, 1, 4]
    assert maker.worker.partitions.outlooks["default"].raised == 1
    assert other.worker.partitions.outlooks["default"].raised == 0


def _rolls(process: Process, namespace: Namespace, counter: str) -> bool:
    return process.worker._holds(slot_of(namespace.id, shard_of(counter, 64)))


async def test_a_new_worker_makes_slices_by_known_counts() -> None:
    """The counts are in the store, and the present number is in the last slice."""
    world, _ = await begun(HOT)
    a = world.process()
    for _ in range(35):
        await world.add("hot")
    await world.roll_up(a)
    await a.worker.check_partitions()
    for expected in (4, 4):
        world.clock.advance(SLICE)
        await world.process().worker.tick()
        assert (await numbers(world))[-1] == expected


async def test_a_number_is_lowered_slice_by_slice_when_the_largest_size_is_long_gone() -> None:
    """After the slices that are remembered, and no sooner; never below the settings."""
    world, _ = await begun(replace(HOT, event_buckets=2))
    a = world.process()
    await pass_slice(world, a, adds=70)
    made = [(await numbers(world))[-1]]
    for _ in range(SLICES_REMEMBERED + 2):
        await pass_slice(world, a, adds=1)
        made.append((await numbers(world))[-1])
    assert made == [8] * (SLICES_REMEMBERED - 1) + [4, 2, 2, 2]


async def test_without_counts_nothing_is_lowered() -> None:
    """A stalled rollup is no sign of few events."""
    world, _ = await begun(HOT)
    a = world.process()
    await pass_slice(world, a, adds=35)
    for _ in range(SLICES_REMEMBERED + 2):
        await pass_slice(world, a)
    assert (await numbers(world))[-1] == 4
    for _ in range(SLICES_COUNTED):
        assert (await numbers(world))[-1] == 4
        await pass_slice(world, a, adds=1)
    assert (await numbers(world))[-1] == 2


async def test_sizes_reported_by_nodes_count_too() -> None:
    """Rows may be larger than assumed; the node that was down reports it later."""
    world, _ = await begun(HOT)
    a = world.process()
    (*_, now, _, _) = await world.store.control.slices(HOT)
    seen = PartitionSize(now.start_us, HOT.time_bucket_us, 15 * EVENT_BYTES)
    with patch.object(world.store.partition_sizes, "observe", return_value=[seen]) as asked:
        await a.worker.tick()
        for _ in range(3):
            await a.worker.check_partitions()
        assert asked.call_count == 1
        await pass_slice(world, a, adds=1)
        world.clock.advance(SLICE)
        await a.worker.check_partitions()
    assert asked.call_count == 2
    assert (await numbers(world))[-1] == 2


async def test_a_shorter_time_bucket_is_reckoned_with() -> None:
    """Counts of long slices are divided evenly, until short ones are counted."""
    world, _ = await begun(HOT)
    await pass_slice(world, world.process(), adds=35)
    shorter = replace(HOT, time_bucket_us=HOT.time_bucket_us // 5)
    partitions = world.process().worker.partitions
    await partitions.check([shorter], is_first=True)
    outlook = partitions.outlooks["default"]
    assert outlook.largest_bytes_expected == 35 * EVENT_BYTES / 5 / 4


@pytest.mark.parametrize(
    "error", [StoreUnavailableError("a planted fault"), TypeError("no str, but None")]
)
async def test_slices_are_made_though_the_sizes_cannot_be_read(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """With the last number of event buckets. It is logged once, and is no error of the rollup."""
    caplog.set_level(logging.WARNING)
    world, _ = await begun(HOT)
    a = world.process()
    await pass_slice(world, a, adds=35)
    caplog.clear()
    with patch.object(world.store.partition_sizes, "recorded", side_effect=error):
        await pass_slice(world, a)
    assert await numbers(world) == [1, 1, 1, 1, 4, 4]
    assert a.worker.trouble is None
    assert a.worker.partitions.failures == 2
    (lines,) = caplog.records
    assert "partition sizes cannot be read, and event_buckets stay as they" in lines.getMessage()
    assert bool(lines.exc_info) == isinstance(error, TypeError)
    await pass_slice(world, a)
    assert a.worker.partitions.failures == 2


async def test_a_worker_that_is_far_behind_records_no_size_that_no_longer_counts() -> None:
    """It would expire long after it was of use, and be left again with the same timestamp."""
    world, _ = await begun(HOT)
    a = world.process()
    await a.worker.tick()
    (dataset,) = await world.store.control.datasets()
    counted = a.worker.partitions.counting(world.api.namespaces.get("n"))
    assert counted is not None
    now_us = slice_start(world.clock.now_us(), SLICE)
    oldest_us = now_us - (SLICES_REMEMBERED - 1) * SLICE
    for start_us in (oldest_us - SLICE, oldest_us):
        counted("hot", start_us, 35)
    await a.worker.check_partitions()
    assert [each.start_us for each in await world.store.partition_sizes.recorded(dataset)] == [
        oldest_us
    ]


async def test_a_planned_change_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """By the worker that makes slices: the counter, its size, the time, and the number."""
    caplog.set_level(logging.INFO, "counter.partitions")
    world, _ = await begun(HOT)
    a, b = await world.shared("a", "b")
    for _ in range(85):
        await world.add("hot")
    world.clock.advance(CLOSING)
    await world.turns(a, b)
    for _ in range(2):
        for each in (a, b):
            await each.worker.tick()
        for each in (a, b, a, b):
            await each.worker.check_partitions()
    lines = [each.getMessage() for each in caplog.records if each.name == "counter.partitions"]
    assert len(lines) == 2
    assert lines[0] == (
        "dataset default: counter 'hot' of namespace 'n' fills partitions of 5.44 kB (5.44 kB in a"
        " time bucket of 10m), where 640 B are good: the next slice to be made, from"
        " 2026-03-01T12:30:00Z on, has 8 event buckets instead of 1"
    )
    assert "event_buckets_max is 8, and partitions of 680 B are still to be expected" in lines[1]


async def test_without_growth_no_node_is_asked() -> None:
    world, namespace = await begun(DATASET)
    a = world.process()
    asked: list[Any] = []
    with patch.object(world.store.partition_sizes, "recorded", side_effect=asked.append):
        await pass_slice(world, a, adds=35)
    assert not asked
    assert a.worker.partitions.outlooks == {}
    assert a.worker.partitions.counting(namespace) is None
    assert set(await numbers(world)) == {1}


async def test_sqlite_has_no_partitions(fast_dir: Path) -> None:
    """A slice is one tree in order of time, however many event buckets it is said to have."""
    clock = FakeClock(START_US)
    settings = SqliteSettings(data=fast_dir, event_buckets_max=64)
    store = settings.kind.open(settings, clock)
    await store.open()
    (dataset,) = await store.control.datasets()
    partitions = Partitions(store, clock)
    await partitions.check([dataset], is_first=True)
    assert dataset.event_buckets_max == 64
    assert partitions.outlooks == {}
    assert await partitions.next_buckets(dataset, Slice(0, 1, 1, 5)) == 1
    await store.close()
