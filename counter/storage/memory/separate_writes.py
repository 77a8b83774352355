"""Store marks of adds, rewrites and voids in memory: what a store without transactions needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from counter.errors import UnavailableError
from counter.storage.memory.tables import Tables, insert_once
from counter.types import AtomicMark, Event, Mark, Namespace, Span
from counter.windows import shard_of, slice_of


class MemorySeparateWrites:
    """:class:`counter.ports.SeparateWrites`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        space = self._tables.space(namespace)
        slices = self._tables.state_of(namespace.dataset).slices
        for mark in marks:
            slice_of(slices, mark.window_us)
        for mark in marks:
            shard = shard_of(mark.counter, len(space.shards))
            insert_once(space.shards[shard].marks, mark)
            space.note_name(mark.counter, mark.window_us)
        return {}

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        space = self._tables.space(namespace)
        slices = self._tables.state_of(namespace.dataset).slices
        for event in mark.events:
            slice_of(slices, event.event_time_us)
        for event in mark.events:
            shard = shard_of(event.counter, len(space.shards))
            space.shards[shard].atomic_marks[mark] = None
            space.note_name(event.counter, event.event_time_us)

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, span: Span
    ) -> Sequence[AtomicMark]:
        marks = self._tables.space(namespace).shards[shard].atomic_marks
        found = (mark for mark in marks if span.from_us <= mark.window_us < span.to_us)
        return sorted(found, key=lambda mark: mark.window_us)

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        partitions = self._tables.partitions(namespace, events)
        for event, partition in zip(events, partitions, strict=True):
            partition.insert(event)

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        partitions = self._tables.partitions(namespace, events)
        for event, partition in zip(events, partitions, strict=True):
            partition.void(event)

    async def unlist(self, namespace: Namespace, counter: str, deleted_us: int) -> None:
        self._tables.space(namespace).note_name(counter, deleted_us, is_delete=True)
