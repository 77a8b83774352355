"""Requests again and again on a few connections, each after the response to the last one."""

import json
import socket
import threading
import time
from collections.abc import Sequence
from itertools import count, cycle
from urllib.request import Request, urlopen

from counter.limits import EVENT_RULES_MAX
from counter.types import Token
from tests.support.bytes_on_wire import JSON, post, request
from tests.support.rest import item, new_token

LATE_US = 600_000_000
_NAMESPACE = "/v1/namespaces/default"
_FIELDS = b",".join(b'"%x":1' % number for number in range(100_000))
_EVENT = {"specversion": "1.0", "source": "/flood", "type": "t"}
_SHARDS = 1_024


def bad_items(port: int, connections: int, seconds: float) -> None:
    """Send small batches of bad items, with large responses."""
    bodies = (
        (f"{_NAMESPACE}/batch/add", {"items": [1] * 1_000}),
        (f"{_NAMESPACE}/batch/get", {"counters": [""] * 1_000}),
    )
    requests = [
        post(path, json.dumps(body, separators=(",", ":")).encode(), JSON) for path, body in bodies
    ]
    _flood(port, requests, connections, seconds)


def unknown_fields(port: int, connections: int, seconds: float) -> None:
    """Send bodies of 1 MiB with as many unknown fields as fit."""
    bodies = (
        (f"{_NAMESPACE}/batch/get", b'{"counters":["a"],%b}'),
        (f"{_NAMESPACE}/batch/add", b'{"items":[{"counter":"a","delta":1,%b}]}'),
        (f"{_NAMESPACE}/atomic/add", b'{"items":[{"counter":"a","delta":1,%b}]}'),
        (f"{_NAMESPACE}/counters/a/add", b'{"delta":1,"idempotency_token":{%b}}'),
    )
    requests = [post(path, body % _FIELDS, JSON) for path, body in bodies]
    _flood(port, requests, connections, seconds)


def late_tokens(port: int, connections: int, seconds: float) -> None:
    """Send batches of 1,000 adds, nine in ten of them late; all but the first are replays."""
    items = []
    for number in range(1_000):
        token = new_token()
        if number % 10:
            token = Token(token.nonce, token.generation_time_us - LATE_US)
        items.append(item(f"c{number}", 1, token))
    body = json.dumps({"items": items}).encode()
    _flood(port, [post(f"{_NAMESPACE}/batch/add", body, JSON)], connections, seconds)


def event_batches(port: int, connections: int, seconds: float) -> None:
    """Send batches of 1,000 CloudEvents, each of which matches 20 rules with long templates."""
    for name, template in (("short", "c"), ("repeated", "{data.t}" * 127)):
        rules = [{"type": "t", "counter": f"{n}{template}"} for n in range(EVENT_RULES_MAX)]
        body = json.dumps({"counter_type": "ACCURATE", "event_rules": rules}).encode()
        url = f"http://127.0.0.1:{port}/v1/namespaces/{name}"
        with urlopen(Request(url, body, {"Content-Type": "application/json"}, method="PUT")):
            pass
    numbers = count()
    requests = [_events("short", numbers, 1_000) for _ in range(20)]
    requests[1:1] = [
        _events("repeated", numbers, 1_000),
        _events("repeated", numbers, 1, 1_000_000),
    ]
    _flood(port, requests, connections, seconds)


def _events(namespace: str, numbers: "count[int]", events: int, chars: int = 2) -> bytes:
    data = {"t": "x" * chars}
    body = [{**_EVENT, "id": str(next(numbers)), "data": data} for _ in range(events)]
    shown = "prefer: return=representation"
    return post(f"/v1/namespaces/{namespace}/events", json.dumps(body).encode(), JSON, shown)


def many_shards(port: int, namespaces: int, seconds: float) -> None:
    """Create namespaces of 1,024 shards until the service refuses, and leave them idle."""
    body = json.dumps({"counter_type": "ACCURATE", "shards": _SHARDS}).encode()
    length = f"content-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for number in range(namespaces):
            path = f"/v1/namespaces/shop-{number}"
            connection.sendall(request("PUT", path, JSON, length, body=body))
            _read_response(connection)
    time.sleep(seconds)


def together(threads: Sequence[threading.Thread]) -> None:
    """Run *threads* to their ends."""
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def _flood(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> None:
    """Send *requests* in turn on each of *connections*, for so long."""
    given = (port, requests, time.monotonic() + seconds)
    together([threading.Thread(target=_send, args=given) for _ in range(connections)])


def _send(port: int, requests: Sequence[bytes], ends_s: float) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for each in cycle(requests):
            if time.monotonic() >= ends_s:
                return
            connection.sendall(each)
            _read_response(connection)


def _read_response(connection: socket.socket) -> None:
    """Read one response that has a length."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += _some(connection)
    head = received[:end].lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    left = length - (len(received) - end - 4)
    while left > 0:
        left -= len(_some(connection))


def _some(connection: socket.socket) -> bytes:
    received = connection.recv(65_536)
    if not received:
        raise ConnectionError("the service closed the connection")
    return received
