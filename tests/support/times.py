"""Instants as the wire writes them, made without the code under test."""

from datetime import UTC, datetime, timedelta

MILLISECOND = 1_000
SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: A plain instant to start fake clocks at: 2026-03-01T12:00:00.25Z, on no window's border.
START_US = 1_772_366_400 * SECOND + 250 * MILLISECOND


def rfc3339(time_us: int) -> str:
    """*time_us* as ``2026-03-01T12:00:00.250000Z``."""
    moment = _EPOCH + timedelta(microseconds=time_us)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def to_us(text: str) -> int:
    """Microseconds since the epoch of a response's time, which must be in UTC with microseconds."""
    moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    assert rfc3339((moment - _EPOCH) // timedelta(microseconds=1)) == text
    return (moment - _EPOCH) // timedelta(microseconds=1)
