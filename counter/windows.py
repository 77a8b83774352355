"""Compute where an event belongs: its window, when that is closed, its slice, shard and bucket; and
fold events or windows into a count.

A window ``[start, end)`` is named by its start. It is closed when no acknowledged event can be
written in it any more: ``now >= end + accept_limit + write_timeout + 2 * clock_skew_max``. Each
process is within ``clock_skew_max`` of the store, so two of them differ by at most twice that.

``hash()`` and set order change with PYTHONHASHSEED, so all routing uses xxHash.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import xxhash

from counter.bounds import terms_in
from counter.errors import SliceMissingError
from counter.limits import (
    CLOCK_DRIFT_PER_S_US,
    DIRECTORY_AGE_MAX_US,
    SECOND,
    STORE_CLOCK_STEP_MAX_US,
)
from counter.types import (
    Dataset,
    Event,
    Fold,
    Namespace,
    NamespaceSettings,
    Slice,
    WindowRow,
    limit_at,
)


def window_of(time_us: int, window_us: int) -> int:
    """Return the start of the window that contains *time_us*."""
    return time_us - time_us % window_us


def accept_limit_at(namespace: Namespace, event_time_us: int) -> int:
    """Return the accept limit by which an event of *event_time_us* is accepted."""
    return limit_at(namespace.eras, event_time_us)


def closing_limit_at(namespace: Namespace, event_time_us: int) -> int:
    """Return the accept limit by which the window of *event_time_us* closes."""
    return limit_at(namespace.closing_eras, event_time_us)


def closing_lag(dataset: Dataset) -> int:
    """Return how long past ``end + accept_limit`` a window stays open."""
    return dataset.write_timeout_us + 2 * dataset.clock_skew_max_us


def deciding_time(dataset: Dataset, window_us: int, accept_limit_us: int) -> int:
    """Return how long before the end of retention a late token is decided for the last time: the
    recount that this leaves must be done before its events go."""
    lag_us = accept_limit_us + closing_lag(dataset)
    return 2 * (window_us + lag_us + dataset.clock_skew_max_us)


def honoured_for(namespace: Namespace, *, is_key: bool) -> int:
    """Return how long after its time a token surely gets a definite answer; if *is_key*, how long
    an arbitrary key also stays the same add, from when it was first seen.

    The store's clock may step a little ahead unnoticed, and one process's clock may be ahead of
    that of another, which wrote the key's time.
    """
    settings, dataset = namespace.settings, namespace.dataset
    longest_us = max(era.accept_limit_us for era in namespace.closing_eras)
    shortest_us = min(era.accept_limit_us for era in namespace.eras)
    margin_us = deciding_time(dataset, settings.rollup_window_us, longest_us)
    # On time, the write itself answers.
    known_us = max(dataset.retention_us - margin_us - STORE_CLOCK_STEP_MAX_US, shortest_us)
    if not is_key:
        return known_us
    kept_us = settings.key_ttl_us - STORE_CLOCK_STEP_MAX_US - 2 * dataset.clock_skew_max_us
    return min(known_us, max(kept_us, 0))


def settling_time(dataset: Dataset) -> int:
    """Return how long after a namespace was changed or deleted an add to what it was before may
    still be acknowledged, in microseconds of any process's boot clock.

    An event is written only with a copy of the directory that is at most ``DIRECTORY_AGE_MAX_US``
    old, and acknowledged only within ``write_timeout`` of that check. A copy without the change was
    read before it. Two boot clocks may drift apart meanwhile.
    """
    span_us = DIRECTORY_AGE_MAX_US + dataset.write_timeout_us
    return span_us + -(-span_us * 2 * CLOCK_DRIFT_PER_S_US // SECOND)


def closes_at(namespace: Namespace, event_time_us: int) -> int:
    """Return the instant at which the window of *event_time_us* is closed."""
    end_us = window_of(event_time_us, namespace.settings.rollup_window_us)
    end_us += namespace.settings.rollup_window_us
    return end_us + closing_limit_at(namespace, event_time_us) + closing_lag(namespace.dataset)


def closed_through(namespace: Namespace, now_us: int) -> int:
    """Return the last instant of the last window that is closed together with all windows before
    it.

    If the accept limit grows from one slice to the next, a later window may close before an earlier
    one. Therefore the eras are checked in order, and the first one that is still open ends the
    search.
    """
    window_us = namespace.settings.rollup_window_us
    lag_us = closing_lag(namespace.dataset)
    through_us, eras = 0, namespace.closing_eras
    for position, era in enumerate(eras):
        end_us = window_of(now_us - era.accept_limit_us - lag_us, window_us)
        if position + 1 == len(eras) or end_us < eras[position + 1].from_us:
            return max(through_us, end_us) - 1
        through_us = eras[position + 1].from_us
    return through_us - 1


def first_watermark(dataset: Dataset, settings: NamespaceSettings, created_at_us: int) -> int:
    """Return a new shard's watermark: every event that can be written is later."""
    earliest_us = created_at_us - settings.accept_limit_us - settings.rollup_window_us
    return window_of(earliest_us - 2 * dataset.clock_skew_max_us, settings.rollup_window_us) - 1


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


def fold_events(events: Iterable[Event]) -> Fold:
    """Return the fold of *events* in any order: a clear erases every event that is not later."""
    known = list(events)
    clears = [event.event_time_us for event in known if event.clear]
    if not clears:
        return Fold(False, sum(event.delta for event in known))
    last_us = max(clears)
    return Fold(True, sum(event.delta for event in known if event.event_time_us > last_us))


def apply_fold(count: int, fold: Fold) -> int:
    """Return the count after *fold*."""
    return fold.total if fold.cleared else count + fold.total


def fold_rows(count: int, rows: Iterable[WindowRow]) -> int:
    """Return the count after *rows*, earliest first."""
    for row in rows:
        count = row.total if row.cleared else count + row.total
    return count


def fingerprint(events: Sequence[Event]) -> bytes:
    """Return the fingerprint of a token's payload: 16 bytes over each item's counter, key, delta,
    kind and bounds."""
    digest = hashlib.blake2b(digest_size=16, person=b"counter.payload")
    if len(events) > 1:
        events = sorted(events, key=lambda each: (each.counter, each.item_key))
    for event in events:
        name = event.counter.encode()
        digest.update(len(name).to_bytes(4, "big"))
        digest.update(name)
        digest.update(event.item_key.to_bytes(4, "big"))
        digest.update(b"clear" if event.clear else event.delta.to_bytes(9, "big", signed=True))
        if event.atom:
            digest.update(terms_in(event.atom))
    return digest.digest()
