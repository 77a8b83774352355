"""Days, weeks and months of a time zone: their length follows its clocks."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.calendar import calendar_step, fixed_step, start_of_day

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR = 3_600_000_000
_ZONES = ("UTC", "Europe/Berlin", "America/Sao_Paulo", "Asia/Kathmandu", "Pacific/Apia")


def at(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("zone", "now", "begins", "hours"),
    [
        ("UTC", "2026-03-29T23:59:59.999999Z", "2026-03-29T00:00:00Z", 24),
        ("Europe/Berlin", "2026-03-29T12:00:00+02:00", "2026-03-29T00:00:00+01:00", 23),
        ("Europe/Berlin", "2026-10-25T00:00:00+02:00", "2026-10-25T00:00:00+02:00", 25),
        # Midnight did not exist: clocks went from 23:59 to 1:00.
        ("America/Sao_Paulo", "2018-11-04T08:00:00-02:00", "2018-11-04T01:00:00-02:00", 23),
        # Midnight came twice; the day began with the first one.
        ("America/Havana", "2026-11-01T00:30:00-05:00", "2026-11-01T00:00:00-04:00", 25),
        ("Asia/Kathmandu", "2026-01-01T00:00:00+05:45", "2025-12-31T18:15:00Z", 24),
    ],
)
def test_a_day_begins_at_midnight_and_has_as_many_hours_as_its_clocks_show(
    zone: str, now: str, begins: str, hours: int
) -> None:
    info = ZoneInfo(zone)
    assert start_of_day(at(now), info) == at(begins)
    assert calendar_step("day", info)(at(now)) == at(begins) + hours * _HOUR


@pytest.mark.parametrize(
    ("unit", "now", "end"),
    [
        ("week", "2026-03-25T12:00:00+01:00", "2026-03-30T00:00:00+02:00"),
        ("week", "2026-03-30T00:00:00+02:00", "2026-04-06T00:00:00+02:00"),
        ("month", "2026-01-31T23:59:59+01:00", "2026-02-01T00:00:00+01:00"),
        ("month", "2026-12-01T00:00:00+01:00", "2027-01-01T00:00:00+01:00"),
        ("month", "2028-02-01T00:00:00+01:00", "2028-03-01T00:00:00+01:00"),
    ],
)
def test_weeks_begin_on_monday_and_months_on_the_first(unit: str, now: str, end: str) -> None:
    assert calendar_step(unit, ZoneInfo("Europe/Berlin"))(at(now)) == at(end)


@given(
    zone=st.sampled_from(_ZONES),
    unit=st.sampled_from(("day", "week", "month")),
    moment=st.datetimes(datetime(1975, 1, 1), datetime(2035, 1, 1)),
)
def test_steps_follow_one_another_without_a_gap(zone: str, unit: str, moment: datetime) -> None:
    """An instant just before the end of a step has that end, and each step takes some time."""
    end_of = calendar_step(unit, ZoneInfo(zone))
    ends = [at(moment.replace(tzinfo=UTC).isoformat())]
    for _ in range(4):
        ends.append(end_of(ends[-1]))
    hours = {"day": (23, 25), "week": (7 * 24 - 24, 7 * 24 + 1), "month": (27 * 24, 31 * 24 + 1)}
    for begin, end in pairwise(ends[1:]):
        assert hours[unit][0] * _HOUR <= end - begin <= hours[unit][1] * _HOUR
        assert end_of(end - 1) == end
        assert start_of_day(end, ZoneInfo(zone)) == end


def test_steps_of_a_fixed_length_are_aligned_to_the_epoch() -> None:
    assert [fixed_step(10)(each) for each in (0, 9, 10, 25)] == [10, 10, 20, 30]
