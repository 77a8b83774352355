"""Marks of many windows and of several processes, two stores over one keyspace."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from counter.errors import StoreUnavailableError
from counter.limits import MINUTE
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.store import CassandraStore
from counter.testing.cases import NOW, SETTINGS, SLICE, T0, WINDOW, atomic, marks, slice_at, walked
from counter.testing.clock import FakeClock
from counter.types import AtomicMark, Mark, Namespace, Span
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import DATASET, forget, have_schema, opened, options_for
from tests.support.cassandra_statements import Fault, Statements, statements_of

Stores = tuple[CassandraStore, CassandraStore]


@pytest.fixture(scope="module")
def options(cassandra: Cluster) -> CassandraOptions:
    options = options_for(cassandra)
    asyncio.run(have_schema(options))
    return options


@pytest.fixture
async def stores(options: CassandraOptions) -> AsyncIterator[Stores]:
    """Two processes, one of them a minute later; the slices before now's and now's."""
    clocks = [FakeClock(NOW), FakeClock(NOW + MINUTE)]
    async with opened(options, clocks[0]) as one, opened(options, clocks[1]) as other:
        kept = [slice_at(start_us) for start_us in (T0 - SLICE, T0)]
        await forget(one, keep=kept)
        for each in kept:
            await one.control.make_slices(DATASET, each)
        await other.control.slices(DATASET)
        yield one, other


@pytest.fixture
async def namespace(stores: Stores) -> Namespace:
    created = await stores[0].control.create_namespace("tests", replace(SETTINGS, shards=1), NOW)
    assert created is not None
    return created


async def test_marks_of_one_turn_share_a_statement(stores: Stores, namespace: Namespace) -> None:
    """Up to a hundred of one window and shard; so do the names that are not listed yet."""
    store, _ = stores
    await store.separate_writes.mark(namespace, [Mark(NOW, "first")])
    names = [f"c{n}" for n in range(200)]
    with Statements(store) as sent:
        await asyncio.gather(
            *(store.separate_writes.mark(namespace, [Mark(NOW, name)]) for name in names)
        )
    assert sorted(sent.sizes) == [100] * 4
    with Statements(store) as sent:
        await store.separate_writes.mark(namespace, [Mark(NOW + WINDOW, name) for name in names])
    assert sorted(sent.sizes) == [100] * 2
    assert {mark.counter for mark in await marks(store, namespace)} == {"first", *names}
    listed = await store.control.counters(namespace, prefix="", after=None, limit=1_000)
    assert listed == sorted(["first", *names])


async def test_a_mark_that_fails_is_reported_alone_and_its_name_not_known(
    stores: Stores, namespace: Namespace
) -> None:
    """Either a mark or its name may fail; the rest of the statement is durable."""
    store, _ = stores
    await store.separate_writes.mark(namespace, [Mark(NOW, "first")])
    some = [Mark(NOW, "a"), Mark(NOW + WINDOW, "b"), Mark(NOW + WINDOW, "first")]
    down = StoreUnavailableError("a planted fault")

    def fault(of: bytes, at: slice) -> Fault:
        return lambda sent: down if any(of in row[at] for row in statements_of(sent)) else None

    with Statements(store, fault(b"a", slice(None))):
        # Its name shares a partition with that of the other one.
        assert await store.separate_writes.mark(namespace, some) == dict.fromkeys(some[:2], down)
    # A mark's window is its third value; a name has the time of its mark last.
    with Statements(store, fault(NOW.to_bytes(8, "big"), slice(2, 3))) as sent:
        assert await store.separate_writes.mark(namespace, some) == {some[0]: down}
    # Both marks' partitions and the names' together, and then each alone.
    assert sent.sizes == [5, 1, 2, 2]
    assert set(await marks(store, namespace)) == {Mark(NOW, "first"), *some[1:]}
    with Statements(store) as sent:
        assert await store.separate_writes.mark(namespace, some) == {}
    assert sum(sent.sizes) == 3


async def test_names_that_were_forgotten_are_listed_again(
    stores: Stores, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is bounded, and forgetting costs a write at most."""
    store, _ = stores
    monkeypatch.setattr("counter.storage.cassandra.rollups._NAMES_MAX", 3)
    for _ in range(2):
        await store.separate_writes.mark(namespace, [Mark(NOW, name) for name in "abcde"])
        assert len(store.rollups._listed) == 3
    assert await store.control.counters(namespace, prefix="", after=None, limit=9) == list("abcde")


async def test_a_long_outage_is_caught_up_with_in_order(
    stores: Stores, namespace: Namespace
) -> None:
    """Few marks in hundreds of windows: all of them in order, in far fewer reads than windows."""
    store, _ = stores
    windows = range(T0 - SLICE, T0 + SLICE, WINDOW)
    dirty = [*windows[:3], *windows[50:120:7], *windows[-2:]]
    some = [Mark(window_us, name) for window_us in dirty for name in "abc"]
    await store.separate_writes.mark(namespace, some)
    with Statements(store) as sent:
        found = await walked(store, namespace, 0, Span.after(0, windows[-1]), limit=1_000)
    assert found == some
    assert len(sent.sizes) < len(dirty) + 12


async def test_marks_rolled_up_by_a_crashed_process_are_dropped_by_the_next(
    stores: Stores, namespace: Namespace
) -> None:
    """The first drop searches for old marks; later ones drop known ones."""
    one, other = stores
    left = [Mark(NOW - n * WINDOW, "c") for n in range(3)]
    await one.separate_writes.mark(namespace, left)
    await one.separate_writes.mark_atomic(
        namespace, AtomicMark(NOW - 5 * WINDOW, tuple(atomic(("a", 1))))
    )
    await other.rollups.drop_marks(namespace, 0, NOW - 1)
    assert await marks(one, namespace) == left[:1]
    found = await one.separate_writes.dirty_atomic(namespace, 0, Span.after(T0 - SLICE, NOW))
    assert list(found) == []
    with Statements(other) as sent:
        await other.rollups.drop_marks(namespace, 0, NOW + MINUTE)
    assert sent.sizes == []
    assert await marks(other, namespace) == left[:1]
    await other.rollups.drop_marks(namespace, 0, NOW + MINUTE)
    assert await marks(one, namespace) == []


async def test_concurrent_reads_of_watermarks_share_one_query(
    stores: Stores, namespace: Namespace
) -> None:
    """By all the gets of one turn of the loop."""
    store, _ = stores
    await store.rollups.watermarks(namespace)
    with Statements(store) as sent:
        await asyncio.gather(*(store.rollups.watermarks(namespace) for _ in range(50)))
    assert len(sent.sizes) <= 2
