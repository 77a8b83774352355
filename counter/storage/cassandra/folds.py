"""Folds of the event log.

Most windows of most counters hold few events, and many partitions are asked for at once: their rows
are read, up to a bound for each partition, and summed here. Where a partition holds more, the
servers sum it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from counter.crowds import Counted
from counter.errors import SliceMissingError
from counter.folding import fold_events
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.rows import PARTITION_IS, event_of
from counter.storage.cassandra.spans import SPAN_IS, Part, Query, parts_of, queries_of
from counter.types import Event, Fold, Namespace, Slice
from counter.windows import window_of

#: Rows of a partition that are worth reading to spare another round trip.
ROWS_MAX: Final = 50

_FEW: Final = (
    "SELECT counter, time_bucket, event_bucket, delta, clear FROM {keyspace}.{table}"
    f" WHERE {SPAN_IS} PER PARTITION LIMIT {ROWS_MAX}"
)
#: A sum of bigints would wrap, and say nothing. Of one partition, because servers complain of
#: sums over several.
_SUM: Final = (
    "SELECT COUNT(event_id), COUNT(clear), SUM(CAST(delta AS varint)) FROM {keyspace}.{table}"
    f" WHERE {PARTITION_IS} AND event_time >= ? AND event_time < ?"
)
_EVENTS: Final = (
    "SELECT counter, event_time, event_id, item, delta, clear, atom FROM {keyspace}.{table}"
    f" WHERE {SPAN_IS}"
)

#: As :data:`_FEW`, with what tells windows apart.
_FEW_IN_TIME: Final = (
    "SELECT counter, time_bucket, event_bucket, event_time, delta, clear"
    f" FROM {{keyspace}}.{{table}} WHERE {SPAN_IS} PER PARTITION LIMIT ?"
)
#: Rows of a partition that are read at once where they are wanted by window.
WINDOW_ROWS_MAX: Final = 2_000

#: ``[low, high)``
_Span = tuple[int, int]
_Key = tuple[str, _Span]


class _Sums:
    """Sums of (counter, span), how many rows each is of, and which of them hold a clear."""

    def __init__(self) -> None:
        self.totals: dict[_Key, int] = {}
        self.rows: dict[_Key, int] = {}
        self.cleared: dict[_Key, None] = {}

    def add(self, key: _Key, rows: int, clears: int, total: int) -> None:
        self.totals[key] = self.totals.get(key, 0) + total
        self.rows[key] = self.rows.get(key, 0) + rows
        if clears:
            self.cleared[key] = None


class EventFolds(CassandraBase):
    """Sums and tails of :class:`counter.ports.EventStore`."""

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        spans: dict[_Span, dict[str, None]] = {}
        for counter, start_us in windows:
            spans.setdefault((start_us, start_us + size_us), {})[counter] = None
        for low_us, high_us in spans:
            await self._slice_of(namespace.dataset, low_us)
            await self._slice_of(namespace.dataset, high_us - 1)
        held: dict[_Key, int] = {}
        folds = await self._fold(namespace, self._shelf(namespace.dataset).slices, spans, held)
        keys = [(counter, (start_us, start_us + size_us)) for counter, start_us in windows]
        if counted is not None:
            for key in keys:
                if key in held:
                    counted(key[0], key[1][0], held[key])
        return [folds.get(key, Fold(False, 0)) for key in keys]

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], *, from_us: int, to_us: int
    ) -> Sequence[Mapping[int, Fold]]:
        shelf = await self._shelf_until(namespace.dataset, to_us)
        if from_us < shelf.dropped_before_us:
            raise SliceMissingError(
                f"events from {from_us} µs on were asked for; those before"
                f" {shelf.dropped_before_us} µs are dropped"
            )
        found: dict[str, dict[int, Fold]] = {counter: {} for counter in counters}
        try:
            await self._fold_windows(namespace, shelf.slices, found, (from_us, to_us))
        except SliceMissingError:
            await self._reload_slices(namespace.dataset)
            raise
        return [found[counter] for counter in counters]

    async def _fold_windows(
        self,
        namespace: Namespace,
        slices: Sequence[Slice],
        found: Mapping[str, dict[int, Fold]],
        span: _Span,
    ) -> None:
        """Put the folds of the windows of *span* into *found*: from few rows of each partition,
        and where there are more, from those of each half of the span."""
        size_us = namespace.settings.rollup_window_us
        counters = tuple(found)
        asked = [query for part in parts_of(slices, *span) for query in queries_of(part, counters)]
        events: dict[str, dict[int, list[Event]]] = {}
        held: dict[tuple[str, int, int], int] = {}
        for rows in await self._ask(namespace, _FEW_IN_TIME, asked, WINDOW_ROWS_MAX):
            for counter, time_bucket, event_bucket, time_us, delta, clear in rows:
                key = (counter, time_bucket, event_bucket)
                held[key] = held.get(key, 0) + 1
                if delta is not None or clear is not None:
                    event = Event(counter, time_us, b"", 0, delta or 0, clear=clear is not None)
                    windows = events.setdefault(counter, {})
                    windows.setdefault(window_of(time_us, size_us), []).append(event)
        many = {key[0]: found[key[0]] for key, rows in held.items() if rows == WINDOW_ROWS_MAX}
        for counter, windows in events.items():
            if counter not in many:
                found[counter].update({at: fold_events(some) for at, some in windows.items()})
        if many and span[1] - span[0] <= size_us:
            folds = await self.sums(namespace, [(counter, span[0]) for counter in many])
            for counter, fold in zip(many, folds, strict=True):
                found[counter][span[0]] = fold
        elif many:
            middle_us = window_of((span[0] + span[1]) // 2, size_us)
            await self._fold_windows(namespace, slices, many, (span[0], middle_us))
            await self._fold_windows(namespace, slices, many, (middle_us, span[1]))

    async def tails(
        self,
        namespace: Namespace,
        after: Sequence[tuple[str, int]],
        *,
        until_us: int | None = None,
    ) -> Sequence[Fold]:
        shelf = await self._shelf_until(namespace.dataset, until_us)
        end_us = shelf.slices[-1].end_us if shelf.slices else 0
        if until_us is not None:
            # Slices are made far ahead: most of their partitions hold nothing yet.
            end_us = min(end_us, until_us)
        spans: dict[_Span, dict[str, None]] = {}
        for counter, after_us in after:
            if after_us + 1 < shelf.dropped_before_us:
                raise SliceMissingError(
                    f"events later than {after_us} µs were asked for; those before"
                    f" {shelf.dropped_before_us} µs are dropped"
                )
            spans.setdefault((after_us + 1, end_us), {})[counter] = None
        folds = await self._fold(namespace, shelf.slices, spans)
        return [
            folds.get((counter, (after_us + 1, end_us)), Fold(False, 0))
            for counter, after_us in after
        ]

    async def _fold(
        self,
        namespace: Namespace,
        slices: Sequence[Slice],
        spans: Mapping[_Span, Mapping[str, None]],
        held: dict[_Key, int] | None = None,
    ) -> dict[_Key, Fold]:
        """The fold of each counter in each span; none where there is no event. *held* is given how
        many rows each is of.

        Raises SliceMissingError where a table is gone: what was read of others is worth nothing.
        """
        parts = {span: list(parts_of(slices, *span)) for span in spans}
        asked = [
            (span, query)
            for span, counters in spans.items()
            for part in parts[span]
            for query in queries_of(part, tuple(counters))
        ]
        try:
            sums = await self._sum(namespace, asked)
            folds = {key: Fold(False, total) for key, total in sums.totals.items()}
            if held is not None:
                held |= sums.rows
            for counter, span in sums.cleared:
                # Which of the events come after it, only the events themselves can tell.
                events = await self._events(namespace, counter, parts[span])
                folds[(counter, span)] = fold_events(events)
        except SliceMissingError:
            await self._reload_slices(namespace.dataset)
            raise
        return folds

    async def _sum(self, namespace: Namespace, asked: Sequence[tuple[_Span, Query]]) -> _Sums:
        sums = _Sums()
        keys: list[_Key] = []
        selects: list[Any] = []
        found = await self._ask(namespace, _FEW, [query for _, query in asked])
        for (span, query), rows in zip(asked, found, strict=True):
            partitions: dict[tuple[str, int, int], list[int]] = {}
            for counter, time_bucket, event_bucket, delta, clear in rows:
                cells = partitions.setdefault((counter, time_bucket, event_bucket), [0, 0, 0])
                cells[0] += 1
                cells[1] += clear is not None
                cells[2] += delta or 0
            for (counter, *buckets), (count, clears, total) in partitions.items():
                if count < ROWS_MAX:
                    sums.add((counter, span), count, clears, total)
                    continue
                part = query.part
                select = await self._to_read(namespace.dataset, _SUM, part.start_us)
                values = (namespace.id, counter, *buckets, part.low_us, part.high_us)
                selects.append(select.bind(values))
                keys.append((counter, span))
        for key, rows in zip(keys, await self._connection.rows(selects), strict=True):
            ((count, clears, total),) = rows
            sums.add(key, count, clears, total or 0)
        return sums

    async def _events(
        self, namespace: Namespace, counter: str, parts: Sequence[Part]
    ) -> list[Event]:
        """All the events of *parts* of a counter, in no order."""
        queries = [query for part in parts for query in queries_of(part, (counter,))]
        events = []
        for rows in await self._ask(namespace, _EVENTS, queries):
            for name, time_us, event_id, item_key, *cells in rows:
                event = event_of(name, (time_us, event_id, item_key), *cells)
                if event is not None:
                    events.append(event)
        return events

    async def _ask(
        self, namespace: Namespace, cql: str, queries: Sequence[Query], *more: int
    ) -> list[Sequence[Any]]:
        """The rows of each query; *more* are values after those of its span."""
        selects = []
        for query in queries:
            select = await self._to_read(namespace.dataset, cql, query.part.start_us)
            selects.append(select.bind((*query.values(namespace.id), *more)))
        return [rows or () for rows in await self._connection.rows(selects)]
