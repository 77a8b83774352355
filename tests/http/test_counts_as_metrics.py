"""A namespace's counts in OpenMetrics: parsed by Prometheus, bounded, and refused with advice."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest

from counter import limits
from counter.api_keys import Scope
from tests.http.test_listing import ODD_NAMES
from tests.support.app import App, running
from tests.support.keys import hand_out
from tests.support.problems import assert_problem
from tests.support.promtool import promtool
from tests.support.rest import Rest, fresh, item
from tests.support.times import MINUTE, SECOND

PATH = "/v1/namespaces/default/metrics"
_SAMPLE = re.compile(r'^counter_value\{namespace="default",counter="(.*)"\} (\S+)$', re.MULTILINE)
_AS_OF = re.compile(
    r'^counter_value_as_of_timestamp_seconds\{namespace="default"\} (\S+)$', re.MULTILINE
)


def counts_in(text: str) -> dict[str, int]:
    """The counts of an exposition, by counter."""
    return {re.sub(r"\\(.)", r"\1", name): int(count) for name, count in _SAMPLE.findall(text)}


@pytest.mark.usefixtures("child_processes")
async def test_each_rolled_up_count_is_a_sample(rest: Rest, app: App) -> None:
    """With any name; a count goes down, too, and has any size."""
    now_us = app.clock.now_us()
    for delta in (limits.INT64_MAX, limits.INT64_MAX, -3):
        await rest.batch_add([item(name, delta, fresh(now_us)) for name in ODD_NAMES])
    await app.roll_up_after(MINUTE)
    await rest.add("*", 5, fresh(app.clock.now_us()))
    answer = await rest.http.get(PATH)
    assert answer.headers["content-type"] == (
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    )
    assert counts_in(answer.text) == dict.fromkeys(ODD_NAMES, 2 * limits.INT64_MAX - 3)
    [as_of] = _AS_OF.findall(answer.text)
    assert 0 < app.clock.now_us() - float(as_of) * SECOND < MINUTE
    assert answer.text.endswith("\n# EOF\n")
    promtool("check", "metrics", given=answer.text)


async def test_a_prefix_selects(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in ("a", "a%", "ab", "b")])
    await app.roll_up_after(MINUTE)
    answer = await rest.http.get(PATH, params={"prefix": "a"})
    assert counts_in(answer.text) == {"a": 1, "a%": 1, "ab": 1}
    assert counts_in((await rest.http.get(PATH, params={"prefix": "c"})).text) == {}


async def test_too_many_are_refused_with_advice(rest: Rest, app: App) -> None:
    now_us = app.clock.now_us()
    await rest.batch_add([item(name, 1, fresh(now_us)) for name in ("a1", "a2", "b1", "b2")])
    with (
        patch("counter.limits.COUNTERS_TOGETHER_MAX", 2),
        patch("counter.limits.BATCH_ITEMS_MAX", 1),
    ):
        assert len(counts_in((await rest.http.get(PATH, params={"prefix": "a"})).text)) == 2
        answer = await rest.http.get(PATH)
    body = assert_problem(answer, "invalid_parameter")
    assert body["field"] == "prefix"
    assert "more than 2 counters" in body["detail"]
    assert "give a longer prefix, or a prefix to each scrape" in body["detail"]


@pytest.mark.parametrize("query", [{"prefix": "x" * 257}, {"prefix": "a\n"}, {"limit": "5"}])
async def test_a_query_that_is_wrong_is_refused(rest: Rest, query: dict[str, str]) -> None:
    answer = await rest.http.get(PATH, params=query)
    assert_problem(answer, "invalid_parameter")


async def test_namespaces_without_events_have_no_list(rest: Rest) -> None:
    rough = rest.within("rough")
    await rough.create("BEST_EFFORT")
    answer = await rest.http.get(rough.path(verb="metrics"))
    assert_problem(answer, "not_supported", "rough")


async def test_a_key_that_may_read_the_namespace_may_scrape_it(rest: Rest, app: App) -> None:
    """Unlike /metrics, which shows all namespaces."""
    mine = await hand_out(app, Scope.READ, "default")
    other = await hand_out(app, Scope.READ, "other")
    assert (await rest.http.get(PATH, headers=mine)).status_code == 200
    assert (await rest.http.get(PATH, headers=other)).status_code == 404
    assert (await rest.http.get(PATH)).status_code == 401


async def test_all_processes_show_the_same_counts(tmp_path: Path) -> None:
    """Also one with an older cached count: Prometheus takes a decrease for a restart."""
    async with (
        running("simulated", tmp_path / "one") as one,
        running("simulated", tmp_path / "two", beside=one) as two,
    ):
        await one.rest.http.put(one.rest.path(), json={"cache_ttl": "1h"})
        await two.application.service.namespaces.refresh()
        for count in (1, 2):
            await one.rest.add("c", 1, fresh(one.clock.now_us()))
            one.clock.advance(MINUTE)
            await one.roll_up()
            if count == 1:
                assert await two.rest.count("c", "1h") == 1
        assert await two.rest.count("c", "1h") == 1
        for each in (one, two):
            assert counts_in((await each.http.get(PATH)).text) == {"c": 2}
