"""Namespaces of 1,024 shards each, created until the service refuses, and then left idle."""

import json
import socket
import time

from tests.abuse.figures import report
from tests.abuse.flood import read_answer
from tests.support.bytes_on_wire import JSON, request

_SHARDS = 1_024


def attack(port: int, namespaces: int, seconds: float) -> None:
    """Create *namespaces* one after another, then measure their cost for this long."""
    body = json.dumps({"counter_type": "ACCURATE", "shards": _SHARDS}).encode()
    length = f"content-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for number in range(namespaces):
            path = f"/v1/namespaces/shop-{number}"
            connection.sendall(request("PUT", path, JSON, length, body=body))
            read_answer(connection)
    time.sleep(seconds)


if __name__ == "__main__":
    report(attack, 444, 10.0)
