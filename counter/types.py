"""Define the data types of the system. All times are integer microseconds since the epoch, UTC."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, IntEnum, StrEnum
from typing import Any, Final, NamedTuple, Self

from counter.bounds import NO_BOUNDS, Bounds, payload_of


class CounterType(StrEnum):
    """How a namespace counts; docs/architecture.md compares the types."""

    BEST_EFFORT = "BEST_EFFORT"
    EVENTUAL = "EVENTUAL"
    ACCURATE = "ACCURATE"


class PayloadCheck(StrEnum):
    """How strictly the store checks for two payloads under one token."""

    OFF = "off"
    GUARD = "guard"
    STRICT = "strict"


class Accuracy(StrEnum):
    """How exact the count of a read is."""

    # The hash of an enumeration is computed in Python; every get hashes one.
    __hash__ = str.__hash__

    ACCURATE = "accurate"
    EVENTUAL = "eventual"
    BEST_EFFORT = "best_effort"


class Token(NamedTuple):
    """An idempotency token: a nonce of 16 bytes and the client's time."""

    nonce: bytes
    generation_time_us: int


class Event(NamedTuple):
    """One row of the event log. ``(event_time, event_id, item_key)`` identifies it within a
    counter.

    A tuple and not a dataclass: one is built per add, and a tuple is the cheapest immutable record.
    ``atom`` has the fingerprint of the whole item list if the event is part of an atomic add, whose
    items have keys from 1 (a single add has 0), and what :mod:`counter.bounds` keeps.
    """

    counter: str
    event_time_us: int
    event_id: bytes
    item_key: int
    delta: int
    clear: bool = False
    atom: bytes | None = None

    @property
    def scope(self) -> str:
        """The scope of the token besides its time and id: the counter, or "", the whole namespace,
        for an atomic add."""
        return "" if self.item_key else self.counter

    def same_payload(self, other: Event) -> bool:
        """Return whether both events have the same payload; the delta of a clear is ignored."""
        return self.clear == other.clear and (
            self.clear or payload_of(self.delta, self.atom) == payload_of(other.delta, other.atom)
        )


class Written(Enum):
    """What the store did with one event of an append."""

    NEW = "new"
    REPLAYED = "replayed"
    CONFLICT = "conflict"
    #: The store cannot distinguish a new row from an existing one.
    UNVERIFIED = "unverified"
    #: The event was past its accept limit at the last check: nothing was written.
    LATE = "late"
    #: The add was refused, now or before, because of a bound: its event counts 0.
    BOUND_REACHED = "bound_reached"


class Fold(NamedTuple):
    """The effect of a run of events on a count: reset to 0 if *cleared*, then add *total*."""

    cleared: bool
    total: int


class Span(NamedTuple):
    """A span of time, ``[from_us, to_us)``; of windows, it has those that start in it."""

    from_us: int
    to_us: int

    @classmethod
    def after(cls, after_us: int, through_us: int) -> Self:
        """Return ``(after_us, through_us]``: what one watermark includes and an earlier one does
        not."""
        return cls(after_us + 1, through_us + 1)

    def windows(self, size_us: int) -> range:
        """Return the starts of the windows."""
        return range(-(-self.from_us // size_us) * size_us, self.to_us, size_us)


class EventPage(NamedTuple):
    """Which events of a counter a scan returns: those of *span* that come after the identity of
    *before*, at most *limit*."""

    span: Span
    limit: int
    before: Event | None = None


class Mark(NamedTuple):
    """A durable note that *window* of *counter* has new events; in a transactional store the events
    are the note.

    ``recount_us`` is 0 for the mark of an add, otherwise the start of the window to recount.
    """

    window_us: int
    counter: str
    recount_us: int = 0


class DirtyMark(NamedTuple):
    """A mark as a worker reads it.

    ``fold`` is that of the window's events, if the store has read it together with the mark.
    ``handle`` is the store's own for the counter, if it finds the counter faster by it.
    """

    window_us: int
    counter: str
    recount_us: int = 0
    fold: Fold | None = None
    handle: object = None


class DirtyPage(NamedTuple):
    """Some marks of a walk, and what continues the walk after them; None if nothing is left.

    *rest* is the store's own, and can be used once.
    """

    marks: Sequence[DirtyMark]
    rest: object = None


class Sight(IntEnum):
    """What no worker can have missed that has passed an atomic mark."""

    NOTHING = 0
    #: That the add is decided.
    DECISION = 1
    #: That it is cancelled.
    CANCEL = 2


class AtomicMark(NamedTuple):
    """A mark with a whole atomic add, so that a worker can finish the add after a crash.

    One with a *sight* says of the one without in its window that no worker can have passed that
    one without seeing the decision about the add.
    """

    window_us: int
    events: tuple[Event, ...]
    sight: Sight = Sight.NOTHING

    @property
    def stored_atom(self) -> bytes:
        """Return the fingerprint of its items as stores have it: with one more byte for a sight,
        because these marks may be in one window."""
        sight = bytes((self.sight,)) if self.sight else b""
        return (self.events[0].atom or b"") + sight


def atom_of(stored: bytes) -> tuple[bytes | None, Sight]:
    """Return the fingerprint and the sight in the *stored* atom of a mark."""
    has_sight = len(stored) % 2 == 1
    sight = Sight(stored[-1]) if has_sight else Sight.NOTHING
    return stored[: len(stored) - has_sight] or None, sight


class WindowRow(NamedTuple):
    """The fold of one window's events, a pure function of them; *window_us* is its start."""

    window_us: int
    cleared: bool
    total: int


class Checkpoint(NamedTuple):
    """A count that includes every event with ``event_time <= time_us``."""

    time_us: int
    count: int  # type: ignore[assignment]  # no caller uses tuple.count()


#: The ``recount_us`` of a :class:`Pending` that is a delete. Before every window.
DELETED: Final = -1


class Pending(NamedTuple):
    """A pending recount of window *recount_us*, which the rollup of window *window_us* will do.

    If *recount_us* is DELETED, the counter was deleted at *window_us*: it is not listed until it
    has a later event.
    """

    recount_us: int
    window_us: int

    @property
    def is_delete(self) -> bool:
        """Return whether it is a delete and no recount."""
        return self.recount_us == DELETED


class Head(NamedTuple):
    """A counter's ``counts`` partition without its window rows."""

    checkpoint: Checkpoint
    settled: Checkpoint
    pending: tuple[Pending, ...] = ()

    def recounts(self, through_us: int, dropped_before_us: int) -> list[int]:
        """Return the windows up to *through_us* that are to be summed again, in order. Windows at
        or before ``settled``, or in a dropped slice, are ignored."""
        wanted = {
            pending.recount_us
            for pending in self.pending
            if self.settled.time_us < pending.recount_us <= through_us
            and pending.recount_us >= dropped_before_us
        }
        return sorted(wanted)


@dataclass(frozen=True, slots=True)
class CounterUpdate:
    """What one rollup batch writes to one counter's partition, all of it or nothing."""

    counter: str
    rows: tuple[WindowRow, ...]
    checkpoint: Checkpoint
    settled: Checkpoint | None = None
    pending_done: tuple[Pending, ...] = ()
    #: That of the counter's marks, if any.
    handle: object = None


class Outcome(StrEnum):
    """The permanent decision about a token. Only a cancel replaces another one."""

    APPLIED = "applied"
    VOID = "void"
    #: It counted until it was cancelled.
    CANCELLED = "cancelled"
    #: It was cancelled before it counted.
    CANCELLED_VOID = "cancelled_void"

    @property
    def is_cancelled(self) -> bool:
        """Return whether the token is cancelled."""
        return self in (Outcome.CANCELLED, Outcome.CANCELLED_VOID)

    @property
    def was_counted(self) -> bool:
        """Return whether the token counts, or did until it was cancelled."""
        return self in (Outcome.APPLIED, Outcome.CANCELLED)

    @classmethod
    def cancelled(cls, *, was_counted: bool) -> Outcome:
        """Return the outcome of a cancel."""
        return cls.CANCELLED if was_counted else cls.CANCELLED_VOID


#: The fingerprint of a decision that agrees with no payload.
OTHER_PAYLOAD: Final = b""


class Decision(NamedTuple):
    """A row of ``resolutions``."""

    outcome: Outcome
    fingerprint: bytes

    @property
    def sight(self) -> Sight:
        """Return what a worker that knows this decision has seen."""
        return Sight.CANCEL if self.outcome.is_cancelled else Sight.DECISION

    def over(self, stored: Decision | None) -> Decision:
        """Return what this decision, of a cancel, leaves in place of *stored*."""
        if stored is None:
            return self
        # A store says OTHER_PAYLOAD of a payload that is not the event's: this one may be.
        is_same = stored.fingerprint in (self.fingerprint, OTHER_PAYLOAD)
        if stored.outcome.is_cancelled or not is_same:
            return stored
        was_counted = stored.outcome.was_counted
        return Decision(Outcome.cancelled(was_counted=was_counted), self.fingerprint)


#: Added to the reserved time of a key that is cancelled: a replacement of that time then fails in
#: every store, and versions of the program that do not know cancels reject it as in the future.
CANCELLED_KEY: Final = 1 << 62


class Reservation(NamedTuple):
    """A generation time to reserve for an arbitrary key."""

    time_us: int
    expires_us: int
    #: How long a stored reservation is kept after its *expires_us*.
    kept_us: int = 0
    #: A stored reservation of this time is replaced even if it has not expired.
    replaces_us: int | None = None

    @property
    def expired_us(self) -> int:
        """Return the largest *expires_us* of stored reservations that have expired."""
        return self.time_us - self.kept_us

    @property
    def lasts_us(self) -> int:
        """Return at least how long it lasts from now on."""
        return max(0, self.expires_us - self.time_us % CANCELLED_KEY)

    def replaces(self, time_us: int, expires_us: int) -> bool:
        """Return whether this replaces a stored reservation with these values."""
        return expires_us <= self.expired_us or time_us == self.replaces_us


@dataclass(frozen=True, slots=True)
class Dataset:
    """A set of event tables that many namespaces share, and the bounds that writers agree on."""

    id: int
    name: str
    retention_us: int
    slice_us: int
    time_bucket_us: int
    event_buckets: int
    write_timeout_us: int
    clock_skew_max_us: int
    #: The upper bound to which event_buckets is raised automatically; if equal, it is never raised.
    event_buckets_max: int = 1


@dataclass(frozen=True, slots=True)
class Slice:
    """The events of one span of time: one table. Its partitioning never changes."""

    start_us: int
    end_us: int
    time_bucket_us: int
    event_buckets: int
    retired_at_us: int | None = None


class Era(NamedTuple):
    """An accept limit and the slice start from which it holds."""

    from_us: int
    accept_limit_us: int


def limit_at(eras: tuple[Era, ...], event_time_us: int) -> int:
    """Return the accept limit of the slice that contains *event_time_us*."""
    for era in reversed(eras):
        if era.from_us <= event_time_us:
            return era.accept_limit_us
    return eras[0].accept_limit_us


@dataclass(frozen=True, slots=True)
class EventRule:
    """What CloudEvents of a type add: *delta* to *counter*, which :mod:`counter.config.event_rules`
    reads from the event."""

    type: str
    counter: str
    delta: int | str = 1


_ANNOUNCED: Final = "announced_eras"


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """The settings of a namespace. Changeable: accept and future limit, payload check, TTLs, rates,
    event rules, bounds."""

    counter_type: CounterType
    dataset: str
    accept_limit_us: int
    future_limit_us: int
    rollup_window_us: int
    shards: int
    payload_check: PayloadCheck
    key_ttl_us: int
    cache_ttl_us: int
    #: Requests that each process accepts per second, from all callers together; 0 for no bound.
    requests_per_s: int = 0
    adds_per_s: int = 0
    event_rules: tuple[EventRule, ...] = ()
    #: What every add of the namespace keeps.
    bounds: Bounds = NO_BOUNDS

    def document(self) -> dict[str, Any]:
        """Return what stores keep as JSON. Without event rules or bounds it names none, because
        versions of the program that do not know them read it, too."""
        document = asdict(self)
        document["bounds"] = {
            name: each for name, each in self.bounds._asdict().items() if each is not None
        }
        for name in ("event_rules", "bounds"):
            if not document[name]:
                del document[name]
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the settings that :meth:`document` returned, read from JSON."""
        read = {
            "counter_type": CounterType(document["counter_type"]),
            "payload_check": PayloadCheck(document["payload_check"]),
            "event_rules": tuple(EventRule(**each) for each in document.get("event_rules", ())),
            "bounds": Bounds(**document.get("bounds", {})),
        }
        kept = {name: value for name, value in document.items() if name != _ANNOUNCED}
        return cls(**{**kept, **read})


@dataclass(frozen=True, slots=True)
class Namespace:
    """A tenant's set of counters. ``id`` is never reused, not even for the same name.

    Adds are accepted by ``eras``, and windows close by ``closing_eras``: the same, except between
    the announcement of another accept limit and the change (:meth:`announced`).
    """

    id: int
    name: str
    settings: NamespaceSettings
    eras: tuple[Era, ...]
    dataset: Dataset
    created_at_us: int
    version: int
    #: Empty if they are ``eras``.
    announced_eras: tuple[Era, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return what stores keep as JSON: the settings, and the announced eras if there are any.
        Versions of the program that do not know them then read nothing, and so close no window."""
        document = self.settings.document()
        if self.announced_eras:
            document[_ANNOUNCED] = self.announced_eras
        return document

    @staticmethod
    def announced_in(document: Mapping[str, Any]) -> tuple[Era, ...]:
        """Return the announced eras of what :meth:`document` returned, read from JSON."""
        return tuple(Era(*era) for era in document.get(_ANNOUNCED, ()))

    @property
    def closing_eras(self) -> tuple[Era, ...]:
        """The accept limits by which windows close: at least those of ``eras``."""
        return self.announced_eras or self.eras

    def accepts_by(self, accept_limit_us: int) -> bool:
        """Return whether this is the latest accept limit, and nothing else was announced."""
        latest = (self.eras[-1], self.closing_eras[-1])
        return all(era.accept_limit_us == accept_limit_us for era in latest)

    def announced(self, accept_limit_us: int, era_from_us: int) -> Namespace:
        """Return the next version, which announces another accept limit from *era_from_us* on: adds
        are accepted by the shorter of that and the present one, and windows close by the longer."""
        return replace(
            self,
            eras=_bounded(self.eras, era_from_us, accept_limit_us, min),
            announced_eras=_bounded(self.closing_eras, era_from_us, accept_limit_us, max),
            version=self.version + 1,
        )

    def changed(self, settings: NamespaceSettings, era_from_us: int) -> Namespace:
        """Return the next version, with *settings*; another accept limit holds from *era_from_us*,
        in place of any that was to hold from then or later."""
        limit_us = settings.accept_limit_us
        eras, closing = self.eras, self.closing_eras
        if not self.accepts_by(limit_us):
            eras = _replaced(eras, era_from_us, limit_us)
            closing = _replaced(closing, era_from_us, limit_us)
        return replace(
            self,
            settings=settings,
            eras=eras,
            announced_eras=() if closing == eras else closing,
            version=self.version + 1,
        )


def _replaced(eras: tuple[Era, ...], from_us: int, limit_us: int) -> tuple[Era, ...]:
    """Return *eras* with one limit from *from_us* on."""
    kept = tuple(era for era in eras if era.from_us < from_us)
    if kept and kept[-1].accept_limit_us == limit_us:
        return kept
    return (*kept, Era(from_us, limit_us))


def _bounded(
    eras: tuple[Era, ...], from_us: int, limit_us: int, bound: Callable[[int, int], int]
) -> tuple[Era, ...]:
    """Return *eras* with each limit from *from_us* on replaced by its *bound* with *limit_us*."""
    bounded = eras
    for start_us in sorted({from_us, *(era.from_us for era in eras if era.from_us > from_us)}):
        bounded = _replaced(bounded, start_us, bound(limit_at(eras, start_us), limit_us))
    return bounded


class TokenBlock(NamedTuple):
    """Sequence numbers for server-issued tokens: *issuer* is the store's own 8 bytes."""

    issuer: bytes
    first: int
    time_us: int


class ClockReading(NamedTuple):
    """How far the store's clock is ahead, plus or minus *error_us*: half the round trip.

    The store's clock is *behind_us* behind the latest instant that the store has decided by.
    """

    offset_us: int
    error_us: int
    behind_us: int = 0


class Guarded(Enum):
    """What the guard has recorded about an event's token."""

    #: Nothing is recorded; an earlier record may have been evicted.
    NEW = "new"
    #: The same payload is recorded. This does not prove that it was written.
    SAME = "same"
    #: Another payload is recorded.
    OTHER = "other"
    #: The guard cannot be reached.
    UNVERIFIED = "unverified"
