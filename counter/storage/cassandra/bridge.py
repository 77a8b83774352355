"""From the driver's thread to the event loop, many results at a crossing.

The driver calls back on its own reactor thread, once per statement. Waking the event loop costs
more than the callback itself, so statements that were sent together come back together, and
whatever is done when the loop wakes is taken along.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from cassandra.cluster import ResponseFuture

#: Sends a statement, from the page that the paging state names.
Send = Callable[[Any, bytes | None], ResponseFuture]

_DONE: Final = -1


class Bridge:
    """Calls functions in one event loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._woken = False

    def call(self, function: Callable[[Any], None], result: Any) -> None:
        """Have *function* called with *result* in the loop. Call from any thread."""
        self._calls.append((function, result))
        # Appended first, then looked: either the drain under way takes it, or a new one will.
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                # The loop is closed: nobody waits any more.
                self._calls.clear()

    def _drain(self) -> None:
        self._woken = False
        while self._calls:
            function, result = self._calls.popleft()
            function(result)


class Gathering:
    """The results of statements that are sent together, each with all its pages; *done* gets them
    in the event loop.

    A statement can be answered more than once: by the node that was asked first and by the one
    that was asked when the first was slow, or by a node when its time was already over. The first
    answer to each page counts.
    """

    def __init__(
        self,
        bridge: Bridge,
        done: Callable[[list[Any]], None],
        statements: Sequence[Any],
        send: Send,
    ) -> None:
        self._bridge = bridge
        self._done = done
        self._statements = statements
        self._send = send
        self._results: list[Any] = [None] * len(statements)
        self._pages = [0] * len(statements)
        self._left = len(statements)
        # The reactor, the driver's timers and the sender itself may answer at once.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Send all of them. Never raises: an error stands in its result's place."""
        for index in range(len(self._statements)):
            self._ask(index, 0, None)

    def _ask(self, index: int, page: int, paging_state: bytes | None) -> None:
        try:
            response = self._send(self._statements[index], paging_state)
        except Exception as error:
            self._fail(error, index, page)
            return
        response.add_callbacks(
            self._succeed,
            self._fail,
            callback_args=(index, page, response),
            errback_args=(index, page, response),
        )

    def _succeed(
        self, rows: Sequence[Any] | None, index: int, page: int, response: ResponseFuture
    ) -> None:
        # Each page is asked for anew. The response would ask for the next one itself, but then a
        # late answer to this page would pass for an answer to that one.
        paging_state = response._paging_state
        let_go(response)
        with self._lock:
            if self._pages[index] != page:
                return
            self._pages[index] = page + 1 if paging_state else _DONE
            if rows:
                found = self._results[index]
                self._results[index] = rows if found is None else [*found, *rows]
            if not paging_state:
                self._left -= 1
            is_last = not self._left
        if paging_state:
            self._ask(index, page + 1, paging_state)
        elif is_last:
            self._bridge.call(self._done, self._results)

    def _fail(
        self, error: BaseException, index: int, page: int, response: ResponseFuture | None = None
    ) -> None:
        if response is not None:
            let_go(response)
        with self._lock:
            if self._pages[index] != page:
                return
            self._pages[index] = _DONE
            self._results[index] = error
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._bridge.call(self._done, self._results)


def let_go(response: ResponseFuture) -> None:
    """Have a *response* that was answered hold nothing that holds it: its timer calls it, and its
    callbacks may know it. Else nobody but the garbage collector would ever free it, and all that
    it holds: at thousands of statements a second that is a good part of all work."""
    timer, response._timer = response._timer, None
    if timer is not None:
        # It stays in the driver's queue until its time, and does nothing there.
        timer.callback = _nothing
    response._callbacks.clear()
    response._errbacks.clear()


def _nothing() -> None:
    pass
