"""Which partitions hold a span of a counter's events, and how they are asked for together.

A reader reckons the keys of partitions; nothing lists them. A statement may name many of them: the
node that takes it reads them side by side, and a statement costs this process far more than a
partition does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from counter.types import Slice
from counter.windows import window_of

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
