"""What the hot paths count of themselves: plain integers, which others read when they are asked.

Nothing here locks. One thread adds to each tally; whoever reads it meanwhile may see an observation
in the buckets that is not in the sum yet, for a moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from counter.errors import invariant

#: Upper bounds of buckets, in seconds: of requests, of calls to a store or a cache, of commits.
SECONDS_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
#: Upper bounds of buckets of things that come together.
NUMBER_BOUNDS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)


class Histogram:
    """How many observations fell into each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS_BOUNDS) -> None:
        invariant(list(bounds) == sorted(set(bounds)), f"bounds that do not rise: {bounds}")
        self.bounds = bounds
        #: One for each bound, which belongs to its bucket, and one for what is above all of them.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count *value*."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Calls:
    """Calls of one kind: how long they took, and how many failed."""

    __slots__ = ("errors", "seconds")

    def __init__(self) -> None:
        self.errors = 0
        self.seconds = Histogram()

    def ended(self, took_s: float, errors: int = 0) -> None:
        """Count a call that took so long, and *errors* of those that it was made for."""
        self.seconds.observe(took_s)
        self.errors += errors


class StoreTally:
    """What a store counts of itself. A call is one of its own: a batch, a statement."""

    def __init__(self, operations: Iterable[str]) -> None:
        self.calls: Mapping[str, Calls] = {each: Calls() for each in operations}
        #: Group commit: what was written together, and how long it took.
        self.commit_rows = Histogram(NUMBER_BOUNDS)
        self.commit_seconds = Histogram()
        #: Marks that were written: of windows with new events, to count one anew, of atomic adds.
        self.marks = dict.fromkeys(("dirty", "recount", "atomic"), 0)

        #: The size of SQLite's write-ahead log after the last commit, and the largest that it may
        #: have; 0 where the store has none.
        self.wal_bytes = 0
        self.wal_bytes_max = 0

    def mark(self, recounts_us: Iterable[int]) -> None:
        """Count marks by the window that each has counted anew; 0 stands for none."""
        for recount_us in recounts_us:
            self.marks["recount" if recount_us else "dirty"] += 1


class CacheTally:
    """What a cache counts of itself."""

    def __init__(self, operations: Iterable[str]) -> None:
        self.calls: Mapping[str, Calls] = {each: Calls() for each in operations}


@runtime_checkable
class TallyingStore(Protocol):
    """A store that tells what it did."""

    tally: StoreTally

    def queues(self) -> Mapping[str, int]:
        """How much waits in each of its queues."""
        ...


@runtime_checkable
class TallyingCache(Protocol):
    """A cache that tells what it did."""

    tally: CacheTally

    def queues(self) -> Mapping[str, int]:
        """How much waits in each of its queues."""
        ...
