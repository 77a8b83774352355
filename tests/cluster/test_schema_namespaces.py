"""Namespaces, numbers and leases that several processes see: two stores over one keyspace."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from counter.errors import InvalidBodyError, NamespaceUnknownError, UnavailableError
from counter.limits import HOUR, MILLISECOND, MINUTE, SECOND
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.store import CassandraStore
from counter.testing.cases import NOW, SETTINGS, SLICE, T0, WINDOW, slice_at, updated_namespace
from counter.testing.clock import FakeClock
from counter.types import (
    Checkpoint,
    CounterUpdate,
    Event,
    Mark,
    Namespace,
    NamespaceSettings,
    PayloadCheck,
)
from counter.windows import settling_time, shard_of
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import DATASET, at, forget, have_schema, opened, options_for
from tests.support.relay import Relay

Stores = tuple[CassandraStore, CassandraStore]
WORKER_TTL = 600 * SECOND


@pytest.fixture(scope="module")
def options(cassandra: Cluster) -> CassandraOptions:
    options = options_for(cassandra)
    asyncio.run(have_schema(options))
    return options


@pytest.fixture
async def stores(options: CassandraOptions) -> AsyncIterator[Stores]:
    """Two processes, and the slice of now."""
    clock = FakeClock(NOW)
    async with opened(options, clock) as one, opened(options, clock) as other:
        await forget(one, keep=[slice_at(T0)])
        await one.control.make_slices(DATASET, slice_at(T0))
        yield one, other


async def create(
    store: CassandraStore, name: str = "tests", settings: NamespaceSettings = SETTINGS
) -> Namespace:
    namespace = await store.control.create_namespace(name, settings, NOW)
    assert namespace is not None
    return namespace


def settle(store: CassandraStore, more_us: int = 0) -> None:
    """Let so much time pass that the names of deleted namespaces are free, and *more_us*."""
    clock = store.session.clock
    assert isinstance(clock, FakeClock)
    clock.advance(settling_time(DATASET) + more_us)


async def rows_of(store: CassandraStore, namespace: Namespace) -> dict[str, int]:
    """How many rows each table of the dataset has of *namespace*; no table that has none."""
    found: dict[str, int] = {}
    for table in ("dirty", "atomic_marks", "watermarks", "counts", "names"):
        ((number,),) = await store.session.connection.simple(
            f"SELECT COUNT(*) FROM {store.session.state_of(DATASET).keyspace}.{table}"
            f" WHERE namespace = {namespace.id} ALLOW FILTERING"
        )
        if number:
            found[table] = number
    return found


async def test_one_of_many_concurrent_creations_succeeds(stores: Stores) -> None:
    """The rest is refused. After an hour, when none can land, the purge leaves nothing."""
    one, other = stores
    asked = [
        store.control.create_namespace("tests", replace(SETTINGS, cache_ttl_us=n), NOW)
        for n, store in enumerate((one, other, one, other))
    ]
    created = [each for each in await asyncio.gather(*asked) if each is not None]
    assert len(created) == 1
    assert list(await one.control.namespaces()) == list(await other.control.namespaces()) == created
    while await one.control.purge(NOW + HOUR):
        pass
    for number in range(created[0].id - 3, created[0].id + 4):
        namespace = replace(created[0], id=number)
        rows = {"watermarks": 1} if number == created[0].id else {}
        assert await rows_of(one, namespace) == rows


async def test_a_namespace_that_another_process_deleted_is_unknown(stores: Stores) -> None:
    """Its watermarks at once; the rest when this process has heard of it."""
    one, other = stores
    namespace = await create(one)
    assert list(await other.control.namespaces()) == [namespace]
    event = Event("c", NOW, bytes(16), 0, 1)
    assert await one.control.delete_namespace(namespace)
    with pytest.raises(NamespaceUnknownError):
        await other.rollups.watermarks(namespace)
    assert list(await other.control.namespaces()) == []
    for store in stores:
        with pytest.raises(NamespaceUnknownError):
            await store.events.append(namespace, [event])
        with pytest.raises(NamespaceUnknownError):
            await store.control.counters(namespace, prefix="", after=None, limit=1)
    settle(other)
    again = await create(other)
    assert again.id > namespace.id
    assert list(await one.control.namespaces()) == [again]
    await one.events.append(again, [event])


async def test_a_name_is_free_when_no_process_can_add_to_its_last_namespace(stores: Stores) -> None:
    """By the clock of each process that saw the deletion."""
    one, other = stores
    namespace = await create(one)
    assert await one.control.delete_namespace(namespace)
    assert not await one.control.delete_namespace(namespace)
    assert await updated_namespace(one, namespace, SETTINGS, NOW) is None
    for store in stores:
        assert await store.control.namespaces() == []
        with pytest.raises(UnavailableError, match="was deleted just now") as refused:
            await create(store)
        assert refused.value.retry_after_us == settling_time(DATASET)
    settle(one, -1)
    with pytest.raises(UnavailableError, match=r"create it again in 0\.0 s"):
        await create(one)
    settle(one, 1 - settling_time(DATASET))
    again = await create(other)
    assert again.id > namespace.id
    for store in stores:
        assert await store.control.namespaces() == [again]
        assert await store.control.create_namespace("tests", SETTINGS, NOW) is None


async def test_a_namespace_that_is_created_during_a_listing_is_not_taken_for_gone(
    stores: Stores,
) -> None:
    """The listing began before it."""
    one, _ = stores
    really_read = one.session.control.read

    async def slow(cql: str, *values: object) -> object:
        rows = await really_read(cql, *values)
        if "namespaces" in cql:
            created.append(await create(one, "late"))
        return rows

    created: list[Namespace] = []
    with patch.object(one.session.control, "read", slow):
        assert list(await one.control.namespaces()) == []
    await one.events.append(created[0], [Event("c", NOW, bytes(16), 0, 1)])


async def test_strict_is_refused_if_a_read_could_miss_a_completed_retry(stores: Stores) -> None:
    """With several data centers LOCAL_QUORUM need not overlap the quorum of a retry."""
    store, _ = stores
    strict = replace(SETTINGS, payload_check=PayloadCheck.STRICT)
    namespace = await create(store, "checked", replace(SETTINGS, payload_check=PayloadCheck.GUARD))
    (dataset,) = await store.control.datasets()
    with patch.object(store.session.state_of(dataset), "is_spread", True):
        with pytest.raises(InvalidBodyError, match=r"strict needs QUORUM .* reads at LOCAL_QUORUM"):
            await store.control.create_namespace("strict", strict, NOW)
        with pytest.raises(InvalidBodyError, match="strict needs QUORUM"):
            await updated_namespace(store, namespace, strict, NOW)
    assert await store.control.create_namespace("strict", strict, NOW) is not None


async def test_one_of_two_concurrent_changes_of_a_namespace_succeeds(stores: Stores) -> None:
    namespace = await create(stores[0])
    changed = await asyncio.gather(
        *(
            updated_namespace(store, namespace, replace(SETTINGS, cache_ttl_us=n), T0 + SLICE)
            for n, store in enumerate(stores)
        )
    )
    (updated,) = [each for each in changed if each is not None]
    assert list(await stores[0].control.namespaces()) == [updated]


async def test_a_change_whose_response_is_lost_is_found_by_reading(
    stores: Stores, cassandra: Cluster
) -> None:
    """A namespace is created, changed and deleted once, by the process that asked."""
    one, _ = stores
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    async with relay.listening():
        far = replace(at(one.session.options, relay.address), read_timeout_us=SECOND)
        async with opened(far, FakeClock(NOW)) as store:
            really_settle = store.session.control.settled

            async def settle(cql: str, *values: object) -> object:
                relay.mute = False
                return await really_settle(cql, *values)

            really_send = store.session.connection._send
            lose: list[bool] = []

            async def send(statements: list[object], *rest: object, **more: object) -> object:
                # The response arrives after its caller was cancelled.
                relay.mute = bool(more.get("raw") and lose and lose.pop())
                return await really_send(statements, *rest, **more)  # type: ignore[arg-type]

            with (
                patch.object(store.session.control, "settled", settle),
                patch.object(store.session.connection, "_send", send),
            ):
                await store.control.lease_tokens(1, NOW)
                # Of the id, and of the namespace.
                lose = [True, True]
                created = await create(store)
                assert list(await one.control.namespaces()) == [created]
                lose = [True]
                settings = replace(SETTINGS, cache_ttl_us=1)
                updated = await updated_namespace(store, created, settings, T0 + SLICE)
                assert list(await one.control.namespaces()) == [updated]
                assert updated is not None
                lose = [True]
                assert await store.control.delete_namespace(updated)
                assert list(await one.control.namespaces()) == []
                lose = [True]
                block = await store.control.lease_tokens(5, NOW)
                assert not lose
            assert (await one.control.lease_tokens(1, NOW)).first == block.first + 5


async def test_numbers_of_several_processes_are_all_different(stores: Stores) -> None:
    """However many ask at once; each process asks Cassandra once for all of its own."""
    blocks = await asyncio.gather(
        *(stores[n % 2].control.lease_tokens(1 + n % 3, NOW + n) for n in range(300))
    )
    numbers = [
        block.first + offset for n, block in enumerate(blocks) for offset in range(1 + n % 3)
    ]
    assert len(set(numbers)) == len(numbers)
    assert len({block.issuer for block in blocks}) == 1
    ordered = sorted(blocks, key=lambda block: block.first)
    times = [block.time_us for block in ordered]
    assert times == sorted(times)
    assert all(block.time_us >= NOW + n for n, block in enumerate(blocks))


async def test_a_cancelled_lease_of_numbers_takes_none_from_others(stores: Stores) -> None:
    one, _ = stores
    asked = [asyncio.create_task(one.control.lease_tokens(1, NOW)) for _ in range(9)]
    await asyncio.sleep(0)
    for each in asked[::2]:
        each.cancel()
    blocks = await asyncio.gather(*asked[1::2])
    blocks.append(await one.control.lease_tokens(1, NOW))
    assert len({block.first for block in blocks}) == len(blocks)


async def test_workers_are_known_to_all_processes(stores: Stores) -> None:
    """Through whichever process a worker registers or leaves."""
    one, other = stores
    for store, name in ((one, "a"), (other, "b"), (other, "a")):
        await store.leases.heartbeat(name, WORKER_TTL)
    for store in stores:
        assert list(await store.leases.workers()) == ["a", "b"]
    await other.leases.leave("a")
    assert list(await one.leases.workers()) == ["b"]


async def fill(store: CassandraStore, namespace: Namespace, names: list[str]) -> None:
    """Counters as the service and a worker leave them."""
    await store.separate_writes.mark(namespace, [Mark(NOW, name) for name in names])
    checkpoint = Checkpoint(NOW - 1, 1)
    updates = [CounterUpdate(name, (), checkpoint) for name in names]
    await store.rollups.apply(namespace, updates, through_us=NOW - 1)


async def test_a_deleted_namespace_is_purged_completely(stores: Stores) -> None:
    """With any number of counters and shards, a part at a time; other namespaces stay."""
    one, other = stores
    doomed = await create(one, "doomed", replace(SETTINGS, shards=4))
    lives = await create(one, "lives", replace(SETTINGS, shards=4))
    names = [f"c{n:04}" for n in range(2_500)]
    for namespace, part in ((doomed, names), (lives, names[:9])):
        await fill(one, namespace, part)
    stood = await rows_of(one, lives)
    assert stood == {"dirty": 9, "watermarks": 4, "counts": 9, "names": 9}
    assert await one.control.delete_namespace(doomed)
    assert not await one.control.purge(NOW)
    assert await other.control.namespaces() == [lives]
    settle(one)
    calls = 0
    # The one begins, the other ends it, as if the one had been killed.
    while await (one if calls < 2 else other).control.purge(NOW):
        calls += 1
        assert calls < 50
    assert calls > 2
    assert await rows_of(one, doomed) == {}
    assert await rows_of(one, lives) == stood


async def test_writes_after_a_purge_stay_hidden(stores: Stores) -> None:
    """By a process that has not heard that the namespace is gone."""
    one, other = stores
    doomed = await create(one)
    await fill(one, doomed, ["c"])
    assert await one.control.delete_namespace(doomed)
    settle(one)
    while await one.control.purge(NOW):
        pass
    await fill(other, doomed, ["c"])
    await other.rollups.advance(doomed, [0], NOW + HOUR)
    assert await rows_of(one, doomed) == {}


async def test_a_deletion_that_was_given_up_purges_nothing(stores: Stores) -> None:
    """It was recorded, and the namespace exists: for an hour the deletion may still land."""
    one, _ = stores
    namespace = await create(one)
    await fill(one, namespace, ["c"])
    await one.control._purge.note_departure(namespace)
    stood = await rows_of(one, namespace)
    for now_us in (NOW, NOW + HOUR - 1, NOW + HOUR, NOW + 2 * HOUR):
        assert not await one.control.purge(now_us)
        departed = await one.session.control.read("SELECT id FROM {control}.departed")
        assert len(departed) == (now_us < NOW + HOUR)
    assert await rows_of(one, namespace) == stood


@pytest.mark.parametrize("shards", [1, 7, 64])
async def test_counters_of_many_shards_are_listed_in_one_order(stores: Stores, shards: int) -> None:
    """In pages of any size, with a prefix that has no simple upper bound."""
    one, _ = stores
    namespace = await create(one, settings=replace(SETTINGS, shards=shards))
    last = "\U0010ffff"
    names = [f"n{n}" for n in range(400)]
    names += ["\ud7ff", "\ud7ffx", "\ue000", last, f"{last}{last}", f"a{last}", f"a{last}b", "b"]
    if shards == 7:
        # All in one shard: the rest is empty.
        names = [name for name in names if shard_of(name, 7) == 3]
    await one.separate_writes.mark(namespace, [Mark(T0 + 30 * WINDOW, name) for name in names])
    for prefix in ("", "n", "n1", "\ud7ff", last, "a", f"a{last}", "nothing"):
        expected = sorted(name for name in names if name.startswith(prefix))
        # Pages of one are many statements: each asks every shard.
        for limit, enough in ((1, 10), (37, 60), (1_000, 60)):
            found: list[str] = []
            while not found or len(found) % limit == 0:
                after = found[-1] if found else None
                page = await one.control.counters(
                    namespace, prefix=prefix, after=after, limit=limit
                )
                found += page
                if len(page) < limit or len(found) > enough:
                    break
            assert found == expected[: len(found)]
            assert len(found) == len(expected) or len(found) > enough


async def test_the_clock_that_is_farthest_off_is_reported(stores: Stores) -> None:
    """Of nodes that answer; a reading that is not sure is not far off."""
    one, _ = stores
    clocks = {"a": (0, 1_000, 2_000), "b": (0, 50_000, 2_000), "c": (0, 90_000, 400_000)}

    async def read(node: str, now: object) -> tuple[int, int, int]:
        if node == "d":
            raise TimeoutError
        return clocks[node]

    for nodes in (["a", "b", "c"], ["b", "a"], ["d", "b"]):
        with (
            patch.object(one.session.connection, "near_nodes", return_value=nodes),
            patch.object(one.session.connection, "clock_of", read),
        ):
            reading = await one.control.read_clock()
        assert reading.offset_us == 50_000 + MILLISECOND // 2 - 1_000
    with (
        patch.object(one.session.connection, "near_nodes", return_value=["d"]),
        patch.object(one.session.connection, "clock_of", read),
        pytest.raises(TimeoutError),
    ):
        await one.control.read_clock()


async def test_a_clock_of_the_same_machine_is_right(options: CassandraOptions) -> None:
    async with opened(options) as store:
        reading = await store.control.read_clock()
        assert abs(reading.offset_us) <= reading.error_us
        assert reading.error_us < MINUTE
