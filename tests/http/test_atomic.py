"""Atomic adds: many counters, one token, all of it or nothing."""

import asyncio
from random import Random

import pytest

from tests.support.app import App, every_store
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh
from tests.support.times import MINUTE, SECOND, rfc3339


async def counts(rest: Rest, *counters: str) -> list[int]:
    return [await rest.count(counter) for counter in counters]


async def test_every_item_counts(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    answer = await rest.atomic_add([("from", -5), ("to", 5)], fresh(now_us))
    assert answer.status_code == 200
    common = {"namespace": "default", "event_time": rfc3339(now_us), "replayed": False}
    assert answer.json() == {
        "results": [
            common | {"counter": "from", "delta": -5},
            common | {"counter": "to", "delta": 5},
        ]
    }
    assert await counts(rest, "from", "to") == [-5, 5]


async def test_a_counter_named_twice_counts_twice(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    for replayed in (False, True):
        answer = await rest.atomic_add([("a", 1), ("b", 5), ("a", 1), ("a", 3)], token)
        assert [each["replayed"] for each in answer.json()["results"]] == [replayed] * 4
    assert await counts(rest, "a", "b") == [5, 5]
    assert sorted(event["delta"] for event in await rest.events("a")) == [1, 1, 3]
    assert len({event["event_item_key"] for event in await rest.events("a")}) == 3


@pytest.mark.parametrize("late", [False, True])
async def test_a_retry_may_list_the_items_of_one_counter_in_another_order(
    rest: Rest, app: App, late: bool
) -> None:
    token = fresh(app.clock.now_us())
    items = [("a", 3), ("b", 5), ("a", -1), ("a", 3), ("a", 0)]
    await rest.atomic_add(items, token)
    app.clock.advance(MINUTE if late else 0)
    for again in (items[::-1], sorted(items), items):
        answer = await rest.atomic_add(again, token)
        assert answer.status_code == 200, answer.text
        results = answer.json()["results"]
        assert [(each["counter"], each["delta"]) for each in results] == again
        assert {each["replayed"] for each in results} == {True}
    answer = await rest.atomic_add([*items[:-1], ("a", 1)], token)
    assert_problem(answer, "token_conflict")
    assert await counts(rest, "a", "b") == [5, 5]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        [("a", 1), ("b", 3)],
        [("a", 1)],
        [("a", 1), ("b", 2), ("c", 3)],
        [("a", 1), ("c", 2)],
        [("c", 7), ("b", 2)],
    ],
    ids=str,
)
async def test_other_items_under_a_used_token_are_a_conflict(
    rest: Rest, app: App, other: list[tuple[str, int]], late: bool
) -> None:
    token = fresh(app.clock.now_us())
    await rest.atomic_add([("a", 1), ("b", 2)], token)
    app.clock.advance(MINUTE if late else 0)
    answer = await rest.atomic_add(other, token)
    assert_problem(answer, "token_conflict")
    assert await counts(rest, "a", "b", "c") == [1, 2, 0]
    assert await rest.events("c") == []


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("storage", ["sqlite", "postgresql"], indirect=True)
async def test_other_counters_under_a_used_token_are_a_conflict(
    rest: Rest, app: App, late: bool
) -> None:
    """If the store is transactional: the other counters show nothing of the first add."""
    token = fresh(app.clock.now_us())
    await rest.atomic_add([("a", 1), ("b", 2)], token)
    app.clock.advance(MINUTE if late else 0)
    for _ in range(2):
        answer = await rest.atomic_add([("c", 7)], token)
        assert_problem(answer, "token_conflict")
        assert (await rest.atomic_add([("a", 1), ("b", 2)], token)).status_code == 200
    assert await counts(rest, "a", "b", "c") == [1, 2, 0]


@pytest.mark.parametrize(
    ("items", "names"),
    [
        ([("a", 1), ("b", 2**63)], ("items.1.delta", str(2**63))),
        ([("a", 1), ("x" * 257, 1)], ("items.1.counter", "256")),
        ([("a", 1), ("", 1)], ("items.1.counter",)),
        ([("a", 1)] * 101, ("items", "100")),
        ([], ("items",)),
    ],
    ids=["delta", "long", "empty", "many", "none"],
)
async def test_one_bad_item_refuses_all(
    rest: Rest, app: App, items: list[tuple[str, int]], names: tuple[str, ...]
) -> None:
    answer = await rest.atomic_add(items, fresh(app.clock.now_us()))
    assert_problem(answer, "invalid_body", *names)
    assert await rest.names() == []


@every_store
async def test_a_late_one_is_pending_then_void_for_every_counter(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    items = [("a", 1), ("b", 2)]
    app.clock.advance(6 * SECOND)
    answer = await rest.atomic_add(items, token)
    assert_problem(answer, "token_pending")
    app.clock.advance(MINUTE)
    for _ in range(3):
        answer = await rest.atomic_add(items, token)
        assert_problem(answer, "token_too_old", applied=False)
        await app.roll_up()
    assert await counts(rest, "a", "b") == [0, 0]


async def test_a_late_one_that_is_found_is_replayed(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    items = [("a", 1), ("b", 2), ("a", 4)]
    await rest.atomic_add(items, token)
    await app.roll_up_after(MINUTE)
    answer = await rest.atomic_add(items, token)
    assert [each["replayed"] for each in answer.json()["results"]] == [True] * 3
    assert await counts(rest, "a", "b") == [5, 2]
    for counter, count in (("a", 5), ("b", 2)):
        answer = (await rest.get(counter, "1h")).json()
        assert (answer["count"], answer["accuracy"]) == (count, "eventual")


async def test_a_single_add_and_an_atomic_one_may_share_a_token(rest: Rest, app: App) -> None:
    """They are two operations, and a token belongs to an operation."""
    token = fresh(app.clock.now_us())
    assert (await rest.add("a", 1, token)).json()["replayed"] is False
    answer = await rest.atomic_add([("a", 1), ("b", 1)], token)
    assert [each["replayed"] for each in answer.json()["results"]] == [False, False]
    assert await counts(rest, "a", "b") == [2, 1]


@pytest.mark.parametrize("storage", ["sqlite", "memory", "postgresql"], indirect=True)
async def test_a_batch_of_accurate_reads_shows_all_of_an_atomic_add_or_nothing(
    rest: Rest, app: App
) -> None:
    """Transfers among counters sum to 0, beside rollups, and if one counter was cleared."""
    random = Random(1)
    names = [f"n{number}" for number in range(6)]
    await rest.clear(names[0], fresh(app.clock.now_us()))
    # A clear erases an event of its own time.
    app.clock.advance(1)

    async def transfer() -> None:
        for _ in range(5):
            one, other = random.sample(names, 2)
            answer = await rest.atomic_add([(one, -1), (other, 1)], fresh(app.clock.now_us()))
            assert answer.status_code == 200, answer.text

    async def roll_up() -> None:
        await app.roll_up_after(2 * SECOND)

    async def work() -> None:
        # Time passes once while a token is on its way: its accept limit is longer than that.
        for _ in range(5):
            await asyncio.gather(*(transfer() for _ in range(6)), roll_up())

    working = asyncio.create_task(work())
    seen: list[list[tuple[int, str]]] = []
    while not working.done():
        results = (await rest.batch_get(names, "0s")).json()["results"]
        seen.append([(each["count"], each["as_of"]) for each in results])
        await asyncio.sleep(0)
    await working
    assert len(seen) > 5
    assert [each for each in seen if sum(count for count, _ in each)] == []
    assert all(len({as_of for _, as_of in each}) == 1 for each in seen)
