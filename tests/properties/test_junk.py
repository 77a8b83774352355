"""Whatever is sent, the response is a problem that says so: never a fault, and nothing is
written."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.app import App
from tests.support.problems import check_problem, problem_of
from tests.support.rest import fresh, item, on_wire

POSTS = (
    "counters/c/add",
    "counters/c/add-and-get",
    "counters/c/clear",
    "counters/c/recount",
    "batch/add",
    "batch/get",
    "atomic/add",
)
SETTINGS = (
    *("counter_type", "dataset", "accept_limit", "future_limit", "rollup_window", "shards"),
    *("payload_check", "key_ttl", "cache_ttl", "namespace", ""),
)
PARAMETERS = ("max_staleness", "limit", "page", "from", "to", "step", "prefix", "x")

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63) - 1, 10**400, 0, -1])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["", "2026-03-01T12:00:00Z", "5s", "\x00", "c", "0" * 32, "x" * 300])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Desk:
    """A service that all examples of this module share, and its contents."""

    def __init__(self, directory: Path) -> None:
        self.runner = asyncio.Runner()
        self.app = App("sqlite", directory)
        self.runner.run(self.app.start())
        self.token = on_wire(fresh(self.app.clock.now_us()))
        self.send("POST", "counters/c/add", {"delta": 7, "idempotency_token": self.token})

    def close(self) -> None:
        self.runner.run(self.app.stop())
        self.runner.close()

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        content: bytes | None = None,
        query: str = "",
        namespace: str = "default",
    ) -> httpx.Response:
        if content is None and body is not None:
            content = json.dumps(body).encode()
        url = f"/v1/namespaces/{namespace}/{path}".rstrip("/")
        work = self.app.http.request(
            method,
            f"{url}?{query}" if query else url,
            content=content,
            headers={"content-type": "application/json"},
        )
        return self.runner.run(work)

    def holdings(self) -> list[Any]:
        """Everything that a write could change."""
        names = self.send("GET", "counters").json()
        events = self.send("GET", "counters/c/events").json()
        namespaces = self.runner.run(self.app.http.get("/v1/namespaces")).json()
        return [names, events, namespaces]

    def judge(self, answer: httpx.Response, before: list[Any]) -> None:
        """A refusal is a problem of the client's, and changed nothing."""
        if answer.status_code in (200, 202):
            for result in answer.json().get("results", []):
                if "status" in result:
                    check_problem(result)
                    assert result["status"] < 500
            return
        problem = problem_of(answer)
        assert 400 <= problem["status"] < 500
        assert len(answer.content) < 20_000, "a refusal does not repeat what it refuses"
        assert self.holdings() == before


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    desk = Desk(tmp_path_factory.mktemp("junk"))
    yield desk
    desk.close()


@given(st.sampled_from(POSTS), st.binary(max_size=200))
@example("batch/add", b'{"items": [' + b"[" * 5_000)
@example("counters/c/add", b'{"delta": 1' + b"0" * 10_000 + b"}")
@example("counters/c/add", b'{"delta": -' + b"1" * 4_400 + b"}")
@example("batch/get", b'{"counters": ["\\ud800"]}')
@example("atomic/add", b'{"items": [{"counter": "\\ud800", "delta": 1}]}')
@example("batch/add", b'{"items": [{"counter": "\\udc00\\ud800", "delta": 1}]}')
def test_any_bytes(desk: Desk, path: str, content: bytes) -> None:
    before = desk.holdings()
    desk.judge(desk.send("POST", path, content=content), before)


@given(st.sampled_from(POSTS), values)
@example("batch/add", {"items": {}})
@example("batch/add", {"items": [None, [], {}, 10**400]})
def test_any_json(desk: Desk, path: str, body: Any) -> None:
    before = desk.holdings()
    desk.judge(desk.send("POST", path, body), before)


@given(st.data())
def test_a_good_body_with_something_else_in_one_place(desk: Desk, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(POSTS))
    body = good_body(desk, path)
    parent, key = data.draw(st.sampled_from(places(body)))
    action = data.draw(st.sampled_from(["replace", "remove", "add"]))
    if action == "remove":
        del parent[key]
    elif action == "replace":
        parent[key] = data.draw(values)
    elif isinstance(parent, dict):
        parent[data.draw(st.text())] = data.draw(values)
    before = desk.holdings()
    desk.judge(desk.send("POST", path, body), before)


def good_body(desk: Desk, path: str) -> Any:
    """A body that would repeat existing data, or change nothing."""
    if path == "batch/add":
        again = item("c", 7, fresh(0)) | {"idempotency_token": dict(desk.token)}
        return {"items": [again, dict(again)]}
    if path == "atomic/add":
        late = fresh(desk.app.clock.now_us() - 10**9)
        return {"items": [{"counter": "c", "delta": 1}], "idempotency_token": on_wire(late)}
    if path == "batch/get":
        return {"counters": ["c", "d"], "max_staleness": "0s"}
    if path == "counters/c/recount":
        return {"from": "2026-03-01T12:00:00Z", "to": "2026-03-01T12:01:00Z"}
    if path == "counters/c/clear":
        return {"idempotency_token": dict(desk.token)}
    return {"delta": 7, "idempotency_token": dict(desk.token)}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within *value*."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys:
            found.append((value, key))
            found += places(value[key])
    return found


@given(
    st.sampled_from(["counters", "counters/c", "counters/c/events", "counters/c/history"]),
    st.lists(st.tuples(st.sampled_from(PARAMETERS), scalars.map(str)), max_size=3),
)
@example("counters/c/events", [("page", "WzAsIDAsICIiXQ")])
@example("counters/c/events", [("page", "WzFlOTk5LCAwLCAiIl0")])
@example("counters", [("page", "WyJcdWQ4MDAiXQ")])
@example("counters/c/history", [("from", "0001-01-01T00:00:00+23:59")])
@example("counters/c/history", [("from", "2000-01-01T00:00:00Z"), ("step", "10s")])
def test_any_query(desk: Desk, path: str, query: list[tuple[str, str]]) -> None:
    before = desk.holdings()
    encoded = str(httpx.QueryParams([(k, v) for k, v in query if is_text(v)]))
    desk.judge(desk.send("GET", path, query=encoded), before)


@given(st.text(alphabet=st.characters(codec="utf-8")) | st.sampled_from(["%", "%00", "..", "a/b"]))
def test_any_path(desk: Desk, text: str) -> None:
    before = desk.holdings()
    for path in (f"counters/{text}", f"counters/{text}/add", text):
        try:
            url = httpx.URL(f"http://test/v1/namespaces/default/{path}")
        except httpx.InvalidURL:
            return
        answer = desk.runner.run(desk.app.http.get(url))
        if answer.status_code in (200, 307):
            return
        desk.judge(answer, before)


settings_of_any_kind = st.dictionaries(
    st.sampled_from(SETTINGS),
    values | st.sampled_from(["EVENTUAL", "default", "1s", "10s", "1h", "1d", "off", 1, 1_024]),
)


@given(values | settings_of_any_kind)
@example({"counter_type": "ACCURATE", "accept_limit": "9" * 18 + "d"})
@example({"counter_type": "ACCURATE", "shards": 10**400})
def test_any_namespace(desk: Desk, body: Any) -> None:
    before = desk.holdings()
    content = json.dumps(body).encode()
    answer = desk.send("PUT", "", content=content, namespace="other")
    if answer.status_code == 201:
        assert body["counter_type"] == answer.json()["counter_type"]
        assert desk.send("DELETE", "", namespace="other").status_code == 204
    else:
        assert answer.status_code != 200
        desk.judge(answer, before)


def is_text(text: str) -> bool:
    """Whether it can be sent at all: a lone surrogate has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
