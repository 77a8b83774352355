"""Hedges for threads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from counter.client.calls import Request
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="counter-hedges", daemon=True
        )
        self._thread.start()
        self._transport = self._run(self._made())

    async def _made(self) -> AsyncTransport:
        return self._make()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def check_open(self) -> None:
        """Raise ClosedError after the end."""
        self._transport.check_open()

    def send(self, send: Send) -> Answer:
        """The answer to an attempt, hedged."""
        self.check_open()
        if os.getpid() != self._pid:
            # The thread of the loop is not in the child.
            self._start()
        return self._run(self._transport.send(send))

    def lines(self, request: Request, number: int) -> Iterator[str]:
        """As of :class:`SyncTransport`."""
        self.check_open()
        lines = self._transport.lines(request, number)

        async def following() -> str | None:
            return await anext(lines, None)

        try:
            while (line := self._run(following())) is not None:
                yield line
        finally:
            self._run(lines.aclose())

    def close(self) -> None:
        """End the connections and the loop."""
        if os.getpid() != self._pid or self._transport.closed:
            return
        self._run(self._transport.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
