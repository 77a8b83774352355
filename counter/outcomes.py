"""What a client asks for, what it is told, and how that is tallied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from counter.types import Token, Written

#: A token, an arbitrary key that stands for one, or nothing.
Credential = Token | str | None

#: What becomes of adds and clears, as the metrics name it.
TALLIES: Final = ("original", "replayed", "untold", "conflict", "late_applied", "voided")
TALLIED: Final[Mapping[Written, str]] = {
    Written.NEW: "original",
    Written.REPLAYED: "replayed",
    Written.UNTOLD: "untold",
    Written.CONFLICT: "conflict",
}
#: What an answer says of an event that stands.
REPLAYED: Final[Mapping[Written, bool | None]] = {
    Written.NEW: False,
    Written.REPLAYED: True,
    Written.UNTOLD: None,
}


class Add(NamedTuple):
    """One add of a batch."""

    counter: str
    delta: int
    credential: Credential


class Added(NamedTuple):
    """An acknowledged add. ``replayed`` is None where the store cannot tell."""

    counter: str
    delta: int
    event_time_us: int
    replayed: bool | None
