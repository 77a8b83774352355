"""A server that answers each case of ``answers.json``, and notes what each case sends."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from clients.conformance.cases import NONCE, SUCCESS, TIME, Json
from counter_client.tokens import HoldId, Token, parse_rfc3339

#: More than any double holds: a client that reads it as one reports another count.
COUNT: Final = 2**64
#: The amount of each hold.
HELD: Final = 50


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: ``path`` as it was sent."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Json

    @property
    def parts(self) -> list[str]:
        """Return the segments of the path after the version."""
        return [unquote(each) for each in self.path.partition("?")[0].split("/")[2:]]

    @property
    def query(self) -> dict[str, str]:
        """Return the query."""
        return dict(parse_qsl(self.path.partition("?")[2]))

    def counters(self) -> list[str]:
        """Return the counters that it is about."""
        body = self.body if isinstance(self.body, dict) else {}
        if "items" in body:
            return [each["counter"] for each in body["items"]]
        if self.parts[2:3] == ["holds"]:
            hold = self.hold
            return [self.query["counter"] if hold is None else hold.counter]
        return body.get("counters") or self.parts[3:4]

    def case(self) -> str | None:
        """Return what selects its case, as :func:`case_of` does; None if no client asks so."""
        counters = self.counters()
        match self.method, self.parts:
            case _ if counters:
                return _before_dash(counters[0])
            case "GET", ["namespaces", "default", "counters"]:
                return _before_dash(self.query.get("prefix", ""))
            case "GET", ["namespaces", "default", "busiest"]:
                return f"busiest {self.query.get('span')}"
            case "POST", ["tokens"]:
                return f"tokens {self.body['count']}"
            case "PUT", ["namespaces", "default"]:
                return f"settings {self.body.get('requests_per_s')}"
            case "GET" | "DELETE", ["namespaces"] | ["namespaces", "default"]:
                return f"{self.method} {'/'.join(self.parts)}"
        return None

    @property
    def hold(self) -> HoldId | None:
        """Return the hold that it is about."""
        is_of_one = self.parts[2:3] == ["holds"] and len(self.parts) > 3
        return HoldId.parse(self.parts[3]) if is_of_one else None

    @property
    def key(self) -> str | None:
        """Return its idempotency key."""
        return self.headers.get("idempotency-key")

    def tokens(self) -> set[str]:
        """Return what identifies its adds, without their counters."""
        key = self.key
        if not isinstance(self.body, dict):
            return set()
        found = [self.body, *self.body.get("items", [])]
        texts = {json.dumps(each.get("idempotency_token"), sort_keys=True) for each in found}
        return (texts | ({key} if key else set())) - {"null"}


def case_of(command: Mapping[str, Json]) -> str:
    """Return what selects the case of *command*."""
    match command["do"]:
        case "busiest":
            return f"busiest {command['span']}"
        case "tokens":
            return f"tokens {command['number']}"
        case "create_namespace" | "change_namespace":
            return f"settings {command['settings'].get('requests_per_s')}"
        case "namespaces":
            return "GET namespaces"
        case "namespace":
            return "GET namespaces/default"
        case "delete_namespace":
            return "DELETE namespaces/default"
        case "resolve" | "cancel":
            return _before_dash(json.loads(command["unfinished"])["items"][0][0])
    if "hold" in command:
        return _before_dash(HoldId.parse(command["hold"]).counter)
    names = (
        *(each["counter"] for each in command.get("items", ())),
        *command.get("counters", ()),
        *(command[name] for name in ("counter", "prefix") if name in command),
    )
    return _before_dash(names[0] if names else "")


def _before_dash(name: str) -> str:
    return name.partition("-")[0]


#: More tokens than any case replaces: those that a command asks for.
_REPLACED_MAX: Final = 2


@dataclass(slots=True)
class Scripted:
    """What was asked, by the case of each request."""

    answers: Mapping[str, Sequence[Mapping[str, Json]]]
    asked: dict[str, list[Asked]] = field(default_factory=lambda: defaultdict(list))
    #: Requests that no client may send, such as one to the target of a redirect.
    strange: list[str] = field(default_factory=list)
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, case: str, asked: Asked) -> Mapping[str, Json]:
        """Note a request and return its answer."""
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

    def do_PATCH(self) -> None:
        """Answer."""
        self._answer()

    def do_PUT(self) -> None:
        """Answer."""
        self._answer()

    def do_DELETE(self) -> None:
        """Answer."""
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, self.path, headers, json.loads(body) if body else None)
        if asked.parts == ["tokens"] and asked.body["count"] <= _REPLACED_MAX:
            self._send(200, {}, json.dumps(_tokens(asked.body["count"])))
            return
        case = asked.case()
        if case is None:
            self.script.strange.append(self.path)
            self._send(404, {}, "")
            return
        answer = self.script.next(case, asked)
        if answer.get("lost"):
            self.close_connection = True
            return
        if "status" in answer:
            text = answer["body"] + " " * answer.get("spaces", 0)
            self._send(answer["status"], answer["headers"], text)
            return
        if asked.method == "DELETE" and not asked.counters():
            self._send(204, {}, "")
            return
        text = json.dumps(_changed(_success(asked, answer.get("results")), answer))
        if asked.parts[4:] == ["live"]:
            text = f"event: count\ndata: {text}\n\n"
        self._send(200, {}, text + " " * answer.get("spaces", 0))

    def _send(self, status: int, headers: Mapping[str, str], text: str) -> None:
        body = text.encode()
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Date", formatdate(usegmt=True))
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            # It reads no further than it must.
            self.close_connection = True


def _tokens(count: int) -> Json:
    numbers = (f"5b056d1d-7f27-cb17-0000-{number:012d}" for number in range(count))
    return {"tokens": [{"token": each, "generation_time": TIME} for each in numbers]}


def _success(asked: Asked, results: Sequence[Json] | None) -> Json:
    """Return a proper answer to *asked*; *results* are the outcomes of its items."""
    body = asked.body
    if asked.parts[-1:] == ["cancel"]:
        token = body.get("idempotency_token", {"generation_time": TIME})
        return {"cancelled": True, "was_counted": False, "event_time": token["generation_time"]}
    if "holds" in asked.parts[2:]:
        return _held(asked)
    if body is None or ("items" not in body and "idempotency_token" not in body and not asked.key):
        return _read(asked)
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
    return added | ({"count": COUNT, "as_of": TIME} if "-and-get" in asked.path else {})


def _held(asked: Asked) -> Json:
    """Return a proper answer to what is about holds."""
    [counter] = asked.counters()
    hold = asked.hold
    if hold is None:
        given = {"token": NONCE, "generation_time": TIME}
        token = (asked.body or {}).get("idempotency_token", given)
        nonce, time_us = uuid.UUID(token["token"]).bytes, parse_rfc3339(token["generation_time"])
        hold = HoldId(Token(nonce, time_us), counter)
    found = {"namespace": "default", "counter": counter, "hold": str(hold), "amount": HELD}
    open_ = found | {"state": "open", "expires_at": TIME}
    sums = {"count": COUNT, "held": COUNT, "as_of": TIME}
    match asked.method, asked.parts[-1]:
        case "POST", "settle":
            settled = asked.body["amount"]
            return found | {"state": "settled", "ended_at": TIME, "settled": settled} | sums
        case "POST", "release":
            return found | {"state": "released", "ended_at": TIME} | sums
        case "POST", _:
            return open_ | {"amount": asked.body["amount"]} | sums
        case "GET", "holds":
            return {"holds": [open_, dict(open_)], "next_page": None}
    return open_


def _read(asked: Asked) -> Json:
    """Return a proper answer to what is no add or clear."""
    query = asked.query
    match asked.parts:
        case ["tokens"]:
            return _tokens(asked.body["count"])
        case ["namespaces"]:
            return {"namespaces": [_settings("default"), _settings("other")]}
        case [_, namespace]:
            return _settings(namespace) | (asked.body or {})
        case [_, _, "busiest"]:
            busy = [{"counter": "a", "adds_per_s": 1.5, "count": COUNT}]
            busy.append({"counter": "b", "adds_per_s": 1, "count": COUNT})
            return {"since": TIME, "as_of": TIME, "complete": True, "counters": busy}
        case [_, _, "batch", "get"]:
            return {"results": [_count(each) for each in asked.counters()]}
        case [_, _, "counters"]:
            return _list(query)
        case [_, _, _, _, "history"]:
            points = [{"time": TIME, "count": COUNT, "delta": each} for each in (3, -3)]
            return {"points": points}
        case [_, _, _, _, "events"]:
            return {"events": _events()[: int(query["limit"])], "next_page": None}
        case [_, _, _, counter, "recount"]:
            return {"namespace": "default", "counter": counter, "windows": 3}
    [counter] = asked.counters()
    span = {"from": TIME, "delta": 3} if {"from", "to"} & set(query) else {}
    return _count(counter) | span


def _count(counter: str) -> dict[str, Json]:
    return {
        "namespace": "default",
        "counter": counter,
        "count": COUNT,
        "as_of": TIME,
        "accuracy": "accurate",
    }


def _list(query: Mapping[str, str]) -> dict[str, Json]:
    """Two counters, named after the prefix and the page."""
    begin = query.get("prefix", "") + query.get("page", "")
    names = [f"{begin}{number}" for number in range(min(2, int(query["limit"])))]
    counts = {"counts": [_count(each) for each in names]} if "counts" in query else {}
    total = {"count": COUNT, "counters": 2, "as_of": TIME, "accuracy": "accurate"}
    both = {"sum": total} if "sum" in query else {}
    return {"counters": names, **counts, **both, "next_page": None}


def _events() -> list[dict[str, Json]]:
    """An add and a clear."""
    return [event_ids(0) | {"delta": 2**63 - 1}, event_ids(1) | {"clear": True}]


def event_ids(key: int) -> dict[str, Json]:
    """Return what identifies an event: an item of an atomic add."""
    nonce = f"5b056d1d-7f27-cb17-0000-{key:012d}"
    return {"event_time": TIME, "event_id": nonce, "event_item_key": key}


def _settings(namespace: str) -> dict[str, Json]:
    return {"namespace": namespace, "created_at": TIME, "counter_type": "ACCURATE"}


def _added(counter: str, delta: int, body: Mapping[str, Json]) -> dict[str, Json]:
    # A key has no time: the service reserves one.
    token = body.get("idempotency_token", {"generation_time": TIME})
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
    if "last" in answer:
        found["results"][-1] = answer["last"]
    place = answer.get("of", "results" if found.get("results") else "")
    part = found[place] if place else found
    whose = part[-1] if isinstance(part, list) else part
    for name in answer.get("without", ()):
        del whose[name]
    if "members" in answer:
        whose.update(answer["members"])
    return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes its connection is no error."""


@contextmanager
def scripted(answers: Mapping[str, Sequence[Mapping[str, Json]]]) -> Iterator[Scripted]:
    """Listen, and answer the cases of *answers*, by what selects them; others succeed."""
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
