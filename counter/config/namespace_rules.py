"""Check a namespace's settings, and find contradictions among them.

Pure functions, used when a namespace is created or changed, and by ``counter config check``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from counter import limits
from counter.bounds import NO_BOUNDS, terms_if_bounded
from counter.config.event_rules import check_rules
from counter.core.namespaces import FIXED
from counter.errors import (
    CounterError,
    InvalidBodyError,
    InvalidParameterError,
    NamespaceConflictError,
    NotSupportedError,
)
from counter.quantities import format_duration, is_namespace_name, spell_duration
from counter.types import CounterType, Dataset, Namespace, NamespaceSettings
from counter.windows import deciding_time

#: How long the SDK retries one call by default.
SDK_RETRY_US: Final = 30 * limits.SECOND
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
    check_settings(settings, namespace.dataset)


def check_settings(settings: NamespaceSettings, dataset: Dataset) -> None:
    """Raise InvalidBodyError, naming field, value and bound, if a rule is broken."""
    check_rules(settings.event_rules)
    _check_bounds(settings)
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


def _check_bounds(settings: NamespaceSettings) -> None:
    try:
        terms_if_bounded(0, *settings.bounds)
    except ValueError as error:
        raise InvalidBodyError(f"bounds: {error}", field="bounds") from error
    if settings.bounds != NO_BOUNDS and settings.counter_type is CounterType.BEST_EFFORT:
        raise NotSupportedError(
            "bounds need events, and a BEST_EFFORT namespace keeps none: use EVENTUAL or ACCURATE"
        )


def creation_warnings(settings: NamespaceSettings, dataset: Dataset) -> Iterator[str]:
    """Return the contradictions, each with its values, its bound and a fix; refused ones come
    first.

    The kind of the store may have more advice.
    """
    try:
        check_settings(settings, dataset)
    except CounterError as error:
        yield f"the namespace would be refused: {error.detail}"
    if settings.counter_type is CounterType.BEST_EFFORT:
        return
    accept_us, window_us = settings.accept_limit_us, settings.rollup_window_us
    accept, window = spell_duration(accept_us), spell_duration(window_us)
    known_us = dataset.retention_us - deciding_time(dataset, window_us, accept_us)
    if known_us < SDK_RETRY_US:
        yield (
            f"the outcome of a token is known for {spell_duration(max(0, known_us))} (retention"
            f" {spell_duration(dataset.retention_us)}, less the time of a recount), and clients"
            f" retry for {spell_duration(SDK_RETRY_US)}: a later retry gets no answer; keep events"
            " longer or retry for less"
        )
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
