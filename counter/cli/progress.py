"""Show progress bars on a terminal, with rich."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A progress bar."""

    def __init__(self, shown: Progress | None, what: str, total: int | None) -> None:
        self._shown = shown
        self._task = None if shown is None else shown.add_task(what, total=total)

    def advance(self, by: int) -> None:
        """Advance by an amount."""
        if self._shown is not None and self._task is not None:
            self._shown.advance(self._task, by)

    def update(self, done: int, total: int) -> None:
        """Set the amount done and the total."""
        if self._shown is not None and self._task is not None:
            self._shown.update(self._task, completed=done, total=total)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Bar]:
    """Show a progress bar on standard error; nothing is shown if that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Bar(None, what, total)
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown:
        yield Bar(shown, what, total)
