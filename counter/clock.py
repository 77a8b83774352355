"""Time: the wall clock, and a monotonic clock that runs while the machine is suspended."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE: Final = _EPOCH.replace(tzinfo=None)
_BOOTTIME: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The machine's clocks, the wall clock held non-decreasing within the process.

    A wall clock that is stepped back would reopen windows that were already counted.
    """

    def __init__(self) -> None:
        self._latest_us = 0

    def now_us(self) -> int:
        """Microseconds since the epoch, UTC, never less than an earlier reading."""
        now = time.time_ns() // 1_000
        if now < self._latest_us:
            return self._latest_us
        self._latest_us = now
        return now

    def boottime_us(self) -> int:
        """Microseconds of a clock that only moves forward, suspended time included."""
        return time.clock_gettime_ns(_BOOTTIME) // 1_000


def to_us(moment: datetime) -> int:
    """Microseconds since the epoch of an aware *moment*, exactly."""
    span = moment - _EPOCH
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds


def to_rfc3339(time_us: int) -> str:
    """*time_us* as RFC 3339 in UTC with microseconds, ``2026-01-31T08:15:30.000250Z``."""
    moment = _EPOCH_NAIVE + timedelta(microseconds=time_us)
    return moment.isoformat(timespec="microseconds") + "Z"
