"""Small batches of bad items, with large responses, on many connections at once."""

import json

from tests.abuse.figures import report
from tests.abuse.flood import flood
from tests.support.bytes_on_wire import JSON, post

_NAMESPACE = "/v1/namespaces/default"
_BODIES = (
    (f"{_NAMESPACE}/batch/add", {"items": [1] * 1_000}),
    (f"{_NAMESPACE}/batch/get", {"counters": [""] * 1_000}),
)


def attack(port: int, connections: int, seconds: float) -> None:
    """Send the batches again and again on each of *connections*."""
    requests = [
        post(path, json.dumps(body, separators=(",", ":")).encode(), JSON) for path, body in _BODIES
    ]
    flood(port, requests, connections, seconds)


if __name__ == "__main__":
    report(attack, 50, 8.0)
