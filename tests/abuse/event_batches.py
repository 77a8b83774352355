"""Batches of 1,000 CloudEvents, each of which matches 20 rules with long templates."""

import json
import sys
from itertools import count
from urllib.request import Request, urlopen

from counter.limits import EVENT_RULES_MAX
from tests.abuse.figures import report
from tests.abuse.flood import flood
from tests.support.bytes_on_wire import JSON, post

_NAMESPACES = "/v1/namespaces"
_EVENT = {"specversion": "1.0", "source": "/flood", "type": "t"}
_REPEATED = "{data.t}" * 127


def attack(port: int, connections: int, seconds: float) -> None:
    """Send them to namespaces of their own, again and again on each of *connections*."""
    for name, template in (("short", "c"), ("repeated", _REPEATED)):
        rules = [{"type": "t", "counter": f"{n}{template}"} for n in range(EVENT_RULES_MAX)]
        body = json.dumps({"counter_type": "ACCURATE", "event_rules": rules}).encode()
        url = f"http://127.0.0.1:{port}{_NAMESPACES}/{name}"
        with urlopen(Request(url, body, {"Content-Type": "application/json"}, method="PUT")):
            pass
    numbers = count()
    requests = [_batch("short", numbers, 1_000) for _ in range(20)]
    requests[1:1] = [_batch("repeated", numbers, 1_000), _batch("repeated", numbers, 1, 1_000_000)]
    flood(port, requests, connections, seconds)


def _batch(namespace: str, numbers: "count[int]", events: int, chars: int = 2) -> bytes:
    data = {"t": "x" * chars}
    body = [{**_EVENT, "id": str(next(numbers)), "data": data} for _ in range(events)]
    shown = "prefer: return=representation"
    return post(f"{_NAMESPACES}/{namespace}/events", json.dumps(body).encode(), JSON, shown)


if __name__ == "__main__":
    report(attack, int(sys.argv[1]) if sys.argv[1:] else 8, 8.0)
