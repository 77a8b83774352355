"""Export the metrics of the store, the cache and the clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from counter.core.clock_guard import ClockGuard
from counter.limits import SECOND
from counter.metrics import Calls
from counter.ports import Cache, Store
from counter.telemetry.families import counters, gauge, gauges, histogram, histograms


class StoreMetrics:
    """Reads the tallies of the adapters on each scrape."""

    def __init__(self, store: Store, cache: Cache) -> None:
        self._store = store
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Return the metric families of this scrape."""
        store, cache = self._store.tally, self._cache.tally
        yield from _calls("store", "a batch, or statements that were sent together", store.calls)
        yield from _calls("cache", "a batch", cache.calls)
        text = "Events that were written together."
        yield histogram("commit_events", text, store.commit_rows)
        text = "How long it took to write events that were written together."
        yield histogram("commit_duration_seconds", text, store.commit_seconds)
        text = "Marks of windows that must be rolled up, or recounted."
        yield counters("marks", text, "kind", store.marks)
        if store.wal_bytes_max:
            text = "The size of SQLite's write-ahead log."
            yield gauge("wal_bytes", text, store.wal_bytes)
            text = "The size from which on nothing is written until the log can begin again."
            yield gauge("wal_limit_bytes", text, store.wal_bytes_max)
        queues = {**self._store.queues(), **self._cache.queues()}
        text = "What waits in the queues of store and cache."
        depths = (([name], depth) for name, depth in queues.items())
        yield gauges("adapter_queue_depth", text, ("queue",), depths)


class ClockMetrics:
    """Exports the state of the clock, if the store has its own clock."""

    def __init__(self, guard: ClockGuard | None) -> None:
        self._guard = guard

    def collect(self) -> Iterator[Metric]:
        """Return the metric families of this scrape; none if the store uses this process's
        clock."""
        if self._guard is None:
            return
        text = "How far the store's clock is ahead of this process's."
        yield gauge("clock_offset_seconds", text, self._guard.offset_us / SECOND)
        text = "How far the two may be apart, in the dataset with the narrowest bound."
        yield gauge("clock_bound_seconds", text, self._guard.bound_us / SECOND)
        text = "Whether this process writes nothing because of its clock."
        yield gauge("clock_out_of_bounds", text, self._guard.trouble is not None)


def _calls(of: str, what: str, calls: Mapping[str, Calls]) -> Iterator[Metric]:
    text = f"How long calls to the {of} took; a call is {what}."
    seconds = (([operation], each.seconds) for operation, each in calls.items())
    yield histograms(f"{of}_call_duration_seconds", text, ("operation",), seconds)
    text = f"Requests to the {of} that failed."
    errors = {operation: each.errors for operation, each in calls.items()}
    yield counters(f"{of}_errors", text, "operation", errors)
