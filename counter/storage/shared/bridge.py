"""Pass calls and results between threads and an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Bridge:
    """Calls functions in one event loop, from any thread.

    Calls that come before the loop has woken up share one wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have *function* called with *arguments* in the loop."""
        self._calls.append((function, arguments))
        # After the append: either the drain under way takes the call, or a new one will.
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                # The loop is closed: no task waits any more.
                self._calls.clear()

    def _drain(self) -> None:
        self._woken = False
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)


class Worker(Generic[T, R]):
    """A thread that does *work* on each item that is sent, in order, and hands the item and what
    *work* returned or raised to *done* in the event loop."""

    def __init__(
        self, name: str, work: Callable[[T], R], done: Callable[[T, R | BaseException], None]
    ) -> None:
        self._work = work
        self._done = done
        #: None ends the thread.
        self._sent: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it has not started. Call this in the event loop."""
        if self._thread is None:
            bridge = Bridge(asyncio.get_running_loop())
            # A daemon, because a call that hangs must not keep the process from exiting.
            thread = threading.Thread(
                target=self._run, args=(bridge,), name=self._name, daemon=True
            )
            thread.start()
            self._thread = thread

    def send(self, item: T) -> None:
        """Have *work* done on *item* after all that was sent before."""
        self._sent.put((item,))

    def stop(self) -> None:
        """End the thread when it has done all work that was sent."""
        self._sent.put(None)

    async def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, bridge: Bridge) -> None:
        while (sent := self._sent.get()) is not None:
            result: R | BaseException
            try:
                result = self._work(*sent)
            except BaseException as error:
                result = error
            bridge.call(self._done, *sent, result)
