"""A worker whose clock is wrong closes no window: events could still land in it."""

from unittest.mock import AsyncMock, patch

import pytest

from counter.errors import ClockSkewError
from counter.limits import SECOND
from counter.skew import ClockGuard
from counter.types import ClockReading
from tests.rollup.world import CLOSING, World


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
