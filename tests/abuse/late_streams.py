"""Streams of late tokens past their rate."""

import json
import socket
import time

from counter.types import Token
from tests.abuse.bad_streams import stream
from tests.abuse.figures import report
from tests.support.rest import item, new_token

FLAGS = {"resolutions_per_s": "10"}
_LATE_US = 600_000_000


def attack(port: int, streams: int, seconds: float) -> None:
    """Send 1,000 late lines on each of *streams*, once, and wait for their answers."""
    held = []
    for _ in range(streams):
        each = socket.create_connection(("127.0.0.1", port))
        each.sendall(stream(_lines()))
        held.append(each)
    time.sleep(seconds)
    for each in held:
        each.close()


def _lines() -> bytes:
    late = (Token(each.nonce, each.generation_time_us - _LATE_US) for each in iter(new_token, 0))
    return b"".join(
        json.dumps(item(f"c{number}", 1, token)).encode() + b"\n"
        for number, token in zip(range(1_000), late, strict=False)
    )


if __name__ == "__main__":
    report(attack, 50, 8.0, flags=FLAGS)
