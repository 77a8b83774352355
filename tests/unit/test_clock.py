"""Clocks, windows and durations at their edges."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from counter.clock import SystemClock, parse_rfc3339
from counter.quantities import format_duration
from counter.types import Era
from counter.windows import accept_limit_at, closed_through
from tests.rollup.world import SETTINGS, World
from tests.support.times import SECOND


def test_the_clock_never_steps_back() -> None:
    """Set back by hand, it stops until its last reading is reached again."""
    clock = SystemClock()
    readings = [5_000, 3_000, 4_999, 6_000]
    with patch("counter.clock.time.time_ns", side_effect=[each * 1_000 for each in readings]):
        assert [clock.now_us() for _ in readings] == [5_000, 5_000, 5_000, 6_000]


#: 2026-01-31T08:15:30Z
INSTANT_US = 1_769_847_330 * SECOND


@pytest.mark.parametrize(
    ("text", "after_us"),
    [
        ("2026-01-31T08:15:30Z", 0),
        ("2026-01-31t08:15:30.5z", 500_000),
        ("2026-01-31 09:15:30.000250+01:00", 250),
        ("2026-01-30T18:30:30.000250-13:45", 250),
        ("2026-01-31T08:15:30.1234567Z", 123_456),
        ("2026-01-31T08:15:30.999999999-00:00", 999_999),
        ("2026-01-31T08:15:30." + "9" * 5_000 + "Z", 999_999),
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_time_has_any_offset_and_digits_beyond_microseconds_are_cut_off(
    text: str, after_us: int
) -> None:
    assert parse_rfc3339(text) == INSTANT_US + after_us


def test_the_first_and_last_years_with_any_offset_are_times() -> None:
    assert parse_rfc3339("0001-01-01T00:00:00+23:59") < parse_rfc3339("0001-01-01T00:00:00Z") < 0
    assert parse_rfc3339("9999-12-31T23:59:59-23:59") > parse_rfc3339("9999-12-31T23:59:59Z") > 0


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-31T08:15:30",
        "2026-01-31T08:15:30.",
        "2026-01-31T08:15:30.Z",
        "2026-01-31T08:15:30,5Z",
        "2026-01-31T08:15:30.00 250Z",
        "2026-01-31T08:15:30.\u0660\u0660\u0660\u0662\u0665\u0660Z",
        "2026-01-31T08:15Z",
        "2026-01-31T08Z",
        "20260131T081530Z",
        "2026-W05-6T08:15:30Z",
        "2026-01-31T24:00:00Z",
        "2026-01-31T23:59:60Z",
        "2026-01-31T08:15:30+0100",
        "2026-01-31T08:15:30+01",
        "2026-01-31T08:15:30+24:00",
        "2026-01-31T08:15:30+01:60",
        "2026-01-31T08:15:30+01:00:00",
        " 2026-01-31T08:15:30Z",
        "2026-01-31T08:15:30Z\n",
        "today",
        "",
    ],
)
def test_only_rfc_3339_is_a_time_in_any_version_of_python(text: str) -> None:
    with pytest.raises(ValueError, match="RFC 3339"):
        parse_rfc3339(text)


def test_a_fraction_of_a_microsecond_is_not_a_duration() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        format_duration(1.5)  # type: ignore[arg-type]


async def test_a_token_from_before_all_eras_has_the_limit_of_the_first() -> None:
    namespace = await World().begin()
    eras = (Era(10 * SECOND, 3 * SECOND), Era(20 * SECOND, 4 * SECOND))
    aged = replace(namespace, eras=eras)
    limits = [accept_limit_at(aged, at * SECOND) // SECOND for at in (0, 10, 19, 20, 30)]
    assert limits == [3, 3, 3, 4, 4]


async def test_a_later_era_closes_no_window_before_an_earlier_one_is_closed() -> None:
    """A short limit after a long one: the windows of the long one hold it up."""
    namespace = await World().begin()
    dataset = replace(namespace.dataset, write_timeout_us=0, clock_skew_max_us=0)
    settings = replace(SETTINGS, rollup_window_us=SECOND)
    eras = (Era(0, 30 * SECOND), Era(100 * SECOND, SECOND))
    aged = replace(namespace, eras=eras, dataset=dataset, settings=settings)
    through = [closed_through(aged, at * SECOND) + 1 for at in (110, 129, 130, 131, 140)]
    assert [each // SECOND for each in through] == [80, 99, 129, 130, 139]
