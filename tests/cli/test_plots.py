"""Numbers drawn with characters, and how fast a count goes."""

import io
from unittest.mock import patch

from counter.cli.commands.watch import CountHistory
from counter.cli.drawing import Screen, plot, progress, sparkline
from counter.cli.terminal import table


def test_the_highest_is_a_whole_block_and_what_there_is_is_seen() -> None:
    assert sparkline([0, 1, 50, 100]) == "▁▁▄█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


def test_a_plot_goes_from_the_least_to_the_greatest() -> None:
    top, bottom = plot([100, 150, 200], rows=2, columns=12)
    assert (top[:5], bottom[:5]) == ("200 ┤", "  0 ┤")
    assert bottom.endswith("████")
    assert plot([1_000, 1_001], rows=2, columns=9)[1].startswith("1,000 ┤")
    assert plot([], rows=2, columns=9) == []
    assert all(line == "0 ┤" or line.strip(" ┤▁0") == "" for line in plot([0], rows=3, columns=5))


def test_of_more_values_than_fit_the_last_of_each_part_is_drawn() -> None:
    (line,) = plot([9, 0, 9, 8], rows=1, columns=5)
    assert line == "0 ┤▁▇"


def test_a_column_is_as_wide_as_its_widest_cell_on_a_terminal() -> None:
    assert table(("A", "N"), [("計", 1), ("b", -20)]) == "A     N\n計    1\nb   -20"


def test_a_rate_is_that_of_the_last_seconds() -> None:
    history = CountHistory()
    assert history.rate(0.0) == 0.0
    for second in range(60):
        history.see(float(second), second * 5 if second < 30 else 150)
    assert history.rate(59.0) == 0.0
    history.see(60.0, 170)
    assert history.rate(60.0) == 2.0
    changes = history.changes(60.0)
    assert (len(changes), changes[-1], changes[0]) == (40, 20, 5)


def test_a_count_that_goes_down_is_no_change_that_is_drawn() -> None:
    history = CountHistory()
    history.see(0.0, 10)
    history.see(1.0, 3)
    assert set(history.changes(1.0)) == {0}
    assert history.rate(1.0) == -7.0


def test_a_file_may_be_named_like_markup() -> None:
    """Regression: the name of the file to import ended the command at a terminal."""
    screen = io.StringIO()
    console = Screen(file=screen, force_terminal=True, width=100)
    with (
        patch("counter.cli.drawing.Screen", return_value=console),
        progress("reading [/x].csv", 1) as bar,
    ):
        bar.go_on(1)
    assert "[/x].csv" in screen.getvalue()
