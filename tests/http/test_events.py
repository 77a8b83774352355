"""Looking into a counter: its events, its history, and its recount."""

import csv
import io
import json

import httpx
import pytest

from tests.support.app import App, every_store
from tests.support.problems import assert_problem
from tests.support.rest import Json, Rest, fresh, on_wire
from tests.support.times import MINUTE, SECOND, rfc3339, to_us


async def filled(rest: Rest, app: App, number: int) -> list[Json]:
    """Add 1, 2, ... a second apart, and the tokens of it, latest first."""
    tokens = []
    for delta in range(1, number + 1):
        token = fresh(app.clock.now_us())
        assert (await rest.add("c", delta, token)).status_code == 200
        tokens.append(on_wire(token))
        app.clock.advance(SECOND)
    return tokens[::-1]


async def test_events_come_latest_first(rest: Rest, app: App) -> None:
    tokens = await filled(rest, app, 5)
    expected = [
        {
            "event_time": token["generation_time"],
            "event_id": token["token"],
            "event_item_key": 0,
            "delta": 5 - position,
        }
        for position, token in enumerate(tokens)
    ]
    assert await rest.events("c") == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1_000])
async def test_pages_hold_every_event_once(rest: Rest, app: App, limit: int) -> None:
    """Also if another one arrives between two pages."""
    await filled(rest, app, 7)
    path, expected = rest.path("c", "events"), await rest.events("c")
    assert await rest.events("c", limit=limit) == expected
    first = (await rest.http.get(path, params={"limit": limit})).json()
    assert first["events"] == expected[:limit]
    await rest.add("c", 99, fresh(app.clock.now_us()))
    if first["next_page"] is not None:
        second = await rest.http.get(path, params={"limit": limit, "page": first["next_page"]})
        assert second.json()["events"] == expected[limit : 2 * limit]


@every_store
async def test_pages_keep_apart_events_of_one_instant(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    for delta in range(20):
        await rest.add("c", delta, fresh(now_us))
    await rest.atomic_add([("c", 20), ("c", 21), ("d", 1)], fresh(now_us))
    events = await rest.events("c", limit=3)
    assert sorted(event["delta"] for event in events) == list(range(22))


async def test_a_span_holds_its_start_and_not_its_end(rest: Rest, app: App) -> None:
    start_us = app.clock.now_us()
    await filled(rest, app, 5)
    events = await rest.events(
        "c", **{"from": rfc3339(start_us + SECOND), "to": rfc3339(start_us + 3 * SECOND)}
    )
    assert [event["delta"] for event in events] == [3, 2]


async def test_a_clear_is_an_event_without_a_delta(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    await rest.clear("c", token)
    (event,) = await rest.events("c")
    assert event["clear"] is True
    assert "delta" not in event
    assert event["event_id"] == on_wire(token)["token"]


@every_store
async def test_events_end_at_retention_and_the_count_stays(rest: Rest, app: App) -> None:
    await filled(rest, app, 5)
    await app.roll_up_after(MINUTE)
    await app.pass_retention()
    assert await rest.events("c") == []
    assert await rest.count("c") == 15
    assert await rest.count("c", "1h") == 15
    await rest.add("c", 100, fresh(app.clock.now_us()))
    assert await rest.count("c") == 115
    assert await rest.names() == ["c"]


async def history(rest: Rest, **params: str) -> list[Json]:
    answer = await rest.http.get(rest.path("c", "history"), params=params)
    assert answer.status_code == 200, answer.text
    points: list[Json] = answer.json()["points"]
    return points


async def rolled_up(rest: Rest, app: App, number: int) -> dict[str, str]:
    """Add as often, close all windows; return the query of a history of it all."""
    start_us = app.clock.now_us()
    await filled(rest, app, number)
    await app.roll_up_after(MINUTE)
    start, end = rfc3339(start_us - MINUTE), rfc3339(app.clock.now_us())
    return {"from": start, "to": end, "step": "10s"}


async def test_history_adds_up_to_the_count(rest: Rest, app: App) -> None:
    span = await rolled_up(rest, app, 45)
    points = await history(rest, **span)
    assert points[-1]["count"] == 45 * 46 // 2
    running = 0
    for point in points:
        running += point["delta"]
        assert point["count"] == running
    times = [to_us(point["time"]) for point in points]
    assert times == sorted(set(times))
    wide = await history(rest, **span | {"step": "30s"})
    assert len(wide) < len(points)
    assert sum(point["delta"] for point in wide) == running
    assert {point["count"] for point in wide} <= {point["count"] for point in points}


async def test_history_starts_again_at_a_clear(rest: Rest, app: App) -> None:
    start = rfc3339(app.clock.now_us())
    await filled(rest, app, 15)
    await rest.clear("c", fresh(app.clock.now_us() - 1))
    span = await rolled_up(rest, app, 3)
    assert (await history(rest, **span | {"from": start}))[-1]["count"] == 6


async def test_history_is_a_table_on_request(rest: Rest, app: App) -> None:
    start_us = app.clock.now_us()
    await filled(rest, app, 25)
    await app.roll_up_after(MINUTE)
    span = {"from": rfc3339(start_us - MINUTE), "to": rfc3339(app.clock.now_us()), "step": "10s"}
    points = await history(rest, **span)
    answer = await rest.http.get(
        rest.path("c", "history"), params=span, headers={"accept": "text/csv"}
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert rows == [{name: str(value) for name, value in point.items()} for point in points]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"step": "0s"}, "step"),
        ({"step": "soon"}, "step"),
        ({"from": "2026-03-01T12:00:00"}, "from"),
        ({"from": "2026-03-01T12:00:00Z", "to": "2026-03-01T11:00:00Z"}, "from"),
    ],
    ids=["zero", "word", "naive", "backwards"],
)
async def test_a_span_out_of_bounds_is_refused(
    rest: Rest, params: dict[str, str], name: str
) -> None:
    answer = await rest.http.get(rest.path("c", "history"), params=params)
    assert_problem(answer, "invalid_parameter", name)


async def test_a_recount_changes_no_count(rest: Rest, app: App) -> None:
    start_us = app.clock.now_us()
    await rolled_up(rest, app, 25)
    answer = await rest.post(rest.path("c", "recount"), {})
    assert answer.status_code == 202, answer.text
    assert answer.json().keys() == {"namespace", "counter", "windows"}
    assert answer.json()["windows"] >= 3
    for _ in range(2):
        assert await rest.count("c") == 325
        assert await rest.count("c", "1h") == 325
        await app.roll_up_after(MINUTE)
    span = {"from": rfc3339(start_us), "to": rfc3339(start_us + 5 * SECOND)}
    narrow = await rest.post(rest.path("c", "recount"), span)
    assert narrow.json()["windows"] == 1


async def test_a_recount_of_a_bad_span_is_refused(rest: Rest) -> None:
    body = {"from": "2026-03-01T12:00:00Z", "to": "2026-03-01T11:00:00Z"}
    assert_problem(await rest.post(rest.path("c", "recount"), body), "invalid_body", "from")


@pytest.mark.parametrize(
    ("time", "is_read"),
    [
        ("2026-03-01T12:00:00Z", True),
        ("2026-03-01t12:00:00.123456789z", True),
        ("2026-03-01 14:00:00.1234567+02:00", True),
        ("2026-03-01T12:00:00", False),
        ("2026-03-01T12:00Z", False),
        ("2026-03-01T12:00:00,5Z", False),
        ("20260301T120000Z", False),
        ("2026-03-01T12:00:00+0000", False),
        ("2026-03-01T11:59:60Z", False),
        ("2026-W09-7T12:00:00Z", False),
        ("now", False),
    ],
)
async def test_a_time_is_written_the_same_way_wherever_it_is_given(
    rest: Rest, time: str, is_read: bool
) -> None:
    token = {"token": "0" * 32, "generation_time": time}
    item = {"counter": "c", "delta": 1, "idempotency_token": token}
    answers = [
        await rest.post(rest.path("c", "add"), {"delta": 1, "idempotency_token": token}),
        await rest.post(
            rest.path("c", "clear"), {"idempotency_token": token | {"token": "1" * 32}}
        ),
        await rest.http.get(rest.path("c", "events"), params={"from": time}),
        await rest.http.get(
            rest.path("c", "history"),
            params={"from": "2000-01-01T00:00:00Z", "to": time, "step": "365d"},
        ),
        await rest.post(rest.path("c", "recount"), {"from": time}),
        await rest.post(rest.path("c", "recount"), {"to": time}),
    ]
    assert [each.is_success for each in answers] == [is_read] * len(answers)
    assert {each.status_code for each in answers if not is_read} <= {400}
    results = [
        *(await rest.batch_add([item])).json()["results"],
        *await rest.batch_lines(json.dumps(item).encode()),
    ]
    assert [each.get("code") == "invalid_body" for each in results] == [not is_read] * 2


async def test_a_span_may_begin_and_end_outside_of_all_times(rest: Rest) -> None:
    far = {"from": "0001-01-01T00:00:00+14:00", "to": "9999-12-31T23:59:59-14:00"}
    assert (await rest.post(rest.path("c", "recount"), far)).status_code == 202
    assert (await rest.http.get(rest.path("c", "events"), params=far)).status_code == 200
    for edge in far.values():
        empty = await rest.post(rest.path("c", "recount"), {"from": edge, "to": edge})
        assert_problem(empty, "invalid_body")


async def test_the_plus_sign_of_an_offset_may_be_sent_as_it_is(rest: Rest) -> None:
    path = rest.path("c", "events")
    for time in ("2026-03-01T14:00:00+02:00", "2026-03-01+14:00:00.5+02:00"):
        assert (await rest.http.get(f"{path}?from={time}")).status_code == 200


@pytest.mark.parametrize(
    ("accept", "is_csv"),
    [
        ([], False),
        (["text/csv"], True),
        (["TEXT/CSV; header=present"], True),
        (["text/csv;q=0"], False),
        (["text/csv; Q=0.0, */*"], False),
        (["application/json;q=0.5, text/csv"], True),
        (["application/json", "text/csv;q=0.9"], False),
        (["application/json;q=0", "text/*"], True),
        (["text/csv, */*"], True),
        (["text/csv;q=0.1, */*;q=0.8"], False),
        (["*/*"], False),
        (["image/png"], False),
        (["text/csv;q=nan"], False),
        (["text/csvx, ;q=1, =,;"], False),
    ],
    ids=str,
)
async def test_history_is_csv_if_the_client_prefers_it(
    rest: Rest, accept: list[str], is_csv: bool
) -> None:
    headers = httpx.Headers([("accept", each) for each in accept])
    request = httpx.Request("GET", rest.http.base_url.join(rest.path("c", "history")))
    request.headers = httpx.Headers([("host", request.url.host), *headers.multi_items()])
    answer = await rest.http.send(request)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/csv") is is_csv
    assert answer.headers["vary"] == "accept"
