"""Settings that contradict each other, each with values and a fix."""

from dataclasses import replace
from typing import Any

import pytest

from counter import limits
from counter.config.namespace_rules import SDK_RETRY_US, creation_warnings
from counter.config.settings import Settings
from counter.types import CounterType, Dataset, NamespaceSettings
from counter.windows import deciding_time
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


def warnings_for(of: Dataset | None = None, **changed: Any) -> tuple[str, ...]:
    return tuple(creation_warnings(settings(**changed), of or dataset()))


@pytest.mark.parametrize("counter_type", CounterType)
def test_the_defaults_contradict_nothing(counter_type: CounterType) -> None:
    assert warnings_for(counter_type=counter_type) == ()


def test_refusals_come_before_warnings() -> None:
    first, *_ = warnings_for(rollup_window_us=7 * limits.SECOND)
    assert first.startswith("the namespace would be refused: rollup_window 7s does not divide")


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


def test_an_outcome_is_known_for_as_long_as_the_sdk_retries() -> None:
    """Retention less the window, the accept limit, the closing lag and the skew."""
    assert Options().deadline_s * limits.SECOND == SDK_RETRY_US
    of = dataset(retention_us=10 * limits.MINUTE, slice_us=10 * limits.MINUTE)
    wide = {"rollup_window_us": 5 * limits.MINUTE, "key_ttl_us": 5 * limits.MINUTE}
    (late,) = warnings_for(of, **wide)
    assert "the outcome of a token is known for 0s (retention 10m, less" in late
    assert "clients retry for 30s" in late
    known_us = of.retention_us - deciding_time(of, 5 * limits.MINUTE, 5 * limits.SECOND)
    enough = replace(of, retention_us=of.retention_us - known_us + SDK_RETRY_US)
    assert warnings_for(enough, **wide) == ()
    assert len(warnings_for(replace(enough, retention_us=enough.retention_us - 1), **wide)) == 1
