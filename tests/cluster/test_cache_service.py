"""The service over memcached and Redis: processes share counts, and work without the cache."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from counter.ports import Cache
from counter.storage.shared.cache_lane import RETRY_AFTER_US
from counter.testing.clock import FakeClock
from scripts.cluster_nodes import Cluster
from tests.support.app import App
from tests.support.caches import new_cache, processes_of
from tests.support.problems import assert_problem
from tests.support.rest import Rest, fresh
from tests.support.times import SECOND


@pytest.fixture(autouse=True)
def _cache_in_servers(any_cache: Cluster) -> Iterator[None]:
    """One prefix for all processes of a test."""
    prefix = uuid.uuid4().hex

    def open_cache(_: object, clock: FakeClock) -> Cache:
        return new_cache(any_cache, clock, prefix=prefix)

    with patch("rollup.parts.open_cache", open_cache):
        yield


@asynccontextmanager
async def process(directory: Path, *, beside: App | None = None) -> AsyncIterator[App]:
    """A service over a store that does not tell replays itself; *beside* one shares its store."""
    app = App("memory", directory)
    if beside is not None:
        app.clock, app._new_store = beside.clock, beside._new_store
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with process(tmp_path) as app:
        yield app


@pytest.fixture
async def other(app: App, tmp_path: Path) -> AsyncIterator[App]:
    async with process(tmp_path, beside=app) as other:
        yield other


async def loose(app: App) -> Rest:
    """The namespace of best-effort counters."""
    rest = app.rest.within("loose")
    assert (await rest.create("BEST_EFFORT")).status_code in (200, 201)
    return rest


async def test_two_processes_share_best_effort_counters(app: App, other: App) -> None:
    here, there = await loose(app), await loose(other)
    await asyncio.gather(*(each.add("c", 1) for each in (here, there) * 20))
    assert [await here.count("c"), await there.count("c")] == [40, 40]
    await there.add("c", -50)
    assert await here.count("c") == -10
    await here.clear("c")
    assert await there.count("c") == 0


async def test_a_process_sees_what_another_rolled_up(app: App, other: App) -> None:
    """From the cache alone: the store is not asked."""
    await app.rest.add("c", 5, fresh(app.clock.now_us()))
    await app.roll_up_after(60 * SECOND)
    with patch.object(other.store.rollups, "heads", None):
        answer = await other.rest.get("c", "10m")
    assert answer.json()["count"] == 5


async def test_the_guard_of_one_process_knows_the_tokens_of_another(app: App, other: App) -> None:
    token = fresh(app.clock.now_us())
    await app.rest.add("c", 1, token)
    with patch.object(other.store.events, "append", None):
        answer = await other.rest.add("c", 2, token)
    assert_problem(answer, "token_conflict")


async def test_without_cache_servers_events_are_counted(app: App, breakable_cache: Cluster) -> None:
    """Best-effort adds wait. Nothing is lost, nothing hangs, and no restart is needed."""
    server = processes_of(breakable_cache)[0]
    rest, best_effort = app.rest, await loose(app)
    for fault, mend in ((server.kill, server.start), (server.pause, server.resume)):
        before = await rest.count("c")
        await best_effort.add("d", 1)
        fault()
        async with asyncio.timeout(300):
            for _ in range(3):
                assert (await rest.add("c", 1, fresh(app.clock.now_us()))).status_code == 200
            assert await rest.count("c") == before + 3
            await app.roll_up_after(60 * SECOND)
            assert await rest.count("c", "10m") == before + 3
            for answer in (
                await best_effort.add("d", 1),
                await best_effort.get("d"),
                await best_effort.clear("d"),
            ):
                assert_problem(answer, "cache_unavailable")
        mend()
        app.clock.advance(RETRY_AFTER_US)
        assert (await best_effort.add("d", 1)).status_code == 200
