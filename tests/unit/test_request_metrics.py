"""Tallies of requests and of calls, and their metrics."""

from collections.abc import Iterable

import pytest
from prometheus_client.core import Metric

from api.telemetry.metrics import RequestMetrics
from counter.errors import InvariantError
from counter.metrics import SECONDS_BOUNDS, Calls, Histogram
from counter.telemetry.families import histogram

ADD = "POST /v1/namespaces/{namespace}/counters/{counter}/add"


def samples(families: Iterable[Metric]) -> dict[str, float]:
    """Each sample's value by its name and the values of its labels."""
    return {
        " ".join((sample.name, *(sample.labels[name] for name in sorted(sample.labels)))): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_a_bound_belongs_to_its_bucket_and_each_bucket_holds_the_smaller_ones() -> None:
    tally = Histogram((1, 10))
    for value in (1, 2, 10, 11):
        tally.observe(value)
    assert tally.counts == [1, 2, 1]
    assert samples([histogram("h", "", tally)]) == {
        "counter_h_bucket 1.0": 1,
        "counter_h_bucket 10.0": 3,
        "counter_h_bucket +Inf": 4,
        "counter_h_count": 4,
        "counter_h_sum": 24,
    }


def test_bounds_must_rise() -> None:
    with pytest.raises(InvariantError, match="do not rise"):
        Histogram((1, 1))


def test_calls_and_those_that_failed_are_counted() -> None:
    calls = Calls()
    calls.ended(0.2)
    calls.ended(20, errors=3)
    assert (calls.errors, sum(calls.seconds.counts), calls.seconds.counts[-1]) == (3, 2, 1)


def test_requests_are_reported_by_route_and_status_and_their_times_by_class() -> None:
    requests = RequestMetrics()
    requests.count(ADD, 200, 0.003)
    requests.count(ADD, 201, 0.004)
    requests.count(ADD, 409, 60)
    found = samples(requests.collect())
    assert [found[f"counter_requests_total {ADD} {status}"] for status in (200, 201, 409)] == [
        1
    ] * 3
    assert found[f"counter_request_duration_seconds_bucket 2xx 0.005 {ADD}"] == 2
    assert found[f"counter_request_duration_seconds_sum 2xx {ADD}"] == pytest.approx(0.007)
    assert found[f"counter_request_duration_seconds_bucket 4xx 10.0 {ADD}"] == 0
    assert found[f"counter_request_duration_seconds_count 4xx {ADD}"] == 1


def test_unknown_routes_are_counted_together() -> None:
    """Whatever comes, there are only so many series."""
    requests = RequestMetrics()
    for number in range(2_000):
        requests.count(f"GET /{number}", 200, 0.001)
    requests.count("GET /0", 200, 0.001)
    found = samples(requests.collect())
    routes = [name for name in found if name.startswith("counter_requests_total")]
    assert len(routes) <= 513
    assert found["counter_requests_total GET /0 200"] == 2
    assert found["counter_requests_total other 200"] == 2_000 - 512
    assert len(found) <= 513 * (len(SECONDS_BOUNDS) + 4)
