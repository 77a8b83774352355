"""Holds over HTTP: an amount is reserved, and settled, released or expires, exactly once."""

import base64
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.routes.holds import format_hold
from counter.api_keys import Scope
from counter.core.resolve import Resolver
from counter.holds import HoldId, held_name
from counter.ops.audit import Auditor, State, described
from counter.types import CounterUpdate, Token
from tests.support.app import App, running
from tests.support.keys import hand_out
from tests.support.problems import assert_problem
from tests.support.rest import Json, Rest, fresh, item, on_wire, uuid7
from tests.support.times import HOUR, MINUTE, SECOND, rfc3339

over_sqlite = pytest.mark.parametrize("storage", ["sqlite"], indirect=True)
#: The stores that keep holds.
keeps = pytest.mark.parametrize("storage", ["sqlite", "postgresql"], indirect=True)
COUNTER = "/v1/namespaces/default/counters/c"
HOLDS = "/v1/namespaces/default/holds"


class Holder:
    """Holds amounts of counter "c", each under a token of its own."""

    def __init__(self, rest: Rest, app: App) -> None:
        self.rest, self.app, self.http = rest, app, rest.http

    async def hold(self, amount: int, expires_in: str = "1m", **more: Any) -> httpx.Response:
        body = {"amount": amount, "expires_in": expires_in, **more}
        body.setdefault("idempotency_token", on_wire(fresh(self.app.clock.now_us())))
        return await self.http.post(f"{COUNTER}/holds", json=body)

    async def held(self, amount: int, expires_in: str = "1m", **more: Any) -> str:
        """Hold it; return the path of the hold."""
        answer = await self.hold(amount, expires_in, **more)
        assert answer.status_code == 201, answer.text
        return f"{HOLDS}/{answer.json()['hold']}"

    async def settle(self, hold: str, amount: int) -> httpx.Response:
        return await self.http.post(f"{hold}/settle", json={"amount": amount})

    async def release(self, hold: str) -> httpx.Response:
        return await self.http.post(f"{hold}/release")

    async def extend(self, hold: str, expires_in: str) -> httpx.Response:
        return await self.http.patch(hold, json={"expires_in": expires_in})

    async def shown(self, counter: str = "c") -> tuple[int, int, int]:
        """The count, and what is held upwards and downwards, by an accurate get."""
        found = (await self.rest.get(counter, "0s")).json()
        return found["count"], found.get("held", 0), found.get("held_down", 0)

    async def open(self, **params: Any) -> Json:
        answer = await self.http.get(HOLDS, params={"counter": "c", **params})
        assert answer.status_code == 200, answer.text
        found: Json = answer.json()
        return found


@pytest.fixture
def holder(rest: Rest, app: App) -> Holder:
    return Holder(rest, app)


async def at_once(_: float) -> None:
    """No pause between two passes of an audit."""


def answered(answer: httpx.Response, status: int = 200) -> Json:
    assert answer.status_code == status, answer.text
    found: Json = answer.json()
    return found


@keeps
async def test_a_hold_is_settled(holder: Holder, app: App) -> None:
    """Each answer shows the hold, and the counter right after; a retry gets the same."""
    token = fresh(app.clock.now_us())
    body: Json = {"at_most": 1_000, "idempotency_token": on_wire(token)}
    began = answered(await holder.hold(50, "15m", **body), 201)
    hold = {"namespace": "default", "counter": "c", "hold": began["hold"], "amount": 50}
    expires_at = rfc3339(app.clock.now_us() + 15 * MINUTE)
    is_open = {**hold, "state": "open", "expires_at": expires_at}
    as_of = rfc3339(app.clock.now_us())
    sums = {"count": 0, "held": 50, "as_of": as_of}
    assert began == {**is_open, **sums, "replayed": False}
    assert answered(await holder.hold(50, "15m", **body), 201) == {**began, "replayed": True}
    path = f"{HOLDS}/{began['hold']}"
    assert answered(await holder.http.get(path)) == is_open
    assert await holder.open() == {"holds": [is_open], "next_page": None}
    assert await holder.shown() == (0, 50, 0)
    ended = {**hold, "state": "settled", "settled": 37}
    for _ in range(2):
        settled = answered(await holder.settle(path, 37))
        found = answered(await holder.http.get(path))
        assert found == {**ended, "ended_at": found["ended_at"]}
        assert settled == {**found, "count": 37, "held": 0, "as_of": settled["as_of"]}
    assert await holder.open() == {"holds": [], "next_page": None}
    assert await holder.shown() == (37, 0, 0)


@keeps
async def test_more_than_was_held_counts_in_full(holder: Holder) -> None:
    """Also past the bound: the cost is there already."""
    path = await holder.held(50, at_most=50)
    settled = answered(await holder.settle(path, 60))
    assert (settled["over"], settled["settled"], settled["count"]) == (True, 60, 60)
    assert answered(await holder.http.get(path))["over"] is True


@keeps
async def test_a_hold_ends_once(holder: Holder, app: App) -> None:
    """Whatever else is asked gets that end; a get shows it."""
    tokens = [on_wire(fresh(app.clock.now_us())) for _ in range(3)]
    settled, released, expired = [await holder.held(5, idempotency_token=token) for token in tokens]
    answered(await holder.settle(settled, 3))
    assert answered(await holder.release(released))["state"] == "released"
    app.clock.advance(MINUTE)
    ends = ((settled, "settled", True), (released, "released", False), (expired, "expired", False))
    for (path, state, applied), token in zip(ends, tokens, strict=True):
        others = [
            await holder.settle(path, 4),
            await holder.extend(path, "1m"),
            await holder.hold(5, idempotency_token=token),
        ]
        if state != "released":
            others.append(await holder.release(path))
        for each in others:
            problem = assert_problem(each, f"hold_{state}", "ended_at", applied=applied)
            assert problem.get("settled") == (3 if state == "settled" else None)
        assert answered(await holder.http.get(path))["state"] == state
    assert answered(await holder.release(released))["held"] == 0
    assert await holder.shown() == (3, 0, 0)


@keeps
async def test_a_hold_without_room_is_refused(holder: Holder, app: App) -> None:
    """By the count and by what is held; for ever. So is an add."""
    await holder.held(60, at_most=100)
    body: Json = {"at_most": 100, "idempotency_token": on_wire(fresh(app.clock.now_us()))}
    refused = {"counter": "c", "count": 0, "held": 60, "at_most": 100, "room": 40}
    for _ in range(2):
        problem = assert_problem(await holder.hold(41, **body), "bound_reached", applied=False)
        assert {name: problem[name] for name in refused} == refused
        app.clock.advance(SECOND)
    add = {"delta": 41, "at_most": 100, "idempotency_token": on_wire(fresh(app.clock.now_us()))}
    problem = assert_problem(
        await holder.http.post(f"{COUNTER}/add", json=add), "bound_reached", applied=False
    )
    assert {name: problem[name] for name in refused} == refused
    path = holder.rest.path()
    answered(await holder.http.put(path, json={"bounds": {"at_most": 100}}))
    assert_problem(await holder.hold(41), "bound_reached", "of the namespace", applied=False)
    await holder.held(40)


@keeps
async def test_a_hold_is_extended(holder: Holder, app: App) -> None:
    """Never to an earlier time."""
    path = await holder.held(5)
    app.clock.advance(30 * SECOND)
    expires_at = rfc3339(app.clock.now_us() + 5 * MINUTE)
    for expires_in in ("5m", "1m"):
        assert answered(await holder.extend(path, expires_in))["expires_at"] == expires_at


@keeps
async def test_amounts_less_than_0_are_held_downwards(holder: Holder) -> None:
    await holder.rest.add("c", 10, key="1")
    path = await holder.held(-4, at_least=0)
    assert answered(await holder.hold(-6, at_least=0), 201)["held"] == -10
    assert await holder.shown() == (10, 0, -10)
    problem = assert_problem(await holder.hold(-1, at_least=0), "bound_reached", applied=False)
    assert (problem["count"], problem["held"], problem["room"]) == (10, -10, 0)
    assert answered(await holder.settle(path, -4))["count"] == 6
    other = await holder.held(7)
    assert (await holder.rest.get("c", "0s")).json()["held_down"] == -6
    for wrong, amount in ((other, -1), (path, 1)):
        assert_problem(await holder.settle(wrong, amount), "invalid_body", "same sign")


@keeps
async def test_the_key_of_a_hold_is_its_token(holder: Holder, app: App) -> None:
    """A UUIDv7, or arbitrary text; neither is needed twice."""
    body = {"amount": 5, "expires_in": "1m"}
    for key in (uuid7(app.clock.now_us()), "order 7"):
        headers = {"idempotency-key": key}
        url = f"{COUNTER}/holds"
        first, again = [await holder.http.post(url, json=body, headers=headers) for _ in range(2)]
        assert answered(first, 201)["hold"] == answered(again, 201)["hold"]
        assert "idempotency-ttl" in first.headers
        other = {**body, "amount": 6}
        answer = await holder.http.post(url, json=other, headers=headers)
        assert_problem(answer, "token_conflict")
    assert_problem(await holder.http.post(f"{COUNTER}/holds", json=body), "token_missing")


@over_sqlite
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "amount"),
        ({"amount": 5}, "expires_in"),
        ({"amount": 0}, "amount"),
        ({"amount": 1.5}, "amount"),
        ({"amount": 2**63}, "amount"),
        ({"amount": True}, "amount"),
        ({"expires_in": "999ms"}, "expires_in"),
        ({"expires_in": "8d"}, "expires_in"),
        ({"expires_in": "15"}, "expires_in"),
        ({"expires_in": 15}, "expires_in"),
        ({"at_most": "x"}, "at_most"),
        ({"at_least": 2, "at_most": 1}, "at_least"),
        ({"delta": 5}, "delta"),
    ],
)
async def test_a_wrong_hold_is_refused(holder: Holder, body: Json, field: str) -> None:
    whole = {"amount": 5, "expires_in": "1m"} | body
    if body in ({}, {"amount": 5}):
        whole = body
    headers = {"idempotency-key": "1"}
    answer = await holder.http.post(f"{COUNTER}/holds", json=whole, headers=headers)
    assert_problem(answer, "invalid_body", field)


@over_sqlite
async def test_a_wrong_end_is_refused(holder: Holder) -> None:
    path = await holder.held(5)
    for body in ({}, {"amount": "5"}, {"amount": None}, {"amount": 2**63}, {"delta": 5}):
        answer = await holder.http.post(f"{path}/settle", json=body)
        assert_problem(answer, "invalid_body", "amount" if "delta" not in body else "delta")
    for expires_in in ("999ms", "8d", "x"):
        assert_problem(await holder.extend(path, expires_in), "invalid_body", "expires_in")
    assert await holder.shown() == (0, 5, 0)


@over_sqlite
async def test_what_is_no_id_is_refused(holder: Holder, app: App) -> None:
    path = await holder.held(5)
    text = path.rpartition("/")[2]
    held = base64.urlsafe_b64encode(bytes(24) + b"\x01+c").decode().rstrip("=")
    for wrong in ("x", text[:-1], text[:20], text + "=", text + "A", "%FF", "é", held, "-" * 999):
        url = f"{HOLDS}/{wrong}"
        for answer in (
            await holder.http.get(url),
            await holder.settle(url, 1),
            await holder.release(url),
            await holder.extend(url, "1m"),
        ):
            assert_problem(answer, "invalid_parameter", "is not the id of a hold")
    assert await holder.shown() == (0, 5, 0)


@over_sqlite
async def test_a_release_takes_no_amount(holder: Holder) -> None:
    """Regression: it was ignored, so a client that meant to settle lost the cost."""
    path = await holder.held(5)
    for body in (b'{"amount": 3}', b"hello"):
        answer = await holder.http.post(f"{path}/release", content=body)
        assert_problem(answer, "invalid_body", f"begins with {body.decode()!r}")
    assert await holder.shown() == (0, 5, 0)
    assert (await holder.http.post(f"{path}/release", content=b"{}")).status_code == 200


@over_sqlite
async def test_the_tokens_in_the_log_of_a_hold_are_of_no_add(holder: Holder) -> None:
    """Their cancel says what to do: for the hold itself, and for a settle."""
    path = await holder.held(5)
    await holder.settle(path, 4)
    events = (await holder.http.get(f"{COUNTER}/events")).json()["events"]
    assert {each["hold"]["state"] for each in events} == {"settled", "begun"}
    for each in events:
        token = {"token": each["event_id"], "generation_time": each["event_time"]}
        body = {"delta": each["delta"], "idempotency_token": token}
        answer = await holder.http.post(f"{COUNTER}/cancel", json=body)
        assert_problem(answer, "token_conflict", "the settle of a hold is corrected with an add")
    assert await holder.shown() == (4, 0, 0)


@keeps
async def test_a_hold_that_is_not_known(holder: Holder, app: App) -> None:
    """It may come, until its token is cancelled. In another namespace it is never known."""
    path = await holder.held(5)
    await holder.rest.within("other").create()
    app.clock.advance(SECOND)
    elsewhere = path.replace("default", "other")
    # Regression: no slice has its time, and it was answered 503.
    before = HoldId("c", Token(bytes(16), app.clock.now_us() - 72 * HOUR))
    for url, code in (
        (elsewhere, "hold_unknown"),
        (f"{HOLDS}/{format_hold(before)}", "hold_unknown"),
        (path.replace("default", "no"), "namespace_unknown"),
    ):
        for answer in (
            await holder.http.get(url),
            await holder.settle(url, 1),
            await holder.release(url),
            await holder.extend(url, "1m"),
        ):
            assert_problem(answer, code)


@keeps
@pytest.mark.parametrize("limit", [1, 2, 3, 10])
async def test_open_holds_are_listed_in_pages(holder: Holder, app: App, limit: int) -> None:
    """Those that expire first come first, and each once."""
    for minutes in (3, 1, 2, 1, 5):
        await holder.held(minutes, f"{minutes}m")
    found: list[Json] = []
    page: Json = {}
    while page is not None:
        part = await holder.open(limit=limit, **page)
        assert len(part["holds"]) <= limit
        found += part["holds"]
        page = part["next_page"] and {"page": part["next_page"]}
    assert [each["amount"] for each in found] == [1, 1, 2, 3, 5]
    assert len({each["hold"] for each in found}) == 5


@over_sqlite
async def test_a_list_needs_a_counter(holder: Holder) -> None:
    await holder.held(1, "1m")
    await holder.held(1, "1m")
    page = (await holder.open(limit=1))["next_page"]
    wrong: list[dict[str, Any]] = [
        {},
        {"counter": "a\nb"},
        {"counter": "\x01+c"},
        {"counter": "c", "limit": 0},
        {"counter": "c", "page": "x"},
        {"counter": "d", "page": page},
        {"counter": "c", "more": "1"},
    ]
    for params in wrong:
        assert_problem(await holder.http.get(HOLDS, params=params), "invalid_parameter")
    assert await holder.open(counter="never") == {"holds": [], "next_page": None}


@pytest.mark.parametrize("storage", ["memory", "sqlite"], indirect=True)
async def test_who_has_no_holds_says_so(holder: Holder, storage: str, app: App) -> None:
    """A store that keeps no bounds, and a namespace that keeps no events."""
    namespace, counter = "default", COUNTER
    if storage == "sqlite":
        await holder.rest.within("rough").create("BEST_EFFORT")
        namespace, counter = "rough", COUNTER.replace("default", "rough")
    body: Json = {
        "amount": 5,
        "expires_in": "1m",
        "idempotency_token": on_wire(fresh(app.clock.now_us())),
    }
    hold = (
        base64.urlsafe_b64encode(app.clock.now_us().to_bytes(8, "big") + bytes(16) + b"c")
        .decode()
        .rstrip("=")
    )
    url = f"/v1/namespaces/{namespace}/holds"
    for answer in (
        await holder.http.post(f"{counter}/holds", json=body),
        await holder.http.get(url, params={"counter": "c"}),
        await holder.http.get(f"{url}/{hold}"),
        await holder.extend(f"{url}/{hold}", "1m"),
        await holder.settle(f"{url}/{hold}", 1),
        await holder.release(f"{url}/{hold}"),
        await holder.http.post(f"{counter}/cancel", json={"operation": "hold", **body}),
    ):
        assert_problem(answer, "not_supported", namespace)
    # What is not known to hold anything shows nothing.
    assert "held" not in (await holder.rest.get("c", "0s")).json()


@keeps
async def test_a_hold_is_cancelled_by_its_token(holder: Holder, app: App) -> None:
    token = fresh(app.clock.now_us())
    body: Json = {
        "amount": 5,
        "expires_in": "1m",
        "at_most": 9,
        "idempotency_token": on_wire(token),
    }
    cancel = {"operation": "hold", **body}
    path = await holder.held(**body)
    for wrong, field in (
        ({"delta": 5}, "delta"),
        ({"amount": None}, "amount"),
        ({"expires_in": None}, "expires_in"),
        ({"operation": "add", "delta": 5}, "amount"),
    ):
        answer = await holder.http.post(f"{COUNTER}/cancel", json={**cancel, **wrong})
        assert_problem(answer, "invalid_body", field)
    for other in ({"amount": 4}, {"expires_in": "2m"}, {"at_most": 8}):
        answer = await holder.http.post(f"{COUNTER}/cancel", json={**cancel, **other})
        assert_problem(answer, "token_conflict")
    for _ in range(2):
        cancelled = answered(await holder.http.post(f"{COUNTER}/cancel", json=cancel))
        assert (cancelled["cancelled"], cancelled["was_counted"]) == (True, True)
    assert_problem(await holder.settle(path, 5), "hold_released", applied=False)
    assert_problem(await holder.hold(**body), "hold_released", applied=False)
    assert await holder.shown() == (0, 0, 0)
    cancel["idempotency_token"] = on_wire(fresh(app.clock.now_us()))
    never = answered(await holder.http.post(f"{COUNTER}/cancel", json=cancel))
    assert never["was_counted"] is False
    body["idempotency_token"] = cancel["idempotency_token"]
    assert_problem(await holder.hold(**body), "token_cancelled", applied=False)
    body["idempotency_token"] = on_wire(fresh(app.clock.now_us()))
    answered(await holder.settle(await holder.held(**body), 5))
    answer = await holder.http.post(f"{COUNTER}/cancel", json={"operation": "hold", **body})
    assert_problem(answer, "hold_settled", applied=True)


@keeps
async def test_a_hold_and_an_atomic_add_conflict(holder: Holder, app: App) -> None:
    """Under one token, whichever came first. A single add may share its token, as with one."""
    first, second = [fresh(app.clock.now_us()) for _ in range(2)]
    await holder.held(5, idempotency_token=on_wire(first))
    assert_problem(await holder.rest.atomic_add([("c", 0)], first), "token_conflict")
    assert_problem(await holder.rest.cancel_atomic([("c", 0)], first), "token_conflict")
    assert_problem(await holder.rest.cancel("c", 0, first), "token_conflict")
    await holder.rest.atomic_add([("c", 3)], second)
    assert_problem(await holder.hold(5, idempotency_token=on_wire(second)), "token_conflict")
    assert (await holder.rest.add("c", 4, first)).status_code == 200
    assert await holder.shown() == (7, 5, 0)


@keeps
async def test_the_event_log_shows_holds(holder: Holder, app: App) -> None:
    """When they began, how they ended, and why one was refused."""
    paths = []
    for amount in (50, -7, 9):
        paths.append(await holder.held(amount, at_most=100))
        app.clock.advance(SECOND)
    ids = [each.rpartition("/")[2] for each in paths]
    refused = fresh(app.clock.now_us())
    await holder.hold(101, at_most=100, idempotency_token=on_wire(refused))
    app.clock.advance(SECOND)
    await holder.settle(paths[0], 37)
    app.clock.advance(SECOND)
    await holder.release(paths[1])
    app.clock.advance(MINUTE)
    assert answered(await holder.http.get(paths[2]))["state"] == "expired"
    events = (await holder.rest.events("c"))[::-1]
    names = ("delta", "at_most", "refused", "hold")
    assert [{name: each[name] for name in names if name in each} for each in events] == [
        *(
            {
                "delta": 0,
                "at_most": 100,
                "hold": {"amount": amount, "state": "begun", "hold": hold},
            }
            for amount, hold in zip((50, -7, 9), ids, strict=True)
        ),
        {
            "delta": 0,
            "at_most": 100,
            "refused": {"delta": 101, "at_most": 100, "count": 0, "held": 59},
            "hold": {"amount": 101, "state": "begun", "hold": format_hold(HoldId("c", refused))},
        },
        {"delta": 37, "hold": {"amount": 50, "state": "settled", "hold": ids[0]}},
        {"delta": 0, "hold": {"amount": -7, "state": "released", "hold": ids[1]}},
        {"delta": 0, "hold": {"amount": 9, "state": "expired", "hold": ids[2]}},
    ]


@keeps
async def test_what_is_held_is_no_counter(holder: Holder, app: App) -> None:
    """In no list, sum, search, or exposition, now and when it is rolled up; what is settled is in
    the history."""
    await holder.settle(await holder.held(50), 37)
    await holder.held(50, "10m")
    await holder.held(-3, "10m")
    rest, http = holder.rest, holder.http
    for pause_us in (0, 5 * MINUTE):
        await app.roll_up_after(pause_us)
        listed = (await http.get(rest.path() + "/counters", params={"counts": "true"})).json()
        assert listed["counters"] == ["c"]
        for params in ({"sum": "true"}, {"order": "-count"}):
            listed = (await http.get(rest.path() + "/counters", params=params)).json()
            assert listed["counters"] == ["c"]
            if "sum" in listed:
                assert (listed["sum"]["count"], listed["sum"]["counters"]) == (37, 1)
        found = (await http.get("/v1/search", params={"q": "c"})).json()
        assert "\\u0001" not in str(found)
        busiest = (await http.get(rest.path() + "/busiest")).json()
        assert {each["counter"] for each in busiest["counters"]} <= {"c"}
    exposition = (await http.get(rest.path() + "/metrics")).text
    assert "\x01" not in exposition
    assert 'counter_value{namespace="default",counter="c"} 37' in exposition
    step = {"step": "1h", "from": rfc3339(app.clock.now_us() - HOUR)}
    points = (await http.get(f"{COUNTER}/history", params=step)).json()["points"]
    assert points[-1]["count"] == 37
    name = "%01%2Bc"
    answer = await http.get(f"/v1/namespaces/default/counters/{name}")
    assert_problem(answer, "invalid_parameter")


@keeps
async def test_metrics_have_holds(holder: Holder, app: App) -> None:
    """Those of the namespace what is held, rolled up; those of the process what became of them."""
    path = await holder.held(50, "10m")
    await holder.extend(path, "11m")
    await holder.settle(await holder.held(50), 37)
    await holder.release(await holder.held(-3, "10m"))
    await holder.held(-4, "10m")
    await holder.hold(1, at_most=0)
    await holder.held(5)
    await holder.rest.add("d", 1, key="1")
    await app.roll_up_after(5 * MINUTE)
    await app.roll_up_after(MINUTE)
    exposition = (await holder.http.get(holder.rest.path(verb="metrics"))).text
    samples = dict(
        re.findall(r'^(\w+)\{namespace="default",counter="c"\} (\S+)$', exposition, re.M)
    )
    assert samples == {"counter_value": "37", "counter_held": "50", "counter_held_down": "-4"}
    assert exposition.count("# TYPE counter_held gauge\n") == 1
    assert exposition.endswith("\n# EOF\n")
    await holder.release(path)
    await app.roll_up_after(5 * MINUTE)
    exposition = (await holder.http.get(holder.rest.path(verb="metrics"))).text
    assert "counter_held{" not in exposition
    own = (await holder.http.get("/metrics")).text
    found = dict(re.findall(r'^counter_holds_total\{outcome="(\w+)"\} (\S+)$', own, re.MULTILINE))
    assert {name: float(number) for name, number in found.items()} == {
        "begun": 5,
        "extended": 1,
        "settled": 1,
        "released": 2,
    }
    refused = re.search(r'^counter_adds_total\{outcome="bound_reached"\} (\S+)$', own, re.MULTILINE)
    assert refused is not None
    assert float(refused[1]) == 1
    assert app.application.worker.maintenance.holds_expired == 2


async def test_the_request_log_says_what_became_of_a_hold(
    fast_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "counter.requests")
    async with running("sqlite", fast_dir, log_requests="all") as app:
        holder = Holder(Rest(app.http), app)
        path = await holder.held(5)
        await holder.extend(path, "2m")
        await holder.settle(path, 5)
        await holder.settle(path, 4)
        await holder.release(await holder.held(5))
    fields = [vars(each)["fields"] for each in caplog.records if each.name == "counter.requests"]
    lines = [each for each in fields if "holds" in each["route"]]
    assert [each["outcome"] for each in lines] == [
        *("begun", "extended", "settled", "hold_settled", "begun", "released")
    ]
    assert {each["hold"] for each in lines[:4]} == {path.rpartition("/")[2]}


@keeps
async def test_only_an_accurate_get_has_what_is_held(holder: Holder, app: App) -> None:
    await holder.held(50, "10m")
    await app.roll_up_after(5 * MINUTE)
    assert (await holder.rest.get("c", "1h")).json().get("held") is None
    assert (await holder.rest.get("c", "0s")).json()["held"] == 50
    results = (await holder.rest.batch_get(["c", "d"])).json()["results"]
    assert [each.get("held") for each in results] == [None, None]


@keeps
async def test_head_has_no_body(holder: Holder) -> None:
    path = await holder.held(5)
    for url in (path, f"{HOLDS}?counter=c"):
        answer = await holder.http.head(url)
        assert (answer.status_code, answer.content) == (200, b"")


@keeps
async def test_a_settle_and_a_clear(holder: Holder, app: App) -> None:
    """A hold stays open, and its settle counts after the clear, and after a delete."""
    first, second = [await holder.held(5) for _ in range(2)]
    await holder.rest.clear("c", fresh(app.clock.now_us()))
    assert await holder.shown() == (0, 10, 0)
    app.clock.advance(SECOND)
    assert answered(await holder.settle(first, 5))["count"] == 5
    await holder.rest.delete("c", fresh(app.clock.now_us()))
    app.clock.advance(SECOND)
    assert answered(await holder.settle(second, 4))["count"] == 4


async def test_a_hold_is_charged_as_an_add(fast_dir: Path) -> None:
    """Its begin, its extension, and each of its ends."""
    async with running("sqlite", fast_dir) as app:
        app.http.headers.update(await hand_out(app, Scope.WRITE, adds_per_s=2.0))
        holder = Holder(Rest(app.http), app)
        path = await holder.held(5)
        answered(await holder.extend(path, "2m"))
        for answer in (
            await holder.hold(5),
            await holder.extend(path, "1m"),
            await holder.settle(path, 5),
            await holder.release(path),
        ):
            assert_problem(answer, "rate_limited")
        app.clock.advance(SECOND)
        answered(await holder.settle(path, 5))


async def test_scopes_and_namespaces_of_keys(fast_dir: Path) -> None:
    """A key that reads sees holds; it begins and ends none. Other namespaces are unknown."""
    async with running("sqlite", fast_dir) as app:
        await Rest(app.http, "other").create()
        reads = await hand_out(app, Scope.READ, "default")
        app.http.headers.update(await hand_out(app, Scope.WRITE, "default"))
        holder = Holder(Rest(app.http), app)
        path = await holder.held(5)
        elsewhere = path.replace("default", "other")
        assert_problem(await app.http.get(elsewhere), "namespace_unknown")
        assert_problem(await holder.settle(elsewhere, 5), "namespace_unknown")
        app.http.headers.update(reads)
        assert answered(await app.http.get(path))["state"] == "open"
        assert len((await holder.open())["holds"]) == 1
        for answer in (
            await holder.hold(5),
            await holder.extend(path, "1m"),
            await holder.settle(path, 5),
            await holder.release(path),
        ):
            assert_problem(answer, "scope_insufficient")


@keeps
async def test_what_is_held_is_audited(holder: Holder, app: App) -> None:
    """Damage of its sum is found with that of its counter, and repaired."""
    await holder.held(50, "10m")
    await holder.held(-3, "10m")
    await app.roll_up_after(5 * MINUTE)
    namespace = app.application.service.namespaces.get("default")
    auditor = Auditor(app.store, sleep=at_once)
    (verdict,) = await auditor.audit(namespace, ["c"])
    assert verdict.state is State.RIGHT
    up = held_name("c", 1)
    (head,) = await app.store.rollups.heads(namespace, [up])
    wrong = CounterUpdate(up, (), head.checkpoint._replace(count=7), None)
    through_us = head.checkpoint.time_us + 1_000
    await app.store.rollups.apply(namespace, [wrong], through_us=through_us)
    verdicts = await auditor.audit(namespace, ["c"])
    assert [(each.counter, each.state) for each in verdicts[1:]] == [(up, State.WRONG)]
    assert described(verdicts[1])[0].startswith("what is held upwards of 'c': ")
    assert await auditor.repair(namespace, verdicts, Resolver(app.store, app.clock)) == 1
    await app.roll_up_after(MINUTE)
    await app.roll_up_after(MINUTE)
    assert len(await auditor.audit(namespace, ["c"])) == 1
    assert await holder.shown() == (0, 50, -3)


@keeps
async def test_an_expired_hold_refuses_its_cancel(holder: Holder, app: App) -> None:
    """Before anything has written its end."""
    body: Json = {
        "amount": 5,
        "expires_in": "1m",
        "idempotency_token": on_wire(fresh(app.clock.now_us())),
    }
    await holder.held(**body)
    app.clock.advance(MINUTE)
    answer = await holder.http.post(f"{COUNTER}/cancel", json={"operation": "hold", **body})
    assert_problem(answer, "hold_expired", applied=False)


async def test_holds_are_there_after_a_restart(fast_dir: Path) -> None:
    async with running("sqlite", fast_dir) as app:
        holder = Holder(Rest(app.http), app)
        path = await holder.held(5)
        await app.restart()
        holder = Holder(Rest(app.http), app)
        assert await holder.shown() == (0, 5, 0)
        await holder.rest.batch_add([item("c", 1, fresh(app.clock.now_us()))])
        assert answered(await holder.settle(path, 4))["count"] == 5
