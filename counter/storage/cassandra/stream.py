"""Single writes, many at once, each with an end of its own.

``Connection.run`` brings back together what was sent together. Here a statement that is slow
holds up nobody else's, and yet most of them cross from the driver's thread in company: what ended
by the time that the event loop looks is taken along.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from counter.storage.cassandra.bridge import let_go
from counter.storage.cassandra.failures import translated
from counter.tallies import Calls

#: Statements on their way at once; the others wait, and may become fewer by gathering.
IN_FLIGHT_MAX: Final = 1_024

#: Begins to send a statement, which may take so many microseconds; gives the driver's response.
Send = Callable[[Any, int | None], Any]
#: Is told None when a write is done, else what became of it.
Done = Callable[[BaseException | None], None]


class _Sent:
    """A write on its way. It may be answered twice: by two nodes, or when its time was over."""

    __slots__ = ("began_s", "done", "ended", "response")

    def __init__(self, done: Done) -> None:
        self.began_s = time.perf_counter()
        self.done = done
        self.ended = False
        self.response: Any = None


class Stream:
    """Sends statements, and tells the end of each in the event loop that sent it."""

    def __init__(self, send: Send, calls: Calls | None = None) -> None:
        """*calls* counts what was sent, and what of it failed."""
        self._send = send
        self._calls = calls or Calls()
        self._waiting: deque[tuple[Any, int | None, Done]] = deque()
        self._ended: deque[tuple[_Sent, BaseException | None]] = deque()
        self._in_flight = 0
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Set when nothing is under way, where somebody waits for that.
        self._all_ended: asyncio.Event | None = None

    def send(self, statement: Any, timeout_us: int | None, done: Done) -> None:
        """Send *statement* as soon as there is room. *done* is called once, and never at once."""
        self._loop = self._loop or asyncio.get_running_loop()
        self._waiting.append((statement, timeout_us, done))
        self._send_waiting()

    @property
    def waiting(self) -> int:
        """How many statements wait for room."""
        return len(self._waiting)

    async def wait_until_ended(self) -> None:
        """Wait until all that was sent has ended, and its end was told."""
        while self._waiting or self._in_flight:
            self._all_ended = self._all_ended or asyncio.Event()
            await self._all_ended.wait()

    def _send_waiting(self) -> None:
        while self._waiting and self._in_flight < IN_FLIGHT_MAX:
            statement, timeout_us, done = self._waiting.popleft()
            self._in_flight += 1
            sent = _Sent(done)
            try:
                response = self._send(statement, timeout_us)
            except Exception as error:
                self._note(error, sent)
                continue
            sent.response = response
            response.add_callbacks(
                self._succeed, self._note, callback_args=(sent,), errback_args=(sent,)
            )

    # Called by the driver's threads, or within a send.

    def _succeed(self, _rows: object, sent: _Sent) -> None:
        self._note(None, sent)

    def _note(self, error: BaseException | None, sent: _Sent) -> None:
        response, sent.response = sent.response, None
        if response is not None:
            let_go(response)
        self._ended.append((sent, error))
        # Appended first, then looked: either the drain under way takes it, or a new one will.
        if not self._woken and self._loop is not None:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                # The loop is closed: nobody waits any more.
                self._ended.clear()

    # In the event loop again.

    def _drain(self) -> None:
        self._woken = False
        now_s = time.perf_counter()
        while self._ended:
            sent, error = self._ended.popleft()
            if not sent.ended:
                sent.ended = True
                self._in_flight -= 1
                self._calls.ended(now_s - sent.began_s, error is not None)
                sent.done(None if error is None else translated(error))
        self._send_waiting()
        if self._all_ended is not None and not self._in_flight:
            self._all_ended.set()
            self._all_ended = None
