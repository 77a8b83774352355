"""Folds of the event log.

Most windows of most counters hold few events, and many partitions are asked for at once: their rows
are read, up to a bound for each partition, and summed here. Where a partition holds more, the
servers sum it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from counter.errors import SliceMissingError
from counter.folding import fold_events
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.rows import PARTITION_IS, event_of
from counter.storage.cassandra.spans import SPAN_IS, Part, Query, parts_of, queries_of
from counter.types import Event, Fold, Namespace, Slice

#: Rows of a partition that are worth reading to spare another round trip.
ROWS_MAX: Final = 50

_FEW: Final = (
    "SELECT counter, time_bucket, event_bucket, delta, clear FROM {keyspace}.{table}"
    f" WHERE {SPAN_IS} PER PARTITION LIMIT {ROWS_MAX}"
)
#: A sum of bigints would wrap, and say nothing. Of one partition, because servers complain of
#: sums over several.
_SUM: Final = (
    "SELECT COUNT(clear), SUM(CAST(delta AS varint)) FROM {keyspace}.{table}"
    f" WHERE {PARTITION_IS} AND event_time >= ? AND event_time < ?"
)
_EVENTS: Final = (
    "SELECT counter, event_time, event_id, item, delta, clear, atom FROM {keyspace}.{table}"
    f" WHERE {SPAN_IS}"
)

#: ``[low, high)``
_Span = tuple[int, int]
_Key = tuple[str, _Span]


class _Sums:
    """Sums of (counter, span), and which of them hold a clear."""

    def __init__(self) -> None:
        self.totals: dict[_Key, int] = {}
        self.cleared: dict[_Key, None] = {}

    def add(self, key: _Key, clears: int, total: int) -> None:
        self.totals[key] = self.totals.get(key, 0) + total
        if clears:
            self.cleared[key] = None


class EventFolds(CassandraBase):
    """Sums and tails of :class:`counter.ports.EventStore`."""

    async def sums(
        self, namespace: Namespace, windows: Sequence[tuple[str, int]]
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        spans: dict[_Span, dict[str, None]] = {}
        for counter, start_us in windows:
            spans.setdefault((start_us, start_us + size_us), {})[counter] = None
        for low_us, high_us in spans:
            await self._slice_of(namespace.dataset, low_us)
            await self._slice_of(namespace.dataset, high_us - 1)
        folds = await self._fold(namespace, self._shelf(namespace.dataset).slices, spans)
        return [
            folds.get((counter, (start_us, start_us + size_us)), Fold(False, 0))
            for counter, start_us in windows
        ]

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
    ) -> dict[_Key, Fold]:
        """The fold of each counter in each span; none where there is no event.

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
                    sums.add((counter, span), clears, total)
                    continue
                part = query.part
                select = await self._to_read(namespace.dataset, _SUM, part.start_us)
                values = (namespace.id, counter, *buckets, part.low_us, part.high_us)
                selects.append(select.bind(values))
                keys.append((counter, span))
        for key, rows in zip(keys, await self._connection.rows(selects), strict=True):
            ((clears, total),) = rows
            sums.add(key, clears, total or 0)
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
        self, namespace: Namespace, cql: str, queries: Sequence[Query]
    ) -> list[Sequence[Any]]:
        """The rows of each query."""
        selects = []
        for query in queries:
            select = await self._to_read(namespace.dataset, cql, query.part.start_us)
            selects.append(select.bind(query.values(namespace.id)))
        return [rows or () for rows in await self._connection.rows(selects)]
