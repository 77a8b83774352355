"""Batches: many counters, a token each, an outcome each."""

import gc
import json
from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import pytest

from api.routes import items
from tests.support.app import App, every_store
from tests.support.problems import assert_problem, check_problem
from tests.support.rest import Json, Rest, fresh, item
from tests.support.times import HOUR, MINUTE, SECOND


def statuses(results: list[Json]) -> list[int]:
    """200 for an add's response, else the problem's status, its shape checked."""
    for result in results:
        if "status" in result:
            check_problem(result)
    return [result.get("status", 200) for result in results]


def spoiled(now_us: int) -> list[Json]:
    """Items of which every other one is bad, each in its own way."""
    return [
        item("c", 1, fresh(now_us)),
        item("c", 2**63, fresh(now_us)),
        item("c", 2, fresh(now_us)),
        item("x" * 257, 1, fresh(now_us)),
        item("c", 4, fresh(now_us)),
        {"counter": "c", "delta": 1},
        item("c", 8, fresh(now_us)),
        item("c", 1, fresh(now_us + HOUR)),
        item("c", 16, fresh(now_us)),
        item("c", 1, fresh(now_us)) | {"dleta": 1},
        item("c", 32, fresh(now_us)),
        item("c", 1, fresh(now_us)) | {"delta": "1"},
        item("c", 64, fresh(now_us)),
        {},
        item("c", 128, fresh(now_us)),
        item("c", 1, fresh(now_us - HOUR)),
    ]


@pytest.mark.parametrize("form", ["object", "lines"])
async def test_one_bad_item_never_spoils_the_others(rest: Rest, app: App, form: str) -> None:
    items = spoiled(app.clock.now_us())
    if form == "object":
        results = (await rest.batch_add(items)).json()["results"]
    else:
        lines = b"".join(json.dumps(each).encode() + b"\n" for each in items)
        results = await rest.batch_lines(lines.replace(b"{}", b'{"counter": "c", '))
    assert statuses(results)[::2] == [200] * 8
    assert statuses(results)[1::2] == [400, 400, 400, 400, 400, 400, 400, 410]
    assert results[7]["code"] == "token_in_future"
    assert results[5]["code"] == "token_missing"
    assert results[15]["code"] == "token_too_old"
    assert await rest.count("c") == 255


async def test_an_item_that_is_not_an_object_fails_alone(rest: Rest, app: App) -> None:
    good = item("c", 1, fresh(app.clock.now_us()))
    sent: list[Any] = [None, good, 7, "c", []]
    answer = await rest.batch_add(sent)
    assert statuses(answer.json()["results"]) == [400, 200, 400, 400, 400]
    assert await rest.count("c") == 1


async def test_the_first_of_many_bad_items_are_explained(rest: Rest, app: App) -> None:
    """Regression: 2 KB of bad items cost 10 ms, as much as 1,000 adds."""
    good = item("c", 1, fresh(app.clock.now_us()))
    long = good | {"counter": "x" * 257}
    sent: list[Any] = [1, long] * 499 + [good, {}]
    lines = b"".join(json.dumps(each).encode() + b"\n" for each in sent)
    answers = [
        (await rest.batch_add(sent)).json()["results"],
        await rest.batch_lines(lines),
    ]
    for results in answers:
        assert statuses(results) == [400] * 998 + [200, 400]
        for index, each in enumerate(results[:10]):
            assert each["errors"][0]["field"].startswith(f"items.{index}")
        shared = results[10]
        assert shared["detail"] == "only the first 10 bad items of a batch are explained"
        assert all(each == shared for each in results[10:998])
        assert results[999] == shared
    assert await rest.count("c") == 1


async def test_the_first_of_many_bad_names_are_explained(rest: Rest) -> None:
    names = ["x" * (257 + number) for number in range(500)] + ["c"] + ["\n"] * 499
    results = (await rest.batch_get(names)).json()["results"]
    assert statuses(results) == [400] * 500 + [200] + [400] * 499
    assert all(each["detail"].startswith(f"counters.{n}: ") for n, each in enumerate(results[:10]))
    assert all(each == results[10] for each in [*results[11:500], *results[501:]])
    assert results[10]["detail"] == "only the first 10 bad items of a batch are explained"


async def test_items_without_a_token_share_one_problem(rest: Rest, app: App) -> None:
    """Each had a task, and a problem of its own."""
    service = app.application.service
    before = service.tally["refused"]
    with patch.object(type(service), "add") as add:
        results = (await rest.batch_add([{"counter": "c", "delta": 1}] * 1_000)).json()["results"]
    assert statuses(results) == [400] * 1_000
    assert results[0]["code"] == "token_missing"
    assert all(each == results[0] for each in results)
    assert not add.called
    assert service.tally["refused"] == before + 1_000


async def test_far_too_many_items_are_counted_without_being_read(rest: Rest) -> None:
    lines = b"x\n" * 500_000
    with patch.object(items, "read_lines") as read:
        path, kind = rest.path(verb="batch/add"), "application/x-ndjson"
        answer = await rest.raw(path, lines, content_type=kind)
        assert answer.json()["detail"] == "items has at least 1001 items; 1 to 1000 are allowed"
        many: list[Any] = [1] * 300_000
        answer = await rest.batch_add(many)
    assert answer.json()["detail"] == "items has 300000 items; 1 to 1000 are allowed"
    assert not read.called


async def test_an_items_result_equals_that_of_a_single_add(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    single = await rest.add("c", 5, token)
    answer = await rest.batch_add([item("c", 5, token), item("d", 6, token)])
    assert answer.json()["results"] == [
        single.json() | {"replayed": True},
        single.json() | {"counter": "d", "delta": 6},
    ]


async def test_a_token_twice_in_a_batch_counts_once(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    same, other = item("c", 1, token), item("c", 2, token)
    results = (await rest.batch_add([same, same, other, same])).json()["results"]
    assert statuses(results) == [200, 200, 409, 200]
    assert [each.get("replayed") for each in results] == [False, True, None, True]
    assert await rest.count("c") == 1


async def test_late_items_are_resolved_one_by_one(rest: Rest, app: App) -> None:
    early_us = app.clock.now_us()
    found, void, other = fresh(early_us), fresh(early_us), fresh(early_us)
    await rest.batch_add([item("c", 1, found), item("c", 2, other)])
    app.clock.advance(6 * SECOND)
    pending = await rest.batch_add([item("c", 1, found), item("c", 4, void)])
    assert statuses(pending.json()["results"]) == [200, 503]
    app.clock.advance(MINUTE)
    answer = await rest.batch_add(
        [
            item("c", 1, found),
            item("c", 4, void),
            item("c", 8, other),
            item("c", 16, fresh(app.clock.now_us())),
        ]
    )
    assert statuses(answer.json()["results"]) == [200, 410, 409, 200]
    assert await rest.count("c") == 1 + 2 + 16


@every_store
async def test_a_whole_batch_of_late_items_is_resolved(rest: Rest, app: App) -> None:
    """However many are late: a client that sends the batch again must get somewhere."""
    early_us = app.clock.now_us()
    items = [item("c", 1, fresh(early_us)) for _ in range(300)]
    await rest.batch_add(items[::3])
    app.clock.advance(MINUTE)
    answer = await rest.batch_add(items)
    assert statuses(answer.json()["results"]) == [200, 410, 410] * 100
    assert await rest.count("c") == 100


async def test_an_empty_batch_is_refused(rest: Rest) -> None:
    assert_problem(await rest.batch_add([]), "invalid_body", "items")


async def test_a_line_that_is_not_json_fails_alone(rest: Rest, app: App) -> None:
    """Also if the lines together would make JSON of another shape."""
    good = json.dumps(item("c", 1, fresh(app.clock.now_us()))).encode()
    other = json.dumps(item("c", 2, fresh(app.clock.now_us()))).encode()
    half, rest_of_it = other.split(b", ", 1)
    for lines, expected in (
        ([b"{", good, b"]}", b"null"], [400, 200, 400, 400]),
        ([good + b'],"items":[' + other, good], [400, 200]),
        ([good + b"," + other, half, rest_of_it], [400, 400, 400]),
        ([good + b" " + other, good], [400, 200]),
    ):
        assert statuses(await rest.batch_lines(b"\n".join(lines))) == expected, lines
    assert await rest.count("c") == 1


async def test_a_last_line_without_an_end_counts(rest: Rest, app: App) -> None:
    line = json.dumps(item("c", 1, fresh(app.clock.now_us()))).encode()
    assert [each["delta"] for each in await rest.batch_lines(line)] == [1]
    assert await rest.count("c") == 1


async def test_a_batch_of_reads_keeps_its_order(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    await rest.batch_add([item("a", 1, fresh(now_us)), item("b", 2, fresh(now_us))])
    answer = await rest.batch_get(["b", "never", "a", "b", "x" * 257])
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert statuses(results) == [200, 200, 200, 200, 400]
    assert [result["count"] for result in results[:4]] == [2, 0, 1, 2]
    assert results[0] == (await rest.get("b")).json()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        b'{"counter":"c","delta":1,"idempotency_token":{"token":"x","generation_time":"x"}}',
        b"x",
    ],
)
def test_bad_items_leave_nothing_to_the_collector(bad: bytes | None) -> None:
    """Regression: their problems referred to each other, through tracebacks."""

    def read(steps: Generator[None, None, Any]) -> Generator[None, None, None]:
        found = yield from steps
        assert len(found.adds) == 500

    gc.collect()
    gc.disable()
    try:
        assert [*read(items.Items.of_lines([bad] * 500))] == [None] * 4
        assert gc.collect() < 20
    finally:
        gc.enable()
