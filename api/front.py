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
from api.call import Call, ClientGoneError, Receive, Reply, Scope, Send, counter_of_segment
from counter.errors import (
    CounterError,
    MethodNotAllowedError,
    NotFoundError,
    TokenTooOldError,
)

Handler = Callable[[Call], Awaitable[Reply]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_UUID7_HINT = (
    "; the Idempotency-Key was read as a UUIDv7, whose time is part of it: prefix ids that only"
    " look like one, for example order:<id>"
)
_log = logging.getLogger("counter.api")


@dataclass(frozen=True, slots=True)
class Route:
    """One route: ``path`` with ``{ns}`` and ``{c}`` for a namespace and a counter."""

    method: str
    path: str
    handler: Handler


class Front:
    """An ASGI app that answers ``/v1`` itself and hands the rest to *rest*."""

    def __init__(self, routes: list[Route], rest: App, *, body_bytes_max: int) -> None:
        self._rest = rest
        self._body_bytes_max = body_bytes_max
        # By the path's shape: how many segments, and those that are fixed.
        self._by_shape: dict[tuple[bytes, ...], dict[str, Handler]] = {}
        for route in routes:
            shape = _shape(route.path.encode().split(b"/")[2:])
            self._by_shape.setdefault(shape, {})[route.method] = route.handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
            return
        # The decoded path tells whose it is, or an encoded letter of /v1/ would lead past here.
        if not scope["path"].startswith("/v1/"):
            await self._rest(scope, receive, send)
            return
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        call = Call(scope, receive, self._body_bytes_max)
        try:
            handler = self._handler(call, raw_path.partition(b"?")[0].split(b"/")[2:])
            reply = await handler(call)
        except CounterError as error:
            if call.key_is_token and isinstance(error, TokenTooOldError):
                error.detail += _UUID7_HINT
            reply = problem_reply(error)
        except ClientGoneError:
            return
        except Exception:
            _log.exception("a request failed in a way that it should not")
            reply = problem_reply(CounterError("the service met a fault of its own; see its log"))
        await reply.send(send)

    def _handler(self, call: Call, parts: list[bytes]) -> Handler:
        """The handler of a path, with the call's namespace and counter set."""
        count = len(parts)
        methods = self._by_shape.get(_shape(parts))
        if methods is None:
            raise NotFoundError(f"there is nothing at {call.scope['path'][:200]!r}")
        method: str = call.scope["method"]
        handler = methods.get(method)
        if handler is None:
            raise MethodNotAllowedError(
                f"the method {method[:20]} is not supported here; use {' or '.join(methods)}",
                allow=sorted(methods),
            )
        if count > 1:
            call.namespace = parts[1].decode("latin-1")
        if count > 3 and parts[2] == b"counters":
            call.counter = counter_of_segment(parts[3])
        return handler


def _shape(parts: list[bytes]) -> tuple[bytes, ...]:
    """*parts* with what names a namespace or a counter taken out."""
    count = len(parts)
    if count < 2:
        return tuple(parts)
    if count > 3 and parts[2] == b"counters":
        return (parts[0], b"", b"counters", b"", *parts[4:])
    return (parts[0], b"", *parts[2:])
