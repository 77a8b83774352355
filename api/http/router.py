"""The router of ``/v1``: from the raw path straight to a handler.

It works on the *raw* path because a counter's name may hold a percent-encoded slash, which a router
that decodes first cannot tell from a real one; and a look-up in two dictionaries costs far less
than trying regular expressions in turn. Everything else goes on to the framework.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from api.http.answers import problem_reply
from api.http.auth import Caller, Gate
from api.http.call import (
    AsgiScope,
    Call,
    ClientGoneError,
    Message,
    Receive,
    Reply,
    Route,
    Send,
    counter_of_segment,
    header_of,
)
from api.http.hooks import Ended, NoTally, Observer, RequestTally
from api.http.load_shedding import TIMEOUT_HEADER, Door
from api.http.response_headers import Label, RequestIds
from api.http.streaming import StreamReply
from counter.core.namespaces import Namespaces
from counter.core.rate_limits import ALLOWANCE
from counter.errors import (
    CounterError,
    MethodNotAllowedError,
    NamespaceUnknownError,
    NotFoundError,
    TokenTooOldError,
    UnavailableError,
)
from counter.limits import SECOND

App = Callable[[AsgiScope, Receive, Send], Awaitable[None]]

_UUID7_HINT = (
    "; the Idempotency-Key was read as a UUIDv7, whose time is part of it: prefix ids that only"
    " look like one, for example order:<id>"
)
#: What requests that lead nowhere are tallied as: their paths are as many as clients like.
NOWHERE: Final = "other"
#: Pages that tell of all namespaces.
_GUARDED: Final = frozenset({"/metrics"})
_PAGES: Final = _GUARDED | {
    "/healthz",
    "/readyz",
    "/docs",
    "/openapi.json",
    "/problems",
    "/console",
}
_log = logging.getLogger("counter.api")


class Front:
    """An ASGI app that answers ``/v1`` itself and hands the rest to *rest*.

    What goes on to a route has passed the *gate*, and the *door* where it writes. Every answer
    carries a request id and is counted in *tally*; *observers* look on.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        namespaces: Namespaces,
        rest: App,
        gate: Gate,
        door: Door,
        *,
        body_bytes_max: int,
        observers: Sequence[Observer] = (),
        tally: RequestTally | None = None,
    ) -> None:
        self.routes = routes
        self._namespaces = namespaces
        self._rest = rest
        self._observers = observers
        self.gate = gate
        self.door = door
        self.tally = tally or NoTally()
        self.ids = RequestIds()
        self.body_bytes_max = body_bytes_max
        #: Whether no request may be answered before it comes here.
        self.sees_all = any(each.wants_all for each in observers)
        # By the path's shape: how many segments, and those that are fixed.
        self._by_shape: dict[tuple[bytes, ...], dict[str, Route]] = {}
        for route in routes:
            shape = _shape(route.path.encode().split(b"/")[2:])
            self._by_shape.setdefault(shape, {})[route.method] = route

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        began_s = time.monotonic()
        label = Label(self.ids.of(header_of(scope, b"x-request-id")))
        send = label.put_on(send, scope["path"])
        only_head = scope["method"] == "HEAD"
        if only_head:
            # What a GET would answer, without its body (RFC 9110, 9.3.2).
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        try:
            self.gate.check_page(scope["method"], scope["headers"])
        except CounterError as error:
            await problem_reply(error).send(send)
            self.tally.answered(NOWHERE, error.status, time.monotonic() - began_s)
            return
        # The decoded path tells whose it is, or an encoded letter of /v1/ would lead past here.
        if scope["path"].startswith("/v1/"):
            raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
            call = Call(scope, receive, self.body_bytes_max, label.request_id.decode())
            reply = await self.reply(call, raw_path.partition(b"?")[0].split(b"/")[2:])
            if reply is None:
                return
            route = NOWHERE if call.route is None else call.route.name
            if isinstance(reply, StreamReply):
                # It took as long as its first piece did: the rest is time that nobody waits.
                self.tally.answered(route, reply.status, time.monotonic() - began_s)
                await reply.serve(send, receive, only_head=only_head)
                return
            await reply.send(send)
        else:
            route = await self._show(scope, receive, send)
        self.tally.answered(route, label.status, time.monotonic() - began_s)

    async def _show(self, scope: AsgiScope, receive: Receive, send: Send) -> str:
        """Answer what is not of ``/v1``; the page's name for the tally."""
        path: str = scope["path"]
        if path in _GUARDED:
            try:
                caller = self.gate.caller(header_of(scope, b"authorization"))
                if caller.key is not None:
                    # Without keys all share one rate, and a flood must not hide itself.
                    self.gate.admit(caller, None, 0)
                caller.require_all_namespaces()
            except CounterError as error:
                await problem_reply(error).send(send)
                return f"GET {path}"
        await self._rest(scope, receive, send)
        return f"GET {path}" if path in _PAGES else NOWHERE

    async def reply(self, call: Call, parts: list[bytes]) -> Reply | None:
        """The answer to *call* at a path of *parts*; None where nobody waits for it any more."""
        found = self._let_in(call, parts)
        watching = self._watch(call)
        reply: Reply | None = None
        try:
            if isinstance(found, CounterError):
                reply = problem_reply(found)
            else:
                reply = await self._answer(call, *found)
        finally:
            # Where it is cancelled, too: a span that does not end is never told.
            for ended in watching:
                ended(reply)
        return reply

    def show_failure(self, call: Call, parts: list[bytes], reply: Reply) -> None:
        """Have observers see a request that was answered directly, and failed."""
        self._let_in(call, parts)
        for ended in self._watch(call):
            ended(reply)

    def _watch(self, call: Call) -> list[Ended]:
        """Whom to tell how *call* ends, the last one to look on first."""
        began = [each.began(call) for each in self._observers]
        return [ended for ended in reversed(began) if ended is not None]

    def _let_in(self, call: Call, parts: list[bytes]) -> tuple[Route, Caller] | CounterError:
        """The route and the caller of *call*, or why it may not come in."""
        try:
            # First of all: who has no key learns nothing of what there is.
            caller = call.caller = self.gate.caller(call.header(b"authorization"))
            try:
                route = self._route(call, parts)
                caller.require(route.scope, call.namespace)
            except CounterError:
                # It is a request all the same: else names could be guessed at past every rate.
                self.gate.admit(caller, None, 0)
                raise
        except CounterError as error:
            return error
        return route, caller

    async def _answer(self, call: Call, route: Route, caller: Caller) -> Reply | None:
        name, call.room = call.namespace, self.door.bodies
        try:
            if route.writes:
                call.receive = self.door.guarded(call.receive, call.header(TIMEOUT_HEADER))
            if route.latest or (name and self._namespaces.doubts(name, writes=route.writes)):
                await self._namespaces.look()
            # Who changes what a namespace may have is not held up by those who have had all of it.
            namespace = None if route.latest else self._namespaces.find(name)
            if not call.admitted:
                self.gate.admit(caller, namespace, route.adds)
            call.charge = partial(self.gate.charge, caller, namespace)
            ALLOWANCE.set(caller)
            return await route.handler(call)
        except NamespaceUnknownError as error:
            return problem_reply(await self._unknown(call, error))
        except CounterError as error:
            if call.key_is_token and isinstance(error, TokenTooOldError):
                error.detail += _UUID7_HINT
            return problem_reply(error)
        except ClientGoneError:
            return None
        except Exception:
            _log.exception("a request failed in a way that it should not")
            return problem_reply(CounterError("the service met a fault of its own; see its log"))
        finally:
            self.door.bodies.give_back(call.held)

    async def _unknown(self, call: Call, error: NamespaceUnknownError) -> CounterError:
        """What to say where the store, or this process, does not know the call's namespace."""
        try:
            known = self._namespaces.get(call.namespace)
            await self._namespaces.look()
            again = self._namespaces.get(call.namespace)
        except CounterError as looked:
            return error if isinstance(looked, NamespaceUnknownError) else looked
        if again.id == known.id:
            return error
        return UnavailableError(
            f"namespace {call.namespace!r} was created anew just now; send the request again",
            retry_after_us=SECOND,
        )

    def _route(self, call: Call, parts: list[bytes]) -> Route:
        """The route of a path; it, and the path's namespace and counter, become the call's."""
        count = len(parts)
        methods = self._by_shape.get(_shape(parts))
        if methods is None:
            raise NotFoundError(f"there is nothing at {call.scope['path'][:200]!r}")
        method: str = call.scope["method"]
        route = methods.get(method)
        if route is None:
            raise MethodNotAllowedError(
                f"the method {method[:20]} is not supported here; use {' or '.join(methods)}",
                allow=sorted({*methods, "HEAD"} if "GET" in methods else methods),
            )
        call.route = route
        if count > 1:
            call.namespace = parts[1].decode("latin-1")
        if count > 3 and parts[2] == b"counters":
            call.counter = counter_of_segment(parts[3])
        return route


def _without_body(send: Send) -> Send:
    """*send* with the bodies of answers left out; their heads stay as they are."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


def _shape(parts: list[bytes]) -> tuple[bytes, ...]:
    """*parts* with what names a namespace or a counter taken out."""
    count = len(parts)
    if count < 2:
        return tuple(parts)
    if count > 3 and parts[2] == b"counters":
        return (parts[0], b"", b"counters", b"", *parts[4:])
    return (parts[0], b"", *parts[2:])
