"""The router of ``/v1``: from the raw path straight to a handler.

It works on the *raw* path because a counter's name may hold a percent-encoded slash, which a router
that decodes first cannot tell from a real one; and a look-up in two dictionaries costs far less
than trying regular expressions in turn. Everything else goes on to the framework.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from api.answers import problem_reply
from api.call import (
    Call,
    ClientGoneError,
    Message,
    Receive,
    Reply,
    Scope,
    Send,
    counter_of_segment,
)
from counter.errors import (
    CounterError,
    MethodNotAllowedError,
    NamespaceUnknownError,
    NotFoundError,
    TokenTooOldError,
    UnavailableError,
)
from counter.limits import SECOND
from counter.namespaces import Namespaces

Handler = Callable[[Call], Awaitable[Reply]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_UUID7_HINT = (
    "; the Idempotency-Key was read as a UUIDv7, whose time is part of it: prefix ids that only"
    " look like one, for example order:<id>"
)
_log = logging.getLogger("counter.api")


@dataclass(frozen=True, slots=True)
class Route:
    """One route: ``path`` with ``{ns}`` and ``{c}`` for a namespace and a counter.

    One that *writes* events wants a fresh copy of the namespace's settings; one that shows or
    changes them, the *latest*.
    """

    method: str
    path: str
    handler: Handler
    writes: bool = False
    latest: bool = False


class Front:
    """An ASGI app that answers ``/v1`` itself and hands the rest to *rest*."""

    def __init__(
        self, routes: list[Route], namespaces: Namespaces, rest: App, *, body_bytes_max: int
    ) -> None:
        self._namespaces = namespaces
        self._rest = rest
        self.body_bytes_max = body_bytes_max
        # By the path's shape: how many segments, and those that are fixed.
        self._by_shape: dict[tuple[bytes, ...], dict[str, Route]] = {}
        for route in routes:
            shape = _shape(route.path.encode().split(b"/")[2:])
            self._by_shape.setdefault(shape, {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # What a GET would answer, without its body (RFC 9110, 9.3.2).
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        # The decoded path tells whose it is, or an encoded letter of /v1/ would lead past here.
        if not scope["path"].startswith("/v1/"):
            await self._rest(scope, receive, send)
            return
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        call = Call(scope, receive, self.body_bytes_max)
        reply = await self.reply(call, raw_path.partition(b"?")[0].split(b"/")[2:])
        if reply is not None:
            await reply.send(send)

    async def reply(self, call: Call, parts: list[bytes]) -> Reply | None:
        """The answer to *call* at a path of *parts*; None where nobody waits for it any more."""
        try:
            route = self._route(call, parts)
            name = call.namespace
            if route.latest or (name and self._namespaces.doubts(name, writes=route.writes)):
                await self._namespaces.look()
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
        """The route of a path, with the call's namespace and counter set."""
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
