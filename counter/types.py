"""The nouns of the system. All times are integers in microseconds since the epoch, UTC."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import NamedTuple


class CounterType(StrEnum):
    """How a namespace counts; see docs/architecture.md for the trade."""

    BEST_EFFORT = "BEST_EFFORT"
    EVENTUAL = "EVENTUAL"
    ACCURATE = "ACCURATE"


class PayloadCheck(StrEnum):
    """How hard the store looks for two payloads under one token."""

    OFF = "off"
    GUARD = "guard"
    STRICT = "strict"


class Accuracy(StrEnum):
    """What a read's count is worth."""

    # An enumeration hashes its name, in Python; one is hashed at every get.
    __hash__ = str.__hash__

    ACCURATE = "accurate"
    EVENTUAL = "eventual"
    BEST_EFFORT = "best_effort"


class Token(NamedTuple):
    """An idempotency token: a nonce of 16 bytes and the client's time."""

    nonce: bytes
    generation_time_us: int


class Event(NamedTuple):
    """One row of the event log. ``(event_time, event_id, item_key)`` is its identity in a counter.

    A tuple and not a dataclass because one is built per add: it is the cheapest immutable record.
    ``atom`` is the fingerprint of the whole item list where the event is part of an atomic add.
    """

    counter: str
    event_time_us: int
    event_id: bytes
    item_key: int
    delta: int
    clear: bool = False
    atom: bytes | None = None

    def same_payload(self, other: Event) -> bool:
        """Whether the two ask for the same thing; a clear ignores its delta."""
        return (
            self.clear == other.clear
            and self.atom == other.atom
            and (self.clear or self.delta == other.delta)
        )


class Written(Enum):
    """What the store did with one event of an append."""

    NEW = "new"
    REPLAYED = "replayed"
    CONFLICT = "conflict"
    #: The store cannot tell a new row from one that was there.
    UNTOLD = "untold"
    #: The event was past its accept limit at the last check: nothing was written.
    LATE = "late"


class Mark(NamedTuple):
    """A durable note that *window* of *counter* holds something new.

    ``recount_us`` is 0 for an add's mark, else the start of the window to be counted anew.
    """

    window_us: int
    counter: str
    recount_us: int = 0


class AtomicMark(NamedTuple):
    """A mark that carries a whole atomic add, so that a worker can finish what a crash left."""

    window_us: int
    events: tuple[Event, ...]


class Fold(NamedTuple):
    """A run of events as a function on a count: start again from 0 where *cleared*, add *total*."""

    cleared: bool
    total: int


class WindowRow(NamedTuple):
    """The fold of one window's events, a pure function of them; *window_us* is its start."""

    window_us: int
    cleared: bool
    total: int


class Checkpoint(NamedTuple):
    """A count that holds every event with ``event_time <= time_us``."""

    time_us: int
    count: int  # type: ignore[assignment]  # nobody asks for a tuple's count()


class Pending(NamedTuple):
    """A recount of window *recount_us* that window *window_us*'s rollup will have done."""

    recount_us: int
    window_us: int


class Head(NamedTuple):
    """A counter's ``counts`` partition without its window rows."""

    checkpoint: Checkpoint
    settled: Checkpoint
    pending: tuple[Pending, ...] = ()


@dataclass(frozen=True, slots=True)
class CounterUpdate:
    """What one rollup batch writes to one counter's partition, all of it or nothing."""

    counter: str
    rows: tuple[WindowRow, ...]
    checkpoint: Checkpoint
    settled: Checkpoint | None = None
    pending_done: tuple[Pending, ...] = ()


class Outcome(StrEnum):
    """What was decided, once and for ever, about a late token."""

    APPLIED = "applied"
    VOID = "void"


class Decision(NamedTuple):
    """A row of ``resolutions``."""

    outcome: Outcome
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Dataset:
    """A set of event tables that many namespaces share, and the bounds its writers agree on."""

    id: int
    name: str
    retention_us: int
    slice_us: int
    time_bucket_us: int
    event_buckets: int
    write_timeout_us: int
    clock_skew_max_us: int
    #: Up to where event_buckets is raised by itself; no more than that, and it never is.
    event_buckets_max: int = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """How a dataset's data are replicated, and how many replicas a write or a read waits for.

    ``replication`` is the number of replicas by data center; ("", n) for all of them alike. The
    consistencies are Cassandra's, by name. All processes run in ``datacenter`` unless it is empty.
    """

    replication: tuple[tuple[str, int], ...] = (("", 1),)
    write_consistency: str = "LOCAL_QUORUM"
    read_consistency: str = "LOCAL_QUORUM"
    datacenter: str = ""


@dataclass(frozen=True, slots=True)
class Slice:
    """The events of one span of time: one table. Its partitioning never changes."""

    start_us: int
    end_us: int
    time_bucket_us: int
    event_buckets: int
    retired_at_us: int | None = None


class Era(NamedTuple):
    """An accept limit and the slice start it holds from."""

    from_us: int
    accept_limit_us: int


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """What a namespace's owner sets. Changeable: accept and future limit, payload check, TTLs."""

    counter_type: CounterType
    dataset: str
    accept_limit_us: int
    future_limit_us: int
    rollup_window_us: int
    shards: int
    payload_check: PayloadCheck
    key_ttl_us: int
    cache_ttl_us: int
    #: What each process takes for it in a second, from all callers together; 0 for no bound.
    requests_per_s: int = 0
    adds_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Namespace:
    """A tenant's set of counters. ``id`` is never used again, not even for the same name."""

    id: int
    name: str
    settings: NamespaceSettings
    eras: tuple[Era, ...]
    dataset: Dataset
    created_at_us: int
    version: int


class TokenBlock(NamedTuple):
    """Sequence numbers for server-issued tokens: *issuer* is the store's own 8 bytes."""

    issuer: bytes
    first: int
    time_us: int


class ClockReading(NamedTuple):
    """How far the store's clock is ahead, give or take *error_us*: half the round trip."""

    offset_us: int
    error_us: int


class Guarded(Enum):
    """What the guard says of an event's token."""

    #: Nothing was noted; it may have been forgotten.
    NEW = "new"
    #: The same payload was noted. No proof that it was written.
    SAME = "same"
    #: Another payload was noted.
    OTHER = "other"
    #: The guard cannot be reached.
    UNTOLD = "untold"


class Scope(IntEnum):
    """What a key allows; each holds the ones before it."""

    READ = 1
    WRITE = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is on record. Rates are per second and process; 0 is any number, and None what
    the settings say.

    ``digest`` is the SHA-256 of the secret. ``namespaces`` are names, beginnings of names that end
    in ``*``, or ``*``. ``replaced_by`` is the id of the key that this one was rotated to.
    """

    id: str
    label: str
    digest: bytes = field(repr=False)
    namespaces: tuple[str, ...]
    scope: Scope
    created_at_us: int
    expires_at_us: int | None = None
    revoked_at_us: int | None = None
    #: To about two minutes. Not a part of what the key is: it does not count when two are compared.
    last_used_us: int | None = field(default=None, compare=False)
    requests_per_s: float | None = None
    adds_per_s: float | None = None
    reservations_per_s: float | None = None
    resolutions_per_s: float | None = None
    replaced_by: str | None = None

    def ends_at_us(self) -> int | None:
        """The instant from which it is no longer valid; None where there is none."""
        ends = [each for each in (self.expires_at_us, self.revoked_at_us) if each is not None]
        return min(ends, default=None)

    def is_valid_at(self, now_us: int) -> bool:
        """Whether it is neither revoked nor expired."""
        expires_us = self.expires_at_us
        return self.revoked_at_us is None and (expires_us is None or now_us < expires_us)
