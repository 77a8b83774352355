"""Cross-origin requests of browsers: only from the origins in the settings.

Callers are identified by their key and never by a cookie, so no response allows credentials, and
there is no wildcard.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, cast

from starlette.middleware.cors import CORSMiddleware

from api.http.call import App

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE")
_SENT: Final = (
    *("authorization", "baggage", "content-type", "idempotency-key", "if-match", "if-none-match"),
    *("prefer", "request-timeout", "traceparent", "tracestate", "x-request-id"),
    *("ce-dataschema", "ce-id", "ce-source", "ce-specversion", "ce-subject", "ce-time", "ce-type"),
)
_SHOWN: Final = (
    *("etag", "idempotency-replayed", "idempotency-ttl", "preference-applied", "ratelimit"),
    *("ratelimit-policy", "retry-after", "x-request-id"),
)


def with_cors(app: App, origins: Collection[str]) -> App:
    """Return an ASGI app around *app* that lets pages of *origins* send requests."""
    cors = CORSMiddleware(cast("Any", app), origins, _METHODS, _SENT, expose_headers=_SHOWN)
    return cast("App", cors)
