"""Marks, watermarks and counts: pending work of the rollup, its progress, and its results.

A mark's write timestamp is the time of its writing; a deletion after its window is closed is later
by any clock. Marks left by a crash, or that landed late, are at or before the watermark, where
they are never read, and expire. Their time to live is far longer than any outage of the rollup,
because only the mark records that its window has events.
"""

from __future__ import annotations

import random
import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from counter.errors import UnavailableError, invariant
from counter.limits import DAY, ROLLUP_WINDOW_MIN_US, SECOND
from counter.storage.cassandra.session import CassandraSession, Lane, batch_of, unavailable
from counter.storage.cassandra.tables import BIGINT, BLOB, INT, TEXT, TINYINT, bound
from counter.storage.shared.directory import Coalesced, unknown
from counter.types import (
    AtomicMark,
    Checkpoint,
    CounterUpdate,
    DirtyMark,
    DirtyPage,
    Event,
    Head,
    Mark,
    Namespace,
    Pending,
    Span,
    WindowRow,
    atom_of,
)
from counter.windows import shard_of

_TIME_BYTES: Final = 8
_ITEMS_VERSION: Final = 1
#: version, number of items
_ITEMS_HEAD: Final = struct.Struct(">BH")
#: delta, item key, bytes of the counter's name, whether it is a clear
_ITEM: Final = struct.Struct(">qIH?")


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Pack the time, then the count as big-endian signed bytes."""
    return checkpoint.time_us.to_bytes(_TIME_BYTES, "big") + _pack_count(checkpoint.count)


def unpack_checkpoint(cell: bytes) -> Checkpoint:
    """Unpack the result of :func:`pack_checkpoint`."""
    return Checkpoint(int.from_bytes(cell[:_TIME_BYTES], "big"), _unpack_count(cell[_TIME_BYTES:]))


def pack_row(row: WindowRow) -> bytes:
    """Pack whether the window has a clear, then its sum. Its start is in the row's key."""
    return (b"\x01" if row.cleared else b"\x00") + _pack_count(row.total)


def unpack_row(window_us: int, cell: bytes) -> WindowRow:
    """Unpack the result of :func:`pack_row` for the window that starts at *window_us*."""
    return WindowRow(window_us, cell[0] == 1, _unpack_count(cell[1:]))


def pack_items(events: Sequence[Event]) -> bytes:
    """Pack the items of one atomic add; their common token is in the row's key."""
    parts = [_ITEMS_HEAD.pack(_ITEMS_VERSION, len(events))]
    for event in events:
        name = event.counter.encode()
        parts += (_ITEM.pack(event.delta, event.item_key, len(name), event.clear), name)
    return b"".join(parts)


def unpack_items(
    cell: bytes, event_time_us: int, event_id: bytes, atom: bytes | None
) -> tuple[Event, ...]:
    """Return the events of the result of :func:`pack_items` with their common token."""
    version, count = _ITEMS_HEAD.unpack_from(cell)
    invariant(version == _ITEMS_VERSION, f"an atomic mark of version {version} is from a later one")
    at = _ITEMS_HEAD.size
    events = []
    for _ in range(count):
        delta, item_key, name_bytes, clear = _ITEM.unpack_from(cell, at)
        at += _ITEM.size
        counter = cell[at : at + name_bytes].decode()
        at += name_bytes
        events.append(Event(counter, event_time_us, event_id, item_key, delta, clear, atom))
    return tuple(events)


def _pack_count(count: int) -> bytes:
    return count.to_bytes(count.bit_length() // 8 + 1, "big", signed=True)


def _unpack_count(packed: bytes) -> int:
    return int.from_bytes(packed, "big", signed=True)


GARBAGE_TTL_S: Final = 2 * 365 * DAY // SECOND

_WINDOW_IS: Final = "namespace = ? AND shard = ? AND window_start = ?"
_WINDOW_IN: Final = "namespace = ? AND shard = ? AND window_start IN ?"
_MARK: Final = (
    "INSERT INTO {keyspace}.dirty (namespace, shard, window_start, counter, recount)"
    f" VALUES (?, ?, ?, ?, ?) USING TTL {GARBAGE_TTL_S} AND TIMESTAMP ?"
)
_MARK_ATOMIC: Final = (
    "INSERT INTO {keyspace}.atomic_marks"
    " (namespace, shard, window_start, event_time, event_id, atom, items)"
    f" VALUES (?, ?, ?, ?, ?, ?, ?) USING TTL {GARBAGE_TTL_S} AND TIMESTAMP ?"
)
_NAME: Final = (
    "INSERT INTO {keyspace}.names (namespace, bucket, counter) VALUES (?, ?, ?) USING TIMESTAMP ?"
)
_UNLIST: Final = (
    "DELETE FROM {keyspace}.names USING TIMESTAMP ? WHERE namespace = ? AND bucket = ?"
    " AND counter = ?"
)
_MARK_PACKERS: Final = (BIGINT, INT, BIGINT, TEXT, BIGINT, BIGINT)
_NAME_PACKERS: Final = (BIGINT, INT, TEXT, BIGINT)
_COLUMNS: Final = "SELECT window_start, counter, recount FROM {keyspace}.dirty"
_DIRTY: Final = f"{_COLUMNS} WHERE {_WINDOW_IS} AND (counter, recount) > (?, ?) LIMIT ?"
_MARKED: Final = tuple(
    f"SELECT window_start FROM {{keyspace}}.{table} WHERE {_WINDOW_IN} PER PARTITION LIMIT 1"
    for table in ("dirty", "atomic_marks")
)
_ATOMIC: Final = (
    "SELECT window_start, event_time, event_id, atom, items FROM {keyspace}.atomic_marks"
    f" WHERE {_WINDOW_IN}"
)
_DELETES: Final = tuple(
    f"DELETE FROM {{keyspace}}.{table} USING TIMESTAMP ? WHERE {_WINDOW_IS}"
    for table in ("dirty", "atomic_marks")
)
_WATERMARKS: Final = "SELECT through FROM {keyspace}.watermarks WHERE namespace = ?"
_ADVANCE: Final = (
    "INSERT INTO {keyspace}.watermarks (namespace, shard, through) VALUES (?, ?, ?)"
    " USING TIMESTAMP ?"
)

#: The maximum of remembered counters whose names are listed; forgetting one is safe.
_NAMES_MAX: Final = 200_000
#: Windows that one statement names.
_WINDOWS_MAX: Final = 64
#: Sorts before all counters of a window, because no name is empty.
_FIRST: Final = ("", 0)
#: A process that drops marks of a shard for the first time searches this many windows for marks
#: that a crashed process rolled up and did not drop.
_LEFT_BEHIND: Final = 64
#: Shards for which that is done concurrently. A process that takes over thousands of shards must
#: not query all of them at once, nor delay their rollup.
_LOOKS_AT_ONCE: Final = 4
#: Windows of a shard whose marks are deleted at once.
_DROPPED_AT_ONCE: Final = 32


def _window(mark: AtomicMark) -> int:
    return mark.window_us


#: Kinds of rows, in their order.
CHECKPOINT: Final = 0
PENDING: Final = 1
SETTLED: Final = 2
WINDOW: Final = 3

_INSERT: Final = (
    "INSERT INTO {keyspace}.counts (namespace, counter, kind, t, u, cell)"
    " VALUES (?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_PACKERS: Final = (BIGINT, TEXT, TINYINT, BIGINT, BIGINT, BLOB, BIGINT)
_DELETE: Final = (
    "DELETE FROM {keyspace}.counts USING TIMESTAMP ?"
    " WHERE namespace = ? AND counter = ? AND kind = ? AND t = ? AND u = ?"
)
_DELETE_ROWS: Final = (
    "DELETE FROM {keyspace}.counts USING TIMESTAMP ?"
    f" WHERE namespace = ? AND counter = ? AND kind = {WINDOW} AND t <= ?"
)
#: Of one counter, which is routed to its replicas, and of many.
_HEADS: Final = tuple(
    f"SELECT counter, kind, t, u, cell FROM {{keyspace}}.counts WHERE namespace = ?"
    f" AND counter {of} AND kind < {WINDOW}"
    for of in ("= ?", "IN ?")
)
#: Reads the settled fold and the rows after it together, so that they are consistent.
_ROWS: Final = tuple(
    f"SELECT counter, kind, t, cell FROM {{keyspace}}.counts WHERE namespace = ? AND counter {of}"
    f" AND (kind, t) >= ({SETTLED}, 0) AND (kind, t) < ({WINDOW}, ?)"
    for of in ("= ?", "IN ?")
)

#: Counters that one statement reads.
_READ_TOGETHER: Final = 64
#: Counters, and rows of theirs, that go out in one statement; each counter is written as one
#: nevertheless. Servers warn of more than ten partitions and of 5 KiB, and reject 50 KiB; a single
#: partition may be of any size.
_WRITTEN_TOGETHER: Final = 10
_ROWS_TOGETHER: Final = 40
_RANDOM_US: Final = 1_000
_NOTHING: Final = Checkpoint(0, 0)
#: The number of calls whose random part is remembered.
_DRAWN_MAX: Final = 1_000

_T = TypeVar("_T")

invariant(_RANDOM_US < ROLLUP_WINDOW_MIN_US, "a batch's timestamps lie before the next batch's")


class CassandraRollups:
    """:class:`counter.ports.RollupStore`: marks, watermarks and the ``counts`` partitions."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        self._listed: OrderedDict[tuple[int, str], None] = OrderedDict()
        #: By namespace id and shard: windows with marks that are not dropped yet.
        self._seen: dict[tuple[int, int], set[int]] = {}
        self._has_dropped: set[tuple[int, int]] = set()
        self._looks = 0
        self._watermarks: dict[int, Coalesced[Sequence[int]]] = {}
        self._drawn: OrderedDict[tuple[int, int, str], int] = OrderedDict()

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        for window_us in {mark.window_us for mark in marks}:
            await self._session.slice_of(namespace.dataset, window_us)
        rows = await _rows_of(self._session, namespace, marks)
        times: dict[str, int] = {}
        for mark in marks:
            time_us = mark.window_us
            times[mark.counter] = max(time_us, times.get(mark.counter, time_us))
        errors, unlisted = await self._write_listed(namespace, rows, times)
        failed: dict[Mark, UnavailableError] = {}
        for mark, of_row in zip(marks, errors, strict=True):
            error = of_row or unlisted.get(mark.counter)
            if error is not None:
                failed[mark] = error
        return failed

    def _list(self, name: tuple[int, str]) -> None:
        """Remember that *name* is listed."""
        self._listed[name] = None
        while len(self._listed) > _NAMES_MAX:
            self._listed.popitem(last=False)

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        dataset, events = namespace.dataset, mark.events
        for time_us in {event.event_time_us for event in events}:
            await self._session.slice_of(dataset, time_us)
        insert = await self._session.to_write(dataset, _MARK_ATOMIC)
        first, items = events[0], pack_items(events)
        token = (first.event_time_us, first.event_id, mark.stored_atom)
        rows: list[tuple[Lane, Any]] = []
        for shard in {shard_of(event.counter, namespace.settings.shards) for event in events}:
            lane = (dataset.write_timeout_us, "atomic_marks", namespace.id, shard, mark.window_us)
            values = (*lane[2:], *token, items, self._session.stamp())
            rows.append((lane, insert.bind(values)))
        self._session.tally.marks["atomic"] += len(rows)
        errors, unlisted = await self._write_listed(
            namespace, rows, {event.counter: event.event_time_us for event in events}
        )
        for error in (*errors, *unlisted.values()):
            if error is not None:
                raise error

    async def _write_listed(
        self, namespace: Namespace, rows: Sequence[tuple[Lane, Any]], counters: Mapping[str, int]
    ) -> tuple[list[UnavailableError | None], Mapping[str, UnavailableError]]:
        """Write *rows*, and with them the names of those *counters* that may not be listed yet.
        Return the error of each row, and those of names.

        *counters* has a time that is not later than the event. It is the write timestamp of the
        name: a delete is written at its own time, so it hides only what was listed earlier.
        """
        dataset, listed = namespace.dataset, self._listed
        new = {name: at for name, at in counters.items() if (namespace.id, name) not in listed}
        names: list[tuple[Lane, Any]] = []
        if new:
            insert = await self._session.to_write(dataset, _NAME)
            for counter, time_us in new.items():
                bucket = shard_of(counter, namespace.settings.shards)
                lane = (dataset.write_timeout_us, "names", namespace.id, bucket)
                values = (namespace.id, bucket, counter, time_us)
                names.append((lane, bound(insert, _NAME_PACKERS, values)))
        errors = [unavailable(each) for each in await self._session.rows.put_all([*rows, *names])]
        unlisted: dict[str, UnavailableError] = {}
        for counter, error in zip(new, errors[len(rows) :], strict=True):
            if error is None:
                self._list((namespace.id, counter))
            else:
                unlisted[counter] = error
        return errors[: len(rows)], unlisted

    async def fence(self) -> int:
        return self._session.clock.now_us()

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        read = self._watermarks.get(namespace.id)
        if read is None:

            async def read_now() -> Sequence[int]:
                select = await self._session.to_read(namespace.dataset, _WATERMARKS)
                rows = await self._session.connection.one(select.bind((namespace.id,)))
                if len(rows) < namespace.settings.shards:
                    raise unknown(namespace)
                return [through_us for (through_us,) in rows]

            read = self._watermarks[namespace.id] = Coalesced(read_now)
        return await read()

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        insert = await self._session.to_write(namespace.dataset, _ADVANCE)
        await self._session.connection.rows(
            [insert.bind((namespace.id, shard, through_us, through_us)) for shard in shards]
        )

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], span: Span
    ) -> Collection[int]:
        """Return all of *shards*, because each window of a shard is a separate partition."""
        return shards

    async def dirty(
        self, namespace: Namespace, shard: int, span: Span, limit: int, rest: object = None
    ) -> DirtyPage:
        marks: list[DirtyMark] = []
        position = _FIRST
        if isinstance(rest, DirtyMark):
            span = Span(rest.window_us, span.to_us)
            position = (rest.counter, rest.recount_us)
        windows: Sequence[int] = self._windows(namespace, span)
        select = await self._session.to_read(namespace.dataset, _DIRTY)
        width = 1
        while windows and len(marks) < limit:
            some, windows = windows[:width], windows[width:]
            # For a single window the query would not pay.
            if width > 1:
                some = await self._marked(namespace, shard, some, _MARKED[:1])
            for window_us in some:
                left = limit - len(marks)
                if left:
                    values = (namespace.id, shard, window_us, *position, left)
                    rows = await self._session.connection.one(select.bind(values))
                    marks += [DirtyMark(*row) for row in rows]
                position = _FIRST
            width = min(2 * width, _WINDOWS_MAX)
        self._note_seen(namespace, shard, marks)
        return DirtyPage(marks, marks[-1] if len(marks) == limit else None)

    async def _marked(
        self, namespace: Namespace, shard: int, windows: Sequence[int], tables: Sequence[str]
    ) -> Sequence[int]:
        """Return those of *windows* that have marks, in order."""
        values = (namespace.id, shard, windows)
        selects = [
            (await self._session.to_read(namespace.dataset, cql)).bind(values) for cql in tables
        ]
        found = await self._session.connection.rows(selects)
        return sorted({window_us for rows in found for (window_us,) in rows or ()})

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, span: Span
    ) -> Sequence[AtomicMark]:
        select = await self._session.to_read(namespace.dataset, _ATOMIC)
        windows = self._windows(namespace, span)
        found = await self._session.connection.rows(
            [
                select.bind((namespace.id, shard, windows[at : at + _WINDOWS_MAX]))
                for at in range(0, len(windows), _WINDOWS_MAX)
            ]
        )
        marks = [
            _atomic_mark(window_us, time_us, event_id, atom, items)
            for rows in found
            for window_us, time_us, event_id, atom, items in rows or ()
        ]
        self._note_seen(namespace, shard, marks)
        return sorted(marks, key=_window)

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        key = (namespace.id, shard)
        seen = self._seen.setdefault(key, set())
        if key not in self._has_dropped and self._looks < _LOOKS_AT_ONCE:
            seen.update(await self._left_behind(namespace, shard, through_us))
            self._has_dropped.add(key)
        done = sorted(window_us for window_us in seen if window_us <= through_us)
        stamp_us = self._session.stamp()
        statements = [await self._session.to_write(namespace.dataset, cql) for cql in _DELETES]
        for first in range(0, len(done), _DROPPED_AT_ONCE):
            some = done[first : first + _DROPPED_AT_ONCE]
            await self._session.connection.rows(
                [
                    delete.bind((stamp_us, namespace.id, shard, window_us))
                    for delete in statements
                    for window_us in some
                ]
            )
            seen.difference_update(some)

    async def _left_behind(
        self, namespace: Namespace, shard: int, through_us: int
    ) -> Sequence[int]:
        """Return the latest windows up to *through_us* that still have marks."""
        after_us = through_us - _LEFT_BEHIND * namespace.settings.rollup_window_us
        windows = self._windows(namespace, Span.after(after_us, through_us))
        self._looks += 1
        try:
            return await self._marked(namespace, shard, windows, _MARKED)
        finally:
            self._looks -= 1

    def _windows(self, namespace: Namespace, span: Span) -> range:
        """Return the starts of the windows of *span*, from the first slice on: earlier windows have
        no events and no pending marks."""
        slices = self._session.state_of(namespace.dataset).slices
        if slices:
            span = Span(max(span.from_us, slices[0].start_us), span.to_us)
        return span.windows(namespace.settings.rollup_window_us)

    def _note_seen(
        self, namespace: Namespace, shard: int, marks: Sequence[DirtyMark | AtomicMark]
    ) -> None:
        """Remember windows whose marks are to be dropped."""
        seen = self._seen.setdefault((namespace.id, shard), set())
        seen.update(mark.window_us for mark in marks)

    async def heads(
        self, namespace: Namespace, counters: Sequence[str], handles: Sequence[object] | None = None
    ) -> Sequence[Head | None]:
        parts: dict[str, _Parts] = {}
        for counter, kind, t, u, cell in await self._read(namespace, _HEADS, counters):
            part = parts.get(counter)
            if part is None:
                part = parts[counter] = _Parts()
            if kind == PENDING:
                part.pending.append(Pending(t, u))
            elif kind == CHECKPOINT:
                part.checkpoint = unpack_checkpoint(cell)
            else:
                part.settled = unpack_checkpoint(cell)
        return [parts[each].head() if each in parts else None for each in counters]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Sequence[WindowRow]]:
        found: dict[str, list[WindowRow]] = {counter: [] for counter in counters}
        settled: dict[str, int] = {}
        for counter, kind, t, cell in await self._read(namespace, _ROWS, counters, span.to_us):
            if kind == SETTLED:
                settled[counter] = unpack_checkpoint(cell).time_us
            elif t >= span.from_us and t > settled.get(counter, 0):
                found[counter].append(unpack_row(t, cell))
        return [found[counter] for counter in counters]

    async def _read(
        self, namespace: Namespace, cql: Sequence[str], counters: Sequence[str], *values: Any
    ) -> Iterator[Sequence[Any]]:
        """Return the rows of each of *counters*, together and in order."""
        of_one, of_many = [await self._session.to_read(namespace.dataset, each) for each in cql]
        statements = [
            of_one.bind((namespace.id, some[0], *values))
            if len(some) == 1
            else of_many.bind((namespace.id, some, *values))
            for some in _chunks(dict.fromkeys(counters), _READ_TOGETHER)
        ]
        found = await self._session.connection.rows(statements)
        return (row for rows in found for row in rows or ())

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        if not updates:
            return
        # First, because a delete that is removed is not found again.
        await self._list_again(namespace, updates)
        stamp_us = through_us + 1 + self._draw(namespace.id, through_us, updates[0].counter)
        written = [
            await self._written(namespace, update, through_us, stamp_us) for update in updates
        ]
        await self._session.connection.rows(_batches(written))
        # Second: if a batch is on one replica, a read of the head repairs the head alone. A reader
        # that folds the rows must not see that a recount is done, and the row as it was.
        removed = [await self._removed(namespace, each) for each in updates if each.pending_done]
        if removed:
            await self._session.connection.rows(_batches(removed))

    async def _written(
        self, namespace: Namespace, update: CounterUpdate, through_us: int, stamp_us: int
    ) -> list[Any]:
        """Return the statements of one counter's update, of a batch up to *through_us*."""
        dataset, partition = namespace.dataset, (namespace.id, update.counter)
        insert = await self._session.to_write(dataset, _INSERT)
        checkpoint = pack_checkpoint(update.checkpoint)
        values = [(*partition, CHECKPOINT, 0, 0, checkpoint, stamp_us)]
        settled, settled_us = update.settled, 0
        if settled is not None:
            settled_us = settled.time_us
            values.append((*partition, SETTLED, 0, 0, pack_checkpoint(settled), settled_us))
        values += (
            (*partition, WINDOW, row.window_us, 0, pack_row(row), stamp_us)
            for row in update.rows
            if row.window_us > settled_us
        )
        statements = [bound(insert, _PACKERS, each) for each in values]
        if settled is not None:
            delete = await self._session.to_write(dataset, _DELETE_ROWS)
            statements.append(delete.bind((through_us, *partition, settled_us)))
        return statements

    async def _removed(self, namespace: Namespace, update: CounterUpdate) -> list[Any]:
        """Return the statements that remove the recounts of *update* that are done."""
        delete = await self._session.to_write(namespace.dataset, _DELETE)
        return [
            delete.bind((left_us, namespace.id, update.counter, PENDING, recount_us, left_us))
            for recount_us, left_us in update.pending_done
        ]

    async def unlist(self, namespace: Namespace, counter: str, deleted_us: int) -> None:
        delete = await self._session.to_write(namespace.dataset, _UNLIST)
        self._listed.pop((namespace.id, counter), None)
        bucket = shard_of(counter, namespace.settings.shards)
        values = (deleted_us, namespace.id, bucket, counter)
        await self._session.connection.rows([delete.bind(values)])

    async def _list_again(self, namespace: Namespace, updates: Sequence[CounterUpdate]) -> None:
        """Write the names of counters whose deletes are removed, just after these."""
        names = [
            (each.counter, pending.window_us + 1)
            for each in updates
            for pending in each.pending_done
            if pending.is_delete
        ]
        if names:
            insert = await self._session.to_write(namespace.dataset, _NAME)
            shards = namespace.settings.shards
            await self._session.connection.rows(
                [
                    insert.bind((namespace.id, shard_of(name, shards), name, time_us))
                    for name, time_us in names
                ]
            )

    def _draw(self, namespace_id: int, through_us: int, first: str) -> int:
        """Return the random part of the timestamps of one call, which its *first* counter
        distinguishes from others up to the same instant. A repeated call draws a higher one."""
        key = (namespace_id, through_us, first)
        before = self._drawn.pop(key, None)
        if before is None:
            drawn = random.randrange(_RANDOM_US // 2)
        else:
            drawn = min(before + random.randint(1, 9), _RANDOM_US - 1)
        self._drawn[key] = drawn
        while len(self._drawn) > _DRAWN_MAX:
            self._drawn.popitem(last=False)
        return drawn


class CassandraRecounts:
    """:class:`counter.ports.RecountStore`. No name is listed: it is already, or was deleted."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session

    async def write_pending(
        self, namespace: Namespace, pending: Sequence[tuple[str, Pending]]
    ) -> None:
        insert = await self._session.to_write(namespace.dataset, _INSERT)
        await self._session.connection.rows(
            [
                insert.bind((namespace.id, counter, PENDING, recount_us, left_us, b"", left_us))
                for counter, (recount_us, left_us) in pending
            ]
        )

    async def write_marks(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        await self._session.write(await _rows_of(self._session, namespace, marks))


async def _rows_of(
    session: CassandraSession, namespace: Namespace, marks: Sequence[Mark]
) -> list[tuple[Lane, Any]]:
    """Return the row of each mark, and its lane."""
    insert = await session.to_write(namespace.dataset, _MARK)
    rows: list[tuple[Lane, Any]] = []
    for window_us, counter, recount_us in marks:
        shard = shard_of(counter, namespace.settings.shards)
        lane = (namespace.dataset.write_timeout_us, "dirty", namespace.id, shard, window_us)
        values = (*lane[2:], counter, recount_us, session.stamp())
        rows.append((lane, bound(insert, _MARK_PACKERS, values)))
    session.tally.mark(mark.recount_us for mark in marks)
    return rows


class _Parts:
    """The head of one counter: all but its window rows."""

    __slots__ = ("checkpoint", "pending", "settled")

    def __init__(self) -> None:
        self.checkpoint = self.settled = _NOTHING
        self.pending: list[Pending] = []

    def head(self) -> Head:
        return Head(self.checkpoint, self.settled, tuple(self.pending))


def _batches(of_counters: Iterable[list[Any]]) -> list[Any]:
    """Return batches of the statements of counters, each counter's in one."""
    batches: list[list[Any]] = []
    counters = _WRITTEN_TOGETHER
    for statements in of_counters:
        fits = batches and len(batches[-1]) + len(statements) <= _ROWS_TOGETHER
        if fits and counters < _WRITTEN_TOGETHER:
            batches[-1] += statements
            counters += 1
        else:
            batches.append(statements)
            counters = 1
    return [batch_of(each) for each in batches]


def _chunks(all_of: Iterable[_T], size: int) -> Iterator[tuple[_T, ...]]:
    items = iter(all_of)
    while some := tuple(islice(items, size)):
        yield some


def _atomic_mark(
    window_us: int, event_time_us: int, event_id: bytes, stored_atom: bytes, items: bytes
) -> AtomicMark:
    atom, sight = atom_of(stored_atom)
    return AtomicMark(window_us, unpack_items(items, event_time_us, event_id, atom), sight)
