"""Define the partition sizes that a store with partitioned events reports.

A partition holds one counter's events of a time bucket and an event bucket, and is read and
repaired as a whole. A counter with many events therefore needs many event buckets:
docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from counter.types import Dataset

#: Uncompressed size of an event row of an atomic add in Cassandra; a row of a single add takes 46
#: bytes. Measured on 5.0.5 with 100,000 rows of each.
EVENT_BYTES: Final = 64

#: For how many slices the sizes of a slice are kept.
CROWDS_KEPT_SLICES: Final = 12

#: Called with a counter, the start of a window and the number of event rows that it has in the
#: window.
Counted = Callable[[str, int, int], None]


class Crowd(NamedTuple):
    """The most that the events of one counter take in one time bucket of a slice, those of all
    event buckets together."""

    #: The start of the slice.
    start_us: int
    #: The time bucket that the size was computed for.
    bucket_us: int
    size_bytes: int
    namespace: str = ""
    #: Empty if the size was reported by nodes: they do not name the counter.
    counter: str = ""

    @property
    def is_observed(self) -> bool:
        """Return whether nodes reported it; otherwise a worker counted the events."""
        return not self.counter


@runtime_checkable
class PartitionedStore(Protocol):
    """A store in which a partition can become too large.

    SQLite is not one: its table of a slice is a tree in order of time.
    """

    async def leave_crowd(self, dataset: Dataset, crowd: Crowd) -> None:
        """Record *crowd* for all processes.

        For each slice, the largest counted and the largest observed one are kept for
        CROWDS_KEPT_SLICES slices from now.
        """
        ...

    async def crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        """Return all records that are still kept, by slice."""
        ...

    async def observe_crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        """Return the sizes that nodes report for slices that are not dropped: one for each slice.

        A size is a lower bound, because data that is not flushed to disk is not included.
        """
        ...
