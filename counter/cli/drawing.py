"""What commands draw on a terminal: progress bars, plots, and the console that rich draws on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from counter.cli.terminal import printable


class Bar:
    """What a command moves on."""

    def __init__(self, shown: Progress | None, what: str, total: int | None) -> None:
        self._shown = shown
        self._task = None if shown is None else shown.add_task(what, total=total)

    def go_on(self, by: int) -> None:
        """Say that so much more is done."""
        if self._shown is not None and self._task is not None:
            self._shown.advance(self._task, by)

    def be_at(self, done: int, total: int) -> None:
        """Say that so much is done of so much."""
        if self._shown is not None and self._task is not None:
            self._shown.update(self._task, completed=done, total=total)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Bar]:
    """A bar on standard error; one that is not shown where that is no terminal."""
    console = Screen(stderr=True)
    if not console.is_terminal:
        yield Bar(None, what, total)
        return
    # A file may be named like markup.
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown:
        yield Bar(shown, what, total)


class Screen(Console):
    """A console on which only rich itself controls the terminal: what is in a text is escaped."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As of rich."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, lines=True), style, control)


_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_EIGHTHS: Final = len(_BLOCKS) - 1


def sparkline(values: Sequence[float]) -> str:
    """A block for each of *values*, which are not below 0: the highest of them is a whole one, and
    what is above 0 is seen."""
    top = max(values, default=0)
    if top <= 0:
        return _BLOCKS[1] * len(values)
    return "".join(_BLOCKS[max(1, round(value / top * _EIGHTHS))] for value in values)


def plot(values: Sequence[int], *, rows: int, columns: int) -> list[str]:
    """*values* as bars from the least (or 0, where that is near) to the greatest, with both written
    beside them; where there are more than fit in *columns*, the last one of each part is drawn."""
    if not values:
        return []
    least, most = min(values), max(values)
    if 0 < least <= most / 2 or least == most > 0:
        least = 0
    labels = {rows - 1: f"{most:,}", 0: f"{least:,}"}
    margin = max(map(len, labels.values()))
    shown = _fitted(values, max(1, columns - margin - 2))
    span = most - least or 1
    # At least an eighth: what is drawn is there.
    heights = [max(1, (value - least) * rows * _EIGHTHS // span) for value in shown]
    return [
        f"{labels.get(row, ''):>{margin}} ┤"
        + "".join(
            _BLOCKS[max(0, min(_EIGHTHS, height - row * _EIGHTHS))] for height in heights
        ).rstrip()
        for row in reversed(range(rows))
    ]


def _fitted(values: Sequence[int], columns: int) -> Sequence[int]:
    """At most *columns* of *values*, or each of them several times where that fits."""
    if len(values) <= columns:
        times = columns // len(values)
        return [value for value in values for _ in range(times)]
    return [values[(at + 1) * len(values) // columns - 1] for at in range(columns)]
