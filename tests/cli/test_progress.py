"""Progress bars and tables on a terminal."""

import io
from unittest.mock import patch

from counter.cli.progress import Screen, progress
from counter.cli.terminal import table


def test_a_column_is_as_wide_as_its_widest_cell_on_a_terminal() -> None:
    assert table(("A", "N"), [("計", 1), ("b", -20)]) == "A     N\n計    1\nb   -20"


def test_a_file_may_be_named_like_markup() -> None:
    """Regression: the name of the file to import ended the command at a terminal."""
    screen = io.StringIO()
    console = Screen(file=screen, force_terminal=True, width=100)
    with (
        patch("counter.cli.progress.Screen", return_value=console),
        progress("reading [/x].csv", 1) as bar,
    ):
        bar.advance(1)
    assert "[/x].csv" in screen.getvalue()
