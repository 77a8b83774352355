"""A bar that moves while a command works, on a terminal; nothing where nobody looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from counter.cli_screen import Screen


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
