"""Write timestamps of the ``counts`` partition, with two stores as two worker processes."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.rollups import WINDOW as ROW
from counter.storage.cassandra.store import CassandraStore
from counter.testing.cases import NOW, SETTINGS, T0, WINDOW
from counter.testing.clock import FakeClock
from counter.testing.rollup_cases import end, row, update
from counter.types import Checkpoint, CounterUpdate, Head, Namespace, Pending, Span, WindowRow
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import forget, have_schema, opened, options_for

NOTHING = Checkpoint(0, 0)

Stores = tuple[CassandraStore, CassandraStore]


@pytest.fixture(scope="module")
def options(cassandra: Cluster) -> CassandraOptions:
    options = options_for(cassandra)
    asyncio.run(have_schema(options))
    return options


@pytest.fixture
async def stores(options: CassandraOptions) -> AsyncIterator[Stores]:
    async with opened(options, FakeClock(NOW)) as one, opened(options, FakeClock(NOW)) as other:
        await forget(one)
        yield one, other


@pytest.fixture
async def namespace(stores: Stores) -> Namespace:
    created = await stores[0].control.create_namespace("tests", replace(SETTINGS, shards=1), NOW)
    assert created is not None
    return created


async def apply(
    store: CassandraStore,
    namespace: Namespace,
    *updates: CounterUpdate,
    through: int,
    drawn: int = 0,
    monkeypatch: pytest.MonkeyPatch | None = None,
) -> None:
    """Apply *updates* in a batch up to window *through*, its random part as given."""
    if monkeypatch is not None:
        monkeypatch.setattr(store.rollups, "_draw", lambda *_: drawn)
    await store.rollups.apply(namespace, updates, through_us=end(through))


async def head(store: CassandraStore, namespace: Namespace, counter: str = "c") -> Head | None:
    (found,) = await store.rollups.heads(namespace, [counter])
    return found


async def rows(store: CassandraStore, namespace: Namespace) -> list[WindowRow]:
    (found,) = await store.rollups.rows(namespace, ["c"], Span.after(0, end(10_000)))
    return list(found)


async def windows_on_disk(store: CassandraStore, namespace: Namespace) -> list[int]:
    """Window rows that are there, whether readers are shown them or not."""
    cql = (
        f"SELECT t FROM {store.session.state_of(namespace.dataset).keyspace}.counts"
        f" WHERE namespace = {namespace.id} AND counter = 'c' AND kind = {ROW}"
    )
    return [
        (window_us - T0) // WINDOW for (window_us,) in await store.session.connection.simple(cql)
    ]


@pytest.mark.parametrize("first", [0, 1], ids=["first", "last"])
async def test_one_of_two_batches_up_to_one_instant_is_kept_whole(
    stores: Stores, namespace: Namespace, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers that saw different writes: never one's row beside the other's checkpoint."""
    batches = [
        (update(row(1, 900), row(2, 1), through=2, count=901), 7),
        (update(row(1, 5), row(2, 800), through=2, count=805), 8),
    ]
    for n in (first, 1 - first):
        changes, drawn = batches[n]
        await apply(stores[n], namespace, changes, through=2, drawn=drawn, monkeypatch=monkeypatch)
    assert await rows(stores[0], namespace) == [row(1, 5), row(2, 800)]
    assert await head(stores[0], namespace) == Head(Checkpoint(end(2), 805), NOTHING)


async def test_at_equal_timestamps_the_later_checkpoint_is_kept(
    stores: Stores, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time comes first in the cell, and its count is its own: cells never mix."""
    later = replace(update(row(1, 1), through=2), checkpoint=Checkpoint(end(3), -1))
    earlier = update(row(1, 1), through=2, count=2**70)
    for store, changes in zip(stores, (later, earlier), strict=True):
        await apply(store, namespace, changes, through=2, drawn=7, monkeypatch=monkeypatch)
    assert await head(stores[0], namespace) == Head(Checkpoint(end(3), -1), NOTHING)


async def test_a_zombie_of_an_older_batch_changes_nothing(
    stores: Stores, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces no newer row, moves no checkpoint back, and leaves no settled row."""
    live, zombie = stores
    await apply(live, namespace, update(row(1, 1), row(2, 2), through=2, count=3), through=2)
    settled = Checkpoint(end(2), 3)
    await apply(live, namespace, update(row(4, 4), through=5, count=7, settled=settled), through=5)
    late = update(row(1, 50), row(2, 60), row(4, 70), through=3, count=180)
    await apply(zombie, namespace, late, through=3, drawn=999, monkeypatch=monkeypatch)
    assert await head(live, namespace) == Head(Checkpoint(end(5), 7), settled)
    assert await rows(live, namespace) == [row(4, 4)]
    assert await windows_on_disk(live, namespace) == [4]


async def test_a_batch_that_settles_leaves_its_own_rows(
    stores: Stores, namespace: Namespace
) -> None:
    """Rows of earlier batches that it folds away are deleted, its own later ones are not."""
    store, _ = stores
    old = [row(n, n) for n in range(4)]
    await apply(store, namespace, update(*old, through=3, count=6), through=3)
    settled = Checkpoint(end(2), 3)
    change = update(row(1, 9), row(3, 33), row(5, 5), through=5, count=41, settled=settled)
    await apply(store, namespace, change, through=5)
    assert await windows_on_disk(store, namespace) == [3, 5]
    assert await rows(store, namespace) == [row(3, 33), row(5, 5)]


async def test_settled_rows_are_never_returned(stores: Stores, namespace: Namespace) -> None:
    """Not even those of a batch that began before the settling and reached further than it."""
    one, other = stores
    await apply(
        one, namespace, update(through=4, count=3, settled=Checkpoint(end(2), 3)), through=4
    )
    await apply(other, namespace, update(row(2, 9), row(5, 1), through=5, count=4), through=5)
    assert await windows_on_disk(one, namespace) == [2, 5]
    assert await rows(one, namespace) == [row(5, 1)]


async def test_no_clock_keeps_a_pending_recount_from_being_removed(
    options: CassandraOptions, stores: Stores, namespace: Namespace
) -> None:
    """A slow worker removes it for good, whenever copies land; a later window's stays."""
    writer, _ = stores
    pending, later = Pending(T0, NOW), Pending(T0, NOW + WINDOW)
    await writer.recounts.write_pending(namespace, [("c", pending)])
    async with opened(options, FakeClock(NOW - 10 * WINDOW)) as worker:
        await apply(worker, namespace, update(through=1, count=1, done=(pending,)), through=1)
    await writer.recounts.write_pending(namespace, [("c", pending), ("c", later)])
    found = await head(writer, namespace)
    assert found is not None
    assert found.pending == (later,)


async def test_an_update_is_of_any_size(stores: Stores, namespace: Namespace) -> None:
    """Thousands of dirty windows of one counter are one batch; small ones are not delayed."""
    store, _ = stores
    many = [row(n, n) for n in range(3_000)]
    updates = [update(row(1, n), through=3_000, count=n, counter=f"c{n}") for n in range(25)]
    updates.insert(13, update(*many, through=3_000, count=7))
    await apply(store, namespace, *updates, through=3_000)
    assert await rows(store, namespace) == many
    heads = await store.rollups.heads(namespace, [each.counter for each in updates])
    assert [each and each.checkpoint for each in heads] == [each.checkpoint for each in updates]
