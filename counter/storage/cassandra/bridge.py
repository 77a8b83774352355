"""From the driver's thread to the event loop, many results at a crossing.

The driver calls back on its own reactor thread, once per statement. Waking the event loop costs
more than the callback itself, so statements that were sent together come back together, and
whatever is done when the loop wakes is taken along.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any


class Bridge:
    """Resolves futures of one event loop from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: deque[tuple[asyncio.Future[Any], Any]] = deque()
        self._woken = False

    def resolve(self, future: asyncio.Future[Any], result: Any) -> None:
        """Have *future* resolved in its loop. Call from any thread."""
        self._done.append((future, result))
        # Appended first, then looked: either the drain under way takes it, or a new one will.
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                # The loop is closed: nobody waits any more.
                self._done.clear()

    def _drain(self) -> None:
        self._woken = False
        while self._done:
            future, result = self._done.popleft()
            if not future.done():
                future.set_result(result)


class Gathering:
    """The results of statements that were sent together, each with all its pages."""

    def __init__(self, bridge: Bridge, future: asyncio.Future[list[Any]], size: int) -> None:
        self._bridge = bridge
        self._future = future
        self._results: list[Any] = [None] * size
        self._left = size
        # The reactor, the driver's timers and the sender itself may finish at once.
        self._lock = threading.Lock()

    def succeed(self, rows: Sequence[Any] | None, index: int, response: Any) -> None:
        """A page of rows came; the next is asked for until there is none."""
        if rows:
            found = self._results[index]
            self._results[index] = rows if found is None else [*found, *rows]
        if response.has_more_pages:
            response.start_fetching_next_page()
            return
        self._finish()

    def fail(self, error: BaseException, index: int) -> None:
        """The error stands in the result's place."""
        self._results[index] = error
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._bridge.resolve(self._future, self._results)
