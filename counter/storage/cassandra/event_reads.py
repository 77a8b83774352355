"""Reads of the event log: folds of windows, and pages of single events.

Most windows of most counters hold few events, and many partitions are asked for at once: their rows
are read, up to a bound for each partition, and summed here. Where a partition holds more, the
servers sum it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from counter.errors import SliceMissingError, UnavailableError
from counter.ports import Counted
from counter.storage.cassandra.session import CassandraSession
from counter.storage.cassandra.tables import PARTITION_IS, event_of
from counter.types import Event, EventPage, Fold, Namespace, Slice, Span
from counter.windows import fold_events, window_of

#: Partitions that one statement names.
PARTITIONS_MAX: Final = 64

SPAN_IS: Final = (
    "namespace = ? AND counter IN ? AND time_bucket IN ? AND event_bucket IN ?"
    " AND event_time >= ? AND event_time < ?"
)


class Part(NamedTuple):
    """The part of a span ``[low, high)`` that lies in one slice."""

    start_us: int
    low_us: int
    high_us: int
    time_buckets: tuple[int, ...]
    event_buckets: tuple[int, ...]


class Query(NamedTuple):
    """What one statement asks for: the same part of several counters."""

    part: Part
    counters: tuple[str, ...]

    def values(self, namespace_id: int) -> tuple[Any, ...]:
        """The values of :data:`SPAN_IS`."""
        _, low_us, high_us, time_buckets, event_buckets = self.part
        return (namespace_id, self.counters, time_buckets, event_buckets, low_us, high_us)


def parts_of(slices: Sequence[Slice], low_us: int, high_us: int) -> Iterator[Part]:
    """The parts of ``[low_us, high_us)``, none of more than :data:`PARTITIONS_MAX` partitions."""
    for each in slices:
        low, high = max(low_us, each.start_us), min(high_us, each.end_us)
        if low >= high:
            continue
        times = range(window_of(low, each.time_bucket_us), high, each.time_bucket_us)
        buckets = range(each.event_buckets)
        for some in _chunks(buckets, PARTITIONS_MAX):
            for span in _chunks(times, PARTITIONS_MAX // len(some)):
                yield Part(each.start_us, low, high, tuple(span), tuple(some))


def queries_of(part: Part, counters: Sequence[str]) -> Iterator[Query]:
    """Statements that ask for *part* of all the *counters*."""
    partitions = len(part.time_buckets) * len(part.event_buckets)
    for some in _chunks(counters, max(1, PARTITIONS_MAX // partitions)):
        yield Query(part, tuple(some))


def _chunks(all_of: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (all_of[at : at + size] for at in range(0, len(all_of), size))


_ROWS: Final = (
    "SELECT event_time, event_id, item, delta, clear, atom FROM {keyspace}.{table}"
    f" WHERE {PARTITION_IS}"
)
_SPAN: Final = f"{_ROWS} AND event_time >= ? AND event_time < ? LIMIT ?"
#: The rest of one instant; order within it is ascending, while that of instants descends.
_INSTANT: Final = f"{_ROWS} AND event_time = ? AND (event_id, item) > (?, ?) LIMIT ?"
#: Time buckets that are read at once, while they turn out to be empty.
_WIDTH_MAX: Final = 8
_ATTEMPTS_MAX: Final = 3

_Identity = tuple[int, bytes, int]


class EventScans:
    """Scans of :class:`counter.ports.EventStore`."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session

    async def scan(self, namespace: Namespace, counter: str, page: EventPage) -> Sequence[Event]:
        (from_us, to_us), limit, before = page
        dataset = namespace.dataset
        # No event is accepted from farther ahead than a slice.
        reach_us = self._session.clock.now_us() + dataset.slice_us + 2 * dataset.clock_skew_max_us
        state = await self._session.state_until(dataset, min(to_us, reach_us))
        after: _Identity | None = before[1:4] if before is not None else None
        if after is not None:
            to_us = min(to_us, after[0] + 1)
        for _ in range(_ATTEMPTS_MAX):
            try:
                return await self._scan(
                    namespace, counter, _buckets(state.slices, from_us, to_us), after, limit
                )
            except SliceMissingError:
                # Dropped meanwhile: what is still there begins later.
                state = await self._session.reload_slices(namespace.dataset)
        raise UnavailableError("slices were dropped during each attempt", retry_after_us=100_000)

    async def _scan(
        self,
        namespace: Namespace,
        counter: str,
        buckets: Iterator[_TimeBucket],
        after: _Identity | None,
        limit: int,
    ) -> list[Event]:
        events: list[Event] = []
        width = 1
        while len(events) < limit and (some := list(islice(buckets, width))):
            page = await self._page(namespace, counter, some, after, limit - len(events))
            width = 1 if page else min(2 * width, _WIDTH_MAX)
            events += page
        return events

    async def _page(
        self,
        namespace: Namespace,
        counter: str,
        buckets: Sequence[_TimeBucket],
        after: _Identity | None,
        limit: int,
    ) -> list[Event]:
        """Return the first *limit* events of *buckets* that come later in the order than *after*.

        Read up to *limit* rows of each partition. Rows are complete up to the earliest point at
        which a partition was cut.
        """
        events: list[Event] = []
        cursors = [
            _Cursor(each, bucket, after) for each in buckets for bucket in range(each.event_buckets)
        ]
        while cursors:
            statements = [await self._next(namespace, counter, each, limit) for each in cursors]
            found = await self._session.connection.rows(
                [statement for some in statements for statement in some]
            )
            results = iter(found)
            for cursor, some in zip(cursors, statements, strict=True):
                rows = [row for _ in some for row in next(results) or ()][:limit]
                if len(rows) == limit:
                    cursor.after = rows[-1][:3]
                else:
                    cursor.done = True
                for time_us, event_id, item_key, *cells in rows:
                    event = event_of(counter, (time_us, event_id, item_key), *cells)
                    if event is not None:
                        events.append(event)
            events.sort(key=_latest_first)
            cursors = [cursor for cursor in cursors if not cursor.done]
            # Void rows count as read, not as found: there may be more to read.
            known = min((_place(cursor.after) for cursor in cursors if cursor.after), default=None)
            whole = [each for each in events if known is None or _latest_first(each) <= known]
            if len(whole) >= limit:
                return whole[:limit]
        return events[:limit]

    async def _next(
        self, namespace: Namespace, counter: str, cursor: _Cursor, limit: int
    ) -> list[Any]:
        """Return the statements that continue from a cursor: for the rest of its instant, then for
        the instants before it."""
        bucket = cursor.bucket
        partition = (namespace.id, counter, bucket.time_bucket, cursor.event_bucket)
        statements, high_us = [], bucket.high_us
        if cursor.after is not None and cursor.after[0] < high_us:
            high_us = cursor.after[0]
            instant = await self._session.to_read(namespace.dataset, _INSTANT, bucket.start_us)
            statements.append(instant.bind((*partition, *cursor.after, limit)))
        if bucket.low_us < high_us:
            span = await self._session.to_read(namespace.dataset, _SPAN, bucket.start_us)
            statements.append(span.bind((*partition, bucket.low_us, high_us, limit)))
        return statements


class _TimeBucket:
    """The part of a time bucket that lies in the span of a scan."""

    __slots__ = ("event_buckets", "high_us", "low_us", "start_us", "time_bucket")

    def __init__(self, each: Slice, time_bucket: int, from_us: int, to_us: int) -> None:
        self.start_us = each.start_us
        self.event_buckets = each.event_buckets
        self.time_bucket = time_bucket
        self.low_us = max(from_us, each.start_us, time_bucket)
        self.high_us = min(to_us, each.end_us, time_bucket + each.time_bucket_us)


class _Cursor:
    """How far one partition has been read."""

    __slots__ = ("after", "bucket", "done", "event_bucket")

    def __init__(self, bucket: _TimeBucket, event_bucket: int, after: _Identity | None) -> None:
        self.bucket = bucket
        self.event_bucket = event_bucket
        self.after = after
        self.done = False


def _buckets(slices: Sequence[Slice], from_us: int, to_us: int) -> Iterator[_TimeBucket]:
    """Time buckets of ``[from_us, to_us)``, latest first."""
    for each in reversed(slices):
        low, high = max(from_us, each.start_us), min(to_us, each.end_us)
        if low < high:
            first = window_of(low, each.time_bucket_us)
            for time_bucket in reversed(range(first, high, each.time_bucket_us)):
                yield _TimeBucket(each, time_bucket, from_us, to_us)


def _place(identity: _Identity) -> tuple[int, bytes, int]:
    return (-identity[0], identity[1], identity[2])


def _latest_first(event: Event) -> tuple[int, bytes, int]:
    return (-event.event_time_us, event.event_id, event.item_key)


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

#: As :data:`_FEW`, with the columns that distinguish windows.
_FEW_IN_TIME: Final = (
    "SELECT counter, time_bucket, event_bucket, event_time, delta, clear"
    f" FROM {{keyspace}}.{{table}} WHERE {SPAN_IS} PER PARTITION LIMIT ?"
)
#: Rows of a partition that are read at once where they are wanted by window.
WINDOW_ROWS_MAX: Final = 2_000

_Key = tuple[str, Span]


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


class EventFolds:
    """Sums and tails of :class:`counter.ports.EventStore`."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        spans: dict[Span, dict[str, None]] = {}
        for counter, start_us in windows:
            spans.setdefault(Span(start_us, start_us + size_us), {})[counter] = None
        ends = [end_us for low_us, high_us in spans for end_us in (low_us, high_us - 1)]
        slices = await self._session.slices_of(namespace.dataset, ends)
        held: dict[_Key, int] = {}
        folds = await self._fold(namespace, slices, spans, held)
        keys = [(counter, Span(start_us, start_us + size_us)) for counter, start_us in windows]
        if counted is not None:
            for key in keys:
                if key in held:
                    counted(key[0], key[1].from_us, held[key])
        return [folds.get(key, Fold(False, 0)) for key in keys]

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Mapping[int, Fold]]:
        state = await self._session.state_until(namespace.dataset, span.to_us)
        state.check_kept(span.from_us)
        found: dict[str, dict[int, Fold]] = {counter: {} for counter in counters}
        try:
            await self._fold_windows(namespace, state.slices, found, span)
        except SliceMissingError:
            await self._session.reload_slices(namespace.dataset)
            raise
        return [found[counter] for counter in counters]

    async def _fold_windows(
        self,
        namespace: Namespace,
        slices: Sequence[Slice],
        found: Mapping[str, dict[int, Fold]],
        span: Span,
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
        from_us, to_us = span
        if many and to_us - from_us <= size_us:
            folds = await self.sums(namespace, [(counter, from_us) for counter in many])
            for counter, fold in zip(many, folds, strict=True):
                found[counter][from_us] = fold
        elif many:
            middle_us = window_of((from_us + to_us) // 2, size_us)
            await self._fold_windows(namespace, slices, many, Span(from_us, middle_us))
            await self._fold_windows(namespace, slices, many, Span(middle_us, to_us))

    async def tails(
        self, namespace: Namespace, after: Sequence[tuple[str, int]], until_us: int | None = None
    ) -> Sequence[Fold]:
        state = await self._session.state_until(namespace.dataset, until_us)
        end_us = state.slices[-1].end_us if state.slices else 0
        if until_us is not None:
            # Slices are made far ahead: most of their partitions hold nothing yet.
            end_us = min(end_us, until_us)
        spans: dict[Span, dict[str, None]] = {}
        for counter, after_us in after:
            state.check_kept(after_us + 1)
            spans.setdefault(Span(after_us + 1, end_us), {})[counter] = None
        folds = await self._fold(namespace, state.slices, spans)
        return [
            folds.get((counter, Span(after_us + 1, end_us)), Fold(False, 0))
            for counter, after_us in after
        ]

    async def _fold(
        self,
        namespace: Namespace,
        slices: Sequence[Slice],
        spans: Mapping[Span, Mapping[str, None]],
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
            await self._session.reload_slices(namespace.dataset)
            raise
        return folds

    async def _sum(self, namespace: Namespace, asked: Sequence[tuple[Span, Query]]) -> _Sums:
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
                select = await self._session.to_read(namespace.dataset, _SUM, part.start_us)
                values = (namespace.id, counter, *buckets, part.low_us, part.high_us)
                selects.append(select.bind(values))
                keys.append((counter, span))
        for key, rows in zip(keys, await self._session.connection.rows(selects), strict=True):
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
            select = await self._session.to_read(namespace.dataset, cql, query.part.start_us)
            selects.append(select.bind((*query.values(namespace.id), *more)))
        return [rows or () for rows in await self._session.connection.rows(selects)]
