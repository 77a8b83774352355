"""Redis that refuses: full memory, a replica, a password, another database."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from counter.errors import CacheUnavailableError
from counter.limits import SECOND
from counter.storage.redis import RedisCache
from counter.storage.shared.cache_entries import value_key
from counter.storage.shared.cache_lane import RETRY_AFTER_US
from counter.testing.cache_cases import increment, namespace_of
from counter.testing.cases import NOW, add
from counter.testing.clock import FakeClock
from counter.types import Checkpoint, Guarded
from scripts.cluster_nodes import Cluster, Shape
from tests.support.caches import redis_cache
from tests.support.certificates import Authority
from tests.support.cluster import running_cluster
from tests.support.relay import Relay
from tests.support.server import ports_in_a_row
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


SPACE = namespace_of()
NAMES = [f"c{n}" for n in range(20)]
PASSWORD = "p@ss/word:1"
#: The same in a URL.
QUOTED = "p%40ss%2Fword%3A1"
HANG_S = 100


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def admin(breakable_redis: Cluster) -> Iterator[Any]:
    """A client of the server that the test may set as it likes."""
    with Redis.from_url(breakable_redis.redis_url) as client:
        yield client


@asynccontextmanager
async def cache_at(url: str, clock: FakeClock, prefix: str = "p") -> AsyncIterator[RedisCache]:
    """An open cache, under a limit that only a hang could reach."""
    cache = redis_cache(url, clock, prefix=prefix)
    await cache.open()
    async with asyncio.timeout(HANG_S):
        yield cache
    await cache.close()


async def works(cache: RedisCache) -> bool:
    """Whether it keeps a count, a best-effort value and a token."""
    name = uuid.uuid4().hex
    await cache.put_many(SPACE, [(name, Checkpoint(NOW, 7))])
    first = await cache.guard(SPACE, [add(name)])
    guarded = await cache.guard(SPACE, [add(name)])
    found = await cache.get_many(SPACE, [name])
    return (*first, *guarded, *found) == (Guarded.NEW, Guarded.SAME, Checkpoint(NOW, 7)) and (
        await increment(cache, SPACE, name, 3) == 3
    )


async def assert_refuses(cache: RedisCache, why: str, clock: FakeClock) -> None:
    """Each write is refused at once, for sure not made, and says why; the errors are counted."""
    before = sum(each.errors for each in cache.tally.calls.values())
    await cache.put_many(SPACE, [("refused", Checkpoint(NOW, 1))])
    assert why in str(cache.trouble)
    for _ in range(2):
        clock.advance(RETRY_AFTER_US)
        assert list(await cache.guard(SPACE, [add("refused")])) == [Guarded.UNVERIFIED]
        with pytest.raises(CacheUnavailableError, match="was not made") as refusal:
            await increment(cache, SPACE, "refused", 1)
        assert why in refusal.value.detail
    with pytest.raises(CacheUnavailableError, match=why):
        await cache.ping()
    assert sum(each.errors for each in cache.tally.calls.values()) == before + 6


@pytest.mark.parametrize("kind", ["noeviction", "volatile-lru"])
async def test_full_memory_refuses_writes_and_heals(
    breakable_redis: Cluster, admin: Any, clock: FakeClock, kind: str
) -> None:
    """A policy that evicts finds nothing to evict if no key has a TTL."""
    async with cache_at(breakable_redis.redis_url, clock) as cache:
        await increment(cache, SPACE, "kept", 5)
        admin.config_set("maxmemory-policy", kind)
        admin.config_set("maxmemory", "1")
        await assert_refuses(cache, "OOM command not allowed", clock)
        clock.advance(RETRY_AFTER_US)
        assert list(await cache.best_effort(SPACE, ["kept", "refused"])) == [5, 0]
        admin.config_set("maxmemory", "64mb")
        clock.advance(RETRY_AFTER_US)
        assert await works(cache)
        assert cache.trouble is None
        assert list(await cache.best_effort(SPACE, ["refused"])) == [0]


async def test_full_memory_that_evicts_keeps_serving(
    breakable_redis: Cluster, admin: Any, clock: FakeClock
) -> None:
    """As memcached does: best-effort values too."""
    admin.config_set("maxmemory-policy", "allkeys-lru")
    async with cache_at(breakable_redis.redis_url, clock) as cache:
        used = int(admin.info("memory")["used_memory"])
        admin.config_set("maxmemory", str(used + 2_000_000))
        names = [f"many {n}" for n in range(20_000)]
        for at in range(0, len(names), 1_000):
            part = names[at : at + 1_000]
            await cache.put_many(SPACE, [(name, Checkpoint(NOW, 1)) for name in part])
            await asyncio.gather(*(increment(cache, SPACE, name, 1) for name in part))
        assert cache.trouble is None
        found = await cache.get_many(SPACE, names)
        assert 0 < sum(each is not None for each in found) < len(names)
        assert 0 < sum(await cache.best_effort(SPACE, names)) < len(names)


async def test_a_replica_is_not_written_to_and_a_new_primary_is(
    breakable_redis: Cluster, admin: Any, clock: FakeClock
) -> None:
    """As after a failover in which the old primary became a replica: it connects again."""
    async with cache_at(breakable_redis.redis_url, clock) as cache:
        assert await works(cache)
        clients = {each["id"] for each in admin.client_list()}
        admin.config_set("replica-serve-stale-data", "yes")
        admin.replicaof("192.0.2.1", 6379)
        await assert_refuses(cache, "READONLY", clock)
        admin.replicaof("NO", "ONE")
        clock.advance(RETRY_AFTER_US)
        assert await works(cache)
        assert {each["id"] for each in admin.client_list()} - clients
        assert cache.trouble is None


async def test_a_failover_to_a_replica_keeps_its_data(clock: FakeClock) -> None:
    """The address leads to the new primary: replicated data are there, and nothing is stuck."""
    space = replace(SPACE, settings=replace(SPACE.settings, cache_ttl_us=3_600 * SECOND))
    with running_cluster(Shape(nodes=0, memcached=0, redis=2)) as pair:
        host, port = pair.shape.address_of(1), pair.shape.redis_port
        relay = Relay(host, port)
        with Redis(pair.shape.address_of(2), port) as standby:
            standby.replicaof(host, port)
            async with relay.listening():
                address, at = relay.address
                async with cache_at(f"redis://{address}:{at}", clock) as cache:
                    await cache.put_many(space, [("c", Checkpoint(NOW, 7))])
                    assert await increment(cache, space, "c", 5) == 5

                    await eventually(
                        lambda: len(standby.keys("p:[cv]*")) == 2,
                        "the replica has the count and the value",
                    )
                    await asyncio.to_thread(pair.redis[0].kill)
                    relay.go_away()
                    with pytest.raises(CacheUnavailableError):
                        await increment(cache, space, "c", 1)
                    assert list(await cache.get_many(space, ["c"])) == [None]
                    standby.replicaof("NO", "ONE")
                    relay.redirect(pair.shape.address_of(2), port)
                    relay.is_away = False
                    clock.advance(RETRY_AFTER_US)
                    assert await increment(cache, space, "c", 1) == 6
                    assert list(await cache.get_many(space, ["c"])) == [Checkpoint(NOW, 7)]
                    await cache.put_many(space, [("c", Checkpoint(NOW - 1, 6))])
                    assert list(await cache.get_many(space, ["c"])) == [Checkpoint(NOW, 7)]
                    assert cache.trouble is None


async def test_a_partly_refused_change_has_results_for_the_rest(
    redis: Cluster, clock: FakeClock
) -> None:
    """A key of another type is not a counter; the one beside it was changed, and says so."""
    prefix = uuid.uuid4().hex
    with Redis.from_url(redis.redis_url) as client:
        client.lpush(value_key(prefix, SPACE.id, "list").decode(), "x")
    async with cache_at(redis.redis_url, clock, prefix) as cache:
        made, refused = await asyncio.gather(
            increment(cache, SPACE, "c", 2),
            increment(cache, SPACE, "list", 2),
            return_exceptions=True,
        )
        assert made == 2
        assert isinstance(refused, CacheUnavailableError)
        assert "WRONGTYPE" in refused.detail
        assert "was not made" in refused.detail


async def test_only_the_right_user_and_password_connect(
    breakable_redis: Cluster, admin: Any, clock: FakeClock
) -> None:
    """No message shows a password; a wrong one is a server that is down until it is right."""
    host = breakable_redis.redis_url.removeprefix("redis://")
    admin.acl_setuser("app", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"],
                      categories=["+@all", "-@dangerous"])  # fmt: skip
    admin.config_set("requirepass", PASSWORD)
    for login in (f":{QUOTED}", f"default:{QUOTED}", f"app:{QUOTED}"):
        async with cache_at(f"valkey://{login}@{host}", clock) as cache:
            assert await works(cache), login
    for url, why in (
        (f"redis://{host}", "Authentication required"),
        (f"redis://:wr0ng@{host}", "invalid username-password pair"),
        (f"redis://ghost:wr0ng@{host}", "invalid username-password pair"),
    ):
        async with cache_at(url, clock) as cache:
            with pytest.raises(CacheUnavailableError) as refusal:
                await increment(cache, SPACE, "c", 1)
            assert why in refusal.value.detail
            assert why in str(cache.trouble)
            for text in (refusal.value.detail, str(cache.trouble), repr(cache)):
                assert PASSWORD not in text
                assert QUOTED not in text
                assert "wr0ng" not in text
    admin.config_set("requirepass", "")
    async with cache_at(f"redis://{host}", clock) as cache:
        assert await works(cache)


async def test_a_role_with_its_keys_and_commands_is_enough(
    breakable_redis: Cluster, admin: Any, clock: FakeClock
) -> None:
    """The commands that docs/configuration.md lists, for keys of the deployment."""
    commands = ["+mget", "+get", "+set", "+incrby", "+del", "+eval", "+select"]
    admin.acl_setuser("app", enabled=True, nopass=True, keys=["p:*"], commands=commands)
    url = breakable_redis.redis_url.replace("://", "://app:any@")
    async with cache_at(f"{url}/1", clock) as cache:
        assert await works(cache)
        await cache.clear(SPACE, "c")
        await cache.ping()
    async with cache_at(url, clock, "q") as cache:
        assert "NOPERM" in str(cache.trouble)


async def test_databases_are_separate_and_an_invalid_one_is_named(
    redis: Cluster, clock: FakeClock
) -> None:
    prefix = uuid.uuid4().hex
    async with (
        cache_at(redis.redis_url, clock, prefix) as zero,
        cache_at(f"{redis.redis_url}/0", clock, prefix) as same,
        cache_at(f"{redis.redis_url}/1", clock, prefix) as one,
    ):
        await increment(zero, SPACE, "c", 5)
        values = [list(await each.best_effort(SPACE, ["c"])) for each in (zero, same, one)]
        assert values == [[5], [5], [0]]
    async with cache_at(f"{redis.redis_url}/99", clock) as cache:
        assert "DB index is out of range" in str(cache.trouble)


async def test_scripts_that_a_server_lost_are_sent_again(redis: Cluster, clock: FakeClock) -> None:
    async with cache_at(redis.redis_url, clock, uuid.uuid4().hex) as cache:
        assert await works(cache)
        with Redis.from_url(redis.redis_url) as client:
            client.script_flush()
        assert await works(cache)


async def test_tls_needs_a_certificate_of_the_authority_for_the_host(
    breakable_redis: Cluster, admin: Any, clock: FakeClock, tmp_path: Path
) -> None:
    """By rediss:// and valkeys://; with a certificate of its own if the server asks for one."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    signed, own = authority.sign(), authority.sign("client")
    port = ports_in_a_row(1)
    address = breakable_redis.shape.address_of(1)
    admin.execute_command(
        *("CONFIG", "SET", "bind", f"{address} 127.0.0.1", "tls-port", port),
        *("tls-cert-file", str(signed.cert), "tls-key-file", str(signed.key)),
        *("tls-ca-cert-file", str(authority.cert), "tls-auth-clients", "optional"),
    )
    trust = f"ssl_ca_certs={authority.cert}"
    for start in ("rediss://127.0.0.1", "valkeys://localhost"):
        async with cache_at(f"{start}:{port}/0?{trust}", clock) as cache:
            assert await works(cache)
    for url in (
        f"rediss://127.0.0.1:{port}",
        f"rediss://127.0.0.1:{port}?ssl_ca_certs={stranger.cert}",
        f"rediss://{address}:{port}?{trust}",
    ):
        async with cache_at(url, clock) as cache:
            assert "certificate verify failed" in str(cache.trouble), url
    admin.config_set("tls-auth-clients", "yes")
    async with cache_at(f"rediss://127.0.0.1:{port}?{trust}", clock) as cache:
        assert cache.trouble is not None
    shown = f"{trust}&ssl_certfile={own.cert}&ssl_keyfile={own.key}"
    async with cache_at(f"rediss://127.0.0.1:{port}?{shown}", clock) as cache:
        assert await works(cache)
