"""Marks and watermarks: what is to be rolled up, and up to where it has been.

A mark bears the time of its writing. When its window is closed, whoever deletes it is later by any
clock. Marks that are left behind, by a crash or because they landed late, lie at or before the
watermark, where nobody looks: they do no harm, and their time to live is there to have them go one
day. It is far longer than any outage of the rollup, for a mark that stands is all that knows of
its window.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final

from counter.limits import DAY, SECOND
from counter.partitions import shard_of
from counter.ports import Clock
from counter.storage.cassandra.base import unknown
from counter.storage.cassandra.coalesced import Coalesced
from counter.storage.cassandra.codec import pack_items, unpack_items
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.packing import BIGINT, INT, TEXT, bound
from counter.storage.cassandra.writes import CassandraWrites, Lane
from counter.types import AtomicMark, Mark, Namespace
from counter.windows import window_of

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

#: Counters whose name this process knows to be listed; forgetting one is safe.
_NAMES_MAX: Final = 200_000
#: Windows that one statement names.
_WINDOWS_MAX: Final = 64
#: Before all counters of a window: no name is empty.
_FIRST: Final = ("", 0)
#: A process that drops marks for the first time looks for them in so many windows: what another one
#: that crashed rolled up last, and did not come to drop. Where it does not come to it, they stay.
_LEFT_BEHIND: Final = 64
#: Shards for which that is done at once. A process that takes over thousands of them must not ask
#: for all of it at the same moment, nor have their rollup wait for it.
_LOOKS_AT_ONCE: Final = 4
#: Windows of a shard whose marks are deleted at once.
_DROPPED_AT_ONCE: Final = 32


class CassandraMarks(CassandraWrites):
    """Marks, of :class:`counter.ports.EventStore` and :class:`counter.ports.RollupStore`, and the
    watermarks."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._listed: OrderedDict[tuple[int, str], None] = OrderedDict()
        #: By namespace id and shard: windows that were seen to hold marks and are not dropped yet.
        self._seen: dict[tuple[int, int], set[int]] = {}
        self._has_dropped: set[tuple[int, int]] = set()
        self._looks = 0
        self._watermarks: dict[int, Coalesced[Sequence[int]]] = {}

    async def mark(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        dataset = namespace.dataset
        for window_us in {mark.window_us for mark in marks if mark.recount_us == 0}:
            await self._slice_of(dataset, window_us)
        insert = await self._to_write(dataset, _MARK)
        rows: list[tuple[Lane, Any]] = []
        for window_us, counter, recount_us in marks:
            shard = shard_of(counter, namespace.settings.shards)
            lane = (dataset.write_timeout_us, "dirty", namespace.id, shard, window_us)
            values = (*lane[2:], counter, recount_us, self._stamp())
            row = bound(insert, _MARK_PACKERS, values)
            rows.append((lane, row))
        self.tally.mark(mark.recount_us for mark in marks)
        await self._write_listed(namespace, rows, [mark.counter for mark in marks])

    def mark_soon(
        self, namespace: Namespace, mark: Mark, told: Callable[[BaseException | None], None]
    ) -> bool:
        """See :class:`counter.prompt.PromptStore`."""
        dataset, (window_us, counter, recount_us) = namespace.dataset, mark
        if self._slice_at_hand(dataset, window_us) is None:
            return False
        insert = self._write_at_hand(dataset, _MARK)
        insert_name = self._write_at_hand(dataset, _NAME)
        if insert is None or insert_name is None:
            return False
        name = (namespace.id, counter)
        is_new = name not in self._listed
        sink = _Marked(told, 1 + is_new, partial(self._list, name) if is_new else None)
        shard = shard_of(counter, namespace.settings.shards)
        timeout_us, partition = dataset.write_timeout_us, (namespace.id, shard, window_us)
        self.tally.mark((recount_us,))
        row = bound(insert, _MARK_PACKERS, (*partition, counter, recount_us, self._stamp()))
        self._rows.begin((timeout_us, "dirty", *partition), row, sink)
        if is_new:
            row = bound(insert_name, _NAME_PACKERS, (*partition[:2], counter, self._stamp()))
            self._rows.begin((timeout_us, "names", *partition[:2]), row, sink)
        return True

    def _list(self, name: tuple[int, str]) -> None:
        """Know that *name* is listed."""
        self._listed[name] = None
        while len(self._listed) > _NAMES_MAX:
            self._listed.popitem(last=False)

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        dataset, events = namespace.dataset, mark.events
        for time_us in {event.event_time_us for event in events}:
            await self._slice_of(dataset, time_us)
        insert = await self._to_write(dataset, _MARK_ATOMIC)
        first, items = events[0], pack_items(events)
        token = (first.event_time_us, first.event_id, first.atom or b"")
        rows: list[tuple[Lane, Any]] = []
        for shard in {shard_of(event.counter, namespace.settings.shards) for event in events}:
            lane = (dataset.write_timeout_us, "atomic_marks", namespace.id, shard, mark.window_us)
            values = (*lane[2:], *token, items, self._stamp())
            rows.append((lane, insert.bind(values)))
        self.tally.marks["atomic"] += len(rows)
        await self._write_listed(namespace, rows, [event.counter for event in events])

    async def _write_listed(
        self, namespace: Namespace, rows: list[tuple[Lane, Any]], counters: Iterable[str]
    ) -> None:
        """Write *rows*, and with them the names of those *counters* that may not be listed yet."""
        dataset, listed = namespace.dataset, self._listed
        new = [each for each in dict.fromkeys(counters) if (namespace.id, each) not in listed]
        if new:
            insert = await self._to_write(dataset, _NAME)
            for counter in new:
                bucket = shard_of(counter, namespace.settings.shards)
                lane = (dataset.write_timeout_us, "names", namespace.id, bucket)
                values = (namespace.id, bucket, counter, self._stamp())
                rows.append((lane, bound(insert, _NAME_PACKERS, values)))
        await self._write(rows)
        for counter in new:
            self._list((namespace.id, counter))

    async def fence(self) -> int:
        return self._clock.now_us()

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        read = self._watermarks.get(namespace.id)
        if read is None:

            async def read_now() -> Sequence[int]:
                select = await self._to_read(namespace.dataset, _WATERMARKS)
                rows = await self._connection.one(select.bind((namespace.id,)))
                if len(rows) < namespace.settings.shards:
                    raise unknown(namespace)
                return [through_us for (through_us,) in rows]

            read = self._watermarks[namespace.id] = Coalesced(read_now)
        return await read()

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        insert = await self._to_write(namespace.dataset, _ADVANCE)
        await self._connection.rows(
            [insert.bind((namespace.id, shard, through_us, through_us)) for shard in shards]
        )

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], *, after_us: int, through_us: int
    ) -> Collection[int]:
        """All of *shards*: each window of a shard is a partition of its own."""
        return shards

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
        marks: list[Mark] = []
        position = _FIRST
        if start is not None and start.window_us > after_us:
            after_us, position = start.window_us - 1, (start.counter, start.recount_us)
        windows: Sequence[int] = self._windows(namespace, after_us, through_us)
        select = await self._to_read(namespace.dataset, _DIRTY)
        width = 1
        while windows and len(marks) < limit:
            some, windows = windows[:width], windows[width:]
            # A single window is not worth asking for.
            if width > 1:
                some = await self._marked(namespace, shard, some, _MARKED[:1])
            for window_us in some:
                left = limit - len(marks)
                if left:
                    values = (namespace.id, shard, window_us, *position, left)
                    rows = await self._connection.one(select.bind(values))
                    marks += [Mark(*row) for row in rows]
                position = _FIRST
            width = min(2 * width, _WINDOWS_MAX)
        self._note_seen(namespace, shard, marks)
        return marks

    async def _marked(
        self, namespace: Namespace, shard: int, windows: Sequence[int], tables: Sequence[str]
    ) -> Sequence[int]:
        """Those of *windows* that hold marks, in order."""
        values = (namespace.id, shard, windows)
        selects = [(await self._to_read(namespace.dataset, cql)).bind(values) for cql in tables]
        found = await self._connection.rows(selects)
        return sorted({window_us for rows in found for (window_us,) in rows or ()})

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> Sequence[AtomicMark]:
        select = await self._to_read(namespace.dataset, _ATOMIC)
        windows = self._windows(namespace, after_us, through_us)
        found = await self._connection.rows(
            [
                select.bind((namespace.id, shard, windows[at : at + _WINDOWS_MAX]))
                for at in range(0, len(windows), _WINDOWS_MAX)
            ]
        )
        marks = [
            AtomicMark(window_us, unpack_items(items, time_us, event_id, atom or None))
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
        stamp_us = self._stamp()
        statements = [await self._to_write(namespace.dataset, cql) for cql in _DELETES]
        for first in range(0, len(done), _DROPPED_AT_ONCE):
            some = done[first : first + _DROPPED_AT_ONCE]
            await self._connection.rows(
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
        """The latest windows up to *through_us* that still hold marks."""
        after_us = through_us - _LEFT_BEHIND * namespace.settings.rollup_window_us
        windows = self._windows(namespace, after_us, through_us)
        self._looks += 1
        try:
            return await self._marked(namespace, shard, windows, _MARKED)
        finally:
            self._looks -= 1

    def _windows(self, namespace: Namespace, after_us: int, through_us: int) -> range:
        """The starts of windows in ``(after_us, through_us]``, from the first slice on: there are
        none before it that anybody could sum, and no marks that are still to be rolled up."""
        size_us = namespace.settings.rollup_window_us
        slices = self._shelf(namespace.dataset).slices
        if slices:
            after_us = max(after_us, slices[0].start_us - 1)
        return range(window_of(after_us, size_us) + size_us, through_us + 1, size_us)

    def _note_seen(
        self, namespace: Namespace, shard: int, marks: Sequence[Mark | AtomicMark]
    ) -> None:
        """Remember where there is something to drop."""
        seen = self._seen.setdefault((namespace.id, shard), set())
        seen.update(mark.window_us for mark in marks)


class _Marked:
    """Tells when a mark stands, and its counter's name where that is new."""

    __slots__ = ("_error", "_left", "_stands", "_told")

    def __init__(
        self,
        told: Callable[[BaseException | None], None],
        rows: int,
        stands: Callable[[], None] | None,
    ) -> None:
        self._told = told
        self._left = rows
        self._stands = stands
        self._error: BaseException | None = None

    def settle(self, _index: int, result: BaseException | None) -> None:
        self._error = self._error or result
        self._left -= 1
        if not self._left:
            if self._error is None and self._stands is not None:
                self._stands()
            self._told(self._error)


def _window(mark: Mark | AtomicMark) -> int:
    return mark.window_us
