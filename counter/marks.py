"""What one process knows of its own durable marks, so that a hot counter pays for one a window."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from counter.types import Mark

_REMEMBERED_MAX: Final = 100_000


class MarkMemory:
    """Marks whose write was acknowledged to this process. Bounded; forgetting is safe."""

    def __init__(self) -> None:
        # Unlike a dict, it forgets its oldest in constant time.
        self._known: OrderedDict[tuple[int, Mark], None] = OrderedDict()

    def knows(self, namespace_id: int, mark: Mark) -> bool:
        """Whether *mark* is known to be durable."""
        return (namespace_id, mark) in self._known

    def unknown(self, namespace_id: int, marks: Sequence[Mark]) -> list[Mark]:
        """Those of *marks* that are not known to be durable, each once."""
        return [m for m in dict.fromkeys(marks) if (namespace_id, m) not in self._known]

    def remember(self, namespace_id: int, marks: Sequence[Mark]) -> None:
        """Note that *marks* are durable; the ones noted first are forgotten first."""
        for mark in marks:
            self._known[(namespace_id, mark)] = None
        while len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
