"""Adds of one turn of the event loop: one write, and each caller gets its own outcome."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
import pytest_asyncio

from counter.core.admission import Load
from counter.core.gather import AddGatherer
from counter.core.service import CounterService
from counter.errors import (
    CacheUnavailableError,
    CounterError,
    OverloadedError,
    SliceMissingError,
    StoreUnavailableError,
)
from counter.limits import MILLISECOND
from counter.testing.clock import FakeClock
from counter.types import CounterType, Event, Namespace, PayloadCheck, Written
from tests.rollup.world import DATASET, SETTINGS
from tests.support.app import App, running, store_that_fails
from tests.support.rest import fresh
from tests.support.times import DAY, SECOND, START_US
from tests.support.waiting import eventually

Results = list[tuple[str, Written | CounterError]]


def event(counter: str, delta: int = 1, time_us: int = START_US) -> Event:
    return Event(counter, time_us, fresh(time_us).nonce, 0, delta)


def namespace(name: str, version: int = 1) -> Namespace:
    return Namespace(1, name, SETTINGS, (), DATASET, START_US, version)


class Desk:
    """A gatherer over a writer that the test controls."""

    def __init__(self) -> None:
        self.clock = FakeClock(START_US)
        self.load = Load(self.clock)
        self.gatherer = AddGatherer(self._write, self.load)
        self.writes: list[tuple[str, list[str]]] = []
        self.results: Results = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        #: The outcome of a counter's add, if not NEW.
        self.outcomes: dict[str, Written | CounterError] = {}

    async def _write(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | CounterError]:
        self.writes.append((namespace.name, [each.counter for each in events]))
        await self.may_answer.wait()
        return [self.outcomes.get(each.counter, Written.NEW) for each in events]

    def add(self, namespace: Namespace, *events: Event) -> None:
        for each in events:
            self.gatherer.add(namespace, each, self.done(each.counter))

    def done(self, name: str) -> Any:
        return lambda outcome: self.results.append((name, outcome))


async def settle() -> None:
    """Let all that is ready happen."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_adds_of_a_turn_are_one_write_and_each_gets_its_own_outcome() -> None:
    desk = Desk()
    desk.outcomes = {each.name: each for each in Written} | {"failed": CounterError("alone")}
    desk.add(namespace("a"), *(event(name) for name in desk.outcomes))
    assert desk.writes == []
    await settle()
    assert desk.writes == [("a", list(desk.outcomes))]
    assert desk.results == list(desk.outcomes.items())


async def test_adds_in_flight_and_the_time_of_their_turn_are_measured() -> None:
    desk = Desk()
    desk.may_answer.clear()
    desk.add(namespace("a"), event("first"))
    desk.clock.advance(300 * MILLISECOND)
    desk.add(namespace("b"), event("second"))
    assert desk.load.ahead == 2
    await settle()
    assert desk.load.ahead == 2
    assert desk.load.lag_us == 300 * MILLISECOND
    desk.may_answer.set()
    await settle()
    assert desk.load.ahead == 0


async def test_two_namespaces_of_a_turn_are_two_writes() -> None:
    desk = Desk()
    one, other = namespace("a"), namespace("b")
    desk.outcomes = dict.fromkeys(("b1", "b2"), Written.REPLAYED)
    for number in "12":
        desk.add(one, event(f"a{number}"))
        desk.add(other, event(f"b{number}"))
    await settle()
    assert desk.writes == [("a", ["a1", "a2"]), ("b", ["b1", "b2"])]
    assert sorted(desk.results, key=lambda each: each[0]) == [
        *(("a1", Written.NEW), ("a2", Written.NEW)),
        *(("b1", Written.REPLAYED), ("b2", Written.REPLAYED)),
    ]


async def test_an_add_by_other_settings_is_written_by_those() -> None:
    """The namespace was changed between two adds of a turn."""
    desk = Desk()
    old, new = namespace("a"), namespace("a", version=2)
    desk.add(old, event("old"))
    desk.add(new, event("new"))
    await settle()
    assert desk.writes == [("a", ["old"]), ("a", ["new"])]


async def test_the_next_turn_does_not_wait_for_the_write_of_this_one() -> None:
    desk = Desk()
    desk.may_answer.clear()
    at = namespace("a")
    desk.add(at, event("first"))
    await settle()
    desk.add(at, event("second"))
    await settle()
    assert desk.writes == [("a", ["first"]), ("a", ["second"])]
    assert desk.results == []
    desk.may_answer.set()
    await settle()
    assert [name for name, _ in desk.results] == ["first", "second"]


async def test_a_callback_may_add_again_at_once() -> None:
    desk = Desk()
    at = namespace("a")

    def again(_: Written | CounterError) -> None:
        desk.add(at, event("again"))

    desk.gatherer.add(at, event("first"), again)
    await settle()
    assert desk.writes == [("a", ["first"]), ("a", ["again"])]
    assert [name for name, _ in desk.results] == ["again"]


async def test_a_callback_that_fails_keeps_no_other_from_being_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connection may be gone in a way that only the write shows."""
    desk = Desk()
    at = namespace("a")

    def fails(_: Written | CounterError) -> None:
        raise RuntimeError("the handler is closed")

    desk.add(at, event("before"))
    desk.gatherer.add(at, event("broken"), fails)
    desk.add(at, event("behind"))
    await settle()
    assert [name for name, _ in desk.results] == ["before", "behind"]
    assert "the handler is closed" in caplog.text


@pytest_asyncio.fixture
async def app(fast_dir: Path) -> AsyncIterator[App]:
    async with running("sqlite", fast_dir) as each:
        yield each


class Counting:
    """Adds through the service's own turns, and their outcomes."""

    def __init__(self, app: App) -> None:
        self.service: CounterService = app.application.service
        self.namespace = self.service.namespaces.get("default")
        self.results: Results = []

    def add(self, each: Event) -> bool:
        return self.service.add_soon(
            self.namespace, each, lambda outcome: self.results.append((each.counter, outcome))
        )

    async def first_results(self, count: int) -> Results:
        await eventually(lambda: len(self.results) >= count, f"{count} adds have results")
        return self.results


async def test_new_and_replayed_adds_are_tallied_once_each(app: App) -> None:
    counting = Counting(app)
    now_us = app.clock.now_us()
    old, new = event("old", 5, now_us), event("new", 7, now_us)
    other = old._replace(delta=6)
    assert counting.add(old)
    await counting.first_results(1)
    # A conflict is left to the handler, which tallies it.
    for each in (old, new, other, old, new):
        assert counting.add(each)
    results = await counting.first_results(6)
    assert results == [
        ("old", Written.NEW),
        *(("old", Written.REPLAYED), ("new", Written.NEW), ("old", Written.CONFLICT)),
        *(("old", Written.REPLAYED), ("new", Written.REPLAYED)),
    ]
    tally = counting.service.tally
    assert (tally["original"], tally["replayed"], tally["conflict"]) == (2, 3, 0)
    counts = await counting.service.reader.read(counting.namespace, ["old", "new"], 0)
    assert [each.count for each in counts] == [5, 7]


async def test_an_error_of_the_store_is_reported_to_all_and_counts_as_unknown(app: App) -> None:
    counting = Counting(app)
    with store_that_fails(app, "append"):
        for name in "abc":
            assert counting.add(event(name, 1, app.clock.now_us()))
        results = await counting.first_results(3)
    assert [name for name, _ in results] == ["a", "b", "c"]
    assert all(isinstance(outcome, StoreUnavailableError) for _, outcome in results)
    tally = counting.service.tally
    assert {outcome: number for outcome, number in tally.items() if number} == {"unknown": 3}
    # The room in the queue was given back.
    assert counting.add(event("d", 1, app.clock.now_us()))
    assert (await counting.first_results(4))[-1] == ("d", Written.NEW)


async def test_a_fault_that_was_unexpected_is_reported_to_all_too(app: App) -> None:
    """A caller without a result would wait for ever."""
    counting = Counting(app)

    async def fault(*_: Any) -> None:
        raise ZeroDivisionError

    with patch.object(app.store.events, "append", fault):
        for name in "ab":
            assert counting.add(event(name, 1, app.clock.now_us()))
        results = await counting.first_results(2)
    assert all(type(outcome) is CounterError for _, outcome in results)
    assert counting.add(event("d", 1, app.clock.now_us()))
    assert (await counting.first_results(3))[-1] == ("d", Written.NEW)


async def test_too_many_waiting_adds_are_refused_before_any_work(app: App) -> None:
    counting = Counting(app)
    with patch("counter.limits.PENDING_WRITES_MAX", 2):
        for name in "abc":
            counting.add(event(name, 1, app.clock.now_us()))
        [(refused, error)] = counting.results
        assert (refused, type(error)) == ("c", OverloadedError)
        assert (await counting.first_results(3))[1:] == [("a", Written.NEW), ("b", Written.NEW)]
    assert counting.service.tally["refused"] == 1
    assert counting.add(event("d", 1, app.clock.now_us()))
    assert (await counting.first_results(4))[-1] == ("d", Written.NEW)


@pytest.mark.parametrize("off_us", [-DAY, -6 * SECOND, 6 * SECOND, DAY])
async def test_adds_that_may_be_late_are_left_to_the_handler(app: App, off_us: int) -> None:
    counting = Counting(app)
    with patch.object(app.store.events, "append") as append:
        assert not counting.add(event("c", 1, app.clock.now_us() + off_us))
        await settle()
    append.assert_not_called()
    assert counting.results == []


async def test_best_effort_adds_of_a_turn_are_one_call_of_the_cache(app: App) -> None:
    counting = Counting(app)
    settings = replace(counting.namespace.settings, counter_type=CounterType.BEST_EFFORT)
    counting.namespace = replace(counting.namespace, settings=settings)
    down = CacheUnavailableError("a planted fault")
    increment = AsyncMock(return_value=[3, down])
    with patch.object(app.application.cache, "increment_many", increment):
        for name, delta in (("c", 3), ("d", 4)):
            assert counting.add(counting.service.best_effort_event(name, delta))
        await settle()
    increment.assert_awaited_once_with(counting.namespace, [("c", 3), ("d", 4)])
    assert counting.results == [("c", Written.UNVERIFIED), ("d", down)]
    assert counting.service.tally["best_effort"] == 1
    assert counting.service.tally["unknown"] == 1


async def test_a_strict_check_by_compare_and_set_is_left_to_the_handler(app: App) -> None:
    """Compare-and-sets of one counter contend, and no other add waits for them."""
    counting = Counting(app)
    settings = replace(counting.namespace.settings, payload_check=PayloadCheck.STRICT)
    counting.namespace = replace(counting.namespace, settings=settings)
    with patch.object(app.store, "separate_writes", object()):
        assert not counting.add(event("c", 1, app.clock.now_us()))


async def test_an_add_that_fails_alone_is_reported_alone(app: App) -> None:
    """It is tallied as unknown; its slice may be missing for it alone."""
    counting = Counting(app)
    down = StoreUnavailableError("a planted fault")

    async def append(_: Namespace, events: Sequence[Event]) -> list[Written | CounterError]:
        return [down if each.counter == "bad" else Written.UNVERIFIED for each in events]

    with patch.object(app.store.events, "append", append):
        for name in ("a", "bad"):
            assert counting.add(event(name, 1, app.clock.now_us()))
        assert await counting.first_results(2) == [("a", Written.UNVERIFIED), ("bad", down)]
    tally = counting.service.tally
    assert {outcome: number for outcome, number in tally.items() if number} == {
        "unverified": 1,
        "unknown": 1,
    }
    with patch.object(
        app.store.events, "append", AsyncMock(side_effect=SliceMissingError("planted"))
    ):
        assert counting.add(event("c", 1, app.clock.now_us()))
        assert (await counting.first_results(3))[-1] == ("c", Written.LATE)
    assert sum(tally.values()) == 2
