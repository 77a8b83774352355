"""Do what every request needs: request id, headers, keys, admission, deadlines, observers, tally.

:class:`Pipeline` is the ASGI application around FastAPI's. For a request to ``/v1`` FastAPI's
router finds the route, which calls back :meth:`Pipeline._serve`. The fast lane calls
:meth:`Pipeline.respond` without ASGI.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException

from api.http.answers import problem_response, ttl_header
from api.http.auth import Authorizer, Caller
from api.http.call import (
    AsgiScope,
    Call,
    ClientGoneError,
    Message,
    Receive,
    Response,
    Send,
    counter_of_segment,
    header_of,
)
from api.http.hooks import Ended, NoTally, Observer, RequestTally
from api.http.load_shedding import TIMEOUT_HEADER, LoadShedder
from api.http.response_headers import RequestIds, ResponseHeaders
from api.http.routing import Route
from api.http.streaming import StreamResponse
from counter.core.namespaces import Namespaces
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
#: The route, in metrics, of requests without one: their paths are not bounded in number.
NOWHERE: Final = "other"
#: Pages that show all namespaces.
_GUARDED: Final = frozenset({"/metrics"})
_log = logging.getLogger("counter.api")


class Pipeline:
    """An ASGI app around *site*, which finds *routes* and answers all other requests.

    A request that reaches a handler has passed the *authorizer* (keys and rates), and the *shedder*
    (load shedding) if it writes. Every response has a request id and is counted in *tally*.
    *observers* are called at the start and at the end of each request.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        namespaces: Namespaces,
        site: FastAPI,
        authorizer: Authorizer,
        shedder: LoadShedder,
        *,
        body_bytes_max: int,
        observers: Sequence[Observer] = (),
        tally: RequestTally | None = None,
    ) -> None:
        self.routes: Mapping[str, Route] = {each.name: each for each in routes}
        self._namespaces = namespaces
        self._site = site
        self._page_paths = frozenset(getattr(each, "path", "") for each in site.routes)
        #: FastAPI's handlers need this middleware.
        self._pages = AsyncExitStackMiddleware(site.router)
        self._observers = observers
        self.authorizer = authorizer
        self.shedder = shedder
        self.tally = tally or NoTally()
        self.ids = RequestIds()
        self.body_bytes_max = body_bytes_max
        #: Whether every request must be answered here, because an observer wants to see all.
        self.sees_all = any(each.wants_all for each in observers)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._site(scope, receive, send)
            return
        began_s = time.monotonic()
        path: str = scope["path"]
        headers = ResponseHeaders(self.ids.of(header_of(scope, b"x-request-id")), NOWHERE)

        def answered(route: str, status: int) -> None:
            self.tally.answered(route, status, time.monotonic() - began_s)

        send = headers.put_on(send, path, answered)
        only_head = scope["method"] == "HEAD"
        if only_head:
            # The response to a GET without its body (RFC 9110, 9.3.2).
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        try:
            self.authorizer.check_page(scope["method"], scope["headers"])
            # Compare the decoded path: an encoded letter of /v1/ must not avoid these checks.
            if not path.startswith("/v1/"):
                await self._page(scope, receive, send, headers)
                return
        except CounterError as error:
            await problem_response(error).send(send)
            return
        call = Call(scope, receive, self.body_bytes_max, headers.request_id.decode())
        await self._route(call, receive, send, partial(self._serve, call, headers, only_head))

    async def _page(
        self, scope: AsgiScope, receive: Receive, send: Send, headers: ResponseHeaders
    ) -> None:
        """Have FastAPI answer a request outside of /v1. Raises CounterError."""
        path: str = scope["path"]
        if path in self._page_paths:
            headers.route = f"GET {path}"
        self._check_guarded(path, header_of(scope, b"authorization"))
        try:
            await self._pages({**scope, "app": self._site}, receive, send)
        except HTTPException as error:
            raise self._nothing_at(scope, path, error) from error
        except Exception as error:
            raise known_error(error) from error

    async def _route(
        self, call: Call, receive: Receive, send: Send, serve: Callable[..., Awaitable[None]]
    ) -> None:
        """Have FastAPI's router find the route. FastAPI's own middleware does nothing for these
        requests, and costs more than the router."""
        site, scope = self._site, call.scope
        scope = {**scope, "app": site, "path": _routed_path(scope), "call": call, "serve": serve}
        try:
            await site.router(scope, receive, send)
        except HTTPException as error:
            nothing = self._nothing_at(scope, call.scope["path"], error)
            response = await self.respond(call, nothing, {})
            if response is not None:
                await response.send(send)

    def _nothing_at(self, scope: AsgiScope, path: str, error: HTTPException) -> CounterError:
        """Return the error for a path, or a method on it, that no route has."""
        if error.status_code != HTTPStatus.METHOD_NOT_ALLOWED:
            return NotFoundError(f"there is nothing at {path[:200]!r}")
        routes = [each for each in self.routes.values() if each.path_regex.match(scope["path"])]
        methods = [each.method for each in routes] or ["GET"]
        return MethodNotAllowedError(
            f"the method {scope['method'][:20]} is not supported here; use {' or '.join(methods)}",
            allow=sorted({*methods, "HEAD"} if "GET" in methods else methods),
        )

    def _check_guarded(self, path: str, authorization: bytes | None) -> None:
        """Authorize a request for a page that shows all namespaces. Raises CounterError."""
        if path not in _GUARDED:
            return
        caller = self.authorizer.caller(authorization)
        if caller.key is not None:
            # Without keys all callers share one rate, and a flood must not block the metrics.
            self.authorizer.admit(caller, None, 0)
        caller.require_all_namespaces()

    async def _serve(
        self,
        call: Call,
        headers: ResponseHeaders,
        only_head: bool,
        route: Route,
        scope: AsgiScope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer a request to ``/v1`` by its route's handler."""
        response = await self.respond(call, route, scope["path_params"])
        if call.route is not None:
            headers.route = call.route.name
        if isinstance(response, StreamResponse):
            await response.serve(send, receive, only_head=only_head)
        elif response is not None:
            await response.send(send)

    async def respond(
        self, call: Call, found: Route | CounterError, names: Mapping[str, str]
    ) -> Response | None:
        """Return the response to *call*; None if the client disconnected. *names* are those in the
        path, not decoded."""
        let_in = self._let_in(call, found, names)
        watching = self._watch(call)
        response: Response | None = None
        try:
            if isinstance(let_in, CounterError):
                response = problem_response(let_in)
            else:
                response = await self._answer(call, *let_in)
                if response is not None and call.found is not None and let_in[0].takes_tokens:
                    is_key = not call.key_is_token and call.header(b"idempotency-key") is not None
                    response = response.with_headers(*ttl_header(call.found, is_key=is_key))
        finally:
            # Also after a cancellation, because a span that does not end is never exported.
            for ended in watching:
                ended(response)
        return response

    def show_failure(
        self, call: Call, route: Route, names: Mapping[str, str], response: Response
    ) -> None:
        """Show observers a request that failed and was answered directly."""
        self._let_in(call, route, names)
        for ended in self._watch(call):
            ended(response)

    def _watch(self, call: Call) -> list[Ended]:
        """Return the functions to call at the end of *call*, the last observer's first."""
        began = [each.began(call) for each in self._observers]
        return [ended for ended in reversed(began) if ended is not None]

    def _let_in(
        self, call: Call, found: Route | CounterError, names: Mapping[str, str]
    ) -> tuple[Route, Caller] | CounterError:
        """Return the route and the caller, or why the request is rejected; set the call's names."""
        try:
            # First: a client without a key learns nothing about what exists.
            caller = call.caller = self.authorizer.caller(call.header(b"authorization"))
            try:
                if isinstance(found, CounterError):
                    raise found
                call.route = found
                call.namespace = names.get("namespace", "")
                call.key_id = names.get("key", "")
                if "counter" in names:
                    call.counter = counter_of_segment(names["counter"].encode("latin-1"))
                caller.require(found.scope, call.namespace)
            except CounterError:
                # It counts as a request: otherwise guessing names would avoid the rate limit.
                self.authorizer.admit(caller, None, 0)
                raise
        except CounterError as error:
            return error
        return found, caller

    async def _answer(self, call: Call, route: Route, caller: Caller) -> Response | None:
        name, call.room = call.namespace, self.shedder.bodies
        try:
            if route.writes:
                call.let_in = partial(self.shedder.let_in, call.header(TIMEOUT_HEADER))
            if route.latest or (name and self._namespaces.doubts(name, writes=route.writes)):
                await self._namespaces.reread()
            call.found = self._namespaces.find(name)
            # The namespace's rate does not apply to changes of its settings: otherwise a
            # namespace at its limit could not get a higher one.
            namespace = None if route.latest else call.found
            if not call.admitted:
                self.authorizer.admit(caller, namespace, route.adds)
            call.charge = partial(self.authorizer.charge, caller, namespace)
            call.charge_requests = partial(self.authorizer.charge_requests, caller, namespace)
            return await route.answer(call)
        except NamespaceUnknownError as error:
            return problem_response(await self._unknown(call, error))
        except CounterError as error:
            if call.key_is_token and isinstance(error, TokenTooOldError):
                error.detail += _UUID7_HINT
            return problem_response(error)
        except ClientGoneError:
            return None
        except Exception as error:
            return problem_response(known_error(error))
        finally:
            self.shedder.bodies.give_back(call.held)

    async def _unknown(self, call: Call, error: NamespaceUnknownError) -> CounterError:
        """Return the error if the store, or this process, does not know the call's namespace."""
        try:
            known = self._namespaces.get(call.namespace)
            await self._namespaces.reread()
            again = self._namespaces.get(call.namespace)
        except CounterError as looked:
            return error if isinstance(looked, NamespaceUnknownError) else looked
        if again.id == known.id:
            return error
        return UnavailableError(
            f"namespace {call.namespace!r} was created again just now; send the request again",
            retry_after_us=SECOND,
        )


def known_error(error: Exception) -> CounterError:
    """Return *error* as the client gets it; log it if no code expects it."""
    if isinstance(error, CounterError):
        return error
    _log.error("a request failed unexpectedly", exc_info=error)
    return CounterError("internal error; see the server log")


def _without_body(send: Send) -> Send:
    """Wrap *send*: it sends the heads of responses without their bodies."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


def _routed_path(scope: AsgiScope) -> str:
    """Return the path to match routes with: the raw one, because a name may hold an encoded
    slash."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    parts = raw.partition(b"?")[0].split(b"/")[2:]
    return b"/".join([b"", b"v1", *parts]).decode("latin-1")
