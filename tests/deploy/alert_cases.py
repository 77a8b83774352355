"""For each alert, series under which it fires and series under which it does not.

Values are in promtool's notation, one a minute: ``0+60x30`` begins at 0 and gains 60 a minute.
"""

from collections.abc import Mapping
from typing import NamedTuple

Series = Mapping[str, str]
_API = 'job="counter",instance="api-1"'
_ROLLUP = 'job="counter-rollup",instance="rollup-1"'
_REQUESTS = "counter_requests_total{%s,status=%s}"
_ADDS = "counter_adds_total{%s,outcome=%s}"
_LATENCY = 'counter_request_duration_seconds_bucket{job="counter",class="2xx",route="add",le="%s"}'
_LAG = 'counter_rollup_%s{job="counter",namespace="videos",shard="%d"}'


class Case(NamedTuple):
    """An alert with *labels* fires under *firing*, and under none of *quiet*."""

    alert: str
    labels: Mapping[str, str]
    firing: Series
    quiet: tuple[Series, ...]
    at: str = "30m"


def _gauge(name: str, of: str, labels: Mapping[str, str], bad: str, good: str) -> Case:
    """One that fires by the value of one series, but not by one that passes."""
    series = f"{name}{{{of}}}"
    flash = f"{good}x20 {bad} {good}x20"
    return Case("", labels, {series: f"{bad}x40"}, ({series: f"{good}x40"}, {series: flash}))


_IS_API = {"job": "counter", "instance": "api-1"}
_BY_JOB = {"job": "counter"}


def _requests(failed: int) -> Series:
    return {
        _REQUESTS % (_API, '"200"'): "0+6000x40",
        _REQUESTS % (_API, '"503"'): f"0+{failed}x40",
        _REQUESTS % (_API, '"404"'): "0+6000x40",
    }


def _adds(outcome: str, number: int) -> Series:
    name = f'"{outcome}"'
    return {_ADDS % (_API, '"original"'): "0+6000x40", _ADDS % (_API, name): f"0+{number}x40"}


def _latency(within: int) -> Series:
    """Of 1,000 requests a minute, so many take less than 500 ms."""
    return {
        _LATENCY % "0.25": f"0+{within}x40",
        _LATENCY % "0.5": f"0+{within}x40",
        _LATENCY % "1.0": "0+1000x40",
        _LATENCY % "+Inf": "0+1000x40",
    }


def _total(name: str, of: str, a_minute: int) -> Series:
    return {f"{name}{{{of}}}": f"0+{a_minute}x40"}


def _windows(values: str) -> Series:
    return {_LAG % ("windows_behind", 0): values, _LAG % ("windows_behind", 1): "0x40"}


CASES = (
    _gauge("up", _API, _IS_API, "0", "1")._replace(alert="CounterDown"),
    _gauge(
        "counter_worker_up", f'{_API},worker="1"', {**_IS_API, "worker": "1"}, "0", "1"
    )._replace(alert="CounterWorkerDown"),
    _gauge("counter_store_up", _API, _IS_API, "0", "1")._replace(alert="CounterStoreDown"),
    _gauge("counter_keys_up", _API, _IS_API, "0", "1")._replace(alert="CounterKeysUnreadable"),
    Case(
        "CounterStoreErrors",
        {"job": "counter", "operation": "write"},
        _total("counter_store_errors_total", f'{_API},operation="write"', 120),
        (_total("counter_store_errors_total", f'{_API},operation="write"', 6),),
    ),
    Case(
        "CounterLogGrows",
        _IS_API,
        {f"counter_wal_bytes{{{_API}}}": "2e9x40", f"counter_wal_limit_bytes{{{_API}}}": "4e9x40"},
        (
            {
                f"counter_wal_bytes{{{_API}}}": "64e6x40",
                f"counter_wal_limit_bytes{{{_API}}}": "4e9x40",
            },
        ),
    ),
    _gauge("counter_cache_up", _API, _IS_API, "0", "1")._replace(alert="CounterCacheDown"),
    Case(
        "CounterFilesRunOut",
        _IS_API,
        {f"process_open_fds{{{_API}}}": "950x40", f"process_max_fds{{{_API}}}": "1000x40"},
        ({f"process_open_fds{{{_API}}}": "500x40", f"process_max_fds{{{_API}}}": "1000x40"},),
    ),
    Case(
        "CounterCertificateEnds",
        _IS_API,
        {f"counter_certificate_end_timestamp_seconds{{{_API}}}": "86400x40"},
        (
            {f"counter_certificate_end_timestamp_seconds{{{_API}}}": "0x40"},
            {f"counter_certificate_end_timestamp_seconds{{{_API}}}": "1000000x40"},
        ),
    ),
    Case("CounterErrors", _BY_JOB, _requests(600), (_requests(60), _requests(0))),
    Case("CounterSlow", {"job": "counter", "route": "add"}, _latency(980), (_latency(995),)),
    Case(
        "CounterSheds",
        _BY_JOB,
        _total("counter_shed_requests_total", _API, 600),
        (_total("counter_shed_requests_total", _API, 6),),
    ),
    Case(
        "CounterQueueFull",
        {**_IS_API, "queue": "adds"},
        {
            f'counter_queue_depth{{{_API},queue="adds"}}': "45000x40",
            f'counter_queue_limit{{{_API},queue="adds"}}': "50000x40",
        },
        (
            {
                f'counter_queue_depth{{{_API},queue="adds"}}': "3000x40",
                f'counter_queue_limit{{{_API},queue="adds"}}': "50000x40",
            },
        ),
    ),
    Case(
        "CounterConnectionsFull",
        _IS_API,
        {
            f"counter_connections{{{_API}}}": "9000x40",
            f"counter_connections_limit{{{_API}}}": "10000x40",
        },
        (
            {
                f"counter_connections{{{_API}}}": "500x40",
                f"counter_connections_limit{{{_API}}}": "10000x40",
            },
        ),
    ),
    Case("CounterAddsUnknown", _BY_JOB, _adds("unknown", 300), (_adds("unknown", 6),)),
    Case("CounterConflicts", _BY_JOB, _adds("conflict", 60), (_adds("conflict", 1),)),
    Case(
        "CounterKeyRefusals",
        {"job": "counter", "reason": "key_invalid"},
        _total("counter_key_refusals_total", f'{_API},reason="key_invalid"', 600),
        (_total("counter_key_refusals_total", f'{_API},reason="key_invalid"', 60),),
    ),
    Case(
        "CounterRateLimited",
        {"job": "counter", "rate": "adds"},
        _total("counter_rate_limited_total", f'{_API},rate="adds"', 600),
        (_total("counter_rate_limited_total", f'{_API},rate="adds"', 60),),
        at="40m",
    ),
    _gauge("counter_clock_out_of_bounds", _API, _IS_API, "1", "0")._replace(
        alert="CounterClockOutOfBounds"
    ),
    Case(
        "CounterClockDrifts",
        _IS_API,
        {
            f"counter_clock_offset_seconds{{{_API}}}": "-0.3x40",
            f"counter_clock_bound_seconds{{{_API}}}": "0.5x40",
        },
        (
            {
                f"counter_clock_offset_seconds{{{_API}}}": "0.1x40",
                f"counter_clock_bound_seconds{{{_API}}}": "0.5x40",
            },
            # Before the first measurement.
            {
                f"counter_clock_offset_seconds{{{_API}}}": "0x40",
                f"counter_clock_bound_seconds{{{_API}}}": "0x40",
            },
        ),
    ),
    Case(
        "CounterRollupLag",
        {"job": "counter", "namespace": "videos"},
        {_LAG % ("overdue_seconds", 0): "0+60x40", _LAG % ("overdue_seconds", 1): "0x40"},
        ({_LAG % ("overdue_seconds", 0): "0 10 0 10x40"},),
    ),
    Case(
        "CounterRollupFallsBehind",
        {"job": "counter", "namespace": "videos"},
        _windows("0+2x40"),
        # Few, or many that become fewer.
        (_windows("5x40"), _windows("100-2x40")),
    ),
    _gauge(
        "counter_rollup_up", _ROLLUP, {"job": "counter-rollup", "instance": "rollup-1"}, "0", "1"
    )._replace(alert="CounterRollupDown"),
    Case("CounterRollupMissing", {}, {}, ({_LAG % ("lag_seconds", 0): "12x40"},)),
    Case(
        "CounterLeasesFlap",
        {"job": "counter-rollup"},
        _total("counter_lease_changes_total", f'{_ROLLUP},change="lost"', 3),
        (
            _total("counter_lease_changes_total", f'{_ROLLUP},change="taken"', 3),
            # A worker that joined.
            {f'counter_lease_changes_total{{{_ROLLUP},change="lost"}}': "0x20 32x20"},
        ),
        at="40m",
    ),
    Case(
        "CounterSlicesRunOut",
        {"job": "counter-rollup", "dataset": "default"},
        {f'counter_slices_ahead{{{_ROLLUP},dataset="default"}}': "0x40"},
        ({f'counter_slices_ahead{{{_ROLLUP},dataset="default"}}': "2x40"},),
    ),
    Case(
        "CounterSlicesUnwatched",
        {},
        {},
        ({f'counter_slices_ahead{{{_ROLLUP},dataset="default"}}': "2x40"},),
    ),
    Case(
        "CounterPartitionsLarge",
        {"job": "counter-rollup", "dataset": "default"},
        {f'counter_partition_bytes{{{_ROLLUP},dataset="default",slice="now"}}': "9000000x60"},
        ({f'counter_partition_bytes{{{_ROLLUP},dataset="default",slice="now"}}': "4000000x60"},),
        at="40m",
    ),
    Case(
        "CounterAuditMismatch",
        {"job": "counter-rollup", "instance": "rollup-1"},
        {f"counter_audit_mismatches_total{{{_ROLLUP}}}": "0x25 1x15"},
        ({f"counter_audit_mismatches_total{{{_ROLLUP}}}": "3x40"},),
    ),
)
