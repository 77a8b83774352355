"""Answer requests of the hottest routes without ASGI.

At tens of thousands of requests a second, ASGI (a scope, a task, two messages and a timer for each)
costs more than counting. Here an add or a get of one counter goes from the parser to the service,
and the response to the socket. If that is not enough, the route's handler answers in a task; all
other requests go through ASGI.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Mapping
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Final

from api.http.auth import KeyMemory
from api.http.call import JSON, TIMEOUT_HEADER, App, Call, Message, Target
from api.http.connections import Connections
from api.http.fast_json import read_add, read_change
from api.http.pipeline import PATH_BYTES_MAX, Pipeline
from api.http.responses import (
    COMMON_LINES,
    Response,
    added_response,
    count_response,
    count_text,
    problem_response,
)
from api.http.routing import COUNTER
from api.server.exchange import STATUS_LINES
from api.server.protocol import HttpProtocol, is_host
from counter.core.results import REPLAYED, Added
from counter.core.service import CounterService
from counter.errors import CounterError
from counter.limits import HEAD_BYTES_MAX
from counter.types import CounterType, Event, Namespace, Token, Written

_BODY_BYTES_MAX: Final = 65_536
#: A request with one of these headers goes through ASGI.
_UNUSUAL: Final = frozenset(
    {
        *(b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"),
        *(b"origin", b"sec-fetch-site"),
    }
)
#: Paths with names that are valid without decoding, and without a query.
_is_plain: Final = lru_cache(4_096)(re.compile(rb"/v1/[0-9A-Za-z._~:@/-]+").fullmatch)
_ADD: Final = f"POST {COUNTER}/add"
_GET: Final = f"GET {COUNTER}"
_OK: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s"
    + COMMON_LINES
    + b"\r\n%s"
)


class FastExchange(Call):
    """An add or a get of one counter, and its response.

    See :class:`api.server.exchange.Exchange`."""

    #: The body is read at once, and the response is sent at once.
    expects_continue: bool = False
    was_continued: bool = False
    more_body: bool = True
    unread: bytes | bytearray = b""
    response_started: bool = False
    response_complete: bool = False
    is_disconnected: bool = False

    def __init__(
        self, connection: FastLane, target: Target, first: Mapping[bytes, bytes], *, is_quick: bool
    ) -> None:
        pipeline = connection.pipeline
        request_id = pipeline.ids.of(first) if b"x-request-id" in first else pipeline.ids.new()
        super().__init__(target, connection.headers, first, request_id)
        self.began_s = connection.waiting_since_s or 0.0
        self.connection = connection
        self.client, self.scheme = connection.client, connection.scheme
        self.memory = connection.memory
        self.keep_alive: bool = connection.parser.should_keep_alive()
        #: Whether the request has the usual form, so that it needs no handler.
        self.is_quick = is_quick
        self.body_bytes_max = pipeline.body_bytes_max

    def disconnect(self) -> None:
        """See :class:`api.server.exchange.Exchange`."""
        self.is_disconnected = True

    def answer(self) -> None:
        """Answer the request, at once if possible."""
        connection = self.connection
        pipeline, service = connection.pipeline, connection.service
        try:
            is_admitted = self.is_quick and pipeline.admit(self)
        except CounterError as error:
            self._send_error(error)
            return
        namespace = self.known_namespace
        if not is_admitted or namespace is None:
            connection.start(self._handle())
        elif self.target.method == "GET":
            self._get(service, namespace)
        elif not (
            pipeline.shedder.refuses(self.first.get(TIMEOUT_HEADER), self.send)
            or self._add(service, namespace)
        ):
            connection.start(self._handle())

    def _get(self, service: CounterService, namespace: Namespace) -> None:
        """Answer with the count, at once if it is cached."""
        count = service.reader.peek(namespace, self.counter, None)
        if count is None:
            self.connection.start(self._send_when_done(self._read(service, namespace)))
            return
        response = count_response(namespace.name, count)
        if self.connection.pipeline.shedder.must_wait():
            self.connection.loop.call_soon(self.send, response)
        else:
            self.send(response)

    async def _read(self, service: CounterService, namespace: Namespace) -> Response:
        count = await service.reader.read_one(namespace, self.counter, None)
        return Response.text(count_text(namespace.name, count))

    def _add(self, service: CounterService, namespace: Namespace) -> bool:
        """Start the add. Return False if the route's handler must do it."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            delta = read_change(bytes(self.unread))
            event = None if delta is None else service.best_effort_event(self.counter, delta)
        else:
            event = read_add(bytes(self.unread), self.counter)
        if event is None:
            return False
        return service.add_soon(namespace, event, partial(self._send_outcome, namespace, event))

    def _send_outcome(
        self, namespace: Namespace, event: Event, outcome: Written | CounterError
    ) -> None:
        """Answer with the *outcome* of the add; add a late or conflicting one again, alone."""
        if isinstance(outcome, CounterError):
            self._send_error(outcome)
        elif outcome in REPLAYED:
            added = Added(event.counter, event.delta, event.event_time_us, REPLAYED[outcome])
            self.send(added_response(namespace, added))
        else:
            self.connection.start(self._send_when_done(self._add_alone(namespace, event)))

    async def _add_alone(self, namespace: Namespace, event: Event) -> Response:
        """Return the response to an add that a shared write could not decide."""
        token = Token(event.event_id, event.event_time_us)
        added = await self.connection.service.add(
            namespace, event.counter, event.delta, token, self.allowance, event.atom
        )
        return added_response(namespace, added)

    async def _send_when_done(self, work: Awaitable[Response]) -> None:
        """Send the response of *work*, or its error."""
        try:
            response = await work
        except Exception as error:
            response = await self.connection.pipeline.response_to(error, self)
            self._report_failure(response)
        self.send(response)

    def _send_error(self, error: CounterError) -> None:
        response = problem_response(error)
        self._report_failure(response)
        self.send(response)

    def _report_failure(self, response: Response) -> None:
        """Let observers see a server error."""
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.connection.pipeline.report_failure(self, response)

    async def _handle(self) -> None:
        """Have the route's handler answer."""
        response = await self.connection.pipeline.respond(self)
        if response is not None:
            self.send(response, has_ttl=True)

    async def receive(self) -> Message:
        """Return the body: it has arrived."""
        return {"type": "http.request", "body": bytes(self.unread), "more_body": False}

    def send(self, response: Response, *, has_ttl: bool = False) -> None:
        """Send *response*, with the lifetime of the token unless it *has_ttl*, and complete the
        request."""
        self.response_complete = True
        connection = self.connection
        if self.is_disconnected or connection.transport.is_closing():
            return
        ttl = () if has_ttl or self.ttls is None else self.ttls.of_token
        status, body, content_type, headers = response
        if status == HTTPStatus.OK and content_type is JSON and self.keep_alive and not headers:
            line = b"%s: %s\r\n" % ttl[0] if ttl else b""
            connection.transport.write(_OK % (len(body), line, self.id, body))
        else:
            lines = b"".join(b"%s: %s\r\n" % each for each in (*response.head, *ttl))
            close = b"" if self.keep_alive else b"connection: close\r\n"
            head = STATUS_LINES[status] + lines + COMMON_LINES % self.id + close
            connection.transport.write(b"%s\r\n%s" % (head, body))
        name = _ADD if self.target.method == "POST" else _GET
        connection.pipeline.tally.count(name, status, time.monotonic() - self.began_s)
        connection.end_response(self)


class FastLane(HttpProtocol):
    """An HTTP connection that answers the hottest routes without ASGI."""

    #: The last accepted Host header.
    _host: bytes | None = None

    def __init__(
        self, app: App, pipeline: Pipeline, service: CounterService, shared: Connections
    ) -> None:
        super().__init__(app, pipeline.ids, shared)
        self.pipeline = pipeline
        self.service = service
        self.memory = KeyMemory()

    def on_headers_complete(self) -> None:
        if self.is_spare or self.head_bytes > HEAD_BYTES_MAX:
            self._check_head()
        exchange = self._fast_exchange()
        if exchange is None:
            super().on_headers_complete()
        else:
            self.latest = self.running = exchange

    def on_body(self, body: bytes) -> None:
        latest = self.latest
        if type(latest) is FastExchange and latest.more_body:
            self.head_bytes = self._first_bytes = 0
            latest.unread += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        latest = self.latest
        if type(latest) is FastExchange and latest.more_body:
            self.waiting_since_s = None
            latest.more_body = False
            latest.answer()
        else:
            super().on_message_complete()

    def _body_bytes(self) -> int:
        latest = self.latest
        return len(latest.unread) if type(latest) is FastExchange and latest.more_body else 0

    def _fast_exchange(self) -> FastExchange | None:
        """Return the parsed head as a request; None if it must go through ASGI."""
        if len(self.url) > PATH_BYTES_MAX or _is_plain(self.url) is None:
            return None
        target = self.pipeline.target_of(self.parser.get_method().decode("ascii"), self.url)
        if target.refusal is not None or target.route is None:
            return None
        is_add = target.route.name == _ADD
        if not is_add and target.route.name != _GET:
            return None
        is_busy = self.latest is not None and not self.latest.response_complete
        is_old = self.parser.get_http_version() != "1.1"
        if is_busy or is_old or self.shared.is_draining or not self.writable.is_set():
            return None
        first = dict(reversed(self.headers))
        if len(first) < len(self.headers) or not _UNUSUAL.isdisjoint(first):
            return None
        length = first.get(b"content-length")
        if length and int(length) > min(_BODY_BYTES_MAX, self.pipeline.body_bytes_max):
            return None
        host = first.get(b"host")
        if host is None or (host != self._host and is_host(host) is None):
            return None
        self._host = host
        is_usual = not is_add or (
            first.get(b"content-type") == JSON and b"idempotency-key" not in first
        )
        is_quick = is_usual and not self.pipeline.sees_all
        return FastExchange(self, target, first, is_quick=is_quick)
