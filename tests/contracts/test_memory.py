"""The in-memory adapters keep the contracts."""

from dataclasses import replace
from pathlib import Path

from counter.ports import Cache, Store
from counter.storage.memory import MemoryStore
from counter.storage.memory.store import MemoryLeases
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cache_cases import CacheCases, increment, namespace_of
from counter.testing.cases import DATASET, NOW, StoreCases, add, write
from counter.testing.clock import FakeClock
from counter.testing.control_cases import PurgeCases, purge
from counter.testing.suites import add_suites
from counter.types import Checkpoint, Namespace


class OnMemory(StoreCases):
    """How the suites get an in-memory store."""

    transactional = False
    one_moment = True
    partition_sizes = True

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return MemoryStore(clock, [DATASET])

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, MemoryStore)
        del store.tables.space(namespace).counts[row[0]].rows[row[1]]


add_suites(globals(), OnMemory)


class TestPurge(OnMemory, PurgeCases):
    """Purging."""

    async def test_nothing_of_a_deleted_namespace_stays(
        self, store: Store, namespace: Namespace
    ) -> None:
        assert isinstance(store, MemoryStore)
        await write(store, namespace, add())
        tables = store.tables.state_of(namespace.dataset).tables.values()
        assert [True for table in tables if namespace.id in table]
        await store.control.delete_namespace(namespace)
        await purge(store)
        assert [True for table in tables if namespace.id in table] == []


class TestCache(CacheCases):
    """Counts and best-effort counters in one process, both bounded."""

    def new_cache(self, clock: FakeClock) -> Cache:
        return MemoryCache(clock)

    async def test_the_least_recently_used_count_goes_first(self, clock: FakeClock) -> None:
        """Reading and writing are use; a namespace has no share of its own."""
        cache = MemoryCache(clock, entries_max=3)
        one, two = namespace_of(1), namespace_of(2)
        for namespace, name in ((one, "a"), (one, "b"), (two, "a")):
            await cache.put_many(namespace, [(name, Checkpoint(NOW, 1))])
        await cache.get_many(one, ["a"])
        await cache.put_many(two, [("b", Checkpoint(NOW, 1))])
        assert [each and 1 for each in await cache.get_many(one, ["a", "b"])] == [1, None]
        assert [each and 1 for each in await cache.get_many(two, ["a", "b"])] == [1, 1]

    async def test_the_least_recently_used_best_effort_counter_goes_first(
        self, clock: FakeClock
    ) -> None:
        """And starts again from 0; cached counts do not drive it out."""
        cache, namespace = MemoryCache(clock, entries_max=1, best_effort_max=2), namespace_of()
        for name in ("a", "b"):
            await increment(cache, namespace, name, 5)
            await cache.put_many(namespace, [(name, Checkpoint(NOW, 1))])
        await increment(cache, namespace, "a", 1)
        await increment(cache, namespace, "c", 5)
        assert list(await cache.best_effort(namespace, ["b", "c", "a"])) == [0, 5, 6]
        await cache.best_effort(namespace, ["c"])
        await increment(cache, namespace, "d", 5)
        assert list(await cache.best_effort(namespace, ["a", "c", "d"])) == [0, 5, 5]

    async def test_each_namespace_has_its_ttl(self, clock: FakeClock) -> None:
        """As it is set when the entry is asked for."""
        cache, namespace = MemoryCache(clock), namespace_of()
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
        clock.advance(1_000)
        shorter = replace(namespace, settings=replace(namespace.settings, cache_ttl_us=1_000))
        assert list(await cache.get_many(shorter, ["c"])) == [None]

    async def test_an_older_count_replaces_none_that_is_still_served(
        self, clock: FakeClock
    ) -> None:
        """To the last microsecond of its TTL; after it any count is taken."""
        cache, namespace = MemoryCache(clock), namespace_of()
        newer, older = Checkpoint(NOW, 2), Checkpoint(NOW - 1, 1)
        await cache.put_many(namespace, [("c", newer)])
        clock.advance(namespace.settings.cache_ttl_us - 1)
        await cache.put_many(namespace, [("c", older)])
        assert list(await cache.get_many(namespace, ["c"])) == [newer]
        clock.advance(1)
        await cache.put_many(namespace, [("c", older)])
        assert list(await cache.get_many(namespace, ["c"])) == [older]


async def test_a_lease_runs_out() -> None:
    """At its instant and not before."""
    clock = FakeClock(NOW)
    leases = MemoryLeases(clock)
    await leases.heartbeat("a", 10)
    clock.advance(9)
    await leases.heartbeat("b", 10)
    assert list(await leases.workers()) == ["a", "b"]
    clock.advance(1)
    assert list(await leases.workers()) == ["b"]
