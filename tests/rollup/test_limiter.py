"""Back-pressure: the limit grows while the store answers in time, and is halved when not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.errors import (
    NamespaceUnknownError,
    OverloadedError,
    SliceMissingError,
    StoreUnavailableError,
    WriteTimeoutError,
)
from counter.limits import MILLISECOND
from counter.testing.clock import FakeClock
from rollup.limiter import LATENCY_TARGET_US, Limiter
from tests.support.times import START_US

FAST = LATENCY_TARGET_US // 10
SLOW = LATENCY_TARGET_US + 1


class Desk:
    """A limiter and the time that work inside it takes."""

    def __init__(self, limit_max: int = 64) -> None:
        self.clock = FakeClock(START_US)
        self.limiter = Limiter(self.clock, limit_max=limit_max)

    @asynccontextmanager
    async def full(self) -> AsyncIterator[list[asyncio.Event]]:
        """As many inside as are let in; each leaves when its event is set."""
        leave = [asyncio.Event() for _ in range(self.limiter.limit)]
        tasks = [asyncio.create_task(self.stay(event)) for event in leave]
        await asyncio.sleep(0)
        try:
            yield leave
        finally:
            for event in leave:
                event.set()
            await asyncio.gather(*tasks)

    async def stay(self, event: asyncio.Event) -> None:
        async with self.limiter.permit():
            await event.wait()

    async def round_trip(self, took_us: int) -> None:
        """A limit's worth of work, all of it taking so long."""
        async with self.full():
            self.clock.advance(took_us)

    async def fail(self, error: Exception) -> None:
        with suppress(type(error)):
            async with self.limiter.permit():
                self.clock.advance(1)
                raise error


async def test_each_round_trip_in_time_lets_in_about_one_more() -> None:
    """Additive increase, up to the most there may be."""
    desk = Desk(limit_max=12)
    before = desk.limiter.limit
    for _ in range(4):
        await desk.round_trip(FAST)
    assert before + 2 <= desk.limiter.limit <= before + 4
    for _ in range(30):
        await desk.round_trip(FAST)
    assert desk.limiter.limit == 12


async def test_a_limit_that_is_not_reached_does_not_grow() -> None:
    """A single call does not show the load of twenty."""
    desk = Desk()
    before = desk.limiter.limit
    for _ in range(100):
        async with desk.limiter.permit():
            desk.clock.advance(FAST)
    assert desk.limiter.limit == before


async def test_slow_calls_halve_the_limit_once_per_round() -> None:
    """They all waited in the same queue: it is one sign, not twenty."""
    desk = Desk()
    for _ in range(30):
        await desk.round_trip(FAST)
    before = desk.limiter.limit
    await desk.round_trip(SLOW)
    assert desk.limiter.limit == before // 2
    await desk.round_trip(SLOW)
    assert desk.limiter.limit == before // 4


@pytest.mark.parametrize("kind", [StoreUnavailableError, WriteTimeoutError, OverloadedError])
async def test_a_failure_of_the_store_halves_the_limit(kind: type[Exception]) -> None:
    """Down to one, which is always let in."""
    desk = Desk()
    before = desk.limiter.limit
    await desk.fail(kind("planted"))
    assert desk.limiter.limit == before // 2
    for _ in range(10):
        await desk.fail(kind("planted"))
    assert desk.limiter.limit == 1


@pytest.mark.parametrize("kind", [SliceMissingError, NamespaceUnknownError])
async def test_calls_that_do_not_show_the_load_change_nothing(kind: type[Exception]) -> None:
    """A slice or a namespace that is gone is no sign of overload."""
    desk = Desk()
    before = desk.limiter.limit
    await desk.fail(kind("planted"))
    assert desk.limiter.limit == before


async def test_waiters_enter_in_order_and_within_the_limit() -> None:
    """Also if some give up waiting."""
    desk = Desk()
    inside, order = 0, []

    async def work(number: int) -> None:
        nonlocal inside
        async with desk.limiter.permit():
            inside += 1
            assert inside <= desk.limiter.limit
            order.append(number)
            await asyncio.sleep(0)
            inside -= 1

    tasks = [asyncio.create_task(work(number)) for number in range(40)]
    await asyncio.sleep(0)
    for given_up in (7, 9, 39):
        tasks[given_up].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [number for number in range(40) if number not in (7, 9, 39)]


@given(st.lists(st.tuples(st.sampled_from(["work", "fail", "cancel"]), st.integers(0, 300))))
def test_no_turn_is_ever_lost(steps: list[tuple[str, int]]) -> None:
    """Whatever fails or is given up, in the end all may enter again."""

    async def play() -> None:
        desk = Desk(limit_max=8)
        tasks: list[asyncio.Task[None]] = []

        async def work(fails: bool, took_us: int) -> None:
            async with desk.limiter.permit():
                await asyncio.sleep(0)
                desk.clock.advance(took_us * MILLISECOND)
                if fails:
                    raise StoreUnavailableError("planted")

        for step, number in steps:
            if step == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            else:
                tasks.append(asyncio.create_task(work(step == "fail", number)))
            if number % 3 == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60), desk.full():
            assert 1 <= desk.limiter.limit <= 8

    asyncio.run(play())


async def test_work_of_many_times_the_usual_amount_may_take_as_many_times_as_long() -> None:
    """A group of a backlog sums many windows: its time does not show a slow store."""
    desk = Desk()
    before = desk.limiter.limit
    async with desk.limiter.permit(weight=5):
        desk.clock.advance(5 * LATENCY_TARGET_US)
    assert desk.limiter.limit == before
    async with desk.limiter.permit(weight=5):
        desk.clock.advance(5 * LATENCY_TARGET_US + 1)
    assert desk.limiter.limit == before // 2
