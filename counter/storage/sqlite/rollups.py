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

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, dropwhile, groupby, islice
from typing import Any, Final, NamedTuple

from counter.errors import NamespaceUnknownError, UnavailableError
from counter.partitions import shard_of, slice_of
from counter.storage.sqlite.database import SqliteDatabase, bulk
from counter.storage.sqlite.events import (
    counter_ids,
    counter_names,
    first_event,
    fold_rows_of,
    make_counters,
    sums_between,
)
from counter.storage.sqlite.schema import events_table, one_json, to_cell, to_fold, to_json
from counter.types import (
    AtomicMark,
    Checkpoint,
    CounterUpdate,
    Fold,
    Head,
    Mark,
    Namespace,
    Pending,
    WindowRow,
)
from counter.windows import window_of

#: Names or ids of counters that one statement looks up.
_LOOKED_UP_AT_ONCE: Final = 1_000
#: Counters of the live tail whose sums one pass over a window reads.
_FOLDED_AT_ONCE: Final = 10_000
_BY_NAME: Final = "c.namespace = ? AND c.name = j.value"
_BY_ID: Final = "c.id = j.value"
_COUNTERS_OF_ROWS: Final = (
    " FROM json_each(?) j CROSS JOIN counters c ON c.id = json_extract(j.value, '$[0]')"
)

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
        #: The counters of the marks that were read last: namespace, name, id. It is replaced and
        #: never modified, because all threads read it. Missing counters are looked up by name.
        self._marked: Mapping[int, Mapping[str, int]] = {}
        #: The walk over dirty windows that the last page left unfinished, and what continues it.
        self._walk: tuple[tuple[Any, ...], Iterator[_Dirty]] | None = None

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        await self._db.write(lambda connection: self._leave_marks(connection, namespace, marks))
        return {}

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        """Do nothing: one transaction writes all of an atomic add or nothing."""

    def _leave_marks(
        self, connection: sqlite3.Connection, namespace: Namespace, marks: Sequence[Mark]
    ) -> None:
        # Dirty windows are found in the log: only requests for a recount are stored.
        marks = [mark for mark in marks if mark.recount_us]
        names = list(dict.fromkeys(mark.counter for mark in marks))
        make_counters(connection, namespace.id, names)
        ids = counter_ids(connection, namespace.id, names)
        shards = namespace.settings.shards
        self._db.tally.mark(mark.recount_us for mark in marks)
        bulk(
            connection,
            "INSERT OR IGNORE INTO marks",
            [
                (
                    namespace.id,
                    shard_of(m.counter, shards),
                    m.window_us,
                    ids[m.counter],
                    m.recount_us,
                )
                for m in marks
            ],
        )

    async def fence(self) -> int:
        """Return the clock, read by the writer between two commits."""
        return await self._db.write(lambda _: self._db.clock.now_us())

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        """Return the watermarks of the last commit, from memory."""
        return tuple(self._through(namespace))

    def _through(self, namespace: Namespace) -> Sequence[int]:
        through = self._db.watermarks.get(namespace.id)
        if through is None:
            raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
        return through

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
        span = (after_us, through_us)
        return await self._db.scan(
            lambda connection: self._dirty_page(connection, namespace, shard, span, start, limit)
        )

    def _dirty_page(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        shard: int,
        span: tuple[int, int],
        start: Mark | None,
        limit: int,
    ) -> list[Mark]:
        """Return the next page; a walk that *start* continues goes on where it was."""
        walk, self._walk = self._walk, None
        key = (namespace.id, shard, *span, start and start[:3])
        if start is None or walk is None or walk[0] != key:
            entries = self._dirty_walk(connection, namespace, shard, span)
            if start is not None:
                ids = counter_ids(connection, namespace.id, [start.counter])
                last = (start[0], not start[2], ids[start.counter], start[2])
                entries = dropwhile(lambda each: each[:4] <= last, entries)
        else:
            entries = walk[1]
        found = list(islice(entries, limit))
        marks = [Mark(each.window_us, each.counter, each.recount_us, each.fold) for each in found]
        self._marked = {namespace.id: {each.counter: each.counter_id for each in found}}
        if len(found) == limit:
            self._walk = ((*key[:4], marks[-1][:3]), entries)
        return marks

    def _dirty_walk(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        shard: int,
        span: tuple[int, int],
    ) -> Iterator[_Dirty]:
        """Yield what is dirty in a span of windows, in order: of each window first the counters
        that are to be recounted, then those with events that no checkpoint includes."""
        after_us, through_us = span
        where = "FROM marks m WHERE m.namespace = ? AND m.shard = ? AND m.start"
        recounted: list[int] = one_json(
            connection,
            f"SELECT json_group_array(DISTINCT m.start) {where} > ? AND m.start <= ?",
            (namespace.id, shard, *span),
        )
        since_us = max(after_us, self._through(namespace)[shard])
        held = self._db.live.counters(
            namespace.id, namespace.settings.rollup_window_us, since_us, through_us
        )
        logged = self._log_windows(connection, namespace, (since_us, through_us))
        windows = merge(sorted(recounted), logged if held is None else sorted(held))
        for window_us, _ in groupby(windows):
            rows = one_json(
                connection,
                "SELECT json_group_array(json_array(counter, recount, name)) FROM (SELECT"
                " m.counter, m.recount, (SELECT name FROM counters WHERE id = m.counter) AS name"
                f" {where} = ? ORDER BY m.counter, m.recount)",
                (namespace.id, shard, window_us),
            )
            for counter_id, recount_us, name in rows:
                yield _Dirty(window_us, False, counter_id, recount_us, name, None)
            if window_us <= since_us:
                continue
            for counter_id, name, fold in (
                self._log_folds(connection, namespace, shard, window_us)
                if held is None
                else self._held_folds(connection, namespace, shard, window_us, held)
            ):
                yield _Dirty(window_us, True, counter_id, 0, name, fold)

    def _log_windows(
        self, connection: sqlite3.Connection, namespace: Namespace, span: tuple[int, int]
    ) -> Iterator[int]:
        """Yield the windows that start in ``(after, through]`` with events of any namespace."""
        size_us = namespace.settings.rollup_window_us
        at_us, until_us = (window_of(each_us, size_us) + size_us for each_us in span)
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
        table, last_us = self._place(namespace, window_us)
        for part in sums_between(connection, table, window_us, last_us):
            names = counter_names(connection, namespace.id, [each[0] for each in part])
            ours = {each: name for each, name in names if shard_of(name, shards) == shard}
            yield from _named(connection, table, (window_us, last_us), part, ours)

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
        known = self._db.ids.of(namespace.id)
        # Each name is looked up once, because the writer adds and removes names at the same time.
        found, unknown = dict[int, str](), list[str]()
        for name in ours:
            if (counter_id := known.get(name)) is None:
                unknown.append(name)
            else:
                found[counter_id] = name
        for at in range(0, len(unknown), _LOOKED_UP_AT_ONCE):
            ids = counter_ids(connection, namespace.id, unknown[at : at + _LOOKED_UP_AT_ONCE])
            found.update((counter_id, name) for name, counter_id in ids.items())
        table, last_us = self._place(namespace, window_us)
        # By id: counters that were made together share pages.
        in_order = sorted(found)
        for at in range(0, len(in_order), _FOLDED_AT_ONCE):
            some = in_order[at : at + _FOLDED_AT_ONCE]
            for part in sums_between(connection, table, window_us, last_us, some):
                yield from _named(connection, table, (window_us, last_us), part, found)

    def _place(self, namespace: Namespace, window_us: int) -> tuple[str, int]:
        """Return the table with the events of a window, and the window's last instant."""
        each = slice_of(self._db.slices[namespace.dataset.id], window_us)
        table = events_table(namespace.dataset.id, each.start_us)
        return table, window_us + namespace.settings.rollup_window_us - 1

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> Sequence[AtomicMark]:
        """Return no marks: one transaction writes all of an atomic add or nothing."""
        return ()

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], *, after_us: int, through_us: int
    ) -> Collection[int]:
        # One search of the index for each shard, however many recounts there are.
        sql = (
            "SELECT json_group_array(j.value) FROM json_each(?) j WHERE EXISTS (SELECT 1"
            " FROM marks WHERE namespace = ? AND shard = j.value AND start > ? AND start <= ?)"
        )
        parameters = (to_json(shards), namespace.id, after_us, through_us)

        def query(connection: sqlite3.Connection) -> Collection[int]:
            found = set(one_json(connection, sql, parameters))
            watermarks = self._through(namespace)
            since_us = max(after_us, min(watermarks[shard] for shard in shards))
            held = self._db.live.counters(
                namespace.id, namespace.settings.rollup_window_us, since_us, through_us
            )
            if held is None:
                logged = self._log_windows(connection, namespace, (since_us, through_us))
                return found if next(logged, None) is None else shards
            for name in chain.from_iterable(held.values()):
                found.add(shard_of(name, len(watermarks)))
                if len(found) == len(watermarks):
                    break
            return found.intersection(shards)

        return await self._db.scan(query)

    async def heads(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[Head | None]:
        if len(counters) == 1:
            rows = self._db.inline.row(_ONE_HEAD, (namespace.id, counters[0]))
            if rows is not None and not (rows and rows[0][4]):
                return (_head_of(*rows[0][:4]) if rows else None,)
        result: Sequence[Head | None] = await self._db.reader.call(
            (self._heads, (namespace.id, counters))
        )
        return result

    def _heads(
        self, connection: sqlite3.Connection, jobs: Sequence[tuple[int, Sequence[str]]]
    ) -> list[Any]:
        wanted: dict[int, dict[str, None]] = {}
        for namespace_id, names in jobs:
            wanted.setdefault(namespace_id, {}).update(dict.fromkeys(names))
        heads = {
            namespace_id: _select_heads(
                connection, namespace_id, list(names), self._marked.get(namespace_id, {})
            )
            for namespace_id, names in wanted.items()
        }
        return [[heads[namespace_id].get(name) for name in names] for namespace_id, names in jobs]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], *, after_us: int, through_us: int
    ) -> Sequence[Sequence[WindowRow]]:
        sql = (
            "SELECT json_group_array(json_array(k, start, cleared, total)) FROM ("
            " SELECT j.key AS k, w.start, w.cleared, w.total FROM json_each(?) j"
            " CROSS JOIN counters c ON c.namespace = ? AND c.name = j.value"
            " CROSS JOIN windows w ON w.counter = c.id AND w.start > ? AND w.start <= ?"
            " ORDER BY j.key, w.start)"
        )
        parameters = (to_json(counters), namespace.id, after_us, through_us)

        def query(connection: sqlite3.Connection) -> list[list[WindowRow]]:
            found: list[list[WindowRow]] = [[] for _ in counters]
            for index, start_us, cleared, total in one_json(connection, sql, parameters):
                found[index].append(WindowRow(start_us, bool(cleared), int(total)))
            return found

        return await self._db.scan(query)

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        ids = await self._ids_for(namespace, [each.counter for each in updates])
        rows = to_json(
            (
                ids[each.counter],
                row.window_us,
                int(row.cleared),
                to_cell(row.total),
                each.checkpoint.time_us,
            )
            for each in updates
            for row in each.rows
        )
        heads = to_json(
            (ids[each.counter], each.checkpoint.time_us, to_cell(each.checkpoint.count))
            for each in updates
        )
        settled = to_json(
            (ids[each.counter], each.settled.time_us, to_cell(each.settled.count))
            for each in updates
            if each.settled is not None
        )
        done = to_json(
            (ids[each.counter], pending.recount_us, pending.window_us)
            for each in updates
            for pending in each.pending_done
        )

        def change(connection: sqlite3.Connection) -> None:
            _update_heads(connection, "checkpoint", heads)
            if settled != "[]":
                _update_heads(connection, "settled", settled)
                _delete_settled_rows(connection, settled)
            _upsert_rows(connection, rows)
            if done != "[]":
                _delete_pending(connection, done)

        await self._db.write(change)

    async def _ids_for(self, namespace: Namespace, names: Sequence[str]) -> Mapping[str, int]:
        """Return the ids of *names*; missing counters are created."""
        marked = self._marked.get(namespace.id, {})
        missing = [name for name in names if name not in marked]
        if not missing:
            return marked

        def change(connection: sqlite3.Connection) -> dict[str, int]:
            make_counters(connection, namespace.id, missing)
            return counter_ids(connection, namespace.id, missing)

        return {**marked, **await self._db.write(change)}

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

    async def leave_pending(
        self, namespace: Namespace, recounts: Sequence[tuple[str, Pending]]
    ) -> None:
        names = list(dict.fromkeys(name for name, _ in recounts))

        def change(connection: sqlite3.Connection) -> None:
            make_counters(connection, namespace.id, names)
            ids = counter_ids(connection, namespace.id, names)
            rows = [(ids[name], *pending) for name, pending in recounts]
            bulk(connection, "INSERT OR IGNORE INTO pending", rows)
            for name, pending in recounts:
                if pending.is_delete:
                    self._db.ids.forget(namespace.id, name)

        await self._db.write(change)

    async def unlist(self, namespace: Namespace, counter: str, deleted_us: int) -> None:
        """Do nothing: the delete that was left takes the counter off the list."""


class _Dirty(NamedTuple):
    """A dirty window of a counter, in the order of a walk."""

    window_us: int
    #: False if a recount is requested.
    has_events: bool
    counter_id: int
    recount_us: int
    counter: str
    fold: Fold | None


def _named(
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


def _select_heads(
    connection: sqlite3.Connection, namespace_id: int, names: Sequence[str], ids: Mapping[str, int]
) -> dict[str, Head]:
    by_id = all(name in ids for name in names)
    wanted = (to_json(ids[name] for name in names),) if by_id else (to_json(names), namespace_id)
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
                tuple(Pending(*each) for each in pending or ()),
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


def _update_heads(connection: sqlite3.Connection, column: str, rows: str) -> None:
    """Set a column and its time unless that would move the time back."""
    connection.execute(
        f"UPDATE counters SET {column}_at = n.at, {column} = n.count FROM (SELECT"
        " json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS at,"
        " json_extract(value, '$[2]') AS count FROM json_each(?)) n"
        f" WHERE counters.id = n.id AND n.at >= coalesce(counters.{column}_at, 0)",
        (rows,),
    )


def _upsert_rows(connection: sqlite3.Connection, rows: str) -> None:
    """Set rows, except settled ones and those of a batch that is older than the checkpoint."""
    connection.execute(
        "INSERT INTO windows SELECT c.id, json_extract(j.value, '$[1]'),"
        f" json_extract(j.value, '$[2]'), json_extract(j.value, '$[3]'){_COUNTERS_OF_ROWS}"
        " WHERE c.checkpoint_at <= json_extract(j.value, '$[4]')"
        " AND json_extract(j.value, '$[1]') > coalesce(c.settled_at, 0)"
        " ON CONFLICT (counter, start) DO UPDATE SET cleared = excluded.cleared,"
        " total = excluded.total",
        (rows,),
    )


def _delete_settled_rows(connection: sqlite3.Connection, rows: str) -> None:
    connection.execute(
        "DELETE FROM windows WHERE (counter, start) IN (SELECT w.counter, w.start"
        f"{_COUNTERS_OF_ROWS} CROSS JOIN windows w"
        " ON w.counter = c.id AND w.start <= c.settled_at)",
        (rows,),
    )


def _delete_pending(connection: sqlite3.Connection, rows: str) -> None:
    connection.execute(
        "DELETE FROM pending WHERE (counter, recount, start) IN (SELECT"
        " json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')"
        " FROM json_each(?))",
        (rows,),
    )
