"""Requests as bytes, also those that no client library sends."""

import json
from typing import Any

from counter.types import Token
from tests.support.rest import on_wire
from tests.support.times import START_US

JSON = "content-type: application/json"
CLOSE = "connection: close"


def request(
    method: str, target: str, *headers: str, body: bytes = b"", version: str = "1.1"
) -> bytes:
    """A request with exactly these headers, and a host."""
    lines = [f"{method} {target} HTTP/{version}", "host: localhost", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def post(target: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """A POST of *body* with its length, and no content type but among *headers*."""
    length = f"content-length: {len(body)}"
    return request("POST", target, *headers, length, body=body, version=version)


def one(counter: str = "c", namespace: str = "default") -> str:
    """The path of a counter, its name as it is."""
    return f"/v1/namespaces/{namespace}/counters/{counter}"


def get(counter: str = "c", *headers: str, namespace: str = "default") -> bytes:
    return request("GET", one(counter, namespace), *headers)


def token(number: int, time_us: int = START_US) -> Any:
    """The token of a number, as a body carries it: sent twice, it is the same."""
    return on_wire(Token(number.to_bytes(16, "big"), time_us))


def add_body(number: int, delta: int = 1, time_us: int = START_US) -> bytes:
    """The body of an add under the token of *number*."""
    return json.dumps({"delta": delta, "idempotency_token": token(number, time_us)}).encode()


def add(
    number: int,
    delta: int = 1,
    *headers: str,
    counter: str = "c",
    namespace: str = "default",
    time_us: int = START_US,
) -> bytes:
    """An add under the token of *number*, as nearly every client sends it."""
    body = add_body(number, delta, time_us)
    return post(f"{one(counter, namespace)}/add", body, JSON, *headers)


#: Goes through ASGI in any case; earlier requests have been answered when it is.
LAST = request("GET", "/healthz", CLOSE)
