"""Count answered requests by route and status, with their durations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric

from counter.telemetry.families import histograms
from counter.telemetry.metrics import SECONDS_BOUNDS, Histogram

#: A bound in case a route ever contained what a client sent.
_KINDS_MAX: Final = 512
_OTHER: Final = "other"
#: The index of the sum, after the counters of the buckets.
_SUM: Final = len(SECONDS_BOUNDS) + 1


class RequestMetrics:
    """Answered requests by route and status."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[float]] = {}

    def answered(self, route: str, status: int, took_s: float) -> None:
        """Count a request to *route*, such as ``GET /v1/namespaces/{namespace}``. This is on the
        hot path: a lookup, a bisection and two additions."""
        counts = self._seen.get((route, status))
        if counts is None:
            counts = self._new(route, status)
        counts[bisect_left(SECONDS_BOUNDS, took_s)] += 1
        counts[_SUM] += took_s

    def _new(self, route: str, status: int) -> list[float]:
        if len(self._seen) >= _KINDS_MAX:
            route = _OTHER
        return self._seen.setdefault((route, status), [0] * _SUM + [0.0])

    def collect(self) -> Iterator[Metric]:
        """Yield requests by route and status, and durations by route and status class."""
        requests = CounterMetricFamily(
            "counter_requests", "Requests that were answered.", labels=["route", "status"]
        )
        times: dict[tuple[str, str], Histogram] = {}
        for (route, status), counts in sorted(self._seen.items()):
            requests.add_metric([route, str(status)], sum(counts[:_SUM]))
            time = times.setdefault((route, f"{status // 100}xx"), Histogram())
            for place, number in enumerate(counts[:_SUM]):
                time.counts[place] += int(number)
            time.sum += counts[_SUM]
        yield requests
        text = "Time from the request's head to its answer."
        yield histograms("request_duration_seconds", text, ("route", "class"), times.items())
