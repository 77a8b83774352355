"""Read the wall clock, and a monotonic clock that runs while the machine is suspended."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE: Final = _EPOCH.replace(tzinfo=None)
_USUAL_CHARS: Final = len("2026-01-31T08:15:30.000250Z")
_RFC3339: Final = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?"
    r"(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_BOOTTIME: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The machine's clocks; the wall clock never decreases within the process.

    If the wall clock is stepped back, windows that were already counted would open again. Readings
    that no decision used can be forgotten: see :meth:`forget_after`.
    """

    def __init__(self) -> None:
        self._latest_us = 0

    def now_us(self) -> int:
        """Return microseconds since the epoch, UTC, never less than an earlier reading."""
        now = self.wall_us()
        if now < self._latest_us:
            return self._latest_us
        self._latest_us = now
        return now

    def wall_us(self) -> int:
        """Return microseconds since the epoch, UTC, from the machine's clock: it may step back."""
        return time.time_ns() // 1_000

    def forget_after(self, time_us: int) -> None:
        """Forget readings later than *time_us*: the caller knows that nothing depends on them."""
        self._latest_us = min(self._latest_us, time_us)

    def boottime_us(self) -> int:
        """Return microseconds of a clock that only moves forward, suspended time included."""
        return time.clock_gettime_ns(_BOOTTIME) // 1_000


class StoreClock(SystemClock):
    """An estimate of the store's clock: the boot clock, set by each measurement.

    The machine's wall clock is read once, when the process starts, so setting it has no effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self._at_boot_us = super().wall_us() - self.boottime_us()
        self._is_set = False

    def wall_us(self) -> int:
        """Return microseconds since the epoch, UTC, as the store's clock would show."""
        return self._at_boot_us + self.boottime_us()

    def follow(self, offset_us: int) -> None:
        """Move this clock ahead by *offset_us*, or back if that is negative.

        Readings before the first measurement are forgotten: no decision may use them.
        """
        if not self._is_set:
            self._is_set, self._latest_us = True, 0
        self._at_boot_us += offset_us


def to_us(moment: datetime) -> int:
    """Return the exact microseconds since the epoch of an aware *moment*."""
    span = moment - _EPOCH
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds


def parse_rfc3339(text: str) -> int:
    """Return the microseconds since the epoch of an RFC 3339 time with an offset.

    Digits after the sixth of a second are cut off: .NET writes seven, Go and Java nine. Raises
    ValueError for anything else: no offset, an invalid date, a leap second.
    """
    if len(text) == _USUAL_CHARS and text[19] == "." and text[26] == "Z":
        digits = text[20:26]
        if digits.isascii() and digits.isdigit():
            # Fast path for the usual form: many tokens share all but the fraction.
            return _second_us(text[:19]) + int(digits)
    return _parse(text)


@lru_cache(maxsize=4_096)
def _second_us(text: str) -> int:
    return _parse(text + "Z")


def _parse(text: str) -> int:
    if _RFC3339.fullmatch(text) is None:
        raise ValueError("it is not RFC 3339 with an offset, or it is a leap second")
    # fromisoformat() accepts the letters in upper case only; RFC 3339 allows both.
    return to_us(datetime.fromisoformat(text.upper()))


@lru_cache(maxsize=4_096)
def _second_text(seconds: int) -> str:
    return (_EPOCH_NAIVE + timedelta(seconds=seconds)).isoformat()


def to_rfc3339(time_us: int) -> str:
    """Format *time_us* as RFC 3339 in UTC with microseconds, ``2026-01-31T08:15:30.000250Z``."""
    seconds, microseconds = divmod(time_us, 1_000_000)
    return f"{_second_text(seconds)}.{microseconds:06d}Z"
