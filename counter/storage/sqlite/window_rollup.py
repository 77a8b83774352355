"""Roll up most of a large window in SQL, some hundreds of counters at a time.

Most counters of a large window have only new adds. Their sums go from the log to their rows and
checkpoints as JSON that Python does not decode. The worker would make a dozen objects for each
counter, and the event loop would wait for the interpreter lock. The result is the same: a row is
the fold of its window's events, and a checkpoint the fold of the rows. Counters that need more than
that, such as a recount, are left to the worker.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Final

from counter.capabilities import RolledPart
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.event_rows import counter_names, some_sums
from counter.storage.sqlite.rollups import SqliteRollups, named, update_heads
from counter.storage.sqlite.schema import from_json
from counter.storage.sqlite.window_rows import RowsToWrite, group_of, has_passed_rows, write_rows
from counter.types import DirtyMark, Namespace, Span

#: Windows with fewer counters are left to the worker, which rolls up several of them at once.
_COUNTERS_MIN: Final = 1_000
#: Within these bounds neither a sum, nor a count, nor their total exceeds 64 bits. A larger count
#: is stored as text, which SQLite orders after all integers.
_HIGH_MAX: Final = 2**29
_COUNT_MAX: Final = 2**62
#: Select heads, rows, and names with counts, for the counters in *sums* that have only new adds.
_USUAL: Final = (
    "WITH usual AS (SELECT c.id, c.name, (j.value ->> 2) * 4294967296 + (j.value ->> 3) AS total,"
    " coalesce(c.checkpoint, 0) AS count FROM json_each(:sums) j"
    " CROSS JOIN counters c ON c.id = j.value ->> 0 AND c.namespace = :namespace"
    " WHERE j.value ->> 1 = 0 AND abs(j.value ->> 2) < :high_max"
    " AND coalesce(c.checkpoint_at, 0) < :start AND coalesce(c.settled_at, 0) >= :settled"
    " AND coalesce(c.checkpoint, 0) BETWEEN -:count_max AND :count_max"
    " AND NOT EXISTS (SELECT 1 FROM pending p WHERE p.counter = c.id))"
    " SELECT json_group_array(json_array(id, :last, count + total)),"
    " json_group_array(json_array(id, :start, 0, total, :last)),"
    " json_group_array(json_array(id, name, count + total)) FROM usual"
)


class SqliteWindowRollup:
    """See :class:`counter.capabilities.RollWindow`."""

    def __init__(self, database: SqliteDatabase, rollups: SqliteRollups) -> None:
        self._db = database
        self._rollups = rollups

    async def roll(
        self, namespace: Namespace, shard: int, span: Span, dropped_before_us: int
    ) -> AsyncGenerator[RolledPart, None]:
        """See :class:`counter.capabilities.RollWindow`."""
        window_us = await self._db.scan(
            lambda connection: self._first_window(connection, namespace, shard, span)
        )
        if window_us is None:
            return
        after_id: int | None = -1
        while after_id is not None:
            sums, after_id = await self._db.scan(
                partial(self._sums, namespace=namespace, window_us=window_us, after_id=after_id)
            )
            for part in sums:
                yield await self._roll_part(namespace, window_us, dropped_before_us, part)

    def _first_window(
        self, connection: sqlite3.Connection, namespace: Namespace, shard: int, span: Span
    ) -> int | None:
        """Return the first window of *span* with events that no checkpoint includes; None if it is
        left to the worker."""
        window_us = self._rollups.first_large_window(namespace, shard, span, _COUNTERS_MIN)
        if window_us is None:
            return None
        recounts = connection.execute(
            "SELECT 1 FROM marks WHERE namespace = ? AND shard = ? AND start BETWEEN ? AND ?",
            (namespace.id, shard, span.from_us, window_us),
        )
        return None if recounts.fetchone() else window_us

    def _sums(
        self, connection: sqlite3.Connection, namespace: Namespace, window_us: int, after_id: int
    ) -> tuple[list[str], int | None]:
        table, last_us = self._rollups.place(namespace, window_us)
        having = "EXISTS (SELECT 1 FROM counters c WHERE c.id = e.counter AND c.namespace = ?)"
        span = (window_us, last_us, after_id)
        return some_sums(connection, table, span, having=having, values=(namespace.id,))

    async def _roll_part(
        self, namespace: Namespace, window_us: int, dropped_before_us: int, sums: str
    ) -> RolledPart:
        """Write rows and checkpoints of the counters in *sums* that have only new adds, and return
        the marks of the others."""
        group_us = group_of(namespace, window_us)
        values = {
            "sums": sums,
            "namespace": namespace.id,
            "start": window_us,
            "last": window_us + namespace.settings.rollup_window_us - 1,
            "settled": dropped_before_us - 1,
            "high_max": _HIGH_MAX,
            "count_max": _COUNT_MAX,
        }

        def change(connection: sqlite3.Connection) -> tuple[list[tuple[int, str, int]], bool]:
            heads, rows, counts = connection.execute(_USUAL, values).fetchone()
            update_heads(connection, "checkpoint", heads)
            usual = from_json(counts)
            write_rows(connection, namespace.id, RowsToWrite(len(usual), rows, "[]"))
            return usual, has_passed_rows(connection, namespace.id, group_us)

        usual, has_passed = await self._db.write(change)
        if has_passed:
            await self._rollups.move_passed_rows(namespace, group_us, len(usual))
        done = {counter_id for counter_id, _, _ in usual}
        left = [each for each in from_json(sums) if each[0] not in done]
        marks: list[DirtyMark] = []
        if left:
            # Outside of the transaction, because finding a clear reads all events of the window.
            marks = await self._db.scan(
                partial(self._marks, namespace=namespace, window_us=window_us, sums=left)
            )
        return RolledPart(window_us, [(name, count) for _, name, count in usual], marks)

    def _marks(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        window_us: int,
        sums: Sequence[tuple[int, int, int, int]],
    ) -> list[DirtyMark]:
        table, last_us = self._rollups.place(namespace, window_us)
        names = dict(counter_names(connection, namespace.id, [each[0] for each in sums]))
        folds = named(connection, table, (window_us, last_us), sums, names)
        return [DirtyMark(window_us, name, 0, fold, counter_id) for counter_id, name, fold in folds]
