"""Bodies of 1 MiB that hold as many unknown fields as fit, on a few connections at once."""

from tests.abuse.figures import report
from tests.abuse.flood import flood
from tests.support.bytes_on_wire import JSON, post

_FIELDS = b",".join(b'"%x":1' % number for number in range(100_000))
_NAMESPACE = "/v1/namespaces/default"
_BODIES = (
    (f"{_NAMESPACE}/batch/get", b'{"counters":["a"],%b}'),
    (f"{_NAMESPACE}/batch/add", b'{"items":[{"counter":"a","delta":1,%b}]}'),
    (f"{_NAMESPACE}/atomic/add", b'{"items":[{"counter":"a","delta":1,%b}]}'),
    (f"{_NAMESPACE}/counters/a/add", b'{"delta":1,"idempotency_token":{%b}}'),
)


def attack(port: int, connections: int, seconds: float) -> None:
    """Send the bodies again and again on each of *connections*."""
    flood(port, [post(path, body % _FIELDS, JSON) for path, body in _BODIES], connections, seconds)


if __name__ == "__main__":
    report(attack, 4, 8.0)
