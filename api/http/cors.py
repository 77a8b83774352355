"""Cross-origin requests of browsers: only from the origins in the settings.

Callers are identified by their key and never by a cookie, so no answer allows credentials, and
there is no wildcard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from api.http.call import NO_CONTENT, Message, Receive, Reply, Send
from api.http.middleware import App

Headers = Iterable[tuple[bytes, bytes]]

_METHODS: Final = b"GET, HEAD, POST, PUT, DELETE"
_SENT: Final = (
    b"authorization, content-type, idempotency-key, if-match, if-none-match, request-timeout,"
    b" traceparent, tracestate, x-request-id"
)
_SHOWN: Final = (
    b"etag, idempotency-replayed, ratelimit, ratelimit-policy, retry-after, x-request-id"
)
#: How long a browser may cache the permissions.
_REMEMBERED_S: Final = b"600"
#: A cached answer to one origin must not be used for another.
_VARY: Final = (b"vary", b"origin")


class Cors:
    """The *origins* whose pages may read answers."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(each.encode("ascii") for each in origins)

    def headers_for(self, origin: bytes | None) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers of an answer to *origin*."""
        if origin not in self._origins:
            return (_VARY,)
        return (
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _SHOWN),
            _VARY,
        )

    def preflight(self, method: str, headers: Headers) -> Reply | None:
        """Return the answer to a preflight request; None for any other request.

        An origin that is not listed gets no permissions, so its browser sends nothing.
        """
        if method != "OPTIONS" or _value(headers, b"access-control-request-method") is None:
            return None
        origin = _value(headers, b"origin")
        if origin not in self._origins:
            return Reply(NO_CONTENT, b"", headers=(_VARY,))
        return Reply(
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


def with_cors(app: App, cors: Cors) -> App:
    """Wrap *app*: its answers say which origins may read them."""

    async def answer(scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        reply = cors.preflight(scope["method"], scope["headers"])
        if reply is not None:
            await reply.send(send)
            return
        allowed = cors.headers_for(_value(scope["headers"], b"origin"))

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        await app(scope, receive, tell)

    return answer


def _value(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)
