"""A silent node: callers get an error long before the driver gives up a statement."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from counter.clock import SystemClock
from counter.core.service import CounterService
from counter.errors import WriteTimeoutError
from counter.limits import MILLISECOND, SECOND
from counter.storage.cassandra.options import Placement
from counter.storage.cassandra.store import CassandraStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import SETTINGS
from counter.types import Decision, Event, Namespace, Outcome, PayloadCheck, Reservation
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import DATASET, at, have_schema, opened, options_for, slice_of_now
from tests.support.relay import Relay
from tests.support.waiting import eventually

NONCE = b"k" * 16
Ask = Callable[[CassandraStore, Namespace], Awaitable[object]]


def now_us() -> int:
    return SystemClock().now_us()


async def reserve(store: CassandraStore, namespace: Namespace) -> object:
    return await store.decisions.reserve(namespace, NONCE, Reservation(now_us(), now_us() + SECOND))


async def reserve_again(store: CassandraStore, namespace: Namespace) -> object:
    return await store.decisions.reserve(
        namespace, NONCE, Reservation(now_us(), now_us() + SECOND, replaces_us=0)
    )


async def decide(store: CassandraStore, namespace: Namespace) -> object:
    event = Event("c", now_us(), NONCE, 0, 1)
    return await store.decisions.decide(namespace, [event], Decision(Outcome.VOID, b""))


async def cancel(store: CassandraStore, namespace: Namespace) -> object:
    event = Event("c", now_us(), NONCE, 0, 1)
    return await store.decisions.cancel(namespace, [event], Decision(Outcome.CANCELLED, b""))


async def void(store: CassandraStore, namespace: Namespace) -> None:
    strict = replace(
        namespace, settings=replace(namespace.settings, payload_check=PayloadCheck.STRICT)
    )
    await store.separate_writes.void(strict, [Event("c", now_us(), NONCE, 0, 1)])


async def add_under_a_key(store: CassandraStore, namespace: Namespace) -> object:
    clock = SystemClock()
    service = CounterService(store, MemoryCache(clock), clock)
    return await service.add(namespace, "c", 1, "order-1")


async def have_statements(store: CassandraStore, namespace: Namespace) -> bool:
    """Use each once; a machine that is busy may take too long here too."""
    try:
        await reserve(store, namespace)
        await reserve_again(store, namespace)
        await decide(store, namespace)
        await void(store, namespace)
    except WriteTimeoutError:
        return False
    return True


@pytest.mark.parametrize("ask", [reserve, reserve_again, decide, cancel, void, add_under_a_key])
async def test_a_decision_takes_no_longer_than_a_write(cassandra: Cluster, ask: Ask) -> None:
    """A compare-and-set, and the reading that settles it, may each take much longer."""
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    dataset = replace(DATASET, write_timeout_us=300 * MILLISECOND)
    options = replace(
        options_for(cassandra, keyspace="deadlines"),
        read_timeout_us=60 * SECOND,
        datasets=[(dataset, Placement((("", 1),)))],
    )
    await have_schema(options)
    async with relay.listening(), opened(at(options, relay.address)) as store:
        await store.control.make_slices(dataset, slice_of_now())
        name = f"n{ask.__name__.replace('_', '')}"
        namespace = await store.control.create_namespace(name, SETTINGS, now_us())
        assert namespace is not None
        await eventually(lambda: have_statements(store, namespace), "all statements are prepared")
        relay.mute = True
        reading = asyncio.create_task(store.control.namespaces())
        asked = asyncio.ensure_future(ask(store, namespace))
        done, _ = await asyncio.wait((reading, asked), return_when=asyncio.FIRST_COMPLETED)
        relay.mute = False
        await reading
        assert done == {asked}
        with pytest.raises(WriteTimeoutError):
            await asked
