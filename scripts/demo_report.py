"""The demo's output: bars or plain lines while it runs, a table and the totals at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from scripts.demo_clients import Tally
from scripts.demo_reading import Reading

TOP: Final = 15
#: The width where there is no terminal to ask.
PLAIN_COLUMNS: Final = 100


def make_console() -> Console:
    """Standard output, as wide as the terminal, or as the tables need where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_COLUMNS)


class Show:
    """Progress: bars on a terminal, elsewhere a few lines for each."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Leave the bars in place; later output appears below them."""
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line of its own; bars stay below it."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def bar(self, description: str, total: int, lines: int = 2) -> Callable[[int], None]:
        """Begin a bar, or so many *lines*; what is returned moves it on."""
        if self.console.is_terminal:
            task = self._bars.add_task(description, total=total)
            return lambda steps: self._bars.advance(task, steps)
        return self._lines(description, total, lines)

    def _lines(self, description: str, total: int, lines: int) -> Callable[[int], None]:
        done = shown = 0

        def advance(steps: int) -> None:
            nonlocal done, shown
            done += steps
            if (step := lines * done // max(1, total)) > shown:
                shown = step
                self.say(f"{description}: {done:,} of {total:,}")

        return advance


def differing(truth: Mapping[str, int], readings: Mapping[str, Reading]) -> list[str]:
    """The counters that were counted wrong."""
    return [name for name, count in truth.items() if readings[name].count != count]


def counts_table(
    truth: Counter[str],
    tally: Tally,
    exact: Mapping[str, Reading],
    rolled_up: Mapping[str, Reading],
) -> Table:
    """The most frequent names, every name counted wrong up to as many, and all names together."""
    wrong = list(dict.fromkeys(differing(truth, exact) + differing(truth, rolled_up)))
    top = [name for name, _ in truth.most_common(TOP)]
    rows = {
        name: (
            truth[name],
            tally.sent[name],
            tally.collapsed[name],
            exact[name].count,
            rolled_up[name].count,
        )
        for name in truth
    }
    table = Table(title="Names in Python's standard library", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", overflow="fold")
    for heading in ("truth", "sent", "collapsed", "counted", "rolled up", "difference"):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(top + wrong[:TOP]):
        _add_row(table, name, rows[name])
    table.add_section()
    sums = [sum(column) for column in zip(*rows.values(), strict=True)]
    _add_row(table, f"all {len(truth):,}", sums)
    return table


def _add_row(table: Table, name: str, row: Sequence[int]) -> None:
    """One row: *row* begins with the truth and ends with the two counts to compare with it."""
    off = max((count - row[0] for count in row[-2:]), key=abs)
    cells = [f"{number:,}" for number in row] + [f"{off:+,}" if off else "0"]
    table.add_row(name, *cells, style="bold red" if off else None)


def totals_table(totals: Mapping[str, str]) -> Table:
    """What happened on the way."""
    table = Table(title="On the way", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("what")
    table.add_column("how many", justify="right")
    for what, how_many in totals.items():
        table.add_row(what, how_many)
    return table
