"""Work that many ask for at once, done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Coalesced(Generic[_T]):
    """Calls *work* once for all who ask while it has not begun.

    Whoever asks gets what a call that began after they asked came to: joining one that is under
    way would give them what may have been read before.
    """

    def __init__(self, work: Callable[[], Awaitable[_T]]) -> None:
        self._work = work
        self._running: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def __call__(self) -> _T:
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
            self._next.add_done_callback(_look_at)
        # Shielded: one who gives up does not take the work from the others.
        return await asyncio.shield(self._next)

    async def _run(self, before: asyncio.Task[_T] | None) -> _T:
        if before is not None:
            await asyncio.wait((before,))
        self._running, self._next = self._next, None
        return await self._work()


def _look_at(task: asyncio.Task[_T]) -> None:
    """All who asked may have given up: then nobody else looks at what it raised."""
    if not task.cancelled():
        task.exception()
