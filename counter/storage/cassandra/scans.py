"""A counter's events, from the latest to the earliest, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from counter.errors import SliceMissingError, UnavailableError
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.rows import PARTITION_IS, event_of
from counter.types import Event, Namespace, Slice
from counter.windows import window_of

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


class EventScans(CassandraBase):
    """Scans of :class:`counter.ports.EventStore`."""

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
        dataset = namespace.dataset
        # Nobody takes an event from farther ahead than a slice.
        reach_us = self._clock.now_us() + dataset.slice_us + 2 * dataset.clock_skew_max_us
        shelf = await self._shelf_until(dataset, min(to_us, reach_us))
        after: _Identity | None = before[1:4] if before is not None else None
        if after is not None:
            to_us = min(to_us, after[0] + 1)
        for _ in range(_ATTEMPTS_MAX):
            try:
                return await self._scan(
                    namespace, counter, _buckets(shelf.slices, from_us, to_us), after, limit
                )
            except SliceMissingError:
                # Dropped meanwhile: what is still there begins later.
                shelf = await self._reload_slices(namespace.dataset)
        raise UnavailableError("slices vanish again and again", retry_after_us=100_000)

    async def _scan(
        self,
        namespace: Namespace,
        counter: str,
        buckets: Iterator[_Bucket],
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
        buckets: Sequence[_Bucket],
        after: _Identity | None,
        limit: int,
    ) -> list[Event]:
        """The first *limit* events of *buckets* that come later in the order than *after*.

        Each partition is read as far as it could have to give. What was read of all of them is
        known to be in order up to where the first partition was left off.
        """
        events: list[Event] = []
        cursors = [
            _Cursor(each, bucket, after) for each in buckets for bucket in range(each.event_buckets)
        ]
        while cursors:
            statements = [await self._next(namespace, counter, each, limit) for each in cursors]
            found = await self._connection.rows(
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
        """What reads on from a cursor: the rest of its instant, then the instants before it."""
        bucket = cursor.bucket
        partition = (namespace.id, counter, bucket.time_bucket, cursor.event_bucket)
        statements, high_us = [], bucket.high_us
        if cursor.after is not None and cursor.after[0] < high_us:
            high_us = cursor.after[0]
            instant = await self._to_read(namespace.dataset, _INSTANT, bucket.start_us)
            statements.append(instant.bind((*partition, *cursor.after, limit)))
        if bucket.low_us < high_us:
            span = await self._to_read(namespace.dataset, _SPAN, bucket.start_us)
            statements.append(span.bind((*partition, bucket.low_us, high_us, limit)))
        return statements


class _Bucket:
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

    def __init__(self, bucket: _Bucket, event_bucket: int, after: _Identity | None) -> None:
        self.bucket = bucket
        self.event_bucket = event_bucket
        self.after = after
        self.done = False


def _buckets(slices: Sequence[Slice], from_us: int, to_us: int) -> Iterator[_Bucket]:
    """Time buckets of ``[from_us, to_us)``, latest first."""
    for each in reversed(slices):
        low, high = max(from_us, each.start_us), min(to_us, each.end_us)
        if low < high:
            first = window_of(low, each.time_bucket_us)
            for time_bucket in reversed(range(first, high, each.time_bucket_us)):
                yield _Bucket(each, time_bucket, from_us, to_us)


def _place(identity: _Identity) -> tuple[int, bytes, int]:
    return (-identity[0], identity[1], identity[2])


def _latest_first(event: Event) -> tuple[int, bytes, int]:
    return (-event.event_time_us, event.event_id, event.item_key)
