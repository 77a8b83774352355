"""Define the tallies of the hot paths: plain integers that collectors read on demand.

There are no locks. One thread updates each tally; a concurrent reader may see an observation in the
buckets that is not in the sum yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from counter.errors import invariant

#: Upper bounds of buckets, in seconds: of requests, of calls to a store or a cache, of commits.
SECONDS_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
#: Upper bounds of buckets of batch sizes.
NUMBER_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)


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
