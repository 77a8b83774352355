"""Slices that several processes know, make and drop: two stores over one keyspace."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from counter.errors import SliceMissingError, StoreUnavailableError
from counter.limits import MINUTE, SECOND
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.store import CassandraStore
from counter.storage.cassandra.tables import create_table, events_of, events_table
from counter.testing.cases import SETTINGS, T0
from counter.testing.clock import FakeClock
from counter.types import Event, Fold, Mark, Namespace, Slice, Written
from counter.windows import window_of
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import DATASET, forget, have_schema, opened, options_for, standing

SIZE = DATASET.slice_us
#: The start of the slice that holds the time of every test.
NOW = T0


def slice_at(start_us: int) -> Slice:
    return Slice(start_us, start_us + SIZE, DATASET.time_bucket_us, DATASET.event_buckets)


@pytest.fixture(scope="module")
def options(cassandra: Cluster) -> CassandraOptions:
    options = options_for(cassandra)
    asyncio.run(have_schema(options))
    return options


@pytest.fixture
async def stores(options: CassandraOptions) -> AsyncIterator[tuple[CassandraStore, CassandraStore]]:
    """Two processes, and the slices before now's and now's."""
    clock = FakeClock(NOW + MINUTE)
    async with opened(options, clock) as one, opened(options, clock) as other:
        await forget(one)
        for start_us in (NOW - SIZE, NOW):
            await one.control.make_slices(DATASET, slice_at(start_us))
        await other.control.slices(DATASET)
        yield one, other


@pytest.fixture
async def namespace(stores: tuple[CassandraStore, CassandraStore]) -> Namespace:
    settings = replace(SETTINGS, shards=1)
    created = await stores[0].control.create_namespace("tests", settings, NOW)
    assert created is not None
    return created


async def write(store: CassandraStore, namespace: Namespace, at_us: int) -> Event:
    event = Event("c", at_us, at_us.to_bytes(16, "big"), 0, 1)
    await store.separate_writes.mark(namespace, [Mark(window_of(at_us, 10 * SECOND), "c")])
    assert list(await store.events.append(namespace, [event])) == [Written.NEW]
    return event


async def test_a_slice_that_another_process_made_is_known_when_it_is_needed(
    stores: tuple[CassandraStore, CassandraStore], namespace: Namespace
) -> None:
    """For a write, a look-up, a sum, and a tail, which names no time that would be missed."""
    one, other = stores
    for ahead in (1, 2, 3, 4):
        await one.control.make_slices(DATASET, slice_at(NOW + ahead * SIZE))
    event = await write(other, namespace, NOW + SIZE)
    assert list(await one.events.find(namespace, [event])) == [event]
    event = await write(one, namespace, NOW + 2 * SIZE)
    assert list(await other.events.find(namespace, [event])) == [event]
    async with opened(other.session.options) as third:
        await one.control.make_slices(DATASET, slice_at(NOW + 5 * SIZE))
        event = await write(one, namespace, NOW + 5 * SIZE)
        assert list(await third.events.sums(namespace, [("c", event.event_time_us)])) == [
            Fold(False, 1)
        ]


async def test_a_tail_holds_what_is_in_a_slice_that_this_process_has_not_seen(
    stores: tuple[CassandraStore, CassandraStore], namespace: Namespace
) -> None:
    """A token may lie a slice ahead of its writer's clock."""
    one, other = stores
    assert list(await other.events.tails(namespace, [("c", NOW)])) == [Fold(False, 0)]
    await one.control.make_slices(DATASET, slice_at(NOW + SIZE))
    await write(one, namespace, NOW + SIZE)
    assert list(await other.events.tails(namespace, [("c", NOW)])) == [Fold(False, 1)]


async def test_a_slice_that_another_process_dropped_is_missing(
    stores: tuple[CassandraStore, CassandraStore], namespace: Namespace
) -> None:
    """Whether this process knows of it or not; the next slice exists."""
    one, other = stores
    event = await write(one, namespace, NOW - SIZE)
    assert list(await other.events.find(namespace, [event])) == [event]
    await one.control.drop_slice(DATASET, NOW - SIZE)
    for _ in range(2):
        with pytest.raises(SliceMissingError):
            await other.events.find(namespace, [event])
        with pytest.raises(SliceMissingError):
            await other.events.tails(namespace, [("c", NOW - SIZE)])
        with pytest.raises(SliceMissingError):
            await other.events.append(namespace, [event])
        assert list(await other.events.tails(namespace, [("c", NOW)])) == [Fold(False, 0)]
    assert await other.control.dropped_before(DATASET) == NOW
    assert list(await other.control.slices(DATASET)) == [slice_at(NOW)]


async def test_a_slice_that_two_processes_make_is_one(
    stores: tuple[CassandraStore, CassandraStore], namespace: Namespace
) -> None:
    """With the partitions of one of the two, for both."""
    one, other = stores
    ahead = slice_at(NOW + SIZE)
    differing = replace(ahead, event_buckets=1, time_bucket_us=MINUTE)
    await asyncio.gather(
        one.control.make_slices(DATASET, ahead), other.control.make_slices(DATASET, differing)
    )
    slices = [list(await store.control.slices(DATASET)) for store in stores]
    assert slices[0] == slices[1]
    assert slices[0][-1] in (ahead, differing)
    event = await write(one, namespace, NOW + SIZE)
    assert list(await other.events.find(namespace, [event])) == [event]


async def test_two_processes_drop_a_slice_at_once(
    stores: tuple[CassandraStore, CassandraStore],
) -> None:
    one, other = stores
    await asyncio.gather(*(each.control.drop_slice(DATASET, NOW - SIZE) for each in stores))
    assert await standing(one) == {NOW}
    assert list(await other.control.slices(DATASET)) == [slice_at(NOW)]
    assert await one.control.dropped_before(DATASET) == NOW


async def test_a_drop_that_ended_half_way_is_finished_by_the_next(
    stores: tuple[CassandraStore, CassandraStore],
) -> None:
    """The bound has moved and the table exists: it is not read, and dropped later."""
    one, other = stores
    await one.control.make_slices(DATASET, slice_at(NOW + SIZE))
    failing = StoreUnavailableError("the process ends here")
    with (
        patch.object(one.session.connection, "ddl", side_effect=failing),
        pytest.raises(StoreUnavailableError),
    ):
        await one.control.drop_slice(DATASET, NOW - SIZE)
    assert await other.control.dropped_before(DATASET) == NOW
    assert [each.start_us for each in await other.control.slices(DATASET)] == [NOW, NOW + SIZE]
    assert await standing(other) == {NOW - SIZE, NOW, NOW + SIZE}
    await other.control.drop_slice(DATASET, NOW)
    assert await standing(other) == {NOW + SIZE}


async def test_a_slice_that_is_dropped_while_another_process_makes_it_stays_dropped(
    stores: tuple[CassandraStore, CassandraStore],
) -> None:
    """Its table, too, however late it is made."""
    one, other = stores
    old = slice_at(NOW - 2 * SIZE)
    really_create = one.session.connection.ddl

    async def late(cql: str) -> None:
        if cql.startswith("CREATE"):
            await other.control.make_slices(DATASET, old)
            await other.control.drop_slice(DATASET, old.start_us)
        await really_create(cql)

    with patch.object(one.session.connection, "ddl", late):
        await one.control.make_slices(DATASET, old)
    assert await standing(one) == {NOW - SIZE, NOW}
    assert [each.start_us for each in await one.control.slices(DATASET)] == [NOW - SIZE, NOW]


async def test_an_unknown_table_is_found(stores: tuple[CassandraStore, CassandraStore]) -> None:
    """Of a process that ended between making it and learning that the slice is dropped."""
    one, _ = stores
    keyspace = one.session.states[DATASET.id].keyspace
    orphan = create_table(keyspace, events_table(NOW - 9 * SIZE), events_of(DATASET))
    await one.session.connection.ddl(orphan)
    await one.control.drop_slice(DATASET, NOW - SIZE)
    assert await standing(one) == {NOW}


async def test_a_slice_is_retired_once(stores: tuple[CassandraStore, CassandraStore]) -> None:
    """By the first of those who see that it is time."""
    one, other = stores
    await asyncio.gather(
        *(store.control.retire_slice(DATASET, NOW - SIZE, 5 + n) for n, store in enumerate(stores))
    )
    for store in stores:
        retired = [each.retired_at_us for each in await store.control.slices(DATASET)]
        assert retired in ([5, None], [6, None])
    await one.control.retire_slice(DATASET, NOW - 9 * SIZE, 5)
    assert len(await other.control.slices(DATASET)) == 2
