"""Store marks, watermarks and counts in SQLite, with one set-based statement per batch.

A counter's checkpoint and settled fold are in its row of ``counters``; its window rows and pending
recounts are in their own tables. One transaction writes them together.

An add leaves no mark: the log is in time order, so the events after a shard's watermark show which
counters are dirty. The live tail has their names in memory; the log is read if it does not hold
all of them. Marks are left for recounts only.

The rollup reads by id: with many counters each look-up by name costs a page of the index, and
there would be four of them for each counter of a batch.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import chain, groupby, islice, repeat
from typing import Any, Final

from counter.errors import InvariantError, NamespaceUnknownError, UnavailableError
from counter.storage.sqlite.database import SqliteDatabase, bulk
from counter.storage.sqlite.event_rows import (
    counter_ids,
    counter_names,
    first_event,
    fold_rows_of,
    known_ids,
    make_counters,
    sums_between,
)
from counter.storage.sqlite.schema import events_table, one_json, to_cell, to_fold, to_json
from counter.storage.sqlite.window_rows import (
    RowsToWrite,
    delete_settled_rows,
    group_of,
    has_passed_rows,
    move_rows,
    read_rows,
    write_rows,
)
from counter.types import (
    Checkpoint,
    CounterUpdate,
    DirtyMark,
    DirtyPage,
    Event,
    Fold,
    Head,
    Mark,
    Namespace,
    Pending,
    Span,
    WindowRow,
)
from counter.windows import shard_of, slice_of, window_of

_log = logging.getLogger("counter.sqlite")
#: Counters of the live tail whose sums one pass over a window reads.
_FOLDED_AT_ONCE: Final = 100_000
#: Rows that a batch moves at least: with as many as it writes, those of a burst would stay long.
_MOVED_MIN: Final = 2_000
_BY_NAME: Final = "c.namespace = ? AND c.name = j.value"
_BY_ID: Final = "c.id = j.value"

#: One counter's head, and whether it has pending recounts.
_ONE_HEAD: Final = (
    "SELECT c.checkpoint_at, c.checkpoint, c.settled_at, c.settled,"
    " EXISTS (SELECT 1 FROM pending p WHERE p.counter = c.id)"
    " FROM counters c WHERE c.namespace = ? AND c.name = ?"
)


class SqliteRollups:
    """See :class:`counter.ports.RollupStore`."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._db = database
        #: See :func:`move_rows`.
        self._moved_counters = 8

    async def fence(self) -> int:
        """Return the clock, read by the writer between two commits."""

        def read(_: sqlite3.Connection) -> int:
            now_us = self._db.clock.now_us()
            self._db.fenced_us = max(self._db.fenced_us, now_us)
            return now_us

        return await self._db.write(read)

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        """Return the watermarks of the last commit, from memory."""
        return tuple(self._through(namespace))

    def _through(self, namespace: Namespace) -> Sequence[int]:
        through = self._db.watermarks.get(namespace.id)
        if through is None:
            raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
        return through

    async def dirty(
        self, namespace: Namespace, shard: int, span: Span, limit: int, rest: object = None
    ) -> DirtyPage:
        walk = rest if isinstance(rest, _Walk) else _Walk()
        walk.to_us = span.to_us

        def read(connection: sqlite3.Connection) -> DirtyPage:
            if rest is None:
                walk.marks = self._walk(connection, namespace, shard, span, walk)
            # If this fails, the walk is at its end and does not say so: it must not go on.
            marks, walk.marks = walk.marks, None
            if marks is None:
                raise InvariantError("the rest of a page is read once")
            found = list(islice(marks, limit))
            walk.marks = marks
            return DirtyPage(found, walk if len(found) == limit else None)

        return await self._db.scan(read)

    def _walk(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        shard: int,
        span: Span,
        walk: _Walk,
    ) -> Iterator[DirtyMark]:
        """Yield what is dirty in a span of windows, in order: of each window first the counters
        that are to be recounted, then those with events that no checkpoint includes."""
        where = "FROM marks m WHERE m.namespace = ? AND m.shard = ? AND m.start"
        recounted: list[int] = one_json(
            connection,
            f"SELECT json_group_array(DISTINCT m.start) {where} >= ? AND m.start < ?",
            (namespace.id, shard, *span),
        )
        new = Span(max(span.from_us, self._through(namespace)[shard] + 1), span.to_us)
        held = self._db.live.counters(namespace.id, namespace.settings.rollup_window_us, new)
        logged = self._log_windows(connection, namespace, new)
        windows = merge(sorted(recounted), logged if held is None else sorted(held))
        for window_us, _ in groupby(windows):
            if window_us >= walk.to_us:
                return
            rows = one_json(
                connection,
                "SELECT json_group_array(json_array(counter, recount, name)) FROM (SELECT"
                " m.counter, m.recount, (SELECT name FROM counters WHERE id = m.counter) AS name"
                f" {where} = ? ORDER BY m.counter, m.recount)",
                (namespace.id, shard, window_us),
            )
            for counter_id, recount_us, name in rows:
                yield DirtyMark(window_us, name, recount_us, None, counter_id)
            if window_us < new.from_us:
                continue
            for counter_id, name, fold in (
                self._log_folds(connection, namespace, shard, window_us)
                if held is None
                else self._held_folds(connection, namespace, shard, window_us, held)
            ):
                yield DirtyMark(window_us, name, 0, fold, counter_id)

    def _log_windows(
        self, connection: sqlite3.Connection, namespace: Namespace, span: Span
    ) -> Iterator[int]:
        """Yield the windows of *span* with events of any namespace."""
        size_us = namespace.settings.rollup_window_us
        windows = span.windows(size_us)
        at_us, until_us = windows.start, windows.start + len(windows) * size_us
        for each in self._db.slices[namespace.dataset.id]:
            table = events_table(namespace.dataset.id, each.start_us)
            while max(at_us, each.start_us) < min(until_us, each.end_us):
                first_us = first_event(connection, table, at_us)
                if first_us is None or first_us >= until_us:
                    break
                yield window_of(first_us, size_us)
                at_us = window_of(first_us, size_us) + size_us

    def _log_folds(
        self, connection: sqlite3.Connection, namespace: Namespace, shard: int, window_us: int
    ) -> Iterator[tuple[int, str, Fold]]:
        """Yield id, name and fold of a shard's counters with events in a window."""
        shards = namespace.settings.shards
        table, last_us = self.place(namespace, window_us)
        for part in sums_between(connection, table, window_us, last_us):
            names = counter_names(connection, namespace.id, [each[0] for each in part])
            ours = {each: name for each, name in names if shard_of(name, shards) == shard}
            yield from named(connection, table, (window_us, last_us), part, ours)

    def _held_folds(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        shard: int,
        window_us: int,
        held: Mapping[int, Sequence[str]],
    ) -> Iterator[tuple[int, str, Fold]]:
        """The same for the counters that the live tail has in a window."""
        shards = namespace.settings.shards
        ours = [name for name in held.get(window_us, ()) if shard_of(name, shards) == shard]
        if not ours:
            return
        ids = known_ids(self._db, connection, namespace.id, ours)
        found = {counter_id: name for name, counter_id in ids.items()}
        table, last_us = self.place(namespace, window_us)
        # By id: counters that were made together share pages.
        in_order = sorted(found)
        for at in range(0, len(in_order), _FOLDED_AT_ONCE):
            some = in_order[at : at + _FOLDED_AT_ONCE]
            for part in sums_between(connection, table, window_us, last_us, some):
                yield from named(connection, table, (window_us, last_us), part, found)

    def first_large_window(
        self, namespace: Namespace, shard: int, span: Span, counters: int
    ) -> int | None:
        """Return the first window of *span* with events that no checkpoint includes; None if it is
        not known, has fewer *counters*, or if there are several shards."""
        if namespace.settings.shards > 1:
            return None
        new = Span(max(span.from_us, self._through(namespace)[shard] + 1), span.to_us)
        held = self._db.live.counters(namespace.id, namespace.settings.rollup_window_us, new)
        if not held:
            return None
        first_us = min(held)
        return first_us if len(held[first_us]) >= counters else None

    def place(self, namespace: Namespace, window_us: int) -> tuple[str, int]:
        """Return the table with the events of a window, and the window's last instant."""
        each = slice_of(self._db.slices[namespace.dataset.id], window_us)
        table = events_table(namespace.dataset.id, each.start_us)
        return table, window_us + namespace.settings.rollup_window_us - 1

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], span: Span
    ) -> Collection[int]:
        # One search of the index for each shard, however many recounts there are.
        sql = (
            "SELECT json_group_array(j.value) FROM json_each(?) j WHERE EXISTS (SELECT 1"
            " FROM marks WHERE namespace = ? AND shard = j.value AND start >= ? AND start < ?)"
        )
        parameters = (to_json(shards), namespace.id, *span)

        def query(connection: sqlite3.Connection) -> Collection[int]:
            found = set(one_json(connection, sql, parameters))
            watermarks = self._through(namespace)
            since_us = min(watermarks[shard] for shard in shards) + 1
            new = Span(max(span.from_us, since_us), span.to_us)
            held = self._db.live.counters(namespace.id, namespace.settings.rollup_window_us, new)
            if held is None:
                logged = self._log_windows(connection, namespace, new)
                return found if next(logged, None) is None else shards
            for name in chain.from_iterable(held.values()):
                found.add(shard_of(name, len(watermarks)))
                if len(found) == len(watermarks):
                    break
            return found.intersection(shards)

        return await self._db.scan(query)

    async def heads(
        self, namespace: Namespace, counters: Sequence[str], handles: Sequence[object] | None = None
    ) -> Sequence[Head | None]:
        if handles is None and len(counters) == 1:
            rows = self._db.inline.row(_ONE_HEAD, (namespace.id, counters[0]))
            if rows is not None and not (rows and rows[0][4]):
                return (_head_of(*rows[0][:4]) if rows else None,)
        result: Sequence[Head | None] = await self._db.reader.call(
            (_select_all_heads, (namespace.id, counters, handles))
        )
        return result

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Sequence[WindowRow]]:
        return await self._db.scan(
            lambda connection: read_rows(connection, namespace.id, counters, span)
        )

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        ids = await self._ids_of(namespace, updates)
        group_us = group_of(namespace, through_us)
        rows = RowsToWrite.of(((ids[each.counter], each) for each in updates), group_us)
        heads = to_json(
            (ids[each.counter], each.checkpoint.time_us, to_cell(each.checkpoint.count))
            for each in updates
        )
        settled = [
            (ids[each.counter], each.settled.time_us, to_cell(each.settled.count))
            for each in updates
            if each.settled is not None
        ]
        done = to_json(
            (ids[each.counter], pending.recount_us, pending.window_us)
            for each in updates
            for pending in each.pending_done
        )

        def change(connection: sqlite3.Connection) -> bool:
            update_heads(connection, "checkpoint", heads)
            if settled:
                update_heads(connection, "settled", to_json(settled))
                settled_us = max(time_us for _, time_us, _ in settled)
                delete_settled_rows(connection, namespace.id, to_json(settled), settled_us)
            write_rows(connection, namespace.id, rows)
            if done != "[]":
                _delete_pending(connection, done)
            return has_passed_rows(connection, namespace.id, group_us)

        if await self._db.write(change):
            await self.move_passed_rows(namespace, group_us, rows.recent_rows)

    async def move_passed_rows(self, namespace: Namespace, group_us: int, written: int) -> None:
        """Move at least as many rows of the windows before *group_us* as were *written*, if so
        many are there."""
        left = max(written, _MOVED_MIN)
        while left > 0:

            def change(connection: sqlite3.Connection) -> tuple[int, int]:
                return move_rows(connection, namespace.id, group_us, self._moved_counters)

            try:
                moved, self._moved_counters = await self._db.write(change)
            except UnavailableError as error:
                # What is written stays written, and the next batch moves them.
                _log.warning("rows of %s are not moved yet: %s", namespace.name, error.detail)
                return
            left = left - moved if moved else 0

    async def _ids_of(
        self, namespace: Namespace, updates: Sequence[CounterUpdate]
    ) -> Mapping[str, int]:
        """Return the ids of the counters of *updates*; missing counters are created."""
        ids = {each.counter: each.handle for each in updates if isinstance(each.handle, int)}
        missing = [each.counter for each in updates if each.counter not in ids]
        if missing:
            make = partial(_made_counters, namespace=namespace, names=missing)
            ids.update(await self._db.write(make))
        return ids

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        def change(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE watermarks SET through = max(through, ?)"
                " WHERE namespace = ? AND shard IN (SELECT value FROM json_each(?))",
                (through_us, namespace.id, to_json(shards)),
            )
            # On this thread, because it alone changes the tail. Windows are dropped one call after
            # the watermark has passed them: reads that began before are done by then.
            self._db.live.forget(namespace.id, min(self._db.watermarks.get(namespace.id, (0,))))

        await self._db.write(change)
        through = self._db.watermarks.get(namespace.id)
        if through is not None:
            for shard in shards:
                through[shard] = max(through[shard], through_us)

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        await self._db.write(
            lambda connection: connection.execute(
                "DELETE FROM marks WHERE namespace = ? AND shard = ? AND start <= ?",
                (namespace.id, shard, through_us),
            )
        )


class SqliteRecounts:
    """See :class:`counter.ports.RecountStore`."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._db = database

    async def write_pending(
        self, namespace: Namespace, pending: Sequence[tuple[str, Pending]]
    ) -> None:
        await self._db.write(
            lambda connection: _write_pending(self._db, connection, namespace, pending)
        )

    async def write_marks(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        await self._db.write(
            lambda connection: _write_marks(self._db, connection, namespace, marks)
        )


def _write_pending(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace: Namespace,
    pending: Sequence[tuple[str, Pending]],
) -> None:
    ids = _made_counters(connection, namespace, (name for name, _ in pending))
    rows = [(ids[name], *each) for name, each in pending]
    bulk(connection, "INSERT OR IGNORE INTO pending", rows)
    for name, each in pending:
        if each.is_delete:
            database.ids.forget(namespace.id, name)


def _write_marks(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace: Namespace,
    marks: Sequence[Mark],
) -> None:
    ids = _made_counters(connection, namespace, (each.counter for each in marks))
    shards = namespace.settings.shards
    rows = [
        (namespace.id, shard_of(name, shards), window_us, ids[name], recount_us)
        for window_us, name, recount_us in marks
    ]
    database.tally.mark(each.recount_us for each in marks)
    bulk(connection, "INSERT OR IGNORE INTO marks", rows)


def open_time(
    database: SqliteDatabase, connection: sqlite3.Connection, namespace: Namespace, first_us: int
) -> int:
    """Return a time in a window that no worker has passed: now, but not before *first_us*. Raises
    NamespaceUnknownError."""
    if namespace.id not in database.watermarks:
        raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
    (passed_us,) = connection.execute(
        "SELECT max(through) FROM watermarks WHERE namespace = ?", (namespace.id,)
    ).fetchone()
    return max(int(passed_us) + 1, database.clock.now_us(), database.fenced_us, first_us)


def request_recounts(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace: Namespace,
    events: Sequence[Event],
) -> None:
    """Request a recount of the window of *events*, which have one token, for readers too. It is
    marked in a window that no worker has passed, and that is not earlier."""
    size_us = namespace.settings.rollup_window_us
    open_us = open_time(database, connection, namespace, events[0].event_time_us)
    marked_us, recount_us = window_of(open_us, size_us), window_of(events[0].event_time_us, size_us)
    counters = list(dict.fromkeys(event.counter for event in events))
    pending = [(name, Pending(recount_us, marked_us)) for name in counters]
    _write_pending(database, connection, namespace, pending)
    marks = [Mark(marked_us, name, recount_us) for name in counters]
    _write_marks(database, connection, namespace, marks)


def _made_counters(
    connection: sqlite3.Connection, namespace: Namespace, names: Iterable[str]
) -> dict[str, int]:
    """Return the ids of the counters of *names*; missing ones are created."""
    unique = list(dict.fromkeys(names))
    make_counters(connection, namespace.id, unique)
    return counter_ids(connection, namespace.id, unique)


class _Walk:
    """A walk over the windows that are dirty, from page to page."""

    __slots__ = ("marks", "to_us")

    def __init__(self) -> None:
        self.marks: Iterator[DirtyMark] | None = None
        #: Where it ends.
        self.to_us = 0


def named(
    connection: sqlite3.Connection,
    table: str,
    span: tuple[int, int],
    sums: Sequence[tuple[int, int, int, int]],
    names: Mapping[int, str],
) -> Iterator[tuple[int, str, Fold]]:
    """Yield id, name and fold of those of *sums* that *names* has."""
    for counter_id, clears, high, low in sums:
        name = names.get(counter_id)
        if name is None:
            continue
        if clears:
            yield counter_id, name, fold_rows_of(connection, table, {name: counter_id}, *span)[name]
        else:
            yield counter_id, name, to_fold(clears, high, low)


def _select_all_heads(
    connection: sqlite3.Connection,
    jobs: Sequence[tuple[int, Sequence[str], Sequence[object] | None]],
) -> list[Any]:
    """Return the heads of each job's counters, with one statement for each namespace."""
    wanted: dict[int, dict[str, object]] = {}
    for namespace_id, names, handles in jobs:
        ids = handles or repeat(None)
        wanted.setdefault(namespace_id, {}).update(zip(names, ids, strict=False))
    heads = {
        namespace_id: select_heads(connection, namespace_id, ids)
        for namespace_id, ids in wanted.items()
    }
    return [[heads[namespace_id].get(name) for name in names] for namespace_id, names, _ in jobs]


def select_heads(
    connection: sqlite3.Connection, namespace_id: int, ids: Mapping[str, object]
) -> dict[str, Head]:
    """Return the heads of counters by name; *ids* has their ids as far as they are known."""
    names = list(ids)
    by_id = None not in ids.values()
    wanted = (to_json(ids.values()),) if by_id else (to_json(names), namespace_id)
    sql = (
        "SELECT json_group_array(json_array(j.key, c.checkpoint_at, c.checkpoint, c.settled_at,"
        " c.settled, iif((SELECT 1 FROM pending LIMIT 1) IS NULL, NULL, (SELECT"
        " json_group_array(json_array(p.recount, p.start)) FROM pending p"
        " WHERE p.counter = c.id))))"
        f" FROM json_each(?) j CROSS JOIN counters c ON {_BY_ID if by_id else _BY_NAME}"
    )
    heads: dict[str, Head] = {}
    for index, time_us, count, settled_us, settled, pending in one_json(connection, sql, wanted):
        if time_us is not None or pending:
            heads[names[index]] = Head(
                Checkpoint(time_us or 0, int(count or 0)),
                Checkpoint(settled_us or 0, int(settled or 0)),
                tuple(Pending(*each) for each in pending) if pending else (),
            )
    return heads


def _head_of(
    time_us: int | None, count: int | str | None, settled_us: int | None, settled: int | str | None
) -> Head | None:
    """Return a head without pending recounts."""
    if time_us is None:
        return None
    return Head(
        Checkpoint(time_us, int(count or 0)), Checkpoint(settled_us or 0, int(settled or 0))
    )


def update_heads(connection: sqlite3.Connection, column: str, rows: str) -> None:
    """Set a column and its time unless that would move the time back."""
    connection.execute(
        f"UPDATE counters SET {column}_at = n.at, {column} = n.count FROM (SELECT"
        " json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS at,"
        " json_extract(value, '$[2]') AS count FROM json_each(?)) n"
        f" WHERE counters.id = n.id AND n.at >= coalesce(counters.{column}_at, 0)",
        (rows,),
    )


def _delete_pending(connection: sqlite3.Connection, rows: str) -> None:
    connection.execute(
        "DELETE FROM pending WHERE (counter, recount, start) IN (SELECT"
        " json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')"
        " FROM json_each(?))",
        (rows,),
    )
