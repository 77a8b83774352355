"""An event that is written without a task: each step begins where the one before ended."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from counter.core.admission import Load
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.core.write import EventWriter
from counter.errors import ClockSkewError, StoreUnavailableError, WriteTimeoutError
from counter.limits import PENDING_WRITES_MAX, SECOND
from counter.ports import Told
from counter.storage.memory import MemoryCache
from counter.types import (
    ClockReading,
    Era,
    Event,
    Guarded,
    Mark,
    Namespace,
    PayloadCheck,
    Written,
)
from tests.rollup.world import DATASET, SETTINGS
from tests.support.clock import FakeClock
from tests.support.times import START_US

SPACE = Namespace(
    id=1,
    name="tests",
    settings=replace(SETTINGS, payload_check=PayloadCheck.GUARD),
    eras=(Era(0, SETTINGS.accept_limit_us),),
    dataset=DATASET,
    created_at_us=START_US,
    version=1,
)
EVENT = Event("c", START_US, bytes(16), 0, 1)
TIMEOUT = WriteTimeoutError("a planted fault", retry_after_us=1)
DOWN = StoreUnavailableError("a planted fault", retry_after_us=1)


class Steps(MemoryCache):
    """A store and a guard that note what they are asked, and answer when the test says."""

    transactional = False

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.asked: list[str] = []
        self.ready = True
        self.mark_told: Callable[[BaseException | None], None]
        self.guard_told: Callable[[Guarded], None]
        self.append_told: Told
        self.offset_us = 0

    def mark_soon(
        self, namespace: Namespace, mark: Mark, told: Callable[[BaseException | None], None]
    ) -> bool:
        self.asked += ["mark"] * self.ready
        self.mark_told = told
        return self.ready

    def guard_soon(
        self, namespace: Namespace, event: Event, told: Callable[[Guarded], None]
    ) -> None:
        self.asked.append("guard")
        self.guard_told = told

    def append_soon(self, namespace: Namespace, event: Event, told: Told) -> bool:
        self.asked += ["event"] * self.ready
        self.append_told = told
        return self.ready

    async def datasets(self) -> list[Any]:
        return [DATASET]

    async def read_clock(self) -> ClockReading:
        return ClockReading(self.offset_us, 1)


class World:
    """One writer over steps in the test's hand, and what it told."""

    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.steps = Steps(self.clock)
        self.guard = ClockGuard(cast("Any", self.steps), self.clock)
        self.load = Load(self.clock)
        self.writer = EventWriter(
            cast("Any", self.steps),
            self.clock,
            self.steps,
            self.guard,
            self.load,
            Namespaces(cast("Any", self.steps), self.clock),
        )
        self.told: list[Written | BaseException] = []

    def begin(self, namespace: Namespace = SPACE) -> bool:
        return self.writer.write_soon(namespace, EVENT, self.told.append)

    async def pass_time(self, us: int) -> None:
        """In which the event loop turns, and so reads its clocks anew."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.clock.advance(us)

    def end(
        self, guard: Guarded = Guarded.NEW, outcome: Written | BaseException = Written.UNTOLD
    ) -> Written | BaseException:
        """Answer each step that is asked, and say what was told in the end."""
        self.steps.mark_told(None)
        self.steps.guard_told(guard)
        if self.steps.asked[-1] == "event":
            self.steps.append_told(outcome)
        (told,) = self.told
        return told


@pytest.fixture
async def world() -> World:
    world = World()
    await world.guard.measure()
    return world


async def test_it_is_known_how_long_the_turn_of_an_add_took(world: World) -> None:
    world.begin()
    world.clock.advance(SECOND // 4)
    await world.pass_time(SECOND)
    assert world.load.lag_us == SECOND // 4
    assert world.load.ahead == 1
    world.end()
    assert world.load.ahead == 0


async def test_the_event_waits_for_its_mark_and_for_the_guard(world: World) -> None:
    assert world.begin()
    world.steps.guard_told(Guarded.NEW)
    assert world.steps.asked == ["mark", "guard"]
    world.steps.mark_told(None)
    assert world.steps.asked == ["mark", "guard", "event"]
    assert world.told == []
    world.steps.append_told(Written.UNTOLD)
    assert world.told == [Written.UNTOLD]


async def test_a_mark_that_stands_is_not_left_again(world: World) -> None:
    assert world.begin()
    world.end()
    assert world.begin()
    assert world.steps.asked == ["mark", "guard", "event", "guard"]


async def test_a_mark_that_is_on_its_way_is_no_mark_yet(world: World) -> None:
    assert world.begin()
    assert world.begin()
    assert world.steps.asked == ["mark", "guard", "mark", "guard"]


async def test_an_event_without_its_mark_is_not_written(world: World) -> None:
    assert world.begin()
    world.steps.mark_told(DOWN)
    world.steps.guard_told(Guarded.NEW)
    assert world.told == [DOWN]
    assert world.begin()
    assert world.steps.asked == ["mark", "guard", "mark", "guard"]


async def test_an_event_that_aged_on_the_way_is_not_written(world: World) -> None:
    assert world.begin()
    await world.pass_time(SETTINGS.accept_limit_us + 1)
    assert world.end() is Written.LATE
    assert world.steps.asked == ["mark", "guard"]


async def test_an_event_past_its_deadline_is_not_acknowledged(world: World) -> None:
    assert world.begin()
    world.steps.mark_told(None)
    world.steps.guard_told(Guarded.NEW)
    await world.pass_time(DATASET.write_timeout_us + 1)
    world.steps.append_told(Written.UNTOLD)
    assert isinstance(world.told[0], WriteTimeoutError)


async def test_the_deadline_begins_where_the_turn_read_its_clocks(world: World) -> None:
    """A pause between that reading and the event counts against the event."""
    assert world.begin()
    world.steps.mark_told(None)
    world.clock.advance(DATASET.write_timeout_us)
    world.steps.guard_told(Guarded.NEW)
    world.clock.advance(1)
    world.steps.append_told(Written.UNTOLD)
    assert isinstance(world.told[0], WriteTimeoutError)


async def test_a_clock_that_went_wrong_on_the_way_is_noticed(world: World) -> None:
    assert world.begin()
    world.steps.offset_us = 10 * SECOND
    await world.pass_time(SECOND)
    await world.guard.measure()
    assert isinstance(world.end(), ClockSkewError)
    assert world.steps.asked == ["mark", "guard"]


async def test_what_the_guard_saw_is_written_all_the_same(world: World) -> None:
    assert world.begin()
    assert world.end(Guarded.SAME) is Written.REPLAYED
    assert world.steps.asked[-1] == "event"


async def test_another_payload_is_not_written(world: World) -> None:
    assert world.begin()
    assert world.end(Guarded.OTHER) is Written.CONFLICT
    assert world.steps.asked == ["mark", "guard"]


async def test_a_failure_is_no_replay(world: World) -> None:
    assert world.begin()
    assert world.end(Guarded.SAME, TIMEOUT) is TIMEOUT


async def test_without_the_guard_nothing_is_asked_of_it(world: World) -> None:
    off = replace(SPACE, settings=replace(SPACE.settings, payload_check=PayloadCheck.OFF))
    assert world.begin(off)
    world.steps.mark_told(None)
    assert world.steps.asked == ["mark", "event"]


async def test_what_needs_more_is_left_alone(world: World) -> None:
    """Strict checks, late tokens, and a store that must wait for something first."""
    strict = replace(SPACE, settings=replace(SPACE.settings, payload_check=PayloadCheck.STRICT))
    assert not world.begin(strict)
    world.steps.ready = False
    assert not world.begin()
    world.steps.ready = True
    await world.pass_time(SETTINGS.accept_limit_us + 1)
    assert not world.begin()
    assert world.steps.asked == []
    assert world.told == []


async def test_room_is_given_back_whatever_becomes_of_an_event(world: World) -> None:
    """Its teller may even raise: nobody else waits for that."""

    def raises(_outcome: object) -> None:
        raise ValueError("a planted fault")

    assert world.begin()
    world.end()
    world.steps.ready = False
    assert not world.writer.write_soon(SPACE, EVENT._replace(counter="other"), raises)
    world.steps.ready = True
    for guard in (Guarded.OTHER, Guarded.NEW):
        assert world.writer.write_soon(SPACE, EVENT, raises)
        world.steps.guard_told(guard)
    world.steps.append_told(DOWN)
    world.load.admit(PENDING_WRITES_MAX)
    assert not world.begin()
