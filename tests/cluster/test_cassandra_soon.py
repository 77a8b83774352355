"""What is written to Cassandra without a task: marks and events, each told alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from counter.errors import WriteTimeoutError
from counter.limits import MINUTE, SECOND
from counter.storage.cassandra import CassandraOptions, CassandraStore
from counter.types import Event, Mark, Namespace, PayloadCheck, Slice, Written
from scripts.cluster_nodes import Cluster
from tests.contracts.cases import SETTINGS, nonce
from tests.support.cassandra import DATASET, forget, have_schema, opened, options_for
from tests.support.cassandra_statements import Statements
from tests.support.clock import FakeClock

SIZE = DATASET.slice_us


@pytest.fixture(scope="module")
def now() -> int:
    """The start of a window, a minute ago."""
    return (time.time_ns() // 1_000 - MINUTE) // (10 * SECOND) * 10 * SECOND


@pytest.fixture(scope="module")
def options(cassandra: Cluster) -> CassandraOptions:
    options = options_for(cassandra)
    asyncio.run(have_schema(options))
    return options


@pytest.fixture
async def store(options: CassandraOptions, now: int) -> AsyncIterator[CassandraStore]:
    async with opened(options, FakeClock(now + MINUTE)) as store:
        start_us = now - now % SIZE
        kept = Slice(start_us, start_us + SIZE, DATASET.time_bucket_us, DATASET.event_buckets)
        await forget(store, keep=[kept])
        await store.make_slices(DATASET, kept)
        yield store


@pytest.fixture
async def namespace(store: CassandraStore, now: int) -> Namespace:
    settings = replace(SETTINGS, shards=1, payload_check=PayloadCheck.OFF)
    created = await store.create_namespace("tests", settings, now)
    assert created is not None
    # Both statements are prepared from now on.
    await store.mark(created, [Mark(now, "first")])
    await store.append(created, [add(now, counter="first")])
    return created


def add(at: int, counter: str = "c") -> Event:
    return Event(counter, at, nonce(1), 0, 1)


async def told(*begin: Callable[[Callable[[Any], None]], bool]) -> list[Any]:
    """What each call tells in the end; all of them are made in one turn."""
    futures = [asyncio.get_running_loop().create_future() for _ in begin]
    for call, future in zip(begin, futures, strict=True):
        assert call(future.set_result)
        assert not future.done()
    return await asyncio.gather(*futures)


async def test_events_of_one_turn_share_a_statement(
    store: CassandraStore, namespace: Namespace, now: int
) -> None:
    """With whoever else writes in it; each is told alone."""
    events = [add(now, f"c{n}") for n in range(9)]
    with Statements(store) as sent:
        other = asyncio.create_task(store.append(namespace, [add(now, "other")]))
        await asyncio.sleep(0)
        begin = [partial(store.append_soon, namespace, event) for event in events]
        assert await told(*begin) == [Written.UNTOLD] * 9
        await other
    assert sent.sizes == [10]
    assert await store.find(namespace, events) == events


async def test_a_mark_takes_its_name_along_once(
    store: CassandraStore, namespace: Namespace, now: int
) -> None:
    """A row each in one statement; in the next window the mark alone."""
    with Statements(store) as sent:
        for window_us in (now, now + 10 * SECOND):
            mark = Mark(window_us, "new")
            assert await told(partial(store.mark_soon, namespace, mark)) == [None]
    assert sent.sizes == [2, 1]
    left = await store.dirty(
        namespace, 0, after_us=now - 1, through_us=now + MINUTE, start=None, limit=9
    )
    assert [mark for mark in left if mark.counter == "new"] == [
        Mark(now, "new"),
        Mark(now + 10 * SECOND, "new"),
    ]
    assert "new" in await store.counters(namespace, prefix="", after=None, limit=9)


async def test_a_mark_that_fails_is_told_and_its_name_not_known(
    store: CassandraStore, namespace: Namespace, now: int
) -> None:
    mark = Mark(now, "new")
    late = WriteTimeoutError("a planted fault", retry_after_us=1)
    with Statements(store, lambda _: late):
        (outcome,) = await told(partial(store.mark_soon, namespace, mark))
    assert isinstance(outcome, Exception)
    with Statements(store) as sent:
        assert await told(partial(store.mark_soon, namespace, mark)) == [None]
    assert sent.sizes == [2]


async def test_what_must_wait_is_left_alone(
    store: CassandraStore, namespace: Namespace, now: int
) -> None:
    """A slice that is not known, a form that was not prepared, a strict check, one deleted."""
    strict = replace(
        namespace, settings=replace(namespace.settings, payload_check=PayloadCheck.STRICT)
    )
    outcomes: list[Any] = []
    with Statements(store) as sent:
        assert not store.append_soon(namespace, add(now + SIZE), outcomes.append)
        assert not store.append_soon(namespace, add(now)._replace(clear=True), outcomes.append)
        assert not store.append_soon(strict, add(now), outcomes.append)
        assert not store.mark_soon(namespace, Mark(now + SIZE, "c"), outcomes.append)
        await asyncio.sleep(0)
    assert sent.sizes == []
    assert outcomes == []
