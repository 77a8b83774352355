"""The adapters keep the cache's contract over simulated servers, also when these fail."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from counter.errors import CacheUnavailableError
from counter.limits import SECOND
from counter.ports import Cache
from counter.testing.cache_cases import CacheCases, increment, namespace_of
from counter.testing.cases import NOW
from counter.testing.clock import FakeClock
from counter.types import Checkpoint
from tests.simulation.caches import TIMEOUT_US, CacheServer, cache_over
from tests.simulation.loop import SimulatedLoop
from tests.simulation.world import SimulatedClock


class TestMemcached(CacheCases):
    """One server that answers at once."""

    def new_cache(self, clock: FakeClock) -> Cache:
        return self.cache_over("memcached", 1, clock)

    def cache_over(self, kind: str, count: int, clock: FakeClock) -> Cache:
        """A cache over so many; the clock does not move, so no time-out is over."""

        def at(delay_us: int, call: Any, *args: Any) -> None:
            if delay_us < TIMEOUT_US:
                asyncio.get_running_loop().call_soon(call, *args)

        servers = [CacheServer(at, clock.boottime_us, Random(1)) for _ in range(count)]
        return cache_over(kind, servers, clock)


class TestTwoMemcached(TestMemcached):
    """Keys on either."""

    def new_cache(self, clock: FakeClock) -> Cache:
        return self.cache_over("memcached", 2, clock)


class TestRedis(TestMemcached):
    """The same over Redis."""

    def new_cache(self, clock: FakeClock) -> Cache:
        return self.cache_over("redis", 1, clock)


class _Site:
    """A server, and a cache over it, in virtual time."""

    def __init__(self, kind: str) -> None:
        self.loop = SimulatedLoop(Random(0))
        self.server = CacheServer(self.loop.at, lambda: self.loop.now_us, Random(1))
        self.reached: list[str] = []
        self.server.reach = self.reached.append
        self.cache = cache_over(kind, [self.server], SimulatedClock(self.loop, 0))
        self.namespace = namespace_of()

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run *work* to its end."""

        async def whole() -> Any:
            return await work()

        return self.loop.run_until_complete(whole())

    async def put(self, name: str, count: int) -> None:
        await self.cache.put_many(self.namespace, [(name, Checkpoint(NOW, count))])

    async def got(self, name: str) -> int | None:
        (found,) = await self.cache.get_many(self.namespace, [name])
        return found and found.count


@pytest.fixture(params=["memcached", "redis"])
def site(request: pytest.FixtureRequest) -> Iterator[_Site]:
    made = _Site(request.param)
    yield made
    made.loop.end()


def test_a_server_that_was_restarted_is_empty(site: _Site) -> None:
    async def work() -> list[int | None]:
        await site.put("c", 1)
        site.server.restart(SECOND // 10)
        down = await site.got("c")
        with pytest.raises(CacheUnavailableError, match="refused"):
            await site.cache.ping()
        await asyncio.sleep(2)
        empty = await site.got("c")
        await site.put("c", 2)
        return [down, empty, await site.got("c")]

    assert site.run(work) == [None, None, 2]
    assert "cache-restarts" in site.reached


def test_a_full_server_evicts_the_least_used(site: _Site) -> None:
    site.server.items_max = 2

    async def work() -> list[int | None]:
        for number, name in enumerate("aba"):
            await site.put(name, number)
        await site.put("c", 3)
        return [await site.got(name) for name in "abc"]

    assert site.run(work) == [2, None, 3]
    assert "cache-evicts" in site.reached


def test_a_change_whose_response_is_lost_was_made(site: _Site) -> None:

    async def work() -> int:
        await increment(site.cache, site.namespace, "c", 1)
        site.server.lost = 1.0
        with pytest.raises(CacheUnavailableError, match="may have been made"):
            await increment(site.cache, site.namespace, "c", 5)
        site.server.calm()
        await asyncio.sleep(2)
        return (await site.cache.best_effort(site.namespace, ["c"]))[0]

    assert site.run(work) == 6
    assert "cache-times-out" in site.reached


def test_a_late_response_is_not_taken_for_the_next_one(site: _Site) -> None:
    async def work() -> list[int | None]:
        await site.put("a", 1)
        await site.put("b", 2)
        # It comes 10 ms after the next request is sent, and 10 ms before that one's response.
        delays_us = iter([1, 1_210_000, 1, 20_000])
        with patch.object(site.server, "delay_us", lambda: next(delays_us)):
            late = await site.got("a")
            await asyncio.sleep(1.2 - TIMEOUT_US / SECOND)
            return [late, await site.got("b")]

    assert site.run(work) == [None, 2]
    assert "cache-times-out" in site.reached
