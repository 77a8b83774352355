"""A token that is cancelled counts nothing, and every retry of it is answered so."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.app import App, every_store, running, store_that_fails
from tests.support.problems import assert_problem, problem_of
from tests.support.rest import Json, Rest, fresh, item, on_wire
from tests.support.times import MINUTE, SECOND, rfc3339

COUNTER = "counters/c"


class Cancels:
    """Sends requests under one credential to the routes that add and to those that cancel."""

    def __init__(self, rest: Rest, app: App, key: str | None = None) -> None:
        self.rest, self.app, self.key = rest, app, key
        self.token = fresh(app.clock.now_us())

    async def send(self, to: str, body: Mapping[str, Any], method: str = "POST") -> httpx.Response:
        headers = {} if self.key is None else {"idempotency-key": self.key}
        sent = dict(body)
        if self.key is None:
            sent["idempotency_token"] = on_wire(self.token)
        url = f"/v1/namespaces/default/{to}"
        return await self.rest.http.request(method, url, json=sent, headers=headers)

    async def cancel(self, to: str, body: Mapping[str, Any]) -> httpx.Response:
        """Cancel, after the wait that a store without transactions asks for."""
        answer = await self.send(f"{to}/cancel", body)
        if answer.status_code == 503:
            assert self.app.store.separate_writes is not None
            self.app.clock.advance(problem_of(answer)["retry_after"] * SECOND)
            answer = await self.send(f"{to}/cancel", body)
        return answer


def cancelled(answer: httpx.Response) -> bool:
    """Whether the add of the token that *answer* has cancelled was counted."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["cancelled"] is True
    assert set(body) == {"cancelled", "was_counted", "event_time"}
    return bool(body["was_counted"])


@every_store
@pytest.mark.parametrize("key", [None, "order-7"])
async def test_an_add_is_cancelled_once_and_for_all(rest: Rest, app: App, key: str | None) -> None:
    """Before it is rolled up, and again and again: each answer is the same."""
    tokens = Cancels(rest, app, key)
    assert (await tokens.send(f"{COUNTER}/add", {"delta": 3})).status_code == 200
    first = await tokens.cancel(COUNTER, {"delta": 3})
    assert cancelled(first) is True
    if key is None:
        assert first.json()["event_time"] == rfc3339(tokens.token.generation_time_us)
    for _ in range(3):
        assert await rest.count("c") == 0
        again = await tokens.cancel(COUNTER, {"delta": 3})
        assert (again.status_code, again.json()) == (200, first.json())
        for to in ("add", "add-and-get"):
            refused = await tokens.send(f"{COUNTER}/{to}", {"delta": 3})
            assert_problem(refused, "token_cancelled", applied=False)
        await app.roll_up_after(MINUTE)
        assert await rest.count("c", "1h") == 0


@every_store
@pytest.mark.parametrize("key", [None, "order-7"])
async def test_what_never_arrived_is_cancelled(rest: Rest, app: App, key: str | None) -> None:
    tokens = Cancels(rest, app, key)
    assert cancelled(await tokens.cancel(COUNTER, {"delta": 3})) is False
    for _ in range(2):
        assert_problem(
            await tokens.send(f"{COUNTER}/add", {"delta": 3}), "token_cancelled", applied=False
        )
        assert await rest.count("c") == 0
        await app.roll_up_after(MINUTE)
    answer = await tokens.cancel(COUNTER, {"delta": 4})
    assert_problem(answer, "token_conflict")


async def test_an_operation_is_part_of_a_key(rest: Rest, app: App) -> None:
    """A key is one of its operation, and the payload of a clear has no delta."""
    await rest.add("c", 5, fresh(app.clock.now_us()))
    app.clock.advance(1)
    tokens = Cancels(rest, app, "order-7")
    assert (await tokens.send(f"{COUNTER}/clear", {})).status_code == 200
    assert cancelled(await tokens.cancel(COUNTER, {"delta": 5})) is False
    assert await rest.count("c") == 0
    assert cancelled(await tokens.cancel(COUNTER, {"operation": "clear"})) is True
    assert await rest.count("c") == 5
    assert (await tokens.send(COUNTER, {}, "DELETE")).status_code == 200
    assert await rest.names() == []
    assert cancelled(await tokens.cancel(COUNTER, {"operation": "delete"})) is True
    await app.roll_up_after(MINUTE)
    assert (await rest.names(), await rest.count("c")) == (["c"], 5)


@every_store
async def test_an_atomic_add_is_cancelled_as_a_whole(rest: Rest, app: App) -> None:
    tokens = Cancels(rest, app)
    items = {"items": [{"counter": "a", "delta": 1}, {"counter": "b", "delta": 2}]}
    assert (await tokens.send("atomic/add", items)).status_code == 200
    part = await tokens.cancel("atomic", {"items": items["items"][:1]})
    assert_problem(part, "token_conflict")
    assert cancelled(await tokens.cancel("atomic", items)) is True
    assert_problem(await tokens.send("atomic/add", items), "token_cancelled", applied=False)
    assert [await rest.count(name) for name in "ab"] == [0, 0]
    await app.roll_up_after(MINUTE)
    assert [await rest.count(name, "1h") for name in "ab"] == [0, 0]


async def test_the_items_of_a_batch_are_cancelled_each_by_itself(rest: Rest, app: App) -> None:
    """Those that were added, those that were not, and those that are wrong."""
    tokens = [fresh(app.clock.now_us()) for _ in range(3)]
    items = [item("c", 2, each) for each in tokens]
    url = "/v1/namespaces/default/batch"
    await rest.http.post(f"{url}/add", json={"items": items[:2]})
    app.clock.advance(MINUTE)
    items[1] = {**items[1], "delta": 3}
    items.append({"counter": "c", "delta": 1})
    answer = await rest.http.post(f"{url}/cancel", json={"items": [*items, {"counter": "c"}]})
    assert answer.status_code == 200, answer.text
    first, *results = answer.json()["results"]
    assert first == {
        "cancelled": True,
        "was_counted": True,
        "event_time": rfc3339(tokens[0].generation_time_us),
    }
    conflict, never, missing, invalid = results
    assert never["was_counted"] is False
    codes = [each["code"] for each in (conflict, missing, invalid)]
    assert codes == ["token_conflict", "token_missing", "invalid_body"]
    assert await rest.count("c") == 2
    again = await rest.http.post(f"{url}/add", json={"items": items[:1]})
    assert [each["code"] for each in again.json()["results"]] == ["token_cancelled"]


async def test_a_batch_is_cancelled_in_json_only(rest: Rest) -> None:
    """Lines, which batch/add reads, are refused by their media type."""
    url = "/v1/namespaces/default/batch/cancel"
    for kind in ("application/x-ndjson", "text/plain", None):
        answer = await rest.raw(url, b'{"counter":"c","delta":1}\n', content_type=kind)
        assert_problem(answer, "unsupported_media_type", "send application/json")


SALES = [{"type": "sale", "counter": "sales", "delta": "data.amount"}]
EVENTS = "/v1/namespaces/shop/events"


def sale(number: int, amount: int = 7, kind: str = "sale") -> Json:
    """An event that SALES count."""
    event: Json = {"specversion": "1.0", "id": str(number), "source": "/till", "type": kind}
    return {**event, "data": {"amount": amount}}


async def send_events(rest: Rest, to: str, body: Json | list[Json]) -> httpx.Response:
    """Send an event or a batch of events to the namespace ``shop``, which has the rules SALES."""
    settings = {"counter_type": "ACCURATE", "event_rules": SALES, "key_ttl": "1h"}
    await rest.http.put("/v1/namespaces/shop", json=settings)
    kind = f"application/cloudevents{'-batch' if isinstance(body, list) else ''}+json"
    return await rest.raw(to, json.dumps(body).encode(), content_type=kind)


async def test_a_cloud_event_is_cancelled(rest: Rest, app: App) -> None:
    """By the event itself."""
    assert (await send_events(rest, EVENTS, sale(1))).status_code == 204
    app.clock.advance(MINUTE)
    for _ in range(2):
        answer = await send_events(rest, f"{EVENTS}/cancel", sale(1))
        assert answer.status_code == 200, answer.text
        assert [each["was_counted"] for each in answer.json()["results"]] == [True]
        refused = await send_events(rest, EVENTS, sale(1))
        assert_problem(refused, "token_cancelled", "event '1' of '/till'", applied=False)
        assert "new token" not in problem_of(refused)["detail"]
    changed = await send_events(rest, f"{EVENTS}/cancel", sale(1, 8))
    [problem] = changed.json()["results"]
    assert problem["code"] == "token_conflict"
    assert "event_rules" in problem["detail"]


async def test_an_event_that_no_rule_matches_does_not_stop_the_cancel_of_others(
    rest: Rest, app: App
) -> None:
    """What it would count is not known, so it alone has a problem, in its place."""
    batch = [sale(1), sale(2, kind="seen"), sale(3)]
    assert (await send_events(rest, EVENTS, batch)).status_code == 204
    app.clock.advance(MINUTE)
    answer = await send_events(rest, f"{EVENTS}/cancel", batch)
    assert answer.status_code == 200, answer.text
    first, problem, last = answer.json()["results"]
    assert (first["was_counted"], last["was_counted"]) == (True, True)
    assert (problem["code"], problem["field"]) == ("invalid_body", "type")
    assert "event '2' of '/till'" in problem["detail"]
    assert await rest.within("shop").count("sales") == 0
    alone = await send_events(rest, f"{EVENTS}/cancel", batch[1])
    assert alone.json()["results"] == [problem]


async def test_the_cancel_of_an_event_says_how_long_its_key_is_kept(rest: Rest) -> None:
    """Whatever its headers are, and also if it is refused."""
    await send_events(rest, EVENTS, sale(1))
    keyed = await rest.within("shop").add("c", 1, key="order-1")
    for body in (sale(1), {}):
        answer = await send_events(rest, f"{EVENTS}/cancel", body)
        assert answer.headers["idempotency-ttl"] == keyed.headers["idempotency-ttl"] == "3595"


async def test_a_cancelled_event_hides_no_failure_that_a_retry_mends(rest: Rest, app: App) -> None:
    """Otherwise the sender of the batch would drop the event that failed."""
    await send_events(rest, EVENTS, sale(1))
    app.clock.advance(MINUTE)
    await send_events(rest, f"{EVENTS}/cancel", sale(1))
    with store_that_fails(app, "append_atomic"):
        answer = await send_events(rest, EVENTS, [sale(1), sale(2)])
    assert_problem(answer, "store_unavailable", "event '2' of '/till'", "0 of 2 events")
    refused = await send_events(rest, EVENTS, [sale(1), sale(2)])
    names = ("event '1' of '/till'", "1 of 2 events")
    assert_problem(refused, "token_cancelled", *names)


async def test_the_cancel_of_one_add_is_logged_with_its_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By each route; of several adds, only how many were cancelled."""
    caplog.set_level(logging.INFO, "counter.requests")
    async with running("memory", tmp_path, log_requests="all") as app:
        await send_events(app.rest, EVENTS, sale(1))
        token = fresh(app.clock.now_us())
        app.clock.advance(MINUTE)
        for events in (sale(1), [sale(1), sale(2, kind="seen")]):
            await send_events(app.rest, f"{EVENTS}/cancel", events)
        one, none = item("c", 1, token), {"counter": "c"}
        for items in ([one], [one, none], [none]):
            url = "/v1/namespaces/default/batch/cancel"
            await app.http.post(url, json={"items": items})
    lines = [each.__dict__["fields"] for each in caplog.records if each.name == "counter.requests"]
    ingested, *cancels = [each for each in lines if each["method"] == "POST"]
    found = [(each.get("token"), each.get("outcome", each.get("outcomes"))) for each in cancels]
    assert found == [
        (ingested["token"], "cancelled"),
        (None, {"cancelled": 1, "refused": 1}),
        (one["idempotency_token"]["token"], "cancelled"),
        (None, {"cancelled": 1, "refused": 1}),
        (None, "refused"),
    ]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, "delta is missing"),
        ({"operation": "clear", "delta": 1}, "delta is 1"),
        ({"operation": "increment", "delta": 1}, "operation"),
        ({"delta": 2**63}, "delta"),
    ],
)
async def test_a_body_that_cancels_nothing_is_refused(
    rest: Rest, app: App, body: Mapping[str, Any], names: str
) -> None:
    tokens = Cancels(rest, app)
    assert_problem(await tokens.send(f"{COUNTER}/cancel", body), "invalid_body", names)


async def test_a_cancel_needs_events_and_a_token(rest: Rest, app: App) -> None:
    await rest.http.put("/v1/namespaces/rough", json={"counter_type": "BEST_EFFORT"})
    url = "/v1/namespaces/rough/counters/c/cancel"
    assert_problem(await rest.http.post(url, json={"delta": 1}), "not_supported", "BEST_EFFORT")
    url = "/v1/namespaces/default/counters/c/cancel"
    assert_problem(await rest.http.post(url, json={"delta": 1}), "token_missing")
    ahead = fresh(app.clock.now_us() + MINUTE)
    answer = await rest.http.post(url, json={"delta": 1, "idempotency_token": on_wire(ahead)})
    assert_problem(answer, "token_in_future")
