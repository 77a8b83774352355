"""Event buckets that are raised by themselves, over Cassandra: two processes of one keyspace."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from counter.capabilities import PartitionSize
from counter.core.service import CounterService
from counter.limits import MINUTE, SECOND
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.store import CassandraStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import SETTINGS, T0, nonce
from counter.testing.clock import FakeClock
from counter.types import EventPage, Namespace, PayloadCheck, Span, Token
from rollup.partitions import EVENT_BYTES
from rollup.worker import RollupWorker
from scripts.cluster_nodes import Cluster
from scripts.cluster_nodetool import nodetool
from tests.support.cassandra import DATASET, have_schema, opened, options_for
from tests.support.waiting import eventually

SIZE = DATASET.slice_us
HOT = replace(DATASET, event_buckets=1, event_buckets_max=8)
USUAL = replace(
    SETTINGS, accept_limit_us=5 * SECOND, key_ttl_us=10 * MINUTE, payload_check=PayloadCheck.OFF
)
#: Until a window of now is closed.
CLOSING = 30 * SECOND


@pytest.fixture(autouse=True)
def small_partitions() -> Iterator[None]:
    """They are to hold thirty events."""
    with patch("rollup.partitions.PARTITION_BYTES_MAX", 30 * EVENT_BYTES):
        yield


@pytest.fixture(scope="module")
def options(cassandra: Cluster) -> CassandraOptions:
    options = replace(options_for(cassandra), datasets=[(HOT, Placement((("", 1),)))])
    asyncio.run(have_schema(options))
    return options


class Process:
    """An API and a worker over a store of their own."""

    def __init__(self, store: CassandraStore, clock: FakeClock) -> None:
        self.store, self.clock = store, clock
        self.api = CounterService(store, MemoryCache(clock), clock)
        self.worker = RollupWorker(store, MemoryCache(clock), clock, self.api.namespaces)

    async def add(self, namespace: Namespace, number: int, counter: str = "hot") -> Token:
        # As a process does every second, of which the test's clock passes many.
        await self.api.namespaces.refresh()
        token = Token(nonce(number), self.clock.now_us())
        await self.api.add(namespace, counter, 1, token)
        return token

    async def counts(self, namespace: Namespace) -> tuple[int, int]:
        """Of the rolled-up part and of the tail together, and of all the events."""
        read = await self.api.reader.read_one(namespace, "hot", 0)
        (whole,) = await self.store.events.tails(namespace, [("hot", T0 - SIZE)])
        return read.count, whole.total


@pytest.fixture
async def processes(options: CassandraOptions) -> AsyncIterator[tuple[Process, Process]]:
    clock = FakeClock(T0 + MINUTE)
    async with opened(options, clock) as one, opened(options, clock) as other:
        yield Process(one, clock), Process(other, clock)


async def test_a_hot_counter_has_the_next_slice_made_with_more_event_buckets(
    processes: tuple[Process, Process],
) -> None:
    """One process counts, the other makes the slice; both read and write right across both."""
    one, other = processes
    clock = one.clock
    await one.worker.tick()
    namespace = await one.api.namespaces.create("n", USUAL)
    for number in range(100):
        await one.add(namespace, number)
        clock.advance(SECOND // 4)
    clock.advance(CLOSING)
    await one.worker.tick()
    await one.worker.check_partitions()
    (size,) = await other.store.partition_sizes.recorded(namespace.dataset)
    assert size.counter == "hot"
    assert size.size_bytes == 100 * EVENT_BYTES
    clock.advance(SIZE)
    await other.worker.tick()
    await one.worker.tick()
    for each in processes:
        slices = await each.store.control.slices(namespace.dataset)
        assert [each.event_buckets for each in slices] == [1, 1, 1, 1, 4]
    raised = slices[-1]
    clock.advance(raised.start_us - 5 * SECOND - clock.now_us())
    # In the last slice of one event bucket and in the first of four, each by both.
    for number in range(100, 140):
        token = await one.add(namespace, number)
        await other.api.namespaces.refresh()
        await other.api.add(namespace, "hot", 1, token)
        clock.advance(SECOND // 4)
    assert await one.counts(namespace) == await other.counts(namespace) == (140, 140)
    clock.advance(CLOSING)
    await other.worker.tick()
    assert await one.counts(namespace) == await other.counts(namespace) == (140, 140)
    page = await one.store.events.scan(
        namespace, "hot", EventPage(Span(T0, clock.now_us()), limit=200)
    )
    assert [each.event_id for each in page] == [nonce(number) for number in reversed(range(140))]
    keyspace = one.store.session.state_of(namespace.dataset).keyspace
    partitions = await one.store.session.connection.simple(
        f"SELECT DISTINCT namespace, counter, time_bucket, event_bucket"
        f" FROM {keyspace}.events_{raised.start_us}"
    )
    assert len(partitions) == 4


async def test_nodes_return_partition_sizes(processes: tuple[Process, Process]) -> None:
    """A node answers the query; rounded sizes are lower bounds."""
    one, _ = processes
    sizes = await one.store.partition_sizes._largest_partitions("system_schema")
    assert sizes["tables"] == 0
    rows = [("events_1", 1), ("events_2", 13)]
    with patch.object(one.store.session.connection, "ask", return_value=rows):
        sizes = await one.store.partition_sizes._largest_partitions("k")
    assert sizes == {"events_1": 0, "events_2": 10 * 1024 * 1024}


async def test_a_size_that_is_recorded_again_after_it_expired_is_no_row_of_nulls(
    processes: tuple[Process, Process], cassandra: Cluster
) -> None:
    """It has the write timestamp of the one that expired, which a compaction made a tombstone."""
    store = processes[0].store
    (dataset,) = await store.control.datasets()
    short = replace(dataset, slice_us=SECOND // 4)
    size = PartitionSize(T0 - SIZE, HOT.time_bucket_us, 7_000, "n", "cold")
    await store.partition_sizes.record(short, size)

    async def expired() -> bool:
        return size not in await store.partition_sizes.recorded(short)

    await eventually(expired, "the size expires")
    for command in ("flush", "compact"):
        nodetool(cassandra.cassandra[0], command, store.session.control.keyspace, "crowds")
    await store.partition_sizes.record(short, size)
    assert size not in await store.partition_sizes.recorded(short)
    larger = size._replace(size_bytes=7_001)
    await store.partition_sizes.record(short, larger)
    assert larger in await store.partition_sizes.recorded(short)
