"""Define what only some stores can do: a store without any of it keeps the promise, too."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from counter.types import Dataset, DirtyMark, Namespace, Span


class PartitionSize(NamedTuple):
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


class RolledPart(NamedTuple):
    """A part of a window that the store rolls up: the counts of the counters that are rolled up,
    and the marks of those that are left to the worker."""

    window_us: int
    counts: Sequence[tuple[str, int]]
    marks: Sequence[DirtyMark]


class PartitionSizeStore(Protocol):
    """Records of partition sizes, in a store in which a partition of events can become too large.
    Advice only: no count depends on them."""

    async def record(self, dataset: Dataset, size: PartitionSize) -> None:
        """Record *size* for all processes.

        For each slice, the largest counted and the largest observed one are kept for
        :data:`counter.limits.SIZES_KEPT_SLICES` slices from now.
        """
        ...

    async def recorded(self, dataset: Dataset) -> Sequence[PartitionSize]:
        """Return all records that are still kept, by slice."""
        ...

    async def observe(self, dataset: Dataset) -> Sequence[PartitionSize]:
        """Return the sizes that nodes report for slices that are not dropped: one for each slice.

        A size is a lower bound, because data that is not flushed to disk is not included.
        """
        ...


class CountEvents(Protocol):
    """Counts the events of a time span over all counters."""

    async def __call__(
        self, namespace: Namespace, span: Span, limit: int, events_max: int
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        """Return the event counts of the *limit* busiest counters in *span*, and the start of the
        time covered: later than that of *span* if more than *events_max* events came since then."""
        ...


class RollWindow(Protocol):
    """Rolls up most counters of a large window at once."""

    def __call__(
        self, namespace: Namespace, shard: int, span: Span, dropped_before_us: int
    ) -> AsyncGenerator[RolledPart, None]:
        """Roll up the first dirty window of *span*, which is closed, in parts: write the row and
        the checkpoint of each counter that has only new adds and nothing to be settled or
        recounted, as a worker would, and yield the marks of all others. Yields nothing, with
        nothing written, if the worker should roll the window up: it is small, or has recounts.

        *span* begins after the watermark. Slices before *dropped_before_us* are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What only some stores can do."""

    #: Only one process opens the store: it knows all that is written, and the store's clock is its
    #: own.
    embedded: bool = False
    #: None if a partition cannot become too large.
    partition_sizes: PartitionSizeStore | None = None
    #: None if events are not kept in order of time.
    busiest: CountEvents | None = None
    #: None if a worker rolls up each counter.
    roll_window: RollWindow | None = None
    #: Returns what the operator should know about the server. None if there is no server.
    server_warnings: Callable[[], Awaitable[Sequence[str]]] | None = None
