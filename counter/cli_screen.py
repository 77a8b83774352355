"""The console of every command that draws with rich."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from counter.cli import printable


class Screen(Console):
    """A console on which only rich itself controls the terminal: what is in a text is escaped."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As of rich."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, lines=True), style, control)
