"""Hedges for threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from counter.client.calls import Request
from counter.client.failures import ClosedError, UnreachableError
from counter.client.retrying import Answer, Send
from counter.client.transport import AsyncTransport

T = TypeVar("T")


class HedgingTransport:
    """An event loop of its own sends, because only there a loser can be cancelled."""

    def __init__(self, make: Callable[[], AsyncTransport]) -> None:
        self._make = make
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        #: Between whoever gives work to the loop and whoever ends it.
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="counter-hedges", daemon=True
        )
        self._thread.start()
        made = asyncio.run_coroutine_threadsafe(self._made(), self._loop)
        self._transport = made.result()

    async def _made(self) -> AsyncTransport:
        return self._make()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of *work* in the loop. Raises CancelledError where that ends meanwhile."""
        with self._lock:
            if self._transport.closed:
                work.close()
                self._transport.check_open()
            doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        return doing.result()

    async def _ended(self) -> None:
        """Whoever waits for something of the loop waits no longer."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._transport.close()

    def check_open(self) -> None:
        """Raise ClosedError after the end."""
        self._transport.check_open()

    def send(self, send: Send) -> Answer:
        """The answer to an attempt, hedged."""
        try:
            return self._run(self._here().send(send))
        except CancelledError as error:
            ended = UnreachableError("the client was closed before there was an answer")
            ended.__cause__ = error
            return ended

    def lines(self, request: Request, number: int) -> Iterator[str]:
        """As of :class:`SyncTransport`."""
        lines = self._here().lines(request, number)

        async def following() -> str | None:
            return await anext(lines, None)

        try:
            while (line := self._run(following())) is not None:
                yield line
        except CancelledError:
            self.check_open()
        finally:
            with suppress(ClosedError, CancelledError):
                self._run(lines.aclose())

    def _here(self) -> AsyncTransport:
        """That of this process. Raises ClosedError."""
        self.check_open()
        if os.getpid() != self._pid:
            # The thread of the loop is not in the child.
            self._start()
        return self._transport

    def close(self) -> None:
        """End the connections and the loop."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._transport.closed:
                return
            self._transport.closed = True
            ending = asyncio.run_coroutine_threadsafe(self._ended(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
