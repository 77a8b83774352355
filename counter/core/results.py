"""Define the credentials and results of adds, and tally results for the metrics."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
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

#: A token, an arbitrary key that identifies one, or nothing.
Credential = Token | str | None

#: The outcomes of adds and clears, as named in the metrics. *refused* adds wrote nothing; the
#: outcome of *unknown* ones is not known.
TALLIES: Final = (
    *("original", "replayed", "unverified", "conflict", "late_applied", "voided"),
    *("best_effort", "refused", "unknown"),
)
TALLIED: Final[Mapping[Written, str]] = {
    Written.NEW: "original",
    Written.REPLAYED: "replayed",
    Written.UNVERIFIED: "unverified",
    Written.CONFLICT: "conflict",
}
#: The ``replayed`` field of the answer to an acknowledged event.
REPLAYED: Final[Mapping[Written, bool | None]] = {
    Written.NEW: False,
    Written.REPLAYED: True,
    Written.UNVERIFIED: None,
}


class Add(NamedTuple):
    """One add of a batch."""

    counter: str
    delta: int
    credential: Credential


class Keyed(NamedTuple):
    """The items of an atomic add under a key that is arbitrary text, within a *scope* of keys."""

    scope: str
    key: str
    items: Sequence[tuple[str, int]]


class Added(NamedTuple):
    """An acknowledged add. ``replayed`` is None if the store cannot distinguish it from a new
    one."""

    counter: str
    delta: int
    event_time_us: int
    replayed: bool | None


class Tallying(Protocol):
    """An object that tallies outcomes of adds, by :data:`TALLIES`."""

    tally: dict[str, int]


_P = ParamSpec("_P")
_Self = TypeVar("_Self", bound=Tallying)
_Answer = TypeVar("_Answer")
_Method = Callable[Concatenate[_Self, _P], Coroutine[Any, Any, _Answer]]


def count_failure(tally: dict[str, int], error: CounterError, adds: int = 1) -> None:
    """Tally *adds* that ended in *error*.

    Conflicts and resolved late tokens are ignored here, because they are tallied where they are
    detected.
    """
    if isinstance(error, TokenConflictError):
        return
    if isinstance(error, TokenTooOldError) and error.applied is False:
        return
    is_open = isinstance(error, UnavailableError | TokenPendingError) or error.status >= 500
    nothing_done = isinstance(error, OverloadedError | RateLimitedError | ClockSkewError)
    tally["unknown" if is_open and not nothing_done else "refused"] += adds


def counts_failures(method: _Method[_Self, _P, _Answer]) -> _Method[_Self, _P, _Answer]:
    """Decorate *method*, which does one add, to tally the errors that it raises."""

    async def counted(self: _Self, /, *args: _P.args, **named: _P.kwargs) -> _Answer:
        try:
            return await method(self, *args, **named)
        except CounterError as error:
            count_failure(self.tally, error)
            raise

    update_wrapper(counted, method)
    return counted
