"""What every answer carries besides its own: a request id, and how it may be treated.

The request id stands in the answer and in every log: the client's own, or one made here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from itertools import count
from typing import Final

from api.http.call import Message, Send
from counter.limits import REQUEST_ID_CHARS_MAX

#: A count is true at its instant only, and no answer is anything but what its type says.
PLAIN: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
#: The same in a head that is written by hand, with a place for the request id.
LABEL: Final = b"x-request-id: %s\r\n" + b"".join(b"%s: %s\r\n" % each for each in PLAIN)
#: The page of the documentation starts itself by a script of its own.
_DOCS_POLICY: Final = (
    b"default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline';"
    b" img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_POLICY: Final = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
_FRAMED: Final = ((b"referrer-policy", b"no-referrer"), (b"x-frame-options", b"DENY"))


class RequestIds:
    """Makes names that no other process makes."""

    __slots__ = ("new",)

    def __init__(self) -> None:
        name = secrets.token_hex(6).encode() + b"%08x"
        #: Returns the next name.
        self.new: Callable[[], bytes] = map(name.__mod__, count()).__next__

    def of(self, given: bytes | None) -> bytes:
        """What the client gave as X-Request-Id if it can stand in a header and in a log: 1 to
        REQUEST_ID_CHARS_MAX visible ASCII characters. Else a new name."""
        if given and len(given) <= REQUEST_ID_CHARS_MAX and given.isascii():
            text = given.decode("ascii")
            if text.isprintable() and " " not in text:
                return given
        return self.new()


class Label:
    """The label of one answer."""

    __slots__ = ("request_id", "route")

    def __init__(self, request_id: bytes, route: str) -> None:
        self.request_id = request_id
        #: What the request is counted as.
        self.route = route

    def put_on(self, send: Send, path: str, answered: Callable[[str, int], None]) -> Send:
        """*send* with the label on the head of the answer; headers that are there already stay.
        *answered* is called with the route and the status."""

        async def send_labelled(message: Message) -> None:
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

        return send_labelled
