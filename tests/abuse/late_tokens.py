"""Batches of which nine adds in ten are late tokens past their rate."""

import json

from counter.types import Token
from tests.abuse.figures import report
from tests.abuse.flood import flood
from tests.support.bytes_on_wire import JSON, post
from tests.support.rest import item, new_token

FLAGS = {"resolutions_per_s": "10"}
_LATE_US = 600_000_000


def attack(port: int, connections: int, seconds: float) -> None:
    """Send batches of 1,000 adds on each of *connections*; all but the first are replays."""
    flood(port, [post("/v1/namespaces/default/batch/add", _batch(), JSON)], connections, seconds)


def _batch() -> bytes:
    items = []
    for number in range(1_000):
        token = new_token()
        if number % 10:
            token = Token(token.nonce, token.generation_time_us - _LATE_US)
        items.append(item(f"c{number}", 1, token))
    return json.dumps({"items": items}).encode()


if __name__ == "__main__":
    report(attack, 2, 8.0, flags=FLAGS)
