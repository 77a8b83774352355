"""Store namespaces, datasets and slices in SQLite."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from counter.errors import StoreUnavailableError, invariant
from counter.holds import AFTER_HELD
from counter.limits import CLOCK_STEP_MAX_US, INT64_MAX, SECOND
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.event_rows import latest_event, namespaces_since, tail_rows
from counter.storage.sqlite.schema import (
    DROPPED,
    EVENTS_DDL,
    events_table,
    one_json,
)
from counter.types import (
    DELETED,
    ClockReading,
    CounterType,
    Dataset,
    Era,
    Namespace,
    NamespaceSettings,
    Slice,
    TokenBlock,
)
from counter.windows import first_watermark, window_of

_log = logging.getLogger("counter.sqlite")
_PURGE_ROWS: Final = 10_000
_PURGE_COUNTERS: Final = 100
#: A transaction deletes so many events of a dropped slice, in a few milliseconds for which adds
#: wait; so many transactions are one step.
_PURGE_EVENTS: Final = 4_000
_PURGE_TRANSACTIONS: Final = 25
_TAIL_EVENTS_MAX: Final = 500_000
#: Whether anything was ever counted or given a time. Counters outlive their events.
_IS_USED: Final = (
    "SELECT EXISTS (SELECT 1 FROM counters) OR EXISTS (SELECT 1 FROM resolutions)"
    " OR EXISTS (SELECT 1 FROM reservations) OR (SELECT next FROM tokens) > 0"
)
_NO_UPPER_BOUND: Final = "\U0010ffff"


class SqliteControl:
    """See :class:`counter.ports.ControlPlane`."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._db = database

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the state that the store keeps in memory."""
        for each in self._db.defaults:
            body = json.dumps({k: v for k, v in asdict(each).items() if k not in ("id", "name")})
            connection.execute(
                "INSERT INTO datasets (name, body) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (each.name, body),
            )
        self._begin_again(connection)
        rows = connection.execute("SELECT id, name, body, dropped_before FROM datasets").fetchall()
        for dataset_id, name, body, dropped_before in rows:
            self._db.datasets[dataset_id] = Dataset(id=dataset_id, name=name, **json.loads(body))
            self._db.dropped_before[dataset_id] = dropped_before
            self._db.slices[dataset_id] = _select_slices(connection, dataset_id, dropped_before)
        live = "SELECT id FROM namespaces WHERE name IS NOT NULL"
        for namespace_id, _, through in connection.execute(
            f"SELECT * FROM watermarks WHERE namespace IN ({live}) ORDER BY namespace, shard"
        ):
            self._db.watermarks.setdefault(namespace_id, []).append(through)
        (latest,) = connection.execute("SELECT max(event_time) FROM resolutions").fetchone()
        self._db.resolved_through_us = latest or 0
        self._db.holding.update(
            each
            for (each,) in connection.execute(
                "SELECT DISTINCT c.namespace FROM holds h CROSS JOIN counters c ON c.id = h.counter"
            )
        )
        self._load_tail(connection)

    def _begin_again(self, connection: sqlite3.Connection) -> None:
        """Create slices and watermarks again if they are ahead of the clock and nothing was ever
        counted: the clock of the first start was wrong, and no data depends on it yet."""
        now_us = self._db.clock.now_us()
        ahead_us = latest_time(connection) - now_us
        if ahead_us <= CLOCK_STEP_MAX_US or connection.execute(_IS_USED).fetchone()[0]:
            return
        connection.execute("BEGIN IMMEDIATE")
        for dataset_id, start_us in connection.execute(
            "SELECT dataset, start FROM slices"
        ).fetchall():
            connection.execute(f"DROP TABLE {events_table(dataset_id, start_us)}")
        connection.execute("DELETE FROM slices")
        connection.execute("UPDATE datasets SET dropped_before = 0")
        for namespace_id, text, body in connection.execute(
            "SELECT n.id, n.settings, d.body FROM namespaces n JOIN datasets d ON d.id = n.dataset"
        ).fetchall():
            settings, dataset = _settings_of(text), Dataset(id=0, name="", **json.loads(body))
            eras = json.dumps((Era(0, settings.accept_limit_us),))
            through_us = first_watermark(dataset, settings, now_us)
            connection.execute(
                "UPDATE namespaces SET created_at = ?, eras = ? WHERE id = ?",
                (now_us, eras, namespace_id),
            )
            connection.execute(
                "UPDATE watermarks SET through = ? WHERE namespace = ?", (through_us, namespace_id)
            )
        connection.execute("COMMIT")
        _log.warning(
            "the data directory was made by a clock that was %d s ahead of this one; nothing was"
            " counted in it, and it begins again",
            ahead_us // SECOND,
        )

    def _load_tail(self, connection: sqlite3.Connection) -> None:
        """Sum the events that no checkpoint includes: few, unless the rollup was far behind."""
        for dataset_id in self._db.datasets:
            rows = connection.execute(
                "SELECT id, settings FROM namespaces WHERE name IS NOT NULL AND dataset = ?",
                (dataset_id,),
            )
            settings = {namespace_id: _settings_of(text) for namespace_id, text in rows}
            # Best-effort counters have no events, and their watermarks never move.
            sizes = {
                namespace_id: each.rollup_window_us
                for namespace_id, each in settings.items()
                if each.counter_type is not CounterType.BEST_EFFORT
            }
            held_us = {each: min(self._db.watermarks[each]) + 1 for each in sizes}
            from_us = min(held_us.values(), default=0)
            tables = [
                events_table(dataset_id, each.start_us)
                for each in self._db.slices[dataset_id]
                if sizes and each.end_us > from_us
            ]
            tail = [
                row
                for table in tables
                for row in tail_rows(connection, table, from_us, _TAIL_EVENTS_MAX)
            ]
            if len(tail) >= _TAIL_EVENTS_MAX:
                # Reads and the rollup go to the log until all of these events are rolled up, except
                # for namespaces without any: a worker must not search the log for each of them.
                _log.info("dataset %d has a long tail", dataset_id)
                latest_us = max(latest_event(connection, table) for table in tables)
                busy = namespaces_since(connection, tables, from_us) if len(sizes) > 1 else sizes
                for each in sizes.keys() & busy:
                    held_us[each] = window_of(latest_us, sizes[each]) + sizes[each]
                tail = []
            for namespace_id, since_us in held_us.items():
                self._db.live.begin(namespace_id, since_us)
            for namespace_id, event in tail:
                if event.event_time_us >= held_us.get(namespace_id, INT64_MAX):
                    self._db.live.add(namespace_id, sizes[namespace_id], (event,))

    async def read_clock(self) -> ClockReading:
        """Return how far the latest stored time is ahead of the clock, 0 if it is not."""
        latest_us: int = await self._db.read(latest_time)
        return ClockReading(max(0, latest_us - self._db.clock.wall_us()), 0)

    async def datasets(self) -> Sequence[Dataset]:
        return list(self._db.datasets.values())

    async def namespaces(self) -> Sequence[Namespace]:
        def query(connection: sqlite3.Connection) -> list[Namespace]:
            rows = connection.execute(
                "SELECT id, name, dataset, settings, eras, created_at, version FROM namespaces"
                " WHERE name IS NOT NULL ORDER BY name"
            ).fetchall()
            return [self._namespace(row) for row in rows]

        return await self._db.scan(query)

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        dataset = next(d for d in self._db.datasets.values() if d.name == settings.dataset)
        eras = (Era(0, settings.accept_limit_us),)
        through_us = first_watermark(dataset, settings, now_us)

        def change(connection: sqlite3.Connection) -> Namespace | None:
            row = connection.execute(
                "INSERT INTO namespaces (name, dataset, settings, eras, created_at, version)"
                " VALUES (?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING RETURNING *",
                (name, dataset.id, json.dumps(settings.document()), json.dumps(eras), now_us),
            ).fetchone()
            if row is None:
                return None
            connection.executemany(
                "INSERT INTO watermarks VALUES (?, ?, ?)",
                [(row[0], shard, through_us) for shard in range(settings.shards)],
            )
            # At once, because the caller may be gone when this commits.
            self._db.live.begin(row[0], through_us + 1)
            self._db.watermarks[row[0]] = [through_us] * settings.shards
            self._db.forget_bounds()
            return self._namespace(row)

        return await self._db.write(change)

    async def update_namespace(self, namespace: Namespace, updated: Namespace) -> bool:
        values = (json.dumps(updated.document()), json.dumps(updated.eras))

        def change(connection: sqlite3.Connection) -> bool:
            cursor = connection.execute(
                "UPDATE namespaces SET settings = ?, eras = ?, version = version + 1"
                " WHERE id = ? AND name IS NOT NULL AND version = ?",
                (*values, namespace.id, namespace.version),
            )
            self._db.forget_bounds()
            return bool(cursor.rowcount)

        return await self._db.write(change)

    async def delete_namespace(self, namespace: Namespace) -> bool:
        def change(connection: sqlite3.Connection) -> bool:
            cursor = connection.execute(
                "UPDATE namespaces SET name = NULL WHERE id = ? AND name IS NOT NULL"
                " AND version = ?",
                (namespace.id, namespace.version),
            )
            if cursor.rowcount:
                # At once, not at the commit: appends of a later batch must not use it.
                self._db.watermarks.pop(namespace.id, None)
                self._db.live.forget_namespace(namespace.id)
            return bool(cursor.rowcount)

        stored = self._db.watermarks.get(namespace.id)
        try:
            deleted: bool = await self._db.write(change)
        except StoreUnavailableError:
            if stored is not None and await self._is_there(namespace):
                # The deletion failed; but a commit that reports an error may be on disk.
                self._db.watermarks[namespace.id] = stored
            raise
        return deleted

    async def _is_there(self, namespace: Namespace) -> bool:
        sql = "SELECT count(*) FROM namespaces WHERE id = ? AND name IS NOT NULL"
        found: int = await self._db.read(
            lambda connection: connection.execute(sql, (namespace.id,)).fetchone()[0],
        )
        return found > 0

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        sql = (
            "SELECT json_group_array(name) FROM (SELECT name FROM counters c WHERE namespace = ?"
            " AND name >= ? AND name < ? AND name > ? AND NOT EXISTS (SELECT 1 FROM pending p"
            f" WHERE p.counter = c.id AND p.recount = {DELETED}) ORDER BY name LIMIT ?)"
        )
        upper = prefix + _NO_UPPER_BOUND
        parameters = (namespace.id, prefix, upper, after or AFTER_HELD, limit)
        return await self._db.scan(lambda connection: one_json(connection, sql, parameters))

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        return tuple(self._db.slices[dataset.id])

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        def change(connection: sqlite3.Connection) -> list[Slice]:
            dropped_us = self._db.dropped_before[dataset.id]
            for each in (each for each in slices if each.end_us > dropped_us):
                table = events_table(dataset.id, each.start_us)
                connection.execute(EVENTS_DDL.format(table=table))
                parts = (each.time_bucket_us, each.event_buckets)
                connection.execute(
                    "INSERT INTO slices VALUES (?, ?, ?, ?, ?, NULL) ON CONFLICT DO NOTHING",
                    (dataset.id, each.start_us, each.end_us, *parts),
                )
            return _select_slices(connection, dataset.id, dropped_us)

        self._db.slices[dataset.id] = await self._db.write(change)

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        def change(connection: sqlite3.Connection) -> list[Slice]:
            connection.execute(
                "UPDATE slices SET retired_at = ? WHERE dataset = ? AND start = ?"
                " AND retired_at IS NULL",
                (now_us, dataset.id, start_us),
            )
            return _select_slices(connection, dataset.id, self._db.dropped_before[dataset.id])

        self._db.slices[dataset.id] = await self._db.write(change)

    async def drop_slice(self, dataset: Dataset, start_us: int) -> bool:
        """See :class:`counter.ports.ControlPlane`. The purge deletes the events: SQLite's only
        writer would take too long to drop a large table."""
        slices = self._db.slices[dataset.id]
        if start_us < self._db.dropped_before[dataset.id]:
            return True
        invariant(bool(slices) and slices[0].start_us == start_us, "slices drop in order")
        end_us = slices[0].end_us

        if await self._db.read(lambda connection: _has_holds(connection, dataset, end_us)):
            return False

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE datasets SET dropped_before = max(dropped_before, ?) WHERE id = ?",
                (end_us, dataset.id),
            )
            connection.execute(
                "DELETE FROM slices WHERE dataset = ? AND start = ?", (dataset.id, start_us)
            )
            # No late reader takes the events that are left for all of them.
            table = events_table(dataset.id, start_us)
            connection.execute(f"ALTER TABLE {table} RENAME TO {DROPPED}{table}")

        before_us = self._db.dropped_before[dataset.id]
        self._db.slices[dataset.id] = slices[1:]
        self._db.dropped_before[dataset.id] = end_us
        try:
            await self._db.write(change)
        except StoreUnavailableError:
            self._db.slices[dataset.id] = slices
            self._db.dropped_before[dataset.id] = before_us
            raise
        return True

    async def dropped_before(self, dataset: Dataset) -> int:
        return self._db.dropped_before[dataset.id]

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        def change(connection: sqlite3.Connection) -> TokenBlock:
            issuer, after, time_us = connection.execute(
                "UPDATE tokens SET next = next + ?, time = max(time, ?)"
                " RETURNING store, next, time",
                (count, now_us),
            ).fetchone()
            return TokenBlock(issuer, after - count, time_us)

        return await self._db.write(change)

    async def purge(self, now_us: int) -> bool:
        horizon_us = min(
            (now_us - 2 * each.retention_us - each.slice_us for each in self._db.datasets.values()),
            default=0,
        )
        for _ in range(_PURGE_TRANSACTIONS):
            if not await self._db.write(_purge_events):
                return await self._db.write(
                    lambda connection: _purge(connection, now_us, horizon_us)
                )
        return True

    def _namespace(self, row: tuple[Any, ...]) -> Namespace:
        namespace_id, name, dataset_id, text, eras, created_at_us, version = row
        document = json.loads(text)
        return Namespace(
            id=namespace_id,
            name=name,
            settings=NamespaceSettings.from_document(document),
            eras=tuple(Era(*era) for era in json.loads(eras)),
            dataset=replace(self._db.datasets[dataset_id]),
            created_at_us=created_at_us,
            version=version,
            announced_eras=Namespace.announced_in(document),
        )


def latest_time(connection: sqlite3.Connection) -> int:
    """Return the latest time that a clock gave the store, without times that clients chose."""
    (latest_us,) = connection.execute(
        "SELECT max(coalesce((SELECT max(through) FROM watermarks), 0),"
        " (SELECT max(time) FROM tokens),"
        " coalesce((SELECT max(dropped_before) FROM datasets), 0),"
        " coalesce((SELECT min(start) FROM slices), 0))"
    ).fetchone()
    return int(latest_us)


def _settings_of(text: str) -> NamespaceSettings:
    return NamespaceSettings.from_document(json.loads(text))


def _has_holds(connection: sqlite3.Connection, dataset: Dataset, before_us: int) -> bool:
    """Return whether holds from before an instant are open: they have expired, and a worker must
    end them first."""
    row = connection.execute(
        "SELECT 1 FROM holds h CROSS JOIN counters c ON c.id = h.counter CROSS JOIN namespaces n"
        " ON n.id = c.namespace WHERE h.time < ? AND n.dataset = ? AND n.name IS NOT NULL LIMIT 1",
        (before_us, dataset.id),
    ).fetchone()
    return row is not None


def _select_slices(
    connection: sqlite3.Connection, dataset_id: int, dropped_before_us: int
) -> list[Slice]:
    rows = connection.execute(
        "SELECT start, until, time_bucket, event_buckets, retired_at FROM slices"
        " WHERE dataset = ? AND start >= ? ORDER BY start",
        (dataset_id, dropped_before_us),
    )
    return [Slice(*row) for row in rows]


def _purge_events(connection: sqlite3.Connection) -> bool:
    """Delete the first events of a dropped slice; return False if no dropped slice is left."""
    row = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB ? LIMIT 1",
        (f"{DROPPED}*",),
    ).fetchone()
    if row is None:
        return False
    (table,), key = row, "event_time, counter, event_id, item"
    last = connection.execute(
        f"SELECT {key} FROM {table} ORDER BY {key} LIMIT 1 OFFSET {_PURGE_EVENTS}"
    ).fetchone()
    if last is None:
        connection.execute(f"DROP TABLE {table}")
    else:
        connection.execute(f"DELETE FROM {table} WHERE ({key}) < (?, ?, ?, ?)", last)
    return True


def _purge(connection: sqlite3.Connection, now_us: int, horizon_us: int) -> bool:
    """Delete a bounded amount; return True if there may be more."""
    deleted = connection.execute(
        "DELETE FROM reservations WHERE (namespace, nonce) IN"
        " (SELECT namespace, nonce FROM reservations WHERE expires <= ? LIMIT ?)",
        (now_us, _PURGE_ROWS),
    ).rowcount
    deleted += connection.execute(
        "DELETE FROM resolutions WHERE (namespace, event_time, event_id, scope) IN (SELECT"
        " namespace, event_time, event_id, scope FROM resolutions WHERE event_time < ? LIMIT ?)",
        (horizon_us, _PURGE_ROWS),
    ).rowcount
    gone = connection.execute("SELECT id FROM namespaces WHERE name IS NULL LIMIT 1").fetchone()
    if gone is None:
        return deleted >= _PURGE_ROWS
    if not _purge_counters(connection, gone[0]):
        for table in ("marks", "watermarks", "resolutions", "reservations"):
            connection.execute(f"DELETE FROM {table} WHERE namespace = ?", (gone[0],))
        connection.execute("DELETE FROM namespaces WHERE id = ?", (gone[0],))
    return True


def _purge_counters(connection: sqlite3.Connection, namespace_id: int) -> bool:
    """Delete some rows or counters of a deleted namespace; False if none were left.

    Their events are dropped with their slices: ids are never reused, so they are unreachable.
    """
    rows = connection.execute(
        "DELETE FROM recent_windows WHERE (namespace, start, counter) IN (SELECT namespace, start,"
        " counter FROM recent_windows WHERE namespace = ? LIMIT ?)",
        (namespace_id, _PURGE_ROWS),
    ).rowcount
    if rows:
        # A rollup that is under way could move them to a counter that is gone.
        return True
    ids = connection.execute(
        "SELECT id FROM counters WHERE namespace = ? LIMIT ?", (namespace_id, _PURGE_COUNTERS)
    ).fetchall()
    for table in ("windows", "pending", "holds"):
        connection.executemany(f"DELETE FROM {table} WHERE counter = ?", ids)
    connection.executemany("DELETE FROM counters WHERE id = ?", ids)
    return bool(ids)
