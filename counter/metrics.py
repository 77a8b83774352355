"""Define the tallies of the hot paths: plain integers that collectors read on demand.

There are no locks. One thread updates each tally; a concurrent reader may see an observation in the
buckets that is not in the sum yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from counter.errors import (
    BoundReachedError,
    ClockSkewError,
    CounterError,
    OverloadedError,
    RateLimitedError,
    TokenCancelledError,
    TokenConflictError,
    TokenPendingError,
    TokenTooOldError,
    UnavailableError,
    invariant,
    is_fault,
)
from counter.types import Written

#: Upper bounds of buckets, in seconds: of requests, of calls to a store or a cache, of commits.
SECONDS_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
#: Upper bounds of buckets of batch sizes.
NUMBER_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
#: The most namespaces of one process that have their own series of adds.
NAMESPACES_SHOWN_MAX: Final = 100
#: The most namespaces that wait for a series of their own.
NAMESPACES_WAITING_MAX: Final = 1_000
#: The label ``namespace`` of all others. No namespace has this name: names begin with a letter.
OTHER_NAMESPACES: Final = "_other"
#: The outcomes of adds and clears, as named in the metrics. *refused* adds wrote nothing; the
#: outcome of *unknown* ones is not known.
TALLIES: Final = (
    *("original", "replayed", "unverified", "conflict", "late_applied", "voided", "cancelled"),
    *("bound_reached", "best_effort", "refused", "unknown"),
)
TALLIED: Final[Mapping[Written, str]] = {
    Written.NEW: "original",
    Written.REPLAYED: "replayed",
    Written.UNVERIFIED: "unverified",
}


class Histogram:
    """The number of observations in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS_BOUNDS) -> None:
        invariant(list(bounds) == sorted(set(bounds)), f"bounds that do not rise: {bounds}")
        self.bounds = bounds
        #: One count per bound, which is inclusive, and one for values above all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count *value*."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Calls:
    """Calls of one kind: their durations, and how many failed."""

    __slots__ = ("errors", "seconds")

    def __init__(self) -> None:
        self.errors = 0
        self.seconds = Histogram()

    def ended(self, took_s: float, errors: int = 0) -> None:
        """Count a call with its duration, and *errors* among the operations in it."""
        self.seconds.observe(took_s)
        self.errors += errors


class NamespaceTally:
    """Adds by namespace: of up to :data:`NAMESPACES_SHOWN_MAX` namespaces, and of all others
    together.

    A namespace that is shown stays shown, even after it was deleted, and free places go to the
    busiest namespaces since the last call of :meth:`totals`. So each add is in one total, and no
    total ever decreases, nor does a sum over several processes.
    """

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}
        #: Adds since the last call of :meth:`totals`, of namespaces that are not shown.
        self._waiting: dict[str, int] = {}
        self._others = 0

    def count(self, namespace: str, adds: int) -> None:
        """Count *adds*."""
        if namespace in self._shown:
            self._shown[namespace] += adds
        elif len(self._shown) >= NAMESPACES_SHOWN_MAX:
            self._others += adds
        else:
            self._waiting[namespace] = self._waiting.get(namespace, 0) + adds
            if len(self._waiting) >= NAMESPACES_WAITING_MAX:
                self._fill()

    def show(self, namespaces: Iterable[str]) -> None:
        """Show *namespaces*, before the first add: those that the predecessor of this process
        showed, or each restart of a process would add series to the sum of several processes."""
        self._shown = dict.fromkeys(set(namespaces) - {OTHER_NAMESPACES}, 0)

    def totals(self) -> Mapping[str, int]:
        """Return the adds of each namespace that is shown, and of :data:`OTHER_NAMESPACES`."""
        self._fill()
        return self._shown | {OTHER_NAMESPACES: self._others}

    def _fill(self) -> None:
        """Give the free places to the busiest namespaces that wait."""
        free = NAMESPACES_SHOWN_MAX - len(self._shown)
        busiest = sorted(self._waiting.items(), key=lambda each: each[1], reverse=True)
        self._shown |= busiest[:free]
        self._others += sum(adds for _, adds in busiest[free:])
        self._waiting.clear()


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
        elif isinstance(error, BoundReachedError):
            self["bound_reached"] += adds
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


class StoreTally:
    """The tallies of a store. One call is one request to the store: a batch, a statement."""

    def __init__(self, operations: Iterable[str]) -> None:
        self.calls: Mapping[str, Calls] = {each: Calls() for each in operations}
        #: Group commit: the rows of each commit, and its duration.
        self.commit_rows = Histogram(NUMBER_BOUNDS)
        self.commit_seconds = Histogram()
        #: Marks that were written: of windows with new events, of recounts, of atomic adds.
        self.marks = dict.fromkeys(("dirty", "recount", "atomic"), 0)

        #: The size of SQLite's write-ahead log after the last commit, and its limit; 0 for other
        #: stores.
        self.wal_bytes = 0
        self.wal_bytes_max = 0

    def mark(self, recounts_us: Iterable[int]) -> None:
        """Count marks by kind; 0 in *recounts_us* means that the mark requests no recount."""
        for recount_us in recounts_us:
            self.marks["recount" if recount_us else "dirty"] += 1


class CacheTally:
    """The tallies of a cache."""

    def __init__(self, operations: Iterable[str]) -> None:
        self.calls: Mapping[str, Calls] = {each: Calls() for each in operations}
