"""A worker with a wrong clock closes no window: events could still land in it."""

from contextlib import suppress
from unittest.mock import AsyncMock, patch

import pytest

from counter.core.clock_guard import ClockGuard
from counter.errors import ClockSkewError
from counter.limits import DAY, LEASE_READ_EVERY_US, MINUTE, SECOND
from counter.types import ClockReading
from rollup.leases import MAINTENANCE, SLOTS, Leases
from tests.rollup.world import CLOSING, DATASET, LEASE_TIME, Process, World, begun


async def measured(guard: ClockGuard, world: World, ahead_us: int = 0) -> ClockGuard:
    """Compare its clock with one of another machine: one without an error is this machine's own."""
    reading = AsyncMock(return_value=ClockReading(ahead_us, 1))
    with patch.object(world.store.control, "read_clock", reading):
        await guard.measure()
    return guard


async def test_a_worker_whose_clock_is_ahead_rolls_nothing_up() -> None:
    """It says why, and goes on when its clock is right again."""
    world, namespace = await begun(shards=1)
    guard = await measured(ClockGuard(world.store.control, world.clock), world)
    a = world.process(guard=guard)
    await world.add("c", 5)
    world.clock._now_us += CLOSING
    with pytest.raises(ClockSkewError):
        await a.worker.tick()
    assert await world.rolled_up(namespace) == {}
    assert "clock" in (a.worker.trouble or "")
    world.clock._boottime_us += CLOSING
    await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 5}
    assert a.worker.trouble is None


@pytest.mark.parametrize("ahead_us", [20 * MINUTE, 365 * DAY, -20 * MINUTE])
async def test_a_worker_whose_clock_is_wrong_leaves_the_slices_alone(ahead_us: int) -> None:
    """It would make them far ahead, a table each; retire them by a time that is not; drop them."""
    world, _ = await begun(shards=1)
    guard = await measured(ClockGuard(world.store.control, world.clock), world)
    a = world.process(guard=guard)
    before = await world.store.control.slices(DATASET)
    world.clock._now_us += ahead_us
    with patch.object(world.store.control, "purge", AsyncMock(return_value=False)) as purge:
        with pytest.raises(ClockSkewError):
            await a.worker.tick()
        purge.assert_not_awaited()
    assert await world.store.control.slices(DATASET) == before
    world.clock._now_us -= ahead_us
    world.clock.advance(DATASET.slice_us)
    await guard.measure()
    await a.worker.tick()
    assert len(await world.store.control.slices(DATASET)) == len(before) + 1


async def test_a_worker_with_a_wrong_clock_gives_up_its_slots() -> None:
    """Otherwise no worker would make slices, and adds would find none at last."""
    world, _ = await begun(shards=1)
    crew = []
    for name in ("a", "b"):
        guard = ClockGuard(world.store.control, world.clock)
        await guard.measure()
        crew.append((world.process(name, guard=guard), guard))
    await world.turns(*(process for process, _ in crew))
    crew.sort(key=lambda each: not leases_of(each[0]).holds(MAINTENANCE))
    [(wrong, its_guard), (right, _)] = crew
    assert leases_of(wrong).holds(MAINTENANCE)
    await measured(its_guard, world, 10 * SECOND)
    for _ in range(LEASE_TIME // LEASE_READ_EVERY_US):
        world.clock.advance(LEASE_READ_EVERY_US)
        with suppress(ClockSkewError):
            await leases_of(wrong).update()
        await leases_of(right).update()
    assert leases_of(wrong).held() == []
    assert leases_of(right).held() == list(SLOTS)
    await measured(its_guard, world)
    await world.turns(wrong, right)
    assert leases_of(wrong).holds(MAINTENANCE)
    assert not set(leases_of(wrong).held()) & set(leases_of(right).held())


def leases_of(process: Process) -> Leases:
    assert process.leases is not None
    return process.leases


async def test_a_clock_that_was_never_compared_is_not_trusted() -> None:
    """The worker waits until it is."""
    world, namespace = await begun(shards=1)
    guard = ClockGuard(world.store.control, world.clock)
    a = world.process(guard=guard)
    await world.add("c", 5)
    world.clock.advance(CLOSING + SECOND)
    with pytest.raises(ClockSkewError):
        await a.worker.tick()
    await guard.measure()
    await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 5}
