"""The service's answers as dataclasses. Instants are datetimes in UTC.

The parsers raise ValueError, TypeError or KeyError for a body that is not the answer to the
request: a proxy, or another service, may answer with any JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

from counter_client.errors import InvalidParameterError
from counter_client.tokens import EPOCH, MICROSECOND, HoldId, Token, checked_rfc3339

T = TypeVar("T")
D = TypeVar("D")
_ACCURACIES: Final = frozenset({"accurate", "eventual", "best_effort"})
_STATES: Final = frozenset({"open", "settled", "released", "expired"})


@dataclass(frozen=True, slots=True)
class Added:
    """An add that is counted once."""

    counter: str
    delta: int
    event_time: datetime
    #: Whether it was counted before; None if the store cannot know.
    replayed: bool | None
    #: False in a BEST_EFFORT namespace, where a retry may count twice.
    retry_safe: bool = True


@dataclass(frozen=True, slots=True)
class AddedCount(Added):
    """An add, and the count including it, exact as of ``as_of``."""

    count: int = 0
    as_of: datetime = datetime.min


@dataclass(frozen=True, slots=True)
class Cleared:
    """A counter that is 0 as of ``event_time``."""

    counter: str
    event_time: datetime
    replayed: bool | None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An add, a clear or a delete that counts nothing and never will; the same for every retry."""

    #: Whether it was counted before.
    was_counted: bool
    event_time: datetime


@dataclass(frozen=True, slots=True)
class Count:
    """A count, and the instant it is exact as of."""

    counter: str
    count: int
    as_of: datetime
    #: ``accurate``, ``eventual`` or ``best_effort``.
    accuracy: str
    #: What open holds of positive amounts reserve, and what those of negative ones do: of an
    #: accurate count; others have 0.
    held: int = 0
    held_down: int = 0


@dataclass(frozen=True, slots=True)
class HoldState:
    """A hold: open, or with its end."""

    id: str
    counter: str
    amount: int
    #: ``open``, ``settled``, ``released`` or ``expired``.
    state: str
    #: Of an open one.
    expires_at: datetime | None = None
    #: Of one that has ended.
    ended_at: datetime | None = None
    #: Of one that was settled: what counts, and whether that is more than was held.
    settled: int | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class HoldCount(HoldState):
    """A hold, and its counter right after the call, exact as of ``as_of``."""

    count: int = 0
    #: What open holds that go the same way reserve together.
    held: int = 0
    as_of: datetime = datetime.min


@dataclass(frozen=True, slots=True)
class Change:
    """How much a count changed from ``start`` to ``end``, and what it was just before ``end``."""

    counter: str
    start: datetime
    end: datetime
    count: int
    delta: int


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of *counters* counters."""

    count: int
    counters: int
    #: Every add up to then is in it.
    as_of: datetime
    #: ``accurate`` if each of them is.
    accuracy: str


@dataclass(frozen=True, slots=True)
class HoldEvent:
    """What an event does to a hold of *amount*, which may be refused."""

    amount: int
    #: ``begun``, or how the event ends the hold: ``settled``, ``released`` or ``expired``.
    state: str
    id: str


@dataclass(frozen=True, slots=True)
class Event:
    """One add or clear of the event log."""

    event_time: datetime
    event_id: str
    event_item_key: int
    #: 0 for a clear, and for an add that was refused.
    delta: int
    clear: bool
    #: The bounds of the add; None if it has no such bound.
    at_least: int | None = None
    at_most: int | None = None
    #: Of an add that was refused because of a bound: its ``delta``, the ``count`` that decided, and
    #: the bound, ``at_least`` or ``at_most``.
    refused: Mapping[str, int] | None = None
    #: Of an event that begins a hold, or ends one; then ``delta`` is what was settled.
    hold: HoldEvent | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """The count at the end of a step of a history, and its change since the step began."""

    time: datetime
    count: int
    delta: int


@dataclass(frozen=True, slots=True)
class Busy:
    """A counter, its adds and clears a second, and its count."""

    counter: str
    adds_per_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Busiest:
    """The busiest counters of ``[since, as_of)``, busiest first."""

    since: datetime
    as_of: datetime
    #: Whether all counters that changed in that time were considered.
    complete: bool
    counters: list[Busy]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The outcome of an add: it is counted, or never will be."""

    applied: bool
    #: Why it was not applied; an add with a new token is safe then.
    detail: str = ""


class Asked(NamedTuple):
    """What the answer to an add or a clear must repeat."""

    namespace: str
    counter: str
    delta: int
    #: The token's time; None for a key, whose time the service chooses.
    time_us: int | None
    #: The hold; None if a key's time is a part of its id.
    hold: str | None = None


def added_of(body: Mapping[str, Any], asked: Asked) -> Added:
    """Parse the answer to an add."""
    event_time, replayed, retry_safe = _outcome(body, asked)
    if member(body, "delta", int) != asked.delta:
        raise ValueError("the answer is about another delta")
    return Added(asked.counter, asked.delta, event_time, replayed, retry_safe)


def added_count_of(body: Mapping[str, Any], asked: Asked) -> AddedCount:
    """Parse the answer to an add that returns the count."""
    found = added_of(body, asked)
    return AddedCount(
        *(found.counter, found.delta, found.event_time, found.replayed, found.retry_safe),
        count=member(body, "count", int),
        as_of=time_of(body, "as_of"),
    )


def cleared_of(body: Mapping[str, Any], asked: Asked) -> Cleared:
    """Parse the answer to a clear or a delete."""
    event_time, replayed, _ = _outcome(body, asked)
    return Cleared(asked.counter, event_time, replayed)


def cancelled_of(body: Mapping[str, Any], asked: Asked) -> Cancelled:
    """Parse the answer to a cancel."""
    if body["cancelled"] is not True:
        raise ValueError("the answer is about something else")
    return Cancelled(member(body, "was_counted", bool), _event_time(body, asked))


def hold_count_of(body: Mapping[str, Any], asked: Asked, state: str) -> HoldCount:
    """Parse the answer to what left a hold in *state*; a settled one with the amount asked for."""
    found = hold_of(body, asked.namespace, asked.hold)
    if found.state != state or found.counter != asked.counter:
        raise ValueError("the answer is about another hold")
    if asked.delta != {"open": found.amount, "settled": found.settled}.get(state, asked.delta):
        raise ValueError("the answer is about another amount")
    return HoldCount(
        *(found.id, found.counter, found.amount, found.state, found.expires_at, found.ended_at),
        *(found.settled, found.over),
        count=member(body, "count", int),
        held=member(body, "held", int),
        as_of=time_of(body, "as_of"),
    )


def hold_of(body: Mapping[str, Any], namespace: str, hold: str | None = None) -> HoldState:
    """Parse a hold, the one with the id *hold* if that was asked for."""
    found, state = member(body, "hold", str), member(body, "state", str)
    counter = member(body, "counter", str)
    try:
        is_its_own = HoldId.parse(found).counter == counter
    except InvalidParameterError as error:
        raise ValueError(found) from error
    if body["namespace"] != namespace or not is_its_own or hold not in (None, found):
        raise ValueError("the answer is about another hold")
    if state not in _STATES:
        raise ValueError(state)
    is_open, is_settled = state == "open", state == "settled"
    return HoldState(
        *(found, counter, member(body, "amount", int), state),
        expires_at=time_of(body, "expires_at") if is_open else None,
        ended_at=None if is_open else time_of(body, "ended_at"),
        settled=member(body, "settled", int) if is_settled else None,
        over=_optional(body, "over", bool, False),
    )


def _outcome(body: Mapping[str, Any], asked: Asked) -> tuple[datetime, bool | None, bool]:
    """Return the event time, ``replayed`` and ``retry_safe`` of an answer."""
    if body["namespace"] != asked.namespace or body["counter"] != asked.counter:
        raise ValueError("the answer is about another counter")
    replayed = body["replayed"]
    if replayed is not None and type(replayed) is not bool:
        raise TypeError("replayed")
    retry_safe = _optional(body, "retry_safe", bool, True)
    # BEST_EFFORT ignores tokens.
    event_time = _event_time(body, asked) if retry_safe else time_of(body, "event_time")
    return event_time, replayed, retry_safe


def _event_time(body: Mapping[str, Any], asked: Asked) -> datetime:
    """Return the event time, which is that of the token that was sent."""
    event_time = time_of(body, "event_time")
    if asked.time_us not in (None, (event_time - EPOCH) // MICROSECOND):
        raise ValueError("the answer is about another token")
    return event_time


def member(body: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a member that is exactly a *kind*: a boolean is no integer."""
    value = body[name]
    if type(value) is not kind:
        raise TypeError(name)
    return value


def _optional(body: Mapping[str, Any], name: str, kind: type[T], default: D) -> T | D:
    return member(body, name, kind) if name in body else default


def time_of(body: Mapping[str, Any], name: str) -> datetime:
    """Return a member that is a time of RFC 3339 with an offset."""
    return datetime.fromisoformat(checked_rfc3339(member(body, name, str))).astimezone(UTC)


def count_of(body: Mapping[str, Any], namespace: str, counter: str | None = None) -> Count:
    """Parse a count, of *counter* if that was asked for."""
    found = member(body, "counter", str)
    if body["namespace"] != namespace or counter not in (None, found):
        raise ValueError("the answer is about another counter")
    return Count(
        found,
        member(body, "count", int),
        time_of(body, "as_of"),
        _accuracy(body),
        _optional(body, "held", int, 0),
        _optional(body, "held_down", int, 0),
    )


def _accuracy(body: Mapping[str, Any]) -> str:
    accuracy: str = member(body, "accuracy", str)
    if accuracy not in _ACCURACIES:
        raise ValueError(accuracy)
    return accuracy


def change_of(body: Mapping[str, Any], namespace: str, counter: str) -> Change:
    """Parse the change of *counter* in a span of time."""
    found = count_of(body, namespace, counter)
    start, delta = time_of(body, "from"), member(body, "delta", int)
    return Change(counter, start, found.as_of, found.count, delta)


def sum_of(body: Mapping[str, Any]) -> Sum:
    """Parse the sum that comes with a list of counters."""
    found = member(body, "sum", dict)
    return Sum(
        member(found, "count", int),
        member(found, "counters", int),
        time_of(found, "as_of"),
        _accuracy(found),
    )


def event_of(body: Mapping[str, Any]) -> Event:
    """Parse an event."""
    return Event(
        time_of(body, "event_time"),
        member(body, "event_id", str),
        member(body, "event_item_key", int),
        _optional(body, "delta", int, 0),
        _optional(body, "clear", bool, False),
        _optional(body, "at_least", int, None),
        _optional(body, "at_most", int, None),
        _refused_of(body["refused"]) if "refused" in body else None,
        _hold_event_of(body["hold"]) if "hold" in body else None,
    )


def _hold_event_of(body: Mapping[str, Any]) -> HoldEvent:
    state = member(body, "state", str)
    return HoldEvent(member(body, "amount", int), state, member(body, "hold", str))


def _refused_of(body: Mapping[str, Any]) -> Mapping[str, int]:
    bound = "at_most" if "at_most" in body else "at_least"
    return {name: member(body, name, int) for name in ("delta", "count", bound)}


def point_of(body: Mapping[str, Any]) -> Point:
    """Parse a point of a history."""
    return Point(time_of(body, "time"), member(body, "count", int), member(body, "delta", int))


def busiest_of(body: Mapping[str, Any]) -> Busiest:
    """Parse the busiest counters."""
    return Busiest(
        time_of(body, "since"),
        time_of(body, "as_of"),
        member(body, "complete", bool),
        [
            Busy(member(x, "counter", str), _number_of(x, "adds_per_s"), member(x, "count", int))
            for x in member(body, "counters", list)
        ],
    )


def _number_of(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if type(value) not in (int, float):
        raise TypeError(name)
    return float(value)


def token_of(body: Mapping[str, Any]) -> Token:
    """Parse a token."""
    text = f"{member(body, 'token', str)}@{member(body, 'generation_time', str)}"
    try:
        found = Token.parse(text)
    except InvalidParameterError as error:
        raise ValueError(text) from error
    if not isinstance(found, Token):
        raise TypeError("token")
    return found


def page_of(body: Mapping[str, Any]) -> str | None:
    """Return the key of the next page, if there is one."""
    page = body["next_page"]
    if page is not None and type(page) is not str:
        raise TypeError("next_page")
    return page
