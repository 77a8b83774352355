"""Two data centers, of two nodes and of one: settings that would lose adds are refused."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from unittest.mock import patch

import pytest

from counter.clock import SystemClock
from counter.core.service import CounterService
from counter.errors import CounterError, StartupError, UnavailableError
from counter.limits import MINUTE, SECOND
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.store import CassandraStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import SETTINGS, atomic, nonce
from counter.types import Namespace, PayloadCheck, Token
from counter.windows import window_of
from scripts.cluster_nodes import Cluster, Shape
from scripts.cluster_servers import STORAGE_PORT
from tests.support.cassandra import (
    HASTY,
    have_schema,
    opened,
    options_for,
    slice_of_now,
    with_dataset,
)
from tests.support.cluster import running_cluster
from tests.support.relay import Relay
from tests.support.waiting import eventually

TWO = (("dc1", 2), ("dc2", 1))
ADDS = 20
#: Tokens stay young for as long as a fault takes.
USUAL = replace(SETTINGS, accept_limit_us=5 * MINUTE, payload_check=PayloadCheck.OFF)


class Ways:
    """The ways between the data centers: a relay before each node, where other nodes look for it.

    Nodes of one data center look for each other at their own addresses. So what passes the relay of
    a node comes from the other data center.
    """

    def __init__(self) -> None:
        self.cluster: Cluster
        self._relays: list[Relay] = []
        self._loop = asyncio.new_event_loop()

    @contextmanager
    def around(self, cluster: Cluster) -> Iterator[None]:
        """Relay, in a thread of its own, because the nodes start before any test runs."""
        self.cluster, shape = cluster, cluster.shape
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        stack = AsyncExitStack()
        try:
            for number in range(1, shape.nodes + 1):
                relay = Relay(shape.address_of(number), STORAGE_PORT)
                self._relays.append(relay)
                listening = relay.listening(host=shape.peer_address_of(number), port=STORAGE_PORT)
                asyncio.run_coroutine_threadsafe(
                    stack.enter_async_context(listening), self._loop
                ).result()
            yield
        finally:
            asyncio.run_coroutine_threadsafe(stack.aclose(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    @contextmanager
    def cut(self, *numbers: int) -> Iterator[None]:
        """Nothing reaches the nodes of these *numbers* from the other data center."""
        relays = [self._relays[number - 1] for number in numbers]
        for relay in relays:
            self._loop.call_soon_threadsafe(relay.go_away)
        try:
            yield
        finally:
            for relay in relays:
                self._loop.call_soon_threadsafe(setattr, relay, "is_away", False)

    @contextmanager
    def frozen(self, number: int) -> Iterator[None]:
        """The node of this *number* is stopped by SIGSTOP."""
        node = self.cluster.cassandra[number - 1]
        node.pause()
        try:
            yield
        finally:
            node.resume()


@pytest.fixture(scope="module")
def two_datacenters(minutes: None) -> Iterator[Ways]:
    ways = Ways()
    shape = Shape(
        nodes=3,
        memcached=0,
        quick=True,
        datacenters="dc1,dc1,dc2",
        peer_offset=100,
        durable_schema=False,
    )
    with running_cluster(shape, ways.around):
        yield ways


def options_in(ways: Ways, datacenter: str, placement: Placement) -> CassandraOptions:
    """For a process in *datacenter*, in a keyspace of its own."""
    numbers = [
        number for number in (1, 2, 3) if ways.cluster.shape.datacenter_of(number) == datacenter
    ]
    port = ways.cluster.shape.cassandra_port
    return replace(
        options_for(ways.cluster),
        contact_points=[(ways.cluster.shape.address_of(number), port) for number in numbers],
        local_datacenter=datacenter,
        read_timeout_us=3 * SECOND,
        datasets=[(HASTY, placement)],
    )


def elsewhere(ways: Ways, options: CassandraOptions) -> CassandraOptions:
    """The same keyspace for a process in dc2."""
    (placed,) = options.datasets
    return replace(options_in(ways, "dc2", placed[1]), keyspace=options.keyspace)


@pytest.fixture(scope="module")
def options(two_datacenters: Ways) -> CassandraOptions:
    """A keyspace of processes in dc1 only; creating it takes most of a test's time."""
    options = options_in(two_datacenters, "dc1", Placement(TWO, datacenter="dc1"))
    asyncio.run(have_schema(options))
    return options


@pytest.mark.parametrize(
    "placement",
    [
        Placement(TWO, "QUORUM", "LOCAL_QUORUM"),
        Placement(TWO, "LOCAL_QUORUM", "QUORUM"),
        Placement((("", 1),)),
    ],
)
async def test_consistencies_that_do_not_overlap_are_refused(
    two_datacenters: Ways, options: CassandraOptions, placement: Placement
) -> None:
    """When the schema is applied, and when a process connects to one that was applied before."""
    placed = with_dataset(options, HASTY, placement)
    with pytest.raises(StartupError, match=r"2 data centers \(dc1, dc2\), writes at"):
        await have_schema(placed)
    with patch("counter.storage.cassandra.schema.check_overlap"):
        await have_schema(placed)
    with pytest.raises(StartupError, match="set --write-consistency EACH_QUORUM"):
        async with opened(placed):
            pass


async def test_a_dataset_of_one_data_center_is_for_processes_in_it(
    two_datacenters: Ways, options: CassandraOptions
) -> None:
    await have_schema(options)
    async with opened(options) as store:
        await store.ping()
    with pytest.raises(StartupError, match=r"in data center 'dc1' only.* this process is in 'dc2'"):
        async with opened(elsewhere(two_datacenters, options)):
            pass


class Site:
    """A process in each data center, and the adds acknowledged by either."""

    def __init__(self, stores: Sequence[CassandraStore], namespace: Namespace) -> None:
        clock = SystemClock()
        self.stores = stores
        self.apis = [CounterService(store, MemoryCache(clock), clock) for store in stores]
        self.namespace = namespace
        self.acknowledged: set[int] = set()
        self.asked: dict[int, Token] = {}
        self._numbers = count(1)

    async def add_some(self, sides: Sequence[int]) -> None:
        """Adds through each of *sides*, two of five through all of them at once."""
        sends = []
        for number in [next(self._numbers) for _ in range(ADDS)]:
            self.asked[number] = Token(nonce(number), SystemClock().now_us())
            through = sides if number % 5 < 2 else [sides[number % len(sides)]]
            sends += [self._send(number, side) for side in through]
        await asyncio.gather(*sends)

    async def adds_more_than(self, acknowledged: int) -> bool:
        """Whether more adds than that are acknowledged, or are when the rest is sent again."""
        left = [number for number in self.asked if number not in self.acknowledged]
        if len(self.acknowledged) == acknowledged:
            await asyncio.gather(*(self._send(number, 0) for number in left))
        return len(self.acknowledged) > acknowledged

    async def _send(self, number: int, side: int) -> None:
        with suppress(CounterError):
            await self.apis[side].add(self.namespace, "c", 1, self.asked[number])
            self.acknowledged.add(number)

    async def count(self, side: int) -> int | None:
        """The count as a process of *side* reads it; None while it cannot."""
        with suppress(CounterError):
            return (await self.apis[side].reader.read_one(self.namespace, "c", 0)).count
        return None

    async def all_is_counted(self) -> None:
        """Each side's first read has all acknowledged adds; resending the rest counts once."""
        for side in (0, 1):
            found = await eventually(partial(self.count, side), "a read")
            assert len(self.acknowledged) <= found <= len(self.asked)

        async def sent() -> bool:
            left = [number for number in self.asked if number not in self.acknowledged]
            await asyncio.gather(*(self._send(number, number % 2) for number in left))
            return not left

        await eventually(sent, "adds are acknowledged")
        for side in (0, 1):
            found = await eventually(partial(self.count, side), "a read")
            assert found == len(self.asked)


@asynccontextmanager
async def site(ways: Ways, options: CassandraOptions) -> AsyncIterator[Site]:
    await have_schema(options)
    async with opened(options) as one, opened(elsewhere(ways, options)) as other:
        (dataset,) = await one.control.datasets()
        await one.control.make_slices(dataset, slice_of_now())
        name = f"n{uuid.uuid4().hex}"
        namespace = await one.control.create_namespace(name, USUAL, SystemClock().now_us())
        assert namespace is not None
        await other.control.datasets()
        yield Site((one, other), namespace)


@pytest.mark.parametrize(("write", "read"), [("EACH_QUORUM", "LOCAL_QUORUM"), ("QUORUM", "QUORUM")])
async def test_acknowledged_adds_count_in_every_data_center(
    two_datacenters: Ways, options: CassandraOptions, write: str, read: str
) -> None:
    """While one of them is frozen, or does not hear the other, or neither hears the other."""
    ways, placement = two_datacenters, Placement(TWO, write, read)
    async with site(ways, with_dataset(options, HASTY, placement)) as each:
        await each.add_some([0, 1])
        # On a busy machine some need a second attempt.
        await each.all_is_counted()
        assert len(each.acknowledged) == ADDS
        for fault in (ways.frozen(3), ways.cut(3), ways.cut(1, 2), ways.cut(1, 2, 3)):
            before = len(each.acknowledged)
            with fault:
                await each.add_some([0, 1])
                if write == "QUORUM":
                    # A data center that has a majority of all replicas goes on.
                    await eventually(partial(each.adds_more_than, before), "an add")
                    await eventually(partial(each.count, 0), "a read")
            acknowledged = len(each.acknowledged) - before
            assert acknowledged < ADDS if write == "EACH_QUORUM" else acknowledged
            await each.all_is_counted()


async def test_an_event_found_in_one_data_center_counts_in_each(
    two_datacenters: Ways, options: CassandraOptions
) -> None:
    """It is repaired there before the look-up returns."""
    placement = Placement(TWO, "EACH_QUORUM", "LOCAL_QUORUM")
    async with site(two_datacenters, with_dataset(options, HASTY, placement)) as each:
        namespace, (one, other) = each.namespace, each.stores
        at_us = SystemClock().now_us()
        window_us = window_of(at_us, namespace.settings.rollup_window_us)
        items = atomic(("c", 1), ("d", 2), at=at_us)
        with two_datacenters.cut(3), pytest.raises(UnavailableError):
            await one.events.append_atomic(namespace, items)

        async def is_found() -> bool:
            with suppress(UnavailableError):
                return list(await one.events.find(namespace, items)) == items
            return False

        await eventually(is_found, "a look-up in each data center")
        sums = await other.events.sums(namespace, [("c", window_us), ("d", window_us)])
        assert [found.total for found in sums] == [1, 2]
