"""What the service must answer, in as little code as can say it: sets of tokens, no windows.

It knows nothing of how counts are kept. A counter is the set of its applied tokens; its count at an
instant is the sum of the deltas up to it that no clear erased.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, combinations

from counter.bounds import NO_BOUNDS, Bounds
from counter.types import Token
from tests.support.rest import Json, on_wire

#: The counter that refused an add, its count, the bound that was reached, and the room.
Refused = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Send:
    """One thing a client asked for under a token, by the route it went through.

    ``items`` holds (counter, delta) of an atomic add; a single add or clear has one item.
    """

    token: Token
    items: tuple[tuple[str, int], ...]
    clear: bool = False
    atomic: bool = False
    #: Of every item.
    bounds: Bounds = NO_BOUNDS
    #: A clear that takes the name off the list, too.
    delete: bool = field(default=False, compare=False)

    @property
    def counter(self) -> str:
        return self.items[0][0]

    @property
    def delta(self) -> int:
        return self.items[0][1]

    @property
    def body(self) -> Json:
        """The body of a request for an add, or of its cancel."""
        bounds = {name: each for name, each in self.bounds._asdict().items() if each is not None}
        token = {"idempotency_token": on_wire(self.token)}
        if not self.atomic:
            return {"delta": self.delta, **bounds, **token}
        items = [{"counter": name, "delta": delta, **bounds} for name, delta in self.items]
        return {"items": items, **token}

    @property
    def as_item(self) -> Json:
        """The body of a single add as an item of a batch."""
        return {"counter": self.counter, **self.body}

    @property
    def scope(self) -> tuple[object, ...]:
        """Two sends of one scope are sends of one token: only one payload of them can count."""
        names = tuple(sorted(name for name, _ in self.items)) if self.atomic else self.counter
        return (self.atomic, names, self.token)

    def differs(self, other: "Send") -> bool:
        """Whether the two, of one scope, ask for different things."""
        if self.clear or other.clear:
            return self.clear != other.clear
        return (self.bounds, self._by_counter()) != (other.bounds, other._by_counter())

    def _by_counter(self) -> dict[str, list[int]]:
        """The deltas of each counter in their order; the order of counters means nothing."""
        found: dict[str, list[int]] = {}
        for name, delta in self.items:
            found.setdefault(name, []).append(delta)
        return found


def _count(touches: Iterable[tuple[Send, int]]) -> int:
    """The sum of the deltas that no clear erased."""
    known = [(send.token.generation_time_us, delta, send.clear) for send, delta in touches]
    cleared_us = max((time_us for time_us, _, clear in known if clear), default=-1)
    return sum(delta for time_us, delta, clear in known if not clear and time_us > cleared_us)


class Contradiction(AssertionError):
    """Two definite answers about one token say different things."""


@dataclass(slots=True)
class Model:
    """Every token with a definite answer."""

    applied: dict[tuple[object, ...], Send] = field(default_factory=dict)
    #: When a token was first resolved as applied.
    resolved_at: dict[tuple[object, ...], int] = field(default_factory=dict)
    void: set[tuple[object, ...]] = field(default_factory=set)
    #: Those that were refused because of a bound, and what was answered.
    refused: dict[tuple[object, ...], tuple[Send, Refused]] = field(default_factory=dict)
    #: Those that were cancelled, and whether they were counted, and when that was said first.
    cancelled: dict[tuple[object, ...], tuple[Send, bool, int]] = field(default_factory=dict)

    def apply(self, send: Send, *, resolved_at_us: int | None = None) -> None:
        """The service said that *send* counts; by a resolution at *resolved_at_us*."""
        if send.scope in self.void or send.scope in self.cancelled or send.scope in self.refused:
            raise Contradiction(f"{send} was said never to count, and now it does")
        if resolved_at_us is not None and send.scope not in self.applied:
            self.resolved_at[send.scope] = resolved_at_us
        first = self.applied.setdefault(send.scope, send)
        if first.differs(send):
            raise Contradiction(f"{send} was acknowledged although its token is that of {first}")

    def refuse(self, send: Send, why: Refused) -> None:
        """The service said that *send* would have passed a bound."""
        if send.scope in self.applied or send.scope in self.void or send.scope in self.cancelled:
            raise Contradiction(f"{send} was decided otherwise, and now it is refused by {why}")
        first = self.refused.setdefault(send.scope, (send, why))
        if first[0].differs(send) or first[1] != why:
            raise Contradiction(f"{send} is refused by {why}, and {first[0]} was by {first[1]}")

    def refuses(self, send: Send, default: Bounds) -> bool:
        """Whether *send* is refused if it is the next, and the bounds of its namespace are
        *default*."""
        least, most = send.bounds.tightest(default)
        for counter in {name for name, _ in send.items}:
            delta = sum(each for name, each in send.items if name == counter)
            clears = [x.token.generation_time_us for x, _ in self.sends(counter) if x.clear]
            if send.clear or send.token.generation_time_us <= max(clears, default=-1):
                continue
            count = self.count(counter) + delta
            if (delta > 0 and most is not None and count > most) or (
                delta < 0 and least is not None and count < least
            ):
                return True
        return False

    def never(self, send: Send) -> None:
        """The service said that the token of *send* will never count."""
        if send.scope in self.applied or send.scope in self.refused:
            raise Contradiction(f"{send} was decided, and now it is said to be void")
        if send.scope in self.cancelled:
            raise Contradiction(f"{send} was cancelled, and now it is said to be void")
        self.void.add(send.scope)

    def cancel(self, send: Send, was_counted: bool, now_us: int) -> None:
        """The service said that *send* is cancelled, and whether it was counted before."""
        first = self.applied.pop(send.scope, None)
        if first is not None and not was_counted:
            raise Contradiction(f"{send} was acknowledged, and cancelled as if it was not")
        if self.refused.pop(send.scope, None) is not None and was_counted:
            raise Contradiction(f"{send} was refused, and cancelled as if it was counted")
        if was_counted and send.scope in self.void:
            raise Contradiction(f"{send} was void, and cancelled as if it was counted")
        before, was, _ = self.cancelled.setdefault(send.scope, (send, was_counted, now_us))
        if was is not was_counted or before.differs(send):
            raise Contradiction(f"{send}: was_counted is {was_counted}, and was {was} of {before}")

    def sends(self, counter: str) -> Iterable[tuple[Send, int]]:
        """The applied sends that touch *counter*, with the delta of each touch."""
        for send in self.applied.values():
            for name, delta in send.items:
                if name == counter:
                    yield send, delta

    def count(self, counter: str, as_of_us: int | None = None) -> int:
        """The count of *counter* by all its events, or by those up to *as_of_us*."""
        return _count(
            (send, delta)
            for send, delta in self.sends(counter)
            if as_of_us is None or send.token.generation_time_us <= as_of_us
        )

    def counts(self, counter: str, as_of_us: int) -> set[int]:
        """Every count that may be returned as of an instant: later resolutions are optional."""
        surely: list[tuple[Send, int]] = []
        perhaps = [
            (send, delta)
            for send, was_counted, cancelled_us in self.cancelled.values()
            if was_counted and send.token.generation_time_us <= as_of_us <= cancelled_us
            for name, delta in send.items
            if name == counter
        ]
        for send, delta in self.sends(counter):
            if send.token.generation_time_us <= as_of_us:
                is_later = self.resolved_at.get(send.scope, as_of_us) > as_of_us
                (perhaps if is_later else surely).append((send, delta))
        chosen = chain.from_iterable(combinations(perhaps, n) for n in range(len(perhaps) + 1))
        return {_count([*surely, *some]) for some in chosen}

    def events(self, counter: str, from_us: int = 0) -> list[tuple[int, int, bool]]:
        """(time, delta, clear) of every event since *from_us*; a clear's delta is 0."""
        return sorted(
            (send.token.generation_time_us, 0 if send.clear else delta, send.clear)
            for send, delta in self.sends(counter)
            if send.token.generation_time_us >= from_us
        )

    def refusals(self, counter: str, from_us: int = 0) -> list[tuple[int, int]]:
        """(time, delta) of every event since *from_us* that counts 0, because it was refused."""
        return sorted(
            (send.token.generation_time_us, delta)
            for send, _ in self.refused.values()
            for name, delta in send.items
            if name == counter and send.token.generation_time_us >= from_us
        )

    def counters(self) -> set[str]:
        """Every counter that holds an event."""
        return {name for send in self.applied.values() for name, _ in send.items}
