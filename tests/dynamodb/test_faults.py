"""Adds under a bad network and DynamoDB's throttling: none is lost or counted twice."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from counter.errors import (
    OverloadedError,
    StoreUnavailableError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.limits import SECOND
from counter.storage.dynamodb.driver import DynamodbOptions
from counter.storage.dynamodb.store import DynamodbStore
from counter.testing.cases import (
    DATASET,
    NOW,
    SETTINGS,
    add,
    atomic,
    make_namespace,
    make_slices,
    tail,
    written,
    written_atomic,
)
from counter.testing.clock import FakeClock
from counter.types import Namespace, Written
from tests.dynamodb.relay import Fault, Relay
from tests.support.dynamodb import FreshStore
from tests.support.waiting import eventually


@pytest.fixture
async def relay(dynamodb: DynamodbOptions) -> AsyncIterator[Relay]:
    assert dynamodb.endpoint is not None
    async with Relay(dynamodb.endpoint).open() as relay:
        yield relay


@pytest.fixture
async def store(dynamodb: DynamodbOptions, relay: Relay) -> AsyncIterator[DynamodbStore]:
    store = FreshStore(replace(dynamodb, endpoint=relay.url), FakeClock(NOW), [DATASET])
    await store.open()
    await make_slices(store)
    yield store
    await store.close()


@pytest.fixture
async def namespace(store: DynamodbStore) -> Namespace:
    return await make_namespace(store)


async def appended(store: DynamodbStore, namespace: Namespace) -> Written | UnavailableError:
    """The outcome of one add of 1, always the same."""
    [outcome] = await store.events.append(namespace, [add()])
    return outcome


@pytest.mark.parametrize("operation", ["PutItem", "TransactWriteItems"])
async def test_a_throttled_add_is_refused_and_counts_when_it_is_sent_again(
    store: DynamodbStore, namespace: Namespace, relay: Relay, operation: str
) -> None:
    """Nothing was written, and the sender is asked to wait."""
    events = atomic(("c", 1), ("d", 2))
    await written(store, namespace, [add("e")])
    relay.fault, relay.hits = Fault.THROTTLE, lambda each: each == operation
    if operation == "PutItem":
        error = await appended(store, namespace)
    else:
        with pytest.raises(OverloadedError) as caught:
            await store.events.append_atomic(namespace, events)
        error = caught.value
    assert isinstance(error, OverloadedError)
    assert error.retry_after_us == SECOND
    assert "nothing was written" in error.detail
    relay.fault = None
    assert await tail(store, namespace) == (False, 0)
    if operation == "PutItem":
        assert await appended(store, namespace) is Written.NEW
    else:
        assert await written_atomic(store, namespace, events) is Written.NEW
    assert await tail(store, namespace) == (False, 1)


async def test_throttled_batches_are_retried_and_then_refused(
    store: DynamodbStore, namespace: Namespace, relay: Relay
) -> None:
    relay.fault, relay.hits = Fault.THROTTLE, lambda each: each in ("BatchGetItem", "Query")
    with pytest.raises(OverloadedError):
        await store.events.find(namespace, [add()])
    with pytest.raises(OverloadedError):
        await store.rollups.heads(namespace, ["c"])


@pytest.mark.parametrize(
    ("fault", "again"), [(Fault.LOSE, Written.NEW), (Fault.LOSE_ANSWER, Written.REPLAYED)]
)
async def test_an_add_without_a_response_counts_once_when_it_is_resent(
    store: DynamodbStore, namespace: Namespace, relay: Relay, fault: Fault, again: Written
) -> None:
    """The driver itself resends nothing; the next request returns the outcome."""
    relay.fault = fault
    assert isinstance(await appended(store, namespace), StoreUnavailableError)
    assert relay.hit == 1
    relay.fault = None
    assert await appended(store, namespace) is again
    assert await tail(store, namespace) == (False, 1)


@pytest.mark.parametrize(
    ("fault", "again"), [(Fault.LOSE, Written.NEW), (Fault.LOSE_ANSWER, Written.REPLAYED)]
)
async def test_an_atomic_add_without_a_response_counts_once(
    store: DynamodbStore, namespace: Namespace, relay: Relay, fault: Fault, again: Written
) -> None:
    events = atomic(("c", 1), ("d", 2))
    relay.fault, relay.hits = fault, lambda each: each == "TransactWriteItems"
    with pytest.raises(StoreUnavailableError):
        await store.events.append_atomic(namespace, events)
    relay.fault = None
    assert await written_atomic(store, namespace, events) is again
    assert await tail(store, namespace) == (False, 1)


async def test_a_request_that_a_proxy_sends_twice_is_one_attempt(
    store: DynamodbStore, namespace: Namespace, relay: Relay
) -> None:
    """An add is new, a namespace is made, and a later attempt is a replay."""
    relay.fault, relay.hits = Fault.REPEAT, lambda each: each in ("PutItem", "TransactWriteItems")
    assert await appended(store, namespace) is Written.NEW
    assert await written_atomic(store, namespace, atomic(("c", 2), ("d", 2))) is Written.NEW
    made = await store.control.create_namespace("twice", SETTINGS, NOW)
    assert made is not None
    assert len(await store.rollups.watermarks(made)) == SETTINGS.shards
    changed = replace(made, version=made.version + 1)
    assert await store.control.update_namespace(made, changed)
    assert await store.control.delete_namespace(changed)
    relay.fault = None
    assert await appended(store, namespace) is Written.REPLAYED
    assert await tail(store, namespace) == (False, 3)


async def test_an_add_that_lands_late_stays_void(
    store: DynamodbStore, namespace: Namespace, relay: Relay
) -> None:
    """Its sender had given up, and its token was decided in between."""
    hasty = replace(namespace, dataset=replace(DATASET, write_timeout_us=2 * SECOND))
    relay.fault = Fault.HOLD
    assert isinstance(await appended(store, hasty), WriteTimeoutError)
    relay.fault = None
    await store.separate_writes.void(namespace, [add()])
    passed = relay.passed
    relay.release.set()

    await eventually(lambda: relay.passed > passed, "the held request is passed on")
    assert list(await store.events.find(namespace, [add()])) == [None]
    assert await appended(store, namespace) is Written.LATE
    assert await tail(store, namespace) == (False, 0)
