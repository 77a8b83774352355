"""Cross-origin requests of browsers: only from the origins in the settings.

Callers are identified by their key and never by a cookie, so no response allows credentials, and
there is no wildcard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from api.http.call import NO_CONTENT, App, AsgiScope, Message, Receive, Send, first_values
from api.http.responses import Response

_METHODS: Final = b"GET, HEAD, POST, PUT, DELETE"
_SENT: Final = (
    b"authorization, baggage, ce-dataschema, ce-id, ce-source, ce-specversion, ce-subject, ce-time,"
    b" ce-type, content-type, idempotency-key, if-match, if-none-match, prefer,"
    b" request-timeout, traceparent, tracestate, x-request-id"
)
_SHOWN: Final = (
    b"etag, idempotency-replayed, idempotency-ttl, preference-applied, ratelimit,"
    b" ratelimit-policy, retry-after, x-request-id"
)
#: How long a browser may cache the permissions.
_REMEMBERED_S: Final = b"600"
#: A cached response to one origin must not be used for another.
_VARY: Final = (b"vary", b"origin")


class Cors:
    """An ASGI app around *app* that adds CORS headers for *origins*."""

    def __init__(self, app: App, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(each.encode("ascii") for each in origins)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        first = first_values(scope["headers"])
        origin = first.get(b"origin")
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in first:
            await self._preflight(origin).send(send, receive)
            return
        allowed = [_VARY]
        if origin is not None and origin in self._origins:
            allowed = [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", _SHOWN),
                _VARY,
            ]

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        await self._app(scope, receive, send_allowed)

    def _preflight(self, origin: bytes | None) -> Response:
        """Return the response to a preflight request. An origin that is not listed gets no
        permissions, so its browser sends nothing."""
        if origin is None or origin not in self._origins:
            return Response(NO_CONTENT, b"", headers=(_VARY,))
        return Response(
            NO_CONTENT,
            b"",
            headers=(
                (b"access-control-allow-origin", origin),
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", _SENT),
                (b"access-control-max-age", _REMEMBERED_S),
                _VARY,
            ),
        )
