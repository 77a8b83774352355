"""The overview of all namespaces that a caller sees, and the search in them."""

from typing import Any

import pytest

from api.routes import overview
from api.routes.paging import page_of
from counter import limits
from counter.api_keys import Scope
from counter.errors import NamespaceUnknownError
from counter.limits import MINUTE, SECOND
from tests.support.app import App
from tests.support.keys import hand_out
from tests.support.problems import assert_problem
from tests.support.rest import Json, Rest, fresh


async def look(rest: Rest) -> Json:
    found: Json = (await rest.http.get("/v1/overview")).json()
    return found


def names(found: list[Json]) -> list[str]:
    return [each["counter"] for each in found]


def by_name(found: Json) -> list[Json]:
    """The namespaces; none of them has a worker here, so more shards are worse."""
    return sorted(found["namespaces"], key=lambda each: str(each["namespace"]))


async def fill(rest: Rest, app: App) -> Rest:
    """Three counters of two namespaces, a minute apart and rolled up."""
    shop = rest.within("shop")
    await shop.create("EVENTUAL", shards=2)
    for each, counter, delta in ((rest, "views", 50), (shop, "orders", 7), (rest, "likes", 9)):
        await each.add(counter, delta, fresh(app.clock.now_us()))
        await app.roll_up_after(MINUTE)
    return shop


async def test_the_largest_and_the_latest_counters_come_first(rest: Rest, app: App) -> None:
    """However long ago they changed, and before they are rolled up too."""
    await fill(rest, app)
    app.clock.advance(10 * MINUTE)
    await app.roll_up()
    found = await look(rest)
    assert names(found["largest"]) == ["views", "likes", "orders"]
    assert names(found["latest"]) == ["likes", "orders", "views"]
    assert [each["count"] for each in found["largest"]] == [50, 9, 7]
    assert found["latest"][0]["changed_at"] < found["as_of"]
    assert found["totals"]["complete"] is True
    app.clock.advance(MINUTE)
    await rest.add("new", 99, fresh(app.clock.now_us()))
    found = await look(rest)
    assert names(found["latest"])[0] == "new"
    assert {each["counter"]: each["count"] for each in found["latest"]}["new"] == 99


async def test_each_namespace_has_its_counters_adds_and_rollup(rest: Rest, app: App) -> None:
    shop = await fill(rest, app)
    activity = app.application.activity
    await activity.sample()
    app.clock.advance(5 * SECOND)
    for counter in ("a", "b"):
        await shop.add(counter, 1, fresh(app.clock.now_us()))
    await activity.sample()
    found = await look(rest)
    default, other = by_name(found)
    assert [default["namespace"], other["namespace"]] == ["default", "shop"]
    assert [default["counters"], other["counters"]] == [2, 3]
    assert [default["adds_per_s"], other["adds_per_s"]] == [0.0, 0.4]
    assert [default["shards"], other["shards"]] == [1, 2]
    assert found["adds"][-1]["adds_per_s"] == 0.4
    assert default["overdue_seconds"] == 0.0
    app.clock.advance(MINUTE)
    late, _ = by_name(await look(rest))
    assert late["overdue_seconds"] > 30
    assert late["lag_seconds"] > late["overdue_seconds"]


async def test_more_counters_than_can_be_sorted_are_not_sorted(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the other namespaces are."""
    await fill(rest, app)
    monkeypatch.setattr(limits, "COUNTERS_TOGETHER_MAX", 1)
    for _ in range(2):
        # One namespace a request, the oldest survey first.
        found = await look(rest)
        assert found["totals"]["complete"] is False
        app.clock.advance(MINUTE)
    assert names(found["largest"]) == ["orders"]
    default, shop = by_name(found)
    assert (default["counters"], default["counters_complete"]) == (1, False)
    assert (shop["counters"], shop["counters_complete"]) == (1, True)


async def test_consoles_share_a_survey(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    heads = app.store.rollups.heads

    async def counted(namespace: Any, counters: Any) -> Any:
        read.append(len(counters))
        return await heads(namespace, counters)

    await rest.add("views", 1, fresh(app.clock.now_us()))
    monkeypatch.setattr(app.store.rollups, "heads", counted)
    monkeypatch.setattr(overview, "_SHOWN", 0)
    for _ in range(20):
        await look(rest)
    assert read == [1]
    app.clock.advance(3 * SECOND)
    await look(rest)
    assert read == [1, 1]


async def test_a_namespace_that_another_process_deleted_is_left_out(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one such namespace made both requests fail."""
    shop = await fill(rest, app)
    watermarks, counters = app.store.rollups.watermarks, app.store.control.counters

    async def fails(namespace: Any, **asked: Any) -> Any:
        if namespace.name == shop.namespace:
            raise NamespaceUnknownError("namespace 'shop' is deleted")
        read = counters if asked else watermarks
        return await read(namespace, **asked)

    monkeypatch.setattr(app.store.rollups, "watermarks", fails)
    monkeypatch.setattr(app.store.control, "counters", fails)
    found = await look(rest)
    assert [each["namespace"] for each in found["namespaces"]] == ["default"]
    assert names(found["largest"]) == ["views", "likes"]
    assert await search(rest, q="s") == [("default", "likes"), ("default", "views")]


async def test_many_namespaces_cost_no_more_than_many_counters(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: empty ones cost nothing, so that a request looked at all of them."""
    monkeypatch.setattr(limits, "COUNTERS_TOGETHER_MAX", 250)
    monkeypatch.setattr(limits, "SEARCH_NAMES_MAX", 250)
    monkeypatch.setattr(limits, "OVERVIEW_NAMESPACES_MAX", 4)
    for number in range(9):
        await rest.within(f"n{number}").create("ACCURATE")
    read: list[str] = []
    counters = app.store.control.counters

    async def counted(namespace: Any, **asked: Any) -> Any:
        read.append(namespace.name)
        return await counters(namespace, **asked)

    monkeypatch.setattr(app.store.control, "counters", counted)
    for _ in range(4):
        read.clear()
        found = await look(rest)
        assert len(read) <= 3
        assert (len(found["namespaces"]), found["totals"]["namespaces"]) == (4, 10)
    assert found["totals"]["complete"] is True
    read.clear()
    assert (await rest.http.get("/v1/search?q=x")).json()["next_page"] is not None
    assert len(read) == 3
    assert await search(rest, q="x") == []


async def test_the_namespaces_with_the_worst_rollup_are_shown(rest: Rest, app: App) -> None:
    for name in ("alone", "late"):
        await rest.within(name).create("ACCURATE", accept_limit="1m" if name == "alone" else "5s")
    app.clock.advance(50 * SECOND)
    found = await look(rest)
    assert [each["namespace"] for each in found["namespaces"]] == ["default", "late", "alone"]
    assert found["totals"]["overdue_seconds"] == found["namespaces"][0]["overdue_seconds"] > 20


async def test_adds_are_those_that_were_counted(rest: Rest, app: App) -> None:
    """Not the conflicts and replays of a client that goes on and on."""
    token = fresh(app.clock.now_us())
    await app.application.activity.sample()
    for delta in (1, 1, 2, 3):
        await rest.add("c", delta, token)
    app.clock.advance(5 * SECOND)
    await app.application.activity.sample()
    assert (await look(rest))["adds"][-1]["adds_per_s"] == 0.2


async def test_a_key_sees_only_its_own_namespaces(rest: Rest, app: App) -> None:
    for name in ("mine", "theirs"):
        each = rest.within(name)
        await each.create("ACCURATE")
        await each.add(f"{name}-views", 1, fresh(app.clock.now_us()))
        await app.application.activity.sample()
        app.clock.advance(SECOND)
    mine = await hand_out(app, Scope.READ, "mine")
    found = (await rest.http.get("/v1/overview", headers=mine)).json()
    assert [each["namespace"] for each in found["namespaces"]] == ["mine"]
    assert names(found["latest"]) == ["mine-views"]
    # The add to the other namespace is in none of the steps.
    assert {each["adds_per_s"] for each in found["adds"]} == {0.0}
    searched = (await rest.http.get("/v1/search?q=views", headers=mine)).json()
    assert searched["found"] == [{"namespace": "mine", "counter": "mine-views"}]


async def search(rest: Rest, **params: str | int) -> list[tuple[str, str]]:
    """What is found, over all pages."""
    found: list[tuple[str, str]] = []
    page: dict[str, str] = {}
    while True:
        answer = await rest.http.get("/v1/search", params={**params, **page})
        assert answer.status_code == 200, answer.text
        found += [(each["namespace"], each["counter"]) for each in answer.json()["found"]]
        if answer.json()["next_page"] is None:
            return found
        page = {"page": answer.json()["next_page"]}


@pytest.mark.parametrize("bound", [1, 3, 20_000])
async def test_a_search_finds_a_part_of_a_name_in_all_namespaces(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """In upper and lower case, and page by page, whatever one request may read."""
    monkeypatch.setattr(overview, "_NAMESPACE_COSTS", 1)
    monkeypatch.setattr(limits, "BATCH_ITEMS_MAX", min(2, bound))
    monkeypatch.setattr(limits, "SEARCH_NAMES_MAX", bound)
    shop = rest.within("shop")
    await shop.create("ACCURATE")
    for each in (rest, shop):
        for counter in ("daily views", "VIEWS", "likes", "views:größe", "zzz"):
            await each.add(counter, 1, fresh(app.clock.now_us()))
    wanted = [
        (each, name)
        for each in ("default", "shop")
        for name in ("VIEWS", "daily views", "views:größe")
    ]
    for limit in (1, 2, 100):
        assert await search(rest, q="Views", limit=limit) == wanted
    assert await search(rest, q="GRÖSSE") == [
        ("default", "views:größe"),
        ("shop", "views:größe"),
    ]
    assert await search(rest, q="missing") == []


@pytest.mark.parametrize(
    ("params", "named"),
    [
        *(({}, "q"), ({"q": ""}, "q"), ({"q": "x" * 257}, "q"), ({"q": "x", "page": "!"}, "page")),
        ({"q": "x", "page": page_of(["default", "\ud800"])}, "page"),
        ({"q": "x", "page": page_of([1, "c"])}, "page"),
    ],
)
async def test_a_wrong_search_is_refused(params: dict[str, str], named: str, rest: Rest) -> None:
    assert_problem(await rest.http.get("/v1/search", params=params), "invalid_parameter", named)
