"""The cache's contract: it may lose all, but what it gives is the newest it was given."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from counter.errors import CounterError
from counter.ports import Cache
from counter.testing.cases import (
    DATASET,
    NOW,
    SETTINGS,
    UNUSUAL_NAMES,
    add,
    atomic,
    clear,
)
from counter.testing.clock import FakeClock
from counter.types import Checkpoint, CounterType, Era, Guarded, Namespace

TTL = SETTINGS.cache_ttl_us


async def increment(cache: Cache, namespace: Namespace, counter: str, delta: int) -> int:
    """Add to one best-effort counter; its value. Raises what the cache answers in its place."""
    [value] = await cache.increment_many(namespace, [(counter, delta)])
    if isinstance(value, CounterError):
        raise value
    return value


def namespace_of(number: int = 1) -> Namespace:
    settings = replace(SETTINGS, counter_type=CounterType.BEST_EFFORT)
    eras = (Era(0, settings.accept_limit_us),)
    return Namespace(number, f"n{number}", settings, eras, DATASET, NOW, version=1)


class UntimedCacheCases:
    """Counts by the instant they are exact as of, best-effort counters, the guard."""

    def new_cache(self, clock: FakeClock) -> Cache:
        """The adapter's cache, empty."""
        raise NotImplementedError

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock(NOW)

    @pytest.fixture
    async def cache(self, clock: FakeClock) -> AsyncIterator[Cache]:
        cache = self.new_cache(clock)
        await cache.open()
        yield cache
        await cache.close()

    @pytest.fixture
    def namespace(self) -> Namespace:
        return namespace_of()

    async def got(self, cache: Cache, namespace: Namespace, name: str = "c") -> Checkpoint | None:
        (found,) = await cache.get_many(namespace, [name])
        return found

    async def test_gives_what_it_was_given_in_order(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """None where it was given nothing; counts of any size."""
        entries = [(name, Checkpoint(NOW + n, -(10**n))) for n, name in enumerate(UNUSUAL_NAMES)]
        await cache.put_many(namespace, entries)
        asked = [*reversed(UNUSUAL_NAMES), "never", UNUSUAL_NAMES[0]]
        expected = [checkpoint for _, checkpoint in reversed(entries)]
        found = list(await cache.get_many(namespace, asked))
        assert found == [*expected, None, entries[0][1]]
        assert list(await cache.get_many(namespace, [])) == []

    async def test_namespaces_are_apart(self, cache: Cache, namespace: Namespace) -> None:
        """By id: a namespace of an old name starts empty."""
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
        await increment(cache, namespace, "c", 5)
        successor = replace(namespace, id=namespace.id + 1)
        assert await self.got(cache, successor) is None
        assert list(await cache.best_effort(successor, ["c"])) == [0]

    async def test_the_newest_is_kept(self, cache: Cache, namespace: Namespace) -> None:
        """An older count never replaces a newer one, in one call or in several."""
        first, second, third = (Checkpoint(NOW + n, n) for n in range(3))
        await cache.put_many(namespace, [("c", second)])
        await cache.put_many(namespace, [("c", first)])
        assert await self.got(cache, namespace) == second
        await cache.put_many(namespace, [("c", third), ("c", first)])
        assert await self.got(cache, namespace) == third

    async def test_a_count_as_of_the_same_instant_replaces(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """A recount corrects it without moving its time; in one call, the last one is kept."""
        for count in (1, 2):
            await cache.put_many(namespace, [("c", Checkpoint(NOW, count))])
        assert await self.got(cache, namespace) == Checkpoint(NOW, 2)
        await cache.put_many(namespace, [("c", Checkpoint(NOW, n)) for n in (3, 4)])
        assert await self.got(cache, namespace) == Checkpoint(NOW, 4)

    async def test_a_namespace_without_a_cache_ttl_has_no_counts_there(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """Not even those of before its TTL was set to 0, nor for the shortest TTL of a server."""
        off = replace(namespace, settings=replace(namespace.settings, cache_ttl_us=0))
        await cache.put_many(off, [("c", Checkpoint(NOW, 1))])
        assert await self.got(cache, off) is None
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 2))])
        assert await self.got(cache, off) is None

    async def test_best_effort_counters_add_up(self, cache: Cache, namespace: Namespace) -> None:
        """At once, either way; 0 where none is known."""
        values = [await increment(cache, namespace, "c", delta) for delta in (5, -7, 0, 10)]
        assert values == [5, -2, -2, 8]
        await increment(cache, namespace, "d", -3)
        assert list(await cache.best_effort(namespace, ["d", "never", "c", "d"])) == [-3, 0, 8, -3]

    async def test_changes_of_one_call_are_made_in_order(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """Those of one counter too; none for none."""
        changes = [("c", 5), ("d", -1), ("c", -7)]
        assert list(await cache.increment_many(namespace, changes)) == [5, -1, -2]
        assert list(await cache.increment_many(namespace, [])) == []
        assert list(await cache.best_effort(namespace, ["c", "d"])) == [-2, -1]

    async def test_best_effort_counters_have_any_name(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """Names that look alike are counters of their own."""
        for n, name in enumerate(UNUSUAL_NAMES):
            assert await increment(cache, namespace, name, n + 1) == n + 1
        values = await cache.best_effort(namespace, UNUSUAL_NAMES)
        assert list(values) == [n + 1 for n in range(len(UNUSUAL_NAMES))]

    async def test_a_cleared_counter_starts_again(self, cache: Cache, namespace: Namespace) -> None:
        """At 0, and alone; clearing what never was is no error."""
        for name in ("c", "d"):
            await increment(cache, namespace, name, 5)
        await cache.clear(namespace, "c")
        await cache.clear(namespace, "never")
        assert list(await cache.best_effort(namespace, ["c", "d"])) == [0, 5]
        assert await increment(cache, namespace, "c", 1) == 1

    async def test_the_two_kinds_are_apart(self, cache: Cache, namespace: Namespace) -> None:
        """A cached count is no best-effort value, nor the other way round."""
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 9))])
        await increment(cache, namespace, "d", 5)
        assert list(await cache.best_effort(namespace, ["c"])) == [0]
        assert await self.got(cache, namespace, "d") is None
        await cache.clear(namespace, "c")
        assert await self.got(cache, namespace) == Checkpoint(NOW, 9)

    async def test_the_guard_distinguishes_payloads(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """Under one identity, within one call and over several; a clear ignores its delta."""
        one = add(delta=1)
        events = [one, one, one._replace(delta=2), add(number=2), clear(number=3)]
        expected = [Guarded.NEW, Guarded.SAME, Guarded.OTHER, Guarded.NEW, Guarded.NEW]
        assert list(await cache.guard(namespace, events)) == expected
        again = [clear(number=3)._replace(delta=9), one, add("other"), one._replace(item_key=1)]
        expected = [Guarded.SAME, Guarded.SAME, Guarded.NEW, Guarded.NEW]
        assert list(await cache.guard(namespace, again)) == expected

    async def test_the_guard_knows_an_atomic_add_by_its_list(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """The same delta in another list is another payload."""
        (first, _), (second, _) = (atomic(("a", 1), ("b", n)) for n in (2, 3))
        assert list(await cache.guard(namespace, [first])) == [Guarded.NEW]
        assert list(await cache.guard(namespace, [second])) == [Guarded.OTHER]

    async def test_requests_at_once_get_each_its_own(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """However they are gathered on the way."""
        numbers = range(300)
        changed = await asyncio.gather(
            *(increment(cache, namespace, f"v{n}", n) for n in numbers),
            *(increment(cache, namespace, "all", 1) for _ in numbers),
        )
        assert changed[:300] == list(numbers)
        assert sorted(changed[300:]) == [n + 1 for n in numbers]
        entries = [(f"c{n}", Checkpoint(NOW + n, n)) for n in numbers]
        await asyncio.gather(*(cache.put_many(namespace, [entry]) for entry in entries))
        found = await asyncio.gather(*(cache.get_many(namespace, [name]) for name, _ in entries))
        assert [list(each) for each in found] == [[checkpoint] for _, checkpoint in entries]
        noted = [add(number=n % 100) for n in numbers]
        answers = await asyncio.gather(*(cache.guard(namespace, [event]) for event in noted))
        assert [each for [each] in answers].count(Guarded.NEW) == 100

    async def test_a_cancelled_request_disturbs_no_other(
        self, cache: Cache, namespace: Namespace
    ) -> None:
        """Not even one that went the same way with it."""
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
        tasks = [asyncio.create_task(self.got(cache, namespace)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert (done[0], done[2]) == (Checkpoint(NOW, 1), Checkpoint(NOW, 1))


class CacheCases(UntimedCacheCases):
    """The same, and what becomes of it with time, for a cache that goes by the given clock."""

    async def test_an_entry_lives_for_the_ttl_from_when_it_was_put(
        self, cache: Cache, namespace: Namespace, clock: FakeClock
    ) -> None:
        """However old or young the count itself is."""
        await cache.put_many(namespace, [("old", Checkpoint(1, 1)), ("new", Checkpoint(NOW, 2))])
        clock.advance(TTL - 1)
        assert await self.got(cache, namespace, "old") == Checkpoint(1, 1)
        assert await self.got(cache, namespace, "new") == Checkpoint(NOW, 2)
        clock.advance(1)
        assert list(await cache.get_many(namespace, ["old", "new"])) == [None, None]

    async def test_a_newer_count_lives_its_own_ttl(
        self, cache: Cache, namespace: Namespace, clock: FakeClock
    ) -> None:
        """Reading does not prolong it, nor does an older count that came too late."""
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
        clock.advance(TTL - 1)
        await cache.put_many(namespace, [("c", Checkpoint(NOW + 1, 2))])
        clock.advance(TTL - 1)
        assert await self.got(cache, namespace) == Checkpoint(NOW + 1, 2)
        await cache.put_many(namespace, [("c", Checkpoint(NOW, 1))])
        clock.advance(1)
        assert await self.got(cache, namespace) is None

    async def test_best_effort_values_outlive_the_ttl(
        self, cache: Cache, namespace: Namespace, clock: FakeClock
    ) -> None:
        """The TTL bounds how stale a count is; a best-effort value is the count."""
        await increment(cache, namespace, "c", 5)
        clock.advance(100 * TTL)
        assert list(await cache.best_effort(namespace, ["c"])) == [5]
