"""What a client asks for, what it is told, and how that is tallied."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import update_wrapper
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from counter.errors import (
    ClockSkewError,
    CounterError,
    OverloadedError,
    RateLimitedError,
    TokenConflictError,
    TokenPendingError,
    TokenTooOldError,
    UnavailableError,
)
from counter.types import Token, Written

#: A token, an arbitrary key that stands for one, or nothing.
Credential = Token | str | None

#: What becomes of adds and clears, as the metrics name it. Of those that were *refused* nothing was
#: written; of those that ended as *unknown* nobody knows.
TALLIES: Final = (
    *("original", "replayed", "untold", "conflict", "late_applied", "voided"),
    *("best_effort", "refused", "unknown"),
)
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


class Tallying(Protocol):
    """Whoever tallies outcomes of adds, by :data:`TALLIES`."""

    tally: dict[str, int]


_P = ParamSpec("_P")
_Self = TypeVar("_Self", bound=Tallying)
_Answer = TypeVar("_Answer")
_Method = Callable[Concatenate[_Self, _P], Coroutine[Any, Any, _Answer]]


def count_failure(tally: dict[str, int], error: CounterError, adds: int = 1) -> None:
    """Count in *tally* that *adds* ended in *error*, unless what became of them is counted where
    it is found out: conflicts, and late tokens that were resolved."""
    if isinstance(error, TokenConflictError):
        return
    if isinstance(error, TokenTooOldError) and error.applied is False:
        return
    is_open = isinstance(error, UnavailableError | TokenPendingError) or error.status >= 500
    nothing_done = isinstance(error, OverloadedError | RateLimitedError | ClockSkewError)
    tally["unknown" if is_open and not nothing_done else "refused"] += adds


def counts_failures(method: _Method[_Self, _P, _Answer]) -> _Method[_Self, _P, _Answer]:
    """Have what *method* raises of one add tallied by the object whose method it is."""

    async def counted(self: _Self, /, *args: _P.args, **named: _P.kwargs) -> _Answer:
        try:
            return await method(self, *args, **named)
        except CounterError as error:
            count_failure(self.tally, error)
            raise

    update_wrapper(counted, method)
    return counted
