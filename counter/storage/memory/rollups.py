"""Store marks, watermarks and the ``counts`` partitions in memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice

from counter.storage.memory.tables import Counts, Shard, Tables, insert_once
from counter.types import (
    AtomicMark,
    Checkpoint,
    CounterUpdate,
    DirtyMark,
    DirtyPage,
    Head,
    Mark,
    Namespace,
    Pending,
    Span,
    WindowRow,
)
from counter.windows import shard_of


class MemoryRollups:
    """:class:`counter.ports.RollupStore`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def fence(self) -> int:
        return self._tables.clock.now_us()

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        return [shard.watermark_us for shard in self._tables.space(namespace).shards]

    async def dirty(
        self, namespace: Namespace, shard: int, span: Span, limit: int, rest: object = None
    ) -> DirtyPage:
        marks = self._tables.space(namespace).shards[shard].marks
        first = bisect_left(marks, span.from_us, key=_window)
        if isinstance(rest, Mark):
            first = bisect_right(marks, rest)
        end = bisect_left(marks, span.to_us, key=_window)
        stop = min(end, first + limit)
        found = [DirtyMark(*mark) for mark in islice(marks, first, stop)]
        return DirtyPage(found, marks[stop - 1] if stop < end else None)

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], span: Span
    ) -> Collection[int]:
        space = self._tables.space(namespace)

        def holds(each: Shard) -> bool:
            marks: Iterable[Mark | AtomicMark] = chain(each.marks, each.atomic_marks)
            return any(span.from_us <= mark.window_us < span.to_us for mark in marks)

        return [shard for shard in shards if holds(space.shards[shard])]

    async def heads(
        self, namespace: Namespace, counters: Sequence[str], handles: Sequence[object] | None = None
    ) -> Sequence[Head | None]:
        partitions = self._tables.space(namespace).counts
        return [_head(partitions.get(counter)) for counter in counters]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Sequence[WindowRow]]:
        partitions = self._tables.space(namespace).counts
        answer = []
        for counter in counters:
            counts = partitions.get(counter, Counts())
            rows = (row for _, row in counts.rows.values())
            answer.append(sorted(each for each in rows if span.from_us <= each[0] < span.to_us))
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


class MemoryRecounts:
    """:class:`counter.ports.RecountStore`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def write_pending(
        self, namespace: Namespace, pending: Sequence[tuple[str, Pending]]
    ) -> None:
        space = self._tables.space(namespace)
        for counter, each in pending:
            space.counts_of(counter).pending[each] = None

    async def write_marks(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        space = self._tables.space(namespace)
        for mark in marks:
            shard = shard_of(mark.counter, len(space.shards))
            insert_once(space.shards[shard].marks, mark)


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
