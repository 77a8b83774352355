"""The service's reports: its rollup by shards, and adds by outcome."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from api.routes import insight
from api.routes.insight import Busiest, busiest
from counter.limits import SECOND
from counter.ports import Store
from counter.types import Namespace
from tests.support.app import App, running
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh


async def test_each_shard_has_its_watermark_and_how_far_it_is_behind(rest: Rest, app: App) -> None:
    many = rest.within("many")
    await many.create("ACCURATE", shards=3)
    app.clock.advance(60 * SECOND)
    before = (await rest.http.get(many.path(verb="shards"))).json()
    assert [each["shard"] for each in before["shards"]] == [0, 1, 2]
    assert all(each["overdue_seconds"] > 30 for each in before["shards"])
    await app.roll_up()
    after = (await rest.http.get(many.path(verb="shards"))).json()
    for each in after["shards"]:
        assert each["overdue_seconds"] == 0
        assert 5 < each["lag_seconds"] < 60
        # Only the test rolls up here.
        assert each["owner"] is None


async def test_a_single_process_owns_all_shards(tmp_path: Path) -> None:
    async with running("sqlite", tmp_path) as app:
        app.application.health.rolls_up = True
        (shard,) = (await app.http.get("/v1/namespaces/default/shards")).json()["shards"]
        assert shard["owner"]


async def test_each_shard_is_owned_by_its_worker(tmp_path: Path) -> None:
    async with running("simulated", tmp_path) as app:
        path = "/v1/namespaces/default/shards"
        assert {each["owner"] for each in (await app.http.get(path)).json()["shards"]} == {None}
        await app.store.leases.heartbeat("worker-1", 10 * SECOND)
        assert (await app.http.get(path)).json()["shards"][0]["owner"] == "worker-1"


async def test_rough_counters_have_no_rollup(rest: Rest) -> None:
    rough = rest.within("rough")
    await rough.create("BEST_EFFORT")
    answer = await rest.http.get(rough.path(verb="shards"))
    assert_problem(answer, "not_supported", "rough")


async def test_the_busiest_counters_come_first(rest: Rest, app: App) -> None:
    """As many as are asked for, over as long a time."""
    for name, adds in (("a", 1), ("b", 3), ("c", 2)):
        for _ in range(adds):
            await rest.add(name, 5, fresh(app.clock.now_us()))
    app.clock.advance(SECOND)
    path = "/v1/namespaces/default/busiest"
    found = (await rest.http.get(path, params={"limit": 2})).json()
    assert [(each["counter"], each["count"]) for each in found["counters"]] == [
        ("b", 15),
        ("c", 10),
    ]
    assert found["counters"][0]["adds_per_s"] > found["counters"][1]["adds_per_s"] > 0
    assert found["complete"] is True
    assert found["since"] < found["as_of"]
    app.clock.advance(11 * SECOND)
    assert (await rest.http.get(path)).json()["counters"] == []
    assert len((await rest.http.get(path, params={"span": "1m"})).json()["counters"]) == 3


async def test_questions_that_wait_for_a_look_share_the_next_one(
    rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be many consoles, and each asks for several namespaces."""
    other = rest.within("other")
    await other.create("ACCURATE")
    looks: list[str] = []
    calls: list[str] = []
    all_wait = asyncio.Event()
    answer = insight.InsightRoutes._shared_ranking

    async def call(routes: insight.InsightRoutes, namespace: Namespace, span_us: int) -> Busiest:
        calls.append(namespace.name)
        if len(calls) == 20:
            all_wait.set()
        return await answer(routes, namespace, span_us)

    async def look(store: Store, namespace: Namespace, *given: int, **bounds: int) -> Busiest:
        looks.append(namespace.name)
        await all_wait.wait()
        return await busiest(store, namespace, *given, **bounds)

    monkeypatch.setattr(insight.InsightRoutes, "_shared_ranking", call)
    monkeypatch.setattr(insight, "busiest", look)
    asked = [each.http.get(each.path(verb="busiest")) for each in [rest, other] * 10]
    assert {each.status_code for each in await asyncio.gather(*asked)} == {200}
    # The first one, and the next one of each namespace.
    assert len(looks) <= 3
    assert set(looks) == {"default", "other"}


async def test_spans_that_differ_by_less_than_a_second_share_a_look(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each microsecond was another question."""
    spans: list[int] = []

    async def look(*given: Any, span_us: int, limit: int) -> Busiest:
        spans.append(span_us)
        return await busiest(*given, span_us=span_us, limit=limit)

    monkeypatch.setattr(insight, "busiest", look)
    path = rest.path(verb="busiest")
    asked = [rest.http.get(path, params={"span": f"{2_000_000 + n}us"}) for n in range(30)]
    assert {each.status_code for each in await asyncio.gather(*asked)} == {200}
    assert set(spans) == {2 * SECOND}
    assert len(spans) <= 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("limit", "0"), ("limit", "101"), ("span", "1ms"), ("span", "2m"), ("x", "1")],
)
async def test_the_query_for_busy_counters_is_bounded(name: str, value: str, rest: Rest) -> None:
    answer = await rest.http.get("/v1/namespaces/default/busiest", params={name: value})
    assert_problem(answer, "invalid_parameter", name)


async def test_adds_are_reported_by_outcome(rest: Rest, app: App) -> None:
    token = fresh(app.clock.now_us())
    for delta in (1, 1, 2):
        await rest.add("c", delta, token)
    found = (await rest.http.get("/v1/outcomes")).json()["outcomes"]
    assert {name: count for name, count in found.items() if count} == {
        "original": 1,
        "replayed": 1,
        "conflict": 1,
    }
