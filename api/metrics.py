"""What the service counts of itself, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.health import Health
from counter.limits import SECOND
from counter.service import CounterService
from counter.skew import ClockGuard


class Metrics(Collector):
    """Reads the service's own tallies when asked: the hot path only adds to integers."""

    def __init__(self, service: CounterService, health: Health, guard: ClockGuard | None) -> None:
        self._service = service
        self._health = health
        self._guard = guard

    def collect(self) -> Iterable[Metric]:
        """The families of this scrape."""
        family = CounterMetricFamily(
            "counter_adds", "Adds and clears by what became of them.", labels=["outcome"]
        )
        for outcome, number in self._service.tally.items():
            family.add_metric([outcome], number)
        yield family
        found = self._health.latest
        yield _gauge("store_up", "Whether the store can be written.", found.store is None)
        yield _gauge("cache_up", "Whether the cache can be reached.", found.cache is None)
        if self._health.rolls_up:
            text = "Whether the rollup of this process works."
            yield _gauge("rollup_up", text, found.rollup is None)
        if self._guard is not None:
            text = "How far the store's clock is ahead of this process's."
            yield _gauge("clock_offset_seconds", text, self._guard.offset_us / SECOND)
            text = "Whether this process writes nothing because of its clock."
            yield _gauge("clock_out_of_bounds", text, self._guard.trouble is not None)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"counter_{name}", text, value=value)
