"""Streaming responses: sent in pieces until they end or the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final

from api.http.call import Call, Receive, Send
from api.http.connections import Shares, peer_of
from api.http.responses import Response
from counter.errors import OverloadedError
from counter.limits import SECOND

EVENT_STREAM: Final = b"text/event-stream"

Stream = Callable[[Send, Receive], Awaitable[None]]


class StreamResponse(Response):
    """A response whose body is sent by *stream*, which may read the request meanwhile."""

    stream: Stream
    ended: Callable[[], None]

    @classmethod
    def of(cls, content_type: bytes, stream: Stream, ended: Callable[[], None]) -> StreamResponse:
        """A stream with status 200. *ended* is called once at the end in any case."""
        made = cls(200, b"", content_type)
        made.stream, made.ended = stream, ended
        return made

    def with_headers(self, *more: tuple[bytes, bytes]) -> StreamResponse:
        """See :meth:`api.http.responses.Response.with_headers`."""
        made = self._replace(headers=(*self.headers, *more))
        made.stream, made.ended = self.stream, self.ended
        return made

    async def send(self, send: Send, receive: Receive, *, only_head: bool = False) -> None:
        """Send it over ASGI until it ends or the client disconnects."""
        head = [(b"content-type", self.content_type), *self.headers]
        try:
            await send({"type": "http.response.start", "status": self.status, "headers": head})
            if not only_head:
                await self.stream(send, receive)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended()


def stream_of(pieces: Callable[[], AsyncGenerator[bytes, None]]) -> Stream:
    """Return a stream of *pieces* to a client that only listens."""

    async def send_pieces(send: Send) -> None:
        async with aclosing(pieces()) as each:
            async for piece in each:
                await send({"type": "http.response.body", "body": piece, "more_body": True})

    return lambda send, receive: _while_heard(send_pieces(send), receive)


async def _while_heard(sending: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run *sending* until it is done, or the client disconnects or closes its sending side."""
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
    """Wait until the client disconnects or closes its sending side."""
    while (await receive()).get("more_body"):
        continue
    # After the whole request only its end can come.
    await receive()


class Streams:
    """Limits the open streams of a process: of all clients, of each API key, and of each client
    address (0: without a limit)."""

    def __init__(self, what: str, instead: str, most: int, per_key: int, per_address: int) -> None:
        """*what* names the stream kind; *instead* is advice when the limit is reached."""
        self._what = what
        self._instead = instead
        self.open = 0
        #: Whether the process is shutting down, and no stream may begin.
        self.is_closed = False
        self.most = most
        self.by_key = Shares(per_key)
        self.by_address = Shares(per_address)

    def count(self, call: Call) -> Callable[[], None]:
        """Count a stream for the key and the address of *call*; return a function that ends the
        count. Raises OverloadedError."""
        if self.is_closed:
            raise OverloadedError("this process is shutting down", retry_after_us=SECOND)
        if self.open >= self.most:
            raise self._refusal("this process", self.most)
        address = peer_of(call.client)
        key = call.caller.key if call.caller is not None else None
        holders = [(self.by_key, key.id, f"the key {key.id}")] if key is not None else []
        if address:
            holders.append((self.by_address, address, address))
        taken: list[tuple[Shares, str]] = []

        def give_back() -> None:
            for shares, holder in taken:
                shares.release(holder)

        def end() -> None:
            self.open -= 1
            give_back()

        for shares, holder, name in holders:
            if not shares.acquire(holder):
                give_back()
                raise self._refusal(name, shares.most)
            taken.append((shares, holder))
        self.open += 1
        return end

    def _refusal(self, whose: str, most: int) -> OverloadedError:
        return OverloadedError(
            f"{whose} has {most} {self._what} of this process already, the most that it may have;"
            f" {self._instead}, or close a stream",
            retry_after_us=SECOND,
        )
