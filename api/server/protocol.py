"""uvicorn's HTTP protocol with bounds on the number of connections and on slow clients.

If a request, header or body, does not arrive completely within a time limit, the client gets 408
and the connection is closed. A client that reads none of its responses for as long is disconnected.
All connections are checked once a second, which costs nothing per request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar

from httptools import (
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
)
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.http.connections import FULL, LATE, MALFORMED, UNTAKEN, Connections, peer_of
from api.http.problems import problem_bytes, retry_after_s
from api.http.response_headers import COMMON_HEADERS, RequestIds
from counter.background import every
from counter.errors import (
    BadRequestError,
    CounterError,
    HeadTooLargeError,
    OverloadedError,
    RequestTimeoutError,
    TransferCodingError,
    UriTooLongError,
)
from counter.limits import (
    CONNECTIONS_MAX,
    CONNECTIONS_SPARE,
    FIRST_REQUEST_US,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    SECOND,
    SPARE_REQUEST_US,
    URL_BYTES_MAX,
)

_CHECK_EVERY_S = 1.0
#: A client that reads so much of its responses within the time limit is slow, but not gone.
_TAKEN_BYTES_MIN = 64 * 1024
_CLOSE_NOTIFY_S = 0.5
_REASONS: Mapping[type[CounterError], str] = {OverloadedError: FULL, RequestTimeoutError: LATE}
#: Bytes parsed before the number of pending requests is checked.
_SLICE_BYTES = 8_192
#: Segments up to this size are parsed at once; larger ones take turns with other connections.
_SMALL_BYTES = 2_048
#: Estimated memory overhead of a header, and of a pending request.
_HEADER_BYTES = 128
_REQUEST_BYTES = 2_048
_HEAD_START = b"HTTP/1.1 "
#: The only paths answered on a spare connection.
_HEALTH_CHECKS = frozenset({b"/healthz", b"/readyz"})
_CONTINUE_START = b"HTTP/1.1 100"
_NOT_A_URL = (
    "the path or the query has a byte that a URL cannot have; percent-encode names as UTF-8: é is"
    " %C3%A9"
)
_NO_VERSION = (
    "HTTP/1.1 must follow the path and the query; if a name in them has a space, percent-encode it"
    " as %20"
)
#: Characters of a name or an address, and of a port (RFC 3986, 3.2).
is_host = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII).fullmatch
_log = logging.getLogger("counter.api")


class WholeReplies:
    """A transport that sends the head of a response together with the start of its body.

    uvicorn writes them separately, and each write is a system call.
    """

    __slots__ = ("_head", "_transport", "has_continued")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        #: Whether 100 Continue was sent for the latest request.
        self.has_continued = False
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Hold back the head of a response; send anything else after it."""
        if self._transport.is_closing():
            # uvicorn notifies only one of several pending requests that the client is gone.
            self._head = None
        elif self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head + data)
        elif data.startswith(_CONTINUE_START):
            self.has_continued = True
            self._transport.write(data)
        elif data.startswith(_HEAD_START):
            self._head = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send a held-back head: the response to a HEAD has no body."""
        if self._head is not None:
            self.write(b"")

    def close(self) -> None:
        """Close after everything is sent."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class PatientFlow(FlowControl):
    """Flow control that pauses reading while complete requests are pending.

    uvicorn resumes reading after each response, so it would buffer everything from a client that
    sends faster than it is answered.
    """

    def __init__(
        self, transport: Any, waiting: Collection[object], has_more: Callable[[], bool]
    ) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._has_more = has_more

    def forget(self) -> None:
        """Drop the reference to the connection."""
        self._has_more = bool

    def resume_reading(self) -> None:
        """Resume reading unless requests are pending; the last of them resumes it. Buffered bytes
        are parsed first."""
        if not self._waiting and not self._has_more():
            super().resume_reading()


class TimedProtocol(HttpToolsProtocol):
    """An HTTP connection with limits on time and memory."""

    flow: PatientFlow
    #: Makes ids for answers without a parsed request.
    ids: ClassVar[RequestIds]
    request_timeout_us: ClassVar[int] = 10 * SECOND
    connections_max: ClassVar[int] = CONNECTIONS_MAX
    #: State shared by all connections of the process.
    shared: ClassVar[Connections]
    #: Whether the process is shutting down; then each response is its connection's last.
    draining: ClassVar[bool] = False
    waiting_since_s: float | None = None
    #: Received but not parsed, because requests are pending or other connections have their turn.
    _unread: bytes = b""
    _is_queued: bool = False
    #: This connection's part of the shared limit on unfinished requests.
    _held_bytes: int = 0
    #: The latest request started over ASGI; others may be pending behind it.
    _running: Any = None
    #: Since when the client does not read, and the buffer size at that time.
    untaken: tuple[float, int] | None = None
    #: Whether it is above the connection limit; then only health checks are answered.
    is_spare: bool = False
    #: Whether reading has stopped: complete requests are answered, then it is closed.
    is_deaf: bool = False
    _is_silent: bool = False
    #: The client address whose limit it counts towards.
    _peer: str | None = None
    #: Why the current request is rejected, if not for its syntax.
    refusal: CounterError | None = None
    #: Bytes of the head or trailers, counted from the slice in which the message or its latest body
    #: part began. ``_first_bytes`` is that slice, which may also have bytes of what came before.
    head_bytes: int = 0
    _first_bytes: int = 0
    #: The size of the slice being parsed.
    _slice_bytes: int = 0
    #: The head of a request that asks for another protocol, without the header that does.
    _plain: bytes = b""

    def connection_made(self, transport: Any) -> None:
        self.waiting_since_s = time.monotonic()
        super().connection_made(WholeReplies(transport))  # type: ignore[arg-type]
        self.flow = PatientFlow(self.transport, self.pipeline, self._has_more)
        shared, peer = self.shared, peer_of(self.client)
        # A TLS connection was counted before the handshake.
        if self.scheme == "http" and not shared.peers.take(peer):
            self._refuse(
                OverloadedError(
                    f"{peer} already has {shared.peers.most} connections, the most that one address"
                    " may have (connections_per_address); close some",
                    retry_after_us=SECOND,
                )
            )
            return
        self._peer = peer
        if len(self.connections) > self.connections_max and not shared.make_room():
            if len(self.connections) > self.connections_max + CONNECTIONS_SPARE:
                self._refuse(self._full())
                return
            self.is_spare = True
            self.loop.call_later(SPARE_REQUEST_US / SECOND, self._end_spare)
        self._is_silent = True
        shared.silent[self] = self.transport

    def _end_spare(self) -> None:
        """Reject a spare connection that has sent no health check."""
        if self.cycle is None and not self.transport.is_closing():
            self._refuse(self._full())

    def _full(self) -> OverloadedError:
        return OverloadedError(
            f"this process already has {self.connections_max} connections; close some, or try"
            " another server",
            retry_after_us=SECOND,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self.pipeline:
            # uvicorn notifies only the latest request. The running one before it, such as a live
            # stream, would not learn for minutes that its client is gone.
            self.cycle = self._running
        super().connection_lost(exc)
        self.pipeline.clear()
        self._unread = b""
        self.waiting_since_s = None
        self._hold()
        self.shared.silent.pop(self, None)
        if self._peer is not None:
            self.shared.peers.give_back(self._peer)
            self._peer = None
        # Break reference cycles, or the memory would wait for the garbage collector.
        self.flow.forget()
        self.cycle = self._running = None  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] != "1.1":
            app = _without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        if self._is_silent:
            self._is_silent = False
            self.shared.silent.pop(self, None)
        if self._unread:
            self._unread += data
            self._hold()
        elif len(data) <= _SMALL_BYTES:
            self._read(data)
            if self.waiting_since_s is not None or self._held_bytes:
                self._hold()
        else:
            self._unread = data
            self._read_in_turn()
            if self._unread:
                self.flow.pause_reading()
                self._hold()

    def _read_in_turn(self) -> None:
        """Enqueue the connection to parse its buffered bytes."""
        if not self._is_queued:
            self._is_queued = True
            self.shared.queue.read(self)

    def read_until(self, end_s: float) -> bool:
        """Parse buffered bytes in slices until requests are pending or *end_s*.

        A parsed request takes about 40 times the memory of its bytes. Return whether there is more
        to parse."""
        unread, start = self._unread, 0
        while start < len(unread) and not (
            self.pipeline or self.is_deaf or self.transport.is_closing()
        ):
            if start and time.monotonic() >= end_s:
                break
            self._read(unread[start : start + _SLICE_BYTES])
            start += _SLICE_BYTES
        if self.is_deaf or self.transport.is_closing():
            # Discard the rest.
            start = len(unread)
        self._unread = unread[start:]
        self._is_queued = bool(self._unread) and not self.pipeline
        if not (self._unread or self.is_deaf or self.transport.is_closing()):
            self.flow.resume_reading()
        self._hold()
        return self._is_queued

    def _has_more(self) -> bool:
        """Whether buffered bytes are left to parse; if so, schedule it."""
        if self.is_deaf:
            return True
        if self._unread:
            # Not at once: the parser may be running.
            self.loop.call_soon(self._read_in_turn)
        elif self._held_bytes:
            self._hold()
        return bool(self._unread) or self._has_body()

    def _has_body(self) -> bool:
        """Whether enough of a body waits for its handler, which asks for more when it has that."""
        cycle = self.cycle
        return (
            cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT
        )

    def _read(self, data: bytes) -> None:
        if self.waiting_since_s is None and (self.cycle is None or self.cycle.response_complete):
            # Any byte stops uvicorn's keep-alive timer, but a stray CRLF starts no message.
            self.waiting_since_s = time.monotonic()
        self._slice_bytes = len(data)
        self.head_bytes += len(data)
        self._parse(data)
        size = self.head_bytes - self._first_bytes
        if size > HEAD_BYTES_MAX and self.waiting_since_s is not None:
            self._refuse(_too_large(size))

    def _parse(self, data: bytes) -> None:
        """Parse *data* as HTTP/1.1, even after a header Upgrade, which a server may ignore (RFC
        9110, 7.8).

        At the end of such a head the parser stops. A new one gets the head again, without that
        header, and then what follows the head.
        """
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except HttpParserUpgrade as upgrade:
                    since_s = self.waiting_since_s
                    self.parser = HttpRequestParser(self)
                    # As in uvicorn.
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    self.parser.feed_data(self._plain)
                    if self.waiting_since_s is not None:
                        self.waiting_since_s = since_s
                    data = data[upgrade.args[0] :]
        except HttpParserError as error:
            text = "Invalid HTTP request received."
            if isinstance(error, HttpParserInvalidURLError):
                self.refusal = BadRequestError(_NOT_A_URL)
            elif str(error).startswith("Expected HTTP/"):
                self.refusal = BadRequestError(_NO_VERSION)
            self.logger.warning(text)
            self.send_400_response(text)

    def _plain_head(self) -> bytes:
        """Return the head of the request without Upgrade. Raises ValueError for CONNECT."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("a tunnel")
        version = self.parser.get_http_version().encode()
        headers = b"".join(b"%s: %s\r\n" % each for each in self.headers if each[0] != b"upgrade")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, headers)

    def _hold(self) -> None:
        """Update the shared count of memory held by unfinished requests."""
        held = len(self._unread) + _REQUEST_BYTES * len(self.pipeline)
        if self.waiting_since_s is not None:
            held += self.head_bytes + _HEADER_BYTES * len(self.headers or ()) + self._body_bytes()
        more = held - self._held_bytes
        try:
            if more > 0:
                self.shared.unfinished.take(more)
            else:
                self.shared.unfinished.give_back(-more)
        except OverloadedError as error:
            self._refuse(error)
        else:
            self._held_bytes = held

    def _body_bytes(self) -> int:
        """Return the bytes of an unfinished body that no handler has read."""
        return 0

    def on_message_begin(self) -> None:
        self.waiting_since_s = time.monotonic()
        self.head_bytes = self._first_bytes = self._slice_bytes
        # uvicorn's own preparation makes a scope: it is delayed until one is needed.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= HEADERS_MAX:
            self.refusal = HeadTooLargeError(
                f"the request has more than {HEADERS_MAX} headers; send {HEADERS_MAX} at most"
            )
            raise ValueError("too many headers")
        # As in uvicorn: calling it here would cost an add 5 % of its CPU.
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.is_spare or self.head_bytes > HEAD_BYTES_MAX:
            self._check_head()
        if self.parser.should_upgrade():
            self._plain = self._plain_head()
            return
        if len(self.url) > URL_BYTES_MAX:
            self.refusal = UriTooLongError(
                f"the path and query have {len(self.url)} bytes; at most {URL_BYTES_MAX} are"
                " allowed"
            )
            raise ValueError("a URL that is too long")
        hosts = []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self.refusal = TransferCodingError(
                    f"Transfer-Encoding is {value[:80].decode('latin-1')!r}; send chunked alone, or"
                    " a Content-Length"
                )
                raise ValueError("a transfer coding that is not supported")
        self._check_hosts(hosts)
        self.transport.has_continued = False  # type: ignore[attr-defined]
        before = self.cycle
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()
        if (self.draining or self.is_spare) and (before is None or before.response_complete):
            # Otherwise an earlier request is pending, whose response must not be the last.
            self.cycle.keep_alive = False

    def _check_hosts(self, hosts: Sequence[bytes]) -> None:
        """Reject a request with several Host headers, with a malformed one, or, of HTTP/1.1, with
        none (RFC 9112, 3.2)."""
        if not hosts and self.parser.get_http_version() != "1.1":
            return
        if len(hosts) != 1:
            self.refusal = BadRequestError(
                f"the request has {len(hosts)} Host headers; HTTP/1.1 needs exactly one"
            )
            raise ValueError("no Host, or several")
        if not is_host(hosts[0]):
            self.refusal = BadRequestError(
                f"Host is {hosts[0][:80].decode('latin-1')!r}; send a name or an address, and"
                " perhaps a port"
            )
            raise ValueError("a malformed Host")

    def _check_head(self) -> None:
        """Reject a head that is too large, and anything but a health check on a spare connection.

        The size is exact, because the head may start or end within a slice."""
        if self.is_spare and self.url not in _HEALTH_CHECKS:
            self.refusal = self._full()
            raise ValueError("too many connections")
        # "GET ", " HTTP/1.1" and two line ends; then ": " and a line end per header.
        size = 18 + len(self.url) + sum(4 + len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES_MAX:
            self.refusal = _too_large(size)
            raise ValueError("a head that is too large")

    def on_body(self, body: bytes) -> None:
        # After the body only trailers follow.
        self.head_bytes = self._first_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        transport: Any = self.transport
        transport.flush()
        is_last = self.is_deaf and not self.pipeline
        if self.expect_100_continue and self._running.more_body and not transport.has_continued:
            # No 100 Continue was sent: the next bytes may be a body or another request.
            is_last = True
        super().on_response_complete()
        if is_last:
            transport.close()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            # Only the head has been parsed, and comes again: see _parse().
            return
        self.waiting_since_s = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a problem document."""
        self._refuse(self.refusal or BadRequestError(f"{msg} Send HTTP/1.1."))

    def time_out_after(self, waited_s: float) -> None:
        """Answer 408 and close if the rest of a request takes too long. A handler that waits for
        the body sees a disconnect."""
        limit_us, why = self.request_timeout_us, ""
        if self.cycle is None and self.shared.is_nearly_full:
            limit_us = min(limit_us, FIRST_REQUEST_US)
            why = ", because the process is near its limit of connections"
        if waited_s <= limit_us / SECOND:
            return
        self._refuse(
            RequestTimeoutError(
                f"the request did not arrive whole within {limit_us / SECOND:g} s{why}"
            )
        )

    def resume_writing(self) -> None:
        # The client read its responses; the next check starts a new measurement.
        self.untaken = None
        super().resume_writing()

    @classmethod
    def drain(cls) -> None:
        """Make each further answer its connection's last, with ``connection: close``."""
        cls.draining = True

    def check(self, now_s: float) -> None:
        """End the connection if its client takes too long: called once a second."""
        if self.waiting_since_s is not None:
            if self._is_answering():
                # It is a stream, which limits its silence. When it ends, the rest is timed.
                self.waiting_since_s = now_s
            self.time_out_after(now_s - self.waiting_since_s)
        self.cut_if_untaken(now_s)

    def _is_answering(self) -> bool:
        """Whether the response to a request that is not complete has begun, and has not ended."""
        cycle = self.cycle
        return (
            isinstance(cycle, RequestResponseCycle)
            and cycle.more_body
            and cycle.response_started
            and not cycle.response_complete
        )

    def _owes_answer(self) -> bool:
        """Whether a complete request is not answered yet."""
        cycle = self.cycle
        return bool(self.pipeline) or (
            cycle is not None and not cycle.more_body and not cycle.response_complete
        )

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer the complete requests of a client that has closed its sending side, then close.

        TLS has no such state in asyncio."""
        if self.scheme == "https" or not self._owes_answer():
            return False
        self._stop_reading()
        # A live stream that waits for this ends, because its reader may as well be gone. One that
        # has not begun notices at its next comment whether it is.
        self.cycle.message_event.set()
        return True

    def timeout_keep_alive_handler(self) -> None:
        # The head of the next request may have come while a response was under way: it has its own
        # time.
        if self.waiting_since_s is None:
            super().timeout_keep_alive_handler()

    def cut_if_untaken(self, now_s: float) -> None:
        """Abort the connection if its client has read too little for too long.

        This also bounds a closing connection, which nothing else would end.
        """
        if not (self.flow.write_paused or self.transport.is_closing()):
            self.untaken = None
            return
        size = self.transport.get_write_buffer_size()
        if self.untaken is None or size <= self.untaken[1] - _TAKEN_BYTES_MIN:
            self.untaken = now_s, size
            return
        limit_s = self.request_timeout_us / SECOND
        if self.draining and not size:
            # Everything is sent. TLS waits for a close_notify, which a client with a connection
            # pool sends only when it uses the connection again.
            limit_s = min(limit_s, _CLOSE_NOTIFY_S)
        if now_s - self.untaken[0] > limit_s:
            if size:
                self.shared.end(UNTAKEN)
            self.transport.abort()

    def _refuse(self, error: CounterError) -> None:
        self.shared.end(_REASONS.get(type(error), MALFORMED))
        self.waiting_since_s = None
        body = problem_bytes(error)
        answering = self._owes_answer()
        if answering and isinstance(error, BadRequestError):
            # The client still gets the responses to its earlier requests.
            self._stop_reading()
            return
        # A second head would be a part of the stream that is being sent.
        if not (answering or self._is_answering()):
            phrase = HTTPStatus(error.status).phrase.encode()
            wait_s = retry_after_s(error)
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/problem+json\r\n%s"
                b"connection: close\r\ncontent-length: %d\r\n%s\r\n%s"
                % (
                    *(error.status, phrase),
                    b"" if wait_s is None else b"retry-after: %d\r\n" % wait_s,
                    *(len(body), COMMON_HEADERS % self.ids.new(), body),
                )
            )
        self.transport.close()

    def _stop_reading(self) -> None:
        """Stop reading, answer the complete requests, and close."""
        self.is_deaf = True
        self.flow.pause_reading()
        if not self.cycle.more_body:
            self.cycle.keep_alive = False
        elif self.pipeline:
            # It is the rejected one.
            self.pipeline.popleft()


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """Wrap *app* for a client of HTTP/1.0, which does not know chunks: a body of unknown length
    ends with the connection (RFC 9112, 6.1 and 6.3)."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def send_whole(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                # uvicorn checks that the body has the announced length.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_whole)

    return answer


def _too_large(size: int) -> HeadTooLargeError:
    return HeadTooLargeError(
        f"the head of the request has at least {size} bytes; at most {HEAD_BYTES_MAX} are allowed"
    )


def protocol_of(
    kind: type[TimedProtocol], ids: RequestIds, request_timeout_us: int, shared: Connections
) -> type[TimedProtocol]:
    """Return a subclass of *kind* for one application; uvicorn makes the instances."""
    return type(
        "ApplicationProtocol",
        (kind,),
        {"ids": ids, "request_timeout_us": request_timeout_us, "shared": shared},
    )


async def cut_slow_clients(
    connections: set[Any], request_timeout_us: int, stop: asyncio.Event
) -> None:
    """Check *connections* once a second until *stop* is set: time out incomplete requests, and
    disconnect clients that do not read.
    """

    def check() -> None:
        now_s = time.monotonic()
        for each in list(connections):
            each.check(now_s)

    seconds = min(_CHECK_EVERY_S, request_timeout_us / SECOND / 2)
    await every(seconds, check, stop, _log, "checking for slow clients")
