"""Collectors, put together into the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class Collects(Protocol):
    """Gives the families of a scrape."""

    def collect(self) -> Iterable[Metric]: ...


class Exposition:
    """All that a process tells Prometheus."""

    def __init__(self, parts: Sequence[Collects]) -> None:
        # What it takes of the machine is told too: CPU, memory, files.
        self._parts: Sequence[Collects] = (*parts, ProcessCollector(registry=None))

    def collect(self) -> Iterable[Metric]:
        """The families of this process."""
        return chain.from_iterable(part.collect() for part in self._parts)

    def text(self) -> bytes:
        """The families of this process, as they go over the wire."""
        return text_of(self.collect())


def text_of(families: Iterable[Metric]) -> bytes:
    """*families* as they go over the wire."""
    registry = CollectorRegistry()
    registry.register(_Given(families))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
