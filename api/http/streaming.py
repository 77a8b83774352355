"""Streaming answers: sent in pieces until they end or the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final

from api.http.call import Receive, Reply, Send

EVENT_STREAM: Final = b"text/event-stream"


class StreamReply(Reply):
    """An answer whose body is an iterator of *pieces*."""

    pieces: Callable[[], AsyncGenerator[bytes, None]]
    ended: Callable[[], None]

    @classmethod
    def of(
        cls, pieces: Callable[[], AsyncGenerator[bytes, None]], ended: Callable[[], None]
    ) -> StreamReply:
        """A stream of server-sent events. *ended* is called once at the end in any case."""
        made = cls(200, b"", EVENT_STREAM)
        made.pieces, made.ended = pieces, ended
        return made

    async def serve(self, send: Send, receive: Receive, *, only_head: bool) -> None:
        """Send it over ASGI until it ends or the client disconnects."""
        head = [(b"content-type", self.content_type), *self.headers]
        try:
            await send({"type": "http.response.start", "status": self.status, "headers": head})
            if not only_head:
                await _while_heard(self._send_pieces(send), receive)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended()

    async def _send_pieces(self, send: Send) -> None:
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _while_heard(sending: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run *sending* until it is done or the client disconnects."""
    tasks = asyncio.ensure_future(sending), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in tasks:
            each.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    for failure in found:
        if isinstance(failure, Exception):
            raise failure


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue
