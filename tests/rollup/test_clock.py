"""A worker whose clock is wrong closes no window: events could still land in it."""

from unittest.mock import AsyncMock, patch

import pytest

from counter.errors import ClockSkewError
from counter.limits import DAY, MINUTE, SECOND
from counter.skew import ClockGuard
from counter.types import ClockReading
from tests.rollup.world import CLOSING, DATASET, World


async def test_a_worker_whose_clock_is_ahead_rolls_nothing_up() -> None:
    """It says why, and goes on when its clock is right again."""
    world = World()
    namespace = await world.begin(shards=1)
    guard = ClockGuard(world.store, world.clock)
    # The clock of another machine: one that is told without error is this machine's own.
    with patch.object(world.store, "read_clock", AsyncMock(return_value=ClockReading(0, 1))):
        await guard.measure()
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
    world = World()
    await world.begin(shards=1)
    guard = ClockGuard(world.store, world.clock)
    with patch.object(world.store, "read_clock", AsyncMock(return_value=ClockReading(0, 1))):
        await guard.measure()
    a = world.process(guard=guard)
    before = await world.store.slices(DATASET)
    world.clock._now_us += ahead_us
    with patch.object(world.store, "purge", AsyncMock(return_value=False)) as purge:
        with pytest.raises(ClockSkewError):
            await a.worker.tick()
        purge.assert_not_awaited()
    assert await world.store.slices(DATASET) == before
    world.clock._now_us -= ahead_us
    world.clock.advance(DATASET.slice_us)
    await guard.measure()
    await a.worker.tick()
    assert len(await world.store.slices(DATASET)) == len(before) + 1


async def test_a_clock_that_was_never_compared_is_not_trusted() -> None:
    """The worker waits until it is."""
    world = World()
    namespace = await world.begin(shards=1)
    guard = ClockGuard(world.store, world.clock)
    a = world.process(guard=guard)
    await world.add("c", 5)
    world.clock.advance(CLOSING + SECOND)
    with pytest.raises(ClockSkewError):
        await a.worker.tick()
    await guard.measure()
    await a.worker.tick()
    assert await world.rolled_up(namespace) == {"c": 5}
