"""Clocks, windows and durations at their edges."""

from dataclasses import replace
from unittest.mock import patch

import pytest

from counter.clock import SystemClock, parse_rfc3339
from counter.durations import format_duration
from counter.types import Era
from counter.windows import accept_limit_at, closed_through
from tests.rollup.world import SETTINGS, World
from tests.support.times import SECOND


def test_the_clock_never_steps_back() -> None:
    """Set back by hand, it stands still until the time that it told has come again."""
    clock = SystemClock()
    readings = [5_000, 3_000, 4_999, 6_000]
    with patch("counter.clock.time.time_ns", side_effect=[each * 1_000 for each in readings]):
        assert [clock.now_us() for _ in readings] == [5_000, 5_000, 5_000, 6_000]


@pytest.mark.parametrize("text", ["2026-01-31T08:15:30.00 250Z", "2026-01-31T08:15:30.٠٠٠٢٥٠Z"])
def test_a_fraction_that_is_no_digits_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="RFC 3339"):
        parse_rfc3339(text)


def test_a_part_of_a_microsecond_is_no_duration() -> None:
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
