"""Compute where data is stored: a counter's shard, an event's slice and partition.

``hash()`` and set order change with PYTHONHASHSEED, so all routing uses xxHash.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import xxhash

from counter.errors import SliceMissingError
from counter.types import Slice


def shard_of(counter: str, shards: int) -> int:
    """Return the rollup shard of *counter*: xxh64 of its UTF-8 name, modulo *shards*."""
    if shards == 1:
        return 0
    return xxhash.xxh64_intdigest(counter.encode()) % shards


def event_bucket_of(event_id: bytes, event_buckets: int) -> int:
    """Return the event bucket within a time bucket; buckets spread one counter's events over
    partitions."""
    return xxhash.xxh64_intdigest(event_id) % event_buckets


def slice_start(time_us: int, slice_us: int) -> int:
    """Return the start of the slice that contains *time_us*; slices are aligned to the epoch."""
    return time_us - time_us % slice_us


def slice_of(slices: Sequence[Slice], time_us: int) -> Slice:
    """Return the slice of *slices* (in order of start) that contains *time_us*.

    Raises SliceMissingError if there is none: a missing table is an error, never "not found".
    """
    position = bisect_right(slices, time_us, key=lambda each: each.start_us) - 1
    if position < 0 or time_us >= slices[position].end_us:
        raise SliceMissingError(
            f"no time slice holds the instant {time_us} µs; slices are made ahead by the"
            " maintenance task, and dropped after retention",
            retry_after_us=1_000_000,
        )
    return slices[position]
