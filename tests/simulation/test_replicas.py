"""The adapter's consistency levels suffice: acknowledged and voided events stay so."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from counter.capabilities import PartitionSize
from counter.core.read import EMPTY_HEAD
from counter.core.resolve import Resolver
from counter.errors import InvalidBodyError, UnavailableError, WriteTimeoutError
from counter.limits import HOUR, MINUTE, SECOND, SIZES_KEPT_SLICES
from counter.storage.cassandra import connection
from counter.storage.cassandra.options import Placement
from counter.testing.cases import (
    DATASET,
    NOW,
    SETTINGS,
    T0,
    WINDOW,
    add,
    atomic,
    clear,
    marks,
    nonce,
)
from counter.testing.rollup_cases import apply, end, head, row, update
from counter.types import (
    AtomicMark,
    Checkpoint,
    Decision,
    Event,
    Head,
    Mark,
    Namespace,
    Outcome,
    PayloadCheck,
    Pending,
    Reservation,
    Written,
)
from counter.windows import window_of
from tests.simulation.node import Write
from tests.simulation.processes import Processes, plain_namespace
from tests.simulation.store import SimulatedStore

#: So many reads each ask two replicas of three, whichever: each of them many times.
READS = 20

Do = Callable[[SimulatedStore, Namespace], Awaitable[object]]

EVENT = add(delta=7)
#: How earlier versions decided.
INSERTED = (
    "INSERT INTO {keyspace}.resolutions"
    " (namespace, counter, event_time, event_id, outcome, fingerprint, op)"
    " VALUES (?, ?, ?, ?, ?, ?, ?) IF NOT EXISTS USING TTL ?"
)
#: The start of the window of NOW.
NOW_WINDOW = window_of(NOW, SETTINGS.rollup_window_us)
ITEMS = atomic(("c", 1), ("d", 2))
ROLLED_UP = update(row(1, 7), through=1, count=7)


async def found(store: SimulatedStore, namespace: Namespace) -> Event | None:
    (event,) = await store.events.find(namespace, [EVENT])
    return event


async def found_items(store: SimulatedStore, namespace: Namespace) -> list[Event | None]:
    return list(await store.events.find(namespace, ITEMS))


#: By kind of data: the write, the read, and the result.
KEPT: dict[str, tuple[Do, Do, object]] = {
    "events": (lambda store, ns: store.events.append(ns, [EVENT]), found, EVENT),
    "items": (lambda store, ns: store.events.append_atomic(ns, ITEMS), found_items, ITEMS),
    "marks": (
        lambda store, ns: store.separate_writes.mark(ns, [Mark(NOW, "c")]),
        marks,
        [Mark(NOW, "c")],
    ),
    "counts": (
        lambda store, ns: apply(store, ns, ROLLED_UP),
        head,
        Head(Checkpoint(end(1), 7), Checkpoint(0, 0)),
    ),
}


@pytest.fixture
def processes() -> Processes:
    return Processes()


@pytest.mark.parametrize("table", KEPT)
@pytest.mark.parametrize("deaf", [0, 1, 2])
async def test_every_read_sees_data_of_two_replicas(
    processes: Processes, table: str, deaf: int
) -> None:
    write, read, expected = KEPT[table]
    store = await processes.another()
    namespace = await plain_namespace(store)
    with processes.heard_by(*{0, 1, 2} - {deaf}):
        await write(store, namespace)
    assert [await read(store, namespace) for _ in range(READS)] == [expected] * READS


async def test_a_write_that_one_replica_has_in_time_is_not_acknowledged(
    processes: Processes,
) -> None:
    store = await processes.another()
    namespace = await plain_namespace(store)
    # In perfect weather all replicas have it at once.
    processes.cluster.weather.missed = 1e-9
    with patch.object(processes.cluster, "_send", lambda *_: [0, HOUR, HOUR]):
        (outcome,) = await store.events.append(namespace, [EVENT])
    assert isinstance(outcome, UnavailableError)


async def test_a_recount_is_pending_until_its_row_is_on_enough_replicas(
    processes: Processes,
) -> None:
    """Otherwise a read that repairs only the head would hide the recount from readers."""
    store = await processes.another()
    namespace = await plain_namespace(store)
    pending = Pending(T0 + WINDOW, NOW)
    await apply(store, namespace, update(row(1, 7), through=1, count=7))
    await store.recounts.write_pending(namespace, [("c", pending)])
    recounted = update(row(1, 0), through=4, done=(pending,))
    cluster = processes.cluster
    cluster.weather.missed = 1e-9

    def to_one(write: Write, *_: object) -> list[int]:
        cluster.nodes[0].apply(write)
        return [0, HOUR, HOUR]

    on_one = patch.object(cluster, "_send", to_one)
    with on_one, pytest.raises(UnavailableError):
        await apply(store, namespace, recounted)
    assert {(await head(store, namespace) or EMPTY_HEAD).pending for _ in range(READS)} == {
        (pending,)
    }
    await apply(store, namespace, recounted)
    assert (await head(store, namespace) or EMPTY_HEAD).pending == ()


#: Writes that are over only when two replicas have them.
WRITES: dict[str, Do] = {
    "append_atomic": lambda store, ns: store.events.append_atomic(ns, ITEMS),
    "rewrite": lambda store, ns: store.separate_writes.rewrite(ns, [EVENT]),
    "void": lambda store, ns: store.separate_writes.void(ns, [EVENT]),
    "void_items": lambda store, ns: store.separate_writes.void(ns, ITEMS),
    "mark_atomic": lambda store, ns: store.separate_writes.mark_atomic(
        ns, AtomicMark(NOW, tuple(ITEMS))
    ),
    "write_pending": lambda store, ns: store.recounts.write_pending(ns, [("c", Pending(T0, T0))]),
    "apply": lambda store, ns: apply(store, ns, ROLLED_UP),
    "advance": lambda store, ns: store.rollups.advance(ns, [0], NOW),
    "drop_marks": lambda store, ns: store.rollups.drop_marks(ns, 0, NOW),
    "decide": lambda store, ns: store.decisions.decide(ns, [EVENT], Decision(Outcome.VOID, b"")),
    "cancel": lambda store, ns: store.decisions.cancel(
        ns, [EVENT], Decision(Outcome.CANCELLED, b"")
    ),
    "reserve": lambda store, ns: store.decisions.reserve(
        ns, nonce(1), Reservation(NOW, NOW + HOUR)
    ),
}


@pytest.mark.parametrize("write", WRITES)
async def test_a_write_that_too_few_replicas_take_fails(processes: Processes, write: str) -> None:
    store = await processes.another()
    namespace = await plain_namespace(store)
    # Its earlier reads are known.
    await store.events.append(namespace, [EVENT])
    await store.separate_writes.mark(namespace, [Mark(NOW, "c")])
    for node in processes.cluster.nodes[:2]:
        node.up = False
    with pytest.raises(UnavailableError):
        await WRITES[write](store, namespace)


@pytest.mark.parametrize("cut", [(0, 1), (1, 0)], ids=["request", "answer"])
async def test_a_write_that_a_data_center_did_not_acknowledge_fails(cut: tuple[int, int]) -> None:
    """A read in that data center might miss it."""
    processes = Processes((0, 0, 1), Placement(write_consistency="EACH_QUORUM"))
    store = await processes.another()
    namespace = await plain_namespace(store)
    await store.events.append(namespace, [EVENT])
    processes.cluster.weather.cut = cut
    (outcome,) = await store.events.append(namespace, [EVENT])
    assert isinstance(outcome, UnavailableError)
    # Its own data center has it.
    assert [each.total for each in await store.events.sums(namespace, [("c", NOW_WINDOW)])] == [7]


@pytest.mark.parametrize("levels", [("EACH_QUORUM", "LOCAL_QUORUM"), ("ALL", "LOCAL_QUORUM")])
async def test_an_event_found_in_one_data_center_counts_in_each(levels: tuple[str, str]) -> None:
    """Regression: an atomic add that was whole in one data center counted in part in the other."""
    processes = Processes((0, 0, 1), Placement((("", 1),), *levels))
    stores = [await processes.another(center) for center in (0, 1)]
    namespace = await plain_namespace(stores[0])
    with processes.heard_by(0, 1):
        await stores[0].events.append(namespace, ITEMS)
    await stores[0].events.append(namespace, ITEMS[1:])
    assert list(await stores[0].events.find(namespace, ITEMS)) == ITEMS
    for store in stores:
        sums = await store.events.sums(namespace, [(each, NOW_WINDOW) for each in "cd"])
        assert [each.total for each in sums] == [1, 2]


async def test_a_decision_and_a_key_known_to_one_data_center_hold_in_the_other() -> None:
    """The commit of the first never came to the other: a read there would see nothing."""
    processes = Processes((0, 0, 1), Placement((("", 1),), "EACH_QUORUM", "LOCAL_QUORUM"))
    here, there = [(await processes.another(center)).decisions for center in (0, 1)]
    store = await processes.another()
    namespace = await plain_namespace(store)
    voided, applied = Decision(Outcome.VOID, b"0"), Decision(Outcome.APPLIED, b"1")
    later_us = NOW + MINUTE
    for number in range(READS):
        key, event = nonce(number), add(number=number)
        with processes.heard_by(0, 1):
            await here.decide(namespace, [event], voided)
            await here.reserve(namespace, key, Reservation(NOW, NOW + HOUR))
        assert await there.decide(namespace, [event], applied) == voided
        assert await there.reserve(namespace, key, Reservation(later_us, later_us + HOUR)) == NOW


#: The cut, and the data center of the late token's request.
ASKED = list(product([None, (0, 1), (1, 0)], [0, 1]))


@pytest.mark.parametrize("levels", [("EACH_QUORUM", "LOCAL_QUORUM"), ("QUORUM", "QUORUM")])
@pytest.mark.parametrize("heard_by", [(), (0, 1), (2,), (0, 1, 2)], ids=str)
async def test_two_data_centers_give_one_answer_about_a_late_token(
    heard_by: tuple[int, ...], levels: tuple[str, str]
) -> None:
    """Whichever has its event, and whichever is asked first, during any cut."""
    processes = Processes((0, 0, 1), Placement((("", 1),), *levels))
    stores = [await processes.another(center) for center in (0, 1)]
    settings = replace(SETTINGS, payload_check=PayloadCheck.OFF, accept_limit_us=MINUTE)
    namespace = await stores[0].control.create_namespace("tests", settings, NOW)
    assert namespace is not None
    tokens = [[add(number=number)] for number in range(len(ASKED) ** 2)]
    tokens += [atomic(("c", 1), ("d", 2), number=number) for number in range(len(ASKED) ** 2)]
    with processes.heard_by(*heard_by):
        for events in tokens:
            await stores[0].events.append(namespace, events)
    processes.clock.advance(5 * MINUTE)
    resolvers = [Resolver(store, processes.clock) for store in stores]
    answers = set()
    for events, asked in zip(tokens, 2 * list(product(ASKED, repeat=2)), strict=True):
        given = set()
        # At the end nothing is cut, and both are asked.
        for cut, center in (*asked, (None, 0), (None, 1)):
            processes.cluster.weather.cut = cut
            with suppress(UnavailableError), patch.object(connection, "_CAS_READS", 0):
                given.add(await resolvers[center].resolve(namespace, events))
        assert len(given) == 1, asked
        expected = events if given == {Outcome.APPLIED} else [None] * len(events)
        for store in stores:
            assert list(await store.events.find(namespace, events)) == expected, asked
        answers |= given
    if len(heard_by) == len(processes.cluster.nodes):
        assert answers == {Outcome.APPLIED}


@pytest.mark.parametrize("table", KEPT)
async def test_a_write_that_one_read_saw_all_later_reads_see(
    processes: Processes, table: str
) -> None:
    """It is on one replica, until a read has found it."""
    write, read, expected = KEPT[table]
    store = await processes.another()
    namespace = await plain_namespace(store)
    with processes.heard_by(1):
        await write(store, namespace)
    seen = [await read(store, namespace) for _ in range(READS)]
    first = seen.index(expected)
    assert seen[first:] == [expected] * (READS - first)


@pytest.mark.parametrize(
    "event", [EVENT, clear(), atomic(("c", 7))[0]], ids=["add", "clear", "item"]
)
async def test_a_voided_event_stays_hidden_whenever_it_lands(
    processes: Processes, event: Event
) -> None:
    """However late, and after replicas have tidied up."""
    store = await processes.another()
    namespace = await plain_namespace(store)
    await store.events.append(namespace, [event])
    await store.separate_writes.void(namespace, [event])
    for _ in range(2):
        assert list(await store.events.find(namespace, [event])) == [None]
        await store.events.append(namespace, [event])
        assert list(await store.events.find(namespace, [event])) == [None]
        processes.clock.advance(HOUR)
        for _ in range(READS):
            processes.cluster.compact()


@pytest.mark.parametrize("event", [EVENT, clear()], ids=["add", "clear"])
async def test_a_strict_write_that_lands_after_its_void_is_late(
    processes: Processes, event: Event
) -> None:
    """It may have been sent before the payload check was changed."""
    store = await processes.another()
    namespace = await plain_namespace(store)
    settings = replace(namespace.settings, payload_check=PayloadCheck.STRICT)
    strict = replace(namespace, settings=settings)
    await store.separate_writes.void(namespace, [event])
    for _ in range(2):
        assert list(await store.events.append(strict, [event])) == [Written.LATE]
        assert list(await store.events.find(namespace, [event])) == [None]
        processes.clock.advance(HOUR)
        processes.cluster.compact()


@pytest.mark.parametrize("centers", [(0, 0, 0), (0, 0, 1)], ids=["one", "two"])
async def test_strict_is_refused_only_if_replicas_are_in_two_data_centers(
    centers: Sequence[int],
) -> None:
    store = await Processes(centers, Placement(write_consistency="EACH_QUORUM")).another()
    strict = replace(SETTINGS, payload_check=PayloadCheck.STRICT)
    is_refused = pytest.raises(InvalidBodyError, match="strict needs QUORUM")
    with is_refused if 1 in centers else nullcontext():
        await store.control.create_namespace("strict", strict, NOW)


@pytest.mark.parametrize(("delta", "outcome"), [(7, Written.UNVERIFIED), (8, Written.CONFLICT)])
async def test_a_strict_write_that_timed_out_may_find_its_own_event(
    processes: Processes, delta: int, outcome: Written
) -> None:
    """The same payload may be that of its first attempt; another one is not."""
    store = await processes.another()
    namespace = await plain_namespace(store)
    settings = replace(namespace.settings, payload_check=PayloadCheck.STRICT)
    strict = replace(namespace, settings=settings)
    await store.events.append(strict, [EVENT])
    run, failures = store.simulated.run, [WriteTimeoutError("too few replicas answered")]

    async def run_late(statements: Sequence[Any], timeout_us: int | None = None) -> list[Any]:
        results = await run(statements, timeout_us)
        return [failures.pop()] if failures else results

    with patch.object(store.simulated, "run", run_late):
        assert list(await store.events.append(strict, [add(delta=delta)])) == [outcome]


async def test_a_size_that_is_recorded_again_after_it_expired_is_no_row_of_nulls(
    processes: Processes,
) -> None:
    """It has the write timestamp of the one that expired, which is a tombstone by then."""
    store = await processes.another()
    short = replace(DATASET, slice_us=MINUTE)
    size = PartitionSize(T0, short.time_bucket_us, 7_000, "n", "hot")
    await store.partition_sizes.record(short, size)
    assert list(await store.partition_sizes.recorded(short)) == [size]
    processes.clock.advance(SIZES_KEPT_SLICES * MINUTE)
    assert list(await store.partition_sizes.recorded(short)) == []
    for _ in range(READS):
        processes.cluster.compact()
    await store.partition_sizes.record(short, size)
    assert list(await store.partition_sizes.recorded(short)) == []
    larger = size._replace(size_bytes=7_001)
    await store.partition_sizes.record(short, larger)
    assert list(await store.partition_sizes.recorded(short)) == [larger]


async def test_a_key_that_is_remembered_for_less_than_before_can_be_reserved_again(
    processes: Processes,
) -> None:
    """The write of its first reservation lives longer than that of the second."""
    store = await processes.another()
    namespace = await plain_namespace(store)
    await store.decisions.reserve(namespace, nonce(1), Reservation(NOW, NOW + 24 * HOUR))
    processes.clock.advance(MINUTE)
    again_us = NOW + MINUTE
    assert (
        await store.decisions.reserve(
            namespace, nonce(1), Reservation(again_us, again_us + HOUR, replaces_us=NOW)
        )
        == again_us
    )
    processes.clock.advance(3 * HOUR)
    now_us = again_us + 3 * HOUR
    assert (
        await store.decisions.reserve(namespace, nonce(1), Reservation(now_us, now_us + HOUR))
        == now_us
    )


@pytest.mark.parametrize("first", ["UPDATE", "INSERT"])
async def test_a_cancelled_decision_is_forgotten_as_a_whole(
    processes: Processes, first: str
) -> None:
    """And not before. The row marker of an INSERT outlives nothing."""
    store = await processes.another()
    namespace = await plain_namespace(store)
    life_us = 2 * DATASET.retention_us + DATASET.slice_us
    applied, cancelled = Decision(Outcome.APPLIED, b"1"), Decision(Outcome.CANCELLED, b"1")
    if first == "UPDATE":
        await store.decisions.decide(namespace, [EVENT], applied)
    else:
        insert = await store.session.to_compare(namespace.dataset, INSERTED)
        key = (namespace.id, EVENT.counter, EVENT.event_time_us, EVENT.event_id)
        values = (*key, applied.outcome.value, applied.fingerprint, b"op", life_us // SECOND)
        await store.simulated.one(insert.bind(values))
    processes.clock.advance(HOUR)
    assert await store.decisions.cancel(namespace, [EVENT], cancelled) == cancelled
    processes.clock.advance(life_us - SECOND)
    assert await store.decisions.decided(namespace, [EVENT]) == cancelled
    processes.clock.advance(SECOND)
    assert await store.decisions.decided(namespace, [EVENT]) is None
    assert await store.decisions.decide(namespace, [EVENT], applied) == applied


async def test_all_that_decide_about_a_token_at_once_agree_that_it_is_cancelled(
    processes: Processes,
) -> None:
    """Although many of their writes time out, and are then done, left half done or not done."""
    one, other = [(await processes.another()).decisions for _ in range(2)]
    namespace = await plain_namespace(await processes.another())
    applied = Decision(Outcome.APPLIED, b"")
    counted, never = Decision(Outcome.CANCELLED, b""), Decision(Outcome.CANCELLED_VOID, b"")
    processes.cluster.weather.unreported = 0.5
    ends = set()
    with patch.object(connection, "_CAS_PAUSE_S", 0):
        for number in range(5 * READS):
            token = [add(number=number)]
            cancels = ((one, counted), (other, never), (one, never))
            decided, *cancelled = await asyncio.gather(
                other.decide(namespace, token, applied),
                *(store.cancel(namespace, token, proposed) for store, proposed in cancels),
            )
            ends.add((decided, *cancelled))
            assert await one.cancel(namespace, token, counted) == cancelled[0]
    # What was decided before a cancel says whether it counted.
    possible = [(applied, counted), (counted, counted), (never, never)]
    assert ends == {(decided, *[last] * len(cancels)) for decided, last in possible}
