"""The metrics of adds, of the store and of the cache, and the problems in /readyz."""

import re
from unittest.mock import AsyncMock, patch

import pytest

from counter.errors import CacheUnavailableError, OverloadedError, WriteTimeoutError
from tests.support.app import App, store_that_fails
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh, item
from tests.support.times import HOUR, MINUTE, SECOND, rfc3339


class Samples:
    """Numbers that the metrics gained since it was made, or since it was last asked."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._before: dict[str, float] = {}

    async def gained(self, family: str) -> dict[str, float]:
        """By the values of the labels; unchanged samples are left out."""
        text = (await self._rest.http.get("/metrics")).text
        found = re.findall(rf"^({family}(?:{{.*}})?) (\S+)$", text, re.MULTILINE)
        now = {sample: float(value) for sample, value in found}
        before, self._before = self._before, self._before | now
        changed = {name: value - before.get(name, 0) for name, value in now.items()}
        return {
            " ".join(re.findall(r'"([^"]*)"', name)): value
            for name, value in changed.items()
            if value
        }


@pytest.fixture
def samples(rest: Rest) -> Samples:
    return Samples(rest)


async def test_adds_that_were_refused_and_of_unknown_outcome_are_distinguished(
    rest: Rest, app: App, samples: Samples
) -> None:
    """Of the one nothing was written, the other may be counted."""
    now_us = app.clock.now_us()

    async def outcome(**given: object) -> dict[str, float]:
        await rest.add("c", 1, **({"token": fresh(app.clock.now_us())} | given))  # type: ignore[arg-type]
        return await samples.gained("counter_adds_total")

    assert await outcome() == {"original": 1}
    assert await outcome(token=fresh(now_us + HOUR)) == {"refused": 1}
    assert await outcome(token=None) == {"refused": 1}
    with store_that_fails(app, "append"):
        assert await outcome() == {"unknown": 1}
    for error, name in ((OverloadedError("full"), "refused"), (WriteTimeoutError("?"), "unknown")):
        with patch.object(app.store.events, "append", AsyncMock(side_effect=error)):
            assert await outcome() == {name: 1}
    assert await outcome(token=fresh(now_us - MINUTE)) == {"voided": 1}


async def test_each_add_of_a_batch_is_reported(rest: Rest, app: App, samples: Samples) -> None:
    now_us = app.clock.now_us()
    items = [
        item("a", 1, fresh(now_us)),
        item("b", 1, fresh(now_us + HOUR)),
        item("c", 1, fresh(now_us)),
    ]
    await rest.batch_add(items)
    assert await samples.gained("counter_adds_total") == {"original": 2, "refused": 1}
    with store_that_fails(app, "append"):
        await rest.batch_add([item("a", 1, fresh(now_us)), item("b", 1, fresh(now_us))])
    assert await samples.gained("counter_adds_total") == {"unknown": 2}


async def test_each_add_is_reported_under_its_namespace(
    rest: Rest, app: App, samples: Samples
) -> None:
    """If it changed a count: a refusal, a conflict, a replay and a void token did not."""
    now_us = app.clock.now_us()
    shop, rough = rest.within("shop"), rest.within("rough")
    await shop.create()
    await rough.create("BEST_EFFORT")
    used = fresh(now_us)
    await shop.batch_add([item("a", 1, used), item("b", 1, fresh(now_us + HOUR))])
    await shop.add("a", 1, used)
    await shop.add("a", 2, used)
    await shop.add("a", 1, fresh(now_us - MINUTE))
    await shop.atomic_add([("a", 1), ("b", 1)], fresh(now_us))
    await shop.clear("a", fresh(now_us))
    await rest.add("c", 1, fresh(now_us))
    for _ in range(2):
        await rough.http.post(rough.path("c", "add"), json={"delta": 1})
    by_outcome = await samples.gained("counter_adds_total")
    expected = {"original": 5, "refused": 1, "replayed": 1, "conflict": 1, "voided": 1}
    assert by_outcome == expected | {"best_effort": 2}
    by_namespace = await samples.gained("counter_namespace_adds_total")
    assert by_namespace == {"shop": 4, "default": 1, "rough": 2}


async def test_the_series_of_a_namespace_stays_when_it_is_deleted_and_created_again(
    rest: Rest, app: App, samples: Samples
) -> None:
    shop = rest.within("shop")
    await shop.create()
    await shop.add("a", 1, fresh(app.clock.now_us()))
    assert await samples.gained("counter_namespace_adds_total") == {"shop": 1}
    await rest.http.delete(shop.path())
    assert await samples.gained("counter_namespace_adds_total") == {}
    assert (
        'counter_namespace_adds_total{namespace="shop"} 1.0'
        in (await rest.http.get("/metrics")).text
    )
    app.clock.advance(HOUR)
    await shop.create()
    await shop.add("a", 1, fresh(app.clock.now_us()))
    assert await samples.gained("counter_namespace_adds_total") == {"shop": 1}


async def test_best_effort_adds_are_reported_as_such(
    rest: Rest, app: App, samples: Samples
) -> None:
    path = "/v1/namespaces/rough"
    made = await rest.http.put(path, json={"counter_type": "BEST_EFFORT"})
    assert made.status_code == 201, made.text
    await rest.http.post(f"{path}/counters/c/add", json={"delta": 1})
    assert await samples.gained("counter_adds_total") == {"best_effort": 1}
    down = AsyncMock(return_value=[CacheUnavailableError("planted")])
    with patch.object(app.application.cache, "increment_many", down):
        await rest.http.post(f"{path}/counters/c/add", json={"delta": 1})
    assert await samples.gained("counter_adds_total") == {"unknown": 1}


async def test_requests_are_reported_by_route_and_status(
    rest: Rest, app: App, samples: Samples
) -> None:
    """By the route's template: values of clients make no series."""
    await rest.add("any/name", 1, fresh(app.clock.now_us()))
    await rest.add("other", 1, fresh(app.clock.now_us() + HOUR))
    await rest.http.get("/v1/any/thing")
    await rest.http.get("/any/thing")
    route = "POST /v1/namespaces/{namespace}/counters/{counter}/add"
    gained = await samples.gained("counter_requests_total")
    assert gained == {f"{route} 200": 1, f"{route} 400": 1, "other 404": 2}


@pytest.mark.parametrize("storage", ["sqlite"])
async def test_group_commits_marks_and_calls_are_reported(
    rest: Rest, app: App, samples: Samples
) -> None:
    for family in ("counter_commit_events_count", "counter_marks_total"):
        await samples.gained(family)
    await samples.gained("counter_store_call_duration_seconds_count")
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in "aab"])
    assert await samples.gained("counter_commit_events_count") == {"": 1}
    assert await samples.gained("counter_commit_events_sum") == {"": 3}
    assert await samples.gained("counter_marks_total") == {}
    # The commit, and the look of each scrape whether the store can be written.
    calls = await samples.gained("counter_store_call_duration_seconds_count")
    assert calls["write"] >= 1
    await rest.http.get("/v1/namespaces/default/counters/a", params={"max_staleness": "1h"})
    assert await samples.gained("counter_cache_lookups_total") == {"miss": 1}
    await rest.http.get("/v1/namespaces/default/counters/a", params={"max_staleness": "1h"})
    assert await samples.gained("counter_cache_lookups_total") == {"hit": 1}


async def test_readiness_and_metrics_report_what_is_missing_and_since_when(
    rest: Rest, app: App
) -> None:
    """All processes share the cache: taken out for it, they would all be out at once."""

    async def up() -> list[str]:
        text = (await rest.http.get("/metrics")).text
        return re.findall(r"^counter_(?:store|cache)_up (\S+)$", text, re.MULTILINE)

    began = rfc3339(app.clock.now_us())
    await rest.http.get("/readyz")
    app.clock.advance(SECOND)
    seen = rfc3339(app.clock.now_us())
    down = AsyncMock(side_effect=CacheUnavailableError("planted"))
    cache = {"part": "cache", "detail": "planted", "since": seen, "last_worked": began}
    with patch.object(app.application.cache, "ping", down):
        for _ in range(2):
            answer = await rest.http.get("/readyz")
            assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
            assert answer.json()["troubles"] == [cache]
            assert answer.json()["cache"] == "planted"
            assert sorted(await up()) == ["0.0", "1.0"]
            app.clock.advance(SECOND)
        with store_that_fails(app, "ping"):
            answer = await rest.http.get("/readyz")
            assert_problem(answer, "store_unavailable")
            store, other = answer.json()["troubles"]
            assert (store["part"], store["since"]) == ("store", rfc3339(app.clock.now_us()))
            assert other == cache
            assert await up() == ["0.0", "0.0"]
    assert "troubles" not in (await rest.http.get("/readyz")).json()


async def test_liveness_asks_no_store(rest: Rest, app: App) -> None:
    """A restart would not bring the store back."""
    with (
        patch.object(app.store, "ping", AsyncMock()) as store,
        patch.object(app.application.cache, "ping", AsyncMock()) as cache,
    ):
        assert (await rest.http.get("/healthz")).json() == {"status": "alive"}
    assert not store.called
    assert not cache.called
