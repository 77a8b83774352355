"""One HTTP/1.1 connection, with bounds on its memory and on slow clients.

If a request, header or body, does not arrive completely within a time limit, the client gets 408
and the connection is closed. A client that reads none of its responses for as long is disconnected.
All connections are checked once a second, which costs nothing per request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from httptools import (
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)

from api.http.call import App, RequestIds
from api.http.connections import FULL, LATE, MALFORMED, UNTAKEN, Connections, peer_of
from api.http.problems import problem_bytes, retry_after_s
from api.http.responses import COMMON_LINES
from api.server.exchange import (
    BODY_BYTES_WAITING_MAX,
    STATUS_LINES,
    UNANSWERED,
    AsgiExchange,
    Exchange,
)
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
    CONNECTIONS_SPARE,
    FIRST_REQUEST_US,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    SECOND,
    SPARE_REQUEST_US,
    URL_BYTES_MAX,
)

_CHECK_EVERY_S: Final = 1.0
#: A client that reads so much of its responses within the time limit is slow, but not gone.
_PROGRESS_BYTES_MIN: Final = 64 * 1024
_CLOSE_NOTIFY_S: Final = 0.5
_REASONS: Final[Mapping[type[CounterError], str]] = {
    OverloadedError: FULL,
    RequestTimeoutError: LATE,
}
#: Bytes parsed before the number of pending requests is checked.
_SLICE_BYTES: Final = 8_192
#: Segments up to this size are parsed at once; larger ones take turns with other connections.
_SMALL_BYTES: Final = 2_048
#: Estimated memory overhead of a header, and of a pending request.
_HEADER_BYTES: Final = 128
_REQUEST_BYTES: Final = 2_048
#: The only paths answered on a spare connection.
_HEALTH_CHECKS: Final = frozenset({b"/healthz", b"/readyz"})
_NOT_A_URL: Final = (
    "the path or the query has a byte that a URL cannot have; percent-encode names as UTF-8: é is"
    " %C3%A9"
)
_NO_VERSION: Final = (
    "HTTP/1.1 must follow the path and the query; if a name in them has a space, percent-encode it"
    " as %20"
)
_ASGI: Final[Mapping[str, str]] = {"version": "3.0", "spec_version": "2.3"}
#: Characters of a name or an address, and of a port (RFC 3986, 3.2).
is_host = re.compile(rb"[\w.~%!$&'()*+,;=:\[\]-]*", re.ASCII).fullmatch
_log = logging.getLogger("counter.api")


class HttpProtocol(asyncio.Protocol):
    """An HTTP connection with limits on time and memory."""

    #: The client of the connection, and its own address here.
    client: tuple[str, int] | None = None
    server: tuple[str, int] | None = None
    scheme = "http"
    transport: Any
    #: Since when the rest of a request, or a first one, is awaited.
    waiting_since_s: float | None = None
    #: Since when no request is under way on a connection that had one.
    idle_since_s: float | None = None
    #: Received but not parsed, because requests are pending or other connections have their turn.
    _unread: bytes = b""
    _is_queued: bool = False
    #: This connection's part of the shared limit on unfinished requests.
    _held_bytes: int = 0
    #: The request whose head was parsed last, and the one that is being answered: the same unless
    #: others are pending behind it.
    latest: Exchange | None = None
    running: Exchange | None = None
    is_reading_paused: bool = False
    #: Since when the client has not read its responses, and the unsent bytes at that time.
    stalled: tuple[float, int] | None = None
    #: Whether it is above the connection limit; then only health checks are answered.
    is_spare: bool = False
    #: Whether no more is read: complete requests are answered, then the connection is closed.
    has_stopped_reading: bool = False
    #: Whether the client has sent nothing yet.
    _is_silent: bool = False
    #: The client address whose limit it counts towards.
    _peer: str | None = None
    #: Why the current request is rejected, if not for its syntax.
    refusal: CounterError | None = None
    url: bytes = b""
    headers: list[tuple[bytes, bytes]]
    _expects_continue: bool = False
    #: Bytes of the head or trailers, counted from the slice in which the message or its latest body
    #: part began. ``_first_bytes`` is that slice, which may also have bytes of what came before.
    head_bytes: int = 0
    _first_bytes: int = 0
    #: The size of the slice being parsed.
    _slice_bytes: int = 0
    #: The head of a request that asks for another protocol, without the header that does.
    _plain_head: bytes = b""

    def __init__(self, app: App, ids: RequestIds, shared: Connections) -> None:
        """*ids* makes ids for answers without a parsed request, *shared* is the state of all
        connections of the process."""
        self.app = app
        self.ids = ids
        self.shared = shared
        self.loop = asyncio.get_running_loop()
        self.parser = self._new_parser()
        self.headers = []
        #: Requests whose heads were parsed while another one was being answered.
        self.pending: deque[AsgiExchange] = deque()
        #: Set while the client reads its responses.
        self.writable = asyncio.Event()
        self.writable.set()

    def _new_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        # The first of several requests may ask for the connection to be closed.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.waiting_since_s = time.monotonic()
        self.client = _address(transport.get_extra_info("peername"))
        self.server = _address(transport.get_extra_info("sockname"))
        if transport.get_extra_info("sslcontext") is not None:
            self.scheme = "https"
        shared, peer = self.shared, peer_of(self.client)
        shared.open.add(self)
        # A TLS connection was counted before the handshake.
        if self.scheme == "http" and not shared.peers.acquire(peer):
            self._refuse(
                OverloadedError(
                    f"{peer} already has {shared.peers.most} connections, the most that one address"
                    " may have (connections_per_address); close some",
                    retry_after_us=SECOND,
                )
            )
            return
        self._peer = peer
        if len(shared.open) > shared.most and not shared.make_room():
            if len(shared.open) > shared.most + CONNECTIONS_SPARE:
                self._refuse(self._full_error())
                return
            self.is_spare = True
            self.loop.call_later(SPARE_REQUEST_US / SECOND, self._end_spare)
        self._is_silent = True
        shared.silent[self] = self.transport

    def _end_spare(self) -> None:
        """Reject a spare connection that has sent no health check."""
        if self.latest is None and not self.transport.is_closing():
            self._refuse(self._full_error())

    def _full_error(self) -> OverloadedError:
        return OverloadedError(
            f"this process already has {self.shared.most} connections; close some, or try"
            " another server",
            retry_after_us=SECOND,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        shared = self.shared
        shared.open.discard(self)
        if self.running is not None:
            self.running.disconnect()
        self.writable.set()
        self.pending.clear()
        self._unread = b""
        self.waiting_since_s = None
        self._update_held_bytes()
        shared.silent.pop(self, None)
        if self._peer is not None:
            shared.peers.release(self._peer)
            self._peer = None
        # Break reference cycles, or the memory would wait for the garbage collector.
        self.latest = self.running = None
        del self.parser

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        # The client read its responses; the next check starts a new measurement.
        self.stalled = None
        self.writable.set()

    def write(self, data: bytes) -> None:
        """Send *data*, unless the connection is closing."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_reading(self) -> None:
        """Read no more until :meth:`resume_reading`: TCP slows the client down."""
        if not self.is_reading_paused:
            self.is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading unless requests are pending; the last of them resumes it. Buffered bytes
        are parsed first."""
        if not self.pending and not self._parse_rest_soon() and self.is_reading_paused:
            self.is_reading_paused = False
            self.transport.resume_reading()

    def start(self, handling: Coroutine[Any, Any, None]) -> None:
        """Run *handling* in a task that shutdown waits for."""
        task = self.loop.create_task(handling)
        self.shared.tasks.add(task)
        task.add_done_callback(self.shared.tasks.discard)

    def _run(self, exchange: AsgiExchange) -> None:
        self.running = exchange
        self.start(exchange.run(self.app))

    def data_received(self, data: bytes) -> None:
        if self.has_stopped_reading:
            return
        if self._is_silent:
            self._is_silent = False
            self.shared.silent.pop(self, None)
        if self._unread:
            self._unread += data
            self._update_held_bytes()
        elif len(data) <= _SMALL_BYTES:
            self._read(data)
            if self.waiting_since_s is not None or self._held_bytes:
                self._update_held_bytes()
        else:
            self._unread = data
            self._read_in_turn()
            if self._unread:
                self.pause_reading()
                self._update_held_bytes()

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
            self.pending or self.has_stopped_reading or self.transport.is_closing()
        ):
            if start and self.shared.queue.now_s() >= end_s:
                break
            self._read(unread[start : start + _SLICE_BYTES])
            start += _SLICE_BYTES
        if self.has_stopped_reading or self.transport.is_closing():
            # Discard the rest.
            start = len(unread)
        self._unread = unread[start:]
        self._is_queued = bool(self._unread) and not self.pending
        if not (self._unread or self.has_stopped_reading or self.transport.is_closing()):
            self.resume_reading()
        self._update_held_bytes()
        return self._is_queued

    def _parse_rest_soon(self) -> bool:
        """Schedule the parsing of buffered bytes. Return whether reading must stay paused: bytes
        are left to parse, a body waits, or reading has stopped."""
        if self.has_stopped_reading:
            return True
        if self._unread:
            # Not at once: the parser may be running.
            self.loop.call_soon(self._read_in_turn)
        elif self._held_bytes:
            self._update_held_bytes()
        return bool(self._unread) or self._has_body()

    def _has_body(self) -> bool:
        """Return whether enough of a body waits for its handler, which resumes reading."""
        latest = self.latest
        return (
            latest is not None
            and not latest.response_complete
            and len(latest.unread) > BODY_BYTES_WAITING_MAX
        )

    def _read(self, data: bytes) -> None:
        if self.waiting_since_s is None and (self.latest is None or self.latest.response_complete):
            # A stray CRLF starts no message, and keeps no connection open.
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
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except HttpParserUpgrade as upgrade:
                    since_s = self.waiting_since_s
                    self.parser = self._new_parser()
                    self.parser.feed_data(self._plain_head)
                    if self.waiting_since_s is not None:
                        self.waiting_since_s = since_s
                    data = data[upgrade.args[0] :]
        except HttpParserError as error:
            if isinstance(error, HttpParserInvalidURLError):
                self.refusal = BadRequestError(_NOT_A_URL)
            elif str(error).startswith("Expected HTTP/"):
                self.refusal = BadRequestError(_NO_VERSION)
            # Not a warning: a flood would fill the log. They are counted.
            _log.info("a malformed request from %s: %s", peer_of(self.client), error)
            self._refuse(
                self.refusal or BadRequestError("Invalid HTTP request received. Send HTTP/1.1.")
            )

    def _head_without_upgrade(self) -> bytes:
        """Return the head of the request without Upgrade. Raises ValueError for CONNECT."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise ValueError("a tunnel")
        version = self.parser.get_http_version().encode()
        headers = b"".join(b"%s: %s\r\n" % each for each in self.headers if each[0] != b"upgrade")
        return b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, headers)

    def _update_held_bytes(self) -> None:
        """Update the shared count of memory held by unfinished requests."""
        held = len(self._unread) + _REQUEST_BYTES * len(self.pending)
        if self.waiting_since_s is not None:
            held += self.head_bytes + _HEADER_BYTES * len(self.headers) + self._body_bytes()
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
        self.idle_since_s = None
        self.url = b""
        self._expects_continue = False
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= HEADERS_MAX:
            self.refusal = HeadTooLargeError(
                f"the request has more than {HEADERS_MAX} headers; send {HEADERS_MAX} at most"
            )
            raise ValueError("too many headers")
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.is_spare or self.head_bytes > HEAD_BYTES_MAX:
            self._check_head()
        if self.parser.should_upgrade():
            self._plain_head = self._head_without_upgrade()
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
        before = self.latest
        is_first = before is None or before.response_complete
        version = self.parser.get_http_version()
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        if is_first and (self.shared.is_draining or self.is_spare):
            # Otherwise an earlier request is pending, whose response must not be the last.
            keep_alive = False
        exchange = self.latest = AsgiExchange(
            self,
            self._scope(version),
            keep_alive=keep_alive,
            expects_continue=self._expects_continue,
        )
        if is_first:
            self._run(exchange)
        else:
            self.pause_reading()
            self.pending.append(exchange)

    def _scope(self, version: str) -> dict[str, Any]:
        """Return the request as ASGI describes it."""
        url = parse_url(self.url)
        return {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "method": self.parser.get_method().decode("ascii"),
            "path": unquote(url.path.decode("ascii")),
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self.headers,
        }

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
            self.refusal = self._full_error()
            raise ValueError("too many connections")
        # "GET ", " HTTP/1.1" and two line ends; then ": " and a line end per header.
        size = 18 + len(self.url) + sum(4 + len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES_MAX:
            self.refusal = _too_large(size)
            raise ValueError("a head that is too large")

    def on_body(self, body: bytes) -> None:
        # After the body only trailers follow.
        self.head_bytes = self._first_bytes = 0
        latest = self.latest
        if isinstance(latest, AsgiExchange) and not latest.response_complete:
            latest.unread += body
            latest.changed.set()
            if len(latest.unread) > BODY_BYTES_WAITING_MAX:
                self.pause_reading()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            # Only the head has been parsed, and comes again: see _parse().
            return
        self.waiting_since_s = None
        latest = self.latest
        if isinstance(latest, AsgiExchange) and not latest.response_complete:
            latest.more_body = False
            latest.changed.set()

    def end_response(self, exchange: Exchange) -> None:
        """Continue with the next request after the response of *exchange*, or close."""
        is_last = not exchange.keep_alive or (self.has_stopped_reading and not self.pending)
        if exchange.expects_continue and exchange.more_body and not exchange.was_continued:
            # No 100 Continue was sent: the next bytes may be a body or another request.
            is_last = True
        if is_last:
            self.transport.close()
        elif not self.transport.is_closing():
            if self.is_reading_paused or self._unread or self._held_bytes:
                self.resume_reading()
            if self.pending:
                self._run(self.pending.popleft())
            elif self.waiting_since_s is None:
                self.idle_since_s = time.monotonic()

    def end_unanswered(self, exchange: Exchange) -> None:
        """Close the connection after *exchange*, which has no response or a part of one."""
        if not exchange.response_started:
            self.write(self._problem(UNANSWERED))
        self.transport.close()

    def shut_down(self) -> None:
        """Close the connection after the response that it waits for, at once if there is none."""
        if self.latest is None or self.latest.response_complete:
            self.transport.close()
        else:
            self.latest.keep_alive = False

    def time_out_after(self, waited_s: float) -> None:
        """Answer 408 and close if the rest of a request takes too long. A handler that waits for
        the body sees a disconnect."""
        limit_us, why = self.shared.request_timeout_us, ""
        if self.latest is None and self.shared.is_nearly_full:
            limit_us = min(limit_us, FIRST_REQUEST_US)
            why = ", because the process is near its limit of connections"
        if waited_s <= limit_us / SECOND:
            return
        self._refuse(
            RequestTimeoutError(
                f"the request did not arrive whole within {limit_us / SECOND:g} s{why}"
            )
        )

    def check(self, now_s: float) -> None:
        """End the connection if its client takes too long: called once a second."""
        if self.waiting_since_s is not None:
            if self._is_answering():
                # It is a stream, which limits its silence. When it ends, the rest is timed.
                self.waiting_since_s = now_s
            self.time_out_after(now_s - self.waiting_since_s)
        elif self.idle_since_s is not None and now_s - self.idle_since_s > self.shared.keep_alive_s:
            self.transport.close()
        self.abort_if_stalled(now_s)

    def _is_answering(self) -> bool:
        """Whether the response to a request that is not complete has begun, and has not ended."""
        latest = self.latest
        return (
            latest is not None
            and latest.more_body
            and latest.response_started
            and not latest.response_complete
        )

    def _owes_response(self) -> bool:
        """Whether a complete request has no response yet."""
        latest = self.latest
        return bool(self.pending) or (
            latest is not None and not latest.more_body and not latest.response_complete
        )

    def eof_received(self) -> bool:
        """Answer the complete requests of a client that has closed its sending side, then close.

        TLS has no such state in asyncio."""
        if self.scheme == "https" or not self._owes_response():
            return False
        self._stop_reading()
        # A live stream that waits for this ends, because its reader may as well be gone. One that
        # has not begun notices at its next comment whether it is.
        if isinstance(self.running, AsgiExchange):
            self.running.changed.set()
        return True

    def abort_if_stalled(self, now_s: float) -> None:
        """Abort the connection if its client has read too little for too long.

        This also bounds a closing connection, which nothing else would end.
        """
        if self.writable.is_set() and not self.transport.is_closing():
            self.stalled = None
            return
        size = self.transport.get_write_buffer_size()
        if self.stalled is None or size <= self.stalled[1] - _PROGRESS_BYTES_MIN:
            self.stalled = now_s, size
            return
        limit_s = self.shared.request_timeout_us / SECOND
        if self.shared.is_draining and not size:
            # Everything is sent. TLS waits for a close_notify, which a client with a connection
            # pool sends only when it uses the connection again.
            limit_s = min(limit_s, _CLOSE_NOTIFY_S)
        if now_s - self.stalled[0] > limit_s:
            if size:
                self.shared.count_end(UNTAKEN)
            self.transport.abort()

    def _refuse(self, error: CounterError) -> None:
        self.shared.count_end(_REASONS.get(type(error), MALFORMED))
        self.waiting_since_s = None
        answering = self._owes_response()
        if answering and isinstance(error, BadRequestError):
            # The client still gets the responses to its earlier requests.
            self._stop_reading()
            return
        # A second head would be a part of the stream that is being sent.
        if not (answering or self._is_answering()):
            self.write(self._problem(error))
        self.transport.close()

    def _problem(self, error: CounterError) -> bytes:
        """Return a response with *error*, the last one of its connection."""
        body, wait_s = b"%s\n" % problem_bytes(error), retry_after_s(error)
        return (
            b"%scontent-type: application/problem+json\r\n%s"
            b"connection: close\r\ncontent-length: %d\r\n%s\r\n%s"
            % (
                STATUS_LINES[error.status],
                b"" if wait_s is None else b"retry-after: %d\r\n" % wait_s,
                *(len(body), COMMON_LINES % self.ids.new(), body),
            )
        )

    def _stop_reading(self) -> None:
        """Stop reading, answer the complete requests, and close."""
        self.has_stopped_reading = True
        self.pause_reading()
        if self.latest is not None and not self.latest.more_body:
            self.latest.keep_alive = False
        elif self.pending:
            # It is the rejected one.
            self.pending.pop()


def _too_large(size: int) -> HeadTooLargeError:
    return HeadTooLargeError(
        f"the head of the request has at least {size} bytes; at most {HEAD_BYTES_MAX} are allowed"
    )


def _address(info: Any) -> tuple[str, int] | None:
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None


async def cut_slow_clients(shared: Connections, stop: asyncio.Event) -> None:
    """Check all connections once a second until *stop* is set: time out incomplete requests,
    disconnect clients that do not read, and close idle connections."""

    def check() -> None:
        now_s = time.monotonic()
        for each in list(shared.open):
            each.check(now_s)

    seconds = min(_CHECK_EVERY_S, shared.request_timeout_us / SECOND / 2)
    await every(seconds, check, stop, _log, "checking for slow clients")
