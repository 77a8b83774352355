"""Store marks, watermarks and the ``counts`` partitions in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice

from counter.errors import UnavailableError
from counter.partitions import shard_of, slice_of
from counter.storage.memory.tables import Counts, Shard, Tables, insert_once
from counter.types import (
    AtomicMark,
    Checkpoint,
    CounterUpdate,
    Head,
    Mark,
    Namespace,
    Pending,
    WindowRow,
)


class MemoryRollups:
    """:class:`counter.ports.RollupStore`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        space, slices = (
            self._tables.space(namespace),
            self._tables.state_of(namespace.dataset).slices,
        )
        for mark in marks:
            if mark.recount_us == 0:
                slice_of(slices, mark.window_us)
        for mark in marks:
            shard = shard_of(mark.counter, len(space.shards))
            insert_once(space.shards[shard].marks, mark)
            if mark.recount_us == 0:
                space.note_name(mark.counter, mark.window_us)
        return {}

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        space, slices = (
            self._tables.space(namespace),
            self._tables.state_of(namespace.dataset).slices,
        )
        for event in mark.events:
            slice_of(slices, event.event_time_us)
        for event in mark.events:
            shard = shard_of(event.counter, len(space.shards))
            space.shards[shard].atomic_marks[mark] = None
            space.note_name(event.counter, event.event_time_us)

    async def fence(self) -> int:
        return self._tables.clock.now_us()

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        return [shard.watermark_us for shard in self._tables.space(namespace).shards]

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
        marks = self._tables.space(namespace).shards[shard].marks
        first = bisect_right(marks, after_us, key=_window)
        if start is not None:
            first = max(first, bisect_right(marks, start))
        stop = bisect_right(marks, through_us, key=_window)
        return list(islice(marks, first, min(stop, first + limit)))

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> Sequence[AtomicMark]:
        marks = self._tables.space(namespace).shards[shard].atomic_marks
        found = (mark for mark in marks if after_us < mark.window_us <= through_us)
        return sorted(found, key=_window)

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], *, after_us: int, through_us: int
    ) -> Collection[int]:
        space = self._tables.space(namespace)

        def holds(each: Shard) -> bool:
            marks: Iterable[Mark | AtomicMark] = chain(each.marks, each.atomic_marks)
            return any(after_us < mark.window_us <= through_us for mark in marks)

        return [shard for shard in shards if holds(space.shards[shard])]

    async def heads(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[Head | None]:
        partitions = self._tables.space(namespace).counts
        return [_head(partitions.get(counter)) for counter in counters]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], *, after_us: int, through_us: int
    ) -> Sequence[Sequence[WindowRow]]:
        partitions = self._tables.space(namespace).counts
        answer = []
        for counter in counters:
            counts = partitions.get(counter, Counts())
            rows = (row for _, row in counts.rows.values())
            answer.append(sorted(row for row in rows if after_us < row.window_us <= through_us))
        return answer

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        space = self._tables.space(namespace)
        for update in updates:
            _apply(space.counts_of(update.counter), update, through_us)
            for pending in update.pending_done:
                if pending.is_delete:
                    space.note_name(update.counter, pending.window_us + 1)

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        space = self._tables.space(namespace)
        for shard in shards:
            each = space.shards[shard]
            each.watermark_us = max(each.watermark_us, through_us)

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        each = self._tables.space(namespace).shards[shard]
        del each.marks[: bisect_right(each.marks, through_us, key=_window)]
        for mark in [mark for mark in each.atomic_marks if mark.window_us <= through_us]:
            del each.atomic_marks[mark]

    async def leave_pending(
        self, namespace: Namespace, recounts: Sequence[tuple[str, Pending]]
    ) -> None:
        space = self._tables.space(namespace)
        for counter, pending in recounts:
            space.counts_of(counter).pending[pending] = None

    async def unlist(self, namespace: Namespace, counter: str, deleted_us: int) -> None:
        self._tables.space(namespace).note_name(counter, deleted_us, is_delete=True)


def _window(mark: Mark | AtomicMark) -> int:
    return mark.window_us


def _head(counts: Counts | None) -> Head | None:
    """Return the partition without its rows."""
    if counts is None or not (counts.checkpoint or counts.settled or counts.pending):
        return None
    nothing = Checkpoint(0, 0)
    pending = tuple(sorted(counts.pending))
    return Head(counts.checkpoint or nothing, counts.settled or nothing, pending)


def _later(stored: Checkpoint | None, written: Checkpoint) -> Checkpoint:
    """Return the later of two cells: their time is their write timestamp."""
    return stored if stored is not None and stored.time_us > written.time_us else written


def _apply(counts: Counts, update: CounterUpdate, through_us: int) -> None:
    counts.checkpoint = _later(counts.checkpoint, update.checkpoint)
    if update.settled is not None:
        counts.settled = _later(counts.settled, update.settled)
    for row in update.rows:
        stored_us, _ = counts.rows.get(row.window_us, (through_us, row))
        if stored_us <= through_us:
            counts.rows[row.window_us] = (through_us, row)
    if counts.settled is not None:
        for window_us in [each for each in counts.rows if each <= counts.settled.time_us]:
            del counts.rows[window_us]
    for pending in update.pending_done:
        counts.pending.pop(pending, None)
