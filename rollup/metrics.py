"""Export the rollup's metrics, in its own process or beside the API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client.core import Metric

from counter.limits import SECOND
from counter.metrics import OTHER_NAMESPACES
from counter.ports import Clock
from counter.telemetry.families import counter, counters, gauge, gauges, histogram
from counter.windows import closed_through
from rollup.audits import audit_families
from rollup.leases import Leases
from rollup.worker import RollupWorker

#: The most namespaces, and shards of them, that have their own series.
NAMESPACES_MAX: Final = 50
SHARDS_MAX: Final = 1_000


class _Lag(NamedTuple):
    """How far a shard, or the worst one of several, is behind."""

    seconds: float
    overdue_s: float
    windows: float


class RollupMetrics:
    """Reads the tallies of a worker and its parts on each scrape."""

    def __init__(self, worker: RollupWorker, clock: Clock, leases: Leases | None) -> None:
        self._worker = worker
        self._clock = clock
        self._leases = leases

    def collect(self) -> Iterator[Metric]:
        """Return the metric families of this scrape."""
        worker = self._worker
        text = "Whether the rollup of this process works."
        yield gauge("rollup_up", text, worker.trouble is None)
        yield from self._passes()
        yield from self._lags()
        if self._leases is not None:
            yield from self._shares(self._leases)
        yield from self._slices()
        yield from self._partitions()
        if worker.audits is not None:
            yield from audit_families(worker.audits.tally)

    def _passes(self) -> Iterator[Metric]:
        worker = self._worker
        texts = {
            "counters": "Counters whose rollup was written.",
            "passes": "Passes over a shard that were done.",
            "failures": "Passes that failed, and are repeated.",
        }
        for name, text in texts.items():
            yield counter(f"rollup_{name}", text, worker.tally[name])
        text = "Windows that were recounted from their events."
        yield counter("rollup_recounts", text, worker.batches.recounts)
        text = "Counters that were written together."
        yield histogram("rollup_batch_counters", text, worker.batches.sizes)
        yield gauge("rollup_limit", "Groups of counters let in at once.", worker.limiter.limit)
        text = "How often the limit was halved because the store was slow or failed."
        yield counter("rollup_limit_cuts", text, worker.limiter.cuts)
        text = "Expired holds that this worker found and ended."
        yield counter("holds_expired", text, worker.maintenance.holds_expired)

    def _lags(self) -> Iterator[Metric]:
        text = "Shards of this worker whose watermark it has not seen yet."
        yield gauge("rollup_shards_unseen", text, self._worker.shards_unread)
        lags = self.lags()
        texts = {
            "lag_seconds": "How far the watermark of a shard is behind the clock.",
            "overdue_seconds": (
                "How far a shard is behind where it would be if all closed windows were rolled up."
            ),
            "windows_behind": "Windows of a shard that are closed and not rolled up.",
        }
        for place, (name, text) in enumerate(texts.items()):
            values = [(of, lag[place]) for of, lag in lags.items()]
            yield gauges(f"rollup_{name}", text, ("namespace", "shard"), values)

    def lags(self) -> dict[tuple[str, str], _Lag]:
        """Return the lags by namespace and shard; the worst of those past the bounds is
        :data:`OTHER_NAMESPACES`.

        There may be 100,000 shards, so the summarized ones cost next to nothing.
        """
        now_us = self._clock.now_us()
        seen: dict[int, list[tuple[int, int]]] = {}
        for (namespace_id, shard), passed_us in self._worker.passed_through().items():
            seen.setdefault(namespace_id, []).append((shard, passed_us))
        found: dict[tuple[str, str], _Lag] = {}
        others: list[_Lag] = []
        own = 0
        for namespace in sorted(self._worker.namespaces.all(), key=lambda each: each.id):
            shards = seen.get(namespace.id)
            if shards is None:
                continue
            closed_us = closed_through(namespace, now_us)
            window_us = namespace.settings.rollup_window_us
            if own < NAMESPACES_MAX and len(found) + namespace.settings.shards <= SHARDS_MAX:
                own += 1
                for shard, passed_us in sorted(shards):
                    lag = _lag(passed_us, closed_us, now_us, window_us)
                    found[namespace.name, str(shard)] = lag
            else:
                passed_us = min(passed_us for _, passed_us in shards)
                others.append(_lag(passed_us, closed_us, now_us, window_us))
        if others:
            found[OTHER_NAMESPACES, OTHER_NAMESPACES] = _Lag(*map(max, zip(*others, strict=True)))
        return found

    @staticmethod
    def _shares(leases: Leases) -> Iterator[Metric]:
        yield gauge("rollup_slots", "Lease slots that this worker holds.", len(leases.held()))
        yield gauge("rollup_workers", "Workers that live, this one too.", len(leases.live))
        text = "Lease slots that this worker took, gave back, or lost when its lease ran out."
        yield counters("lease_changes", text, "change", leases.changes)

    def _slices(self) -> Iterator[Metric]:
        """Return the metrics of slices, which only the worker with the maintenance slot has."""
        maintenance = self._worker.maintenance
        text = "Slices that this process made, and dropped after their retention."
        yield counters("slice_changes", text, "change", maintenance.tally)
        now_us = self._clock.now_us()
        slices = {
            name: each
            for name, each in maintenance.slices.items()
            if each and self._worker.maintains
        }
        text = "Slices that exist."
        values = [([name], len(each)) for name, each in slices.items()]
        yield gauges("slices", text, ("dataset",), values)
        text = "Slices that begin later than now."
        ahead = {name: sum(one.start_us > now_us for one in each) for name, each in slices.items()}
        yield gauges("slices_ahead", text, ("dataset",), [([of], n) for of, n in ahead.items()])
        text = "How long ago the oldest slice that exists ended; less than 0 where it has not."
        ages = [([name], (now_us - each[0].end_us) / SECOND) for name, each in slices.items()]
        yield gauges("slices_oldest_age_seconds", text, ("dataset",), ages)

    def _partitions(self) -> Iterator[Metric]:
        """Return the metrics of datasets whose event buckets may be raised."""
        outlooks = self._worker.partitions.outlooks
        buckets: list[tuple[Sequence[str], float]] = []
        largest: list[tuple[Sequence[str], float]] = []
        for name, each in outlooks.items():
            now, coming = (name, "now"), (name, "next")
            buckets += [(now, each.buckets_now), (coming, each.buckets_next)]
            largest += [(now, each.largest_bytes_now), (coming, each.largest_bytes_expected)]
        labels = ("dataset", "slice")
        text = "Event buckets of the slice of now, and of the next one to be made."
        yield gauges("event_buckets", text, labels, buckets)
        text = (
            "The largest partition of the slice of now, and the largest one expected in the next."
        )
        yield gauges("partition_bytes", text, labels, largest)
        text = "Slices that this process made with more event buckets than the one before."
        raised = {name: each.raised for name, each in outlooks.items()}
        yield counters("event_buckets_raised", text, "dataset", raised)
        text = "Times that partition sizes could not be read or shared by this process."
        yield counter("partition_size_failures", text, self._worker.partitions.failures)


def _lag(passed_us: int, closed_us: int, now_us: int, window_us: int) -> _Lag:
    overdue_us = max(0, closed_us - passed_us)
    return _Lag((now_us - passed_us) / SECOND, overdue_us / SECOND, overdue_us // window_us)
