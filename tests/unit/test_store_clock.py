"""A process over a store with a clock of its own follows that clock, not the machine's."""

import asyncio
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from counter.clock import StoreClock, SystemClock
from counter.core.clock_guard import StoreClockGuard
from counter.errors import ClockSkewError, StoreUnavailableError
from counter.limits import HOUR, MILLISECOND, SECOND
from counter.testing.cases import DATASET
from counter.types import ClockReading, Dataset


class Machine(StoreClock):
    """A machine with the test's boot clock."""

    boot_us = SECOND

    def boottime_us(self) -> int:
        return self.boot_us


class Source:
    """A store with a clock that is known to within a millisecond."""

    def __init__(self, clock: Machine) -> None:
        self.clock = clock
        self.time_us = 1_000 * HOUR
        self.is_down = False

    async def datasets(self) -> list[Dataset]:
        return [DATASET]

    async def read_clock(self) -> ClockReading:
        if self.is_down:
            raise StoreUnavailableError("down", retry_after_us=SECOND)
        return ClockReading(self.time_us - self.clock.wall_us(), MILLISECOND)


@pytest.fixture(autouse=True)
def wall() -> Iterator[list[int]]:
    """The machine's wall clock, an hour ahead of the store's."""
    reading = [1_001 * HOUR]
    with patch("counter.clock.time.time_ns", lambda: reading[0] * 1_000):
        yield reading


async def test_it_shows_the_time_of_the_store_by_the_boot_clock(wall: list[int]) -> None:
    clock = Machine()
    source = Source(clock)
    guard = StoreClockGuard(source, clock)
    with pytest.raises(ClockSkewError, match="was not read yet"):
        guard.check(DATASET)
    wall[0] += HOUR
    await guard.measure()
    guard.check_all()
    assert clock.now_us() == source.time_us
    wall[0] = 0
    clock.boot_us += 5 * SECOND
    assert clock.now_us() == source.time_us + 5 * SECOND


async def test_a_clock_that_is_set_during_the_first_reading(wall: list[int]) -> None:
    clock = Machine()
    source = Source(clock)
    read_clock = source.read_clock

    async def stepped() -> ClockReading:
        reading = await read_clock()
        wall[0] -= HOUR
        return reading

    with patch.object(source, "read_clock", stepped):
        await StoreClockGuard(source, clock).measure()
    assert clock.now_us() == source.time_us


async def test_a_process_does_not_start_before_it_has_read_the_stores_clock() -> None:
    clock = Machine()
    source = Source(clock)
    guard = StoreClockGuard(source, clock)
    source.is_down = True
    with pytest.raises(StoreUnavailableError, match="the store's clock was not read yet"):
        await guard.measure()
    source.is_down = False
    await guard.measure()
    source.is_down = True
    await guard.measure()
    assert clock.now_us() == source.time_us


async def test_a_store_whose_clock_is_behind_after_a_failover_moves_no_reading_back() -> None:
    clock = Machine()
    source = Source(clock)
    guard = StoreClockGuard(source, clock)
    await guard.measure()
    latest_us = clock.now_us()
    source.time_us -= 3 * SECOND
    await guard.measure()
    assert clock.now_us() == latest_us
    assert clock.wall_us() == source.time_us
    guard.check_all()


async def test_a_clock_that_cannot_be_read_for_long_is_refused() -> None:
    clock = Machine()
    source = Source(clock)
    guard = StoreClockGuard(source, clock)
    await guard.measure()
    source.is_down = True
    for _ in range(14):
        await guard.measure()
    guard.check_all()
    await guard.measure()
    with pytest.raises(ClockSkewError, match="could not be read 15 times in a row"):
        guard.check_all()


async def test_comparisons_run_one_at_a_time() -> None:
    """Otherwise the result of an older one could replace that of a newer one."""
    clock = Machine()
    source = Source(clock)
    running, most = 0, 0
    read_clock = source.read_clock

    async def counted() -> ClockReading:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await read_clock()

    guard = StoreClockGuard(source, clock)
    with patch.object(source, "read_clock", counted):
        await asyncio.gather(guard.measure(), guard.measure())
    assert most == 1


def test_until_it_is_measured_it_shows_this_machines_clock() -> None:
    with (
        patch.object(SystemClock, "wall_us", return_value=7 * SECOND),
        patch.object(SystemClock, "boottime_us", return_value=3 * SECOND),
    ):
        assert StoreClock().wall_us() == 7 * SECOND
