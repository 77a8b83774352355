"""Keys, scopes and rates at the door, both ways in."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from counter.api_keys import Scope
from counter.types import Token
from tests.support.app import App
from tests.support.keys import hand_out, made
from tests.support.rest import fresh, item, on_wire
from tests.support.times import SECOND, START_US
from tests.support.wire import Wire, wired

Header = dict[str, str]
NO_KEY: Header = {}


LATE_US = 30 * SECOND


class Door:
    """A service, and its responses to a client with some key."""

    def __init__(self, app: App, http: httpx.AsyncClient) -> None:
        self.app = app
        self.http = http

    async def key(self, scope: Scope, *namespaces: str, **more: object) -> Header:
        return await hand_out(self.app, scope, *namespaces, **more)

    async def add(
        self, header: Any, namespace: str = "default", *, token: Token | None = None
    ) -> httpx.Response:
        body = {"delta": 1, "idempotency_token": on_wire(token or fresh(self.app.clock.now_us()))}
        path = f"/v1/namespaces/{namespace}/counters/c/add"
        return await self.http.post(path, json=body, headers=header)

    async def batch(self, header: Header, *times_us: int) -> httpx.Response:
        """A batch of adds to counters of their own, with tokens of these times."""
        items = [item(f"c{n}", 1, fresh(time_us)) for n, time_us in enumerate(times_us)]
        path = "/v1/namespaces/default/batch/add"
        return await self.http.post(path, json={"items": items}, headers=header)

    async def get(self, header: Header, namespace: str = "default") -> httpx.Response:
        return await self.http.get(f"/v1/namespaces/{namespace}/counters/c", headers=header)

    async def create(self, name: str, header: Header = NO_KEY, **settings: Any) -> httpx.Response:
        path, body = f"/v1/namespaces/{name}", {"counter_type": "ACCURATE", **settings}
        return await self.http.put(path, json=body, headers=header)


@pytest.fixture
async def door(wire: Wire) -> AsyncIterator[Door]:
    async with wire.client() as http:
        yield Door(wire.app, http)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("code", "")


async def test_while_no_keys_exist_every_request_is_accepted(door: Door) -> None:
    assert (await door.add(NO_KEY)).status_code == 200
    assert (await door.add({"Authorization": "Bearer whatever"})).status_code == 200


async def test_from_the_first_key_on_every_request_needs_one(door: Door) -> None:
    assert (await door.get(NO_KEY)).status_code == 200
    header = await door.key(Scope.WRITE)
    for answer in (await door.add(NO_KEY), await door.get(NO_KEY)):
        assert code(answer) == (401, "key_missing")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["applied"] is None
    assert (await door.add(header)).status_code == 200
    assert (await door.get(header)).json()["count"] == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/nothing"),
        ("PATCH", "/v1/namespaces/default/counters/c"),
        ("GET", "/v1/namespaces/default/counters/c"),
        ("GET", "/v1/namespaces/none/counters/c"),
        ("GET", "/v1/namespaces/default/counters/%00"),
        ("POST", "/v1/namespaces/default/counters/c/add"),
        ("POST", "/v1/namespaces/none/counters/c/add"),
        ("POST", "/v1/namespaces/best/atomic/add"),
        ("GET", "/v1/namespaces/default/counters/c?max_staleness=never"),
    ],
)
async def test_a_client_without_a_key_does_not_learn_what_exists(
    door: Door, method: str, path: str
) -> None:
    """A route, a method, a namespace, a valid name, the type of a namespace, a parameter."""
    await door.app.rest.within("best").create("BEST_EFFORT")
    await door.key(Scope.WRITE)
    expected = await door.get(NO_KEY)
    for header, wanted in ((NO_KEY, "key_missing"), ({"Authorization": "Bearer x"}, "key_invalid")):
        answer = await door.http.request(method, path, headers=header)
        assert code(answer) == (401, wanted)
        assert answer.headers.keys() == expected.headers.keys()


async def test_a_client_without_a_key_learns_nothing_of_the_load(door: Door) -> None:
    header = await door.key(Scope.WRITE)
    load = door.app.application.service.load
    load.admit(load.room)
    assert code(await door.add(NO_KEY)) == (401, "key_missing")
    assert code(await door.add(header)) == (503, "overloaded")


@pytest.mark.parametrize("sent", ["ck_", "Basic dXNlcjpwYXNz", "Bearer", "Bearer ck_a_b", ""])
async def test_an_invalid_key_is_refused(door: Door, sent: str) -> None:
    header = await door.key(Scope.READ)
    assert code(await door.get({"Authorization": sent})) == (401, "key_invalid")
    other_secret = header["Authorization"][:-1] + (
        "b" if header["Authorization"][-1] == "a" else "a"
    )
    answer = await door.get({"Authorization": other_secret})
    assert code(answer) == (401, "key_invalid")
    assert other_secret not in answer.text


async def test_a_key_that_is_revoked_is_out_once_the_process_has_looked(door: Door) -> None:
    key, header = made(Scope.WRITE)
    store, ring = door.app.store, door.app.application.keys
    await store.keys.create_api_key(key)
    await ring.refresh()
    assert (await door.add(header)).status_code == 200
    (standing,) = await store.keys.api_keys()
    gone = replace(standing, revoked_at_us=door.app.clock.now_us())
    assert await store.keys.change_api_key(standing, gone)
    await ring.refresh()
    # On the very connection that has sent adds with it.
    assert code(await door.add(header)) == (401, "key_invalid")
    assert code(await door.get(NO_KEY)) == (401, "key_missing")


async def test_a_key_expires(door: Door) -> None:
    header = await door.key(Scope.READ, expires_at_us=START_US + 60 * SECOND)
    assert (await door.get(header)).status_code == 200
    door.app.clock.advance(60 * SECOND)
    await door.app.application.keys.refresh()
    assert code(await door.get(header)) == (401, "key_invalid")


async def test_each_scope_allows_its_requests(door: Door) -> None:
    read, write, admin = [await door.key(scope) for scope in Scope]
    assert code(await door.add(read)) == (403, "scope_insufficient")
    assert (await door.get(read)).status_code == 200
    assert (await door.add(write)).status_code == 200
    assert (await door.get(write)).status_code == 200
    for each in (read, write):
        refused = await door.create("mine", each)
        assert code(refused) == (403, "scope_insufficient")
        assert refused.json()["scope"] == "admin"
    assert (await door.create("mine", admin)).status_code == 201
    for each, status in ((write, 403), (admin, 204)):
        answer = await door.http.delete("/v1/namespaces/mine", headers=each)
        assert answer.status_code == status


async def test_a_namespace_of_another_key_looks_missing(door: Door) -> None:
    """The same status, headers and body, but for the name: whatever is asked for."""
    mine = await door.key(Scope.ADMIN, "mine", "team-*")
    everything = await door.key(Scope.ADMIN)
    for name in ("mine", "team-a", "theirs"):
        assert (await door.create(name, everything)).status_code == 201
    assert (await door.add(mine, "mine")).status_code == 200
    assert (await door.add(mine, "team-a")).status_code == 200
    for method, path in (
        ("GET", ""),
        ("PUT", ""),
        ("DELETE", ""),
        ("GET", "/counters"),
        ("GET", "/counters/c"),
        ("GET", "/counters/c/events"),
        ("POST", "/counters/c/add"),
        ("POST", "/batch/add"),
        ("POST", "/atomic/add"),
    ):
        statuses = []
        for name in ("theirs", "absent"):
            url = f"/v1/namespaces/{name}{path}"
            answer = await door.http.request(
                method, url, json={}, headers=mine | {"X-Request-Id": "same"}
            )
            statuses.append((answer.status_code, dict(answer.headers), answer.text))
        there, absent = statuses
        assert there[0] == 404
        assert (there[0], there[1], there[2].replace("theirs", "absent")) == absent
    listed = await door.http.get("/v1/namespaces", headers=mine)
    assert [each["namespace"] for each in listed.json()["namespaces"]] == ["mine", "team-a"]


async def test_a_report_of_all_namespaces_needs_a_key_for_all(door: Door) -> None:
    mine, everything = await door.key(Scope.ADMIN, "mine"), await door.key(Scope.READ)
    for path in ("/metrics", "/v1/outcomes"):
        assert code(await door.http.get(path)) == (401, "key_missing")
        assert code(await door.http.get(path, headers=mine)) == (403, "scope_insufficient")
        assert (await door.http.get(path, headers=everything)).status_code == 200
    for path in ("/healthz", "/readyz"):
        assert (await door.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("rate", "policy", "seconds"), [(1.0, "q=1;w=1", 1), (0.1, "q=1;w=10", 10)]
)
async def test_a_rate_is_reported_as_so_many_in_so_many_seconds(
    door: Door, rate: float, policy: str, seconds: int
) -> None:
    slow = await door.key(Scope.READ, requests_per_s=rate)
    assert (await door.get(slow)).status_code == 200
    refused = await door.get(slow)
    assert code(refused) == (429, "rate_limited")
    assert refused.headers["retry-after"] == str(seconds)
    assert refused.headers["ratelimit-policy"] == f'"requests";{policy}'
    assert refused.headers["ratelimit"] == f'"requests";r=0;t={seconds}'
    assert (refused.json()["applied"], refused.json()["retry"]) == (None, "same_token")


async def test_a_key_may_have_so_many_requests_a_second(door: Door) -> None:
    slow = await door.key(Scope.WRITE, requests_per_s=2.0)
    other = await door.key(Scope.WRITE)
    statuses = [(await door.add(slow)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert code(await door.get(slow)) == (429, "rate_limited")
    assert (await door.add(other)).status_code == 200
    door.app.clock.advance(SECOND // 2)
    assert (await door.add(slow)).status_code == 200
    assert (await door.get(other)).json()["count"] == 4


async def test_refused_requests_count_towards_the_rate_of_a_key(door: Door) -> None:
    """Else a key with a rate could guess at names as fast as it likes."""
    key = await door.key(Scope.READ, "mine", requests_per_s=3.0)
    refused = [
        await door.get(key, "theirs"),
        await door.add(key, "mine"),
        await door.http.get("/v1/nowhere", headers=key),
    ]
    assert [each.status_code for each in refused] == [404, 403, 404]
    assert code(await door.get(key, "theirs")) == (429, "rate_limited")
    assert code(await door.http.get("/v1/nowhere", headers=key)) == (429, "rate_limited")


async def test_metrics_take_of_a_keys_requests_and_of_no_other_keys(tmp_path: Path) -> None:
    """Without keys all share one rate, and a flood must not hide itself."""
    async with wired(tmp_path, requests_per_s=1) as wire, wire.client() as http:
        assert [(await http.get("/metrics")).status_code for _ in range(3)] == [200] * 3
        key = await hand_out(wire.app, Scope.READ)
        statuses = [(await http.get("/metrics", headers=key)).status_code for _ in range(2)]
        assert statuses == [200, 429]


async def test_nothing_is_looked_up_for_a_key_that_is_not_for_it(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the refusal must not show whether the key exists."""
    key = await door.key(Scope.READ, "mine")
    namespaces = door.app.application.service.namespaces
    looked: list[str] = []
    for name in ("find", "get", "needs_reread"):
        found = getattr(namespaces, name)

        def look(namespace: str, *given: object, _found: object = found, **more: object) -> object:
            looked.append(namespace)
            return _found(namespace, *given, **more)  # type: ignore[operator]

        monkeypatch.setattr(namespaces, name, look)
    assert code(await door.get(key)) == (404, "namespace_unknown")
    assert code(await door.add(key)) == (404, "namespace_unknown")
    assert looked == []


async def test_a_key_may_make_so_many_adds_a_second_in_batches_too(door: Door) -> None:
    key, now_us = await door.key(Scope.WRITE, adds_per_s=3.0), door.app.clock.now_us()
    assert (await door.batch(key, *[now_us] * 5)).status_code == 200
    assert code(await door.add(key)) == (429, "rate_limited")
    assert code(await door.batch(key, now_us)) == (429, "rate_limited")
    listed = await door.http.get("/v1/namespaces/default/counters", headers=key)
    assert listed.json()["counters"] == [f"c{number}" for number in range(5)]


async def test_a_namespace_has_rates_that_all_its_callers_share(door: Door) -> None:
    made_ns = await door.create("slow", adds_per_s=2, requests_per_s=3)
    assert (made_ns.json()["adds_per_s"], made_ns.json()["requests_per_s"]) == (2, 3)
    one, two = await door.key(Scope.WRITE), await door.key(Scope.WRITE)
    statuses = [(await door.add(each, "slow")).status_code for each in (one, two, one)]
    assert statuses == [200, 200, 429]
    assert code(await door.get(two, "slow")) == (429, "rate_limited")
    assert (await door.add(one)).status_code == 200
    everything = await door.key(Scope.ADMIN)
    more = await door.http.put("/v1/namespaces/slow", json={"adds_per_s": 0}, headers=everything)
    assert more.json()["adds_per_s"] == 0


async def test_expensive_requests_have_rates_of_their_own(door: Door) -> None:
    key = await door.key(Scope.WRITE, reservations_per_s=1.0, resolutions_per_s=1.0)
    path = "/v1/namespaces/default/counters/c/add"
    named = [
        await door.http.post(path, json={"delta": 1}, headers=key | {"Idempotency-Key": f"o{n}"})
        for n in range(2)
    ]
    assert [each.status_code for each in named] == [200, 429]
    token = fresh(door.app.clock.now_us() - LATE_US)
    late = [code(await door.add(key, token=token)) for _ in range(3)]
    assert late == [(410, "token_too_old"), *[(429, "rate_limited")] * 2]
    # Neither keeps the usual adds from being taken.
    assert (await door.add(key)).status_code == 200
    # The outcome of a rejected one is known: nothing was applied.
    tally = door.app.application.service.tally
    assert (tally["voided"], tally["refused"], tally["unknown"]) == (1, 3, 0)


async def test_a_batch_of_late_tokens_is_admitted_whole_or_not(door: Door) -> None:
    """One refusal serves all: a task and an error for each took three times an add."""
    key = await door.key(Scope.WRITE, resolutions_per_s=2.0)

    async def codes(late: int) -> list[str]:
        now_us = door.app.clock.now_us()
        answer = await door.batch(key, now_us, *[now_us - LATE_US] * late, now_us)
        results = answer.json()["results"]
        refused = [each for each in results if each.get("code") == "rate_limited"]
        assert all(each == refused[0] for each in refused)
        return [each.get("code", "added") for each in results]

    assert await codes(7) == ["added", *["token_too_old"] * 7, "added"]
    assert await codes(5) == ["added", *["rate_limited"] * 5, "added"]
    assert door.app.application.pipeline.authorizer.limited["resolutions"] == 1
    assert door.app.application.service.tally["refused"] == 5


async def test_a_batch_of_events_takes_more_than_a_second_has_or_nothing(door: Door) -> None:
    """Sent again after days, each of them is a late token, too."""
    key = await door.key(Scope.WRITE, reservations_per_s=100.0, resolutions_per_s=2.0)
    few = await door.key(Scope.WRITE, reservations_per_s=2.0)
    path = "/v1/namespaces/default/events"
    rules = [{"type": "t", "counter": f"c{n}"} for n in range(5)]
    await door.create("default", await door.key(Scope.ADMIN), event_rules=rules)

    def events(source: str, count: int) -> list[dict[str, str]]:
        common = {"specversion": "1.0", "source": source, "type": "t"}
        return [{**common, "id": str(n)} for n in range(count)]

    async def outcomes(header: Header, sent: list[dict[str, str]]) -> set[str]:
        shown = {**header, "prefer": "return=representation"}
        answer = await door.http.post(path, json=sent, headers=shown)
        results = answer.json().get("results", [answer.json()])
        return {each.get("outcome") or each["code"] for each in results}

    assert await outcomes(few, events("a", 7)) == {"original"}
    assert await outcomes(few, events("b", 7)) == {"rate_limited"}
    assert await outcomes(key, events("c", 7)) == {"original"}
    door.app.clock.advance(30 * SECOND)
    assert await outcomes(key, events("c", 7)) == {"replayed"}
    assert await outcomes(key, events("c", 1)) == {"rate_limited"}


async def test_a_hedge_of_ten_takes_ten_and_counts_once(door: Door) -> None:
    key = await door.key(Scope.WRITE, adds_per_s=10.0)
    token = fresh(door.app.clock.now_us())
    sent = (door.add(key, token=token) for _ in range(12))
    statuses = [each.status_code for each in await asyncio.gather(*sent)]
    assert (statuses.count(200), statuses.count(429)) == (10, 2)
    assert (await door.get(key)).json()["count"] == 1


async def test_every_response_has_a_request_id_and_is_not_cached(door: Door) -> None:
    answers = [
        await door.add(NO_KEY),
        await door.get(NO_KEY),
        await door.http.get("/v1/nothing"),
        await door.http.get("/healthz"),
        await door.http.post("/v1/namespaces/default/counters/c/add", content=b"{"),
    ]
    ids = [each.headers["x-request-id"] for each in answers]
    assert len(set(ids)) == len(ids)
    for each in answers:
        assert each.headers["x-content-type-options"] == "nosniff"
        assert each.headers["cache-control"] == "no-store"
    page = await door.http.get("/problems")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_a_request_id_of_the_client_comes_back(door: Door, given: str) -> None:
    for answer in (
        await door.add({"X-Request-Id": given}),
        await door.get({"X-Request-Id": given}),
    ):
        assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "caf\xe9"])
async def test_one_that_could_not_stand_in_a_log_does_not(door: Door, given: str) -> None:
    header = {b"X-Request-Id": given.encode("latin-1")}
    answer = await door.http.get("/v1/namespaces/default/counters/c", headers=header)
    assert answer.headers["x-request-id"] not in ("", given)


async def test_requests_refused_before_their_body_have_headers_too(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        answer = await wire.tell(b"get / HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    for each in (b"x-request-id: ", b"x-content-type-options: nosniff", b"cache-control: no-store"):
        assert b"\r\n" + each in answer


async def test_a_refusal_names_the_owner_of_the_rate(door: Door) -> None:
    assert (await door.create("slow", adds_per_s=1)).status_code == 201
    key = await door.key(Scope.WRITE, requests_per_s=3.0)
    assert (await door.add(key, "slow")).status_code == 200
    assert "namespace 'slow' may have 1 adds" in (await door.add(key, "slow")).json()["detail"]
    await door.get(key)
    assert "the key " in (await door.get(key)).json()["detail"]


async def test_if_keys_become_unreadable_requests_are_refused(door: Door) -> None:
    header = await door.key(Scope.READ)
    door.app.clock.advance(61 * SECOND)
    assert code(await door.get(header)) == (503, "store_unavailable")
    ready = await door.http.get("/readyz")
    assert ready.status_code == 503
    assert [each["part"] for each in ready.json()["troubles"]] == ["keys"]
    await door.app.application.keys.refresh()
    assert (await door.http.get("/readyz")).status_code == 200
    assert (await door.get(header)).status_code == 200


async def test_the_first_of_two_keys_counts(door: Door) -> None:
    read, write = await door.key(Scope.READ), await door.key(Scope.WRITE)
    both = [*read.items(), *write.items()]
    assert code(await door.add(both)) == (403, "scope_insufficient")
    assert (await door.add(both[::-1])).status_code == 200
