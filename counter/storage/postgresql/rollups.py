"""Store marks, watermarks and counts in PostgreSQL. What adds made dirty is read off the events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from counter.background import in_turns
from counter.errors import NamespaceUnknownError
from counter.ports import Clock
from counter.storage.postgresql.database import PostgresqlDatabase
from counter.storage.postgresql.fence import pass_fence
from counter.types import (
    Checkpoint,
    CounterUpdate,
    DirtyMark,
    DirtyPage,
    Fold,
    Head,
    Mark,
    Namespace,
    Pending,
    Span,
    WindowRow,
)
from counter.windows import shard_of

#: Marks of recounts, and of adds: counters and windows of the events after the watermark, summed in
#: one pass over them. A fold with a clear is summed again, from the clear on. $4 and $5 are the
#: start of the first window and the end of the last.
_DIRTY: Final = (
    "SELECT m.start, m.counter, m.recount, m.clear_at IS NOT NULL, CASE WHEN m.clear_at IS NULL"
    " THEN m.total ELSE (SELECT coalesce(sum(e.delta), 0) FROM {s}.events e WHERE e.dataset = $1"
    " AND e.namespace = $2 AND e.counter = m.counter AND e.event_time > m.clear_at"
    " AND e.event_time < m.start + $6 AND e.event_time >= $4 AND e.event_time < $5) END FROM"
    " (SELECT e.event_time - e.event_time % $6 AS start, e.counter, 0::bigint AS recount,"
    " max(CASE WHEN e.clear THEN e.event_time END) AS clear_at, sum(e.delta) AS total"
    " FROM {s}.events e WHERE e.dataset = $1 AND e.namespace = $2 AND e.shard = $3"
    " AND e.event_time >= $4 AND e.event_time < $5"
    " AND e.event_time > (SELECT through FROM {s}.watermarks WHERE namespace = $2 AND shard = $3)"
    " GROUP BY 1, 2 UNION ALL SELECT start, counter, recount, NULL, NULL FROM {s}.marks"
    " WHERE namespace = $2 AND shard = $3 AND start >= $4 AND start < $5"
    ") m WHERE $7::bigint IS NULL OR (start, counter, recount)"
    ' > ($7, $8::text COLLATE "C", $9::bigint) ORDER BY start, counter, recount LIMIT $10'
)
_MARKED: Final = (
    "SELECT shard FROM pg_catalog.unnest($3::integer[]) s (shard)"
    " WHERE EXISTS (SELECT FROM {s}.marks m WHERE m.namespace = $2"
    " AND m.shard = s.shard AND m.start >= $4 AND m.start < $5)"
    " OR EXISTS (SELECT FROM {s}.events e WHERE e.dataset = $1 AND e.namespace = $2"
    " AND e.shard = s.shard AND e.event_time >= $4 AND e.event_time < $5)"
)
_HEADS: Final = (
    "SELECT c.checkpoint_at, c.checkpoint, c.settled_at, c.settled, ARRAY(SELECT ARRAY[p.recount,"
    " p.start] FROM {s}.pending p WHERE p.namespace = $1 AND p.counter = k.name"
    " ORDER BY 1) FROM pg_catalog.unnest($2::text[]) WITH ORDINALITY k (name, place)"
    # A search for each name: a plan by old statistics would read all counters of the namespace.
    " LEFT JOIN LATERAL (SELECT * FROM {s}.counters c WHERE c.namespace = $1 AND c.name = k.name"
    " LIMIT 1) c ON true ORDER BY k.place"
)


class PostgresqlRollups:
    """See :class:`counter.ports.RollupStore`."""

    def __init__(self, database: PostgresqlDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def fence(self) -> int:
        """Return the server's clock once all earlier appends have ended.

        A fence never moves back. So it is not later than this process's clock, in case the server's
        was set ahead and this process has not noticed it yet.
        """
        return await pass_fence(self._database, self._clock.now_us())

    async def watermarks(self, namespace: Namespace) -> Sequence[int]:
        through: Sequence[int] | None = await self._database.value(
            "SELECT ARRAY(SELECT through FROM {s}.watermarks WHERE namespace = n.id ORDER BY shard)"
            " FROM {s}.namespaces n WHERE id = $1 AND name IS NOT NULL",
            namespace.id,
        )
        if through is None:
            raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
        return through

    async def dirty(
        self, namespace: Namespace, shard: int, span: Span, limit: int, rest: object = None
    ) -> DirtyPage:
        last = rest if isinstance(rest, DirtyMark) else None
        if last is not None:
            span = Span(last.window_us, span.to_us)
        rows = await self._database.rows(
            _DIRTY,
            namespace.dataset.id,
            namespace.id,
            shard,
            *_bounds(namespace, span),
            namespace.settings.rollup_window_us,
            *(last or (None, None, None))[:3],
            limit,
        )
        marks: list[DirtyMark] = []
        async for some in in_turns(rows):
            marks += [
                DirtyMark(at, name, recount, None if recount else Fold(cleared, int(total)))
                for at, name, recount, cleared, total in some
            ]
        return DirtyPage(marks, marks[-1] if len(marks) == limit else None)

    async def marked(
        self, namespace: Namespace, shards: Sequence[int], span: Span
    ) -> Collection[int]:
        rows = await self._database.rows(
            _MARKED, namespace.dataset.id, namespace.id, shards, *_bounds(namespace, span)
        )
        return [row[0] for row in rows]

    async def heads(
        self, namespace: Namespace, counters: Sequence[str], handles: Sequence[object] | None = None
    ) -> Sequence[Head | None]:
        rows = await self._database.rows(_HEADS, namespace.id, counters)
        return [
            Head(
                Checkpoint(time_us or 0, int(count or 0)),
                Checkpoint(settled_us or 0, int(settled or 0)),
                tuple(Pending(*each) for each in pending),
            )
            if time_us is not None or pending
            else None
            for time_us, count, settled_us, settled, pending in rows
        ]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Sequence[WindowRow]]:
        found: dict[str, list[WindowRow]] = {name: [] for name in counters}
        for name, start_us, cleared, total in await self._database.rows(
            "SELECT counter, start, cleared, total FROM {s}.windows WHERE namespace = $1"
            " AND counter = ANY($2::text[]) AND start >= $3 AND start < $4 ORDER BY start",
            namespace.id,
            list(found),
            *span,
        ):
            found[name].append(WindowRow(start_us, cleared, int(total)))
        return [found[name] for name in counters]

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        # Counts go as text: the driver takes several times as long to make numerics.
        settled = [
            (None, None)
            if each.settled is None
            else (each.settled.time_us, str(each.settled.count))
            for each in updates
        ]
        rows = [
            (each.counter, row.window_us, row.cleared, str(row.total), each.checkpoint.time_us)
            for each in updates
            for row in each.rows
        ]
        done = [(each.counter, *pending) for each in updates for pending in each.pending_done]
        await self._database.rows(
            "SELECT {s}.apply($1, $2, $3, $4, $5::text[]::numeric[], $6, $7::text[]::numeric[], $8,"
            " $9, $10, $11::text[]::numeric[], $12, $13, $14, $15)",
            namespace.id,
            through_us,
            [each.counter for each in updates],
            [each.checkpoint.time_us for each in updates],
            [str(each.checkpoint.count) for each in updates],
            [each[0] for each in settled],
            [each[1] for each in settled],
            *([row[column] for row in rows] for column in range(5)),
            *([row[column] for row in done] for column in range(3)),
        )

    async def advance(self, namespace: Namespace, shards: Sequence[int], through_us: int) -> None:
        await self._database.rows(
            "WITH moved AS (UPDATE {s}.watermarks SET through = $3 WHERE namespace = $1"
            " AND shard = ANY($2::integer[]) AND through < $3) UPDATE {s}.namespaces"
            " SET passed = $3 WHERE id = $1 AND passed < $3",
            namespace.id,
            shards,
            through_us,
        )

    async def drop_marks(self, namespace: Namespace, shard: int, through_us: int) -> None:
        await self._database.rows(
            "DELETE FROM {s}.marks WHERE namespace = $1 AND shard = $2 AND start <= $3",
            namespace.id,
            shard,
            through_us,
        )


def _bounds(namespace: Namespace, span: Span) -> Span:
    """Return the start of the first window of *span*, and the end of the last."""
    size_us = namespace.settings.rollup_window_us
    windows = span.windows(size_us)
    return Span(windows.start, windows.start + len(windows) * size_us)


class PostgresqlRecounts:
    """See :class:`counter.ports.RecountStore`."""

    def __init__(self, database: PostgresqlDatabase, forget: Callable[[int, str], None]) -> None:
        """*forget* makes the next append list a counter of a namespace again."""
        self._database = database
        self._forget = forget

    async def write_pending(
        self, namespace: Namespace, pending: Sequence[tuple[str, Pending]]
    ) -> None:
        await self._database.rows(
            "INSERT INTO {s}.pending SELECT $1, p.* FROM unnest($2::text[], $3::bigint[],"
            " $4::bigint[]) p, {s}.note_counters($1, $2) ORDER BY 2, 3, 4 ON CONFLICT DO NOTHING",
            namespace.id,
            [name for name, _ in pending],
            [each.recount_us for _, each in pending],
            [each.window_us for _, each in pending],
        )
        for name, each in pending:
            if each.is_delete:
                self._forget(namespace.id, name)

    async def write_marks(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        shards = namespace.settings.shards
        await self._database.rows(
            "INSERT INTO {s}.marks SELECT $1, m.* FROM unnest($2::integer[], $3::bigint[],"
            " $4::text[], $5::bigint[]) m, {s}.note_counters($1, $4)"
            " ORDER BY 2, 3, 4, 5 ON CONFLICT DO NOTHING",
            namespace.id,
            [shard_of(each.counter, shards) for each in marks],
            [each.window_us for each in marks],
            [each.counter for each in marks],
            [each.recount_us for each in marks],
        )
