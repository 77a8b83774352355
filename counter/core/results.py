"""Define the credentials and results of adds, and tally their outcomes.

What one add can come to, and its name in each place that has one. *Guarded* is what the cache has
recorded about a token, *Written* what the store did with the event, *Outcome* the decision about a
late token. The tally is that of the metrics; ``replayed``, or a problem's code, is in the response,
and a CloudEvent's outcome is the tally's of its adds, or ``ignored`` if no rule matches its type.

===========================  ==========  ==========  =======  ============  ===================
what happened                Guarded     Written     Outcome  tally         response
===========================  ==========  ==========  =======  ============  ===================
counted now                  NEW         NEW                  original      false
counted before               SAME        REPLAYED             replayed      true
counted, now or before       UNVERIFIED  UNVERIFIED           unverified    null
token of another payload     OTHER       CONFLICT             conflict      token_conflict
late; counted before                     LATE        APPLIED  late_applied  true
late; never counted                      LATE        VOID     voided        token_too_old
cancelled                                LATE        CANCEL*  cancelled     token_cancelled
best-effort counter changed                                   best_effort   null
nothing was written                                           refused       the refusal's code
not known; ask again                                          unknown       the failure's code
===========================  ==========  ==========  =======  ============  ===================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from counter.errors import (
    ClockSkewError,
    CounterError,
    OverloadedError,
    RateLimitedError,
    TokenCancelledError,
    TokenConflictError,
    TokenPendingError,
    TokenTooOldError,
    UnavailableError,
    is_fault,
)
from counter.metrics import NamespaceTally
from counter.types import Token, Written

#: A token, an arbitrary key that identifies one, or nothing.
Credential = Token | str | None

#: The outcomes of adds and clears, as named in the metrics. *refused* adds wrote nothing; the
#: outcome of *unknown* ones is not known.
TALLIES: Final = (
    *("original", "replayed", "unverified", "conflict", "late_applied", "voided", "cancelled"),
    *("best_effort", "refused", "unknown"),
)
TALLIED: Final[Mapping[Written, str]] = {
    Written.NEW: "original",
    Written.REPLAYED: "replayed",
    Written.UNVERIFIED: "unverified",
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


class Cancelled(NamedTuple):
    """A token that is cancelled, and whether it was counted before."""

    event_time_us: int
    was_counted: bool


class AddTally(dict[str, int]):
    """Adds and clears by outcome, since the process began: by the names of :data:`TALLIES`. An
    atomic add counts once for each item. :attr:`namespaces` has those that changed a count, by
    namespace; of ``unverified`` ones, perhaps before."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(TALLIES, 0))
        self.namespaces = NamespaceTally()

    def count(self, namespace: str, outcome: str, adds: int = 1) -> None:
        """Tally *adds* that changed a count."""
        self[outcome] += adds
        self.namespaces.count(namespace, adds)

    def record(self, namespace: str, outcomes: Sequence[Written | CounterError]) -> None:
        """Tally *outcomes* of the store, but not CONFLICT and LATE: these are preliminary, and end
        in an error or in a resolution."""
        counted = 0
        for outcome, name in TALLIED.items():
            if counted == len(outcomes):
                return
            number = outcomes.count(outcome)
            if outcome is Written.REPLAYED:
                self[name] += number
            else:
                self.count(namespace, name, number)
            counted += number
        for each in outcomes:
            if isinstance(each, CounterError):
                self.record_failure(each)

    def record_failure(self, error: CounterError, adds: int = 1) -> None:
        """Tally *adds* that ended in *error*."""
        if isinstance(error, TokenConflictError):
            self["conflict"] += adds
        elif isinstance(error, TokenCancelledError):
            self["cancelled"] += adds
        elif isinstance(error, TokenTooOldError) and error.applied is False:
            self["voided"] += adds
        elif isinstance(error, OverloadedError | RateLimitedError | ClockSkewError):
            self["refused"] += adds
        elif isinstance(error, UnavailableError | TokenPendingError) or is_fault(error.status):
            self["unknown"] += adds
        else:
            self["refused"] += adds

    @contextmanager
    def recording_failures(self, adds: int = 1) -> Iterator[None]:
        """Tally an error that the block raises, as the outcome of *adds*."""
        try:
            yield
        except CounterError as error:
            self.record_failure(error, adds)
            raise
