"""Defects that DynamoDB's tables made possible."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from aiobotocore.session import get_session

from counter.api_keys import ApiKey, Scope
from counter.errors import SliceMissingError, StartupError, StoreUnavailableError
from counter.limits import HOUR, MINUTE
from counter.storage.dynamodb.driver import Driver, DynamodbOptions, Item, Refused, Write, put
from counter.storage.dynamodb.layout import ATOMIC, MARKS, partition
from counter.storage.dynamodb.schema import apply_for, apply_schema
from counter.storage.dynamodb.settings import DynamodbSettings
from counter.storage.dynamodb.store import DynamodbStore
from counter.storage.shared.directory import DatasetState
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SETTINGS,
    SLICE,
    WINDOW,
    add,
    atomic,
    make_namespace,
    make_slices,
    slice_at,
    written,
)
from counter.testing.clock import FakeClock
from counter.testing.control_cases import purge
from counter.types import AtomicMark, Mark, Namespace, Span, Written
from tests.support.dynamodb import FreshStore, empty

KEY = ApiKey("key", "a key", b"\x01" * 32, ("*",), Scope.WRITE, NOW)


@pytest.fixture
async def store(dynamodb: DynamodbOptions) -> AsyncIterator[DynamodbStore]:
    store = FreshStore(dynamodb, FakeClock(NOW), [DATASET])
    await store.open()
    await make_slices(store)
    yield store
    await store.close()


@pytest.fixture
async def namespace(store: DynamodbStore) -> Namespace:
    return await make_namespace(store)


@pytest.fixture
async def driver(dynamodb: DynamodbOptions) -> AsyncIterator[Driver]:
    """One with tables of its own."""
    driver = Driver(replace(dynamodb, prefix="apart"))
    await driver.open()
    await empty(driver)
    yield driver
    await driver.close()


async def stale(store: DynamodbStore, *starts: int) -> None:
    """Have the process know these slices, and no drop, as one that was asleep does."""
    state: DatasetState = store.session.state_of(DATASET)
    state.slices, state.dropped_before_us = [slice_at(each) for each in starts], 0


async def test_a_window_of_a_dropped_slice_is_not_0_beside_one_of_a_new_slice(
    store: DynamodbStore, namespace: Namespace
) -> None:
    """The new one has the slices read again, and the dropped one is not among them any more."""
    await store.control.drop_slice(DATASET, FIRST_SLICE)
    await stale(store, FIRST_SLICE)
    with pytest.raises(SliceMissingError):
        await store.events.sums(namespace, [("c", FIRST_SLICE), ("c", FIRST_SLICE + SLICE)])


async def test_a_read_of_a_table_in_deletion_is_discarded(
    store: DynamodbStore, namespace: Namespace
) -> None:
    """DynamoDB goes on to answer, perhaps with a part of it."""
    event = add(at=FIRST_SLICE + MINUTE)
    store.session.clock.advance(DATASET.retention_us)  # type: ignore[attr-defined]
    with patch.object(Driver, "drop_table", AsyncMock()):
        await store.control.drop_slice(DATASET, FIRST_SLICE)
    span = Span(FIRST_SLICE, FIRST_SLICE + WINDOW)
    for ask in (
        lambda: store.events.find(namespace, [event]),
        lambda: store.separate_writes.void(namespace, [event]),
        lambda: store.events.sums(namespace, [("c", FIRST_SLICE)]),
        lambda: store.events.tails(namespace, [("c", FIRST_SLICE)], NOW),
        lambda: store.events.window_folds(namespace, ["c"], span),
    ):
        await stale(store, FIRST_SLICE)
        with pytest.raises(SliceMissingError):
            await ask()


async def test_each_dataset_has_an_id_of_its_own(driver: Driver) -> None:
    """Whatever their order in the settings of the day."""
    first = [replace(DATASET, id=n, name=name) for n, name in enumerate(("billing", "default"))]
    await apply_schema(driver, first)
    more = [replace(DATASET, id=n, name=name) for n, name in enumerate(("a", "billing", "default"))]
    assert list(await apply_schema(driver, more)) == ["made table apart.a.data", "made dataset a"]
    store = DynamodbStore(driver.options, FakeClock(NOW))
    await store.open()
    datasets = await store.control.datasets()
    assert sorted(each.name for each in datasets) == ["a", "billing", "default"]
    await store.close()


async def test_a_changed_dataset_holds_from_the_next_slice(driver: Driver) -> None:
    await apply_schema(driver, [DATASET])
    assert list(await apply_schema(driver, [DATASET])) == ["the tables apart.* are up to date"]
    changed = replace(DATASET, event_buckets=32, retention_us=2 * DATASET.retention_us)
    stays, holds = await apply_schema(driver, [changed])
    assert "retention stays 1h as it was first set" in stays
    assert "event_buckets hold from the next slice" in holds
    store = DynamodbStore(driver.options, FakeClock(NOW))
    await store.open()
    (dataset,) = await store.control.datasets()
    assert (dataset.event_buckets, dataset.retention_us) == (32, DATASET.retention_us)
    await store.close()


async def test_datasets_with_similar_names_are_kept_apart(driver: Driver) -> None:
    """Slices are found by the names of their tables."""
    clicks, events = DATASET, replace(DATASET, name=f"{DATASET.name}_events")
    await apply_schema(driver, [clicks, events])
    store = DynamodbStore(driver.options, FakeClock(NOW))
    await store.open()
    dataset = next(each for each in await store.control.datasets() if each.name == DATASET.name)
    await store.control.make_slices(dataset, slice_at(FIRST_SLICE), slice_at(FIRST_SLICE + SLICE))
    assert await store.control.drop_slice(dataset, FIRST_SLICE)
    assert [each.start_us for each in await store.control.slices(dataset)] == [FIRST_SLICE + SLICE]
    await store.close()


async def test_a_request_that_dynamodb_rejects_is_an_error(store: DynamodbStore) -> None:
    """A condition that did not hold is an outcome: new, replayed, decided otherwise."""
    large = put(store.session.control, {"pk": b"large", "sk": b"\x00", "x": b"x" * 500_000})
    with pytest.raises(StoreUnavailableError, match="ValidationException"):
        await store.driver.write(large)
    with pytest.raises(StoreUnavailableError, match="Validation"):
        await store.driver.transact([large])


async def test_a_read_of_many_counters_lets_adds_pass(
    store: DynamodbStore, namespace: Namespace
) -> None:
    under_way: list[int] = [0]
    query = store.driver.query

    async def counted(*arguments: Any, **options: Any) -> list[Item]:
        under_way.append(under_way[-1] + 1)
        try:
            return await query(*arguments, **options)
        finally:
            under_way.append(under_way[-1] - 1)

    after = [(f"c{n}", NOW - WINDOW) for n in range(100)]
    with patch.object(store.driver, "query", counted):
        folds = await store.events.tails(namespace, after, until_us=NOW + WINDOW)
    assert len(folds) == 100
    assert max(under_way) <= 16 * DATASET.event_buckets


async def test_the_stored_one_of_two_payloads_is_a_replay(
    store: DynamodbStore, namespace: Namespace
) -> None:
    await written(store, namespace, [add(delta=2)])
    answers = await store.events.append(namespace, [add(delta=1), add(delta=2), add(delta=3)])
    assert list(answers) == [Written.CONFLICT, Written.REPLAYED, Written.CONFLICT]


async def test_a_creation_that_lands_after_the_deletion_makes_no_namespace(
    store: DynamodbStore, namespace: Namespace
) -> None:
    """The item of a deletion stays for ever, and is not read with the namespaces."""
    sent: list[Sequence[Write]] = []
    transact = store.driver.transact

    async def noted(writes: Sequence[Write], timeout_us: int | None = None) -> Any:
        sent.append(writes)
        return await transact(writes, timeout_us)

    with patch.object(store.driver, "transact", noted):
        made = await store.control.create_namespace("again", SETTINGS, NOW)
    assert made is not None
    assert await store.control.delete_namespace(made)
    assert len(await store.driver.query(store.session.control, b"namespaces")) == 1
    assert await store.driver.transact(sent[0]) is not None
    store.session.clock.advance(HOUR)  # type: ignore[attr-defined]
    await purge(store, NOW + HOUR)
    assert await store.driver.transact(sent[0]) is not None
    assert [each.name for each in await store.control.namespaces()] == [namespace.name]
    assert await store.control.create_namespace("again", SETTINGS, NOW + HOUR) is not None
    assert await store.driver.transact(sent[0]) is not None


async def test_a_key_that_was_forgotten_does_not_come_back(store: DynamodbStore) -> None:
    """By its creation, delivered once more."""
    sent: list[Write] = []
    write = store.driver.write

    async def noted(each: Write, timeout_us: int | None = None) -> Item | Refused:
        sent.append(each)
        return await write(each, timeout_us)

    with patch.object(store.driver, "write", noted):
        assert await store.keys.create_api_key(KEY)
    assert await store.keys.forget_api_key(KEY)
    assert isinstance(await store.driver.write(sent[0]), Refused)
    await store.keys.note_api_key_uses([(KEY.id, NOW)])
    assert await store.keys.api_keys() == []
    assert not await store.keys.change_api_key(KEY, replace(KEY, label="new"))


async def test_marks_go_with_their_namespace_and_behind_the_watermark(
    store: DynamodbStore, namespace: Namespace
) -> None:
    """All of them, however many there are."""
    events = atomic(("c", 1), ("d", 2))

    async def marks(of: Namespace) -> list[int]:
        keys = [partition(of, kind, 0) for kind in (MARKS, ATOMIC)]
        table = store.session.data(DATASET)
        return [len(await store.driver.query(table, each)) for each in keys]

    with patch("counter.storage.dynamodb.rollups._DROPPED_MAX", 2):
        for number in range(5):
            await store.separate_writes.mark(namespace, [Mark(NOW, f"c{number}", 0)])
        await store.separate_writes.mark_atomic(namespace, AtomicMark(NOW, tuple(events)))
        assert await marks(namespace) == [5, 1]
        await store.rollups.drop_marks(namespace, 0, NOW)
    assert await marks(namespace) == [0, 0]
    await store.separate_writes.mark(namespace, [Mark(NOW, "c", 0)])
    await store.separate_writes.mark_atomic(namespace, AtomicMark(NOW, tuple(events)))
    assert await store.control.delete_namespace(namespace)
    store.session.clock.advance(HOUR)  # type: ignore[attr-defined]
    await purge(store, NOW + HOUR)
    assert await marks(namespace) == [0, 0]


async def test_marks_that_come_while_others_are_written_share_a_call(
    store: DynamodbStore, namespace: Namespace
) -> None:
    """The same mark of two callers is one item, and each caller has its response."""
    calls: list[int] = []
    write_many = store.driver.write_many

    async def counted(table: str, puts: Any = (), *arguments: Any, **options: Any) -> None:
        calls.append(len(list(puts)))
        await write_many(table, puts, *arguments, **options)

    marks = [Mark(NOW, f"c{number % 10}", 0) for number in range(20)]
    with patch.object(store.driver, "write_many", counted):
        await store.separate_writes.mark(namespace, [Mark(NOW, "first", 0)])
        answers = await asyncio.gather(*(store.separate_writes.mark(namespace, [m]) for m in marks))
    assert answers == [{}] * 20
    assert calls[0] == 1
    assert calls[1] <= 10
    assert len(calls) <= 3
    table = store.session.data(DATASET)
    assert len(await store.driver.query(table, partition(namespace, MARKS, 0))) == 11


async def test_marks_of_a_call_that_failed_may_be_missing(
    store: DynamodbStore, namespace: Namespace
) -> None:
    marks = [Mark(NOW, f"c{number}", 0) for number in range(3)]
    down = AsyncMock(side_effect=StoreUnavailableError("planted"))
    with patch.object(store.driver, "write_many", down):
        errors = await store.separate_writes.mark(namespace, marks)
    assert set(errors) == set(marks)
    assert await store.separate_writes.mark(namespace, marks) == {}


async def test_a_missing_setting_to_connect_is_named(
    dynamodb: DynamodbOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A region, credentials: each with the setting."""
    for name in ("AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    # The one of all tests has found credentials.
    monkeypatch.setattr(Driver, "_sdk", get_session())
    with pytest.raises(StartupError, match="dynamodb_region, or AWS_DEFAULT_REGION"):
        await Driver(replace(dynamodb, region=None)).open()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    driver = Driver(dynamodb)
    await driver.open()
    try:
        with pytest.raises(StoreUnavailableError, match="AWS_SECRET_ACCESS_KEY"):
            await driver.tables()
    finally:
        await driver.close()


@pytest.mark.parametrize("units", [None, (7, 9)])
async def test_tables_follow_the_settings(driver: Driver, units: tuple[int, int] | None) -> None:
    """On demand or provisioned; expiring items are deleted, those of slices never."""
    options = replace(driver.options, prefix=f"made{len(units or ())}", units=units)
    made = Driver(options)
    await made.open()
    control, events = f"{options.prefix}.control", f"{options.prefix}.default.events.0"
    try:
        await apply_schema(made, [DATASET])
        await made.create_table(events)
        described = [
            await made._call("describe_table", TableName=each) for each in (control, events)
        ]
        expires = [
            await made._call("describe_time_to_live", TableName=each) for each in (control, events)
        ]
    finally:
        await made.close()
    for each in described:
        given = each["Table"]["ProvisionedThroughput"]
        assert (given["ReadCapacityUnits"], given["WriteCapacityUnits"]) == (units or (0, 0))
    states = [each["TimeToLiveDescription"]["TimeToLiveStatus"] for each in expires]
    assert states == ["ENABLED", "DISABLED"]


async def test_the_schema_is_applied_once_dynamodb_answers(dynamodb: DynamodbOptions) -> None:
    """It is asked again for `start_timeout`, as a start of the service asks."""
    given: dict[str, Any] = {
        "store": "dynamodb",
        "keyspace": "waited",
        "dynamodb_region": "local",
        "dynamodb_endpoint": dynamodb.endpoint,
        "start_timeout": "1m",
    }
    settings = DynamodbSettings(**given)
    tables, failures = Driver.tables, [StoreUnavailableError("away")]

    async def fail_once(driver: Driver) -> list[str]:
        if failures:
            raise failures.pop()
        return await tables(driver)

    with patch.object(Driver, "tables", fail_once):
        assert "made dataset default" in await apply_for(settings)
    assert not failures


async def test_recovery_is_enabled_for_every_table(driver: Driver) -> None:
    """Amazon's local engine has none, so the request is looked at."""
    asked: list[tuple[str, Any]] = []
    call = driver._call

    async def noted(operation: str, timeout_us: int | None = None, **request: Any) -> Any:
        if operation == "update_continuous_backups":
            asked.append((request["TableName"], request["PointInTimeRecoverySpecification"]))
            return {}
        return await call(operation, timeout_us, **request)

    driver.options = replace(driver.options, recovers=True)
    with patch.object(driver, "_call", noted):
        await apply_schema(driver, [DATASET])
    on = {"PointInTimeRecoveryEnabled": True}
    assert asked == [("apart.control", on), ("apart.default.data", on)]
