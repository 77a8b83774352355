"""The routes for operators and newcomers beside the counters."""

import asyncio
import re
from types import SimpleNamespace
from unittest.mock import AsyncMock, patch

import pytest

from counter.types import ClockReading
from tests.support.app import App
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh
from tests.support.times import SECOND


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"])
async def test_the_service_is_healthy(rest: Rest, path: str) -> None:
    answer = await rest.http.get(path)
    assert answer.status_code == 200, answer.text


async def test_the_documentation_needs_nothing_from_elsewhere(rest: Rest) -> None:
    """Regression: the page was blank if the network had no way out."""
    page = (await rest.http.get("/docs")).text
    wanted = re.findall(r"(?:src|href)=[\"']([^\"']+)", page)
    assert len(wanted) >= 3
    for each in wanted:
        assert each.startswith("/"), each
        assert (await rest.http.get(each)).status_code == 200, each


async def metric(rest: Rest, name: str) -> float | None:
    """The value of a metric without labels; None if it is missing."""
    text = (await rest.http.get("/metrics")).text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


async def test_it_is_ready_if_everything_works(rest: Rest) -> None:
    answer = await rest.http.get("/readyz")
    assert answer.json() == {"status": "ready", "store": "ok", "cache": "ok", "rollup": "elsewhere"}
    assert await metric(rest, "counter_store_up") == 1
    assert await metric(rest, "counter_cache_up") == 1


async def test_a_flood_of_readiness_checks_causes_few_writes(rest: Rest, app: App) -> None:
    """Who has no key may ask, and asking whether the store can be written is a write."""
    began, goes_on, asked = asyncio.Event(), asyncio.Event(), 0

    async def ping() -> None:
        nonlocal asked
        asked += 1
        began.set()
        await goes_on.wait()

    with patch.object(app.store, "ping", ping):
        asking = [asyncio.create_task(rest.http.get("/readyz")) for _ in range(20)]
        given_up = asyncio.create_task(rest.http.get("/readyz"))
        await began.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        given_up.cancel()
        goes_on.set()
        assert [(await each).status_code for each in asking] == [200] * 20
        assert asked == 1
        assert (await rest.http.get("/readyz")).status_code == 200
        assert asked == 2


async def test_it_is_not_ready_if_its_rollup_fails(rest: Rest, app: App) -> None:
    application = app.application
    application.health.rolls_up = True
    with patch.object(application.health, "worker", SimpleNamespace(trouble="planted")):
        answer = await rest.http.get("/readyz")
    assert_problem(answer, "unavailable", "planted")


async def test_it_is_not_ready_if_its_clock_is_wrong(rest: Rest, app: App) -> None:
    guard = app.application.guard
    ahead = ClockReading(60 * SECOND, 0)
    with patch.object(app.store.control, "read_clock", AsyncMock(return_value=ahead)):
        await guard.measure()
        answer = await rest.http.get("/readyz")
        assert_problem(answer, "clock_skew")
        answer = await rest.add("c", 1, fresh(app.clock.now_us()))
        assert_problem(answer, "clock_skew")
        assert await metric(rest, "counter_clock_offset_seconds") == 60
        assert await metric(rest, "counter_clock_out_of_bounds") == 1
    await guard.measure()
    assert (await rest.http.get("/readyz")).status_code == 200
    assert await metric(rest, "counter_clock_out_of_bounds") == 0
