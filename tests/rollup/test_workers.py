"""Several workers over one store: they share the work, and overlaps come out right."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.routes.paging import CounterLists
from counter.core.read import EMPTY_HEAD, CountReader, read_heads_and_rows
from counter.errors import SliceMissingError, StoreUnavailableError
from counter.limits import SECOND
from counter.storage.shared.memory_cache import MemoryCache
from counter.types import Checkpoint, CounterType, CounterUpdate, Head, Pending, WindowRow
from counter.windows import closed_through, shard_of
from rollup.roller import BatchTimes, Dirt, plan
from tests.rollup.world import CLOSING, DATASET, LEASE_TIME, WINDOW, World, begun
from tests.support.parts import failing, part_of
from tests.support.waiting import eventually


@contextmanager
def small_reads(marks: int) -> Iterator[None]:
    """Have a pass read so few marks at a time that it is made of many parts."""
    with patch("rollup.worker._MARKS_PER_READ", marks):
        yield


async def test_two_workers_share_the_counters() -> None:
    """Each rolls up its part, nothing is done twice, and all of it is done."""
    world, namespace = await begun()
    expected = await world.add_many(200)
    a, b = await world.shared("a", "b")
    world.clock.advance(CLOSING)
    await world.turns(a, b)
    await asyncio.gather(a.worker.tick(), b.worker.tick())
    assert await world.rolled_up(namespace) == expected
    shares = [each.worker.tally["counters"] for each in (a, b)]
    assert sum(shares) == 200
    assert min(shares) > 50


@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from([2, 6]))
def test_workers_that_know_nothing_of_each_other_count_right(
    seed: int, reads: int, shards: int
) -> None:
    """All of them roll up everything, at once, each at its own pace."""

    async def play() -> None:
        world, namespace = await begun(shards=shards)
        expected: dict[str, int] = {}
        processes = [world.process(seed=seed + each) for each in range(3)]
        for number in range(4):
            for name in ("a", "b", f"c{number}"):
                await world.add(name, number)
                expected[name] = expected.get(name, 0) + number
            world.clock.advance(CLOSING // 2)
            await asyncio.gather(*(each.worker.tick() for each in processes))
        world.clock.advance(CLOSING)
        await asyncio.gather(*(each.worker.tick() for each in processes))
        assert await world.rolled_up(namespace) == expected

    with small_reads(reads):
        asyncio.run(play())


@pytest.mark.parametrize("where", ["dirty", "heads", "sums", "apply", "apply done", "advance"])
async def test_a_lease_that_is_lost_in_the_middle_does_no_harm(where: str) -> None:
    """Another worker does the batch, and more; then the first one continues."""
    world, namespace = await begun(shards=1)
    await world.add_many(20)
    a = world.process("a")
    await world.turns(a)
    world.clock.advance(CLOSING)
    await world.turns(a)
    slow = await a.held_in(where)
    await world.add("c7", 100)
    world.clock.advance(LEASE_TIME + CLOSING)
    b = world.process("b")
    await world.turns(b)
    await b.worker.tick()
    expected = {f"c{each}": each for each in range(20)} | {"c7": 107}
    assert await world.rolled_up(namespace) == expected
    watermarks = await world.store.rollups.watermarks(namespace)
    a.road.open.set()
    await slow
    assert await world.rolled_up(namespace) == expected
    assert await world.store.rollups.watermarks(namespace) == watermarks
    world.clock.advance(CLOSING)
    await world.turns(b)
    await b.worker.tick()
    assert await world.rolled_up(namespace) == expected


@pytest.mark.parametrize("shards", [1, 3])
async def test_a_worker_begins_nothing_more_when_its_leases_are_lost(shards: int) -> None:
    """Of no shard. It finishes its work; the next worker does the rest, and nothing is lost."""
    world = World()
    with patch("rollup.worker._SHARDS_AT_ONCE_MAX", 1):
        namespace = await world.begin(shards=shards)
        expected = await world.add_many(30)
        a, b = world.process("a"), world.process("b")
        world.clock.advance(CLOSING)
        await world.turns(a)
        a.road.hold_in = "apply"
        with small_reads(5):
            slow = asyncio.create_task(a.worker.tick())
            await a.road.held.wait()
            world.clock.advance(LEASE_TIME)
            a.road.open.set()
            await slow
    assert a.worker.tally["counters"] == 5
    await world.turns(b)
    await b.worker.tick()
    assert await world.rolled_up(namespace) == expected


async def test_a_dead_workers_shards_are_rolled_up_by_the_other() -> None:
    """As soon as its leases ran out, from wherever it was killed."""
    world, namespace = await begun()
    expected = await world.add_many(100)
    a, b = await world.shared("a", "b")
    world.clock.advance(CLOSING)
    await world.turns(a, b)
    a.road.hold_at = a.road.steps + 40
    dying = asyncio.create_task(a.worker.tick())
    await a.road.held.wait()
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    await b.worker.tick()
    assert await world.rolled_up(namespace) != expected
    world.clock.advance(LEASE_TIME)
    await world.turns(b)
    await b.worker.tick()
    assert await world.rolled_up(namespace) == expected


async def test_work_repeated_after_a_crash_gives_the_same_result() -> None:
    """The next worker cannot tell how many replicas have it, and does all of the batch."""
    world, namespace = await begun(shards=1)
    expected = await world.add_many(20)
    a, b = world.process("a"), world.process("b")
    world.clock.advance(CLOSING)
    await world.turns(a)
    dying = await a.held_in("advance")
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    world.clock.advance(LEASE_TIME + CLOSING)
    await world.turns(b)
    assert await b.worker.tick() == 20
    assert await world.rolled_up(namespace) == expected
    assert await b.worker.tick() == 0


async def test_a_checkpoint_whose_row_cannot_be_seen_is_counted_again() -> None:
    """A given-up batch may be on one replica: its checkpoint spreads by reads, its row does not."""
    world, namespace = await begun(shards=1)
    await world.add("c", 5)
    window_us = world.clock.now_us() // WINDOW * WINDOW
    target_us = window_us + WINDOW - 1
    seen = CounterUpdate("c", rows=(), checkpoint=Checkpoint(target_us, 5))
    await world.store.rollups.apply(namespace, [seen], through_us=target_us)
    worker = world.process()
    await world.roll_up(worker)
    [(_, rows)] = await read_heads_and_rows(world.store, namespace, ["c"], through_us=target_us)
    assert rows == [WindowRow(window_us, False, 5)]
    assert await world.rolled_up(namespace) == {"c": 5}


async def test_a_reader_that_counts_for_itself_goes_no_further_than_the_watermark() -> None:
    """Rows after it need not be seen by everybody yet, though a checkpoint that holds them is."""
    world, namespace = await begun(shards=1)
    (watermark_us,) = await world.store.rollups.watermarks(namespace)
    target_us = world.clock.now_us() // WINDOW * WINDOW + WINDOW - 1
    seen = CounterUpdate("c", rows=(), checkpoint=Checkpoint(target_us, 5))
    await world.store.rollups.apply(namespace, [seen], through_us=target_us)
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    eventual = replace(
        namespace, settings=replace(namespace.settings, counter_type=CounterType.EVENTUAL)
    )
    (count,) = await reader.read(eventual, ["c"], None)
    assert (count.count, count.as_of_us) == (5, target_us)
    recount = Pending(watermark_us + 1 - WINDOW, target_us + 1)
    await world.store.recounts.write_pending(namespace, [("c", recount)])
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    (count,) = await reader.read(eventual, ["c"], None)
    assert (count.count, count.as_of_us) == (0, watermark_us)


async def test_a_recount_whose_slice_is_dropped_is_abandoned() -> None:
    """A worker wakes in the middle of it, and the events are gone: its rollup is kept."""
    world, namespace = await begun(shards=1)
    await world.add("c", 5)
    window_us = world.clock.now_us() // WINDOW * WINDOW
    a, b = world.process(), world.process()
    await world.roll_up(a)
    await world.api.resolver.request_recounts(namespace, [("c", window_us)], for_readers=False)
    world.clock.advance(CLOSING)
    asleep = await a.held_in("sums")
    await world.pass_slices(b)
    assert await world.store.control.dropped_before(DATASET) > window_us
    a.road.open.set()
    await asleep
    assert a.worker.trouble is None
    assert await world.rolled_up(namespace) == {"c": 5}


async def test_rows_that_are_folded_away_between_two_reads_are_not_lost() -> None:
    """Two workers settle and recount in the same batch, one between two reads of the other."""
    world, namespace = await begun(shards=1)
    await world.add("c", 5)
    a, b = world.process(), world.process()
    await world.pass_slices(b)
    await world.add("c", 2)
    window_us = world.clock.now_us() // WINDOW * WINDOW
    await world.api.resolver.request_recounts(namespace, [("c", window_us)], for_readers=False)
    world.clock.advance(CLOSING)
    slow = await a.held_in("heads done")
    await b.worker.tick()
    head = await world.head(namespace)
    assert head.settled.count == 5
    a.road.open.set()
    await slow
    assert await world.rolled_up(namespace) == {"c": 7}


async def test_a_stopping_worker_finishes_its_work() -> None:
    """Its slots are free at once, and nothing is half done."""
    world, namespace = await begun(shards=1)
    expected = await world.add_many(10)
    a = world.process("a")
    world.clock.advance(CLOSING)
    await a.namespaces.refresh()
    a.road.hold_in = "apply"
    running = asyncio.create_task(a.worker.run(stop := asyncio.Event()))
    await a.road.held.wait()
    stop.set()
    await asyncio.sleep(0)
    assert not running.done()
    assert list(await world.store.leases.workers()) == ["a"]
    a.road.open.set()
    await running
    assert await world.rolled_up(namespace) == expected
    assert list(await world.store.leases.workers()) == []


async def test_a_stopping_worker_cancels_slow_work() -> None:
    """The next worker does the rest again."""
    world, namespace = await begun(shards=1)
    expected = await world.add_many(10)
    a = world.process("a")
    world.clock.advance(CLOSING)
    await a.namespaces.refresh()
    a.road.hold_in = "apply"
    running = asyncio.create_task(a.worker.run(stop := asyncio.Event(), 0))
    await a.road.held.wait()
    stop.set()
    await asyncio.wait_for(running, 30)
    assert await world.rolled_up(namespace) != expected
    b = world.process("b")
    await world.turns(b)
    await b.worker.tick()
    assert await world.rolled_up(namespace) == expected


async def test_shards_that_become_ours_are_looked_at_at_once() -> None:
    """Not at the end of a pause: somebody's time was up before."""
    world, namespace = await begun()
    expected = await world.add_many(10)
    world.clock.advance(CLOSING)
    a = world.process("a")

    async def all_is_rolled_up() -> bool:
        return await world.rolled_up(namespace) == expected

    await a.namespaces.refresh()
    stop = asyncio.Event()
    with patch("rollup.worker._PAUSE_MIN_US", 3_600 * SECOND):
        running = asyncio.create_task(a.worker.run(stop))
        await eventually(all_is_rolled_up, "all is rolled up")
        stop.set()
        await running


async def test_a_worker_without_a_lease_does_nothing() -> None:
    """Not even look after the slices."""
    world, namespace = await begun()
    await world.add_many(10)
    a = world.process("a")
    await world.turns(a)
    idle = world.process("idle")
    world.clock.advance(CLOSING)
    with patch.object(world.store.control, "make_slices", side_effect=AssertionError):
        world.clock.advance(30 * 60 * SECOND)
        assert await idle.worker.tick() == 0
    assert await world.rolled_up(namespace) == {}


async def test_a_shard_that_has_nothing_to_close_is_not_read() -> None:
    """Looking often costs the store nothing."""
    world, _ = await begun()
    await world.add_many(10)
    a = world.process()
    world.clock.advance(CLOSING)
    assert await a.worker.tick() == 10
    with patch.object(world.store.rollups, "watermarks", side_effect=AssertionError):
        assert await a.worker.tick() == 0


async def test_a_deleted_namespace_ends_its_shards_work_and_no_other() -> None:
    """Deleted by another process, in the middle of a pass."""
    world = World()
    doomed = await world.begin()
    kept = await world.create("kept")
    for name in ("n", "kept"):
        await world.add("c", 5, namespace=name)
    a = world.process()
    world.clock.advance(CLOSING)
    rolling = await a.held_in("heads")
    await world.api.namespaces.delete(doomed)
    a.road.open.set()
    await rolling
    assert await world.rolled_up(kept) == {"c": 5}
    assert a.worker.trouble is None
    await a.worker.tick()
    assert set(a.worker.passed_through()) == {(kept.id, shard) for shard in range(16)}


async def test_a_namespace_made_by_another_process_is_rolled_up() -> None:
    """From the next refresh of the directory on; one recreated under an old name, too."""
    world = World()
    first = await world.begin()
    a = world.process()
    await a.worker.tick()
    await world.api.namespaces.delete(first)
    second = await world.create("n", shards=1)
    await world.add("c", 5)
    await world.roll_up(a)
    assert await world.rolled_up(second) == {"c": 5}


async def test_no_window_is_closed_by_an_old_copy_of_the_directory() -> None:
    """The accept limit may have grown since: adds could land in the window still."""
    world, namespace = await begun()
    await world.add("c", 5)
    a = world.process()
    await a.namespaces.refresh()
    world.clock.advance(CLOSING)
    stop = asyncio.Event()
    running = asyncio.create_task(a.worker.run(stop))

    await eventually(
        lambda: "namespaces" in (a.worker.trouble or ""), "the worker says what it lacks"
    )
    stop.set()
    await running
    assert await world.rolled_up(namespace) == {}


@pytest.mark.parametrize("method", ["watermarks", "dirty", "sums", "apply", "advance"])
async def test_trouble_of_one_shard_holds_up_no_other(method: str) -> None:
    """It is reported, and over when the shard can be rolled up again."""
    world, namespace = await begun(shards=1)
    other = await world.create("other", shards=1)
    for name in ("n", "other"):
        await world.add("c", 5, namespace=name)
    a = world.process()
    world.clock.advance(CLOSING)
    part = part_of(world.store, method)
    works = getattr(part, method)

    async def fails_for_one(of: Any, *arguments: Any, **named: Any) -> Any:
        if of.id == namespace.id:
            raise ZeroDivisionError("a bug that a test planted")
        return await works(of, *arguments, **named)

    with patch.object(part, method, fails_for_one), pytest.raises(ZeroDivisionError):
        await a.worker.tick()
    assert await world.rolled_up(other) == {"c": 5}
    assert a.worker.trouble is not None
    await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 5}
    assert a.worker.trouble is None


async def test_a_shard_that_is_behind_alternates_with_the_rest() -> None:
    """Its lane is not its own until it has caught up; when no other shard waits, it goes on."""
    world = World()
    behind = await world.begin(shards=1)
    for _ in range(6):
        await world.add("c")
        world.clock.advance(WINDOW)
    healthy = await world.create("other", shards=1)
    await world.add("c", 5, namespace="other")
    with patch("rollup.worker._SHARDS_AT_ONCE_MAX", 1), small_reads(1):
        a = world.process()
        await world.roll_up(a)
        assert await world.rolled_up(behind) == {"c": 1}
        assert await world.rolled_up(healthy) == {"c": 5}
        await a.worker.tick()
    assert await world.rolled_up(behind) == {"c": 6}


async def test_a_step_asks_for_few_windows_if_one_read_holds_few() -> None:
    """Each read takes a pass over all the windows that it asks for."""
    world, namespace = await begun(shards=1)
    for _ in range(40):
        world.clock.advance(WINDOW)
        await world.add("c")
    world.clock.advance(CLOSING)
    with (
        small_reads(4),
        patch.object(
            world.store.rollups, "dirty", AsyncMock(wraps=world.store.rollups.dirty)
        ) as dirty,
    ):
        await world.process().worker.tick()
    spans = [span.to_us - span.from_us for span in (call.args[2] for call in dirty.mock_calls)]
    # The first ones are of windows before the first event, too.
    assert max(spans[2:]) <= 8 * WINDOW
    assert await world.rolled_up(namespace) == {"c": 40}


async def test_shards_without_marks_share_one_read_and_one_write() -> None:
    """From the first look of a process on, and at every later one."""
    world, namespace = await begun()
    a = world.process()
    world.clock.advance(CLOSING)
    marked, advance = (
        AsyncMock(wraps=world.store.rollups.marked),
        AsyncMock(wraps=world.store.rollups.advance),
    )
    with (
        patch.multiple(world.store.rollups, marked=marked, advance=advance),
        patch.object(world.store.rollups, "dirty", side_effect=AssertionError),
        patch.object(world.store.separate_writes, "dirty_atomic", side_effect=AssertionError),
    ):
        for looks in (1, 2):
            await a.worker.tick()
            assert [marked.await_count, advance.await_count] == [looks, looks]
            closed_us = closed_through(namespace, world.clock.now_us())
            assert await world.store.rollups.watermarks(namespace) == [closed_us] * 16
            assert set(a.worker.passed_through().values()) == {closed_us}
            world.clock.advance(WINDOW)


async def test_marks_that_a_crash_left_are_dropped_though_their_watermark_passed_them() -> None:
    """By the next process's first pass: shards without any share theirs."""
    world, namespace = await begun()
    await world.add("c", 5)
    world.clock.advance(CLOSING)
    a, b = world.process(), world.process()
    error = StoreUnavailableError("a planted crash")
    with failing(world.store, "drop_marks", error, 1), pytest.raises(StoreUnavailableError):
        await a.worker.tick()
    world.clock.advance(WINDOW)
    drop_marks = AsyncMock(wraps=world.store.rollups.drop_marks)
    with patch.object(world.store.rollups, "drop_marks", drop_marks):
        await b.worker.tick()
    assert [call.args[1] for call in drop_marks.await_args_list] == [shard_of("c", 16)]
    assert await world.rolled_up(namespace) == {"c": 5}


async def test_a_shard_with_marks_among_idle_ones_has_a_pass_of_its_own() -> None:
    world, namespace = await begun()
    a = world.process()
    await world.roll_up(a)
    await world.add("c", 5)
    world.clock.advance(CLOSING)
    dirty = AsyncMock(wraps=world.store.rollups.dirty)
    with patch.object(world.store.rollups, "dirty", dirty):
        await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 5}
    assert {call.args[1] for call in dirty.await_args_list} == {shard_of("c", 16)}
    assert len(set(await world.store.rollups.watermarks(namespace))) == 1


@pytest.mark.parametrize("method", ["marked", "advance", "fence"])
async def test_shards_that_cannot_be_passed_together_are_passed_each(method: str) -> None:
    """It is reported, and over when they can be again."""
    world, namespace = await begun()
    a = world.process()
    await world.roll_up(a)
    await world.add("c", 5)
    world.clock.advance(CLOSING)
    error = StoreUnavailableError("a failure that a test planted")
    with failing(world.store, method, error, 1), pytest.raises(StoreUnavailableError):
        await a.worker.tick()
    assert a.worker.trouble == error.detail
    assert await world.rolled_up(namespace) == {"c": 5}
    assert len(set(await world.store.rollups.watermarks(namespace))) == 1
    await a.worker.tick()
    assert a.worker.trouble is None


@pytest.mark.parametrize("shards_at_once", [1, 3])
async def test_the_number_of_concurrent_shards_is_bounded(shards_at_once: int) -> None:
    world, namespace = await begun()
    expected = await world.add_many(50)
    with patch("rollup.worker._SHARDS_AT_ONCE_MAX", shards_at_once):
        worker = world.process().worker
    roll, now, most = worker.roll_shard, 0, 0

    async def counted(*arguments: Any) -> int:
        nonlocal now, most
        now += 1
        most = max(now, most)
        try:
            return await roll(*arguments)
        finally:
            now -= 1

    world.clock.advance(CLOSING)
    with patch.object(worker, "roll_shard", counted):
        await worker.tick()
    assert await world.rolled_up(namespace) == expected
    assert most == shards_at_once


async def test_rolled_up_counts_are_cached_with_their_time() -> None:
    world, namespace = await begun()
    expected = await world.add_many(5)
    worker = world.process().worker
    world.clock.advance(CLOSING)
    await worker.tick()
    cached = await worker.batches.cache.get_many(namespace, list(expected))
    heads = await world.store.rollups.heads(namespace, list(expected))
    assert list(cached) == [head and head.checkpoint for head in heads]
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    through_us, parts = await CounterLists(reader, world.store).rolled_up(namespace, "")
    found = [each[:3] async for part in parts for each in part]
    assert found == [(name, count, through_us) for name, count in expected.items()]


async def test_a_batch_restarted_after_a_drop_ends_at_the_same_place() -> None:
    world, namespace = await begun()
    batches, batch = world.process().worker.batches, BatchTimes(99, 0, WINDOW)
    tried: list[BatchTimes] = []

    async def once(_: object, __: object, each: BatchTimes) -> list[Any]:
        tried.append(each)
        if len(tried) == 1:
            raise SliceMissingError("dropped meanwhile")
        return []

    with patch.object(batches, "_roll_once", once):
        await batches._roll_group(namespace, {}, batch)
    dropped_us = await world.store.control.dropped_before(DATASET)
    assert tried == [batch, BatchTimes(99, dropped_us, WINDOW)]


async def test_a_counter_whose_rows_are_read_is_planned_from_the_head_of_their_moment() -> None:
    """Another worker may have moved the head since it was read first."""
    world, namespace = await begun(shards=1)
    await world.add("c", 5)
    batches = world.process().worker.batches
    dirty = {"c": Dirt([], [world.clock.now_us() // WINDOW * WINDOW])}
    world.clock.advance(CLOSING)
    batch = BatchTimes(closed_through(namespace, world.clock.now_us()), 0, WINDOW)
    before = plan("c", dirty["c"], EMPTY_HEAD, batch)
    assert before is not None
    await world.process().worker.tick()
    [head] = await world.store.rollups.heads(namespace, ["c"])
    [planned], rows = await batches._replan_with_rows(namespace, [before], dirty, batch)
    assert head is not None
    assert planned.head == head
    assert [each.total for each in rows["c"]] == [5]


async def test_a_settling_between_two_looks_at_a_head_and_its_rows_is_noticed() -> None:
    """The rows that it folded away are in the head that is returned, or are returned."""
    world, namespace = await begun(shards=1)
    row, settled = WindowRow(0, False, 5), Checkpoint(9, 5)
    steps = 0

    async def heads(*_: object) -> list[Head]:
        return [Head(settled, settled if passed() else Checkpoint(-1, 0))]

    async def rows(*_: object, **__: object) -> list[list[WindowRow]]:
        return [[] if passed() else [row]]

    def passed() -> bool:
        """Take a step; return whether the settling came before it."""
        nonlocal steps
        steps += 1
        return steps > 2

    rollups = world.store.rollups
    with patch.object(rollups, "heads", heads), patch.object(rollups, "rows", rows):
        [(head, found)] = await read_heads_and_rows(world.store, namespace, ["c"], through_us=100)
    assert head.settled.count + sum(each.total for each in found) == 5
