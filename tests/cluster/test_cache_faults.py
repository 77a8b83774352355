"""memcached or Redis dead, frozen, wiped or started again: nothing hangs, nothing needs a restart.

The breaker goes by a fake clock: a server is left alone until the test lets a second pass.
"""

import asyncio
import random
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest

from counter.errors import CacheUnavailableError
from counter.storage.memcached import MemcachedCache
from counter.storage.shared.cache_lane import RETRY_AFTER_US
from counter.storage.shared.remote_cache import RemoteCache
from counter.testing.cache_cases import increment, namespace_of
from counter.testing.cases import NOW, add
from counter.testing.clock import FakeClock
from counter.types import Checkpoint, Guarded
from scripts.cluster_nodes import Cluster
from scripts.cluster_process import ServerProcess
from tests.support.caches import cache_address, new_cache, processes_of, wipe
from tests.support.waiting import eventually

NAMES = [f"c{n}" for n in range(50)]
SPACE = namespace_of()
#: For a server that does not answer; one that does has time on a busy machine.
SHORT_US = 1_000_000
#: No claim about speed, only that it ends: far more than a few time-outs.
HANG_S = 100


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@asynccontextmanager
async def cache_of(
    cluster: Cluster,
    clock: FakeClock,
    *,
    servers: int = 1,
    timeout_us: int = 2_000_000,
    prefix: str | None = None,
) -> AsyncIterator[RemoteCache[Any]]:
    """An open cache, under a limit that only a hang could reach."""
    cache = new_cache(cluster, clock, servers=servers, timeout_us=timeout_us, prefix=prefix)
    await cache.open()
    async with asyncio.timeout(HANG_S):
        yield cache
    await cache.close()


@asynccontextmanager
async def hasty(
    cluster: Cluster, clock: FakeClock
) -> AsyncIterator[tuple[RemoteCache[Any], ServerProcess]]:
    """A cache that does not wait for long, and its server."""
    async with cache_of(cluster, clock, timeout_us=SHORT_US) as cache:
        yield cache, processes_of(cluster)[0]


async def fill(cache: RemoteCache[Any]) -> None:
    """A count, a best-effort value and a token for each name."""
    await cache.put_many(SPACE, [(name, Checkpoint(NOW, 1)) for name in NAMES])
    await asyncio.gather(*(increment(cache, SPACE, name, 1) for name in NAMES))
    await cache.guard(SPACE, [add(name) for name in NAMES])


async def known(cache: RemoteCache[Any]) -> list[str]:
    """The names with counts in the cache."""
    found = await cache.get_many(SPACE, NAMES)
    return [name for name, each in zip(NAMES, found, strict=True) if each is not None]


async def assert_knows_nothing(cache: RemoteCache[Any]) -> None:
    """Reads are empty, writes do nothing, best-effort counters say that they are not available."""
    assert await known(cache) == []
    await cache.put_many(SPACE, [("c0", Checkpoint(NOW + 1, 2))])
    assert list(await cache.guard(SPACE, [add(), add()])) == [Guarded.UNVERIFIED] * 2
    with pytest.raises(CacheUnavailableError):
        await increment(cache, SPACE, "c0", 1)
    with pytest.raises(CacheUnavailableError):
        await cache.best_effort(SPACE, NAMES)
    with pytest.raises(CacheUnavailableError):
        await cache.clear(SPACE, "c0")
    with pytest.raises(CacheUnavailableError, match=" at 127"):
        await cache.ping()
    assert cache.trouble is not None


async def test_a_killed_server_knows_nothing_and_comes_back_empty(
    breakable_cache: Cluster, clock: FakeClock
) -> None:
    server = processes_of(breakable_cache)[0]
    async with cache_of(breakable_cache, clock) as cache:
        await fill(cache)
        server.kill()
        await assert_knows_nothing(cache)
        assert cache_address(breakable_cache) in str(cache.trouble)
        server.start()
        clock.advance(RETRY_AFTER_US)
        assert await known(cache) == []
        assert cache.trouble is None
        await fill(cache)
        assert await known(cache) == NAMES
        assert list(await cache.best_effort(SPACE, ["c0"])) == [1]


async def test_a_server_that_was_started_again_is_used_at_once(
    breakable_cache: Cluster, clock: FakeClock
) -> None:
    """Nothing is sent into the connections to the one before, and no increment fails for them."""
    server = processes_of(breakable_cache)[0]
    async with cache_of(breakable_cache, clock) as cache:
        await fill(cache)
        server.kill()
        server.start()
        assert await increment(cache, SPACE, "c0", 5) == 5
        assert list(await cache.guard(SPACE, [add()])) == [Guarded.NEW]
        await cache.put_many(SPACE, [("c0", Checkpoint(NOW, 1))])
        assert await known(cache) == ["c0"]
        assert cache.trouble is None


async def test_a_frozen_server_is_not_waited_for(
    breakable_cache: Cluster, clock: FakeClock
) -> None:
    """Its connections stay open, and new ones are even taken."""
    async with hasty(breakable_cache, clock) as (cache, server):
        await fill(cache)
        server.pause()
        await assert_knows_nothing(cache)
        assert "no answer within 1 s" in str(cache.trouble)
        server.resume()
        clock.advance(RETRY_AFTER_US)

        async def recovered() -> bool:
            clock.advance(RETRY_AFTER_US)
            return await known(cache) == NAMES

        await eventually(recovered, "the counts are there again")
        assert cache.trouble is None


async def test_an_increment_without_a_response_may_have_been_made(
    breakable_cache: Cluster, clock: FakeClock
) -> None:
    """And its error says so; the next one, to a server that is left alone, was surely not."""
    async with hasty(breakable_cache, clock) as (cache, server):
        await increment(cache, SPACE, "c", 1)
        server.pause()
        with pytest.raises(CacheUnavailableError, match="may have been made") as first:
            await increment(cache, SPACE, "c", 1)
        with pytest.raises(CacheUnavailableError, match="was not made") as second:
            await increment(cache, SPACE, "c", 1)
        assert first.value.retry_after_us == second.value.retry_after_us == RETRY_AFTER_US
        server.resume()

        async def made() -> bool:
            clock.advance(RETRY_AFTER_US)
            try:
                return list(await cache.best_effort(SPACE, ["c"])) == [2]
            except CacheUnavailableError:
                return False

        await eventually(made, "the increment that was sent is made")


async def test_a_wiped_server_has_lost_all(any_cache: Cluster, clock: FakeClock) -> None:
    """Counts are read from the store, best-effort counters begin again."""
    async with cache_of(any_cache, clock) as cache:
        await fill(cache)
        wipe(any_cache)
        assert await known(cache) == []
        assert list(await cache.best_effort(SPACE, ["c0"])) == [0]
        assert list(await cache.guard(SPACE, [add()])) == [Guarded.NEW]
        assert await increment(cache, SPACE, "c0", -2) == -2
        assert cache.trouble is None


async def test_one_dead_server_of_two_leaves_the_keys_of_the_other(
    breakable_memcached: Cluster, clock: FakeClock
) -> None:
    """They are not moved to the one that lives, nor are they lost with the other's return."""
    server = breakable_memcached.memcached[1]
    async with cache_of(breakable_memcached, clock, servers=2) as cache:
        await fill(cache)
        assert await known(cache) == NAMES
        server.kill()
        still = await known(cache)
        assert 0 < len(still) < len(NAMES)
        answers = await cache.guard(SPACE, [add(name) for name in NAMES])
        assert set(answers) == {Guarded.SAME, Guarded.UNVERIFIED}
        outcomes = await asyncio.gather(
            *(increment(cache, SPACE, name, 1) for name in NAMES), return_exceptions=True
        )
        assert {2} == {each for each in outcomes if isinstance(each, int)}
        assert any(isinstance(each, CacheUnavailableError) for each in outcomes)
        with pytest.raises(CacheUnavailableError):
            await cache.ping()
        assert breakable_memcached.memcached_addresses[1] in str(cache.trouble)
        assert breakable_memcached.memcached_addresses[0] not in str(cache.trouble)
        server.start()
        await cache.ping()
        assert cache.trouble is None
        await cache.put_many(SPACE, [(name, Checkpoint(NOW, 1)) for name in NAMES])
        assert await known(cache) == NAMES


async def test_a_failed_server_is_skipped_for_a_while(
    breakable_cache: Cluster, clock: FakeClock
) -> None:
    """No caller waits for the same time-out again; a ping still tries."""
    server = processes_of(breakable_cache)[0]
    async with cache_of(breakable_cache, clock) as cache:
        await fill(cache)
        server.kill()
        assert await known(cache) == []
        server.start()
        await cache.put_many(SPACE, [("c0", Checkpoint(NOW, 1))])
        clock.advance(RETRY_AFTER_US - 1)
        assert await known(cache) == []
        assert cache.trouble is not None
        await cache.ping()
        assert cache.trouble is None
        await cache.put_many(SPACE, [("c0", Checkpoint(NOW, 1))])
        assert await known(cache) == ["c0"]


async def test_a_service_starts_without_its_cache(
    breakable_cache: Cluster, clock: FakeClock
) -> None:
    server = processes_of(breakable_cache)[0]
    server.kill()
    async with cache_of(breakable_cache, clock) as cache:
        assert "refused" in str(cache.trouble)
        server.start()
        clock.advance(RETRY_AFTER_US)
        await fill(cache)
        assert await known(cache) == NAMES


async def test_a_name_that_leads_nowhere_is_a_server_that_is_down(clock: FakeClock) -> None:
    """Not an error of the start: the name may lead somewhere later."""
    cache = MemcachedCache([("no such host", 11211)], clock)
    await cache.open()
    assert "memcached at no such host:11211" in str(cache.trouble)
    assert list(await cache.get_many(SPACE, ["c"])) == [None]
    await cache.close()


async def test_a_name_of_several_addresses_leads_to_the_one_that_answers(
    memcached: Cluster, clock: FakeClock
) -> None:
    """Like `localhost`, which is first ::1, where the server may not listen."""
    host, _, port = memcached.memcached_addresses[0].partition(":")
    stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*stream, (address, int(port))) for address in ("127.255.255.254", host)]
    cache = MemcachedCache([("two-addresses", int(port))], clock, timeout_us=2_000_000)
    real = socket.getaddrinfo

    def lookup(name: str, *rest: Any, **named: Any) -> Any:
        return found if name == "two-addresses" else real(name, *rest, **named)

    with patch("counter.storage.memcached.connection.socket.getaddrinfo", lookup):
        await cache.ping()
    await cache.close()


async def test_the_newer_count_of_two_processes_is_kept(
    any_cache: Cluster, clock: FakeClock
) -> None:
    """However their puts cross: the seed of a failure is in its message."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    prefix = uuid.uuid4().hex
    async with (
        cache_of(any_cache, clock, prefix=prefix) as one,
        cache_of(any_cache, clock, prefix=prefix) as other,
    ):
        for number in range(40):
            name = f"race {number}"
            times = [NOW + rng.randrange(100) for _ in range(20)]
            await asyncio.gather(
                *(
                    rng.choice((one, other)).put_many(SPACE, [(name, Checkpoint(time_us, time_us))])
                    for time_us in times
                )
            )
            newest = Checkpoint(max(times), max(times))
            assert list(await one.get_many(SPACE, [name])) == [newest], f"seed {seed}"


async def test_every_increment_of_two_processes_counts(
    any_cache: Cluster, clock: FakeClock
) -> None:
    """Also if both find no counter yet, and both create one."""
    prefix = uuid.uuid4().hex
    async with (
        cache_of(any_cache, clock, prefix=prefix) as one,
        cache_of(any_cache, clock, prefix=prefix) as other,
    ):
        names = [f"race {number}" for number in range(40)]
        await asyncio.gather(
            *(increment(cache, SPACE, name, 1) for name in names for cache in (one, other) * 3)
        )
        assert list(await one.best_effort(SPACE, names)) == [6] * len(names)


async def test_one_of_two_processes_learns_that_the_token_is_new(
    any_cache: Cluster, clock: FakeClock
) -> None:
    prefix = uuid.uuid4().hex
    async with (
        cache_of(any_cache, clock, prefix=prefix) as one,
        cache_of(any_cache, clock, prefix=prefix) as other,
    ):
        for number in range(40):
            event = add(number=number)
            answers = await asyncio.gather(
                one.guard(SPACE, [event]), other.guard(SPACE, [event._replace(delta=2)])
            )
            assert sorted(each.name for [each] in answers) == ["NEW", "OTHER"]
