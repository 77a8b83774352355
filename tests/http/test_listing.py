"""Counters are named as people name things, and found again under that name."""

import unicodedata

import pytest

from tests.support.app import App, every_store
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh, item
from tests.support.times import MINUTE

ODD_NAMES = (
    "/",
    "a/b",
    "//",
    ".",
    "..",
    "../../../etc/passwd",
    " ",
    "a b",
    "%2F",
    "%",
    "a+b",
    "?x=1",
    "#top",
    "a;b",
    "add",
    "counters",
    "'; DROP TABLE events; --",
    '"quoted"',
    "back\\slash",
    "naïve",
    unicodedata.normalize("NFD", "naïve"),
    "計数器",
    "مرحبا",
    "🙂",
    "👩‍👩‍👧",
    "\N{HALFWIDTH WHITE CIRCLE}",
    "\N{MUSICAL SYMBOL G CLEF}",
    "x" * 256,
    "🙂" * 256,
    "*",
    "_",
    "NULL",
    "0",
    "-1",
    "1e3",
)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
async def test_a_counter_may_have_any_name(rest: Rest, app: App, name: str) -> None:
    answer = await rest.add(name, 3, fresh(app.clock.now_us()))
    assert answer.status_code == 200, answer.text
    assert answer.json()["counter"] == name
    batch = await rest.batch_add([item(name, 4, fresh(app.clock.now_us()))])
    assert batch.json()["results"][0]["counter"] == name
    answer = await rest.get(name)
    assert (answer.json()["counter"], answer.json()["count"]) == (name, 7)
    assert len(await rest.events(name)) == 2
    assert await rest.names() == [name]
    await app.roll_up_after(MINUTE)
    assert await rest.count(name, "1h") == 7


@pytest.mark.parametrize("limit", [1, 3, 1_000])
async def test_pages_list_every_name_once_in_code_point_order(
    rest: Rest, app: App, limit: int
) -> None:
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in ODD_NAMES])
    assert await rest.names(limit=limit) == sorted(ODD_NAMES)
    # Normal forms are kept apart, too.
    results = (await rest.batch_get(ODD_NAMES)).json()["results"]
    assert [each["count"] for each in results] == [1] * len(ODD_NAMES)


@every_store
async def test_a_prefix_is_taken_by_the_letter(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    names = ["a", "a%", "a%b", "a_", "a_b", "aX", "A", "b", "🙂", "🙂a", "a🙂"]
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in names])
    for prefix in ("", "a", "a%", "a_", "A", "🙂", "c", "a🙂"):
        expected = sorted(name for name in names if name.startswith(prefix))
        assert await rest.names(prefix=prefix, limit=2) == expected


async def test_only_written_counters_are_listed(rest: Rest, app: App) -> None:
    await rest.count("read")
    await rest.add("late", 1, fresh(app.clock.now_us() - MINUTE))
    await rest.add("future", 1, fresh(app.clock.now_us() + MINUTE))
    await rest.add("zero", 0, fresh(app.clock.now_us()))
    await rest.clear("cleared", fresh(app.clock.now_us()))
    assert await rest.names() == ["cleared", "zero"]


async def test_namespaces_share_no_counter(rest: Rest, app: App) -> None:
    other = rest.within("other")
    await other.create()
    token = fresh(app.clock.now_us())
    await rest.add("c", 1, token)
    assert (await other.add("c", 2, token)).json()["replayed"] is False
    await other.add("d", 3, token)
    assert (await rest.count("c"), await other.count("c")) == (1, 2)
    assert (await rest.names(), await other.names()) == (["c"], ["c", "d"])


@every_store
async def test_a_listing_survives_a_restart(app: App) -> None:
    now_us = app.clock.now_us()
    await app.rest.batch_add([item(name, 1, fresh(now_us)) for name in ODD_NAMES])
    await app.restart()
    assert await app.rest.names() == sorted(ODD_NAMES)


@pytest.mark.parametrize("counter_type", ["ACCURATE", "EVENTUAL"])
async def test_a_list_reads_counts_as_its_namespace_does(app: App, counter_type: str) -> None:
    rest = app.rest.within(counter_type.lower())
    assert (await rest.create(counter_type)).is_success
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, 3, fresh(now_us)) for name in ("a/b", "c", "d")])
    await app.roll_up_after(MINUTE)
    await rest.add("c", 4, fresh(app.clock.now_us()))
    path = f"{rest.path(verb='counters')}?counts=true&limit=2"
    page = (await rest.http.get(path)).json()
    assert page["counters"] == ["a/b", "c"]
    by_count = (await rest.http.get(f"{rest.path(verb='counters')}?order=-count")).json()
    is_accurate = counter_type == "ACCURATE"
    assert [each["count"] for each in page["counts"]] == [3, 7 if is_accurate else 3]
    assert by_count["counters"][0] == ("c" if is_accurate else "a/b")
    [as_of] = {each["as_of"] for each in page["counts"]}
    assert page["counts"][0] == {
        "namespace": rest.namespace,
        "counter": "a/b",
        "count": 3,
        "as_of": as_of,
        "accuracy": counter_type.lower(),
    }
    exact = (await rest.http.get(f"{path}&max_staleness=0s")).json()
    assert [(each["count"], each["accuracy"]) for each in exact["counts"]] == [
        (3, "accurate"),
        (7, "accurate"),
    ]
    last = (await rest.http.get(f"{path}&page={page['next_page']}")).json()
    assert (last["counters"], last["next_page"]) == (["d"], None)


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_counters_are_listed_by_count_the_largest_first(
    rest: Rest, app: App, limit: int
) -> None:
    counts = {"p/a": 5, "p/b": 10**18, "p/c": -3, "p/d": 5, "p/e": 0, "q": 7}
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, delta, fresh(now_us)) for name, delta in counts.items()])
    path = f"{rest.path(verb='counters')}?order=-count&prefix=p/&max_staleness=0s&limit={limit}"
    page, seen = "", []
    while True:
        answer = (await rest.http.get(path + page)).json()
        assert [each["counter"] for each in answer["counts"]] == answer["counters"]
        seen += [(each["counter"], each["count"]) for each in answer["counts"]]
        if answer["next_page"] is None:
            break
        page = f"&page={answer['next_page']}"
    assert seen == [("p/b", 10**18), ("p/a", 5), ("p/d", 5), ("p/e", 0), ("p/c", -3)]


async def test_too_many_counters_to_order_are_refused_with_advice(
    rest: Rest, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counter.limits.COUNTERS_TOGETHER_MAX", 3)
    monkeypatch.setattr("counter.limits.BATCH_ITEMS_MAX", 2)
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in ("a1", "a2")])
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in ("a3", "b1")])
    path = f"{rest.path(verb='counters')}?order=-count"
    assert (await rest.http.get(f"{path}&prefix=a")).json()["counters"] == ["a1", "a2", "a3"]
    answer = await rest.http.get(path)
    assert_problem(answer, "invalid_parameter", "more than 3 counters", "longer prefix")


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("counts=yes", "counts is 'yes'"),
        ("order=count", "order is 'count'"),
        ("max_staleness=5s", "counts=true"),
        ("counts=true&max_staleness=5", "max_staleness"),
        ("order=-count&page=WyJ2aWV3cyJd", "page 'WyJ2aWV3cyJd'"),
        ("order=-count&page=WyJ4IiwgInZpZXdzIl0", "page"),
    ],
)
async def test_a_list_refuses_invalid_parameters(rest: Rest, query: str, named: str) -> None:
    answer = await rest.http.get(f"{rest.path(verb='counters')}?{query}")
    assert_problem(answer, "invalid_parameter", named)
