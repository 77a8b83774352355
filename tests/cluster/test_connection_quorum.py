"""Three nodes of which some are down or say nothing: what goes on, what does not, what comes back.

No store is opened anew: recovery needs no restart.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import pytest

from counter.clock import SystemClock
from counter.errors import UnavailableError
from counter.limits import SECOND
from counter.storage.cassandra import CassandraOptions, CassandraStore
from counter.types import Event, Mark, Namespace, Slice
from counter.windows import window_of
from scripts.cluster_nodes import Cluster
from tests.contracts.cases import SETTINGS, WINDOW
from tests.support.cassandra import DATASET, have_schema, opened, options_for, slice_of_now
from tests.support.waiting import eventually

T = TypeVar("T")


@pytest.fixture(scope="module")
def options(three_nodes: Cluster) -> CassandraOptions:
    """Of a keyspace that has three replicas."""
    options = replace(options_for(three_nodes, replicas=3), read_timeout_us=2 * SECOND)
    asyncio.run(have_schema(options))
    return options


async def namespace_in(store: CassandraStore) -> Namespace:
    await store.make_slice(DATASET, slice_of_now())
    name = f"n{uuid.uuid4().hex}"
    namespace = await store.create_namespace(name, SETTINGS, SystemClock().now_us())
    assert namespace is not None
    return namespace


async def all_works(store: CassandraStore, namespace: Namespace, number: int) -> None:
    """A write of each kind, and it is read back. Each is tried again while it is not told."""
    now_us = slice_of_now().start_us + number
    event = Event(f"c{number}", now_us, number.to_bytes(16, "big"), 0, 1)
    mark = Mark(window_of(now_us, WINDOW), event.counter)
    await told(store.ping)
    await told(lambda: store.mark(namespace, [mark]))
    await told(lambda: appended(store, namespace, event))
    assert list(await told(lambda: store.find(namespace, [event]))) == [event]
    assert (await told(lambda: store.lease_tokens(1, now_us))).time_us >= now_us
    assert await told(lambda: store.acquire([f"{number}"], "a", 60_000_000)) == [True]
    assert namespace in await told(store.namespaces)
    await told(store.read_clock)


async def appended(store: CassandraStore, namespace: Namespace, event: Event) -> None:
    (written,) = await store.append(namespace, [event])
    if isinstance(written, UnavailableError):
        raise written


async def told(ask: Callable[[], Awaitable[T]]) -> T:
    """What *ask* comes to, when the nodes that it asks are those that answer."""

    async def try_it() -> tuple[T] | None:
        try:
            return (await ask(),)
        except UnavailableError:
            return None

    (answer,) = await eventually(try_it, "an answer")
    return answer


async def test_one_node_may_be_down_and_below_a_quorum_nothing_is_claimed(
    breakable: Cluster, options: CassandraOptions
) -> None:
    """With one down of three, writes, compare-and-sets and schema changes go on, and a process can
    start. With two down they fail, saying why; when they are back, they succeed."""
    async with opened(options) as store:
        namespace = await namespace_in(store)
        await all_works(store, namespace, 1)
        await asyncio.to_thread(breakable.cassandra[2].kill)
        await all_works(store, namespace, 2)
        start_us = slice_of_now().end_us
        ahead = Slice(start_us, start_us + DATASET.slice_us, DATASET.time_bucket_us, 4)
        await store.make_slice(DATASET, ahead)
        async with opened(options) as other:
            await all_works(other, namespace, 3)
            assert ahead in await other.slices(DATASET)

        await asyncio.to_thread(breakable.cassandra[1].kill)

        async def says_why() -> bool:
            with pytest.raises(UnavailableError) as caught:
                await store.ping()
            return "1 of the 2 replicas" in caught.value.detail

        await eventually(says_why, "the node that is left knows that it is alone", seconds=90)
        with pytest.raises(UnavailableError):
            await store.namespaces()
        with pytest.raises(UnavailableError):
            await store.lease_tokens(1, 0)
        with pytest.raises(UnavailableError):
            async with opened(options):
                pass
        await asyncio.to_thread(breakable.mend)
        await all_works(store, namespace, 4)


async def test_a_node_that_says_nothing_holds_up_nobody(
    breakable: Cluster, options: CassandraOptions
) -> None:
    """It is not known to be down at first. Idempotent statements are sent to another node; a
    compare-and-set that it swallowed is settled by another."""
    async with opened(options) as store:
        namespace = await namespace_in(store)
        await all_works(store, namespace, 1)
        breakable.cassandra[1].pause()
        for number in range(2, 5):
            await all_works(store, namespace, number)
        async with opened(options) as other:
            await all_works(other, namespace, 5)
        breakable.cassandra[1].resume()
        await all_works(store, namespace, 6)
