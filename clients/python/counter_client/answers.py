"""The service's answers as dataclasses. Instants are datetimes in UTC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from counter_client.tokens import Token, parse_rfc3339


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
class Count:
    """A count, and the instant it is exact as of."""

    counter: str
    count: int
    as_of: datetime
    #: ``accurate``, ``eventual`` or ``best_effort``.
    accuracy: str


@dataclass(frozen=True, slots=True)
class Event:
    """One add or clear of the event log."""

    event_time: datetime
    event_id: str
    event_item_key: int
    #: 0 for a clear.
    delta: int
    clear: bool


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


def added_of(body: Mapping[str, Any]) -> Added:
    """Parse an answer. All parsers here raise KeyError, TypeError or ValueError on a bad *body*."""
    return Added(
        body["counter"],
        body["delta"],
        datetime.fromisoformat(body["event_time"]),
        body["replayed"],
        body.get("retry_safe", True),
    )


def added_count_of(body: Mapping[str, Any]) -> AddedCount:
    return AddedCount(
        body["counter"],
        body["delta"],
        datetime.fromisoformat(body["event_time"]),
        body["replayed"],
        body.get("retry_safe", True),
        body["count"],
        datetime.fromisoformat(body["as_of"]),
    )


def cleared_of(body: Mapping[str, Any]) -> Cleared:
    return Cleared(body["counter"], datetime.fromisoformat(body["event_time"]), body["replayed"])


def count_of(body: Mapping[str, Any]) -> Count:
    return Count(
        body["counter"], body["count"], datetime.fromisoformat(body["as_of"]), body["accuracy"]
    )


def event_of(body: Mapping[str, Any]) -> Event:
    return Event(
        datetime.fromisoformat(body["event_time"]),
        body["event_id"],
        body["event_item_key"],
        body.get("delta", 0),
        body.get("clear", False),
    )


def point_of(body: Mapping[str, Any]) -> Point:
    return Point(datetime.fromisoformat(body["time"]), body["count"], body["delta"])


def busiest_of(body: Mapping[str, Any]) -> Busiest:
    return Busiest(
        datetime.fromisoformat(body["since"]),
        datetime.fromisoformat(body["as_of"]),
        body["complete"],
        [Busy(each["counter"], each["adds_per_s"], each["count"]) for each in body["counters"]],
    )


def token_of(body: Mapping[str, Any]) -> Token:
    return Token(
        bytes.fromhex(body["token"].replace("-", "")), parse_rfc3339(body["generation_time"])
    )
