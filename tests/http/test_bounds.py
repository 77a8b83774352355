"""A bounded add is counted or refused once and for all, and every retry says which."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.app import App, every_store, running
from tests.support.problems import assert_problem, problem_of
from tests.support.rest import Json, Rest, fresh, item, on_wire
from tests.support.times import MINUTE, SECOND

COUNTER = "/v1/namespaces/default/counters/c"
#: The stores that keep bounds.
keeps = pytest.mark.parametrize("storage", ["sqlite", "postgresql"], indirect=True)
#: The members of a refusal, besides those of each problem.
AT_MOST_2 = {"counter": "c", "count": 2, "at_most": 2, "room": 0}


@pytest.fixture
def now_us(app: App) -> int:
    return app.clock.now_us()


def bounded(body: Mapping[str, Any], now_us: int, at_most: int | None = 2) -> Json:
    return {**body, "at_most": at_most, "idempotency_token": on_wire(fresh(now_us))}


async def outcomes(rest: Rest, items: list[Json]) -> list[Json]:
    results: list[Json] = (await rest.batch_add(items)).json()["results"]
    return results


def assert_refused(answer: httpx.Response, members: Mapping[str, Any]) -> None:
    problem = assert_problem(answer, "bound_reached", applied=False)
    assert {name: problem[name] for name in members} == members
    assert "idempotency-replayed" not in answer.headers


@keeps
@pytest.mark.parametrize("to", ["add", "add-and-get"])
async def test_an_add_at_the_bound_is_refused(rest: Rest, app: App, now_us: int, to: str) -> None:
    """Now, at every retry, and late; an accepted one is replayed, though there is no room left."""
    bodies = [bounded({"delta": delta}, now_us) for delta in (2, 1)]
    for pause_us in (0, 0, SECOND, MINUTE, 5 * MINUTE):
        await app.roll_up_after(pause_us)
        accepted, refused = [await rest.http.post(f"{COUNTER}/{to}", json=each) for each in bodies]
        assert accepted.status_code == 200, accepted.text
        assert_refused(refused, AT_MOST_2)
        assert await rest.count("c") == 2
    less = {**bodies[1], "at_most": 3}
    assert_problem(await rest.http.post(f"{COUNTER}/{to}", json=less), "token_conflict")


@keeps
async def test_a_key_keeps_its_refusal(rest: Rest, app: App) -> None:
    for pause_us in (0, SECOND, MINUTE):
        await app.roll_up_after(pause_us)
        for key, status in (("one", 200), ("two", 409)):
            body = {"delta": -2, "at_least": -3}
            headers = {"idempotency-key": key}
            answer = await rest.http.post(f"{COUNTER}/add", json=body, headers=headers)
            assert answer.status_code == status, answer.text
    assert problem_of(answer)["room"] == 1
    assert await rest.count("c") == -2


@keeps
@pytest.mark.parametrize("kind", ["items", "lines"])
async def test_items_of_a_batch_are_refused_each_by_itself(
    rest: Rest, now_us: int, kind: str
) -> None:
    tokens = [fresh(now_us) for _ in range(4)]
    items = [{**item("c", 1, each), "at_most": 2} for each in tokens]
    items[1] = item("d", 1, tokens[1])
    for replayed in (False, True):
        if kind == "items":
            found = await outcomes(rest, items)
        else:
            found = await rest.batch_lines("\n".join(map(json.dumps, items)).encode())
        assert [each.get("replayed") for each in found] == [replayed, replayed, replayed, None]
        assert found[3]["code"] == "bound_reached"
        assert {name: found[3][name] for name in AT_MOST_2} == AT_MOST_2
    assert [await rest.count(name) for name in "cd"] == [2, 1]


@keeps
async def test_an_atomic_add_is_refused_as_a_whole(rest: Rest, app: App, now_us: int) -> None:
    items = [{"counter": "a", "delta": 1}, {"counter": "c", "delta": 3, "at_most": 2}]
    body = {"items": items, "idempotency_token": on_wire(fresh(now_us))}
    for pause_us in (0, SECOND, MINUTE):
        await app.roll_up_after(pause_us)
        answer = await rest.http.post("/v1/namespaces/default/atomic/add", json=body)
        assert_refused(answer, {"counter": "c", "count": 0, "at_most": 2, "room": 2})
    assert [await rest.count(name) for name in "ac"] == [0, 0]


@keeps
async def test_a_refusal_is_in_the_log_and_can_be_cancelled(rest: Rest, now_us: int) -> None:
    """It counts 0 there. A cancel has the bounds of the add, or is a conflict."""
    bodies = [bounded({"delta": delta}, now_us) for delta in (2, 1)]
    for each in bodies:
        await rest.http.post(f"{COUNTER}/add", json=each)
    events = (await rest.http.get(f"{COUNTER}/events")).json()["events"]
    refused = {"delta": 1, "count": 2, "at_most": 2}
    assert sorted((each["delta"], each["at_most"], each.get("refused")) for each in events) == [
        (0, 2, refused),
        (2, 2, None),
    ]
    for each, was_counted in zip(bodies, (True, False), strict=True):
        plain = {name: value for name, value in each.items() if name != "at_most"}
        answer = await rest.http.post(f"{COUNTER}/cancel", json=plain)
        assert_problem(answer, "token_conflict")
        answer = await rest.http.post(f"{COUNTER}/cancel", json=each)
        assert answer.json()["was_counted"] is was_counted
        answer = await rest.http.post(f"{COUNTER}/add", json=each)
        assert_problem(answer, "token_cancelled", applied=False)
    assert await rest.count("c") == 0
    assert (await rest.http.get(f"{COUNTER}/events")).json()["events"] == []


@keeps
async def test_a_namespace_keeps_bounds(rest: Rest, now_us: int) -> None:
    """For adds on every way; they are shown, changed, and taken away."""
    url = "/v1/namespaces/default"
    answer = await rest.http.put(url, json={"bounds": {"at_least": 0, "at_most": 2}})
    assert answer.json()["bounds"] == {"at_least": 0, "at_most": 2}
    down = {"delta": -1, "idempotency_token": on_wire(fresh(now_us))}
    refused = {"counter": "c", "count": 0, "at_least": 0, "room": 0}
    assert_refused(await rest.http.post(f"{COUNTER}/add", json=down), refused)
    assert (await outcomes(rest, [item("c", 3, fresh(now_us))]))[0]["at_most"] == 2
    answer = await rest.http.post(
        f"{url}/atomic/add",
        json={
            "items": [{"counter": "c", "delta": 3}],
            "idempotency_token": down["idempotency_token"],
        },
    )
    assert answer.status_code == 409
    answer = await rest.http.put(url, json={"bounds": {}})
    assert "bounds" not in answer.json()
    assert "bounds" not in (await rest.http.get(url)).json()
    assert_refused(await rest.http.post(f"{COUNTER}/add", json=down), refused)
    down["idempotency_token"] = on_wire(fresh(now_us))
    assert (await rest.http.post(f"{COUNTER}/add", json=down)).status_code == 200
    assert await rest.count("c") == -1


@pytest.mark.parametrize(
    ("bounds", "names"),
    [
        ({"at_most": 2**63}, ("at_most", str(2**63))),
        ({"at_least": 1.5}, ("at_least", "1.5")),
        ({"at_least": "1"}, ("at_least",)),
        ({"at_least": 3, "at_most": 2}, ("at_least is 3", "at_most is 2")),
    ],
)
async def test_bounds_that_are_wrong_are_named(
    rest: Rest, now_us: int, bounds: Json, names: tuple[str, ...]
) -> None:
    """Of an add, of items, of an atomic add, of a cancel, and of a namespace."""
    token = fresh(now_us)
    add = {"delta": 1, "idempotency_token": on_wire(token), **bounds}
    url = "/v1/namespaces/default"
    for to in ("add", "cancel"):
        answer = await rest.http.post(f"{COUNTER}/{to}", json=add)
        assert_problem(answer, "invalid_body", *names)
    atomic = {"items": [{"counter": "c", "delta": 1, **bounds}]}
    for to in ("add", "cancel"):
        sent = {**atomic, "idempotency_token": on_wire(token)}
        answer = await rest.http.post(f"{url}/atomic/{to}", json=sent)
        assert_problem(answer, "invalid_body", *names)
    [outcome] = await outcomes(rest, [{**item("c", 1, token), **bounds}])
    assert outcome["code"] == "invalid_body"
    assert all(name in str(outcome) for name in names)
    answer = await rest.http.put(url, json={"bounds": bounds})
    assert_problem(answer, "invalid_body", *names)
    assert await rest.count("c") == 0


async def problems_of(rest: Rest, now_us: int, bounds: Json) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the answer to *bounds* in each body that has them, and the path to them there."""
    url = "/v1/namespaces/default"
    token = on_wire(fresh(now_us))
    plain = {"counter": "c", "delta": 1}
    add = {"delta": 1, "idempotency_token": token, **bounds}
    atomic = {"items": [plain, {**plain, **bounds}], "idempotency_token": token}
    answers = [
        *[("", await rest.http.post(f"{COUNTER}/{to}", json=add)) for to in ("add", "cancel")],
        *[
            ("items.1.", await rest.http.post(f"{url}/atomic/{to}", json=atomic))
            for to in ("add", "cancel")
        ],
    ]
    batch = {"items": [item("c", 0, fresh(now_us)), {**plain, **add}]}
    return [
        *((at, assert_problem(answer, "invalid_body")) for at, answer in answers),
        *[
            (
                "items.1.",
                (await rest.http.post(f"{url}/batch/{to}", json=batch)).json()["results"][1],
            )
            for to in ("add", "cancel")
        ],
    ]


@pytest.mark.parametrize("value", [2**63, 1.5, "1", [2]])
async def test_a_wrong_bound_has_the_name_of_its_field(
    rest: Rest, now_us: int, value: object
) -> None:
    """And no other: null is allowed, and is not said to be expected."""
    answer = await rest.http.put("/v1/namespaces/default", json={"bounds": {"at_most": value}})
    found = await problems_of(rest, now_us, {"at_most": value})
    for at, problem in [*found, ("bounds.", problem_of(answer))]:
        assert problem["detail"].startswith(f"{at}at_most: "), problem
        assert [each["field"] for each in problem["errors"]] == [f"{at}at_most"]


async def test_bounds_that_contradict_each_other_have_the_index_of_their_item(
    rest: Rest, now_us: int
) -> None:
    for at, problem in await problems_of(rest, now_us, {"at_least": 3, "at_most": 2}):
        assert problem["detail"].startswith(f"{at}at_least is 3"), problem


async def test_a_cancelled_clear_has_no_bounds(rest: Rest, now_us: int) -> None:
    body = {"operation": "clear", "at_most": 2, "idempotency_token": on_wire(fresh(now_us))}
    assert_problem(await rest.http.post(f"{COUNTER}/cancel", json=body), "invalid_body", "clear")


@every_store
async def test_a_store_keeps_bounds_or_says_which_ones_do(
    rest: Rest, app: App, now_us: int
) -> None:
    """Nothing is written then, and the other items of a batch are added."""
    url = "/v1/namespaces/default"
    body = bounded({"delta": 1}, now_us)
    items = [{**item("c", 1, fresh(now_us)), "at_most": 2}, item("d", 1, fresh(now_us))]
    atomic = {"items": [{"counter": "c", "delta": 1, "at_most": 2}]}
    answers = [
        await rest.http.post(f"{COUNTER}/add", json=body),
        await rest.http.post(f"{COUNTER}/add-and-get", json=bounded({"delta": 1}, now_us)),
        await rest.http.post(
            f"{url}/atomic/add", json={**atomic, "idempotency_token": on_wire(fresh(now_us))}
        ),
        await rest.http.put(url, json={"bounds": {"at_most": 2}}),
    ]
    kept = app.store.capabilities.bounds
    for answer in answers:
        if kept:
            assert answer.status_code in (200, 409), answer.text
        else:
            assert_problem(answer, "not_supported", "SQLite", "PostgreSQL")
    found = await outcomes(rest, items)
    assert found[1]["replayed"] in (False, None)
    if not kept:
        assert found[0]["code"] == "not_supported"
        assert [await rest.count(name) for name in "cd"] == [0, 1]


async def test_a_store_without_bounds_refuses_them_on_a_socket(fast_dir: Path) -> None:
    """Regression: the add was gathered with others, and counted."""
    async with running("memory", fast_dir, over_socket=True) as app:
        body = bounded({"delta": 7}, app.clock.now_us(), at_most=5)
        answer = await app.rest.http.post(f"{COUNTER}/add", json=body)
        assert_problem(answer, "not_supported", "SQLite", "PostgreSQL")
        assert await app.rest.count("c") == 0


@keeps
async def test_bounds_that_are_sent_again_are_a_change(rest: Rest) -> None:
    """When it is answered, no add that does not know them is in flight."""
    url, body = "/v1/namespaces/default", {"bounds": {"at_most": 2}}
    tags = [(await rest.http.put(url, json=body)).headers["etag"] for _ in range(2)]
    assert tags[0] != tags[1]
    again = await rest.http.put(url, json={"adds_per_s": 0})
    assert again.headers["etag"] == tags[1]


async def test_best_effort_counters_have_no_bounds(rest: Rest, now_us: int) -> None:
    await rest.http.put("/v1/namespaces/rough", json={"counter_type": "BEST_EFFORT"})
    url = "/v1/namespaces/rough"
    for body in ({"delta": 1, "at_most": 2}, bounded({"delta": 1}, now_us)):
        answer = await rest.http.post(f"{url}/counters/c/add", json=body)
        assert_problem(answer, "not_supported", "BEST_EFFORT")
    answer = await rest.http.post(
        f"{url}/batch/add",
        json={"items": [{"counter": "c", "delta": 1, "at_most": 2}, {"counter": "d", "delta": 1}]},
    )
    first, second = answer.json()["results"]
    assert (first["code"], second["delta"]) == ("not_supported", 1)
    answer = await rest.http.put(url, json={"bounds": {"at_most": 2}})
    assert_problem(answer, "not_supported", "BEST_EFFORT")
