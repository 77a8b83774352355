"""Two API processes over one store: each sees the changes of the other."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from counter.config.settings import Settings
from tests.support.app import App, running
from tests.support.lifespan import Lifespan
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    """The first process, over a store that can be shared."""
    async with running("memory", tmp_path) as each:
        yield each


@pytest.fixture
async def other(app: App, tmp_path: Path) -> AsyncIterator[Rest]:
    """The second process."""
    wired = create_app(Settings(), store=app.store, clock=app.clock, rollup=False)
    lifespan = Lifespan(wired)
    await lifespan.start()
    transport = httpx.ASGITransport(wired)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield Rest(http)
    await lifespan.stop()


async def test_a_namespace_created_by_one_process_is_known_to_the_other(
    rest: Rest, other: Rest
) -> None:
    assert (await rest.within("new").create()).status_code == 201
    answer = await other.within("new").add("c", 1, key="order-1")
    assert answer.status_code == 200, answer.text
    assert await rest.within("new").count("c") == 1


async def test_a_namespace_changed_by_one_process_is_changed_on_by_the_other(
    rest: Rest, other: Rest
) -> None:
    path = rest.path()
    await rest.http.put(path, json={"cache_ttl": "3s"})
    shown = await other.http.get(path)
    assert shown.json()["cache_ttl"] == "3s"
    etag = shown.headers["etag"]
    changed = await other.http.put(path, json={"cache_ttl": "4s"}, headers={"if-match": etag})
    assert changed.status_code == 200, changed.text
    listed = (await rest.http.get("/v1/namespaces")).json()["namespaces"]
    assert [each["cache_ttl"] for each in listed] == ["4s"]


async def test_a_namespace_deleted_by_one_process_is_gone_for_the_other(
    rest: Rest, other: Rest, app: App
) -> None:
    await rest.http.delete(rest.path())
    answer = await other.add("c", 1, fresh(app.clock.now_us()))
    assert_problem(answer, "namespace_unknown")


async def test_a_namespace_made_again_is_not_taken_for_the_deleted_one(
    rest: Rest, other: Rest, app: App
) -> None:
    await rest.http.delete(rest.path())
    await rest.create()
    token = fresh(app.clock.now_us())
    answer = await other.add("c", 1, token)
    assert_problem(answer, "unavailable")
    assert (await other.add("c", 1, token)).status_code == 200
    assert await rest.count("c") == 1
