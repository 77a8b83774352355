"""Define what no count depends on: leases of workers, and what only some stores can do."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from counter.holds import Ending, Hold, HoldId, Place
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


class LeaseStore(Protocol):
    """Live workers: each has one lease, a row that expires. All may be lost: leases only avoid
    duplicate work, and no write depends on them."""

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        """Renew the lease of *worker* for *ttl_us*."""
        ...

    async def leave(self, worker: str) -> None:
        """Delete the lease of *worker*."""
        ...

    async def workers(self) -> Sequence[str]:
        """Return all live workers, in order."""
        ...


class HoldStore(Protocol):
    """Holds, and their ends: each call is one transaction. ``EventStore.append_atomic`` begins a
    hold, and ``DecisionStore.cancel`` of its token releases it.

    The clock is the store's, and never steps back. A change that finds an open hold expired ends it
    instead. Every call that takes a hold returns it as it is then; None if there is none yet.
    """

    def may_hold(self, namespace: Namespace) -> bool:
        """Return False if no hold of the namespace is open."""
        ...

    async def find(self, namespace: Namespace, hold: HoldId) -> Hold | None:
        """Return a hold. It may be expired, and not ended yet."""
        ...

    async def end(
        self, namespace: Namespace, hold: HoldId, how: Ending, amount: int = 0
    ) -> Hold | None:
        """End a hold that is open, unless *how* is EXPIRED and it is not, or it cannot be settled
        with *amount*. The end has a time in a window that no worker has passed."""
        ...

    async def extend(
        self, namespace: Namespace, hold: HoldId, lasts_us: int, latest_us: int
    ) -> Hold | None:
        """Let an open hold expire *lasts_us* from now, or at *latest_us* if that is earlier; never
        earlier than it would."""
        ...

    async def open(
        self, namespace: Namespace, counter: str, after: Place, limit: int
    ) -> Sequence[Hold]:
        """Return open holds of a counter by their places, those after *after*. They include the
        expired ones that are not ended yet."""
        ...

    async def expired(self, limit: int) -> Sequence[tuple[int, str]]:
        """Return the counters of *limit* open holds that have expired, each with the id of its
        namespace."""
        ...

    async def expire(self, namespace: Namespace, counter: str) -> int:
        """End holds of a counter that have expired, those that expired first, at most
        ``ENDED_AT_ONCE_MAX``; return how many."""
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
    #: Bounds are kept: an add is refused in the transaction that would write it.
    bounds: bool = False
    #: None if there are no holds.
    holds: HoldStore | None = None
    #: None if a partition cannot become too large.
    partition_sizes: PartitionSizeStore | None = None
    #: None if events are not kept in order of time.
    busiest: CountEvents | None = None
    #: None if a worker rolls up each counter.
    roll_window: RollWindow | None = None
    #: Returns what the operator should know about the server. None if there is no server.
    server_warnings: Callable[[], Awaitable[Sequence[str]]] | None = None
