"""The writer: an event is written when its own mark is durable, and acknowledged when it is."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest

from counter.capabilities import Capabilities
from counter.core.admission import Load
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.core.results import Add, Added
from counter.core.write import EventWriter, MarkMemory
from counter.errors import (
    ClockSkewError,
    CounterError,
    StoreUnavailableError,
    TokenInFutureError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.limits import SECOND, TIME_MAX_US
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import walked
from counter.testing.clock import FakeClock
from counter.types import (
    AtomicMark,
    ClockReading,
    Era,
    Event,
    Guarded,
    Mark,
    Namespace,
    PayloadCheck,
    Span,
    Token,
    Written,
)
from counter.windows import window_of
from tests.rollup.world import DATASET, SETTINGS, WINDOW, begun
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
OTHER = EVENT._replace(counter="other")
MARK = Mark(window_of(START_US, WINDOW), "c")
ITEMS = tuple(
    event._replace(item_key=at, atom=b"list") for at, event in enumerate((EVENT, OTHER), 1)
)
TIMEOUT = WriteTimeoutError("a planted fault", retry_after_us=1)
DOWN = StoreUnavailableError("a planted fault", retry_after_us=1)
_Outcomes = Sequence[Written | CounterError]


class Steps(MemoryCache):
    """A store and a guard that record their requests, and answer when the test says."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.capabilities = Capabilities()
        self.events = self.separate_writes = self.control = self
        self.asked: list[str] = []
        self.offset_us = 0
        self._answer: asyncio.Future[Any] = asyncio.Future()

    async def _ask(self, step: str) -> Any:
        self.asked.append(step)
        self._answer = asyncio.Future()
        return await self._answer

    async def answer(self, answer: Any) -> None:
        """Answer the step that was asked last, and let the writer go on."""
        self._answer.set_result(answer)
        await turns()

    async def guard(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Guarded]:
        return cast("Sequence[Guarded]", await self._ask("guard"))

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> list[Event | None]:
        return [None] * len(events)

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        self.asked.append("list")

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        return cast("Mapping[Mark, UnavailableError]", await self._ask("mark"))

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        return cast("Sequence[Written | UnavailableError]", await self._ask(f"event {len(events)}"))

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        return cast("Written", await self._ask("events"))

    async def datasets(self) -> list[Any]:
        return [DATASET]

    async def read_clock(self) -> ClockReading:
        return ClockReading(self.offset_us, 1)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Desk:
    """One writer over steps in the test's hand."""

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

    async def begin(self, *events: Event, namespace: Namespace = SPACE) -> asyncio.Task[_Outcomes]:
        """Write *events*, up to the first question."""
        writing = asyncio.ensure_future(self.writer.write(namespace, events or (EVENT,)))
        await turns()
        return writing

    async def begin_atomic(self) -> asyncio.Task[Written | CounterError]:
        writing = asyncio.ensure_future(self.writer.write_atomic(SPACE, ITEMS))
        await turns()
        return writing


@pytest.fixture
async def desk() -> Desk:
    desk = Desk()
    await desk.guard.measure()
    return desk


async def test_each_step_waits_for_the_one_before(desk: Desk) -> None:
    writing = await desk.begin(EVENT, OTHER)
    assert desk.steps.asked == ["guard"]
    await desk.steps.answer([Guarded.NEW] * 2)
    assert desk.steps.asked == ["guard", "mark"]
    await desk.steps.answer({})
    assert desk.steps.asked == ["guard", "mark", "event 2"]
    assert not writing.done()
    assert desk.load.ahead == 2
    await desk.steps.answer([Written.UNVERIFIED] * 2)
    assert await writing == [Written.UNVERIFIED] * 2
    assert desk.load.ahead == 0


async def test_an_atomic_add_goes_through_the_same_steps(desk: Desk) -> None:
    """And leaves its whole list before the marks of its counters."""
    writing = await desk.begin_atomic()
    await desk.steps.answer([Guarded.NEW, Guarded.SAME])
    assert desk.steps.asked == ["guard", "list", "mark"]
    await desk.steps.answer({})
    assert desk.steps.asked[3:] == ["events"]
    await desk.steps.answer(Written.UNVERIFIED)
    assert await writing is Written.REPLAYED
    assert desk.load.ahead == 0


async def test_an_atomic_add_is_refused_whole(desk: Desk) -> None:
    """For one item: by the guard nothing of it is left, and without a mark nothing is written."""
    writing = await desk.begin_atomic()
    await desk.steps.answer([Guarded.NEW, Guarded.OTHER])
    assert await writing is Written.CONFLICT
    assert desk.steps.asked == ["guard"]
    writing = await desk.begin_atomic()
    await desk.steps.answer([Guarded.NEW] * 2)
    await desk.steps.answer({MARK: DOWN})
    assert await writing is DOWN
    assert desk.steps.asked[1:] == ["guard", "list", "mark"]


async def test_an_atomic_add_that_aged_on_the_way_is_not_written(desk: Desk) -> None:
    writing = await desk.begin_atomic()
    await desk.steps.answer([Guarded.NEW] * 2)
    desk.clock.advance(SETTINGS.accept_limit_us + 1)
    await desk.steps.answer({})
    assert await writing is Written.LATE
    assert desk.steps.asked == ["guard", "list", "mark"]


async def test_a_mark_that_is_durable_is_not_left_again(desk: Desk) -> None:
    await desk.begin()
    await desk.steps.answer([Guarded.NEW])
    await desk.steps.answer({})
    await desk.begin()
    await desk.steps.answer([Guarded.NEW])
    assert desk.steps.asked == ["guard", "mark", "event 1", "guard", "event 1"]


async def test_an_event_without_its_mark_is_not_written(desk: Desk) -> None:
    """The rest of its list is; and its mark is left again the next time."""
    writing = await desk.begin(EVENT, OTHER)
    await desk.steps.answer([Guarded.NEW] * 2)
    await desk.steps.answer({MARK: DOWN})
    assert desk.steps.asked == ["guard", "mark", "event 1"]
    await desk.steps.answer([Written.UNVERIFIED])
    assert await writing == [DOWN, Written.UNVERIFIED]
    for event, expected in ((OTHER, "event 1"), (EVENT, "mark")):
        await desk.begin(event)
        await desk.steps.answer([Guarded.NEW])
        assert desk.steps.asked[-1] == expected


async def test_an_event_of_the_very_end_of_the_accept_limit_is_written(desk: Desk) -> None:
    await desk.begin()
    await desk.steps.answer([Guarded.NEW])
    desk.clock.advance(SETTINGS.accept_limit_us)
    await desk.steps.answer({})
    assert desk.steps.asked == ["guard", "mark", "event 1"]


async def test_an_event_that_aged_on_the_way_is_not_written(desk: Desk) -> None:
    writing = await desk.begin()
    await desk.steps.answer([Guarded.NEW])
    desk.clock.advance(SETTINGS.accept_limit_us + 1)
    await desk.steps.answer({})
    assert await writing == [Written.LATE]
    assert desk.steps.asked == ["guard", "mark"]


@pytest.mark.parametrize("atomic", [False, True])
async def test_an_event_past_its_deadline_is_not_acknowledged(desk: Desk, atomic: bool) -> None:
    writing: asyncio.Future[Any] = await (desk.begin_atomic() if atomic else desk.begin())
    await desk.steps.answer([Guarded.NEW] * (1 + atomic))
    await desk.steps.answer({})
    desk.clock.advance(DATASET.write_timeout_us + 1)
    await desk.steps.answer(Written.UNVERIFIED if atomic else [Written.UNVERIFIED])
    with pytest.raises(WriteTimeoutError):
        await writing
    assert desk.load.ahead == 0


async def test_a_clock_that_went_wrong_on_the_way_is_noticed(desk: Desk) -> None:
    writing = await desk.begin()
    await desk.steps.answer([Guarded.NEW])
    desk.steps.offset_us = 10 * SECOND
    desk.clock.advance(SECOND)
    await desk.guard.measure()
    await desk.steps.answer({})
    with pytest.raises(ClockSkewError):
        await writing
    assert desk.steps.asked == ["guard", "mark"]


async def test_events_known_to_the_guard_are_still_written(desk: Desk) -> None:
    """Then it is a replay; a failure is none."""
    for outcome, expected in ((Written.UNVERIFIED, Written.REPLAYED), (TIMEOUT, TIMEOUT)):
        writing = await desk.begin()
        await desk.steps.answer([Guarded.SAME])
        if desk.steps.asked[-1] == "mark":
            await desk.steps.answer({})
        assert desk.steps.asked[-1] == "event 1"
        await desk.steps.answer([outcome])
        assert await writing == [expected]


async def test_another_payload_is_not_written(desk: Desk) -> None:
    """Nor is a mark of it left; the rest of its list is written."""
    writing = await desk.begin()
    await desk.steps.answer([Guarded.OTHER])
    assert await writing == [Written.CONFLICT]
    assert desk.steps.asked == ["guard"]
    writing = await desk.begin(EVENT, OTHER)
    await desk.steps.answer([Guarded.OTHER, Guarded.NEW])
    await desk.steps.answer({})
    assert desk.steps.asked[1:] == ["guard", "mark", "event 1"]
    await desk.steps.answer([Written.UNVERIFIED])
    assert await writing == [Written.CONFLICT, Written.UNVERIFIED]


async def test_without_the_guard_nothing_is_asked_of_it(desk: Desk) -> None:
    off = replace(SPACE, settings=replace(SPACE.settings, payload_check=PayloadCheck.OFF))
    await desk.begin(namespace=off)
    await desk.steps.answer({})
    assert desk.steps.asked == ["mark", "event 1"]


async def test_a_write_that_is_cancelled_leaves_no_add_under_way(desk: Desk) -> None:
    """The room that it had is free again, wherever it was."""
    for answers in ([], [[Guarded.NEW]], [[Guarded.NEW], {}]):
        writing = await desk.begin()
        for answer in answers:
            await desk.steps.answer(answer)
        assert desk.load.ahead == 1
        writing.cancel()
        await turns()
        assert writing.cancelled()
        assert desk.load.ahead == 0


async def test_a_mark_in_flight_is_not_durable() -> None:
    """Another add in the window leaves its own: the process may die before the first arrives."""
    world, namespace = await begun(shards=1)
    works, held, on_its_way = world.store.separate_writes.mark, asyncio.Event(), asyncio.Event()
    left: list[str] = []

    async def mark(of: Namespace, marks: Sequence[Mark]) -> Mapping[Mark, UnavailableError]:
        if not left:
            left.append("never arrives")
            on_its_way.set()
            await held.wait()
        return await works(of, marks)

    with patch.object(world.store.separate_writes, "mark", mark):
        first = asyncio.create_task(world.add("c", 1))
        await on_its_way.wait()
        await world.add("c", 2)
        found = await walked(world.store, namespace, 0, Span.after(0, TIME_MAX_US), limit=9)
        assert found == [Mark(window_of(world.clock.now_us(), WINDOW), "c")]
        held.set()
        await first


async def test_an_add_that_the_store_alone_gave_up_is_not_acknowledged() -> None:
    """A store may fail for one event of many: alone, and among successful ones."""
    world, namespace = await begun(shards=1)
    gone = WriteTimeoutError("a planted fault", retry_after_us=1)

    async def append(
        of: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        return [gone if event.delta == 2 else Written.UNVERIFIED for event in events]

    with patch.object(world.store.events, "append", append):
        with pytest.raises(WriteTimeoutError):
            await world.add("c", 2)
        adds = [Add("c", delta, world.token()) for delta in (1, 2, 3)]
        results = await world.api.add_many(namespace, adds)
    assert results[1] is gone
    assert [isinstance(each, Added) for each in results] == [True, False, True]


def test_the_number_of_remembered_marks_is_bounded() -> None:
    """The oldest first: forgetting is safe."""
    marks = [MARK._replace(counter=str(number)) for number in range(3)]
    memory = MarkMemory()
    with patch("counter.core.write._REMEMBERED_MAX", 2):
        memory.remember(1, marks)
    assert memory.unknown(1, marks) == marks[:1]


async def test_a_token_of_the_very_end_of_the_future_limit_is_taken() -> None:
    world, namespace = await begun(shards=1)
    time_us = world.clock.now_us() + namespace.settings.future_limit_us
    added = await world.api.add(namespace, "c", 1, Token(bytes(16), time_us))
    assert added.event_time_us == time_us
    with pytest.raises(TokenInFutureError):
        await world.api.add(namespace, "c", 1, Token(bytes(16), time_us + 1))
