"""A count that SQLite has at hand is read without waiting, and is the one that a read returns."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from counter.core.read import CountReader
from counter.ports import Store
from counter.storage.memory import MemoryCache, MemoryStore
from counter.storage.sqlite import SqliteStore
from counter.types import Checkpoint, CounterType, CounterUpdate, Namespace, Pending
from tests.contracts.cases import DATASET, NOW, T0, WINDOW, make_namespace, make_slices
from tests.support.clock import FakeClock

THROUGH = T0 + WINDOW - 1


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(tmp_path, FakeClock(NOW), [DATASET])
    await store.open()
    await make_slices(store)
    yield store
    await store.close()


def reader_of(store: Store) -> CountReader:
    clock = FakeClock(NOW)
    return CountReader(store, MemoryCache(clock), clock)


async def rolled_up(store: Store, kind: CounterType = CounterType.EVENTUAL) -> Namespace:
    """A namespace of one shard, in which "c" counts 5."""
    namespace = await make_namespace(store)
    update = CounterUpdate("c", (), Checkpoint(THROUGH, 5))
    await store.rollups.apply(namespace, [update], through_us=THROUGH)
    await store.rollups.advance(namespace, [0], THROUGH)
    return replace(namespace, settings=replace(namespace.settings, counter_type=kind))


@pytest.mark.parametrize(("name", "count"), [("c", 5), ("never", 0)])
async def test_a_count_at_hand_is_the_one_that_a_read_returns(
    store: SqliteStore, name: str, count: int
) -> None:
    """From storage, and then from the cache."""
    namespace = await rolled_up(store)
    reader = reader_of(store)
    found = [reader.peek(namespace, name, None) for _ in range(2)]
    assert found == [await reader_of(store).read_one(namespace, name, None)] * 2
    assert found[0] is not None
    assert (found[0].count, found[0].as_of_us) == (count, THROUGH)
    assert reader.lookups == {"hit": 1, "miss": 1}


async def test_a_counter_with_a_pending_recount_is_not_at_hand(store: SqliteStore) -> None:
    namespace = await rolled_up(store)
    await store.rollups.leave_pending(namespace, [("c", Pending(T0, T0))])
    assert reader_of(store).peek(namespace, "c", None) is None


async def test_no_count_of_a_deleted_namespace_is_at_hand(store: SqliteStore) -> None:
    namespace = await rolled_up(store)
    await store.control.delete_namespace(namespace)
    assert reader_of(store).peek(namespace, "c", None) is None


async def test_a_count_that_is_too_old_is_not_at_hand(store: SqliteStore) -> None:
    """An accurate count needs the live tail."""
    namespace = await rolled_up(store, CounterType.ACCURATE)
    for max_staleness_us in (None, 0, NOW - THROUGH - 1):
        assert reader_of(store).peek(namespace, "c", max_staleness_us) is None
    assert reader_of(store).peek(namespace, "c", NOW) is not None


async def test_a_store_that_waits_has_no_count_at_hand() -> None:
    store = MemoryStore(FakeClock(NOW), [DATASET])
    await store.open()
    await make_slices(store)
    assert reader_of(store).peek(await rolled_up(store), "c", None) is None
