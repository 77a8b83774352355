"""What the service counts of itself, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from counter.service import CounterService


class Metrics(Collector):
    """Reads the service's own tallies when asked: the hot path only adds to integers."""

    def __init__(self, service: CounterService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """The families of this scrape."""
        family = CounterMetricFamily(
            "counter_adds", "Adds and clears by what became of them.", labels=["outcome"]
        )
        for outcome, number in self._service.tally.items():
            family.add_metric([outcome], number)
        yield family
