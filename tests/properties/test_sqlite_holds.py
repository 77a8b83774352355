"""SQLite decides and ends holds as a list of what was committed does, in the same order."""

import asyncio
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from counter.bounds import Bounds, Refusal, refusal_in
from counter.errors import UnavailableError
from counter.holds import (
    FIRST,
    End,
    Ending,
    Hold,
    HoldId,
    events_of_hold,
    held_name,
    is_hold,
    request_of,
)
from counter.limits import INT64_MAX, SECOND
from counter.storage.sqlite import bounds, live
from counter.types import Decision, Event, Outcome, Written
from counter.windows import fingerprint
from tests.properties.test_sqlite_bounds import (
    ACCEPT_LIMIT,
    COUNTERS,
    Call,
    Key,
    Model,
    Stored,
    World,
    ages,
    alone,
    bounded,
    faults,
    namespaces,
    places,
    to_a,
)
from tests.properties.test_sqlite_bounds import calls as calls_of_adds

#: Expired holds that a transaction ends at most.
ENDED_MAX = 2
#: A counter with nothing but bounded adds and holds that are settled with no more than was held.
FULL, LIMITS = "full", Bounds(-3, 3)
_MANY = 10**9
_LONGEST = 20 * SECOND
#: Acts that end a hold.
_ENDS = {"settle": Ending.SETTLED, "release": Ending.RELEASED}

amounts = st.sampled_from([1, 2, 3, 2, -1, -2, INT64_MAX])
lasts = st.sampled_from([SECOND, SECOND, SECOND, 3 * SECOND, 10 * SECOND])
steps = st.sampled_from([1, 2, 1, -1, -2, 4])
of_a = st.tuples(st.just("a"), amounts, bounded)
of_full = st.tuples(st.just(FULL), steps, st.just(LIMITS))
full_calls = st.one_of(
    st.tuples(st.just("hold"), st.just(0), ages, of_full, lasts),
    st.tuples(st.just("hold"), st.just(0), ages, of_full, lasts),
    st.tuples(st.just("adds"), st.just(0), ages, st.lists(of_full, min_size=1, max_size=2)),
)
ends = st.one_of(
    # Of one of the last holds:
    st.tuples(st.just("settle"), places, st.sampled_from([0, 1, 2, 7])),
    st.tuples(st.just("release"), places, st.just(0)),
    st.tuples(st.just("extend"), places, st.sampled_from([SECOND, 10 * SECOND, 19 * SECOND])),
    st.tuples(st.just("other hold"), places, amounts, bounded, lasts),
    st.tuples(st.just("cancel hold"), places),
)
holds = st.tuples(st.just("hold"), namespaces, ages, of_a, lasts)
calls = st.one_of(calls_of_adds, holds, holds, full_calls, ends, ends)
acts = st.one_of(
    st.tuples(st.just("group"), st.lists(calls, min_size=1, max_size=6), faults),
    st.tuples(st.just("group"), st.lists(calls, min_size=1, max_size=6), faults),
    st.tuples(st.just("group"), st.lists(full_calls | holds, min_size=2, max_size=6), faults),
    st.tuples(st.just("group"), st.lists(full_calls, min_size=2, max_size=6), st.none()),
    st.tuples(st.just("advance"), st.sampled_from([SECOND, SECOND, 3 * SECOND, 10 * SECOND])),
    st.tuples(st.just("advance"), st.sampled_from([SECOND, -SECOND, -3 * SECOND])),
    st.tuples(st.just("roll"), st.sampled_from([0, SECOND, 30 * SECOND])),
    st.tuples(st.just("expire"), st.sampled_from([0, SECOND])),
    st.tuples(st.just("restart")),
    st.tuples(st.just("bounds"), bounded),
)


@dataclass(frozen=True, slots=True)
class EndCall(Call):
    """What is asked for a hold that has begun: the amount to settle, or how long it is to last."""

    value: int = 0


def _hold_of(events: Sequence[Event]) -> HoldId:
    return request_of(events)[0]


@dataclass(slots=True)
class HoldModel(Model):
    """Holds beside adds; one is open until its end is in the list."""

    holds: dict[tuple[int, HoldId], Hold] = field(default_factory=dict)
    #: What the store's clock says, and the last instants that are rolled up, in this transaction.
    now_us: int = 0
    passed_us: Sequence[int] = ()
    ends_left: int = 0

    def held(self, place: int, counter: str, way: int) -> int:
        return sum(each.amount for each in self.open(place, counter, way))

    def open(self, place: int, counter: str, way: int) -> Iterator[Hold]:
        for (at, hold), each in self.holds.items():
            is_there = (at, hold.counter) == (place, counter)
            if is_there and each.expires_us is not None and each.amount * way > 0:
                yield each

    def expired(self, found: Iterable[Hold]) -> list[Hold]:
        """Those that have expired, earliest first."""
        of_time = [
            (each.expires_us, each.id.token.generation_time_us, each.id.token.nonce, each)
            for each in found
            if each.expires_us is not None and each.expires_us <= self.now_us
        ]
        return [each for *_, each in sorted(of_time, key=lambda each: each[:3])]

    def refusal(
        self, place: int, counter: str, delta: int, bounds: Sequence[Bounds]
    ) -> Refusal | None:
        while why := Model.refusal(self, place, counter, delta, bounds):
            expired = self.expired(self.open(place, counter, delta))
            if not expired:
                break
            if not self.ends_left:
                raise UnavailableError("too many have expired", retry_after_us=0)
            self.ends_left -= 1
            self.write_end(place, expired[0], Ending.EXPIRED)
        return why

    def append(self, key: Key, events: tuple[Event, ...], open_us: int) -> Written:
        if not is_hold(events):
            return Model.append(self, key, events, open_us)
        decision = self.decided.get(key)
        is_out = decision is not None and decision.outcome is not Outcome.APPLIED
        if events[0].event_time_us < open_us or is_out:
            return Written.LATE
        if (stored := self.stored.get(key)) is not None:
            if _payload(stored.events) != _payload(events):
                return Written.CONFLICT
            return Written.BOUND_REACHED if stored.why else Written.REPLAYED
        hold, amount, lasts_us, own = request_of(events)
        why = self.refusal(key[0], hold.counter, amount, [own])
        # The held counter comes first in the order of counters.
        self.stored[key] = Stored(events, why and why._replace(item=1))
        if why is not None:
            return Written.BOUND_REACHED
        self.holds[key[0], hold] = Hold(hold, amount, self.now_us + lasts_us)
        return Written.NEW

    def write_end(self, place: int, hold: Hold, how: Ending, amount: int = 0) -> Hold:
        name, (nonce, begun_us) = hold.id
        end = End(how, amount, max(self.now_us, self.passed_us[place] + 1, begun_us))
        event = Event(name, end.time_us, b"end of " + nonce, 1, amount)
        self.stored[place, "", end.time_us, event.event_id] = Stored((event,))
        self.holds[place, hold.id] = hold._replace(expires_us=None, end=end)
        return self.holds[place, hold.id]

    def find(self, place: int, hold: HoldId) -> Any:
        """A hold, and why it was refused, if it was."""
        stored = self.stored.get((place, "", hold.token.generation_time_us, hold.token.nonce))
        if stored is None or stored.why is None or not is_hold(stored.events):
            return self.holds.get((place, hold))
        if (first := request_of(stored.events))[0] != hold:
            return None
        return Hold(hold, first[1], None)._replace(refused=stored.why)  # type: ignore[arg-type]

    def end(self, place: int, hold: HoldId, how: Ending, amount: int = 0) -> Hold | None:
        found: Hold | None = self.find(place, hold)
        if found is None or found.expires_us is None:
            return found
        if self.now_us >= found.expires_us:
            return self.write_end(place, found, Ending.EXPIRED)
        return found if how is Ending.EXPIRED else self.write_end(place, found, how, amount)

    def extend(self, place: int, hold: HoldId, lasts_us: int) -> Hold | None:
        found = self.end(place, hold, Ending.EXPIRED)
        if found is None or found.expires_us is None:
            return found
        latest_us = hold.token.generation_time_us + _LONGEST
        expires_us = max(found.expires_us, min(self.now_us + lasts_us, latest_us))
        self.holds[place, hold] = found._replace(expires_us=expires_us)
        return self.holds[place, hold]

    def expire(self) -> None:
        """End all expired holds, as a worker does."""
        all_of_them = {each: place for (place, _), each in self.holds.items()}
        for each in self.expired(all_of_them):
            self.write_end(all_of_them[each], each, Ending.EXPIRED)

    def cancel(self, key: Key, events: tuple[Event, ...]) -> Decision:
        stored, before, mine = self.stored.get(key), self.decided.get(key), fingerprint(events)
        if not is_hold(events) or stored is None or stored.why is not None:
            return Model.cancel(self, key, events)
        if _payload(stored.events) != _payload(events):
            return Model.cancel(self, key, events)
        if before is not None and before.outcome.is_cancelled:
            return before
        ended = self.end(key[0], _hold_of(events), Ending.RELEASED)
        if ended is None or ended.end is None or ended.end.how is not Ending.RELEASED:
            return Decision(Outcome.APPLIED, mine)
        self.decided[key] = Decision(Outcome.cancelled(was_counted=True), mine)
        return self.decided[key]

    def check(self) -> None:
        """Raise an AssertionError if the model itself lets bounds be passed."""
        count = self.count(0, FULL)
        up, down = (self.held(0, FULL, way) for way in (1, -1))
        assert LIMITS.at_least is not None
        assert LIMITS.at_most is not None
        assert LIMITS.at_least <= count + down
        assert count + up <= LIMITS.at_most


def _payload(events: Sequence[Event]) -> bytes:
    return fingerprint(events)


class HoldWorld(World):
    """A store and its model, with holds."""

    model: HoldModel

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = HoldModel()

    async def do(self, kind: str, *rest: Any) -> None:
        if kind in ("expire", "roll"):
            self.clock.advance(*rest)
            rest = (0,)
            await self._begin_transaction()
            self.model.expire()
        if kind == "expire":
            await self.process.worker.maintenance.run_once()
        else:
            await super().do(kind, *rest)
        self.model.check()
        await self._check_sums()
        await self._check_holds()

    async def _begin_transaction(self) -> None:
        model = self.model
        model.now_us = max(self.clock.now_us(), self.store.database.fenced_us)
        model.passed_us = [await self._passed_us(place) for place in (0, 1)]
        model.ends_left = ENDED_MAX

    def call(self, kind: str, *rest: Any) -> Call | None:
        if kind == "hold":
            place, age_us, (counter, amount, own), lasts_us = rest
            hold = HoldId(counter, self._token(age_us))
            self.calls.append(Call(place, tuple(events_of_hold(hold, amount, lasts_us, own))))
            return self.calls[-1]
        if kind not in (*_ENDS, "extend", "other hold", "cancel hold"):
            found = super().call(kind, *rest)
            # Nothing but adds and holds is to change the full counter.
            is_out = found is not None and FULL in {each.counter for each in found.events}
            return None if is_out and kind in ("cancel", "other") else found
        at, *what = rest
        begun = [each for each in self.calls if is_hold(each.events)]
        if not begun:
            return None
        before: Call = begun[-1 - at % len(begun)]
        hold, amount, _, own = request_of(before.events)
        if kind == "cancel hold":
            return replace(before, kind="cancel")
        if kind == "other hold":
            changed, bounds, lasts_us = what
            events = events_of_hold(hold, changed, lasts_us, bounds)
            return None if hold.counter == FULL else replace(before, events=tuple(events))
        value = what[0]
        if kind == "settle":
            value *= -1 if amount < 0 else 1
            if hold.counter == FULL:
                value = max(value, amount) if amount < 0 else min(value, amount)
        return EndCall(before.place, before.events, kind, value)

    async def group(self, kinds: Sequence[Any], fault: tuple[str, bool] | None) -> None:
        await self._begin_transaction()
        await super().group(kinds, fault)

    async def _ask(self, call: Call) -> Any:
        if not isinstance(call, EndCall):
            return await super()._ask(call)
        holds, hold = self.store.capabilities.holds, _hold_of(call.events)
        assert holds is not None
        namespace = self.namespaces[call.place]
        if call.kind == "extend":
            latest_us = hold.token.generation_time_us + _LONGEST
            return await holds.extend(namespace, hold, call.value, latest_us)
        return await holds.end(namespace, hold, _ENDS[call.kind], call.value)

    async def _compare(self, call: Call, result: Any, *, has_failed: bool) -> None:
        """What cannot be decided ends expired holds, too: so the model does it as well."""
        expected = await self._expected(call)
        if isinstance(result, list):
            result = [_shown(each) for each in result]
        assert has_failed or _shown(result) == expected, (call, result, expected)

    async def _expected(self, call: Call) -> Any:
        model, place = self.model, call.place
        if isinstance(call, EndCall):
            hold = _hold_of(call.events)
            if call.kind == "extend":
                return model.extend(place, hold, call.value)
            return model.end(place, hold, _ENDS[call.kind], call.value)
        if call.kind != "append":
            return await super()._expected(call)
        open_us = max(await self._passed_us(place) + 1, self.clock.now_us() - ACCEPT_LIMIT)
        outcomes = [self._outcome(key, part, open_us) for key, part in call.of_tokens]
        return outcomes[0] if call.is_atomic else outcomes

    def _outcome(self, key: Key, events: tuple[Event, ...], open_us: int) -> Any:
        try:
            return self.model.append(key, events, open_us)
        except UnavailableError:
            return UnavailableError

    async def _check_sums(self) -> None:
        """Counts with what is held are the model's; so are the live tail's and the log's."""
        names = [*COUNTERS, FULL]
        held = [held_name(name, way) for name in names for way in (1, -1)]
        for place, namespace in enumerate(self.namespaces):
            expected = [self.model.count(place, each) for each in names]
            expected += [self.model.held(place, name, way) for name in names for way in (1, -1)]
            assert await self.process.counts(namespace, *names, *held) == expected
            passed_us = await self._passed_us(place)
            after = [(name, passed_us) for name in (*names, *held)]
            size_us = namespace.settings.rollup_window_us
            tails = self.store.database.live.tails(namespace.id, size_us, after)
            spans = [(name, passed_us + 1, INT64_MAX) for name, _ in after]
            logged = await self.store.database.scanner.call(
                (self.store.events._folding, (namespace, spans))
            )
            assert tails is None or tails == logged
            listed = await self.process.names(namespace)
            assert {*listed} <= {*names}

    async def _check_holds(self) -> None:
        """Every hold is found as it is in the model, and the list of open ones has those."""
        holds = self.store.capabilities.holds
        assert holds is not None
        for place, namespace in enumerate(self.namespaces):
            for name in (*COUNTERS, FULL):
                expected = [*self.model.open(place, name, 1), *self.model.open(place, name, -1)]
                in_order = sorted(
                    expected, key=lambda x: (x.expires_us, x.id.token[1], x.id.token[0])
                )
                assert await holds.open(namespace, name, FIRST, 1_000) == in_order
        for (place, hold), expected_one in self.model.holds.items():
            assert await holds.find(self.namespaces[place], hold) == expected_one


def _shown(result: Any) -> Any:
    """A result as the model has it."""
    if isinstance(result, Hold) and result.refused is not None:
        return result._replace(refused=refusal_in(result.refused.atom))  # type: ignore[arg-type]
    return UnavailableError if isinstance(result, UnavailableError) else result


async def play(folder: Path, script: Sequence[tuple[Any, ...]]) -> None:
    world = HoldWorld(folder)
    await world.begin()
    try:
        for kind, *rest in script:
            await world.do(kind, *rest)
    finally:
        await world.store.close()


def hold_of_a(amount: int, at_most: int | None = None, lasts_us: int = SECOND) -> tuple[Any, ...]:
    """A hold of the first counter."""
    return "hold", 0, 0, ("a", amount, Bounds(at_most=at_most)), lasts_us


ROLL = ("roll", 30 * SECOND)
LATER = ("advance", SECOND)
BACK = ("advance", -SECOND)


@settings(max_examples=settings().max_examples * 2)
@given(
    st.lists(acts, min_size=4, max_size=16),
    # The memory of the live tail.
    st.sampled_from([_MANY, _MANY, 400, 0]),
)
@example(
    [("group", [hold_of_a(1)] * 4, None), LATER, alone(hold_of_a(4, 4)), alone(("again", 0))], _MANY
)
@example([alone(hold_of_a(2, 2)), LATER, alone(to_a(1, 2)), BACK, alone(("settle", 0, 2))], _MANY)
def test_each_hold_is_decided_and_ended_by_what_was_committed_before(
    script: list[tuple[Any, ...]], tail_bytes_max: int
) -> None:
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        patch.object(live, "_TAIL_BYTES_MAX", tail_bytes_max),
        patch.object(bounds, "ENDED_AT_ONCE_MAX", ENDED_MAX),
    ):
        asyncio.run(play(Path(folder), script))
