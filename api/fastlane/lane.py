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
from functools import lru_cache
from hmac import compare_digest
from http import HTTPStatus
from typing import Final, NamedTuple

from api.http.answers import (
    added_response,
    count_response,
    count_text,
    problem_response,
    ttl_header,
)
from api.http.auth import Caller
from api.http.call import JSON, AsgiScope, Call, Message, Response
from api.http.connections import Connections
from api.http.fast_json import read_add, read_change
from api.http.load_shedding import TIMEOUT_HEADER
from api.http.middleware import Pipeline, known_error
from api.http.response_headers import COMMON_HEADERS
from api.http.routing import COUNTER, Route
from api.server.exchange import STATUS_LINES, App
from api.server.protocol import HttpProtocol, is_host
from counter.core.results import REPLAYED, Added
from counter.core.service import CounterService
from counter.errors import CounterError, NamespaceUnknownError, RateLimitedError
from counter.limits import HEAD_BYTES_MAX
from counter.types import CounterType, Namespace, Written

_BODY_BYTES_MAX: Final = 65_536
#: A request with one of these headers goes through ASGI.
_UNUSUAL: Final = frozenset(
    {
        *(b"transfer-encoding", b"content-encoding", b"expect", b"upgrade"),
        *(b"origin", b"sec-fetch-site"),
    }
)
#: Paths with names that are valid without decoding.
_PATH: Final = re.compile(
    rb"/v1/namespaces/([0-9a-z_-]{1,63})/counters/([0-9A-Za-z._~:@-]{1,256})(/add)?"
)
#: Longer URLs cannot match; this bounds the cache's memory.
_PATH_BYTES_MAX: Final = 512
_OK: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s"
    + COMMON_HEADERS
    + b"\r\n%s"
)


class _Target(NamedTuple):
    """The name of a request's route, whether it adds, and its counter."""

    route: str
    adds: bool
    namespace: str
    counter: str
    path: bytes


@lru_cache(maxsize=4_096)
def _target(method: bytes, path: bytes) -> _Target | None:
    """Return the target of *method* on *path*, if it is an add or a get of one counter."""
    found = _PATH.fullmatch(path)
    if found is None or method != (b"POST" if found[3] else b"GET"):
        return None
    route = f"POST {COUNTER}/add" if found[3] else f"GET {COUNTER}"
    names = found[1].decode("ascii"), found[2].decode("ascii")
    return _Target(route, bool(found[3]), *names, path)


class FastExchange:
    """One request and its response; see :class:`api.server.exchange.Exchange`."""

    __slots__ = (
        "admitted",
        "authorization",
        "began_s",
        "body",
        "event",
        "headers",
        "is_disconnected",
        "keep_alive",
        "more_body",
        "namespace",
        "protocol",
        "quick",
        "request_id",
        "response_complete",
        "route",
        "target",
        "timeout",
    )
    #: The body is read at once.
    expects_continue: bool = False
    was_continued: bool = False
    #: The response is sent at once.
    response_started: bool = False

    def __init__(
        self,
        protocol: FastLane,
        target: _Target,
        authorization: bytes | None,
        request_id: bytes | None,
        timeout: bytes | None,
        quick: bool,
    ) -> None:
        pipeline = protocol.request_pipeline
        self.began_s = protocol.waiting_since_s or 0.0
        self.authorization = authorization
        self.request_id = pipeline.ids.new() if request_id is None else pipeline.ids.of(request_id)
        self.timeout = timeout
        self.admitted = False
        self.protocol = protocol
        self.target = target
        self.route = pipeline.routes[target.route]
        self.headers = protocol.headers
        #: Whether the headers need no further processing.
        self.quick = quick
        self.keep_alive: bool = protocol.parser.should_keep_alive()
        self.body: bytes | bytearray = b""
        self.more_body = True
        self.is_disconnected = False
        self.response_complete = False

    def add_body(self, body: bytes) -> None:
        """See :class:`api.server.exchange.Exchange`."""
        self.body += body

    def end_body(self) -> None:
        """See :class:`api.server.exchange.Exchange`."""
        self.more_body = False
        self._answer()

    def wake(self) -> None:
        """See :class:`api.server.exchange.Exchange`. The response waits for no client."""

    def disconnect(self) -> None:
        """See :class:`api.server.exchange.Exchange`."""
        self.is_disconnected = True

    def _answer(self) -> None:
        """Answer the request, at once if possible.

        The checks are those of :class:`Pipeline`, by the same objects and in the same order.
        """
        protocol, route, name = self.protocol, self.route, self.target.namespace
        pipeline, service = protocol.request_pipeline, protocol.service
        shedder = pipeline.shedder
        # Authorize before any lookup: response times must not reveal what exists.
        caller = protocol.caller(self.authorization, route, name) if self.quick else None
        namespace = None
        if caller is not None:
            namespace = service.namespaces.at_hand(name, writes=route.writes)
        if caller is None or namespace is None:
            protocol.start(self._handle())
            return
        self.namespace = namespace
        try:
            pipeline.authorizer.admit(caller, namespace, route.adds)
        except RateLimitedError as error:
            self._fail(error)
            return
        self.admitted = True
        if not route.writes:
            self._get(service)
        elif not shedder.refuses(self.timeout, self._answer_add) and not self._add(service):
            protocol.start(self._handle())

    def _get(self, service: CounterService) -> None:
        """Answer with the count, at once if it is cached."""
        count = service.reader.peek(self.namespace, self.target.counter, None)
        if count is None:
            self.protocol.start(self._finish(self._read(service)))
            return
        response = count_response(self.namespace.name, count)
        if self.protocol.request_pipeline.shedder.keeps_waiting():
            self.protocol.loop.call_soon(self.answer, response)
        else:
            self.answer(response)

    async def _read(self, service: CounterService) -> Response:
        count = await service.reader.read_one(self.namespace, self.target.counter, None)
        return Response(200, count_text(self.namespace.name, count).encode())

    def _add(self, service: CounterService) -> bool:
        """Start the add; return False if the handler must do it."""
        if self.namespace.settings.counter_type is CounterType.BEST_EFFORT:
            delta = read_change(bytes(self.body))
            event = None if delta is None else service.change(self.target.counter, delta)
        else:
            event = read_add(bytes(self.body), self.target.counter)
        if event is None:
            return False
        self.event = event
        return service.add_soon(self.namespace, event, self._added)

    def _added(self, outcome: Written | CounterError) -> None:
        if isinstance(outcome, CounterError):
            self._fail(outcome)
        elif outcome in REPLAYED:
            event = self.event
            added = Added(event.counter, event.delta, event.event_time_us, REPLAYED[outcome])
            self._answer_add(added_response(self.namespace, added))
        else:
            # Late, or a conflict: the handler resolves it under the same token.
            self.protocol.start(self._handle())

    async def _finish(self, work: Awaitable[Response]) -> None:
        """Answer with the response of *work*, or with its error."""
        try:
            response = await work
        except NamespaceUnknownError:
            # The handler reads the directory again, and reports what it finds.
            await self._handle()
        except Exception as error:
            self._fail(known_error(error))
        else:
            self.answer(response)

    def _fail(self, error: CounterError) -> None:
        """Answer with *error*; observers see it if it is a server error."""
        response = problem_response(error)
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.protocol.request_pipeline.show_failure(
                self._call(), self.route, self._names, response
            )
        if self.route.writes:
            self._answer_add(response)
        else:
            self.answer(response)

    @property
    def _names(self) -> Mapping[str, str]:
        return {"namespace": self.target.namespace, "counter": self.target.counter}

    async def _handle(self) -> None:
        """Answer with the route's handler."""
        response = await self.protocol.request_pipeline.respond(
            self._call(), self.route, self._names
        )
        if response is not None:
            self.answer(response)

    def _call(self) -> Call:
        """Return the request as a Call for handlers."""
        scope: AsgiScope = {
            "method": self.route.method,
            "path": self.target.path.decode("ascii"),
            "query_string": b"",
            "headers": self.headers,
        }
        body_bytes_max = self.protocol.request_pipeline.body_bytes_max
        call = Call(scope, self._receive, body_bytes_max, self.request_id.decode())
        call.admitted = self.admitted
        return call

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": bytes(self.body), "more_body": False}

    def _answer_add(self, response: Response) -> None:
        """Send *response* to an add under a token, with how long the token is honoured."""
        self.answer(response, self.protocol.ttl_of(self.namespace))

    def answer(self, response: Response, more: bytes = b"") -> None:
        """Send *response*, with *more* lines of its head, and complete the request."""
        self.response_complete = True
        if self.is_disconnected or self.protocol.transport.is_closing():
            return
        status, body, content_type, headers = response
        if status == HTTPStatus.OK and content_type is JSON and self.keep_alive and not headers:
            self.protocol.send(self, status, _OK % (len(body), more, self.request_id, body))
            return
        head = STATUS_LINES[status] + b"".join(b"%s: %s\r\n" % each for each in response.head)
        head += more + COMMON_HEADERS % self.request_id
        if not self.keep_alive:
            head += b"connection: close\r\n"
        self.protocol.send(self, status, b"%s\r\n%s" % (head, body))


class FastLane(HttpProtocol):
    """An HTTP connection that answers the hottest routes without ASGI."""

    #: The caller of the last request, None if not allowed; its header; and the route, the namespace
    #: and the version of the keys that this holds for.
    _caller: Caller | None = None
    _authorization: bytes = b""
    _asked: tuple[Route, str, int] | None = None
    #: The last accepted Host header.
    _host: bytes | None = None
    #: The line of the head that says how long a token is honoured, and the namespace of that.
    _ttl: bytes = b""
    _ttl_of: Namespace | None = None

    def __init__(
        self, app: App, pipeline: Pipeline, service: CounterService, shared: Connections
    ) -> None:
        super().__init__(app, pipeline.ids, shared)
        self.request_pipeline = pipeline
        self.service = service

    def on_headers_complete(self) -> None:
        if self.is_spare or self.head_bytes > HEAD_BYTES_MAX:
            self._check_head()
        exchange = self._fast_exchange()
        if exchange is None:
            super().on_headers_complete()
        else:
            self.latest = self.running = exchange

    def _body_bytes(self) -> int:
        latest = self.latest
        return len(latest.body) if type(latest) is FastExchange and latest.more_body else 0

    def _fast_exchange(self) -> FastExchange | None:
        """Return the parsed head as a request; None if it must go through ASGI."""
        if len(self.url) > _PATH_BYTES_MAX:
            return None
        target = _target(self.parser.get_method(), self.url)
        if target is None:
            return None
        is_busy = self.latest is not None and not self.latest.response_complete
        is_old = self.parser.get_http_version() != "1.1"
        if is_busy or is_old or self.shared.is_draining or not self.writable.is_set():
            return None
        is_json: bool | None = None
        has_key = has_host = False
        authorization = request_id = timeout = None
        for name, value in self.headers:
            if name == b"content-type":
                is_json = value == JSON and is_json is None
            elif name == b"content-length":
                if int(value) > min(_BODY_BYTES_MAX, self.request_pipeline.body_bytes_max):
                    return None
            elif name == b"host":
                if has_host or (value != self._host and not self._is_answered(value)):
                    return None
                has_host, self._host = True, value
            elif name in _UNUSUAL:
                return None
            elif name == b"idempotency-key":
                has_key = True
            elif name == b"authorization":
                # The first one counts, as in the handlers.
                authorization = value if authorization is None else authorization
            elif name == b"x-request-id":
                request_id = value if request_id is None else request_id
            elif name == TIMEOUT_HEADER:
                timeout = value if timeout is None else timeout
        if not has_host:
            return None
        quick = not target.adds or (is_json is True and not has_key)
        quick = quick and not self.request_pipeline.sees_all
        return FastExchange(self, target, authorization, request_id, timeout, quick)

    def _is_answered(self, host: bytes) -> bool:
        return is_host(host) is not None and self.request_pipeline.authorizer.answers(host)

    def caller(self, authorization: bytes | None, route: Route, namespace: str) -> Caller | None:
        """Return the caller if *route* is allowed; None if the handler must report why not.

        The result is kept while the next requests have the same key, route and namespace.
        """
        authorizer = self.request_pipeline.authorizer
        header = authorization or b""
        asked = route, namespace, authorizer.ring.version
        if asked != self._asked or not compare_digest(header, self._authorization):
            self._asked, self._authorization = asked, header
            try:
                caller = authorizer.known(header)
            except CounterError:
                caller = None
            allowed = caller is not None and caller.may(route.scope, namespace)
            self._caller = caller if allowed else None
        return self._caller

    def ttl_of(self, namespace: Namespace) -> bytes:
        """Return how long a token of *namespace* is honoured, as a line of a head."""
        if namespace is not self._ttl_of:
            self._ttl_of = namespace
            headers = ttl_header(namespace, is_key=False)
            self._ttl = b"".join(b"%s: %s\r\n" % each for each in headers)
        return self._ttl

    def send(self, exchange: FastExchange, status: int, response: bytes) -> None:
        """Send the response of *exchange*; then close, or continue with the next request."""
        self.transport.write(response)
        took_s = time.monotonic() - exchange.began_s
        self.request_pipeline.tally.answered(exchange.target.route, status, took_s)
        self.end_response(exchange)
