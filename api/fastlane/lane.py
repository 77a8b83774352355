"""Answer requests of the hottest routes without ASGI.

At tens of thousands of requests a second, ASGI (a scope, a task, two messages and a timer for each)
costs more than counting. Here an add or a get of one counter goes from the parser to the service,
and the answer to the socket. If that is not enough, the route's handler answers in a task; all
other requests go through uvicorn.
"""

from __future__ import annotations

import re
import time
from collections.abc import Coroutine, Mapping
from functools import lru_cache
from hmac import compare_digest
from http import HTTPStatus
from typing import Any, ClassVar, Final, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from api.http.answers import added_reply, count_reply, problem_reply
from api.http.auth import Caller
from api.http.call import JSON, NO_CONTENT, AsgiScope, Call, Message, Reply
from api.http.fast_json import read_add, read_change
from api.http.load_shedding import TIMEOUT_HEADER
from api.http.middleware import Front
from api.http.response_headers import LABEL
from api.http.routing import Route
from api.server.protocol import TimedProtocol
from counter.core.results import REPLAYED, Added
from counter.core.service import CounterService
from counter.errors import CounterError, RateLimitedError
from counter.limits import HEAD_BYTES_MAX
from counter.types import CounterType, Namespace, Scope, Written

_BODY_BYTES_MAX: Final = 65_536
#: A request with one of these headers goes through uvicorn.
_UNUSUAL: Final = frozenset(
    {b"transfer-encoding", b"expect", b"upgrade", b"origin", b"sec-fetch-site"}
)
#: Paths with names that are valid without decoding.
_PATH: Final = re.compile(
    rb"/v1/namespaces/([0-9a-z_-]{1,63})/counters/([0-9A-Za-z._~:@-]{1,256})(/add)?"
)
#: Longer URLs cannot match; this bounds the cache's memory.
_PATH_BYTES_MAX: Final = 512
_OK: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    + LABEL
    + b"\r\n%s"
)
_SCOPES: Final[Mapping[bool, Scope]] = {True: Scope.WRITE, False: Scope.READ}
_NAMES: Final[Mapping[bool, str]] = {
    True: "POST /v1/namespaces/{namespace}/counters/{counter}/add",
    False: "GET /v1/namespaces/{namespace}/counters/{counter}",
}
_STATUS_LINES: Final[Mapping[int, bytes]] = {
    each.value: b"HTTP/1.1 %d %s\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus
}


class _Target(NamedTuple):
    """The operation and the counter of a request."""

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
    return _Target(bool(found[3]), found[1].decode("ascii"), found[2].decode("ascii"), path)


class _NoEvent:
    """A stand-in for the event that wakes the task of uvicorn's cycle: there is no task."""

    def set(self) -> None:
        """Do nothing."""


class FastCycle:
    """One request and its answer, with the interface of uvicorn's cycle."""

    __slots__ = (
        "admitted",
        "authorization",
        "began_s",
        "body",
        "disconnected",
        "event",
        "headers",
        "keep_alive",
        "more_body",
        "namespace",
        "protocol",
        "quick",
        "request_id",
        "response_complete",
        "target",
        "timeout",
    )
    message_event: ClassVar[_NoEvent] = _NoEvent()

    def __init__(
        self,
        protocol: FastLane,
        target: _Target,
        headers: list[tuple[bytes, bytes]],
        authorization: bytes | None,
        request_id: bytes | None,
        timeout: bytes | None,
        quick: bool,
    ) -> None:
        self.began_s = protocol.began_s
        self.authorization = authorization
        ids = protocol.front.ids
        self.request_id = ids.new() if request_id is None else ids.of(request_id)
        self.timeout = timeout
        self.admitted = False
        self.protocol = protocol
        self.target = target
        self.headers = headers
        #: Whether the headers need no further processing.
        self.quick = quick
        self.keep_alive: bool = protocol.parser.should_keep_alive()
        self.body = b""
        self.more_body = True
        self.disconnected = False
        self.response_complete = False

    def run(self) -> None:
        """Answer the request, at once if possible."""
        self.more_body = False
        adds, name, counter, _ = self.target
        if adds and self.protocol.front.door.refuses(self.timeout, self.answer):
            return
        service = self.protocol.service
        # Authorize before any lookup: response times must not reveal what exists.
        caller = self._caller(name, adds) if self.quick else None
        namespace = None if caller is None else service.namespaces.at_hand(name, writes=adds)
        if caller is not None and namespace is not None:
            self._admit(caller, namespace, adds)
            if self.response_complete:
                return
            if adds:
                if self._add(service, namespace, counter):
                    return
            elif (count := service.peek(namespace, counter, None)) is not None:
                reply = count_reply(name, count)
                if self.protocol.front.door.keeps_waiting():
                    self.protocol.loop.call_soon(self.answer, reply)
                else:
                    self.answer(reply)
                return
        self.protocol.start(self._handle())

    def _caller(self, namespace: str, adds: bool) -> Caller | None:
        """Return the caller if allowed; None if the handler must report why not."""
        gate = self.protocol.front.gate
        if not gate.asks_for_keys:
            return gate.anyone
        known = self.protocol.caller(self.authorization)
        return known if known is not None and known.may(_SCOPES[adds], namespace) else None

    def _admit(self, caller: Caller, namespace: Namespace, adds: bool) -> None:
        """Count the request towards the rate limits of *caller*; reject it if one is exceeded."""
        meters = caller.meters(namespace)
        if not meters.is_empty:
            try:
                self.protocol.front.gate.count(meters, adds)
            except RateLimitedError as error:
                self._fail(error)
        self.admitted = True

    def _add(self, service: CounterService, namespace: Namespace, counter: str) -> bool:
        """Start the add; return False if the handler must do it."""
        self.namespace = namespace
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            delta = read_change(self.body)
            if delta is None:
                return False
            self.protocol.start(self._change(service, counter, delta))
            return True
        event = read_add(self.body, counter)
        if event is None:
            return False
        self.event = event
        return service.add_soon(namespace, event, self._added)

    def _added(self, outcome: Written | CounterError) -> None:
        if isinstance(outcome, CounterError):
            self._fail(outcome)
        elif outcome in REPLAYED:
            event = self.event
            added = Added(event.counter, event.delta, event.event_time_us, REPLAYED[outcome])
            self.answer(added_reply(self.namespace, added))
        else:
            # Late, or a conflict: the handler resolves it under the same token.
            self.protocol.start(self._handle())

    async def _change(self, service: CounterService, counter: str, delta: int) -> None:
        """Add *delta* to a best-effort counter."""
        try:
            added = await service.add(self.namespace, counter, delta, None)
        except CounterError as error:
            self._fail(error)
        else:
            self.answer(added_reply(self.namespace, added))

    def _fail(self, error: CounterError) -> None:
        """Answer with *error*; observers see it if it is a server error."""
        reply = problem_reply(error)
        if reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.protocol.front.show_failure(self._call(), self._route, self._names, reply)
        self.answer(reply)

    @property
    def _route(self) -> Route:
        return self.protocol.front.routes[_NAMES[self.target.adds]]

    @property
    def _names(self) -> Mapping[str, str]:
        return {"namespace": self.target.namespace, "counter": self.target.counter}

    async def _handle(self) -> None:
        """Answer with the route's handler."""
        reply = await self.protocol.front.reply(self._call(), self._route, self._names)
        if reply is not None:
            self.answer(reply)

    def _call(self) -> Call:
        """Return the request as a Call for handlers."""
        scope: AsgiScope = {
            "method": "POST" if self.target.adds else "GET",
            "path": self.target.path.decode("ascii"),
            "query_string": b"",
            "headers": self.headers,
        }
        body_bytes_max = self.protocol.front.body_bytes_max
        call = Call(scope, self._receive, body_bytes_max, self.request_id.decode())
        call.admitted = self.admitted
        return call

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": self.body, "more_body": False}

    def answer(self, reply: Reply) -> None:
        """Send *reply* and complete the request."""
        self.response_complete = True
        if self.disconnected or self.protocol.socket.is_closing():
            return
        status, body, content_type, headers = reply
        if status == HTTPStatus.OK and content_type is JSON and self.keep_alive and not headers:
            self.protocol.send(self, status, _OK % (len(body), self.request_id, body))
            return
        head = _STATUS_LINES[status]
        if status != NO_CONTENT:
            head += b"content-type: %s\r\ncontent-length: %d\r\n" % (content_type, len(body))
        for name, value in headers:
            head += b"%s: %s\r\n" % (name, value)
        head += LABEL % self.request_id
        if not self.keep_alive:
            head += b"connection: close\r\n"
        self.protocol.send(self, status, b"%s\r\n%s" % (head, body))


class FastLane(TimedProtocol):
    """An HTTP connection that answers the hottest routes without ASGI."""

    front: ClassVar[Front]
    service: ClassVar[CounterService]
    #: When the current request began to arrive.
    began_s: float = 0.0
    #: The caller of the last request, its header, and the version of the keys.
    _caller: Caller | None = None
    _authorization: bytes = b""
    #: The last accepted Host header.
    _host: bytes | None = None
    _version: int = -1
    #: Since when a kept-alive connection is idle: uvicorn has no timer for it.
    idle_since_s: float | None = None

    def connection_made(self, transport: Any) -> None:
        #: Replies are written whole, so they need not be put together on their way.
        self.socket = transport
        super().connection_made(transport)

    def check(self, now_s: float) -> None:
        super().check(now_s)
        idle_s = self.idle_since_s
        if (
            idle_s is not None
            and self.waiting_since_s is None
            and now_s - idle_s > self.timeout_keep_alive
        ):
            self.timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        # uvicorn's own preparation is delayed to on_headers_complete, if it is needed.
        self.waiting_since_s = self.began_s = time.monotonic()
        self.idle_since_s = None
        self.head_bytes = self._first_bytes = self._slice_bytes
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        if self.is_spare or self.head_bytes > HEAD_BYTES_MAX:
            self._check_head()
        cycle = self._fast_cycle()
        if cycle is not None:
            self.cycle = cycle  # type: ignore[assignment]
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        cycle: Any = self.cycle
        if type(cycle) is FastCycle and cycle.more_body:
            self.waiting_since_s = None
            cycle.run()
        else:
            super().on_message_complete()

    def _body_bytes(self) -> int:
        cycle: Any = self.cycle
        return len(cycle.body) if type(cycle) is FastCycle and cycle.more_body else 0

    def _fast_cycle(self) -> FastCycle | None:
        """Return a cycle for the parsed head; None if uvicorn must handle the request."""
        if len(self.url) > _PATH_BYTES_MAX:
            return None
        target = _target(self.parser.get_method(), self.url)
        if target is None:
            return None
        busy = self.cycle is not None and not self.cycle.response_complete
        if (
            busy
            or self.draining
            or self.flow.write_paused
            or self.parser.get_http_version() != "1.1"
        ):
            return None
        is_json: bool | None = None
        has_key = False
        authorization = request_id = timeout = None
        for name, value in self.headers:
            if name == b"content-type":
                is_json = value == JSON and is_json is None
            elif name == b"content-length":
                if int(value) > min(_BODY_BYTES_MAX, self.front.body_bytes_max):
                    return None
            elif name == b"host":
                if value != self._host and not self.front.gate.answers(value):
                    return None
                self._host = value
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
        quick = not target.adds or (is_json is True and not has_key)
        quick = quick and not self.front.sees_all
        return FastCycle(self, target, self.headers, authorization, request_id, timeout, quick)

    def caller(self, authorization: bytes | None) -> Caller | None:
        """Return the caller of this header; None if the handler must check and report it."""
        if authorization is None:
            return None
        gate = self.front.gate
        version = gate.ring.version
        if version != self._version or not compare_digest(authorization, self._authorization):
            self._version, self._authorization = version, authorization
            try:
                self._caller = gate.known(authorization)
            except CounterError:
                self._caller = None
        return self._caller

    def start(self, handling: Coroutine[Any, Any, None]) -> None:
        """Run *handling* in a task that shutdown waits for."""
        task = self.loop.create_task(handling)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def send(self, cycle: FastCycle, status: int, reply: bytes) -> None:
        """Send the reply of *cycle*; then close, or continue with the next request."""
        self.socket.write(reply)
        now_s = time.monotonic()
        self.front.tally.answered(_NAMES[cycle.target.adds], status, now_s - cycle.began_s)
        self.server_state.total_requests += 1
        if not cycle.keep_alive or (self.is_deaf and not self.pipeline):
            self.transport.close()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.waiting_since_s is None:
            self.idle_since_s = now_s


def fast_lane(front: Front, service: CounterService) -> type[FastLane]:
    """Return the protocol class that answers the hottest routes of one application."""
    return type("FastLane", (FastLane,), {"front": front, "service": service})
