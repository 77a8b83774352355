"""A server that answers each case of ``answers.json``, and notes what each case sends."""

from __future__ import annotations

import json
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any, Final
from urllib.parse import unquote, urlsplit

Json = Any
SUCCESS: Final[Mapping[str, Json]] = {"success": True}
_TIME: Final = "2026-01-31T08:15:30.000250Z"
#: More than any double holds: a client that reads it as one reports another count.
COUNT: Final = 2**64


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: ``path`` as it was sent."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Json

    def counters(self) -> list[str]:
        """Return the counters that it is about."""
        if isinstance(self.body, dict) and "items" in self.body:
            return [each["counter"] for each in self.body["items"]]
        parts = urlsplit(self.path).path.split("/counters/")
        return [unquote(parts[1].partition("/")[0])] if len(parts) > 1 else []

    def tokens(self) -> set[str]:
        """Return what identifies its adds, without their counters."""
        key = self.headers.get("idempotency-key")
        if not isinstance(self.body, dict):
            return set()
        found = [self.body, *self.body.get("items", [])]
        texts = {json.dumps(each.get("idempotency_token"), sort_keys=True) for each in found}
        return (texts | ({key} if key else set())) - {"null"}


@dataclass(slots=True)
class Scripted:
    """What was asked, by the first counter of each request."""

    answers: Mapping[str, Sequence[Mapping[str, Json]]]
    asked: dict[str, list[Asked]] = field(default_factory=lambda: defaultdict(list))
    #: Requests that no client may send, such as one to the target of a redirect.
    strange: list[str] = field(default_factory=list)
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, asked: Asked) -> Mapping[str, Json]:
        """Note a request and return its answer."""
        case = asked.counters()[0].partition("-")[0]
        with self._lock:
            number = len(self.asked[case])
            self.asked[case].append(asked)
        answers = self.answers.get(case, (SUCCESS,))
        return answers[min(number, len(answers) - 1)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # A client sends head and body apart, and waits for an answer.
    disable_nagle_algorithm = True
    script: Scripted

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def do_GET(self) -> None:
        """Answer."""
        self._answer()

    def do_POST(self) -> None:
        """Answer."""
        self._answer()

    def do_DELETE(self) -> None:
        """Answer."""
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, self.path, headers, json.loads(body) if body else None)
        if self.path == "/v1/tokens":
            self._send(200, {}, json.dumps(_tokens(asked.body["count"])))
            return
        if not asked.counters():
            self.script.strange.append(self.path)
            self._send(404, {}, "")
            return
        answer = self.script.next(asked)
        if answer.get("lost"):
            self.close_connection = True
            return
        if "success" in answer or "results" in answer:
            text = json.dumps(_changed(_success(asked, answer.get("results")), answer))
            self._send(200, {}, text + " " * answer.get("spaces", 0))
            return
        text = answer["body"] + " " * answer.get("spaces", 0)
        self._send(answer["status"], answer["headers"], text)

    def _send(self, status: int, headers: Mapping[str, str], text: str) -> None:
        body = text.encode()
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Date", formatdate(usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            # It reads no further than it must.
            self.close_connection = True


def _tokens(count: int) -> Json:
    numbers = (f"5b056d1d-7f27-cb17-0000-{number:012d}" for number in range(count))
    return {"tokens": [{"token": each, "generation_time": _TIME} for each in numbers]}


def _success(asked: Asked, results: Sequence[Json] | None) -> Json:
    """Return a proper answer to *asked*; *results* are the outcomes of its items."""
    if asked.method == "GET":
        [counter] = asked.counters()
        return {
            "namespace": "default",
            "counter": counter,
            "count": COUNT,
            "as_of": _TIME,
            "accuracy": "accurate",
        }
    body = asked.body
    if "items" in body:
        given = ["added"] * len(body["items"]) if results is None else results
        # More results than items are about the first ones again.
        pairs = zip(given, cycle(body["items"]), strict=False)
        return {
            "results": [
                _added(item["counter"], item["delta"], body | item) if each == "added" else each
                for each, item in pairs
            ]
        }
    [counter] = asked.counters()
    added = _added(counter, body.get("delta", 0), body)
    if "delta" not in body:
        del added["delta"]
    return added | ({"count": COUNT, "as_of": _TIME} if "-and-get" in asked.path else {})


def _added(counter: str, delta: int, body: Mapping[str, Json]) -> dict[str, Json]:
    # A key has no time: the service reserves one.
    token = body.get("idempotency_token", {"generation_time": _TIME})
    return {
        "namespace": "default",
        "counter": counter,
        "delta": delta,
        "event_time": token["generation_time"],
        "replayed": False,
    }


def _changed(found: dict[str, Json], answer: Mapping[str, Json]) -> Json:
    """Return *found*, or the last of its results, with the changes that *answer* names."""
    if answer.get("reversed"):
        found["results"].reverse()
    whose = found["results"][-1] if found.get("results") else found
    for name in answer.get("without", ()):
        del whose[name]
    whose.update(answer.get("members", {}))
    return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes its connection is no error."""


@contextmanager
def scripted(answers: Mapping[str, Sequence[Mapping[str, Json]]]) -> Iterator[Scripted]:
    """Listen, and answer the cases of *answers*, by the number that the counter's name begins with;
    others succeed."""
    script = Scripted(answers)
    handler = type("Handler", (_Handler,), {"script": script})
    with _Server(("127.0.0.1", 0), handler, bind_and_activate=False) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.server_bind()
        server.server_activate()
        script.url = f"http://127.0.0.1:{server.server_address[1]}"
        listening = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        listening.start()
        try:
            yield script
        finally:
            server.shutdown()
            listening.join()
