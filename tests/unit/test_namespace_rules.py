"""Settings that contradict each other or the clients, each with values and a fix."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from counter import limits
from counter.config.namespace_rules import (
    SDK_CLIENTS,
    Clients,
    creation_warnings,
    lag_of,
    retry_most,
)
from counter.config.settings import Settings
from counter.types import CounterType, Dataset, NamespaceSettings
from counter_client import Options


def _cluster() -> Settings:
    given: dict[str, Any] = {"clock_skew_max": "500ms", "write_timeout": "2s", "time_bucket": "1h"}
    return Settings(shards=16, **given)


def dataset(**changed: Any) -> Dataset:
    """The one that a cluster has by default."""
    return replace(_cluster().dataset(), **changed)


def settings(**changed: Any) -> NamespaceSettings:
    """The default ones of a cluster's namespace, EVENTUAL."""
    wanted = {"counter_type": CounterType.EVENTUAL}
    return replace(_cluster().default_namespace(), **(wanted | changed))


def warnings_for(
    clients: Clients | None = None, of: Dataset | None = None, **changed: Any
) -> tuple[str, ...]:
    return creation_warnings(settings(**changed), of or dataset(), clients or Clients())


@pytest.mark.parametrize("counter_type", CounterType)
def test_the_defaults_contradict_nothing(counter_type: CounterType) -> None:
    assert warnings_for(counter_type=counter_type) == ()


def test_usual_clients_contradict_nothing() -> None:
    usual = Clients(
        retry_us=limits.HOUR,
        clock_us=limits.SECOND,
        max_staleness_us=limits.MINUTE,
        hottest_per_s=Fraction(10),
    )
    assert warnings_for(usual) == ()


def test_refusals_come_before_warnings() -> None:
    first, *_ = warnings_for(Clients(retry_us=30 * limits.DAY), rollup_window_us=7 * limits.SECOND)
    assert first.startswith("the namespace would be refused: rollup_window 7s does not divide")


def test_a_retry_after_retention_has_an_unknown_outcome() -> None:
    """Retention less twice the window, the accept limit, the closing lag and the skew."""
    assert retry_most(settings(), dataset()) == 7 * limits.DAY - 37 * limits.SECOND
    of = dataset(retention_us=11 * limits.DAY)
    late_us = retry_most(settings(), of) + 1
    (retention, _key) = warnings_for(Clients(retry_us=late_us), of)
    assert "known for 10d23h59m23s (retention 11d, less the time of a recount)" in retention
    (_key,) = warnings_for(Clients(retry_us=late_us - 1), of)


def test_a_retry_after_its_key_is_forgotten_counts_again() -> None:
    (key,) = warnings_for(Clients(retry_us=limits.DAY + 1))
    assert "clients retry for 1d1us and key_ttl is 1d" in key
    assert "counts again" in key
    assert warnings_for(Clients(retry_us=limits.DAY)) == ()


def test_a_best_effort_counter_counts_each_retry() -> None:
    (retries,) = warnings_for(Clients(retry_us=1), counter_type=CounterType.BEST_EFFORT)
    assert "each retry counts again; use EVENTUAL" in retries
    never = Clients(retry_us=0, clock_us=limits.DAY)
    assert warnings_for(never, counter_type=CounterType.BEST_EFFORT) == ()


def test_clients_whose_clocks_are_too_wrong_cannot_make_tokens() -> None:
    slow, fast = warnings_for(Clients(clock_us=5 * limits.SECOND))
    assert "5s slow and accept_limit is 5s" in slow
    assert "5s fast and future_limit is 5s" in fast
    assert warnings_for(Clients(clock_us=5 * limits.SECOND - 1)) == ()


def test_a_rollup_that_is_further_behind_than_counts_may_be() -> None:
    """Window 10 s, accept limit 5 s, write time-out 2 s, twice the skew 1 s, a pass 2 s: 20 s."""
    assert lag_of(settings(), dataset()) == 20 * limits.SECOND
    least_us = lag_of(settings(), dataset()) + dataset().clock_skew_max_us
    (behind,) = warnings_for(Clients(max_staleness_us=least_us - 1))
    assert "the rollup is up to 20s behind" in behind
    assert "or allow 20s500ms" in behind
    (killed,) = warnings_for(Clients(max_staleness_us=least_us))
    assert "after the loss of a worker the rollup is up to 30s behind" in killed
    enough_us = least_us + limits.LEASE_TIME_US
    assert warnings_for(Clients(max_staleness_us=enough_us)) == ()


def test_an_accurate_read_is_never_behind() -> None:
    assert warnings_for(Clients(max_staleness_us=0)) == ()
    assert warnings_for(Clients(max_staleness_us=1), counter_type=CounterType.ACCURATE) == ()


def test_a_too_busy_counter_gets_advice_on_partitions() -> None:
    """100/s of 64 B for an hour are 23 MB: six times 4 MiB."""
    busy = Clients(hottest_per_s=Fraction(100))
    (wide,) = warnings_for(busy)
    assert "partitions of 23.04 MB (time_bucket 1h, event_buckets 1), 6 times the 4 MiB" in wide
    assert "use a time_bucket of at most 10m, or 6 event_buckets" in wide
    assert warnings_for(busy, dataset(time_bucket_us=10 * limits.MINUTE)) == ()
    assert warnings_for(busy, dataset(event_buckets=6)) == ()


@pytest.mark.parametrize(
    ("hottest", "way"),
    [(10_000, "use a time_bucket of at most 6s"), (10**9, "use several counters in its place")],
)
def test_no_advice_leads_to_a_rejected_setting(hottest: int, way: str) -> None:
    """There are 256 event_buckets at most, and a time_bucket is no shorter than a second."""
    (wide,) = warnings_for(Clients(hottest_per_s=Fraction(hottest)))
    assert wide.endswith(f"that are good: {way}")


def test_a_key_that_is_forgotten_before_tokens_are_refused() -> None:
    (key,) = warnings_for(key_ttl_us=limits.MINUTE, accept_limit_us=limits.MINUTE + 1)
    assert "accept_limit is 1m1us and key_ttl is 1m" in key
    assert "raise key_ttl to at least 1m1us" in key
    assert warnings_for(key_ttl_us=limits.MINUTE, accept_limit_us=limits.MINUTE) == ()


def test_an_accept_limit_of_many_windows_makes_short_ones_pointless() -> None:
    (wait,) = warnings_for(accept_limit_us=101 * limits.SECOND)
    assert "accept_limit is 1m41s and rollup_window is 10s" in wait
    assert "make rollup_window at least 10s100ms" in wait
    assert warnings_for(accept_limit_us=100 * limits.SECOND) == ()


def test_clients_without_settings_have_the_defaults_of_the_sdk() -> None:
    """A window as long as the retention: by the time of a recount all is forgotten."""
    assert SDK_CLIENTS.retry_us == Options().deadline_s * limits.SECOND
    short = dataset(retention_us=10 * limits.MINUTE, slice_us=10 * limits.MINUTE)
    wide = settings(rollup_window_us=10 * limits.MINUTE, key_ttl_us=5 * limits.MINUTE)
    (late,) = creation_warnings(wide, short)
    assert "clients retry for 30s and the outcome of a token is known for 0s" in late
    assert creation_warnings(wide, short, Clients()) == ()
    for counter_type in CounterType:
        assert creation_warnings(settings(counter_type=counter_type), dataset()) == ()
