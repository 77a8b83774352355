"""The log of requests: their routes, tokens and outcomes, and no secret."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http.call import AsgiCall, RequestIds, Target
from api.http.responses import Response
from api.http.routing import Route
from api.telemetry.request_log import RequestLog
from counter.api_keys import Scope
from counter.limits import INT64_MAX
from tests.support.app import App, running, store_that_fails
from tests.support.keys import hand_out
from tests.support.rest import Rest, fresh, item
from tests.support.times import START_US, rfc3339
from tests.support.wire import wired

Act = Callable[[App], Awaitable[httpx.Response]]
ADD = "/v1/namespaces/{namespace}/counters/{counter}/add"


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of each line about a request."""
    return [
        {**each.__dict__["fields"], "level": each.levelname}
        for each in caplog.records
        if each.name == "counter.requests"
    ]


@pytest.fixture(autouse=True)
def _requests_are_let_through(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "counter.requests")


async def test_a_line_reports_the_request_its_token_and_its_outcome(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running("memory", tmp_path, log_requests="all") as app:
        token = fresh(START_US)
        header = {"x-request-id": "mine-1"}
        body = {"delta": 1, "idempotency_token": item("", 1, token)["idempotency_token"]}
        for _ in range(2):
            await app.rest.post(app.rest.path("likes", "add"), body, headers=header)
    first, again = logged(caplog)
    assert first.pop("took_ms") >= 0
    assert first == {
        "level": "INFO",
        "request_id": "mine-1",
        "method": "POST",
        "route": ADD,
        "namespace": "default",
        "counter": "likes",
        "status": 200,
        "token": body["idempotency_token"]["token"],
        "generation_time": rfc3339(START_US),
        "outcome": "original",
    }
    assert again["outcome"] == "replayed"
    assert caplog.records[0].getMessage() == f"POST {ADD} 200"


async def test_each_kind_of_end_has_its_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running("memory", tmp_path, log_requests="all") as app:
        rest, token = app.rest, fresh(START_US)
        await rest.add("c", 1, token)
        await rest.add("c", 2, token)
        await rest.add("c", 1)
        await rest.clear("c", key="order-7")
        await rest.batch_add([item("c", 1, token), item("c", 3, token), item("d", 1, token)])
        await rest.post(rest.path(verb="atomic/add"), {"items": []})
        late = fresh(START_US)
        app.clock.advance(6_000_000)
        await rest.add("c", 1, late)
        app.clock.advance(60_000_000)
        await rest.add("c", 1, late)
        with store_that_fails(app, "append"):
            await rest.add("c", 1, fresh(app.clock.now_us()))
        await rest.get("c")
        await rest.http.get("/v1/nothing")
    found = [(each["status"], each.get("outcome", each.get("outcomes"))) for each in logged(caplog)]
    assert found == [
        (200, "original"),
        (409, "conflict"),
        (400, "refused"),
        (200, "original"),
        (200, {"replayed": 1, "conflict": 1, "original": 1}),
        (400, "refused"),
        (503, "pending"),
        (410, "voided"),
        (503, "unknown"),
        (200, None),
        (404, None),
    ]
    codes = {each.get("code") for each in logged(caplog)}
    assert {"token_missing", "token_conflict", "token_too_old", "store_unavailable"} <= codes


async def test_a_refusal_because_of_a_bound_has_its_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was called voided, as a token that came too late is."""
    async with running("sqlite", tmp_path, log_requests="all") as app:
        path = app.rest.path("stock", verb="add")
        key = {"Idempotency-Key": "order-7"}
        await app.rest.post(path, {"delta": -1, "at_least": 0}, headers=key)
    assert [each["outcome"] for each in logged(caplog)] == ["bound_reached"]


async def test_a_key_is_logged_as_its_token_and_never_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running("memory", tmp_path, log_requests="all") as app:
        for _ in range(2):
            await app.rest.add("c", 1, key="card-4929")
        [event] = (await app.http.get(app.rest.path("c", "events"))).json()["events"]
    first, again, _ = logged(caplog)
    assert first["token"] == again["token"] == event["event_id"]
    assert "4929" not in caplog.text
    assert "4929" not in json.dumps(logged(caplog))


@pytest.mark.parametrize(("which", "lines"), [("none", 0), ("failures", 1), ("all", 3)])
async def test_requests_are_not_logged_by_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str, lines: int, way: Any
) -> None:
    async with wired(tmp_path, log_requests=which, **way) as wire, wire.client() as http:
        rest = Rest(http)
        await rest.add("c", 1, fresh(START_US))
        await rest.add("c", 1)
        with store_that_fails(wire.app, "append"):
            await rest.add("c", 1, fresh(START_US))
    found = logged(caplog)
    assert len(found) == lines
    if lines:
        failed = found[-1]
        assert (failed["level"], failed["code"]) == ("WARNING", "store_unavailable")
        assert (failed["route"], failed["outcome"]) == (ADD, "unknown")
        assert failed["request_id"]


async def test_log_lines_during_a_request_have_its_id(tmp_path: Path) -> None:
    from counter.telemetry.logs import REQUEST_ID

    seen: list[str] = []
    async with running("memory", tmp_path) as app:
        works = app.store.events.append

        async def append(*arguments: Any) -> Any:
            seen.append(REQUEST_ID.get())
            return await works(*arguments)

        app.store.events.append = append
        header = {"x-request-id": "mine-2", "idempotency-key": "k"}
        await app.rest.post(app.rest.path("c", "add"), {"delta": 1}, headers=header)
    assert seen == ["mine-2"]


async def test_a_key_is_named_by_its_id_and_its_secret_is_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running("memory", tmp_path, log_requests="all") as app:
        header = await hand_out(app, Scope.WRITE)
        key_id, secret = header["Authorization"].rsplit("_", 2)[1:]
        app.http.headers.update(header)
        await app.rest.add("c", 1, fresh(START_US))
        await app.rest.add("c", INT64_MAX + 1, fresh(START_US))
        await app.http.get("/v1/namespaces", params={"authorization": secret})
    lines = logged(caplog)
    assert [each["key"] for each in lines] == [key_id] * 3
    ours = [repr(each.__dict__) for each in caplog.records if each.name.startswith("counter")]
    assert secret not in "".join(ours)


async def _nothing(*_: Any) -> Any:
    """Without a sender and without a response."""


async def test_a_flood_of_failures_is_reported_in_a_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    log = RequestLog("failures", lambda: now_s[0])
    target = Target("POST", Route("POST", ADD, _nothing, Scope.WRITE, writes=True))
    scope = {"query_string": b"", "headers": []}
    call = AsgiCall(target, scope, _nothing, RequestIds(), 0)
    problem = Response(503, b'{"code":"overloaded","applied":null}', b"application/problem+json")

    def fail(times: int) -> None:
        for _ in range(times):
            log.begin(call)(problem)

    fail(1_000)
    assert [each["outcome"] for each in logged(caplog)] == ["refused"] * 10
    loop = asyncio.get_running_loop()
    [timer] = [each for each in _timers(loop) if "_log_left_out" in repr(each)]
    assert timer.when() - loop.time() <= 1.0
    timer._run()
    timer.cancel()
    assert logged(caplog)[10:] == [
        {"left_out": 990, "by_code": {"overloaded": 990}, "level": "WARNING"}
    ]
    now_s[0] = 1.0
    fail(1)
    assert len(logged(caplog)) == 12


def _timers(loop: asyncio.AbstractEventLoop) -> list[asyncio.TimerHandle]:
    return list(loop._scheduled)  # type: ignore[attr-defined]
