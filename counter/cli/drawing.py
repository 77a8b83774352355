"""Draw progress bars and plots on a terminal, with rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from counter.cli.terminal import printable


class Bar:
    """A progress bar."""

    def __init__(self, shown: Progress | None, what: str, total: int | None) -> None:
        self._shown = shown
        self._task = None if shown is None else shown.add_task(what, total=total)

    def go_on(self, by: int) -> None:
        """Advance by an amount."""
        if self._shown is not None and self._task is not None:
            self._shown.advance(self._task, by)

    def be_at(self, done: int, total: int) -> None:
        """Set the amount done and the total."""
        if self._shown is not None and self._task is not None:
            self._shown.update(self._task, completed=done, total=total)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Bar]:
    """Show a progress bar on standard error; nothing is shown if that is not a terminal."""
    console = Screen(stderr=True)
    if not console.is_terminal:
        yield Bar(None, what, total)
        return
    # A file name may look like markup.
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown:
        yield Bar(shown, what, total)


class Screen(Console):
    """A console on which only rich itself controls the terminal: control characters of texts are
    escaped."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as :meth:`rich.console.Console.render` does."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, lines=True), style, control)


_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_EIGHTHS: Final = len(_BLOCKS) - 1


def sparkline(values: Sequence[float]) -> str:
    """Return a block character for each of *values*, which are at least 0: the highest is a full
    block, and any value above 0 is visible."""
    top = max(values, default=0)
    if top <= 0:
        return _BLOCKS[1] * len(values)
    return "".join(_BLOCKS[max(1, round(value / top * _EIGHTHS))] for value in values)


def plot(values: Sequence[int], *, rows: int, columns: int) -> list[str]:
    """Draw *values* as bars from the least (or 0, if that is near) to the greatest, with both
    labels.

    If there are more values than *columns*, the last one of each group is drawn.
    """
    if not values:
        return []
    least, most = min(values), max(values)
    if 0 < least <= most / 2 or least == most > 0:
        least = 0
    labels = {rows - 1: f"{most:,}", 0: f"{least:,}"}
    margin = max(map(len, labels.values()))
    shown = _fitted(values, max(1, columns - margin - 2))
    span = most - least or 1
    # At least an eighth of a block, so that each value is visible.
    heights = [max(1, (value - least) * rows * _EIGHTHS // span) for value in shown]
    return [
        f"{labels.get(row, ''):>{margin}} ┤"
        + "".join(
            _BLOCKS[max(0, min(_EIGHTHS, height - row * _EIGHTHS))] for height in heights
        ).rstrip()
        for row in reversed(range(rows))
    ]


def _fitted(values: Sequence[int], columns: int) -> Sequence[int]:
    """Return at most *columns* of *values*, or each of them several times if that fits."""
    if len(values) <= columns:
        times = columns // len(values)
        return [value for value in values for _ in range(times)]
    return [values[(at + 1) * len(values) // columns - 1] for at in range(columns)]
