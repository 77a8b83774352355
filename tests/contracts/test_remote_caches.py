"""memcached and Redis keep the cache's contract, over real servers."""

import asyncio
import importlib
import re
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from counter import how_to_install
from counter.errors import CacheUnavailableError, InvalidBodyError, StartupError
from counter.limits import INT64_MAX, INT64_MIN, SECOND, TIME_MAX_US
from counter.ports import Cache
from counter.storage.memcached.connection import MemcachedConnection
from counter.storage.shared.cache_entries import count_key, token_key, value_key
from counter.storage.shared.remote_cache import RemoteCache
from counter.testing.cache_cases import UntimedCacheCases, increment, namespace_of
from counter.testing.cases import NOW, UNUSUAL_NAMES, add
from counter.testing.clock import FakeClock
from counter.types import Checkpoint, Era, Guarded, Namespace
from scripts.cluster_nodes import Cluster
from tests.support.caches import new_cache, store, ttl_of


class OnMemcached(UntimedCacheCases):
    """How the suite gets its cache: a prefix of its own keeps the tests apart."""

    servers: ClassVar[int] = 1

    @pytest.fixture(autouse=True)
    def _servers(self, memcached: Cluster) -> None:
        self._cluster = memcached

    def new_cache(self, clock: FakeClock) -> Cache:
        return new_cache(self._cluster, clock, servers=self.servers)


class TestOneServer(OnMemcached):
    """All keys in one place."""


class TestRedis(UntimedCacheCases):
    """The same over Redis."""

    @pytest.fixture(autouse=True)
    def _server(self, redis: Cluster) -> None:
        self._cluster = redis

    def new_cache(self, clock: FakeClock) -> Cache:
        return new_cache(self._cluster, clock)


class TestTwoServers(OnMemcached):
    """Keys on either."""

    servers = 2

    async def test_both_hold_a_share(self, cache: Cache, namespace: Namespace) -> None:
        entries = [(f"c{n}", Checkpoint(NOW, n)) for n in range(100)]
        await cache.put_many(namespace, entries)
        for address in self._cluster.memcached_addresses:
            host, _, port = address.partition(":")
            connection = MemcachedConnection(host, int(port), 1.0)
            prefix = cache._prefix  # type: ignore[attr-defined]
            found = connection.get_many(count_key(prefix, namespace.id, n) for n, _ in entries)
            connection.close()
            assert 20 < len(found) < 80


@pytest.fixture
def prefix() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def cache(any_cache: Cluster, prefix: str) -> AsyncIterator[RemoteCache[Any]]:
    cache = new_cache(any_cache, FakeClock(NOW), prefix=prefix)
    await cache.open()
    yield cache
    await cache.close()


async def test_a_count_is_kept_for_its_ttl(
    any_cache: Cluster, cache: RemoteCache[Any], prefix: str
) -> None:
    """In whole seconds, rounded up, and never for ever."""
    base = namespace_of()
    key = count_key(prefix, base.id, "c")
    for ttl_us, expected_s in ((10 * SECOND, 10), (9 * SECOND + 1, 10), (1, 1)):
        namespace = replace(base, settings=replace(base.settings, cache_ttl_us=ttl_us))
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
        assert expected_s - 1 <= ttl_of(any_cache, key) <= expected_s


async def test_an_older_count_does_not_prolong_a_newer_one(
    any_cache: Cluster, cache: RemoteCache[Any], prefix: str
) -> None:
    base = namespace_of()
    longer = replace(base, settings=replace(base.settings, cache_ttl_us=1_000 * SECOND))
    key = count_key(prefix, base.id, "c")
    await cache.put_many(base, [("c", Checkpoint(NOW, 1))])
    await cache.put_many(longer, [("c", Checkpoint(NOW - 1, 1))])
    assert ttl_of(any_cache, key) <= 10
    await cache.put_many(longer, [("c", Checkpoint(NOW + 1, 1))])
    assert ttl_of(any_cache, key) > 900


async def test_a_ttl_of_many_days_is_not_taken_for_a_date(
    any_cache: Cluster, cache: RemoteCache[Any], prefix: str
) -> None:
    """Past 30 days, memcached takes a TTL for seconds since 1970: gone at once."""
    base = namespace_of()
    namespace = replace(base, settings=replace(base.settings, cache_ttl_us=10**14))
    await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
    assert ttl_of(any_cache, count_key(prefix, base.id, "c")) > 29 * 24 * 3600


async def test_a_best_effort_value_does_not_expire(
    any_cache: Cluster, cache: RemoteCache[Any], prefix: str
) -> None:
    """The TTL bounds how stale a count is; a best-effort value is the count."""
    for delta in (5, -9):
        await increment(cache, namespace_of(), "c", delta)
        assert ttl_of(any_cache, value_key(prefix, namespace_of().id, "c")) == -1


async def test_the_guard_remembers_a_token_until_it_is_late_everywhere(
    any_cache: Cluster, cache: RemoteCache[Any], prefix: str
) -> None:
    """By the longest accept limit that holds for any of its times."""
    base = namespace_of()
    settings = replace(base.settings, accept_limit_us=SECOND)
    eras = (Era(0, 60 * SECOND), Era(NOW, SECOND))
    await cache.guard(replace(base, settings=settings, eras=eras), [add()])
    late_s = 60 + base.settings.future_limit_us // SECOND
    assert late_s < ttl_of(any_cache, token_key(prefix, base.id, add())) < 4 * late_s


async def test_a_best_effort_counter_refuses_what_does_not_fit_64_bits(any_cache: Cluster) -> None:
    """It keeps its value, and changes that came with it are made."""
    cache, namespace = new_cache(any_cache, FakeClock(NOW)), namespace_of()
    for name, end, step in (("up", INT64_MAX, 1), ("down", INT64_MIN, -1)):
        assert await increment(cache, namespace, name, end) == end
        refused, made, late = await asyncio.gather(
            increment(cache, namespace, name, step),
            increment(cache, namespace, f"beside {name}", step),
            increment(cache, namespace, name, -step),
            return_exceptions=True,
        )
        assert isinstance(refused, InvalidBodyError)
        assert f"has 64 bits, and adding {step} would exceed them" in refused.detail
        assert (made, late) == (step, end - step)
        assert list(await cache.best_effort(namespace, [name])) == [end - step]
        with pytest.raises(InvalidBodyError, match="was not changed"):
            await increment(cache, namespace, name, end)
        assert await increment(cache, namespace, name, step - end) == 0
    assert await increment(cache, namespace, "zero", INT64_MIN) == INT64_MIN
    refused, cleared, fresh = await asyncio.gather(
        increment(cache, namespace, "zero", -5),
        cache.clear(namespace, "zero"),
        increment(cache, namespace, "zero", -7),
        return_exceptions=True,
    )
    assert (cleared, fresh) == (None, -7)
    if isinstance(refused, InvalidBodyError):
        refused = fresh
    # memcached 1.6.18 may take so large a value for no number: then that change is made last.
    assert refused in (-7, -5 + -7)
    assert list(await cache.best_effort(namespace, ["zero"])) == [refused]
    assert cache.trouble is None
    assert cache.tally.calls["change"].errors == 0
    await cache.close()


@pytest.mark.parametrize("start", [INT64_MIN, -1, 0, 2**62, INT64_MAX - 3])
async def test_what_memory_held_before_disturbs_no_counter(memcached: Cluster, start: int) -> None:
    """A minus sign behind an enormous number makes it none to memcached 1.6.18; several counters,
    because memory may be reused in any way."""
    # Short, so that the items do not fill their memory: some of what it held before remains.
    prefix = uuid.uuid4().hex[:20]
    cache = new_cache(memcached, FakeClock(NOW), prefix=prefix)
    namespace = namespace_of()
    names = [f"c{n}" for n in range(50)]
    keys = [value_key(prefix, namespace.id, name) for name in names]
    host, _, port = memcached.memcached_addresses[0].partition(":")
    connection = MemcachedConnection(host, int(port), 10.0)
    connection.pipeline([b"set %b 0 0 25\r\n%b\r\n" % (key, b"-" * 25) for key in keys])
    connection.pipeline([b"delete %b\r\n" % key for key in keys])
    connection.close()
    await asyncio.gather(*(increment(cache, namespace, name, start) for name in names))
    # Three at once, in one batch: each has a value of its own.
    sums = await asyncio.gather(
        *(increment(cache, namespace, name, delta) for name in names for delta in (2, -1, 2))
    )
    steps = [start + step for step in (2, 1, 3)]
    assert sums == steps * len(names)
    assert list(await cache.best_effort(namespace, names)) == [steps[-1]] * len(names)
    await cache.close()


@pytest.mark.parametrize(
    "foreign", [b"junk", b"%d junk" % (NOW + 1), b"%d 7" % (TIME_MAX_US + 1), b"-1 7", b"9" * 400]
)
async def test_foreign_bytes_are_no_count(
    any_cache: Cluster, cache: RemoteCache[Any], prefix: str, foreign: bytes
) -> None:
    """They read as nothing, and are replaced."""
    namespace = namespace_of()
    store(any_cache, count_key(prefix, namespace.id, "c"), foreign)
    assert list(await cache.get_many(namespace, ["c"])) == [None]
    await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
    assert list(await cache.get_many(namespace, ["c"])) == [Checkpoint(NOW, 1)]
    assert cache.trouble is None


async def test_foreign_bytes_are_no_best_effort_value(
    any_cache: Cluster, cache: RemoteCache[Any], prefix: str
) -> None:
    """The counter cannot be read or changed until it is cleared; others can."""
    namespace = namespace_of()
    store(any_cache, value_key(prefix, namespace.id, "c"), b"junk")
    with pytest.raises(CacheUnavailableError, match="clear the counter"):
        await cache.best_effort(namespace, ["c"])
    # Regression: none of a batch was changed, or it was not known, and for a second no other.
    before, found, after, again = await cache.increment_many(
        namespace, [("a", 1), ("c", 1), ("b", 2), ("a", 4)]
    )
    assert (before, after, again) == (1, 2, 5)
    assert isinstance(found, CacheUnavailableError)
    assert "clear the counter" in found.detail
    assert cache.trouble is None
    assert list(await cache.best_effort(namespace, ["a", "b"])) == [5, 2]
    await cache.clear(namespace, "c")
    assert await increment(cache, namespace, "c", 2) == 2


async def test_batches_may_be_large(cache: RemoteCache[Any]) -> None:
    """Larger than what waits in a socket's buffers."""
    namespace = namespace_of()
    entries = [(f"c{n}", Checkpoint(NOW, 10**100 + n)) for n in range(10_000)]
    await cache.put_many(namespace, entries)
    found = await cache.get_many(namespace, [name for name, _ in entries])
    assert list(found) == [checkpoint for _, checkpoint in entries]
    events = [add(counter=name) for name, _ in entries]
    assert set(await cache.guard(namespace, events)) == {Guarded.NEW}
    assert set(await cache.guard(namespace, events)) == {Guarded.SAME}


def test_keys_are_what_memcached_takes() -> None:
    """At most 250 visible characters, each name and kind its own."""
    keys = [
        make("p" * 100, 2**63, name) for make in (count_key, value_key) for name in UNUSUAL_NAMES
    ]
    events = [add(name)._replace(item_key=item) for name in UNUSUAL_NAMES for item in (0, 1)]
    keys += [token_key("p" * 100, 2**63, event) for event in events]
    assert len(set(keys)) == len(keys)
    assert [key for key in keys if len(key) > 250 or not key.decode("ascii").isprintable()] == []
    assert [key for key in keys if b" " in key] == []


@pytest.mark.parametrize(
    ("kind", "driver"), [("memcached", "pymemcache"), ("redis", "redis"), ("redis", "hiredis")]
)
def test_a_missing_driver_is_named(kind: str, driver: str) -> None:
    """With the extra that brings it."""
    names = [name for name in sys.modules if name.startswith(f"counter.storage.{kind}")]
    without = dict.fromkeys([name for name in sys.modules if name.split(".")[0] == driver])
    with patch.dict(sys.modules, without):
        for name in names:
            del sys.modules[name]
        with pytest.raises(StartupError, match=re.escape(how_to_install(kind))):
            importlib.import_module(f"counter.storage.{kind}")
