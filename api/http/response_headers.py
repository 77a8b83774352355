"""Headers of every response: a request id, and rules for caches and browsers.

The request id is in the response and in every log line: the client's own, or a generated one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import count
from typing import Final

from api.http.call import Message, Send
from counter.limits import REQUEST_ID_CHARS_MAX

#: A count is true only at its instant, and browsers must not guess types.
PLAIN: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
#: The same as bytes of a head, with a place for the request id.
COMMON_HEADERS: Final = b"x-request-id: %s\r\n" + b"".join(b"%s: %s\r\n" % each for each in PLAIN)
#: The documentation page starts with an inline script.
_DOCS_POLICY: Final = (
    b"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
    b" img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_POLICY: Final = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
_FRAMED: Final = ((b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"))


class RequestIds:
    """Generate ids that are unique across processes."""

    __slots__ = ("new",)

    def __init__(self) -> None:
        name = secrets.token_hex(6).encode() + b"%08x"
        #: Returns the next id.
        self.new: Callable[[], bytes] = map(name.__mod__, count()).__next__

    def of(self, given: bytes | None) -> bytes:
        """Return the client's X-Request-Id if it has 1 to REQUEST_ID_CHARS_MAX visible ASCII
        characters; otherwise a new id."""
        if given and len(given) <= REQUEST_ID_CHARS_MAX and given.isascii():
            text = given.decode("ascii")
            if text.isprintable() and " " not in text:
                return given
        return self.new()


class ResponseHeaders:
    """The headers that every response has."""

    __slots__ = ("request_id", "route")

    def __init__(self, request_id: bytes, route: str) -> None:
        self.request_id = request_id
        #: The route for metrics.
        self.route = route

    def put_on(self, send: Send, path: str, answered: Callable[[str, int], None]) -> Send:
        """Wrap *send* to add the headers to the response; existing ones stay. *answered* is called
        with the route and the status."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered(self.route, message["status"])
                headers = list(message["headers"])
                given = {name for name, _ in headers}
                ours = [(b"x-request-id", self.request_id), *PLAIN]
                if not path.startswith("/v1/"):
                    policy = _DOCS_POLICY if path == "/docs" else _POLICY
                    ours += [*_FRAMED, (b"content-security-policy", policy)]
                headers += [each for each in ours if each[0] not in given]
                message = {**message, "headers": headers}
            await send(message)

        return send_with_headers
