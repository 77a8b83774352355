"""One request and its response, over ASGI."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Final, Protocol

from api.http.call import NO_CONTENT, NOT_MODIFIED, App, AsgiScope, Message
from counter.errors import CounterError

#: Reading pauses at this number of bytes of a body that its handler has not read.
BODY_BYTES_WAITING_MAX: Final = 65_536
#: The first line of a response, by its status.
STATUS_LINES: Final[Mapping[int, bytes]] = {
    each.value: b"HTTP/1.1 %d %s\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus
}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
#: A value with one of these would be a line of its own, or end the head.
_FORBIDDEN: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
#: What a client gets whose request ended without a response.
UNANSWERED: Final = CounterError("internal error; see the server log")
_log = logging.getLogger("counter.api")


class Exchange(Protocol):
    """A request and its response, as their connection knows them."""

    #: Whether the connection may have another request.
    keep_alive: bool
    #: Whether the client sends the body after 100 Continue, and whether that was sent.
    expects_continue: bool
    was_continued: bool
    #: What has arrived of the request's body, and was not read.
    unread: bytes | bytearray
    more_body: bool
    response_started: bool
    response_complete: bool

    def disconnect(self) -> None:
        """Note that the client is gone, unless it has its response."""
        ...


class ExchangeConnection(Protocol):
    """What an exchange needs of its connection."""

    #: Set while the client reads its responses.
    writable: asyncio.Event

    def write(self, data: bytes) -> None:
        """Send *data*, unless the connection is closing."""
        ...

    def resume_reading(self) -> None:
        """Read more of the request."""
        ...

    def end_response(self, exchange: Exchange) -> None:
        """Continue with the next request after the response of *exchange*, or close."""
        ...

    def end_unanswered(self, exchange: Exchange) -> None:
        """Close the connection after *exchange*, which has no response or a part of one."""
        ...


class AsgiExchange:
    """A request for an ASGI application. :meth:`receive` and :meth:`send` are ASGI's.

    The head of a response is sent together with the start of its body: each write is a system call.
    """

    __slots__ = (
        "_bytes_left",
        "_connection",
        "_head",
        "_is_chunked",
        "changed",
        "expects_continue",
        "is_disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "unread",
        "was_continued",
    )

    def __init__(
        self,
        connection: ExchangeConnection,
        scope: AsgiScope,
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self._connection = connection
        self.scope = scope
        self.keep_alive = keep_alive
        self.expects_continue = expects_continue
        self.was_continued = False
        self.unread: bytes | bytearray = bytearray()
        self.more_body = True
        self.is_disconnected = False
        self.response_started = False
        self.response_complete = False
        self._head = b""
        self._is_chunked = False
        #: Bytes of the body that are to be sent; None if its length was not announced.
        self._bytes_left: int | None = None
        #: Set when :meth:`receive` has something to return.
        self.changed = asyncio.Event()

    def disconnect(self) -> None:
        """See :class:`Exchange`."""
        self.is_disconnected = not self.response_complete
        self.changed.set()

    async def run(self, app: App) -> None:
        """Have *app* answer the request."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            _log.exception("a request failed unexpectedly")
        finally:
            # Also after a cancellation, when the time to drain is over.
            if not (self.response_complete or self.is_disconnected):
                self._connection.end_unanswered(self)

    async def receive(self) -> Message:
        """Return the next part of the request's body, or that the client is gone."""
        if self.expects_continue and not (self.was_continued or self.response_started):
            self.was_continued = True
            self._connection.write(_CONTINUE)
        if not (self.is_disconnected or self.response_complete):
            self._connection.resume_reading()
            await self.changed.wait()
            self.changed.clear()
        if self.is_disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.unread = bytes(self.unread), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send the head of the response, or a part of its body, when the client reads."""
        await self._connection.writable.wait()
        if self.is_disconnected:
            return
        if not self.response_started:
            self.response_started = True
            self._head = self._head_of(message["status"], message["headers"])
        else:
            self._send_body(message.get("body", b""), message.get("more_body", False))

    def _head_of(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines = [STATUS_LINES[status]]
        for name, value in headers:
            if _FORBIDDEN.search(value):
                raise ValueError(f"the header {name!r} of a response has a control character")
            if name == b"content-length":
                self._bytes_left = int(value)
            lines += (name, b": ", value, b"\r\n")
        if self._has_no_body or status in (NO_CONTENT, NOT_MODIFIED):
            self._bytes_left = 0
        elif self._bytes_left is None and self.scope["http_version"] == "1.1":
            # A client of HTTP/1.0 knows no chunks: the connection ends with the body (RFC 9112,
            # 6.3).
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    @property
    def _has_no_body(self) -> bool:
        return bool(self.scope["method"] == "HEAD")

    def _send_body(self, body: bytes, more_body: bool) -> None:
        if self._has_no_body:
            body = b""
        if self._bytes_left is not None:
            self._bytes_left -= len(body)
            if self._bytes_left < 0 or (self._bytes_left and not more_body):
                raise ValueError("the body of a response has not the announced length")
        if self._is_chunked:
            body = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            body += b"" if more_body else _LAST_CHUNK
        self._connection.write(self._head + body)
        self._head = b""
        if not more_body:
            self.response_complete = True
            self.changed.set()
            self._connection.end_response(self)
