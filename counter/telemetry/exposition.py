"""Combine collectors into the text that Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


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
