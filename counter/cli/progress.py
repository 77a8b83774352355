"""Show progress bars on a terminal, with rich."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar."""

    _shown: Progress
    _task: TaskID

    def advance(self, by: int) -> None:
        """Advance by an amount."""
        self._shown.advance(self._task, by)

    def update(self, done: int, total: int) -> None:
        """Set the amount done and the total."""
        self._shown.update(self._task, completed=done, total=total)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Bar]:
    """Show a progress bar on standard error; nothing is shown if that is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *(*columns, TimeRemainingColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as shown:
        yield Bar(shown, shown.add_task(what, total=total))
