"""SQLite decides bounded adds as a list of what was committed does, in the same order."""

import asyncio
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from counter.bounds import (
    NO_BOUNDS,
    Bounds,
    Refusal,
    bounds_of,
    refusal_in,
    terms_if_bounded,
)
from counter.core.adds import event_of, events_of_atomic
from counter.core.results import Item
from counter.errors import StoreUnavailableError, UnavailableError
from counter.limits import INT64_MAX, INT64_MIN, SECOND
from counter.storage.sqlite import SqliteStore, bounds, live
from counter.testing.cases import DATASET, NOW, make_namespace, make_slices, nonce
from counter.testing.clock import FakeClock
from counter.testing.service_cases import Process
from counter.types import OTHER_PAYLOAD, Decision, Event, Outcome, Token, Written
from counter.windows import fingerprint
from tests.unit.test_sqlite_faults import Failing

COUNTERS = ("a", "b")
ACCEPT_LIMIT = 5 * SECOND
#: Place of the namespace, scope, time and nonce.
Key = tuple[int, str, int, bytes]
#: How far before now a token's time is; on a grid, so that adds meet clears and windows.
AGES = tuple(steps * SECOND for steps in (0, 0, 0, 1, 2, 4, -1))

_MANY = 10**9


def in_order(one: int | None, other: int | None) -> Bounds:
    """Bounds that some count is within."""
    if one is None or other is None:
        return Bounds(one, other)
    return Bounds(min(one, other), max(one, other))


counters = st.sampled_from([*COUNTERS[:1] * 2, *COUNTERS])
ages = st.sampled_from(AGES)
deltas = st.sampled_from([1, 2, 3, -1, -2, 0, INT64_MIN, INT64_MAX])
limits = st.sampled_from([None, 0, 1, 2, 3, -1, -3, INT64_MIN, INT64_MAX])
bounded = st.builds(in_order, limits, limits)
adds = st.tuples(counters, deltas, bounded)
places = st.integers(0, 7)
#: Of two namespaces, the second has no bounds of its own.
namespaces = st.sampled_from([0, 0, 0, 1])
calls = st.one_of(
    st.tuples(st.just("adds"), namespaces, ages, st.lists(adds, min_size=1, max_size=3)),
    st.tuples(st.just("adds"), namespaces, ages, st.lists(adds, min_size=1, max_size=3)),
    st.tuples(st.just("clear"), namespaces, ages, counters),
    st.tuples(st.just("atomic"), namespaces, ages, st.lists(adds, min_size=1, max_size=4)),
    # Of one of the last calls:
    st.tuples(st.just("again"), places),
    st.tuples(st.just("other"), places, deltas, bounded),
    st.tuples(st.just("cancel"), places),
    st.tuples(st.just("resolve"), places),
)
groups = st.lists(calls, min_size=1, max_size=6)
#: The statement at which the transaction fails, and whether it takes effect before that.
faults = st.sampled_from([None, None, None, ("COMMIT", False), ("COMMIT", True), ("INSERT", False)])
acts = st.one_of(
    st.tuples(st.just("group"), groups, faults),
    st.tuples(st.just("group"), groups, faults),
    st.tuples(st.just("advance"), st.sampled_from([SECOND, 4 * SECOND, 10 * SECOND])),
    st.tuples(st.just("roll"), st.just(30 * SECOND)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("bounds"), bounded),
)


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked of the store: to append *events*, or to cancel or resolve their token."""

    place: int
    events: tuple[Event, ...]
    kind: str = "append"

    @property
    def is_atomic(self) -> bool:
        return self.events[0].item_key > 0

    @property
    def of_tokens(self) -> list[tuple[Key, tuple[Event, ...]]]:
        """Its tokens, each with its scope, and their events."""
        parts = [self.events] if self.is_atomic else [(each,) for each in self.events]
        return [
            ((self.place, part[0].scope, part[0].event_time_us, part[0].event_id), part)
            for part in parts
        ]


def payload(events: Sequence[Event]) -> set[tuple[object, ...]]:
    """What is the same in all requests of one token."""
    return {
        (each.counter, each.item_key, each.clear or (each.delta, bounds_of(each.atom)))
        for each in events
    }


@dataclass(frozen=True, slots=True)
class Stored:
    """The events of one token, and why they were refused, if they were."""

    events: tuple[Event, ...]
    why: Refusal | None = None


@dataclass(slots=True)
class Model:
    """What is committed; a count is a sum over all of it."""

    stored: dict[Key, Stored] = field(default_factory=dict)
    decided: dict[Key, Decision] = field(default_factory=dict)
    bounds: list[Bounds] = field(default_factory=lambda: [NO_BOUNDS, NO_BOUNDS])

    def _of(self, place: int, counter: str) -> Iterable[Event]:
        for key, stored in self.stored.items():
            if key[0] == place and stored.why is None:
                yield from (each for each in stored.events if each.counter == counter)

    def _cleared_us(self, place: int, counter: str) -> int:
        clears = [each.event_time_us for each in self._of(place, counter) if each.clear]
        return max(clears, default=-1)

    def count(self, place: int, counter: str) -> int:
        cleared_us = self._cleared_us(place, counter)
        return sum(x.delta for x in self._of(place, counter) if x.event_time_us > cleared_us)

    def append(self, key: Key, events: tuple[Event, ...], open_us: int) -> Written:
        """Append the events of one token; those before *open_us* are late."""
        decision = self.decided.get(key)
        is_out = decision is not None and decision.outcome is not Outcome.APPLIED
        if events[0].event_time_us < open_us or is_out:
            return Written.LATE
        stored, outcome = self.stored.get(key), Written.REPLAYED
        if stored is None:
            stored = self.stored[key] = Stored(events, self._why(key[0], events))
            outcome = Written.NEW
        if payload(stored.events) != payload(events):
            return Written.CONFLICT
        return Written.BOUND_REACHED if stored.why else outcome

    def _why(self, place: int, events: Sequence[Event]) -> Refusal | None:
        in_order = sorted(events, key=lambda each: (each.counter, each.item_key))
        for item, first in enumerate(in_order):
            mine = [each for each in in_order if each.counter == first.counter]
            erased_us = self._cleared_us(place, first.counter)
            if first is not mine[0] or first.clear or first.event_time_us <= erased_us:
                continue
            delta, own = sum(each.delta for each in mine), [bounds_of(each.atom) for each in mine]
            if why := self.refusal(place, first.counter, delta, own):
                return why._replace(item=item)
        return None

    def held(self, place: int, counter: str, way: int) -> int:
        """What open holds that go the way of *way* reserve."""
        return 0

    def refusal(
        self, place: int, counter: str, delta: int, bounds: Sequence[Bounds]
    ) -> Refusal | None:
        """Why a step of *delta* is refused, by its own *bounds* or those of its namespace."""
        count, held = self.count(place, counter), self.held(place, counter, delta)
        for is_most, sign in ((True, 1), (False, -1)):
            all_of_them = [each[is_most] for each in bounds]
            own = [each * sign for each in all_of_them if each is not None]
            default = self.bounds[place][is_most]
            bound = min([*own, *([] if default is None else [default * sign])], default=None)
            if delta * sign > 0 and bound is not None and (count + held + delta) * sign > bound:
                return Refusal(count, bound * sign, is_most, bound not in own, held=held)
        return None

    def resolve(self, key: Key, events: tuple[Event, ...]) -> Decision:
        stored = self.stored.get(key)
        outcome, mine = Outcome.VOID, fingerprint(events)
        if stored is not None:
            outcome = Outcome.APPLIED
            mine = mine if payload(stored.events) == payload(events) else OTHER_PAYLOAD
        return self.decided.setdefault(key, Decision(outcome, mine))

    def cancel(self, key: Key, events: tuple[Event, ...]) -> Decision:
        stored, before = self.stored.get(key), self.decided.get(key)
        if stored is not None and payload(stored.events) != payload(events):
            return Decision(Outcome.APPLIED, OTHER_PAYLOAD)
        mine = fingerprint(events)
        if before is not None and (
            before.outcome.is_cancelled or before.fingerprint not in (mine, OTHER_PAYLOAD)
        ):
            return before
        self.stored.pop(key, None)
        was_counted = stored is not None and stored.why is None
        self.decided[key] = Decision(Outcome.cancelled(was_counted=was_counted), mine)
        return self.decided[key]


class World:
    """A store and its model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock(NOW)
        self.model = Model()
        self.calls: list[Call] = []
        self.tokens = count(1)

    async def open(self) -> None:
        self.store = SqliteStore(self.folder, self.clock, [DATASET])
        await self.store.open()
        self.process = Process(self.store, self.clock)

    async def begin(self) -> None:
        await self.open()
        await make_slices(self.store)
        self.namespaces = [
            await make_namespace(self.store, name, accept_limit_us=ACCEPT_LIMIT) for name in "mn"
        ]

    async def do(self, kind: str, *rest: Any) -> None:
        if kind == "group":
            await self.group(*rest)
        elif kind == "advance":
            self.clock.advance(*rest)
        elif kind == "roll":
            self.clock.advance(*rest)
            await self.process.roll_up()
        elif kind == "restart":
            await self.store.close()
            await self.open()
        else:
            await self.set_bounds(*rest)
        for place, namespace in enumerate(self.namespaces):
            expected = [self.model.count(place, each) for each in COUNTERS]
            assert await self.process.counts(namespace, *COUNTERS) == expected

    async def set_bounds(self, wanted: Bounds) -> None:
        """Give the first namespace other bounds."""
        old = self.namespaces[0]
        changed = replace(old.settings, bounds=wanted)
        await self.process.api.namespaces.refresh()
        self.namespaces[0] = await self.process.api.namespaces.update(old, changed)
        self.model.bounds[0] = wanted

    def call(self, kind: str, *rest: Any) -> Call | None:
        """Return what is to be asked; None if it is of an earlier call, and there is none."""
        if kind in ("again", "other", "cancel", "resolve"):
            if not self.calls:
                return None
            at, *what = rest
            before: Call = self.calls[-1 - at % len(self.calls)]
            if kind == "again":
                return before
            one = before if before.is_atomic else replace(before, events=before.events[:1])
            if kind != "other":
                return replace(one, kind=kind)
            first = one.events[0]
            token = Token(first.event_id, first.event_time_us)
            items = [(first.counter, *what)]
            return replace(one, events=self._events(token, items, one.is_atomic))
        place, age_us, what = rest
        token = self._token(age_us)
        if kind == "clear":
            events: tuple[Event, ...] = (event_of(what, token, None),)
        elif kind == "atomic":
            events = self._events(token, what, True)
        else:
            events = tuple(
                event for each in what for event in self._events(self._token(age_us), [each], False)
            )
        self.calls.append(Call(place, events))
        return self.calls[-1]

    def _token(self, age_us: int) -> Token:
        return Token(nonce(next(self.tokens)), self.clock.now_us() - age_us)

    @staticmethod
    def _events(token: Token, items: Sequence[Any], is_atomic: bool) -> tuple[Event, ...]:
        made = [Item(name, delta, terms_if_bounded(delta, *own)) for name, delta, own in items]
        if is_atomic:
            return tuple(events_of_atomic(made, token))
        return tuple(event_of(each.counter, token, each.delta, each.terms) for each in made)

    async def group(self, kinds: Sequence[Any], fault: tuple[str, bool] | None) -> None:
        """Make all calls at once, in one transaction, and compare what comes of them."""
        group = [call for each in kinds if (call := self.call(*each)) is not None]
        if not group:
            return
        if bounds._LOG_EVENTS_MAX < _MANY:
            # Of a transaction that failed no answer says which adds could not be decided.
            fault = None
        database = self.store.database
        working = database._writing
        commits = sum(database.tally.calls["write"].seconds.counts)
        failing = Failing(working, *(fault or ())[:1], after=fault is not None and fault[1])
        database._writing = failing  # type: ignore[assignment]
        results = await asyncio.gather(*map(self._ask, group), return_exceptions=True)
        database._writing = working
        commits = sum(database.tally.calls["write"].seconds.counts) - commits
        assert commits == 1, "they are one transaction"
        if has_failed := fault is not None and not failing._fails:
            assert {type(each) for each in results} == {StoreUnavailableError}
            if not failing._after:
                return
        for at in self._in_order(group):
            await self._compare(group[at], results[at], has_failed=has_failed)
        for call in group:
            await self._check_refusals(call)

    async def _compare(self, call: Call, result: Any, *, has_failed: bool) -> None:
        """Do *call* with the model; its result must be the same, unless the transaction failed."""
        if isinstance(result, list):
            # Those that could not be decided are not written.
            kept = [n for n, out in enumerate(result) if not isinstance(out, UnavailableError)]
            call = replace(call, events=tuple(call.events[n] for n in kept))
            result = [result[n] for n in kept]
        if call.events and (has_failed or not isinstance(result, UnavailableError)):
            expected = await self._expected(call)
            assert has_failed or result == expected, (call, result, expected)

    async def _ask(self, call: Call) -> Any:
        namespace, events = self.namespaces[call.place], call.events
        if call.kind == "cancel":
            proposed = Decision(Outcome.CANCELLED_VOID, fingerprint(events))
            return await self.store.decisions.cancel(namespace, events, proposed)
        if call.kind == "resolve":
            proposed = Decision(Outcome.VOID, fingerprint(events))
            return await self.store.decisions.decide(namespace, events, proposed)
        if call.is_atomic:
            return await self.store.events.append_atomic(namespace, events)
        return list(await self.store.events.append(namespace, events))

    @staticmethod
    def _in_order(group: Sequence[Call]) -> list[int]:
        """Return the places of the calls in the order in which the writer does them: appends
        together, by namespace, and all others together."""

        def is_append(call: Call) -> bool:
            return call.kind == "append" and not call.is_atomic

        appends = [at for at, call in enumerate(group) if is_append(call)]
        others = [at for at, call in enumerate(group) if not is_append(call)]
        places = list(dict.fromkeys(group[at].place for at in appends))
        appends.sort(key=lambda at: places.index(group[at].place))
        return appends + others if is_append(group[0]) else others + appends

    async def _expected(self, call: Call) -> Any:
        model = self.model
        if call.kind != "append":
            [(key, events)] = call.of_tokens
            return (
                model.cancel(key, events) if call.kind == "cancel" else model.resolve(key, events)
            )
        open_us = max(await self._passed_us(call.place) + 1, self.clock.now_us() - ACCEPT_LIMIT)
        outcomes = [model.append(key, part, open_us) for key, part in call.of_tokens]
        return outcomes[0] if call.is_atomic else outcomes

    async def _passed_us(self, place: int) -> int:
        return max(await self.store.rollups.watermarks(self.namespaces[place]))

    async def _check_refusals(self, call: Call) -> None:
        """What is stored says why, and what counted has no reason."""
        for key, _ in call.of_tokens:
            if (stored := self.model.stored.get(key)) is None:
                continue
            found = await self.store.events.find(self.namespaces[call.place], stored.events)
            for each, asked in zip(found, stored.events, strict=True):
                assert each is not None
                assert refusal_in(each.atom) == stored.why
                assert each.same_payload(asked)
                assert each.delta == (0 if stored.why else asked.delta)


async def play(folder: Path, script: Sequence[tuple[Any, ...]]) -> None:
    world = World(folder)
    await world.begin()
    try:
        for kind, *rest in script:
            await world.do(kind, *rest)
    finally:
        await world.store.close()


def to_a(delta: int, at_most: int | None = None) -> tuple[object, ...]:
    """An add to the first counter."""
    return "adds", 0, 0, [("a", delta, Bounds(at_most=at_most))]


def alone(call: tuple[object, ...]) -> tuple[object, ...]:
    """A transaction of one call."""
    return "group", [call], None


ROLL = ("roll", 30 * SECOND)
LATER = ("advance", SECOND)


@settings(max_examples=settings().max_examples * 2)
@given(
    st.lists(acts, min_size=1, max_size=14),
    # The memory of the live tail, and the events of a tail that are read in a transaction.
    st.sampled_from([_MANY, _MANY, 400, 0]),
    st.sampled_from([_MANY, _MANY, 4]),
)
@example(
    [alone(to_a(2)), ROLL, alone(("clear", 0, 0, "a")), LATER, alone(to_a(1, 1))], _MANY, _MANY
)
@example([alone(to_a(2)), ROLL, alone(("cancel", 0)), alone(to_a(2, 2))], _MANY, _MANY)
@example([alone(to_a(1, 0)), alone(("resolve", 0)), alone(("cancel", 0))], _MANY, _MANY)
def test_each_add_is_decided_by_what_was_committed_before_it(
    script: list[tuple[Any, ...]], tail_bytes_max: int, log_events_max: int
) -> None:
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        patch.object(live, "_TAIL_BYTES_MAX", tail_bytes_max),
        patch.object(bounds, "_LOG_EVENTS_MAX", log_events_max),
    ):
        asyncio.run(play(Path(folder), script))
