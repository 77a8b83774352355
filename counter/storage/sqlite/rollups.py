"""Store marks, watermarks and counts in SQLite, with one set-based statement per batch.

A counter's checkpoint and settled fold are in its row of ``counters``; its window rows and pending
recounts are in their own tables. One transaction writes them together.

Marks contain counters' ids, and the rollup reads by id: with many counters each look-up by name
costs a page of the index, and there would be four of them for each counter of a batch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from counter.errors import NamespaceUnknownError, UnavailableError
from counter.partitions import shard_of
from counter.storage.sqlite.database import Database, bulk
from counter.storage.sqlite.events import counter_ids, make_counters
from counter.storage.sqlite.schema import one_json, to_cell, to_json
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

    def __init__(self, database: Database) -> None:
        self._db = database
        #: The counters of the marks that were read last: namespace, name, id. It is replaced and
        #: never modified, because all threads read it. Missing counters are looked up by name.
        self._marked: Mapping[int, Mapping[str, int]] = {}

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        await self._db.write(lambda connection, _: self._leave_marks(connection, namespace, marks))
        return {}

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        """Do nothing: one transaction writes all of an atomic add or nothing."""

    def _leave_marks(
        self, connection: sqlite3.Connection, namespace: Namespace, marks: Sequence[Mark]
    ) -> None:
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
        result: int = await self._db.write(lambda _connection, _now_us: self._db.clock.now_us())
        return result

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        """Return the watermarks of the last commit, from memory."""
        through = self._db.watermarks.get(namespace.id)
        if through is None:
            raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
        return tuple(through)

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
        def query(connection: sqlite3.Connection) -> list[Mark]:
            where, parameters = "", [namespace.id, shard, after_us, through_us]
            if start is not None:
                ids = counter_ids(connection, namespace.id, [start.counter])
                where = " AND (m.start, m.counter, m.recount) > (?, ?, ?)"
                parameters += [start.window_us, ids[start.counter], start.recount_us]
            sql = (
                "SELECT json_group_array(json_array(start, name, recount, counter)) FROM ("
                " SELECT m.start, c.name, m.recount, m.counter FROM marks m"
                " JOIN counters c ON c.id = m.counter"
                f" WHERE m.namespace = ? AND m.shard = ? AND m.start > ? AND m.start <= ?{where}"
                " ORDER BY m.start, m.counter, m.recount LIMIT ?)"
            )
            found: list[tuple[int, str, int, int]]
            found = one_json(connection, sql, (*parameters, limit))
            self._marked = {namespace.id: {name: number for _, name, _, number in found}}
            return [Mark(*each[:3]) for each in found]

        result: Sequence[Mark] = await self._db.scan(query)
        return result

    async def dirty_atomic(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> Sequence[AtomicMark]:
        """Return no marks: one transaction writes all of an atomic add or nothing."""
        return ()

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], *, after_us: int, through_us: int
    ) -> Collection[int]:
        # One search of the index for each shard, however many marks there are.
        sql = (
            "SELECT json_group_array(j.value) FROM json_each(?) j WHERE EXISTS (SELECT 1"
            " FROM marks WHERE namespace = ? AND shard = j.value AND start > ? AND start <= ?)"
        )
        parameters = (to_json(shards), namespace.id, after_us, through_us)
        found: Collection[int] = await self._db.scan(
            lambda connection: one_json(connection, sql, parameters)
        )
        return found

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
        self,
        connection: sqlite3.Connection,
        _now_us: int,
        jobs: Sequence[tuple[int, Sequence[str]]],
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

        result: Sequence[Sequence[WindowRow]] = await self._db.scan(query)
        return result

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

        def change(connection: sqlite3.Connection, _now_us: int) -> None:
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

        def change(connection: sqlite3.Connection, _now_us: int) -> dict[str, int]:
            make_counters(connection, namespace.id, missing)
            return counter_ids(connection, namespace.id, missing)

        return {**marked, **await self._db.write(change)}

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        def change(connection: sqlite3.Connection, _now_us: int) -> None:
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
            lambda connection, _: connection.execute(
                "DELETE FROM marks WHERE namespace = ? AND shard = ? AND start <= ?",
                (namespace.id, shard, through_us),
            )
        )

    async def leave_pending(
        self, namespace: Namespace, recounts: Sequence[tuple[str, Pending]]
    ) -> None:
        names = list(dict.fromkeys(name for name, _ in recounts))

        def change(connection: sqlite3.Connection, _now_us: int) -> None:
            make_counters(connection, namespace.id, names)
            ids = counter_ids(connection, namespace.id, names)
            rows = [(ids[name], *pending) for name, pending in recounts]
            bulk(connection, "INSERT OR IGNORE INTO pending", rows)

        await self._db.write(change)


def _select_heads(
    connection: sqlite3.Connection,
    namespace_id: int,
    names: Sequence[str],
    ids: Mapping[str, int],
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
