"""The clock guard: a process with a clock too far from the store's writes nothing."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.core.results import Add
from counter.core.service import CounterService
from counter.errors import ClockSkewError, StoreUnavailableError
from counter.storage.memory import DEFAULT_DATASET, MemoryStore
from counter.storage.memory.control import MemoryControl
from counter.storage.memory.tables import Tables
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.clock import FakeClock
from counter.types import ClockReading, CounterType, Namespace, Slice
from tests.support.parts import followed
from tests.support.rest import fresh
from tests.support.times import HOUR, MILLISECOND, MINUTE, SECOND, START_US

BOUND_US = 500 * MILLISECOND
DATASET = replace(DEFAULT_DATASET, clock_skew_max_us=BOUND_US)


class SkewedControl(MemoryControl):
    """A store with a planned offset of its clock; each reading takes the planned time."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.ahead_us = 0
        self.errors_us: list[int] = []
        self.down = False

    async def read_clock(self) -> ClockReading:
        if self.down:
            raise StoreUnavailableError("a fault that a test planted")
        error_us = self.errors_us.pop(0) if self.errors_us else MILLISECOND
        return ClockReading(self.ahead_us + error_us // 2, error_us)


class SteppedClock(FakeClock):
    """A clock that somebody sets while it runs."""

    def step(self, us: int) -> None:
        self._now_us += us


class World:
    """A service over a store with a clock of its own."""

    def __init__(self) -> None:
        self.clock = SteppedClock(START_US)
        self.store = MemoryStore(self.clock, (DATASET,))
        self.control = self.store.control = SkewedControl(self.store.tables)
        self.guard = ClockGuard(self.store.control, self.clock)
        cache = MemoryCache(self.clock)
        self.service = CounterService(self.store, cache, self.clock, self.guard)

    async def namespace(self, counter_type: CounterType = CounterType.ACCURATE) -> Namespace:
        """A namespace, with the slices that its events need."""
        size_us = DATASET.slice_us
        first_us = START_US - START_US % size_us - size_us
        for start_us in range(first_us, first_us + 4 * size_us, size_us):
            await self.store.control.make_slices(
                DATASET, Slice(start_us, start_us + size_us, size_us, 1)
            )
        await self.guard.measure()
        settings = replace(Settings().default_namespace(), counter_type=counter_type)
        return await self.service.namespaces.create("one", settings)


@pytest.fixture
def world() -> World:
    return World()


def trouble(world: World) -> str:
    """The guard's error; empty if it lets writes pass."""
    return world.guard.trouble or ""


async def test_a_clock_that_was_never_compared_is_not_trusted(world: World) -> None:
    with pytest.raises(ClockSkewError, match="not compared"):
        world.guard.check(DATASET)


@pytest.mark.parametrize("ahead_us", [0, BOUND_US // 2, -BOUND_US // 2])
async def test_a_clock_that_is_surely_within_its_bound_may_write(
    world: World, ahead_us: int
) -> None:
    surely_us = BOUND_US - abs(ahead_us)
    world.control.ahead_us = ahead_us
    world.control.errors_us = [surely_us // 2] * 3
    await world.guard.measure()
    world.guard.check(DATASET)
    assert world.guard.is_sure(DATASET)
    assert trouble(world) == ""


@pytest.mark.parametrize(
    ("ahead_us", "error_us"),
    [
        (BOUND_US, MILLISECOND),
        (-BOUND_US - 1, 2),
        (BOUND_US * 3 // 4, BOUND_US // 2),
        (2 * BOUND_US, BOUND_US),
        (-2 * BOUND_US, BOUND_US),
    ],
)
async def test_a_clock_that_may_be_past_its_bound_may_not(
    world: World, ahead_us: int, error_us: int
) -> None:
    """The true offset lies anywhere within the error of the measurement."""
    world.control.ahead_us = ahead_us
    world.control.errors_us = [error_us] * 3
    await world.guard.measure()
    assert not world.guard.is_sure(DATASET)
    with pytest.raises(ClockSkewError, match="give or take"):
        world.guard.check(DATASET)


@pytest.mark.parametrize(("ahead_us", "word"), [(2 * SECOND, "behind"), (-2 * SECOND, "ahead")])
async def test_a_clock_past_its_bound_is_refused_with_the_offset_and_the_bound(
    world: World, ahead_us: int, word: str
) -> None:
    world.control.ahead_us = ahead_us
    await world.guard.measure()
    with pytest.raises(ClockSkewError, match=f"{word}.*500 ms.*NTP") as caught:
        world.guard.check(DATASET)
    assert (caught.value.applied, caught.value.retry) == (None, "same_token")


async def test_the_surest_of_several_readings_counts(world: World) -> None:
    world.control.errors_us = [400 * MILLISECOND, 2 * MILLISECOND, 300 * MILLISECOND]
    await world.guard.measure()
    assert world.guard.offset_us == MILLISECOND


async def test_a_slow_reading_does_not_replace_a_sure_one(world: World) -> None:
    world.control.ahead_us = 2 * MILLISECOND
    await world.guard.measure()
    known_us = world.guard.offset_us
    world.clock.advance(10 * SECOND)
    world.control.errors_us = [800 * MILLISECOND] * 3
    await world.guard.measure()
    assert world.guard.offset_us == known_us


async def test_a_contradicting_slow_reading_replaces_it(world: World) -> None:
    await world.guard.measure()
    world.control.ahead_us = HOUR
    world.control.errors_us = [100 * MILLISECOND] * 3
    await world.guard.measure()
    assert "behind" in trouble(world)


async def test_a_reading_worse_than_the_bound_reports_nothing(world: World) -> None:
    world.control.errors_us = [2 * BOUND_US] * 3
    await world.guard.measure()
    assert "is only known to within 1.000 s" in trouble(world)


async def test_a_measurement_is_worth_less_as_it_ages(world: World) -> None:
    """Until it is worth less than a slow one; and after an hour of sleep it is void."""
    await world.guard.measure()
    world.clock.advance(MINUTE)
    assert trouble(world) == ""
    world.control.errors_us = [25 * MILLISECOND] * 3
    await world.guard.measure()
    assert world.guard.offset_us == 25 * MILLISECOND // 2
    world.clock.advance(HOUR)
    assert "is only known to within" in trouble(world)
    await world.guard.measure()
    assert trouble(world) == ""


async def test_a_store_that_goes_by_this_clock_is_never_apart_from_it(world: World) -> None:
    """However long it was not compared, and however it was set: the bound may be nothing at all."""
    alone = replace(DATASET, clock_skew_max_us=0)
    world.control.errors_us = [0] * 3
    await world.guard.measure()
    world.clock.advance(HOUR)
    world.clock.step(MINUTE)
    world.guard.check(alone)


async def test_a_clock_that_is_set_while_it_is_compared_is_not_trusted(world: World) -> None:
    """It may have been compared before or after."""
    with followed(world.store, "read_clock", by=lambda: world.clock.step(MINUTE), times=9):
        await world.guard.measure()
    assert "is only known to within" in trouble(world)
    await world.guard.measure()
    assert trouble(world) == ""


async def test_a_pause_between_two_readings_here_counts_as_doubt(world: World) -> None:
    """The machine is busy: the process sleeps while it looks at its clocks."""
    await world.guard.measure()
    works = world.clock.now_us

    def slowly() -> int:
        world.clock.advance(BOUND_US)
        return works()

    with patch.object(world.clock, "now_us", slowly), pytest.raises(ClockSkewError):
        world.guard.check(DATASET)
    world.guard.check(DATASET)


@pytest.mark.parametrize("step_us", [MINUTE, -MINUTE])
async def test_a_clock_that_is_set_is_noticed_at_the_next_write(world: World, step_us: int) -> None:
    await world.guard.measure()
    world.clock.advance(MINUTE)
    assert trouble(world) == ""
    world.clock.step(step_us)
    with pytest.raises(ClockSkewError):
        world.guard.check(DATASET)


async def test_a_brief_silence_of_the_store_changes_nothing(world: World) -> None:
    await world.guard.measure()
    world.control.down = True
    await world.guard.measure()
    assert trouble(world) == ""


async def test_a_long_silence_of_the_store_ends_the_trust(world: World) -> None:
    await world.guard.measure()
    world.control.down = True
    for _ in range(15):
        await world.guard.measure()
    assert "15 times in a row" in trouble(world)
    world.control.down = False
    await world.guard.measure()
    assert trouble(world) == ""


async def test_a_wrong_clock_is_reported_once_and_its_recovery_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for ahead_us in (0, 0, MINUTE, MINUTE, 0, 0):
        world.control.ahead_us = ahead_us
        await world.guard.measure()
    levels = [each.levelno for each in caplog.records if each.name == "counter.clock"]
    assert levels == [logging.ERROR, logging.WARNING]


Ask = Callable[[CounterService, Namespace, int], Awaitable[Any]]
WRITES: dict[str, Ask] = {
    "add": lambda service, ns, now: service.add(ns, "c", 1, fresh(now)),
    "late": lambda service, ns, now: service.add(ns, "c", 1, fresh(now - MINUTE)),
    "key": lambda service, ns, now: service.add(ns, "c", 1, "order-1"),
    "clear": lambda service, ns, now: service.clear(ns, "c", fresh(now)),
    "batch": lambda service, ns, now: service.add_many(ns, [Add("c", 1, fresh(now))]),
    "atomic": lambda service, ns, now: service.add_atomic(ns, [("c", 1)], fresh(now)),
    "tokens": lambda service, ns, now: service.issue_tokens(1),
    "resolution": lambda service, ns, now: service.resolver.request_recounts(
        ns, [("c", now)], for_readers=True
    ),
    "namespace": lambda service, ns, now: service.namespaces.create("two", ns.settings),
    "settings": lambda service, ns, now: service.namespaces.update(
        ns, replace(ns.settings, accept_limit_us=SECOND)
    ),
    "deletion": lambda service, ns, now: service.namespaces.delete(ns),
}


@pytest.mark.parametrize("what", WRITES)
async def test_past_the_bound_nothing_that_depends_on_the_clock_is_done(
    world: World, what: str
) -> None:
    namespace = await world.namespace()
    await world.guard.measure()
    await world.service.add(namespace, "c", 1, fresh(world.clock.now_us()))
    world.control.ahead_us = MINUTE
    await world.guard.measure()
    with pytest.raises(ClockSkewError):
        await WRITES[what](world.service, namespace, world.clock.now_us())
    world.control.ahead_us = 0
    await world.guard.measure()
    (count,) = await world.service.reader.read(namespace, ["c"], 0)
    assert count.count == 1


@pytest.mark.parametrize("what", ["add", "atomic", "resolution"])
async def test_a_clock_that_is_set_while_a_mark_is_left_is_noticed_before_it_is_asked(
    world: World, what: str
) -> None:
    """Steps after the mark use the clock: the age of a token, or that a window is open."""
    namespace = await world.namespace()
    await world.guard.measure()
    now_us = world.clock.now_us()
    leave = "write_marks" if what == "resolution" else "mark"
    with (
        followed(world.store, leave, by=lambda: world.clock.step(-MINUTE)),
        pytest.raises(ClockSkewError),
    ):
        await WRITES[what](world.service, namespace, now_us)
    (count,) = await world.service.reader.read(namespace, ["c"], 0)
    assert count.count == 0


async def test_a_namespace_that_a_clock_far_ahead_would_have_created_loses_no_add(
    world: World,
) -> None:
    """Its first watermark would lie past every add of processes with right clocks."""
    namespace = await world.namespace()
    ahead = SteppedClock(START_US + MINUTE)
    guard = ClockGuard(world.store.control, ahead)
    namespaces = Namespaces(world.store, ahead, guard)
    with patch.object(
        world.store.control, "read_clock", AsyncMock(return_value=ClockReading(-MINUTE, 1))
    ):
        await guard.measure()
    with pytest.raises(ClockSkewError, match=r"60\.000 s ahead"):
        await namespaces.create("two", namespace.settings)
    created = await world.service.namespaces.create("two", namespace.settings)
    await world.service.add(created, "c", 1, fresh(START_US))
    (count,) = await world.service.reader.read(created, ["c"], 0)
    assert count.count == 1


async def test_a_stale_key_gets_no_time_of_a_changed_clock(world: World) -> None:
    """The new time would be the key's for as long as it is remembered."""
    namespace = await world.namespace()
    world.clock.advance(2 * MINUTE)
    await world.guard.measure()
    reserved = AsyncMock(return_value=world.clock.now_us() - MINUTE)
    with (
        patch.object(world.store.decisions, "reserve", reserved),
        patch.object(world.service.resolver, "request_recounts", AsyncMock()),
        followed(world.store, "decide", by=lambda: world.clock.step(HOUR)),
        pytest.raises(ClockSkewError),
    ):
        await world.service.add(namespace, "c", 1, "order-1")
    reserved.assert_awaited_once()


async def test_reads_and_best_effort_counters_go_on(world: World) -> None:
    namespace = await world.namespace(CounterType.BEST_EFFORT)
    world.control.ahead_us = MINUTE
    await world.guard.measure()
    await world.service.add(namespace, "c", 2, None)
    (count,) = await world.service.reader.read(namespace, ["c"], None)
    assert count.count == 2
