"""The live tail, read and changed by two threads, each interrupted at every step."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.storage.sqlite import live
from counter.storage.sqlite.live import Ids, LiveTail
from counter.types import Event, Fold, Namespace, Span
from tests.unit.test_write import SPACE

WINDOW = SPACE.settings.rollup_window_us
AFTER = [("a", -1), ("b", -1)]
Step = Callable[[LiveTail], object]


class _WaitsError(Exception):
    """A thread would wait here for the other one: it goes on when that one has let go."""


class _Lock:
    """Replaces the tail's lock if one thread plays both."""

    held = False

    def __enter__(self) -> None:
        if self.held:
            raise _WaitsError
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False


def event(counter: str, delta: int, window: int, *, clear: bool = False) -> Event:
    return Event(counter, window * WINDOW, bytes(16), 0, delta, clear)


def new_tail() -> LiveTail:
    """Three windows of two counters, and a commit that is under way."""
    tail = LiveTail()
    tail._lock = _Lock()  # type: ignore[assignment]
    tail.begin(SPACE.id, 0)
    for window in range(3):
        tail.add(SPACE.id, WINDOW, [event("a", 10**window, window), event("b", 7, window)])
    moved = [event("a", -5_000, 2), event("b", 5_000, 2)]
    tail.expect(SPACE, moved)
    # Two jobs of one commit, as one add each.
    for each in moved:
        tail.note(SPACE, [each])
    return tail


def read(tail: LiveTail) -> list[int] | None:
    """The sums after the beginning; None if the events must be read."""
    folds = tail.tails(SPACE.id, WINDOW, AFTER)
    return None if folds is None else [each.total for each in folds]


def read_names(tail: LiveTail) -> dict[int, list[str]] | None:
    """The counters of each window; None if the events must be read."""
    return tail.counters(SPACE.id, WINDOW, Span(0, 9 * WINDOW + 1))


def drop_largest(tail: LiveTail) -> None:
    with patch.object(live, "_TAIL_BYTES_MAX", 0):
        tail.commit()


def commit_removal(tail: LiveTail, *removed: Event) -> None:
    tail.note_removed(SPACE, removed)
    tail.commit()


CHANGES: dict[str, Step] = {
    "removal": lambda tail: commit_removal(tail, event("a", 100, 2), event("b", 7, 2)),
    "removal-of-a-clear": lambda tail: commit_removal(tail, event("a", 0, 1, clear=True)),
    "commit": LiveTail.commit,
    "rollback": LiveTail.rollback,
    "forget": lambda tail: tail.forget(SPACE.id, WINDOW - 1),
    "forget-all": lambda tail: tail.forget(SPACE.id, 9 * WINDOW),
    "forget-namespace": lambda tail: tail.forget_namespace(SPACE.id),
    "commit-that-drops": drop_largest,
    "add": lambda tail: tail.add(SPACE.id, WINDOW, [event("a", 0, 1, clear=True)]),
}


class _Interruption:
    """Traces the instructions of the tail's code, and calls *by* before the one at *at*."""

    def __init__(self, at: int, by: Step, tail: LiveTail) -> None:
        self.tail = tail
        self.met: list[object] = []
        self._left = at
        self._by = by

    def trace(self, frame: FrameType, what: str, _: Any) -> Any:
        if frame.f_code.co_filename != live.__file__:
            return None
        frame.f_trace_opcodes = True
        if what == "opcode":
            if self._left == 0:
                try:
                    self.met.append(self._by(self.tail))
                except _WaitsError:
                    self.met.append(_WaitsError)
            self._left -= 1
        return self.trace


def interrupted(run: Step, by: Step) -> Iterator[tuple[object, object]]:
    """The results of *run* and of *by*, which interrupts *run* at each instruction in turn."""
    for at in range(100_000):
        interruption = _Interruption(at, by, new_tail())
        before = sys.gettrace()
        sys.settrace(interruption.trace)
        try:
            result = run(interruption.tail)
        finally:
            sys.settrace(before)
        if not interruption.met:
            return
        yield result, interruption.met[0]
    raise AssertionError("it never ends")


@pytest.mark.parametrize("reading", [read, read_names])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_any_two_steps_of_a_read_is_seen_whole_or_not_at_all(
    name: str, reading: Step
) -> None:
    change = CHANGES[name]
    after = new_tail()
    change(after)
    wanted = [None, reading(new_tail()), reading(after)]
    results = list(interrupted(reading, change))
    assert len(results) > 20
    for found, _ in results:
        assert found in wanted


@pytest.mark.parametrize("name", CHANGES)
def test_a_read_between_any_two_steps_of_a_change_sees_all_of_it_or_nothing(name: str) -> None:
    change = CHANGES[name]
    after = new_tail()
    change(after)
    wanted = [None, read(new_tail()), read(after), _WaitsError]
    results = list(interrupted(change, read))
    assert len(results) > 20
    for _, found in results:
        assert found in wanted


def test_a_read_for_one_counter_serves_all() -> None:
    """Sums of two moments are no view: the events are read in one transaction."""
    tail = new_tail()
    assert tail.tails(SPACE.id, WINDOW, AFTER) == [Fold(False, 111), Fold(False, 21)]
    tail.add(SPACE.id, WINDOW, [event("a", 0, 1, clear=True)])
    assert tail.tails(SPACE.id, WINDOW, AFTER) is None
    assert tail.tails(SPACE.id, WINDOW, [("b", -1)]) == [Fold(False, 21)]
    unaligned = [("b", 0)]
    assert tail.tails(SPACE.id, WINDOW, unaligned) is None
    other: Namespace = replace(SPACE, id=2)
    assert tail.tails(other.id, WINDOW, AFTER) is None


def test_past_its_bound_of_memory_the_tail_forgets_the_oldest_windows_only() -> None:
    """Regression: it forgot all, and every read went to the log until they were rolled up."""
    tail = new_tail()
    with patch.object(live, "_TAIL_BYTES_MAX", 5 * live._SUM_BYTES):
        tail.commit()
    assert read(tail) is None
    assert tail.tails(SPACE.id, WINDOW, [("a", WINDOW - 1)]) == [Fold(False, -4_890)]


@given(
    st.lists(
        st.one_of(
            st.lists(
                st.builds(
                    event,
                    st.sampled_from("abc"),
                    st.integers(-9, 9),
                    st.integers(0, 4),
                    clear=st.booleans(),
                ),
                min_size=1,
            ),
            st.integers(0, 5),
        )
    ),
    st.integers(0, 12),
)
def test_the_tail_is_exact_or_absent(steps: list[list[Event] | int], sums_max: int) -> None:
    """Commits and the windows that are forgotten, against the events themselves."""
    tail, events = LiveTail(), list[Event]()
    tail.begin(SPACE.id, 0)
    with patch.object(live, "_TAIL_BYTES_MAX", sums_max * (live._SUM_BYTES + 1)):
        for step in steps:
            if isinstance(step, int):
                tail.forget(SPACE.id, step * WINDOW - 1)
            else:
                events += step
                tail.note(SPACE, step)
                tail.commit()
            assert tail._bytes <= live._TAIL_BYTES_MAX
            for window in range(6):
                after_us = window * WINDOW - 1
                for counter in "abc":
                    mine = [e for e in events if e.counter == counter and e[1] > after_us]
                    wanted = None
                    if not any(each.clear for each in mine):
                        wanted = [Fold(False, sum(each.delta for each in mine))]
                    assert tail.tails(SPACE.id, WINDOW, [(counter, after_us)]) in (wanted, None)
    tail.forget_namespace(SPACE.id)
    assert tail._bytes == 0


def test_the_number_of_remembered_ids_is_bounded() -> None:
    ids = Ids()
    with patch.object(live, "_IDS_MAX", 2):
        for number in range(3):
            ids.learn(1, str(number), number)
            ids.commit()
    assert dict(ids.of(1)) == {"2": 2}
