"""Best effort: fast, and every response says that a retry may count twice."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest

from counter.errors import CacheUnavailableError, CounterError
from counter.types import Namespace
from tests.support.app import App
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh


@pytest.fixture
async def loose(rest: Rest) -> Rest:
    """A namespace of best-effort counters."""
    loose = rest.within("loose")
    assert (await loose.create("BEST_EFFORT")).status_code == 201
    return loose


async def test_an_add_needs_no_token_and_says_it_is_not_retry_safe(loose: Rest) -> None:
    answer = await loose.add("c", 3)
    assert answer.status_code == 200
    assert answer.json()["retry_safe"] is False
    assert answer.json()["replayed"] is None
    assert answer.json()["delta"] == 3
    read = (await loose.get("c")).json()
    assert (read["count"], read["accuracy"], read["retry_safe"]) == (3, "best_effort", False)


async def test_the_same_retry_counts_once_if_adds_are_events(
    rest: Rest, loose: Rest, app: App
) -> None:
    """The trade, side by side: one token, sent twice to each kind of counter."""
    events = rest.within("events")
    assert (await events.create("EVENTUAL")).status_code == 201
    token = fresh(app.clock.now_us())
    for namespace in (events, loose):
        for _ in range(2):
            assert (await namespace.add("c", 1, token)).status_code == 200
    assert await events.count("c") == 1
    assert await loose.count("c") == 2
    assert "retry_safe" not in (await events.add("c", 1, token)).json()


async def test_every_response_reports_that_it_is_not_retry_safe(loose: Rest, app: App) -> None:
    """Whatever is done, with a token or without, to a counter that is there or not."""
    token = fresh(app.clock.now_us())
    answers = [
        (await loose.add("c", 1)).json(),
        (await loose.add("c", 1, token)).json(),
        (await loose.add("c", 1, key="order:1")).json(),
        (await loose.add("c", 1, verb="add-and-get")).json(),
        (await loose.get("c")).json(),
        (await loose.get("c", "0s")).json(),
        (await loose.get("never")).json(),
        (await loose.clear("c")).json(),
        *(await loose.batch_add([{"counter": "c", "delta": 1}])).json()["results"],
        *(await loose.batch_get(["c", "never"])).json()["results"],
    ]
    assert [each for each in answers if each.get("retry_safe") is not False] == []


async def test_add_and_get_returns_the_new_value(loose: Rest) -> None:
    await loose.add("c", 3)
    assert (await loose.add("c", -5, verb="add-and-get")).json()["count"] == -2


async def test_a_clear_sets_it_back_to_zero(loose: Rest) -> None:
    await loose.add("c", 3)
    assert (await loose.clear("c")).status_code == 200
    assert await loose.count("c") == 0


async def test_a_batch_counts_each_item(loose: Rest) -> None:
    answer = await loose.batch_add([{"counter": "c", "delta": 1}, {"counter": "d", "delta": 2}])
    assert answer.status_code == 200
    results = (await loose.batch_get(["d", "c", "e"])).json()["results"]
    assert [result["count"] for result in results] == [2, 1, 0]


async def test_requests_that_need_an_event_log_are_refused(loose: Rest, app: App) -> None:
    for answer in (
        await loose.atomic_add([("c", 1)], fresh(app.clock.now_us())),
        await loose.http.get(loose.path("c", "events")),
        await loose.http.get(loose.path("c", "history")),
        await loose.post(loose.path("c", "recount"), {}),
    ):
        assert_problem(answer, "not_supported", "BEST_EFFORT")


async def test_bad_input_is_refused_like_anywhere(loose: Rest) -> None:
    answer = await loose.add("c", 2**63)
    assert_problem(answer, "invalid_body", "delta", str(2**63))
    assert await loose.count("c") == 0


async def test_one_add_that_fails_spoils_no_other_of_its_batch(loose: Rest, app: App) -> None:
    """Applied items are reported as applied, or the client would send them again."""
    cache = app.application.service._cache
    increment_many = cache.increment_many

    async def fails_for_b(
        namespace: Namespace, changes: Sequence[tuple[str, int]]
    ) -> Sequence[int | CounterError]:
        values = iter(await increment_many(namespace, [each for each in changes if each[0] != "b"]))
        down = CacheUnavailableError("the cache's server of this counter is down")
        return [down if counter == "b" else next(values) for counter, _ in changes]

    with patch.object(cache, "increment_many", fails_for_b):
        answer = await loose.batch_add([{"counter": each, "delta": 1} for each in "abc"])
    first, second, third = answer.json()["results"]
    assert (first["counter"], third["counter"]) == ("a", "c")
    assert (second["code"], second["applied"]) == ("cache_unavailable", None)
    assert [await loose.count(each) for each in "abc"] == [1, 0, 1]
