"""Convert plain tallies to Prometheus metric families, and families to the text of a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from counter.metrics import Histogram


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge with one value."""
    return GaugeMetricFamily(f"counter_{name}", text, value=value)


def gauges(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a gauge with several values, each with its own *labels*."""
    family = GaugeMetricFamily(f"counter_{name}", text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter with one value; its sample's name ends in ``_total``."""
    return CounterMetricFamily(f"counter_{name}", text, value=value)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with several values, by *label*."""
    family = CounterMetricFamily(f"counter_{name}", text, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family


def histogram(name: str, text: str, tally: Histogram) -> Metric:
    """Return one histogram."""
    return histograms(name, text, (), [((), tally)])


def histograms(
    name: str, text: str, labels: Sequence[str], tallies: Iterable[tuple[Sequence[str], Histogram]]
) -> Metric:
    """Return several histograms, each with its own *labels*. Their buckets are cumulative, as
    Prometheus expects."""
    family = HistogramMetricFamily(f"counter_{name}", text, labels=labels)
    for of, tally in tallies:
        bounds = [*map(floatToGoString, tally.bounds), "+Inf"]
        counts = accumulate(list(tally.counts))
        family.add_metric(of, list(zip(bounds, counts, strict=True)), tally.sum)
    return family


class Collects(Protocol):
    """Returns the metric families of a scrape."""

    def collect(self) -> Iterable[Metric]: ...


class Exposition:
    """All metrics of a process."""

    def __init__(self, parts: Sequence[Collects]) -> None:
        # ProcessCollector adds CPU, memory and file descriptors.
        self._parts: Sequence[Collects] = (*parts, ProcessCollector(registry=None))

    def collect(self) -> Iterable[Metric]:
        """Return the metric families of this process."""
        return chain.from_iterable(part.collect() for part in self._parts)

    def text(self) -> bytes:
        """Return the metrics of this process in the exposition format."""
        return text_of(self.collect())


def text_of(families: Iterable[Metric]) -> bytes:
    """Return *families* in the exposition format."""
    registry = CollectorRegistry()
    registry.register(_Given(families))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
