"""Define what the core needs of stores, caches and clocks. Adapters are in counter.storage.

A store consists of parts, and every call takes a batch: docs/adapters.md says how to write one. The
rules of all parts (tests/contracts checks them for each store):

* A call that returns has made its writes durable. One that raises StoreUnavailableError or
  WriteTimeoutError may have made them, or may make them later.
* Reads see every write that returned before they began.
* Results come in the order of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any, Final, Protocol, cast

from counter.errors import UnavailableError
from counter.metrics import CacheTally, StoreTally
from counter.types import (
    ApiKey,
    AtomicMark,
    Checkpoint,
    ClockReading,
    CounterUpdate,
    Crowd,
    Dataset,
    Decision,
    Event,
    Fold,
    Guarded,
    Head,
    Mark,
    Namespace,
    NamespaceSettings,
    Pending,
    Slice,
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
        """How far the store's clock is ahead of this process's. An embedded store has none of
        its own: how far the latest time in it is ahead, 0 if it is not."""
        ...

    async def namespaces(self) -> Sequence[Namespace]:
        """All namespaces, by name."""
        ...

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        """The new namespace; None if the name is taken. Its shards' watermarks are laid at
        :func:`counter.windows.first_watermark`. Raises UnavailableError while another process may
        acknowledge adds for a deleted namespace of that name."""
        ...

    async def update_namespace(
        self, namespace: Namespace, settings: NamespaceSettings, era_from_us: int
    ) -> Namespace | None:
        """The namespace with *settings*, the accept limit holding from *era_from_us* in place of
        any that was to hold from then or later; None if its version is no longer *namespace*'s."""
        ...

    async def delete_namespace(self, namespace: Namespace) -> bool:
        """Forget the namespace; its data follow in the background. False if the version moved.
        From then on its adds and reads of its watermarks raise NamespaceUnknownError."""
        ...

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        """Names of counters in code point order, after *after*: all that were ever written."""
        ...

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        """The slices that are not dropped, earliest first."""
        ...

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        """Make those of *slices*, and their tables, that do not exist, all together where the store
        has transactions. One that ends at or before ``dropped_before`` is not made again: it would
        answer "not found"."""
        ...

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        """Note the instant at which every watermark had passed the slice's end; the first stays."""
        ...

    async def drop_slice(self, dataset: Dataset, start_us: int) -> None:
        """Move ``dropped_before`` to the slice's end, then drop its table. Earliest first."""
        ...

    async def dropped_before(self, dataset: Dataset) -> int:
        """Events earlier than this instant are gone; 0 while none is."""
        ...

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        """*count* sequence numbers that are leased to nobody else, ever: later leases are higher,
        and their time is *now_us*, or that of the latest lease where this is later."""
        ...

    async def purge(self, now_us: int) -> bool:
        """Delete a bounded amount of what nobody can ask for any more: data of deleted namespaces,
        expired keys, resolutions that outlived their events. True if there is more to do."""
        ...


class LeaseStore(Protocol):
    """Which workers live: each has one lease, a row that expires. All may be lost:
    leases only spare duplicate work, and nothing that is written depends on them."""

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        """Say that *worker* lives for another *ttl_us*."""
        ...

    async def leave(self, worker: str) -> None:
        """Forget *worker*, as if its time were over."""
        ...

    async def workers(self) -> Sequence[str]:
        """All workers that live, in order."""
        ...


class KeyStore(Protocol):
    """API keys. One that was made stays on record when it is revoked or expires, until it is
    forgotten; each changes by compare-and-set."""

    async def api_keys(self) -> Sequence[ApiKey]:
        """All keys on record, by (made at, id)."""
        ...

    async def create_api_key(self, key: ApiKey) -> bool:
        """Put *key* on record; False if its id is taken. When it was last used is not taken."""
        ...

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        """Replace *old* by *new*, of the same id; False if what is on record is not *old* any more.
        When they were last used is neither compared nor changed."""
        ...

    async def forget_api_key(self, key: ApiKey) -> bool:
        """Take *key* off the record; False if what is there is not *key*."""
        ...

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        """Note of each (id, instant) that the key was used then; an earlier instant changes
        nothing, and neither does an id that is not on record."""
        ...


class Clock(Protocol):
    def now_us(self) -> int:
        """The wall clock, microseconds since the epoch; never steps back, except to an instant that
        :meth:`forget_after` named."""
        ...

    def wall_us(self) -> int:
        """The wall clock as it is: it may step back."""
        ...

    def forget_after(self, time_us: int) -> None:
        """Let ``now_us`` step back to *time_us* where the wall clock did: nothing was decided by a
        later reading."""
        ...

    def boottime_us(self) -> int:
        """A monotonic clock that runs while the machine is suspended."""
        ...


class EventStore(Protocol):
    """The event log. Each event is atomic by itself, and an atomic add is all or nothing, at the
    latest once its mark was resolved. No acknowledged event may be lost.

    A missing slice raises SliceMissingError, never answers "not found"; a write
    that raises it has written nothing."""

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        """Write each event on its own, under its identity: a second write collapses, within one
        call too. What stands first stays: a CONFLICT changes nothing. A store that can fail for
        one event alone has the error in its place."""
        ...

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        """Write all the events or none, one answer for all: CONFLICT if any stands with another
        payload, REPLAYED if all stood, else NEW, or UNTOLD where the store could say so to two
        sends of one add. Where the store is not transactional, :meth:`mark_atomic` comes first
        and leaves its mark whatever comes of the events."""
        ...

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        """The stored events of the same identities."""
        ...

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Write found events again, whatever their age, so that they stand on enough replicas; or
        an atomic add's missing ones. What stands under an identity stays."""
        ...

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Make the identities invisible, writes of them that land later included."""
        ...

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        """The fold of the events of each (counter, window start). A clear erases what is at or
        before its own time; exact beyond 64 bits. A
        store with ``partition_sizes`` calls *counted* for each that holds rows, in this order."""
        ...

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], *, from_us: int, to_us: int
    ) -> Sequence[Mapping[int, Fold]]:
        """For each counter the fold of every window of ``[from_us, to_us)``, two window starts,
        that holds an event. A span that was never sliced is empty; one that begins before
        ``dropped_before`` raises SliceMissingError."""
        ...

    async def tails(
        self,
        namespace: Namespace,
        after: Sequence[tuple[str, int]],
        *,
        until_us: int | None = None,
    ) -> Sequence[Fold]:
        """The fold of each counter's events later than an instant. The caller knows of none that is
        acknowledged at *until_us* or later: the store need not look there. A span that was never
        sliced is empty; one that begins before ``dropped_before`` raises SliceMissingError.

        A store that can answers for one moment: an atomic add is in all of its tails or in none.
        """
        ...

    async def scan(
        self,
        namespace: Namespace,
        counter: str,
        *,
        from_us: int,
        to_us: int,
        before: Event | None,
        limit: int,
    ) -> Sequence[Event]:
        """A counter's events of ``[from_us, to_us)`` that are still there, by (event time from the
        latest, event id, item key), after the identity of *before* in that order."""
        ...


class RollupStore(Protocol):
    """Marks, watermarks and the ``counts`` partitions.

    Each counter's update is atomic. Watermarks only move forward. All but the watermarks, the
    marks after them and the recounts can be rebuilt from the events while these are kept."""

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        """Leave dirty marks, and return those that may not be durable, each with the reason. One
        that exists already is left as it is. A recount's mark is left wherever it is. Raises
        SliceMissingError, leaving none, if no slice holds the window of another one: it could never
        be summed."""
        ...

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        """Leave an atomic mark in every shard that its events' counters are in. Never for events
        that no slice holds: nobody could ever find them."""
        ...

    async def fence(self) -> int:
        """A clock reading. Where the store is transactional, no write that was admitted before it
        is still in flight."""
        ...

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        """Each shard's watermark: all events up to it are in the checkpoints. Raises
        NamespaceUnknownError where the namespace is gone."""
        ...

    async def dirty(
        self,
        namespace: Namespace,
        shard: int,
        *,
        after_us: int,
        through_us: int,
        start: Mark | None,
        limit: int,
    ) -> Sequence[Mark]:
        """Marks of windows that start in ``(after_us, through_us]``, by (window, counter, recount),
        later than *start* in that order. Windows come in order; counters and recounts within one
        in an order of the store's own."""
        ...

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> Sequence[AtomicMark]:
        """The atomic marks of windows that start in ``(after_us, through_us]``, earliest first.

        Two item lists under one token are two marks: each names counters that the other may not.
        """
        ...

    async def heads(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[Head | None]:
        """Each counter's checkpoint, settled fold and pending recounts; None where none stands.

        A checkpoint or settled fold that alone is missing reads ``Checkpoint(0, 0)``.
        """
        ...

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], *, after_us: int, through_us: int
    ) -> Sequence[Sequence[WindowRow]]:
        """Each counter's window rows that start in ``(after_us, through_us]``, earliest first."""
        ...

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        """Write each counter's update as one atomic batch up to *through_us*.

        A checkpoint or settled fold older than the one that stands changes nothing of it, and a row
        replaces none that a batch up to a later instant wrote. Rows that start at or before
        ``settled`` are deleted, and ones that come later are not kept. ``pending_done`` are removed
        exactly.
        """
        ...

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], *, after_us: int, through_us: int
    ) -> Collection[int]:
        """Those of *shards* that may hold marks, atomic ones too, of windows that start in
        ``(after_us, through_us]``: all of them where one read cannot tell them apart."""
        ...

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        """Move the watermarks of *shards* forward to *through_us*; never back."""
        ...

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        """Forget the marks, atomic ones too, of windows that start at or before *through_us*."""
        ...

    async def leave_pending(
        self, namespace: Namespace, recounts: Sequence[tuple[str, Pending]]
    ) -> None:
        """Leave pending recounts in the counters' own partitions; twice is once."""
        ...


class DecisionStore(Protocol):
    """Compare-and-set tables: what was decided about late tokens, and the times of keys.

    The first decision about a token stays for as long as its event could exist.

    The token of *events* is (counter, event time, event id); where they are the items of an atomic
    add (``atom`` is set), it is (event time, event id) whatever the items.
    """

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Insert if nothing stands for the token of *events*; the decision that stands after it. A
        transactional store that finds one of them then inserts APPLIED in place of VOID."""
        ...

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        """The decision about the token of *events*: any that a caller of :meth:`decide` was given.

        One that no caller was given yet may be missed.
        """
        ...

    async def reserve(
        self, namespace: Namespace, nonce: bytes, now_us: int, expires_us: int, kept_us: int = 0
    ) -> int:
        """The generation time reserved for *nonce*: *now_us* where none stood or it had expired
        (*now_us* is *kept_us* or more past its *expires_us*)."""
        ...

    async def rereserve(
        self, namespace: Namespace, nonce: bytes, old_us: int, now_us: int, expires_us: int
    ) -> int:
        """Replace the reserved time and its expiry if it is still *old_us*, as :meth:`reserve` does
        where none stands; the time that stands after it."""
        ...


class PartitionSizeStore(Protocol):
    """Records of partition sizes, in a store in which a partition of events can become too large.
    Advice only: no count depends on them."""

    async def leave_crowd(self, dataset: Dataset, crowd: Crowd) -> None:
        """Record *crowd* for all processes.

        For each slice, the largest counted and the largest observed one are kept for
        :data:`counter.limits.CROWDS_KEPT_SLICES` slices from now.
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


class CountEvents(Protocol):
    """Counts the events of a time span over all counters."""

    async def __call__(
        self, namespace: Namespace, *, from_us: int, to_us: int, limit: int, events_max: int
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        """Return the event counts of the *limit* busiest counters in ``[from_us, to_us)``, and
        the start of the time covered: later than *from_us* if more than *events_max* events came
        since then."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What only some stores can do."""

    #: One transaction holds mark and event, checks the event's age and its decision itself, and
    #: nothing of it lands later. Then ``mark`` and the deadline after the write are not needed.
    transactional: bool = False
    #: Only one process opens the store: it knows all that is written, and the store's clock is its
    #: own.
    embedded: bool = False
    #: None if a partition cannot become too large.
    partition_sizes: PartitionSizeStore | None = None
    #: None if events are not kept in order of time.
    busiest: CountEvents | None = None


class Store(Protocol):
    """Everything durable, in parts. A part may be kept by itself: it is never replaced."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def events(self) -> EventStore: ...

    @property
    def rollups(self) -> RollupStore: ...

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
        """Connect. Raises StartupError, saying what to do, or UnavailableError: then try again."""
        ...

    async def close(self) -> None:
        """Finish what was accepted and let go."""
        ...

    async def ping(self) -> None:
        """Raise StoreUnavailableError where a write would not succeed now."""
        ...


#: The parts of a store.
PARTS: Final = ("events", "rollups", "decisions", "control", "leases", "keys")


def wrapped(store: Store, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Store:
    """Return *store* with each asynchronous method, of it and of its parts, replaced by what *wrap*
    returns for its name and itself."""
    return cast(Store, _Wrapped(store, wrap))


class _Wrapped:
    def __init__(self, inner: object, wrap: Callable[[str, Callable[..., Any]], Any]) -> None:
        self._inner = inner
        self._wrap = wrap

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in PARTS:
            found = self.__dict__[name] = _Wrapped(found, self._wrap)
        elif iscoroutinefunction(found):
            found = self._wrap(name, found)
        return found


class Cache(Protocol):
    """Counts with the instant they are exact as of, best-effort counters, and the guard of tokens.
    May lose all. Where it cannot be reached, ``get_many`` knows nothing, ``put_many`` does nothing
    and ``guard`` is untold, all within a bounded time; only best-effort counters raise."""

    #: What keeps the cache from being reached; None while it can be.
    trouble: str | None

    @property
    def tally(self) -> CacheTally:
        """Return what the cache counts of its own work, for metrics."""
        ...

    def queues(self) -> Mapping[str, int]:
        """Return the length of each of its queues."""
        ...

    async def open(self) -> None:
        """Connect. A cache that is down is no reason not to start."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...

    async def ping(self) -> None:
        """Raise CacheUnavailableError where it cannot be reached; sets ``trouble``."""
        ...

    async def guard(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Guarded]:
        """Note each event's payload under its identity, and say what was noted there before."""
        ...

    async def get_many(
        self, namespace: Namespace, counters: Sequence[str]
    ) -> Sequence[Checkpoint | None]: ...

    def peek(self, namespace: Namespace, counter: str) -> Checkpoint | None:
        """What is known without asking anyone: an entry within the process, or None."""
        ...

    async def put_many(
        self, namespace: Namespace, entries: Sequence[tuple[str, Checkpoint]]
    ) -> None:
        """Remember counts for the cache TTL; an older one never replaces a newer one."""
        ...

    async def increment(self, namespace: Namespace, counter: str, delta: int) -> int:
        """Add to a best-effort counter at once; its value after it. Not retry-safe. Raises
        CacheUnavailableError, as the next two do."""
        ...

    async def best_effort(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[int]:
        """Best-effort values; 0 where none is known."""
        ...

    async def clear(self, namespace: Namespace, counter: str) -> None:
        """Set a best-effort counter back to 0."""
        ...
