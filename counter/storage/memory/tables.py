"""Define the data of the in-memory store, in the shapes of a real one: slices, partitions, rows.

Everything iterates in sorted or insertion order, so that one seed gives one run.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from counter.capabilities import PartitionSize
from counter.errors import NamespaceUnknownError
from counter.ports import Clock
from counter.types import (
    AtomicMark,
    Checkpoint,
    Dataset,
    Decision,
    Event,
    Mark,
    Namespace,
    Pending,
    Slice,
    WindowRow,
)
from counter.windows import event_bucket_of, slice_of, window_of

#: (event time, event id, item key): an event's clustering key.
Identity = tuple[int, bytes, int]
#: (counter, time bucket, event bucket): a partition of one namespace in one slice.
PartitionKey = tuple[str, int, int]
#: (scope, event time, event id).
TokenKey = tuple[str, int, bytes]

_T = TypeVar("_T", str, Mark, Identity)


def insert_once(ordered: list[_T], item: _T) -> None:
    """Insert *item* into the sorted list *ordered*, unless it exists."""
    position = bisect_left(ordered, item)
    if position == len(ordered) or ordered[position] != item:
        ordered.insert(position, item)


def token_of(events: Sequence[Event]) -> TokenKey:
    """Return the token that all of *events* have."""
    first = events[0]
    return first.scope, first.event_time_us, first.event_id


def identity_of(event: Event) -> Identity:
    """Return the part of *event* that is the same in every retry."""
    return (event.event_time_us, event.event_id, event.item_key)


class Partition:
    """Rows by identity; a row of None is a tombstone."""

    def __init__(self) -> None:
        self._rows: dict[Identity, Event | None] = {}
        self._order: list[Identity] = []

    def get(self, event: Event) -> Event | None:
        """Return the visible row of the identity of *event*."""
        return self._rows.get(identity_of(event))

    def insert(self, event: Event) -> None:
        """Write *event* unless its identity exists or was voided, which hides the write."""
        identity = identity_of(event)
        if identity not in self._rows:
            self._rows[identity] = event
            insort(self._order, identity)

    def void(self, event: Event) -> None:
        """Leave a tombstone."""
        identity = identity_of(event)
        self._rows[identity] = None
        insert_once(self._order, identity)

    def between(self, from_us: int, to_us: int) -> Iterator[Event]:
        """Return the visible rows of ``[from_us, to_us)``, earliest first."""
        low = bisect_left(self._order, from_us, key=lambda identity: identity[0])
        high = bisect_left(self._order, to_us, key=lambda identity: identity[0])
        for identity in self._order[low:high]:
            event = self._rows[identity]
            if event is not None:
                yield event


@dataclass(slots=True)
class DatasetTables:
    """A dataset's slices, in order of start, and each slice's table by namespace id."""

    dataset: Dataset
    slices: list[Slice] = field(default_factory=list)
    tables: dict[int, dict[int, dict[PartitionKey, Partition]]] = field(default_factory=dict)
    dropped_before_us: int = 0
    #: By (start of the slice, whether it was observed), with the expiry.
    sizes: dict[tuple[int, bool], tuple[PartitionSize, int]] = field(default_factory=dict)

    def partition(self, namespace_id: int, event: Event) -> Partition:
        """Return the partition of *event*. Raises SliceMissingError."""
        each = slice_of(self.slices, event.event_time_us)
        key = (
            event.counter,
            window_of(event.event_time_us, each.time_bucket_us),
            event_bucket_of(event.event_id, each.event_buckets),
        )
        table = self.tables[each.start_us].setdefault(namespace_id, {})
        return table.setdefault(key, Partition())

    def between(
        self, namespace_id: int, counter: str, from_us: int, to_us: int | None = None
    ) -> Iterator[Event]:
        """Return a counter's events of ``[from_us, to_us)``, or all from *from_us* on.

        It reads the partitions as a reader of a real store must: by computing their keys.
        """
        for each in self.slices:
            low = max(from_us, each.start_us)
            high = each.end_us if to_us is None else min(to_us, each.end_us)
            table = self.tables[each.start_us].get(namespace_id)
            if low >= high or table is None:
                continue
            first = window_of(low, each.time_bucket_us)
            for time_bucket in range(first, high, each.time_bucket_us):
                for event_bucket in range(each.event_buckets):
                    partition = table.get((counter, time_bucket, event_bucket))
                    if partition is not None:
                        yield from partition.between(low, high)


@dataclass(slots=True)
class Counts:
    """A counter's ``counts`` partition; each window row with the instant of its batch."""

    rows: dict[int, tuple[int, WindowRow]] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    settled: Checkpoint | None = None
    pending: dict[Pending, None] = field(default_factory=dict)


@dataclass(slots=True)
class Shard:
    """A shard's watermark and the marks of its counters, dirty marks in order."""

    watermark_us: int
    marks: list[Mark] = field(default_factory=list)
    atomic_marks: dict[AtomicMark, None] = field(default_factory=dict)


@dataclass(slots=True)
class Space:
    """The data of one namespace id, except its events."""

    dataset_id: int
    shards: list[Shard]
    #: The names that are listed, in order; of each name the latest event's time that listed it, and
    #: the time of its latest delete: the later of the two is in effect, as of two writes to a cell.
    names: list[str] = field(default_factory=list)
    listed_us: dict[str, int] = field(default_factory=dict)
    deleted_us: dict[str, int] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    decisions: dict[TokenKey, Decision] = field(default_factory=dict)
    #: nonce -> (generation time, expiry)
    keys: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def note_name(self, counter: str, time_us: int, *, is_delete: bool = False) -> None:
        """List *counter* as of *time_us*, or take it off the list."""
        times = self.deleted_us if is_delete else self.listed_us
        times[counter] = max(time_us, times.get(counter, time_us))
        if self.listed_us.get(counter, 0) > self.deleted_us.get(counter, -1):
            insert_once(self.names, counter)
        elif counter in self.listed_us and counter in self.names:
            self.names.remove(counter)

    def counts_of(self, counter: str) -> Counts:
        """Return the counter's partition; create it if necessary."""
        return self.counts.setdefault(counter, Counts())


class Tables:
    """The state that the parts of the in-memory store share."""

    def __init__(self, clock: Clock, datasets: Sequence[Dataset]) -> None:
        self.clock = clock
        self.states = {dataset.id: DatasetTables(dataset) for dataset in datasets}
        self.namespaces: dict[str, Namespace] = {}
        self.spaces: dict[int, Space] = {}
        #: Namespaces whose events are still there.
        self.deleted: list[tuple[int, Dataset]] = []

    def state_of(self, dataset: Dataset) -> DatasetTables:
        """Return the state of *dataset*."""
        return self.states[dataset.id]

    def partitions(self, namespace: Namespace, events: Sequence[Event]) -> list[Partition]:
        """Return the partition of each event. Raises SliceMissingError, before anything is
        written."""
        self.space(namespace)
        state = self.state_of(namespace.dataset)
        return [state.partition(namespace.id, event) for event in events]

    def space(self, namespace: Namespace) -> Space:
        """Return the data of *namespace*. Raises NamespaceUnknownError."""
        space = self.spaces.get(namespace.id)
        if space is None:
            raise NamespaceUnknownError(
                f"namespace {namespace.name!r} (id {namespace.id}) was deleted"
            )
        return space
