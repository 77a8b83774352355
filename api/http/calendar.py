"""Steps of a history: of a fixed length, or days, weeks and months of a time zone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from counter.limits import DAY

#: The end of the step that holds an instant.
Step = Callable[[int], int]
#: The units of the calendar, with the time that each has about, and a month at least.
CALENDAR: Final[Mapping[str, int]] = {"day": DAY, "week": 7 * DAY, "month": 28 * DAY}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def start_of_day(at_us: int, zone: ZoneInfo) -> int:
    """Return the beginning of the day in *zone* that holds *at_us*."""
    return _midnight(_local(at_us, zone), zone)


def _local(at_us: int, zone: ZoneInfo) -> datetime:
    return (_EPOCH + timedelta(microseconds=at_us)).astimezone(zone)


def _midnight(day: datetime, zone: ZoneInfo) -> int:
    # Where clocks go forward at midnight, the day begins at the instant at which they do.
    begins = datetime(day.year, day.month, day.day, tzinfo=zone)
    return (begins.astimezone(UTC) - _EPOCH) // _MICROSECOND


def calendar_step(unit: str, zone: ZoneInfo) -> Step:
    """Return steps of a *unit* of :data:`CALENDAR` in *zone*; weeks begin on Monday (ISO 8601)."""

    def end_of(at_us: int) -> int:
        day = _local(at_us, zone)
        if unit == "month":
            return _midnight((day.replace(day=1) + timedelta(days=32)).replace(day=1), zone)
        days = 7 - day.weekday() if unit == "week" else 1
        return _midnight(day.replace(hour=12) + timedelta(days=days), zone)

    return end_of


def fixed_step(step_us: int) -> Step:
    """Return steps of a fixed length, aligned to the epoch."""
    return lambda at_us: at_us - at_us % step_us + step_us
