"""Store the event log in SQLite: a table per slice, clustered by (counter, time, id, item)."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

from counter.errors import SliceMissingError, UnavailableError
from counter.limits import INT64_MAX
from counter.partition_sizes import Counted
from counter.partitions import shard_of, slice_of
from counter.storage.sqlite.appends import SqliteAppends
from counter.storage.sqlite.log import (
    busiest_of,
    counter_ids,
    fold_rows_of,
    scan_rows,
    spans_of,
    window_folds_of,
)
from counter.storage.sqlite.schema import events_table
from counter.types import AtomicMark, Event, Fold, Mark, Namespace, Slice, Written

_NO_FOLD: Final = Fold(False, 0)


class SqliteEvents(SqliteAppends):
    """See :class:`counter.ports.EventStore`."""

    transactional = True

    async def mark(
        self, namespace: Namespace, marks: Sequence[Mark]
    ) -> Mapping[Mark, UnavailableError]:
        await self._write(lambda connection, _: self._leave_marks(connection, namespace, marks))
        return {}

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        """Do nothing: one transaction writes all of an atomic add or nothing."""

    async def append(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Written]:
        result: Sequence[Written] = await self._writer.call((self._appending, (namespace, events)))
        return result

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        result: Written = await self._write(
            lambda connection, now_us: self._append_atomic(connection, now_us, namespace, events)
        )
        return result

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Do nothing: found events are committed, and there is one copy of them."""

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Do nothing: ``decide`` checked in its own transaction that there is no event, and
        every later write is rejected by age and by ``resolutions``."""

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        result: Sequence[Event | None] = await self._read(
            self._reader, lambda connection: self._find(connection, namespace, events)
        )
        return result

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        spans = [(name, start_us, start_us + size_us - 1) for name, start_us in windows]
        for start_us in {start_us for _, start_us in windows}:
            slice_of(self._slices[namespace.dataset.id], start_us)
        result: Sequence[Fold] = await self._scanner.call((self._spans, (namespace, spans)))
        return result

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], *, from_us: int, to_us: int
    ) -> Sequence[Mapping[int, Fold]]:
        number, size_us = namespace.dataset.id, namespace.settings.rollup_window_us
        slices = self._slices_between(number, from_us, to_us - 1)

        def query(connection: sqlite3.Connection) -> list[Mapping[int, Fold]]:
            ids = counter_ids(connection, namespace.id, counters)
            found: dict[str, dict[int, Fold]] = {name: {} for name in ids}
            for each in slices:
                table = events_table(number, each.start_us)
                for name, start_us, fold in window_folds_of(
                    connection, table, ids, (from_us, to_us), size_us
                ):
                    found[name][start_us] = fold
            return [found.get(name, {}) for name in counters]

        result: Sequence[Mapping[int, Fold]] = await self._read(self._scanner, query)
        return result

    async def tails(
        self,
        namespace: Namespace,
        after: Sequence[tuple[str, int]],
        *,
        until_us: int | None = None,
    ) -> Sequence[Fold]:
        """Return all tails as of one commit: from the writer's live tail, or from the events in
        one transaction."""
        folds = self._live.tails(namespace.id, namespace.settings.rollup_window_us, after)
        if folds is not None:
            return folds
        spans = [(name, after_us + 1, INT64_MAX) for name, after_us in after]
        result: Sequence[Fold] = await self._reader.call((self._spans_at_once, (namespace, spans)))
        return result

    async def busiest(
        self, namespace: Namespace, *, from_us: int, to_us: int, limit: int, events_max: int
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        """See :class:`counter.core.hot_counters.BusyStore`: event tables are ordered by time."""
        number = namespace.dataset.id
        slices = [
            each for each in self._slices[number] if from_us < each.end_us and each.start_us < to_us
        ]
        tables = [events_table(number, each.start_us) for each in reversed(slices)]

        def query(connection: sqlite3.Connection) -> tuple[int, Sequence[tuple[str, int]]]:
            return busiest_of(connection, tables, namespace.id, (from_us, to_us), limit, events_max)

        result: tuple[int, Sequence[tuple[str, int]]] = await self._read(self._scanner, query)
        return result

    async def scan(
        self,
        namespace: Namespace,
        counter: str,
        *,
        from_us: int,
        to_us: int,
        before: Event | None,
        limit: int,
    ) -> Sequence[Event]:
        shard = shard_of(counter, namespace.settings.shards)
        watermark_us = self._watermarks[namespace.id][shard]
        span = (from_us, to_us if before is None else min(to_us, before.event_time_us + 1))

        def query(connection: sqlite3.Connection) -> list[Event]:
            ids = counter_ids(connection, namespace.id, [counter])
            if counter not in ids:
                return []
            size_us = namespace.settings.rollup_window_us
            found: list[Event] = []
            for part in spans_of(connection, ids[counter], watermark_us, size_us, span):
                for each in reversed(self._slices[namespace.dataset.id]):
                    if each.start_us < part[1] and each.end_us > part[0] and len(found) < limit:
                        table = events_table(namespace.dataset.id, each.start_us)
                        key = (counter, ids[counter])
                        wanted = limit - len(found)
                        found += scan_rows(connection, table, key, part, before, wanted)
                if len(found) == limit:
                    break
            return found

        result: Sequence[Event] = await self._read(self._scanner, query)
        return result

    def _spans_at_once(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        jobs: Sequence[tuple[Namespace, Sequence[tuple[str, int, int]]]],
    ) -> list[Any]:
        """Do :meth:`_spans` as of one commit, however many statements it takes."""
        connection.execute("BEGIN")
        try:
            return self._spans(connection, now_us, jobs)
        finally:
            connection.execute("ROLLBACK")

    def _spans(
        self,
        connection: sqlite3.Connection,
        _now_us: int,
        jobs: Sequence[tuple[Namespace, Sequence[tuple[str, int, int]]]],
    ) -> list[Any]:
        """Return folds of (counter, first, last) spans: one statement for each table and equal
        span."""
        groups: dict[tuple[int, int, int, int], dict[str, None]] = {}
        for namespace, spans in jobs:
            for name, first_us, last_us in spans:
                key = (namespace.id, namespace.dataset.id, first_us, last_us)
                groups.setdefault(key, {})[name] = None
        folds: dict[tuple[int, str, int, int], Fold] = {}
        for (namespace_id, dataset_id, first_us, last_us), wanted in groups.items():
            ids = counter_ids(connection, namespace_id, list(wanted))
            for each in self._slices_between(dataset_id, first_us, last_us):
                table = events_table(dataset_id, each.start_us)
                part = fold_rows_of(connection, table, ids, first_us, last_us)
                for name, fold in part.items():
                    place = (namespace_id, name, first_us, last_us)
                    before = folds.get(place, _NO_FOLD)
                    total = fold.total if fold.cleared else before.total + fold.total
                    folds[place] = Fold(before.cleared or fold.cleared, total)
        return [
            [folds.get((ns.id, name, first, last), _NO_FOLD) for name, first, last in spans]
            for ns, spans in jobs
        ]

    def _slices_between(self, dataset_id: int, first_us: int, last_us: int) -> list[Slice]:
        slices = self._slices[dataset_id]
        if first_us < self._dropped_before[dataset_id]:
            raise SliceMissingError(
                f"the events at {first_us} µs were dropped with their slice", retry_after_us=1_000
            )
        return [each for each in slices if each.start_us <= last_us and each.end_us > first_us]
