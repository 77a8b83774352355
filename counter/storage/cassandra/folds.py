"""Folds of the event log, summed by the servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from counter.errors import SliceMissingError, WriteTimeoutError
from counter.folding import fold_events
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.rows import event_of
from counter.storage.cassandra.spans import SPAN_IS, Part, Query, parts_of, queries_of
from counter.types import Event, Fold, Namespace, Slice

#: A sum of bigints would wrap, and say nothing.
_FOLD: Final = (
    "SELECT counter, COUNT(clear), SUM(CAST(delta AS varint)) FROM {keyspace}.{table}"
    f" WHERE {SPAN_IS} GROUP BY namespace, counter, time_bucket, event_bucket"
)
_ROWS: Final = (
    "SELECT counter, event_time, event_id, item, delta, clear, atom FROM {keyspace}.{table}"
    f" WHERE {SPAN_IS}"
)

#: ``[low, high)``
_Span = tuple[int, int]


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
        slices = self._shelf(namespace.dataset).slices
        # A worker is in no hurry: a hot window's sum is not to be taken twice.
        folds = await self._fold(namespace, slices, spans, speculate=False)
        return [
            folds.get((counter, (start_us, start_us + size_us)), Fold(False, 0))
            for counter, start_us in windows
        ]

    async def tails(self, namespace: Namespace, after: Sequence[tuple[str, int]]) -> Sequence[Fold]:
        shelf = await self._shelf_for_tails(namespace.dataset)
        end_us = shelf.slices[-1].end_us if shelf.slices else 0
        spans: dict[_Span, dict[str, None]] = {}
        for counter, after_us in after:
            if after_us + 1 < shelf.dropped_before_us:
                raise SliceMissingError(
                    f"events later than {after_us} µs were asked for; those before"
                    f" {shelf.dropped_before_us} µs are dropped"
                )
            spans.setdefault((after_us + 1, end_us), {})[counter] = None
        folds = await self._fold(namespace, shelf.slices, spans, speculate=True)
        return [
            folds.get((counter, (after_us + 1, end_us)), Fold(False, 0))
            for counter, after_us in after
        ]

    async def _fold(
        self,
        namespace: Namespace,
        slices: Sequence[Slice],
        spans: Mapping[_Span, Mapping[str, None]],
        *,
        speculate: bool,
    ) -> dict[tuple[str, _Span], Fold]:
        """The fold of each counter in each span; none where there is no event."""
        parts = {span: list(parts_of(slices, *span)) for span in spans}
        asked = [
            (span, query)
            for span, counters in spans.items()
            for part in parts[span]
            for query in queries_of(part, tuple(counters))
        ]
        queries = [query for _, query in asked]
        found = await self._ask(namespace, _FOLD, queries, speculate=speculate)
        totals: dict[tuple[str, _Span], int] = {}
        cleared: dict[tuple[str, _Span], None] = {}
        for (span, _), rows in zip(asked, found, strict=True):
            for counter, clears, total in rows:
                key = (counter, span)
                totals[key] = totals.get(key, 0) + (total or 0)
                if clears:
                    cleared[key] = None
        folds = {key: Fold(False, total) for key, total in totals.items()}
        for key in cleared:
            # Which of the events come after it, only the events themselves can tell.
            counter, span = key
            events = await self._events(namespace, counter, parts[span])
            folds[key] = fold_events(events)
        return folds

    async def _events(
        self, namespace: Namespace, counter: str, parts: Sequence[Part]
    ) -> list[Event]:
        """All the events of *parts* of a counter, in no order."""
        queries = [query for part in parts for query in queries_of(part, (counter,))]
        found = await self._ask(namespace, _ROWS, queries, speculate=False)
        events = []
        for rows in found:
            for name, time_us, event_id, item_key, *cells in rows:
                event = event_of(name, (time_us, event_id, item_key), *cells)
                if event is not None:
                    events.append(event)
        return events

    async def _ask(
        self, namespace: Namespace, cql: str, queries: Sequence[Query], *, speculate: bool
    ) -> list[Sequence[Any]]:
        """The rows of each query; one that is too much for one statement, partition by partition.

        Raises SliceMissingError where a table is gone: what was read of others is worth nothing.
        """
        try:
            results = await self._connection.run(
                [await self._bound(namespace, cql, query, speculate) for query in queries]
            )
            found: list[Sequence[Any]] = []
            for query, result in zip(queries, results, strict=True):
                rows = result
                if isinstance(result, WriteTimeoutError):
                    smaller = query.each_partition()
                    if len(smaller) == 1:
                        raise result
                    again = [await self._bound(namespace, cql, one, False) for one in smaller]
                    rows = [
                        row for some in await self._connection.rows(again) for row in some or ()
                    ]
                elif isinstance(result, BaseException):
                    raise result
                found.append(rows or ())
        except SliceMissingError:
            await self._reload_slices(namespace.dataset)
            raise
        return found

    async def _bound(self, namespace: Namespace, cql: str, query: Query, speculate: bool) -> Any:
        select = await self._to_read(namespace.dataset, cql, query.part.start_us)
        bound = select.bind(query.values(namespace.id))
        bound.is_idempotent = speculate
        return bound
