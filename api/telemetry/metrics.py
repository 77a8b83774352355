"""The service's own metrics for Prometheus, and requests by route and status."""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from api.http.auth import Authorizer
from api.telemetry.health import ApiHealth
from counter import __version__, limits
from counter.core.admission import Bounded
from counter.core.service import CounterService
from counter.limits import SECOND
from counter.metrics import SECONDS_BOUNDS, Histogram
from counter.telemetry.families import counter, counters, gauge, gauges, histograms


@dataclass(eq=False)
class Metrics(Collector):
    """Read the service's tallies at each scrape; the hot path only adds to integers."""

    service: CounterService
    health: ApiHealth
    authorizer: Authorizer
    bodies: Bounded
    unfinished: Bounded

    def __post_init__(self) -> None:
        self._versions = (__version__, platform.python_version())

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families."""
        text = "Versions of the service and of Python."
        yield gauges("build_info", text, ("version", "python"), [(self._versions, 1)])
        text = "Adds and clears by outcome."
        yield counters("adds", text, "outcome", self.service.tally)
        text = "Adds and clears that changed a count, by namespace."
        by_namespace = self.service.tally.namespaces.totals()
        yield counters("namespace_adds", text, "namespace", by_namespace)
        text = "Cancels of tokens, retries included, by whether the token was counted."
        cancels = {str(was).lower(): n for was, n in self.service.cancels.items()}
        yield counters("cancels", text, "was_counted", cancels)
        text = "Holds that were begun, extended, settled or released, retries included."
        yield counters("holds", text, "outcome", self.service.holds.tally)
        text = "CloudEvents that no rule of their namespace is for."
        yield counter("cloud_events_ignored", text, self.service.events_ignored)
        text = "Counts looked up in the cache."
        yield counters("cache_lookups", text, "result", self.service.reader.lookups)
        found = self.health.latest.parts
        yield gauge("store_up", "Whether the store can be written.", found["store"] is None)
        yield gauge("cache_up", "Whether the cache can be reached.", found["cache"] is None)
        text = "Whether API keys were read recently enough to authenticate requests."
        yield gauge("keys_up", text, found["keys"] is None)
        yield from self._load()
        text = "Requests rejected for a missing or invalid key or for its rights."
        yield counters("key_refusals", text, "reason", self.authorizer.turned_away)
        text = "Requests above the rate limit of their key or namespace."
        yield counters("rate_limited", text, "rate", self.authorizer.limited)

    def _load(self) -> Iterator[Metric]:
        load = self.service.load
        depths = {
            "adds": (load.ahead, limits.PENDING_WRITES_MAX),
            "resolutions": (self.service.late.held, limits.RESOLUTIONS_MAX),
            "body_bytes": (self.bodies.held, limits.BODIES_BYTES_MAX),
            "unfinished_bytes": (self.unfinished.held, limits.UNFINISHED_BYTES_MAX),
        }
        text = "Length of each queue: adds, late tokens to resolve, bytes of requests."
        held = (([name], depth) for name, (depth, _) in depths.items())
        yield gauges("queue_depth", text, ("queue",), held)
        most = (([name], bound) for name, (_, bound) in depths.items())
        yield gauges("queue_limit", "Limit of each queue.", ("queue",), most)
        text = "Further adds that could be queued and answered in time."
        yield gauge("queue_room", text, load.room)
        text = "Expected queueing delay of an add that arrives now."
        yield gauge("expected_wait_seconds", text, load.wait_us / SECOND)
        text = "Requests shed because they could not be answered in time."
        yield counter("shed_requests", text, load.refused)


#: A bound in case a route ever contained what a client sent.
_KINDS_MAX: Final = 512
_OTHER: Final = "other"
#: The index of the sum, after the counters of the buckets.
_SUM: Final = len(SECONDS_BOUNDS) + 1


class RequestMetrics:
    """Answered requests by route and status."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[float]] = {}

    def count(self, route: str, status: int, took_s: float) -> None:
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
