"""Check a namespace's settings, and find contradictions among them or with its clients.

Pure functions, used when a namespace is created or changed, and by ``counter config check``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Final

from counter import limits
from counter.config.event_rules import check_rules
from counter.core.namespaces import FIXED
from counter.durations import format_duration, spell_duration
from counter.errors import (
    CounterError,
    InvalidBodyError,
    InvalidParameterError,
    NamespaceConflictError,
)
from counter.limits import PARTITION_BYTES_MAX
from counter.names import is_namespace_name
from counter.quantities import format_bytes, format_number
from counter.types import CounterType, Dataset, Namespace, NamespaceSettings
from counter.windows import closing_lag, deciding_time

EVENT_BUCKETS_MAX: Final = 256
#: The longest duration of a rollup pass plus the cache; docs/rollup.md.
PASS_US: Final = 2 * limits.SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """What is known of a namespace's clients; None for what is unknown.

    ``retry_us`` is how long after its token was made a client may still send it, ``clock_us`` how
    far its clock may be off, ``max_staleness_us`` its default bound on the age of a count, and
    ``hottest_per_s`` the rate of adds to the busiest counter.
    """

    retry_us: int | None = None
    clock_us: int | None = None
    max_staleness_us: int | None = None
    hottest_per_s: Fraction | None = None
    event_bytes: int = 64


#: The default for unknown clients: the SDK retries one call for this long.
SDK_CLIENTS: Final = Clients(retry_us=30 * limits.SECOND)
#: If more than this many calls are wasted for each useful one, a warning is given.
_TIMES_MAX: Final = 10


def check_name(name: str) -> None:
    """Raise InvalidParameterError unless *name* is one of a namespace."""
    if not is_namespace_name(name):
        raise InvalidParameterError(
            f"namespace {name[:80]!r} does not match [a-z][a-z0-9_-]{{0,62}}", field="namespace"
        )


def fitted(settings: NamespaceSettings, dataset: Dataset) -> NamespaceSettings:
    """Return *settings* with a default ``key_ttl`` that the dataset's retention allows."""
    return replace(settings, key_ttl_us=min(settings.key_ttl_us, dataset.retention_us // 2))


def check_change(namespace: Namespace, settings: NamespaceSettings) -> None:
    """Raise NamespaceConflictError if a fixed setting would change, or InvalidBodyError if a rule
    would be broken."""
    for field in FIXED:
        old, new = getattr(namespace.settings, field), getattr(settings, field)
        if old != new:
            if field.endswith("_us"):
                old, new = format_duration(old), format_duration(new)
            raise NamespaceConflictError(
                f"{field.removesuffix('_us')} is {old} for the life of namespace"
                f" {namespace.name!r}; it cannot become {new}",
                field=field.removesuffix("_us"),
            )
    if settings.event_rules == namespace.settings.event_rules:
        # Rules that an older version accepted do not keep other settings from being changed.
        settings = replace(settings, event_rules=())
    check_settings(settings, namespace.dataset)


def check_settings(settings: NamespaceSettings, dataset: Dataset) -> None:
    """Raise InvalidBodyError, naming field, value and bound, if a rule is broken."""
    check_rules(settings.event_rules)
    bounds: dict[str, tuple[int, int]] = {
        "accept_limit": (
            limits.MILLISECOND,
            min(limits.ACCEPT_LIMIT_MAX_US, dataset.slice_us, dataset.retention_us // 10),
        ),
        "future_limit": (
            max(limits.MILLISECOND, 2 * dataset.clock_skew_max_us),
            # A token must not reach past the slices made ahead, nor past the end of a read's live
            # tail.
            min(limits.FUTURE_LIMIT_MAX_US, dataset.slice_us),
        ),
        "rollup_window": (limits.ROLLUP_WINDOW_MIN_US, limits.ROLLUP_WINDOW_MAX_US),
        "key_ttl": (limits.KEY_TTL_MIN_US, dataset.retention_us // 2),
        "cache_ttl": (0, limits.DAY),
    }
    for field, (low_us, high_us) in bounds.items():
        value_us = getattr(settings, f"{field}_us")
        if not low_us <= value_us <= high_us:
            raise InvalidBodyError(
                f"{field} is {format_duration(value_us)}; it must be from"
                f" {format_duration(low_us)} to {format_duration(high_us)}",
                field=field,
            )
    if dataset.slice_us > dataset.retention_us:
        raise InvalidBodyError(
            f"slice is {format_duration(dataset.slice_us)}; it must not be longer than the"
            f" retention of {format_duration(dataset.retention_us)}",
            field="slice",
        )
    if not 1 <= settings.shards <= limits.SHARDS_MAX:
        raise InvalidBodyError(
            f"shards is {settings.shards}; it must be from 1 to {limits.SHARDS_MAX}",
            field="shards",
        )
    window_us = settings.rollup_window_us
    if dataset.slice_us % window_us:
        raise InvalidBodyError(
            f"rollup_window {format_duration(window_us)} does not divide the dataset's slice of"
            f" {format_duration(dataset.slice_us)}",
            field="rollup_window",
        )
    windows = dataset.retention_us // window_us
    if windows > limits.WINDOWS_PER_RETENTION_MAX:
        least_us = dataset.retention_us / limits.WINDOWS_PER_RETENTION_MAX / limits.SECOND
        raise InvalidBodyError(
            f"rollup_window {format_duration(window_us)} makes {windows} windows in the dataset's"
            f" retention of {format_duration(dataset.retention_us)}; at most"
            f" {limits.WINDOWS_PER_RETENTION_MAX} are allowed, so at least {least_us:g}s",
            field="rollup_window",
        )


def lag_of(settings: NamespaceSettings, dataset: Dataset) -> int:
    """Return the largest normal age of a rolled-up count in microseconds: docs/rollup.md."""
    closing_us = settings.accept_limit_us + closing_lag(dataset)
    return settings.rollup_window_us + closing_us + PASS_US


def retry_most(settings: NamespaceSettings, dataset: Dataset) -> int:
    """Return how late a retry still learns the outcome of its token, in microseconds."""
    margin_us = deciding_time(dataset, settings.rollup_window_us, settings.accept_limit_us)
    return dataset.retention_us - margin_us


def creation_warnings(
    settings: NamespaceSettings,
    dataset: Dataset,
    clients: Clients | None = None,
    *,
    lease_time_us: int = limits.LEASE_TIME_US,
) -> tuple[str, ...]:
    """Return the contradictions, each with its values, its bound and a fix; refused ones come
    first.

    Unknown *clients* are assumed to behave as the SDK does. The kind of the store may have more
    advice.
    """
    is_sdk = clients is None and settings.counter_type is not CounterType.BEST_EFFORT
    known = clients or (SDK_CLIENTS if is_sdk else Clients())
    return (
        *_refused(settings, dataset),
        *_retry_problems(settings, dataset, known),
        *_clock_problems(settings, known),
        *_staleness_problems(settings, dataset, known, lease_time_us),
        *_partition_problems(dataset, known),
        *_own_problems(settings),
    )


def _refused(settings: NamespaceSettings, dataset: Dataset) -> Iterator[str]:
    try:
        check_settings(settings, dataset)
    except CounterError as error:
        yield f"the namespace would be refused: {error.detail}"


def _retry_problems(
    settings: NamespaceSettings, dataset: Dataset, clients: Clients
) -> Iterator[str]:
    retry_us = clients.retry_us
    if not retry_us:
        return
    given = f"clients retry for {spell_duration(retry_us)}"
    if settings.counter_type is CounterType.BEST_EFFORT:
        yield f"{given} and counter_type is BEST_EFFORT: each retry counts again; use EVENTUAL"
        return
    most_us = retry_most(settings, dataset)
    if retry_us > most_us:
        yield (
            f"{given} and the outcome of a token is known for {spell_duration(max(0, most_us))}"
            f" (retention {spell_duration(dataset.retention_us)}, less the time of a recount):"
            " a later retry gets no answer; keep events longer or retry for less"
        )
    if retry_us > settings.key_ttl_us:
        yield (
            f"{given} and key_ttl is {spell_duration(settings.key_ttl_us)}: an Idempotency-Key"
            " that is no UUIDv7 and comes back later counts again; raise key_ttl, or use tokens"
        )


def _clock_problems(settings: NamespaceSettings, clients: Clients) -> Iterator[str]:
    clock_us = clients.clock_us
    if clock_us is None or settings.counter_type is CounterType.BEST_EFFORT:
        return
    for bound, fault in (("accept_limit", "slow"), ("future_limit", "fast")):
        bound_us = getattr(settings, f"{bound}_us")
        if clock_us >= bound_us:
            yield (
                f"clients' clocks may be {spell_duration(clock_us)} {fault} and {bound} is"
                f" {spell_duration(bound_us)}: their own tokens are refused; raise it, or have"
                " them use POST /v1/tokens"
            )


def _staleness_problems(
    settings: NamespaceSettings, dataset: Dataset, clients: Clients, lease_time_us: int
) -> Iterator[str]:
    wanted_us = clients.max_staleness_us
    # A staleness of 0 s is an accurate read, which sums the latest events in any case.
    if not wanted_us or settings.counter_type is not CounterType.EVENTUAL:
        return
    given = f"counts should be at most {spell_duration(wanted_us)} old and"
    lag_us = lag_of(settings, dataset)
    parts = "rollup_window + accept_limit + write_timeout + 2 * clock_skew_max + a pass"
    # Subtract the clock skew, because it is unknown which clock is right.
    usable_us = wanted_us - dataset.clock_skew_max_us
    if lag_us > usable_us:
        yield (
            f"{given} the rollup is up to {spell_duration(lag_us)} behind ({parts}): gets sum the"
            " latest events at every read; shorten rollup_window, or allow"
            f" {spell_duration(lag_us + dataset.clock_skew_max_us)}"
        )
    elif lag_us + lease_time_us > usable_us:
        yield (
            f"{given} after the loss of a worker the rollup is up to"
            f" {spell_duration(lag_us + lease_time_us)} behind (lease_time more): gets sum the"
            " latest events for as long; shorten lease_time"
        )


def _partition_problems(dataset: Dataset, clients: Clients) -> Iterator[str]:
    if clients.hottest_per_s is None:
        return
    in_bucket = clients.hottest_per_s * dataset.time_bucket_us / limits.SECOND
    size = in_bucket * clients.event_bytes / dataset.event_buckets
    if size > PARTITION_BYTES_MAX:
        parts = ceil(size / PARTITION_BYTES_MAX)
        fits_us = dataset.time_bucket_us // parts // limits.SECOND * limits.SECOND
        ways = []
        if fits_us:
            ways.append(f"a time_bucket of at most {spell_duration(fits_us)}")
        if parts * dataset.event_buckets <= EVENT_BUCKETS_MAX:
            ways.append(f"{parts * dataset.event_buckets} event_buckets")
        yield (
            f"the busiest counter's {format_number(clients.hottest_per_s)}/s make partitions of"
            f" {format_bytes(size)} (time_bucket {spell_duration(dataset.time_bucket_us)},"
            f" event_buckets {dataset.event_buckets}), {parts} times the 4 MiB that are good: use"
            f" {', or '.join(ways) or 'several counters in its place'}"
        )


def _own_problems(settings: NamespaceSettings) -> Iterator[str]:
    """Return the contradictions within the settings alone."""
    if settings.counter_type is CounterType.BEST_EFFORT:
        return
    accept_us, window_us = settings.accept_limit_us, settings.rollup_window_us
    accept, window = spell_duration(accept_us), spell_duration(window_us)
    if accept_us > settings.key_ttl_us:
        yield (
            f"accept_limit is {accept} and key_ttl is {spell_duration(settings.key_ttl_us)}: a"
            " token may come back for longer than an Idempotency-Key that is no UUIDv7, which"
            f" counts again then; raise key_ttl to at least {accept}"
        )
    if accept_us > _TIMES_MAX * window_us:
        yield (
            f"accept_limit is {accept} and rollup_window is {window}: a window is rolled up only"
            f" {accept} after its end, and until then reads sum its events; shorten accept_limit,"
            f" or make rollup_window at least {spell_duration(accept_us // _TIMES_MAX)},"
            " which costs fewer rollups"
        )
