"""A worker that cannot go on logs it, leaves nothing half done, and retries later."""

import asyncio
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest

from counter.errors import (
    NamespaceUnknownError,
    SliceMissingError,
    StoreUnavailableError,
    UnavailableError,
)
from counter.limits import MINUTE, SECOND
from counter.storage.memory import MemoryStore
from counter.testing.clock import FakeClock
from counter.types import AtomicMark, Event, Namespace, Pending, Span
from counter.windows import window_of
from rollup.batches import in_groups
from rollup.leases import SLOTS, Leases
from rollup.limiter import Limiter
from rollup.maintenance import Maintenance
from tests.rollup.world import CLOSING, DATASET, WINDOW, begun
from tests.support.parts import failing, followed
from tests.support.times import START_US
from tests.support.waiting import eventually


async def test_after_a_failure_no_further_group_is_begun() -> None:
    limiter = Limiter(FakeClock(START_US), limit_max=1)
    begun: list[int] = []

    async def work(group: int) -> int:
        begun.append(group)
        await asyncio.sleep(0)
        raise StoreUnavailableError(f"group {group}")

    with pytest.raises(StoreUnavailableError, match="group 0"):
        await in_groups(limiter, [0, 1, 2], work)
    assert begun == [0]


async def test_slices_that_vanish_again_and_again_are_trouble_that_ends() -> None:
    world, namespace = await begun(shards=1)
    await world.add("c", 7)
    world.clock.advance(CLOSING)
    worker = world.process().worker
    with (
        failing(world.store, "sums", SliceMissingError("planted")),
        pytest.raises(UnavailableError, match="dropped during each attempt"),
    ):
        await worker.tick()
    assert worker.trouble is not None
    with failing(world.store, "sums", SliceMissingError("planted"), times=2):
        await worker.tick()
    assert worker.trouble is None
    assert await world.rolled_up(namespace) == {"c": 7}


async def test_work_done_by_another_worker_counts_once() -> None:
    """It does all of it between this one's two looks at the counter."""
    world, namespace = await begun(shards=1)
    window_us = window_of(world.clock.now_us(), WINDOW)
    await world.add("c", 7)
    world.clock.advance(CLOSING)
    slow, quick = world.process(), world.process()
    await quick.worker.tick()
    await world.add("c", 1)
    left_us = window_of(world.clock.now_us(), WINDOW)
    await world.store.recounts.write_pending(namespace, [("c", Pending(window_us, left_us))])
    world.clock.advance(CLOSING)
    with followed(world.store, "heads", by=quick.worker.tick):
        await slow.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 8}
    head = await world.head(namespace)
    assert head.pending == ()


async def test_a_slice_that_is_missing_and_was_not_dropped_holds_atomic_adds_up() -> None:
    """It may be there again: nothing of them may be passed over."""
    world, namespace = await begun(shards=1)
    now_us = world.clock.now_us()
    event = Event("c", now_us, b"n" * 16, 1, 5, atom=b"all of it")
    await world.store.separate_writes.mark_atomic(
        namespace, AtomicMark(window_of(now_us, WINDOW), (event,))
    )
    await world.store.events.append_atomic(namespace, [event])
    world.clock.advance(CLOSING)
    worker = world.process().worker
    with (
        failing(world.store, "find", SliceMissingError("planted")),
        pytest.raises(SliceMissingError),
    ):
        await worker.tick()
    await worker.tick()
    assert (await world.store.rollups.watermarks(namespace))[0] > now_us


async def test_a_backlog_that_no_single_step_can_do_is_done_in_smaller_ones() -> None:
    """A failed step discards its windows; the next one has half as many, and earlier work stays."""
    world, namespace = await begun(shards=1)
    for _ in range(100):
        await world.add("c")
        world.clock.advance(WINDOW)
    world.clock.advance(CLOSING)
    worker = world.process().worker
    works, seen = world.store.events.sums, set[int]()

    async def sums(of: Namespace, windows: Any, **named: Any) -> Any:
        if len(windows) > 10:
            raise StoreUnavailableError("too much at once")
        seen.update(at for _, at in windows)
        return await works(of, windows, **named)

    with patch.object(world.store.events, "sums", sums):
        for _ in range(40):
            with suppress(StoreUnavailableError):
                await worker.tick()
    assert await world.rolled_up(namespace) == {"c": 100}
    assert len(seen) == 100
    assert worker.trouble is None


async def test_a_step_is_bounded_however_long_the_rollup_stood() -> None:
    """A week of short windows is not one read."""
    world, namespace = await begun(shards=1)
    # Without marks it would be passed in one step, without a read of any window.
    await world.add("c", 5)
    world.clock.advance(20_000 * WINDOW)
    worker, spans = world.process().worker, list[int]()
    works = world.store.separate_writes.dirty_atomic

    async def dirty_atomic(of: Namespace, shard: int, span: Span) -> Any:
        spans.append(span.to_us - span.from_us)
        return await works(of, shard, span)

    with patch.object(world.store.separate_writes, "dirty_atomic", dirty_atomic):
        await worker.tick()
    assert max(spans) <= 1_025 * WINDOW
    assert len(spans) > 10
    assert (await world.store.rollups.watermarks(namespace))[
        0
    ] > world.clock.now_us() - CLOSING - WINDOW


async def inside(limiter: Limiter, leave: asyncio.Event, order: list[str], name: str) -> None:
    async with limiter.permit():
        order.append(name)
        await leave.wait()


@pytest.mark.parametrize("at_the_same_moment", [False, True])
async def test_a_cancelled_waiter_keeps_no_place(at_the_same_moment: bool) -> None:
    """Let in at the very moment that it leaves, too: the next one goes in its place."""
    limiter = Limiter(FakeClock(START_US), limit_max=1)
    order: list[str] = []
    leave = asyncio.Event()
    first, doomed, last = (
        asyncio.create_task(inside(limiter, leave, order, name))
        for name in ("first", "doomed", "last")
    )
    await asyncio.sleep(0)
    if at_the_same_moment:
        leave.set()
        await asyncio.sleep(0)
        # The place is its own by now, and it has not run since.
        assert order == ["first"]
    doomed.cancel()
    leave.set()
    await asyncio.gather(first, doomed, last, return_exceptions=True)
    assert order == ["first", "last"]


async def test_no_failure_of_its_store_ends_the_keeping_of_leases() -> None:
    clock = FakeClock(START_US)
    store = MemoryStore(clock)
    leases = Leases(store.leases, clock, "a", lease_time_us=10 * SECOND)
    stop = asyncio.Event()
    troubles: list[str | None] = []
    errors = iter([StoreUnavailableError("down"), RuntimeError("a fault"), None])
    works = store.leases.heartbeat

    async def heartbeat(*arguments: Any) -> Any:
        troubles.append(leases.trouble)
        error = next(errors, None)
        if error is not None:
            raise error
        return await works(*arguments)

    with (
        patch.object(store.leases, "heartbeat", heartbeat),
        patch.object(leases, "_read_every_us", 1_000),
    ):
        keeping = asyncio.create_task(leases.keep(stop))
        await eventually(lambda: len(leases.held()) == len(SLOTS), "the slots are held")
        stop.set()
        await keeping
    assert troubles[0] is None
    assert all(troubles[1:3])
    assert leases.trouble is None
    with failing(store, "leave", StoreUnavailableError("down")):
        await leases.leave()
    assert leases.held() == [], "what could not be given back runs out, and is not used"


async def test_slots_that_another_worker_took_are_not_held() -> None:
    """It slept past its time; the other one has them now."""
    clock = FakeClock(START_US)
    store = MemoryStore(clock)
    one, other = (
        Leases(store.leases, clock, name, lease_time_us=10 * SECOND) for name in ("a", "b")
    )
    await one.update()
    clock.advance(11 * SECOND)
    await other.update()
    await one.update()
    assert not set(one.held()) & set(other.held())


async def test_a_deleted_namespace_holds_no_slice_back() -> None:
    world, _ = await begun(shards=1)
    keeper = Maintenance(world.store, world.clock)
    for _ in range(DATASET.retention_us // DATASET.slice_us + 4):
        world.clock.advance(DATASET.slice_us + MINUTE)
        with failing(world.store, "watermarks", NamespaceUnknownError("gone")):
            await keeper.run_once()
            await keeper.run_once()
    assert await world.store.control.dropped_before(DATASET) > START_US
