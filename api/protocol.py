"""uvicorn's HTTP protocol with one more rule: a request must arrive whole within a time.

Header or body, slow or half-sent: past the limit the client gets 408 and the connection is closed.
One look over the connections a second costs nothing per request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.problems import problem_bytes
from counter.errors import (
    BadRequestError,
    CounterError,
    HeadTooLargeError,
    RequestTimeoutError,
)
from counter.limits import HEAD_BYTES_MAX, SECOND

_LOOK_EVERY_S = 1.0
_HEAD_START = b"HTTP/1.1 "
_CONTINUE_START = b"HTTP/1.1 100"


class WholeReplies:
    """A transport that sends the head of a reply together with the start of its body.

    uvicorn writes them apart, and the event loop makes a system call of each write.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Hold back the head of a reply; send anything else, after what is held back."""
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head + data)
        elif data.startswith(_HEAD_START) and not data.startswith(_CONTINUE_START):
            self._head = data
        else:
            self._transport.write(data)

    def write_whole(self, data: bytes) -> None:
        """Send a whole reply, head and body."""
        self._transport.write(data)

    def flush(self) -> None:
        """Send what is held back: the reply to a HEAD has no body that would take it along."""
        if self._head is not None:
            self.write(b"")

    def close(self) -> None:
        """Close when all is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PatientFlow(FlowControl):
    """Flow control that lets nothing more be read while whole requests wait for their turn.

    uvicorn reads on after each answer: of a client that sends faster than it is answered, all that
    it sends would be kept.
    """

    def __init__(self, transport: Any, waiting: Collection[object]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        """Read on, unless requests wait: the last of them reads on when it has its turn."""
        if not self._waiting:
            super().resume_reading()


class TimedProtocol(HttpToolsProtocol):
    """An HTTP connection that knows since when it waits for the rest of a request."""

    request_timeout_us: ClassVar[int] = 10 * SECOND
    waiting_since_s: float | None = None
    in_head: bool = False
    head_bytes: int = 0
    #: Since when a kept connection waits for its next request, where uvicorn has no timer for it.
    idle_since_s: float | None = None

    def connection_made(self, transport: Any) -> None:
        self.waiting_since_s = time.monotonic()
        super().connection_made(WholeReplies(transport))  # type: ignore[arg-type]
        self.flow = PatientFlow(self.transport, self.pipeline)

    def data_received(self, data: bytes) -> None:
        self.idle_since_s = None
        if self.waiting_since_s is None and (self.cycle is None or self.cycle.response_complete):
            # uvicorn's keep-alive timer ends with any byte, and a stray CRLF begins no message.
            self.waiting_since_s = time.monotonic()
        cycle = self.cycle
        in_body = cycle is not None and cycle.more_body
        self.head_bytes += len(data)
        super().data_received(data)
        if self.in_head:
            if self.cycle is cycle and not in_body:
                # All of it is of this head: nothing else was under way, or ended in it.
                self.head_bytes = max(self.head_bytes, len(data))
            if self.head_bytes > HEAD_BYTES_MAX:
                self._refuse(
                    HeadTooLargeError(
                        f"the head of the request has at least {self.head_bytes} bytes;"
                        f" at most {HEAD_BYTES_MAX} are allowed"
                    )
                )

    def on_message_begin(self) -> None:
        self.waiting_since_s = time.monotonic()
        self.in_head, self.head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.in_head = False
        if self.parser.should_upgrade() and any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self.headers
        ):
            # The parser takes what follows an Upgrade for the next request: refused as no HTTP.
            raise ValueError("an upgrade with a body")
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def on_message_complete(self) -> None:
        self.waiting_since_s = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with a problem, as everything else."""
        self.waiting_since_s = None
        self._refuse(BadRequestError(f"{msg} Send HTTP/1.1."))

    def time_out(self) -> None:
        """Answer 408 and close. A handler that waits for the body learns that nobody is there."""
        self.waiting_since_s = None
        seconds = self.request_timeout_us / SECOND
        self._refuse(RequestTimeoutError(f"the request did not arrive whole within {seconds:g} s"))

    def _refuse(self, error: CounterError) -> None:
        body = problem_bytes(error)
        cycle = self.cycle
        # A whole request of this connection that waits for its own answer: this one is not it.
        # Where requests wait for their turn, one before them is under way.
        answering = bool(self.pipeline) or (
            cycle is not None and not cycle.more_body and not cycle.response_complete
        )
        if not answering:
            phrase = HTTPStatus(error.status).phrase.encode()
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/problem+json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n%s"
                % (error.status, phrase, len(body), body)
            )
        self.transport.close()


def timed_protocol(request_timeout_us: int) -> type[TimedProtocol]:
    """A protocol class with its limit; uvicorn takes a class and makes the instances."""
    return type("BoundedProtocol", (TimedProtocol,), {"request_timeout_us": request_timeout_us})


async def cut_slow_clients(connections: set[Any], request_timeout_us: int) -> None:
    """Look over *connections* once a second, for ever, and time out those that wait too long."""
    limit_s = request_timeout_us / SECOND
    while True:
        await asyncio.sleep(min(_LOOK_EVERY_S, limit_s / 2))
        now_s = time.monotonic()
        for each in list(connections):
            since_s = each.waiting_since_s
            if since_s is not None and now_s - since_s > limit_s:
                each.time_out()
            idle_s = each.idle_since_s
            if idle_s is not None and now_s - idle_s > each.timeout_keep_alive:
                each.timeout_keep_alive_handler()
