"""Lists by count and scrapes of a namespace of very many counters with long names: many at once,
from clients that read their responses, and scrapes by clients that hardly read them."""

import http.client
import json
import socket
import sys
import threading
import time
from urllib.request import Request, urlopen

from counter.limits import BATCH_ITEMS_MAX, COUNTER_NAME_CHARS_MAX
from tests.support.bytes_on_wire import request
from tests.support.rest import new_token, on_wire

_NAMESPACE = "/v1/namespaces/large"
_LIST = f"{_NAMESPACE}/counters?order=-count&limit=1000"
_SCRAPE = f"{_NAMESPACE}/metrics"
#: Another tenant's scrape, of a namespace without counters.
_OTHER = "/v1/namespaces/default/metrics"


def whole_namespaces(
    port: int, counters: int, lists: int, scrapes: int, slow: int, seconds: float
) -> None:
    """Have *lists* and *scrapes* connections ask again and again, and *slow* ones once."""
    _fill(f"http://127.0.0.1:{port}{_NAMESPACE}", counters)
    slow_ones = [socket.create_connection(("127.0.0.1", port)) for _ in range(slow)]
    for each in slow_ones:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        each.sendall(request("GET", _SCRAPE))
    ends_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=_ask, args=(port, target, ends_s))
        for target in [_LIST] * lists + [_SCRAPE] * scrapes
    ]
    for thread in threads:
        thread.start()
    took_s = [0.0]
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        with urlopen(f"http://127.0.0.1:{port}{_OTHER}") as answer:
            answer.read()
        took_s.append(time.monotonic() - began_s)
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    for each in slow_ones:
        each.close()
    sys.stdout.write(f"another namespace's scrape took at most {max(took_s):.2f} s\n")


def _fill(url: str, counters: int) -> None:
    """Create the namespace at *url* with so many counters."""
    settings = json.dumps({"counter_type": "ACCURATE"}).encode()
    _send(Request(url, settings, {"Content-Type": "application/json"}, method="PUT"))
    for start in range(0, counters, BATCH_ITEMS_MAX):
        numbers = range(start, min(counters, start + BATCH_ITEMS_MAX))
        items = [_item(number) for number in numbers]
        body = json.dumps({"items": items}).encode()
        _send(Request(f"{url}/batch/add", body, {"Content-Type": "application/json"}))


def _item(number: int) -> dict[str, object]:
    name = f"{number:0{COUNTER_NAME_CHARS_MAX}}"
    return {"counter": name, "delta": number % 97, "idempotency_token": on_wire(new_token())}


def _ask(port: int, target: str, ends_s: float) -> None:
    """Ask for *target* until then, reading each response."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while time.monotonic() < ends_s:
        connection.request("GET", target)
        connection.getresponse().read()
    connection.close()


def _send(sent: Request) -> None:
    with urlopen(sent) as answer:
        answer.read()
