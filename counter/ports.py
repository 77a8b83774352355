"""Define what the core needs of stores, caches and clocks. Adapters are in counter.storage.

A store consists of parts, and every call takes a batch: docs/adapters.md says how to write one. The
rules of all parts (counter/testing checks them for each store):

* When a call returns, its writes are durable. If it raises StoreUnavailableError or
  WriteTimeoutError, they may have been made, or may be made later.
* Reads see every write that returned before they began.
* Results are in the order of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from counter.api_keys import KeyStore
from counter.capabilities import Capabilities, LeaseStore
from counter.errors import CounterError, UnavailableError
from counter.metrics import CacheTally, StoreTally
from counter.types import (
    AtomicMark,
    Checkpoint,
    ClockReading,
    CounterUpdate,
    Dataset,
    Decision,
    DirtyPage,
    Event,
    EventPage,
    Fold,
    Guarded,
    Head,
    Mark,
    Namespace,
    NamespaceSettings,
    Pending,
    Reservation,
    Slice,
    Span,
    TokenBlock,
    WindowRow,
    Written,
)

#: Called with a counter, the start of a window and the number of event rows that it has in the
#: window.
Counted = Callable[[str, int, int], None]


class ControlPlane(Protocol):
    """Namespaces, datasets, slices, token numbers and the store's clock.

    A namespace changes by compare-and-set of its version. Ids and token numbers are never issued
    twice, not even after a restore. Nothing may be lost."""

    async def datasets(self) -> Sequence[Dataset]: ...

    async def read_clock(self) -> ClockReading:
        """Return how far the store's clock is ahead of this process's. An embedded store has no
        clock: return how far the latest time in it is ahead, or 0."""
        ...

    async def namespaces(self) -> Sequence[Namespace]:
        """Return all namespaces, by name."""
        ...

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        """Create a namespace and return it; None if the name is in use. Its shards' watermarks
        begin at :func:`counter.windows.first_watermark`. Raises UnavailableError while another
        process may acknowledge adds to a deleted namespace of that name."""
        ...

    async def update_namespace(self, namespace: Namespace, updated: Namespace) -> bool:
        """Replace *namespace* by *updated*, its next version; return False if its version has
        changed. It may land at any later time. When it returns True, the bounds of *updated* are in
        force: no add that does not keep them is still in flight."""
        ...

    async def delete_namespace(self, namespace: Namespace) -> bool:
        """Delete the namespace; its data is purged in the background. Return False if the version
        has changed. Afterwards its adds and reads of its watermarks raise NamespaceUnknownError."""
        ...

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        """Return names of counters in code point order, after *after*: all that were ever written,
        except those that were deleted and have no later event. Of a deleted counter, the name may
        be missing until the rollup has passed the window of that event."""
        ...

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        """Return the slices that are not dropped, earliest first."""
        ...

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        """Create missing *slices* and their tables, in one transaction if the store has them. A
        slice that ends at or before ``dropped_before`` is not created again, because it would
        answer "not found"."""
        ...

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        """Record when every watermark had passed the slice's end; the first record stays."""
        ...

    async def drop_slice(self, dataset: Dataset, start_us: int) -> bool:
        """Move ``dropped_before`` to the slice's end, then drop its table. Earliest first. Return
        False, with nothing changed, if a drop would have to wait for readers."""
        ...

    async def dropped_before(self, dataset: Dataset) -> int:
        """Return the instant before which events are dropped; 0 if none are."""
        ...

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        """Lease *count* unique sequence numbers. Later leases have higher numbers; the time of a
        lease is *now_us*, or that of the latest lease if that is later."""
        ...

    async def purge(self, now_us: int) -> bool:
        """Delete a bounded amount of unreachable data: of deleted namespaces, expired keys,
        decisions that outlived their events. Return True if there is more."""
        ...


class Clock(Protocol):
    def now_us(self) -> int:
        """Return the wall clock in microseconds since the epoch. It never steps back, except to an
        instant given to :meth:`forget_after`."""
        ...

    def wall_us(self) -> int:
        """Return the unmodified wall clock, which may step back."""
        ...

    def forget_after(self, time_us: int) -> None:
        """Let ``now_us`` step back to *time_us* with the wall clock: no decision used a later
        reading."""
        ...

    def boottime_us(self) -> int:
        """Return a monotonic clock that also runs while the machine is suspended."""
        ...


class EventStore(Protocol):
    """The event log. Each event is atomic by itself, and an atomic add is all or nothing, at the
    latest once its mark was resolved. No acknowledged event may be lost.

    A missing slice raises SliceMissingError, never answers "not found"; a write
    that raises it has written nothing."""

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        """Write each event under its identity; repeated writes collapse, also within one call. The
        first payload stays, so a CONFLICT changes nothing. A store that can fail for one event
        alone returns the error in its place."""
        ...

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        """Write all the events or none, with one outcome: CONFLICT if any exists with another
        payload, REPLAYED if all existed, else NEW, or UNVERIFIED if the store could report NEW to
        two attempts of one add."""
        ...

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        """Return the stored events of the same identities."""
        ...

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        """Return the fold of the events of each (counter, window start). A clear erases events at
        or before its own time; sums are exact beyond 64 bits. A store with ``partition_sizes``
        calls *counted* for each that has rows, in this order."""
        ...

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Mapping[int, Fold]]:
        """Return for each counter the folds of all windows with events in *span*, which begins and
        ends with a window. A span without slices is empty; one that begins before
        ``dropped_before`` raises SliceMissingError."""
        ...

    async def tails(
        self, namespace: Namespace, after: Sequence[tuple[str, int]], until_us: int | None = None
    ) -> Sequence[Fold]:
        """Return the fold of each counter's events after an instant, including those that are
        later than the caller's clock. No event at *until_us* or later is acknowledged, so the store
        need not read there. A span without slices is empty; one that begins before
        ``dropped_before`` raises SliceMissingError.

        If the store can, it reads one snapshot: an atomic add is in all its tails or in none.
        """
        ...

    async def scan(self, namespace: Namespace, counter: str, page: EventPage) -> Sequence[Event]:
        """Return a counter's existing events, by (event time from the latest, event id, item
        key)."""
        ...


class SeparateWrites(Protocol):
    """What surrounds the events in a store without transactions: marks, which record that a window
    has new events, and the writes that enforce a decision.

    A transactional store does not have this part. One transaction writes an event and checks its
    age and its decision; nothing of it lands later, and the log shows which windows have events."""

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        """Write the marks of adds, and return those that may not be durable, each with the reason.
        Existing marks stay unchanged. Raises SliceMissingError and writes none if no slice contains
        the window of a mark: such a window could never be summed."""
        ...

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        """Write an atomic mark in every shard of its events' counters. It stays whatever happens to
        the events. Never for events without a slice, because no worker could find them."""
        ...

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, span: Span
    ) -> Sequence[AtomicMark]:
        """Return the atomic marks of the windows of *span*, earliest first. Two item lists under
        one token are two marks, because their counters may differ."""
        ...

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Write found events again, whatever their age, so that enough replicas have them; or an
        atomic add's missing ones. Existing events stay."""
        ...

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Hide the identities, including writes of them that land later."""
        ...

    async def unlist(self, namespace: Namespace, counter: str, deleted_us: int) -> None:
        """Remove *counter* from the listing. Call after its delete is pending and a recount is
        requested. An event that is later than the delete lists it again."""
        ...


class RecountStore(Protocol):
    """Requests of recounts, and deletes of counters: pending ones for readers, marks for workers.
    Both are idempotent. :meth:`RollupStore.apply` removes what is done."""

    async def write_pending(
        self, namespace: Namespace, pending: Sequence[tuple[str, Pending]]
    ) -> None:
        """Write pending recounts and deletes to the counters' own partitions. A transactional store
        takes the deleted counters off the list."""
        ...

    async def write_marks(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        """Write the marks of recounts. Raises UnavailableError if one may not be durable."""
        ...


class RollupStore(Protocol):
    """Watermarks, the marks after them, and the ``counts`` partitions.

    Watermarks only move forward. All but the watermarks, the marks after them and the recounts can
    be rebuilt from the events while these are kept."""

    async def fence(self) -> int:
        """Return a clock reading. If the store is transactional, no write that was admitted before
        it is still in flight."""
        ...

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        """Return each shard's watermark: all events up to it are in the checkpoints. Raises
        NamespaceUnknownError if the namespace is deleted."""
        ...

    async def dirty(
        self, namespace: Namespace, shard: int, span: Span, limit: int, rest: object = None
    ) -> DirtyPage:
        """Return at most *limit* marks of the windows of *span*. Windows come in order; counters
        and recounts within one in an order of the store's own. A transactional store has those of
        adds from its log, each with the fold of its window. Only windows after the watermark are
        returned.

        With the *rest* of an earlier page, return the marks after that page; *span* may end
        earlier then. A window read in several pages must be closed."""
        ...

    async def heads(
        self, namespace: Namespace, counters: Sequence[str], handles: Sequence[object] | None = None
    ) -> Sequence[Head | None]:
        """Return each counter's checkpoint, settled fold and pending recounts; None if none exists.
        *handles* are those of the counters' marks.

        A checkpoint or settled fold that alone is missing reads ``Checkpoint(0, 0)``.
        """
        ...

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Sequence[WindowRow]]:
        """Return each counter's rows of the windows of *span*, earliest first."""
        ...

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        """Write each counter's update up to *through_us*: as one atomic batch, or its rows first,
        then its checkpoints at once, and at last remove what is pending.

        A checkpoint or settled fold does not replace a later one, and a row does not replace one
        from a batch up to a later instant. Rows that start at or before ``settled`` are deleted,
        and late writes of them stay hidden. Exactly ``pending_done`` are removed, once all that is
        durable; if deletes are among them, the counter is listed again, unless there is a later
        one.
        """
        ...

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], span: Span
    ) -> Collection[int]:
        """Return those of *shards* that may have marks, including atomic ones, of windows of
        *span*: all of them if one read cannot distinguish them."""
        ...

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        """Move the watermarks of *shards* forward to *through_us*; never back."""
        ...

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        """Forget the marks, atomic ones too, of windows that start at or before *through_us*,
        which the watermark has passed."""
        ...


class DecisionStore(Protocol):
    """Compare-and-set tables: decisions about late tokens, and the reserved times of keys.

    The first decision about a token stays for as long as its event could exist, unless it is
    cancelled: then that decision stays.

    The token of *events* is (counter, event time, event id); for the items of an atomic add
    (``atom`` is set) it is (event time, event id), whatever the items.
    """

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Insert if no decision exists for the token of *events*; return the decision that then
        exists. A transactional store that finds the token used inserts APPLIED instead of VOID,
        with the fingerprint OTHER_PAYLOAD if it was used for another payload."""
        ...

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        """Return the decision about the token of *events*, if one was returned to a caller; one
        that was not may be missed."""
        ...

    async def cancel(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Replace the decision about the token of *events* by what ``decision.over()`` returns for
        it, and return that; the outcome of *decision* is that of a cancel.

        A transactional store looks by itself whether the token is used, and for another payload
        changes nothing and returns OTHER_PAYLOAD. In the same transaction it removes the events and
        requests a recount of their windows, for readers too.
        """
        ...

    async def reserve(self, namespace: Namespace, nonce: bytes, wanted: Reservation) -> int:
        """Return the generation time reserved for *nonce*. Store *wanted* if there is no
        reservation, or one that *wanted* replaces."""
        ...


class Store(Protocol):
    """Everything durable, in parts. Callers may keep a part, because it is never replaced."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def events(self) -> EventStore: ...

    @property
    def separate_writes(self) -> SeparateWrites | None:
        """None if the store is transactional: then no mark of an add is needed before the write,
        and no deadline after it."""
        ...

    @property
    def rollups(self) -> RollupStore: ...

    @property
    def recounts(self) -> RecountStore: ...

    @property
    def decisions(self) -> DecisionStore: ...

    @property
    def control(self) -> ControlPlane: ...

    @property
    def leases(self) -> LeaseStore: ...

    @property
    def keys(self) -> KeyStore: ...

    @property
    def tally(self) -> StoreTally:
        """Return what the store counts of its own work, for metrics."""
        ...

    def queues(self) -> Mapping[str, int]:
        """Return the length of each of its queues."""
        ...

    async def open(self) -> None:
        """Connect. Raises StartupError with the fix, or UnavailableError if a retry may succeed."""
        ...

    async def close(self) -> None:
        """Finish accepted work and disconnect."""
        ...

    async def ping(self) -> None:
        """Raise StoreUnavailableError if a write would fail now."""
        ...


class Cache(Protocol):
    """Counts with the instant they are exact as of, best-effort counters, and the guard of tokens.
    It may lose anything. If it is unreachable, ``get_many`` finds nothing, ``put_many`` does
    nothing and ``guard`` returns UNVERIFIED, within a bounded time. Only best-effort counters
    raise."""

    #: Why the cache is unreachable; None if it is reachable.
    trouble: str | None

    @property
    def tally(self) -> CacheTally:
        """Return what the cache counts of its own work, for metrics."""
        ...

    def queues(self) -> Mapping[str, int]:
        """Return the length of each of its queues."""
        ...

    async def open(self) -> None:
        """Connect. A cache that is down does not prevent startup."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...

    async def ping(self) -> None:
        """Raise CacheUnavailableError if it is unreachable; sets ``trouble``."""
        ...

    async def guard(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Guarded]:
        """Store each event's fingerprint under its identity; return what was stored before."""
        ...

    async def get_many(
        self, namespace: Namespace, counters: Sequence[str]
    ) -> Sequence[Checkpoint | None]: ...

    def peek(self, namespace: Namespace, counter: str) -> Checkpoint | None:
        """Return an entry that this process has in memory, or None."""
        ...

    async def put_many(
        self, namespace: Namespace, entries: Sequence[tuple[str, Checkpoint]]
    ) -> None:
        """Store counts for the cache TTL; an older one never replaces a newer one."""
        ...

    async def increment_many(
        self, namespace: Namespace, changes: Sequence[tuple[str, int]]
    ) -> Sequence[int | CounterError]:
        """Add each delta to its best-effort counter; return each value after it, or why it is not
        known. Not safe to retry."""
        ...

    async def best_effort(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[int]:
        """Return best-effort values; 0 for unknown ones. Raises CacheUnavailableError, like the
        next one."""
        ...

    async def clear(self, namespace: Namespace, counter: str) -> None:
        """Set a best-effort counter to 0."""
        ...
