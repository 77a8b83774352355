"""How crowded partitions get: what a store that spreads events over partitions tells of it.

A partition holds one counter's events of a time bucket and an event bucket, and is read and
repaired as a whole. So many events of one counter need many event buckets: docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from counter.types import Dataset

#: What a row of the event log takes in Cassandra before it is compressed, where it is an item of an
#: atomic add. One of a single add takes 46 bytes. Measured on 5.0.5, of 100,000 rows each.
EVENT_BYTES: Final = 64

#: For how many slices what is noted of a slice is kept.
CROWDS_KEPT_SLICES: Final = 12

#: Told of a counter, the start of a window and how many rows of events the counter has in it.
Counted = Callable[[str, int, int], None]


class Crowd(NamedTuple):
    """The most that the events of one counter take in one time bucket of a slice, those of all
    event buckets together."""

    #: Where the slice starts.
    start_us: int
    #: The time bucket that it was reckoned for.
    bucket_us: int
    size_bytes: int
    namespace: str = ""
    #: Empty where the nodes told how large partitions are: they do not say whose.
    counter: str = ""

    @property
    def is_observed(self) -> bool:
        """Whether nodes told it; else a worker counted the events."""
        return not self.counter


@runtime_checkable
class PartitionedStore(Protocol):
    """A store in which a partition can become too large. SQLite's table of a slice is a tree in
    order of time: it has none."""

    async def leave_crowd(self, dataset: Dataset, crowd: Crowd) -> None:
        """Note *crowd* for all processes. Of a slice the largest one that was counted stays, and
        the largest one that was observed, for CROWDS_KEPT_SLICES slices from now."""
        ...

    async def crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        """All that were noted and are still kept, by slice."""
        ...

    async def observe_crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        """What nodes tell of the slices that are not dropped: one for each, and at least what is
        true. What they have not written to disk yet they do not tell."""
        ...
