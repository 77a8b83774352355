"""Plan the size of a deduplication window and the partitions of a counter's events.

docs/planning.md shows both in use. Pure functions, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Final

from counter import limits
from counter.errors import StartupError
from counter.limits import PARTITION_BYTES_MAX
from counter.quantities import format_duration, format_number, format_share, spell_duration

#: The largest duration, rate and share.
DURATION_MAX_US: Final = 36_500 * limits.DAY
RATE_MAX_PER_S: Final = 10**9
SHARE_MAX: Final = 10
TOKEN_BITS: Final = 8 * limits.NONCE_BYTES
_BITS_MAX: Final = 1_024
_BYTES_MAX: Final = 10**15
_EVENTS_PER_DAY_MAX: Final = 10**14

RETENTION_SLICED_MIN_US: Final = 6 * limits.HOUR
#: (the longest retention, its slice): the first row with a long enough retention applies.
SLICES: Final[Sequence[tuple[int, int]]] = (
    (limits.DAY, 4 * limits.HOUR),
    (7 * limits.DAY, limits.DAY),
    (14 * limits.DAY, 7 * limits.DAY),
    (30 * limits.DAY, 14 * limits.DAY),
    (90 * limits.DAY, 30 * limits.DAY),
    (180 * limits.DAY, 90 * limits.DAY),
    (365 * limits.DAY, 180 * limits.DAY),
)
SLICE_MAX_US: Final = 365 * limits.DAY
BUCKETS_PER_ID_MAX: Final = 8
ACCEPT_LIMIT_PLANNED_US: Final = 600 * limits.SECOND


def _check_number(
    name: str,
    value: Fraction | int,
    low: int,
    high: int,
    unit: str = "",
    show: Callable[[Any], str] = format_number,
) -> None:
    """Raise StartupError unless *value* is within its bounds, all three written by *show*."""
    if not low <= value <= high:
        least, most = f"{show(low)}{unit}", f"{show(high)}{unit}"
        raise StartupError(f"{name} is {show(value)}{unit}; it must be from {least} to {most}")


def _check_duration(name: str, value_us: int, low_us: int = 0) -> None:
    """Raise StartupError unless *value_us* is within its bounds."""
    _check_number(name, value_us, low_us, DURATION_MAX_US, show=spell_duration)


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupNeed:
    """The requirements of a token store: the rate of tokens, and how late they are repeated.

    ``ttl_us`` is how long a token is to be kept, None for as long as necessary. The others are
    durations that a repetition may take, each in the worst case.
    """

    rate_per_s: Fraction
    caller_us: int = 0
    retry_us: int = 0
    network_us: int = 0
    clock_us: int = 0
    ttl_us: int | None = None
    margin: Fraction = Fraction(0)
    duplicates: Fraction = Fraction(0)
    incident_us: int = 0
    record_bytes: int = 200
    bits: int = TOKEN_BITS

    @property
    def ttl_least_us(self) -> int:
        """Return ``T_caller + T_retry + T_network + T_clock``: the last instant of a repetition."""
        return self.caller_us + self.retry_us + self.network_us + self.clock_us


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupPlan:
    """The size of a token store. Plain numbers, which survive JSON."""

    ttl_seconds: int | float
    ttl_least_seconds: int | float
    keys: int
    bytes_held: int
    keys_per_day: int
    bytes_per_day: int
    duplicates_per_second: float
    duplicates_in_incident: int
    collision_probability: float
    shards: int
    keys_per_shard: int


def plan_dedup(need: DedupNeed) -> DedupPlan:
    """Compute the size of a token store for *need*. Raises StartupError for a value out of bounds.

    ``T_ttl = T_caller + T_retry + T_network + T_clock`` is the sizing rule of the design; ``keys =
    (1 + margin) * rate * T_ttl`` is Little's law (J. D. C. Little, "A proof for the queuing formula
    L = lambda W", 1961), with room to spare.
    """
    _check_dedup(need)
    ttl_us = need.ttl_least_us if need.ttl_us is None else need.ttl_us
    keys = ceil((1 + need.margin) * need.rate_per_s * ttl_us / limits.SECOND)
    keys_per_day = ceil(need.rate_per_s * 86_400)
    duplicates_per_s = need.duplicates * need.rate_per_s
    shards = shards_for(keys * need.record_bytes)
    return DedupPlan(
        ttl_seconds=_seconds(ttl_us),
        ttl_least_seconds=_seconds(need.ttl_least_us),
        keys=keys,
        bytes_held=keys * need.record_bytes,
        keys_per_day=keys_per_day,
        bytes_per_day=keys_per_day * need.record_bytes,
        duplicates_per_second=float(duplicates_per_s),
        duplicates_in_incident=ceil(duplicates_per_s * need.incident_us / limits.SECOND),
        collision_probability=collision_probability(keys, need.bits),
        shards=shards,
        keys_per_shard=ceil(Fraction(keys, shards)),
    )


def dedup_warnings(need: DedupNeed) -> tuple[str, ...]:
    """Return contradictions within *need*."""
    if need.ttl_us is None or need.ttl_us >= need.ttl_least_us:
        return ()
    return (
        f"ttl is {format_duration(need.ttl_us)} and a repetition may come"
        f" {format_duration(need.ttl_least_us)} after the first attempt (caller + retry + network"
        f" + clock): it would count twice; keep tokens for {format_duration(need.ttl_least_us)}",
    )


def _check_dedup(need: DedupNeed) -> None:
    _check_number("rate", need.rate_per_s, 0, RATE_MAX_PER_S, "/s")
    for name in ("caller", "retry", "network", "clock", "incident"):
        _check_duration(name, getattr(need, f"{name}_us"))
    if need.ttl_us is not None:
        _check_duration("ttl", need.ttl_us, limits.MILLISECOND)
    elif need.ttl_least_us == 0:
        raise StartupError(
            "caller + retry + network + clock is 0s, so no token would be kept; give them,"
            " or ttl, at least 1ms"
        )
    _check_number("margin", need.margin, 0, SHARE_MAX, show=format_share)
    _check_number("duplicates", need.duplicates, 0, SHARE_MAX, show=format_share)
    _check_number("record_size", need.record_bytes, 1, _BYTES_MAX, " B")
    _check_number("bits", need.bits, 1, _BITS_MAX)


def collision_probability(keys: int, bits: int = TOKEN_BITS) -> float:
    """Return an upper bound of the probability that two of *keys* random values are equal.

    ``n (n - 1) / (2 * 2^b)``: the sum over all pairs (Boole's inequality), the usual bound of the
    birthday problem; at most 1.
    """
    return float(min(Fraction(1), Fraction(keys * (keys - 1), 2 * 2**bits)))


def shards_for(size_bytes: int) -> int:
    """Return the number of shards of ``xxh64(token) % shards`` for *size_bytes*.

    The fewest that keep a part to PARTITION_BYTES_MAX on average, rounded up to a power of two:
    then doubling them splits each part in two, and moves nothing between the others.
    """
    parts = max(1, ceil(Fraction(size_bytes, PARTITION_BYTES_MAX)))
    return 1 << (parts - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageNeed:
    """The events of one counter; a retention of None keeps them without end."""

    retention_us: int | None
    read_interval_us: int
    events_per_day: Fraction
    event_bytes: int = 64
    accept_limit_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePlan:
    """How one counter's events are partitioned; spans and ``accept_limit`` in seconds."""

    seconds_per_slice: int
    seconds_per_interval: int
    buckets_per_id: int
    seconds_per_bucket: int
    accept_limit: int
    read_amplification: int


def slice_for(retention_us: int | None) -> int:
    """Return the slice for a retention, both in microseconds; 0, a single slice, if it is None.

    Bounds are inclusive (:data:`SLICES`). Raises StartupError below 6 hours.
    """
    if retention_us is None:
        return 0
    _check_duration("retention", retention_us, RETENTION_SLICED_MIN_US)
    for longest_us, slice_us in SLICES:
        if retention_us <= longest_us:
            return slice_us
    return SLICE_MAX_US


def buckets_for(interval_us: int, events_per_day: Fraction, event_bytes: int) -> int:
    """Return the number of partitions for an interval's events of one counter, 1 to 8.

    ``round-half-even(max(1, min(8, interval * events/day * size / 86,400 s / 4 MiB)))``.
    """
    interval_bytes = _interval_bytes(interval_us, events_per_day, event_bytes)
    # round() of a fraction is exact, half to even.
    return round(max(Fraction(1), min(Fraction(BUCKETS_PER_ID_MAX), interval_bytes)))


def _interval_bytes(interval_us: int, events_per_day: Fraction, event_bytes: int) -> Fraction:
    """Return the size of an interval's events, in units of PARTITION_BYTES_MAX."""
    return interval_us * events_per_day * event_bytes / limits.DAY / PARTITION_BYTES_MAX


def plan_storage(need: StorageNeed) -> StoragePlan:
    """Plan the partitions of one counter's events. Raises StartupError if a value is out of bounds.

    Names and rules are those of Netflix's time series store, in which its distributed counter keeps
    events (``time_series_config.py`` of Netflix-Skunkworks/service-capacity-modeling).
    """
    slice_us = slice_for(need.retention_us)
    _check_storage(need)
    read_us = need.read_interval_us
    interval_us = min(read_us, slice_us or read_us)
    buckets = buckets_for(interval_us, need.events_per_day, need.event_bytes)
    bucket_us = (60 if read_us <= limits.MINUTE else 5) * limits.SECOND
    accept_limit_us = need.accept_limit_us
    if accept_limit_us is None:
        accept_limit_us = 0 if need.retention_us is None else ACCEPT_LIMIT_PLANNED_US
    return StoragePlan(
        seconds_per_slice=slice_us // limits.SECOND,
        seconds_per_interval=interval_us // limits.SECOND,
        buckets_per_id=buckets,
        seconds_per_bucket=(interval_us if buckets == 1 else bucket_us) // limits.SECOND,
        accept_limit=accept_limit_us // limits.SECOND,
        read_amplification=ceil(Fraction(read_us, interval_us)) * buckets,
    )


def _check_storage(need: StorageNeed) -> None:
    _check_duration("read_interval", need.read_interval_us, limits.SECOND)
    for name in ("read_interval", "accept_limit"):
        value_us = getattr(need, f"{name}_us") or 0
        if value_us % limits.SECOND:
            raise StartupError(
                f"{name} is {format_duration(value_us)}; it must be a whole number of seconds"
            )
    _check_number("events_per_day", need.events_per_day, 0, _EVENTS_PER_DAY_MAX)
    _check_number("event_size", need.event_bytes, 1, _BYTES_MAX, " B")
    if need.accept_limit_us is not None:
        _check_duration("accept_limit", need.accept_limit_us)


def storage_warnings(need: StorageNeed, plan: StoragePlan) -> tuple[str, ...]:
    """Return where the plan is not as it should be, or not supported by this service."""
    found: list[str] = []
    interval_us = plan.seconds_per_interval * limits.SECOND
    parts = _interval_bytes(interval_us, need.events_per_day, need.event_bytes)
    if parts > Fraction(3, 2) * plan.buckets_per_id:
        fits_us = int(interval_us * plan.buckets_per_id / parts) // limits.SECOND * limits.SECOND
        found.append(
            f"a partition grows to {format_number(parts / plan.buckets_per_id)} times 4 MiB:"
            f" {plan.buckets_per_id} buckets are too few; read at most"
            f" {spell_duration(max(fits_us, limits.SECOND))} at once, or give the counter several"
            " names"
        )
    retention_us = need.retention_us
    if retention_us is None or retention_us > limits.RETENTION_MAX_US:
        shown = "unlimited" if retention_us is None else format_duration(retention_us)
        found.append(
            f"retention is {shown}; this service keeps events for"
            f" {format_duration(limits.RETENTION_MAX_US)} at most, and counts for ever"
        )
    else:
        accept_us = plan.accept_limit * limits.SECOND
        most_us = min(limits.ACCEPT_LIMIT_MAX_US, retention_us // 10)
        if accept_us > most_us:
            found.append(
                f"accept_limit is {format_duration(accept_us)}; this service takes"
                f" {format_duration(most_us)} at most with this retention"
            )
    return tuple(found)


def _seconds(duration_us: int) -> int | float:
    """Return *duration_us* in seconds, as an integer if it is whole."""
    whole, rest = divmod(duration_us, limits.SECOND)
    return duration_us / limits.SECOND if rest else whole
