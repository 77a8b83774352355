"""Events on Cassandra: grouping, outcomes, and voided rows.

The clock is near the nodes' own, so that compare-and-sets bear later times than events, as they do
in life. Two stores over one keyspace are two processes.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import cassandra
import pytest
from cassandra import ConsistencyLevel

from counter.errors import SliceMissingError, UnavailableError, WriteTimeoutError
from counter.limits import INT64_MAX, MINUTE, SECOND
from counter.storage.cassandra.event_reads import PARTITIONS_MAX, ROWS_MAX
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.store import CassandraStore
from counter.testing.cases import SETTINGS, nonce, nonces_per_bucket, ordered
from counter.testing.clock import FakeClock
from counter.types import Event, EventPage, Fold, Namespace, PayloadCheck, Slice, Span, Written
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import DATASET, forget, have_schema, opened, options_for
from tests.support.cassandra_statements import Statements, statements_of
from tests.support.waiting import eventually

SIZE = DATASET.slice_us
NEW, REPLAYED, CONFLICT, UNVERIFIED = (
    Written.NEW,
    Written.REPLAYED,
    Written.CONFLICT,
    Written.UNVERIFIED,
)

Stores = tuple[CassandraStore, CassandraStore]


@pytest.fixture(scope="module")
def now() -> int:
    """A minute ago, in the middle of a window."""
    return (time.time_ns() // 1_000 - MINUTE) // (10 * SECOND) * 10 * SECOND + 3 * SECOND


@pytest.fixture(scope="module")
def options(cassandra: Cluster) -> CassandraOptions:
    options = options_for(cassandra)
    asyncio.run(have_schema(options))
    return options


@pytest.fixture
async def stores(options: CassandraOptions, now: int) -> AsyncIterator[Stores]:
    """Two processes; the slices before and after the present one, and that."""
    clock = FakeClock(now + MINUTE)
    async with opened(options, clock) as one, opened(options, clock) as other:
        first = now - now % SIZE - SIZE
        kept = [
            Slice(start_us, start_us + SIZE, DATASET.time_bucket_us, DATASET.event_buckets)
            for start_us in (first, first + SIZE, first + 2 * SIZE)
        ]
        await forget(one, keep=kept)
        for each in kept:
            await one.control.make_slices(DATASET, each)
        await other.control.slices(DATASET)
        yield one, other


async def make(store: CassandraStore, now: int, check: PayloadCheck) -> Namespace:
    settings = replace(SETTINGS, payload_check=check)
    created = await store.control.create_namespace(f"tests-{check}", settings, now)
    assert created is not None
    return created


@pytest.fixture
async def guard(stores: Stores, now: int) -> Namespace:
    return await make(stores[0], now, PayloadCheck.GUARD)


@pytest.fixture
async def strict(stores: Stores, now: int) -> Namespace:
    return await make(stores[0], now, PayloadCheck.STRICT)


def add(at: int, number: int = 1, delta: int = 1, counter: str = "c") -> Event:
    return Event(counter, at, nonce(number), 0, delta)


def as_clear(event: Event) -> Event:
    return event._replace(delta=0, clear=True)


async def seen(store: CassandraStore, namespace: Namespace, event: Event) -> list[Any]:
    """The result of each kind of read for *event*, alone in its counter and window."""
    window_us = event.event_time_us - event.event_time_us % (10 * SECOND)
    (found,) = await store.events.find(namespace, [event])
    (fold,) = await store.events.sums(namespace, [(event.counter, window_us)])
    (tail,) = await store.events.tails(namespace, [(event.counter, window_us - 1)])
    listed = await store.events.scan(
        namespace, event.counter, EventPage(Span(0, window_us + MINUTE), limit=9)
    )
    return [found, fold, tail, list(listed)]


HIDDEN: list[Any] = [None, Fold(False, 0), Fold(False, 0), []]


async def test_adds_of_one_turn_travel_together(stores: Stores, guard: Namespace, now: int) -> None:
    """A hot counter's take a statement an event bucket; cold ones share statements, ten each."""
    store, _ = stores
    hot = [add(now + n, n) for n in range(200)]
    cold = [add(now, n, counter=f"c{n}") for n in range(24)]
    await store.events.append(guard, [add(now, 999, counter="first")])
    with Statements(store) as sent:
        answers = await asyncio.gather(*(store.events.append(guard, [each]) for each in hot + cold))
    assert answers == [[UNVERIFIED]] * 224
    assert sorted(sent.sizes)[:3] == [4, 10, 10]
    assert len(sent.sizes) == 3 + DATASET.event_buckets
    assert sum(sent.sizes) == 224
    assert list(await store.events.find(guard, hot + cold)) == hot + cold


@pytest.mark.parametrize(
    "error", [cassandra.Unavailable("no quorum"), cassandra.InvalidRequest("unconfigured table e")]
)
async def test_a_failed_partition_fails_only_its_own_events(
    stores: Stores, guard: Namespace, now: int, error: Exception
) -> None:
    """The rest of its statement is written event by event."""
    store, _ = stores
    events = [add(now + n, n, counter=name) for n, name in enumerate(["a", "bad", "b", "bad"])]
    await store.events.append(guard, [add(now, 9, counter="first")])

    def fault(statement: Any) -> Exception | None:
        bad: bool = any("bad" in str(values) for values in statements_of(statement))
        return error if bad else None

    with Statements(store, fault):
        outcomes = await store.events.append(guard, events)
    assert [outcomes[0], outcomes[2]] == [UNVERIFIED, UNVERIFIED]
    assert all(isinstance(outcomes[at], UnavailableError) for at in (1, 3))
    assert list(await store.events.find(guard, events)) == [events[0], None, events[2], None]


async def test_a_statement_that_times_out_leaves_all_its_events_unverified(
    stores: Stores, guard: Namespace, now: int
) -> None:
    """No time is left to retry: a later request with the same token finds the outcome."""
    store, _ = stores
    events = [add(now, n, counter=f"c{n}") for n in range(3)]
    await store.events.append(guard, [add(now, 9, counter="first")])
    with Statements(store, lambda _: cassandra.OperationTimedOut()) as sent:
        outcomes = await store.events.append(guard, events)
    assert all(isinstance(outcome, WriteTimeoutError) for outcome in outcomes)
    assert sent.sizes == [3]


async def test_within_a_call_the_first_event_of_an_identity_is_kept(
    stores: Stores, guard: Namespace, now: int
) -> None:
    """Also if the store cannot distinguish new from replayed."""
    store, _ = stores
    one = add(now, delta=5)
    outcomes = await store.events.append(
        guard, [one, one, add(now, delta=6), add(now, 2), as_clear(one)]
    )
    assert list(outcomes) == [UNVERIFIED, UNVERIFIED, CONFLICT, UNVERIFIED, CONFLICT]
    assert await seen(store, guard, one) == [one, *[Fold(False, 6)] * 2, [one, add(now, 2)]]


async def test_an_add_and_a_clear_under_one_token_are_a_clear(
    stores: Stores, guard: Namespace, now: int
) -> None:
    """Without a strict check both may land. Every read takes it for the same one of them."""
    one, other = stores
    event = add(now, delta=5)
    await one.events.append(guard, [event, add(now - 1, 2, delta=70)])
    await other.events.append(guard, [as_clear(event)])
    found, fold, tail, listed = await seen(one, guard, event)
    assert found == as_clear(event)
    assert fold == tail == Fold(True, 0)
    assert listed == [as_clear(event), add(now - 1, 2, delta=70)]


@pytest.mark.parametrize("check", [PayloadCheck.GUARD, PayloadCheck.STRICT])
async def test_a_late_event_under_a_void_stays_invisible(
    stores: Stores, now: int, check: PayloadCheck
) -> None:
    """Whether it stood before or lands after, from any process, by any of the ways to write."""
    one, other = stores
    namespace = await make(one, now, check)
    for event in (add(now, counter="c0"), as_clear(add(now, counter="c1"))):
        for store in (one, other):
            await store.separate_writes.void(namespace, [event])
            assert await seen(store, namespace, event) == HIDDEN
            outcomes = await store.events.append(namespace, [event])
            assert outcomes[0] not in (NEW, REPLAYED, CONFLICT)
            assert await seen(one, namespace, event) == HIDDEN
        standing = event._replace(event_time_us=now + 1)
        await one.events.append(namespace, [standing])
        await other.separate_writes.void(namespace, [standing])
        await one.events.append(namespace, [standing])
        assert await seen(one, namespace, standing) == HIDDEN


@pytest.mark.parametrize("voiding", [PayloadCheck.GUARD, PayloadCheck.STRICT])
async def test_a_void_holds_while_the_payload_check_changes(
    stores: Stores, now: int, voiding: PayloadCheck
) -> None:
    """Writes in the old way, before or after the void, stay hidden."""
    one, other = stores
    namespace = await make(one, now, voiding)
    landing = PayloadCheck.STRICT if voiding is PayloadCheck.GUARD else PayloadCheck.GUARD
    settings = replace(namespace.settings, payload_check=landing)
    otherwise = replace(namespace, settings=settings)
    before, after = add(now, counter="before"), add(now, counter="after")
    await other.events.append(otherwise, [before])
    await one.separate_writes.void(namespace, [before, after])
    await other.events.append(otherwise, [after, before])
    strict = namespace if voiding is PayloadCheck.STRICT else otherwise
    assert list(await one.events.append(strict, [before, after])) == [Written.LATE] * 2
    for event in (before, after):
        assert await seen(one, namespace, event) == HIDDEN


async def test_strict_outcomes_are_exact_between_processes(
    stores: Stores, strict: Namespace, now: int
) -> None:
    """One of many concurrent sends is new, one payload is stored, and all outcomes agree."""
    sends = [(store, add(now, number=1, delta=1 + n % 2)) for n in range(4) for store in stores]
    appended = await asyncio.gather(
        *(store.events.append(strict, [event]) for store, event in sends)
    )
    (standing,) = await stores[0].events.find(strict, [add(now)])
    assert standing is not None
    outcomes = [outcome for (outcome,) in appended]
    assert outcomes.count(NEW) + outcomes.count(UNVERIFIED) >= 1
    for (_, event), outcome in zip(sends, outcomes, strict=True):
        # If two processes contend, a send may fail: its token is resolved later.
        if not isinstance(outcome, UnavailableError):
            assert (outcome is CONFLICT) == (event.delta != standing.delta)
    assert outcomes.count(NEW) <= 1


async def test_strict_rows_of_one_partition_share_a_compare_and_set(
    stores: Stores, strict: Namespace, now: int
) -> None:
    """Also if some of them exist: they are replays, and the other rows are written."""
    store, _ = stores
    bucket = nonces_per_bucket()[0]
    events = [Event("c", now + n, bucket, 0, n) for n in range(20)]
    await store.events.append(strict, [*events[3:5], events[7]._replace(delta=99)])
    with Statements(store) as sent:
        appended = await asyncio.gather(*(store.events.append(strict, [each]) for each in events))
    outcomes = [outcome for (outcome,) in appended]
    expected = [NEW] * 20
    expected[3:5], expected[7] = [REPLAYED] * 2, CONFLICT
    assert outcomes == expected
    assert len(sent.sizes) == 2
    found = await store.events.find(strict, events)
    assert [each and each.delta for each in found] == [*range(7), 99, *range(8, 20)]


async def test_a_strict_insert_that_timed_out_is_run_again(
    stores: Stores, strict: Namespace, now: int
) -> None:
    """The stored row may be its own: unknown. If it was not stored, it is new."""
    store, other = stores
    mine, theirs = add(now, counter="a"), add(now, delta=2, counter="b")
    await other.events.append(strict, [mine, theirs])
    failed: list[Any] = []

    def fault(statement: Any) -> Exception | None:
        # The first time of each partition.
        name = str(statements_of(statement)[0][1])
        if name in failed:
            return None
        failed.append(name)
        error: Exception = cassandra.OperationTimedOut()
        return error

    with Statements(store, fault):
        events = [mine, theirs._replace(delta=3), add(now, counter="d")]
        outcomes = await store.events.append(strict, events)
    assert list(outcomes) == [UNVERIFIED, CONFLICT, NEW]


async def test_a_strict_insert_that_fails_for_good_says_so(
    stores: Stores, strict: Namespace, now: int
) -> None:
    """In the place of its event; nothing is guessed."""
    store, _ = stores
    await store.events.append(strict, [add(now, 9)])
    with Statements(store, lambda _: cassandra.OperationTimedOut()):
        (outcome,) = await store.events.append(strict, [add(now)])
    assert isinstance(outcome, WriteTimeoutError)


async def test_only_what_is_compared_and_set_is_read_serially(
    stores: Stores, strict: Namespace, now: int
) -> None:
    """SERIAL reads contend, and plainly written items do not need them."""
    store, _ = stores
    items = [
        add(now, number, counter="atomic")._replace(item_key=1, atom=b"all") for number in (1, 2)
    ]
    await store.events.append_atomic(strict, items)
    levels: list[int] = []

    def note(statement: Any) -> None:
        levels.append(statement.consistency_level)

    with Statements(store, note):
        assert list(await store.events.find(strict, items)) == items
        assert await store.decisions.decided(strict, items) is None
        await store.events.append_atomic(strict, items)
    assert ConsistencyLevel.SERIAL not in levels
    single = add(now, 3)
    await store.events.append(strict, [single])
    with Statements(store, note):
        assert list(await store.events.find(strict, [single, *items])) == [single, *items]
    assert levels.count(ConsistencyLevel.SERIAL) == 1


async def test_a_decision_is_read_serially_over_several_data_centers(
    stores: Stores, strict: Namespace, now: int
) -> None:
    """A quorum of one data center may miss a half-done compare-and-set."""
    store, _ = stores
    levels: list[int] = []
    with (
        Statements(store, lambda statement: levels.append(statement.consistency_level)),
        patch.object(store.session.state_of(strict.dataset), "is_spread", True),
    ):
        assert await store.decisions.decided(strict, [add(now, 1)]) is None
    assert levels == [ConsistencyLevel.SERIAL]


async def test_a_serial_read_that_lost_to_others_is_run_again(
    stores: Stores, strict: Namespace, now: int
) -> None:
    """It times out if many contend for one row."""
    store, _ = stores
    await store.events.append(strict, [add(now)])
    faults = iter([cassandra.ReadTimeout("planted", consistency=8, required_responses=1)] * 2)

    def fault(statement: Any) -> Exception | None:
        return next(faults, None)

    with Statements(store, fault) as sent:
        assert list(await store.events.find(strict, [add(now)])) == [add(now)]
    assert len(sent.sizes) == 3


async def test_small_windows_of_many_counters_share_a_statement(
    stores: Stores, guard: Namespace, now: int
) -> None:
    """Their rows are read and summed here; a partition with many rows the servers sum, exactly."""
    store, _ = stores
    window_us = now - now % (10 * SECOND)
    names = [f"c{n}" for n in range(PARTITIONS_MAX // DATASET.event_buckets)]
    bucket = nonces_per_bucket()[0]
    events = [add(now, n, n, name) for n, name in enumerate(names)]
    many = [Event("c3", now + n, bucket, 1, INT64_MAX) for n in range(ROWS_MAX)]
    await store.events.append(guard, events + many[1:])
    wanted = [(name, window_us) for name in names]
    expected = [Fold(False, n) for n in range(len(names))]
    expected[3] = Fold(False, 3 + (ROWS_MAX - 1) * INT64_MAX)
    for statements in (1, 2):
        with Statements(store) as sent:
            assert list(await store.events.sums(guard, wanted)) == expected
        assert len(sent.sizes) == statements
        await store.events.append(guard, many[:1])
        expected[3] = Fold(False, 3 + ROWS_MAX * INT64_MAX)


async def test_a_clear_among_many_rows_erases_across_partitions(
    stores: Stores, guard: Namespace, now: int
) -> None:
    """In a partition that the servers sum, or in one that is read row by row."""
    store, _ = stores
    window_us = now - now % (10 * SECOND)
    first, second, *_ = nonces_per_bucket()
    for name, cleared_in in (("a", first), ("b", second)):
        events = [Event(name, now + n, first, 0, 1) for n in range(2 * ROWS_MAX)]
        events.append(Event(name, now + ROWS_MAX, cleared_in, 1, 0, clear=True))
        events.append(Event(name, now, second, 0, 1_000))
        await store.events.append(guard, events)
        expected = Fold(True, ROWS_MAX - 1)
        assert list(await store.events.sums(guard, [(name, window_us)])) == [expected]
        assert list(await store.events.tails(guard, [(name, window_us - 1)])) == [expected]


async def test_a_table_that_goes_under_a_sum_is_an_error(
    stores: Stores, guard: Namespace, now: int
) -> None:
    """Each sum and tail is whole or an error; then the slices are read again."""
    one, other = stores
    first, *_ = await one.control.slices(DATASET)
    at_us = first.end_us - 5 * SECOND
    window_us = at_us - at_us % (10 * SECOND)
    await one.events.append(guard, [add(at_us, n) for n in range(50)])
    answers: list[Fold] = []

    async def read() -> None:
        while True:
            answers.extend(await other.events.sums(guard, [("c", window_us)]))
            answers.extend(await other.events.tails(guard, [("c", at_us - 1)]))

    readers = [asyncio.create_task(read()) for _ in range(4)]
    await eventually(lambda: len(answers) >= 20, "twenty reads")
    await one.control.drop_slice(DATASET, first.start_us)
    errors = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(error, UnavailableError) for error in errors)
    assert set(answers) == {Fold(False, 50)}
    for _ in range(2):
        with pytest.raises(SliceMissingError):
            await other.events.find(guard, [add(at_us)])
    with pytest.raises(SliceMissingError):
        await other.events.tails(guard, [("c", at_us - 1)])


async def test_voids_do_not_end_a_page(stores: Stores, strict: Namespace, now: int) -> None:
    """Void rows keep their places and count for nothing: a page is full if there are more."""
    store, _ = stores
    bucket = nonces_per_bucket()[0]
    events = [Event("c", now + n // 2, bucket, n % 2, n) for n in range(24)]
    await store.events.append(strict, events)
    gone = [each for each in events if each.item_key == 0 and each.delta >= 6]
    await store.separate_writes.void(strict, gone)
    left = ordered([each for each in events if each not in gone])
    for limit in (1, 3, 5, 100):
        found: list[Event] = []
        while True:
            page = await store.events.scan(
                strict,
                "c",
                EventPage(Span(0, now + MINUTE), limit=limit, before=found[-1] if found else None),
            )
            found += page
            if len(page) < limit:
                break
        assert found == left
