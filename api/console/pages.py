"""Serve the page at /console and its files from this package, without a build step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

from api.http.call import AsgiScope, Receive, Send, first_values
from api.http.responses import Response
from counter.errors import MethodNotAllowedError, NotFoundError

PATH: Final = "/console"
#: The page loads only this package's files and connects only to this service.
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    b" img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES: Final[Mapping[str, bytes]] = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_INDEX: Final = "index.html"


class Console:
    """The ASGI application of the page and its files."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        await console_response(scope).send(send, receive)


def console_response(scope: AsgiScope) -> Response:
    """Answer a request for the page or one of its files. Raises NotFoundError and
    MethodNotAllowedError."""
    path: str = scope["path"]
    if scope["method"] != "GET":
        detail = f"the method {scope['method'][:20]} is not supported here; use GET"
        raise MethodNotAllowedError(detail, allow=["GET", "HEAD"])
    if path == f"{PATH}/":
        # Relative, so that it works behind a proxy with a path prefix.
        return Response(308, b"", b"text/plain", ((b"location", b"../console"),))
    found = files().get(_INDEX if path == PATH else path.removeprefix(f"{PATH}/"))
    if found is None:
        raise NotFoundError(f"there is nothing at {path[:200]!r}")
    headers = found.headers
    if found.headers[0][1] in (first_values(scope["headers"]).get(b"if-none-match", b"")):
        return Response(304, b"", found.content_type, headers)
    return found


@cache
def files() -> Mapping[str, Response]:
    """Return every file of the page by its path below /console, read once."""
    return dict(_responses(resources.files("api.console") / "static", ""))


def _responses(folder: Traversable, prefix: str) -> list[tuple[str, Response]]:
    found: list[tuple[str, Response]] = []
    for each in folder.iterdir():
        name = f"{prefix}{each.name}"
        if each.is_dir():
            found += _responses(each, f"{name}/")
            continue
        content_type = _TYPES.get(f".{each.name.rpartition('.')[2]}")
        if content_type is not None:
            found.append((name, _response(each.read_bytes(), content_type)))
    return found


def _response(body: bytes, content_type: bytes) -> Response:
    etag = b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode()
    headers = (
        (b"etag", etag),
        # Revalidated each time, so that no page mixes two versions.
        (b"cache-control", b"no-cache"),
        (b"content-security-policy", POLICY),
    )
    return Response(200, body, content_type, headers)
