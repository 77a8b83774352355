"""Answer requests: identify, authorise, look up, rate limits, admit, read, handle, respond.

Every request to ``/v1`` passes :meth:`Pipeline.admit` and then its route's handler, whether it came
over ASGI (:meth:`Pipeline.__call__`) or on the fast lane. All other paths are pages, which FastAPI
answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, Protocol

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException

from api.http.auth import Authorizer
from api.http.call import (
    AsgiCall,
    AsgiScope,
    Call,
    ClientGoneError,
    Message,
    Receive,
    RequestIds,
    Send,
    Target,
    Ttls,
    counter_of_segment,
    first_values,
)
from api.http.load_shedding import LoadShedder
from api.http.responses import (
    COMMON_HEADERS,
    Response,
    page_headers,
    problem_response,
    ttl_header,
)
from api.http.routing import Route
from counter.core.namespaces import Namespaces
from counter.errors import (
    CounterError,
    InvalidParameterError,
    MethodNotAllowedError,
    NamespaceUnknownError,
    NotFoundError,
    TokenTooOldError,
    UnavailableError,
)
from counter.limits import SECOND
from counter.types import Namespace

#: Called with the response of a request, or with None if its client disconnected.
Ended = Callable[[Response | None], None]

_UUID7_HINT: Final = (
    "; the Idempotency-Key was read as a UUIDv7, whose time is part of it: prefix ids that only"
    " look like one, for example order:<id>"
)
#: The route, in metrics, of requests without one: their paths are not bounded in number.
NOWHERE: Final = "other"
#: Pages that show all namespaces.
_GUARDED: Final = frozenset({"/metrics"})
#: HAProxy asks by OPTIONS unless it is configured otherwise.
_HEALTH_CHECKS: Final = frozenset({("OPTIONS", "/healthz"), ("OPTIONS", "/readyz")})
#: Targets of longer paths are not cached.
PATH_BYTES_MAX: Final = 512
#: Targets that are cached, at most 2 KB each; each counter has its own.
_TARGETS_MAX: Final = 16_384
#: Namespaces whose headers are cached.
_TTLS_MAX: Final = 1_000
_log = logging.getLogger("counter.api")


class Observer(Protocol):
    """Observe requests to ``/v1``, in the task that answers them."""

    #: Whether it must see every request; otherwise it sees only failures on the fast lane.
    wants_all: bool

    def begin(self, call: Call) -> Ended | None:
        """Observe the start of a request, before its caller is known. Return a function to call at
        its end."""
        ...


class RequestTally(Protocol):
    """Count responses."""

    def count(self, route: str, status: int, took_s: float) -> None:
        """Count a request to *route* (a template such as "GET /v1/...") with *status*, answered
        *took_s* after it began to arrive. On the hot path: it must cost almost nothing."""
        ...


class Pipeline:
    """An ASGI app around *site*, which documents *routes* and answers all other requests.

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
        tally: RequestTally,
        *,
        body_bytes_max: int,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.routes: Mapping[str, Route] = {each.name: each for each in routes}
        #: By the number of slashes in their paths: a name has none.
        self._routes_of: dict[int, list[Route]] = {}
        for each in routes:
            self._routes_of.setdefault(each.path.count("/"), []).append(each)
        self._namespaces = namespaces
        self._site = site
        self._page_paths = frozenset(getattr(each, "path", "") for each in site.routes)
        #: FastAPI's handlers need this middleware.
        self._pages = AsyncExitStackMiddleware(site.router)
        self._observers = observers
        #: Returns what a method and a path, which is not decoded, are for.
        self.target_of = lru_cache(maxsize=_TARGETS_MAX)(self._find_target)
        self._ttls: dict[int, Ttls] = {}
        self.authorizer = authorizer
        self.shedder = shedder
        self.tally = tally
        self.ids = RequestIds()
        self.body_bytes_max = body_bytes_max
        #: Whether an observer wants all requests, so that none is answered on the fast lane.
        self.sees_all = any(each.wants_all for each in observers)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._site(scope, receive, send)
            return
        began_s = time.monotonic()
        # The decoded path: an encoded letter of /v1/ must not avoid these checks.
        if not scope["path"].startswith("/v1/"):
            await self._answer_page(scope, receive, send, began_s)
            return
        # The response to a HEAD is that to a GET without its body (RFC 9110, 9.3.2).
        is_head = scope["method"] == "HEAD"
        path = scope.get("raw_path") or scope["path"].encode()
        find = self.target_of if len(path) <= PATH_BYTES_MAX else self._find_target
        target = find("GET" if is_head else scope["method"], path)
        call = AsgiCall(target, scope, receive, self.ids, self.body_bytes_max)
        response = await self.respond(call)
        if response is not None:
            name = NOWHERE if target.route is None else target.route.name
            self.tally.count(name, response.status, time.monotonic() - began_s)
            response = response.with_headers((b"x-request-id", call.id), *COMMON_HEADERS)
            await response.send(send, receive, only_head=is_head)

    def _find_target(self, method: str, path: bytes) -> Target:
        # Names may hold encoded slashes, and a letter of /v1 may be encoded.
        parts = path.partition(b"?")[0].split(b"/")[2:]
        routed = b"/".join([b"/v1", *parts]).decode("latin-1")
        allowed: list[str] = []
        for route in self._routes_of.get(routed.count("/"), ()):
            found = route.path_regex.match(routed)
            if found is not None and route.method == method:
                return _target_of(route, found.groupdict())
            if found is not None:
                allowed.append(route.method)
        return Target(method, None, refusal=partial(_nothing_at, routed, method, allowed))

    async def respond(self, call: Call) -> Response | None:
        """Return the response to *call*; None if the client disconnected."""
        ended = [end for each in self._observers if (end := each.begin(call)) is not None]
        response: Response | None = None
        try:
            response = await self._handle(call)
        finally:
            # Also after a cancellation, because a span that does not end is never exported.
            for end in reversed(ended):
                end(response)
        return response

    async def _handle(self, call: Call) -> Response | None:
        route: Any = call.route
        call.shedder = self.shedder
        try:
            if not (call.is_admitted or self.admit(call)):
                await self._namespaces.reread()
                self.admit(call, is_fresh=True)
            # Of a write, load shedding comes between reading the body and parsing it: Call.body().
            arguments = await route.read(call)
            result = await route.handler(call, **arguments)
            response = result if isinstance(result, Response) else Response.json(result)
        except ClientGoneError:
            return None
        except Exception as error:
            response = await self.response_to(error, call)
        finally:
            self.shedder.bodies.give_back(call.held)
        if call.ttls is None:
            return response
        has_key = not call.key_is_token and b"idempotency-key" in call.first
        is_key = route.by_key or has_key
        return response.with_headers(*(call.ttls.of_key if is_key else call.ttls.of_token))

    def admit(self, call: Call, *, is_fresh: bool = False) -> bool:
        """Identify and authorise the caller, look the namespace up, and charge the request to the
        rate limits: in this order, so that a client without a key learns nothing about what exists.

        Return False if the directory of namespaces must be read first: then read it, and call this
        again with *is_fresh*. Raises CounterError.
        """
        # A target without a route has a refusal.
        route: Any = call.route
        caller = call.caller = self.authorizer.identify(call.target.method, call.first, call.memory)
        try:
            if call.target.refusal is not None:
                raise call.target.refusal()
            caller.require(route.scope, call.namespace)
        except CounterError:
            # It counts as a request: otherwise guessing names would avoid the rate limit.
            caller.admit(None, 0)
            raise
        name = call.namespace
        if not is_fresh and (
            route.latest or (name and self._namespaces.needs_reread(name, writes=route.writes))
        ):
            return False
        call.known_namespace = self._namespaces.find(name)
        # The namespace's rate does not apply to changes of its settings: otherwise a namespace at
        # its limit could not get a higher one.
        call.rated = None if route.latest else call.known_namespace
        if route.takes_tokens and call.known_namespace is not None:
            ttls = self._ttls.get(call.known_namespace.id)
            is_known = ttls is not None and ttls.namespace is call.known_namespace
            call.ttls = ttls if is_known else self._new_ttls(call.known_namespace)
        caller.admit(call.rated, route.adds)
        call.is_admitted = True
        return True

    async def response_to(self, error: Exception, call: Call) -> Response:
        """Return the response to a *call* that failed with *error*."""
        if call.is_admitted and isinstance(error, NamespaceUnknownError):
            error = await self._unknown(call, error)
        if call.key_is_token and isinstance(error, TokenTooOldError):
            error.detail += _UUID7_HINT
        return problem_response(known_error(error))

    async def _unknown(self, call: Call, error: NamespaceUnknownError) -> CounterError:
        """Return the error if the store, or this process, does not know the call's namespace."""
        try:
            known = self._namespaces.get(call.namespace)
            await self._namespaces.reread()
            again = self._namespaces.get(call.namespace)
        except CounterError as found:
            return error if isinstance(found, NamespaceUnknownError) else found
        if again.id == known.id:
            return error
        return UnavailableError(
            f"namespace {call.namespace!r} was created again just now; send the request again",
            retry_after_us=SECOND,
        )

    def _new_ttls(self, namespace: Namespace) -> Ttls:
        if len(self._ttls) >= _TTLS_MAX:
            self._ttls.clear()
        headers = (ttl_header(namespace, is_key=each) for each in (False, True))
        ttls = self._ttls[namespace.id] = Ttls(namespace, *headers)
        return ttls

    def report_failure(self, call: Call, response: Response) -> None:
        """Let observers see a request that failed and was answered on the fast lane."""
        for observer in self._observers:
            if (end := observer.begin(call)) is not None:
                end(response)

    async def _answer_page(
        self, scope: AsgiScope, receive: Receive, send: Send, began_s: float
    ) -> None:
        """Have FastAPI answer a request outside of ``/v1``."""
        path: str = scope["path"]
        first = first_values(scope["headers"])
        is_head = scope["method"] == "HEAD"
        route = f"GET {path}" if path in self._page_paths else NOWHERE
        more = [(b"x-request-id", self.ids.of(first)), *COMMON_HEADERS, *page_headers(path)]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.tally.count(route, message["status"], time.monotonic() - began_s)
                given = {name for name, _ in message["headers"]}
                added = [each for each in more if each[0] not in given]
                message = {**message, "headers": [*message["headers"], *added]}
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        try:
            self.authorizer.check_origin(scope["method"], first)
            self._check_guarded(path, first)
            is_get = is_head or (scope["method"], path) in _HEALTH_CHECKS
            method = "GET" if is_get else scope["method"]
            page_scope = {**scope, "method": method, "app": self._site}
            await self._pages(page_scope, receive, send_with_headers)
        except HTTPException as error:
            is_known = error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
            failure = _nothing_at(path, scope["method"], ["GET"] if is_known else [])
            await problem_response(failure).send(send_with_headers, receive)
        except Exception as error:
            await problem_response(known_error(error)).send(send_with_headers, receive)

    def _check_guarded(self, path: str, first: Mapping[bytes, bytes]) -> None:
        """Authorize a request for a page that shows all namespaces. Raises CounterError."""
        if path not in _GUARDED:
            return
        caller = self.authorizer.caller(first.get(b"authorization"))
        if caller.key is not None:
            # Without keys all callers share one rate, and a flood must not block the metrics.
            caller.admit(None, 0)
        caller.require_all_namespaces()


def known_error(error: Exception) -> CounterError:
    """Return *error* as the client gets it; log it if no code expects it."""
    if isinstance(error, CounterError):
        return error
    _log.error("a request failed unexpectedly", exc_info=error)
    return CounterError("internal error; see the server log")


def _target_of(route: Route, names: Mapping[str, str]) -> Target:
    """Return the target of a request to *route* with *names* in its path, which are not decoded."""
    namespace, item = names.get("namespace", ""), names.get("key") or names.get("hold") or ""
    counter, refusal = "", None
    if "counter" in names:
        try:
            counter = counter_of_segment(names["counter"].encode("latin-1"))
        except InvalidParameterError as error:
            refusal = partial(InvalidParameterError, error.detail, **error.fields)
    return Target(route.method, route, namespace, counter, item, refusal)


def _nothing_at(path: str, method: str, allowed: Sequence[str]) -> CounterError:
    """Return the error for a path, or a *method* on it, that no route has."""
    if not allowed:
        return NotFoundError(f"there is nothing at {path[:200]!r}")
    return MethodNotAllowedError(
        f"the method {method[:20]} is not supported here; use {' or '.join(allowed)}",
        allow=sorted({*allowed, "HEAD"} if "GET" in allowed else allowed),
    )
