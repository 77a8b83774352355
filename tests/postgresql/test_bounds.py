"""A bounded add sees all that is committed before; without each of its rules it passes a bound."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any, Final
from unittest.mock import AsyncMock, patch

import asyncpg
import pytest

from counter.bounds import (
    Bounds,
    bounds_of,
    is_refusal,
    payload_of,
    refusal,
    refusal_in,
    refused_atom,
    terms_of,
)
from counter.clock import SystemClock
from counter.core.read import CountReader
from counter.errors import StoreUnavailableError, UnavailableError, WriteTimeoutError
from counter.limits import MINUTE, SECOND
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.store import PostgresqlStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import WINDOW, add, atomic, clear
from counter.testing.service_cases import Process
from counter.types import Decision, Event, Namespace, Outcome, Written
from tests.postgresql.conftest import World
from tests.postgresql.pair import Pair
from tests.postgresql.test_faults import added, service
from tests.support.postgresql import ClockedStore
from tests.support.waiting import eventually

REACHED: Final = Written.BOUND_REACHED
LOCK: Final = "PERFORM lock_counts(p_namespace, p_counter);"
DECIDE: Final = (
    "refused := refusals(p_dataset, p_namespace, p_counter, p_time, p_id, p_item, p_delta,"
    " p_shard,\n            p_clear, p_atom, is_late);"
)
OVERWRITE: Final = (
    "ON CONFLICT (dataset, namespace, counter, event_time, event_id, item)"
    " DO UPDATE SET (delta, atom) = (SELECT excluded.delta, excluded.atom)"
)


def bounded(number: int, delta: int = 1, name: str = "c", **bounds: int) -> Event:
    terms = terms_of(delta, Bounds(**(bounds or {"at_most": 10})))
    return add(name, number=number, delta=delta)._replace(atom=terms)


async def _append(world: World, *events: Event) -> list[Written | UnavailableError]:
    return list(await world.store.events.append(world.namespace, events))


@asynccontextmanager
async def _uncommitted(
    world: World, *events: Event, keeps_bounds: bool = True
) -> AsyncIterator[Any]:
    """An append that commits when the caller says so."""
    connection = await asyncpg.connect(world.dsn)
    transaction = connection.transaction()
    await transaction.start()
    columns = [list(column) for column in zip(*events, strict=True)]
    names, times, ids, items, deltas, clears, atoms = columns
    await connection.fetch(
        "SELECT counter.append($1, $2, '{}', $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        *(world.namespace.dataset.id, world.namespace.id, names, times, ids, items, deltas),
        *([0] * len(names), clears, atoms, keeps_bounds),
    )
    yield transaction
    await connection.close()


async def _with_bounds(world: World, **bounds: int) -> Namespace:
    settings = replace(world.namespace.settings, bounds=Bounds(**bounds))
    changed = world.namespace.changed(settings, 0)
    assert await world.store.control.update_namespace(world.namespace, changed)
    return replace(changed, version=world.namespace.version + 1)


async def _the_last_room_is_taken_once(world: World) -> bool:
    """An append waits for another one that counts the same counter, and counts it, too."""
    async with _uncommitted(world, bounded(1, 10)) as first:
        second = asyncio.create_task(_append(world, bounded(2)))
        waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        for _ in range(10_000):
            if second.done() or await world.database.value(waits):
                break
        await first.commit()
        return await second == [REACHED]


async def _what_is_stored_takes_no_room_again(world: World) -> bool:
    await _append(world, bounded(1, 5))
    return await _append(world, bounded(1, 5), bounded(2, 5)) == [Written.REPLAYED, Written.NEW]


async def _what_comes_twice_takes_no_room_again(world: World) -> bool:
    outcomes = await _append(world, bounded(1, 5), bounded(1, 5), bounded(2, 5))
    return outcomes == [Written.NEW, Written.REPLAYED, Written.NEW]


async def _a_refusal_is_for_ever(world: World) -> bool:
    """Whether there is room when the add is sent again, or its namespace has no bound any more."""
    await _append(world, add(delta=10))
    items = [each._replace(atom=(each.atom or b"") + terms_of(1, Bounds(at_most=10))) for each in
             atomic(("c", 1), number=3)]  # fmt: skip
    outcomes = []
    for _ in range(2):
        outcomes += await _append(world, bounded(2))
        outcomes.append(await world.store.events.append_atomic(world.namespace, items))
        await world.store.events.append(world.namespace, [add(number=4, delta=-10)])
    return outcomes == [REACHED] * 4


async def _a_process_of_before_keeps_the_bound(world: World) -> bool:
    """Its copy of the namespace has none."""
    await _with_bounds(world, at_most=0)
    [outcome] = await _append(world, add())
    both = await world.store.events.append_atomic(world.namespace, atomic(("a", 1), ("b", 1)))
    return outcome is both is REACHED


async def _a_bound_holds_when_it_is_answered(world: World) -> bool:
    """An append that did not know it has ended by then."""
    async with _uncommitted(world, add(), keeps_bounds=False) as append:
        change = asyncio.create_task(_with_bounds(world, at_most=0))
        waits = await world.waits(change)
        await append.commit()
        await change
        return waits


async def _a_cancelled_refusal_counted_nothing(world: World) -> bool:
    """Even if a late token of it was decided, as applied."""
    event = bounded(1, 11)
    assert await _append(world, event) == [REACHED]
    applied = Decision(Outcome.APPLIED, b"print")
    await world.store.decisions.decide(world.namespace, [event], applied)
    proposed = Decision(Outcome.CANCELLED_VOID, b"print")
    decided = await world.store.decisions.cancel(world.namespace, [event], proposed)
    assert await world.store.events.find(world.namespace, [event]) == [None]
    return decided.outcome is Outcome.CANCELLED_VOID


async def _a_cancelled_sum_gives_room_back(world: World) -> bool:
    """Before a worker has done the recount."""
    one, event = Process(world.store, world.clock), bounded(1, 10)
    await _append(world, event, bounded(2, -1))
    world.clock.advance(5 * MINUTE)
    await one.roll_up()
    proposed = Decision(Outcome.CANCELLED_VOID, b"print")
    await world.store.decisions.cancel(world.namespace, [event], proposed)
    later = [bounded(3, 12), bounded(4, 11)]
    later = [each._replace(event_time_us=world.clock.now_us()) for each in later]
    return await _append(world, *later) == [REACHED, Written.NEW]


async def _a_clear_in_the_tail_gives_room_back(world: World) -> bool:
    """One that is committed, and one of the same append."""
    early = bounded(9, 5)
    at = early.event_time_us
    await _append(world, early, clear(at=at + 1, number=8))
    events = [bounded(number, 10) for number in (1, 2, 3)]
    first, second, third = (each._replace(event_time_us=at + 2 + n) for n, each in
                            enumerate(events))  # fmt: skip
    sent = [first, second, clear(at=at + 3, number=7), third, bounded(5, 99)]
    new = Written.NEW
    return await _append(world, *sent) == [new, REACHED, new, new, new]


async def _a_clear_in_the_call_takes_room_away(world: World) -> bool:
    """It erases what was taken away earlier."""
    at = world.clock.now_us()
    await _append(world, add(at=at, number=1, delta=-10), add(at=at + 2, number=2, delta=10))
    sent = clear(at=at + 1, number=3), bounded(4)._replace(event_time_us=at + 3)
    return await _append(world, *sent) == [Written.NEW, REACHED]


async def _what_is_taken_away_leaves_the_least(world: World) -> bool:
    await _append(world, add(number=1))
    outcomes = [await _append(world, bounded(number, -1, at_least=0)) for number in (2, 3)]
    return outcomes == [[Written.NEW], [REACHED]]


Scenario = Callable[[World], Awaitable[bool]]
SCENARIOS: list[Scenario] = [
    _the_last_room_is_taken_once,
    _what_is_stored_takes_no_room_again,
    _what_comes_twice_takes_no_room_again,
    _a_refusal_is_for_ever,
    _a_process_of_before_keeps_the_bound,
    _a_bound_holds_when_it_is_answered,
    _a_cancelled_refusal_counted_nothing,
    _a_cancelled_sum_gives_room_back,
    _a_clear_in_the_tail_gives_room_back,
    _a_clear_in_the_call_takes_room_away,
    _what_is_taken_away_leaves_the_least,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__.strip("_"))
async def test_a_bound_holds(world: World, scenario: Scenario) -> None:
    assert await scenario(world)


@pytest.mark.parametrize(
    ("scenario", "function", "changes"),
    [
        pytest.param(
            _the_last_room_is_taken_once, "append", [(LOCK, "PERFORM 1;")], id="no lock"
        ),
        pytest.param(
            _the_last_room_is_taken_once,
            "append",
            [(DECIDE, "PERFORM 1;"), (LOCK, DECIDE + LOCK)],
            id="count before lock",
        ),
        pytest.param(
            _what_is_stored_takes_no_room_again,
            "refusals",
            [("e.is_stored OR ", "")],
            id="identity after bound",
        ),
        pytest.param(
            _what_comes_twice_takes_no_room_again,
            "refusals",
            [("GROUP BY 1, 2, 3, 4", "GROUP BY 1, 2, 3, 4, u.place")],
            id="each identity in a call is decided",
        ),
        pytest.param(
            _a_refusal_is_for_ever,
            "outcomes",
            [("CASE WHEN is_refusal(s.atom) THEN 4 ELSE 1 END", "1")],
            id="a refusal is replayed as an add",
        ),
        pytest.param(
            _a_refusal_is_for_ever,
            "append_atomic",
            [("CASE WHEN why IS NULL THEN p_atom ELSE refused_atom(0, p_atom, why) END", "p_atom")],
            id="a header without its refusal",
        ),
        pytest.param(
            _a_refusal_is_for_ever,
            "append",
            [("ON CONFLICT DO NOTHING", OVERWRITE)],
            id="a refusal is decided again",
        ),
        pytest.param(
            _a_process_of_before_keeps_the_bound,
            "late",
            [("n.settings ? 'bounds' AND NOT keeps_bounds", "false")],
            id="a plain append ignores bounds",
        ),
        pytest.param(
            _a_cancelled_sum_gives_room_back,
            "counts_of",
            [("has_pending AND EXISTS", "false AND EXISTS")],
            id="no pending recount",
        ),
        pytest.param(
            _a_clear_in_the_tail_gives_room_back,
            "counts_of",
            [("FILTER (WHERE e.clear)", "FILTER (WHERE false)")],
            id="no clear in the tail",
        ),
        pytest.param(
            _a_clear_in_the_tail_gives_room_back,
            "refusals",
            [("ELSIF e.clear THEN", "ELSIF e.clear THEN CONTINUE;")],
            id="no clear in the call",
        ),
        pytest.param(
            _the_last_room_is_taken_once,
            "refusals",
            [("c.count + k.rise + ", "c.count + ")],
            id="at_most without the adds of the call",
        ),
        pytest.param(
            _what_is_taken_away_leaves_the_least,
            "refusals",
            [("c.count + k.fall + ", "c.count + ")],
            id="at_least without the adds of the call",
        ),
        pytest.param(
            _a_clear_in_the_call_takes_room_away,
            "refusals",
            [("k.has_clear OR ", "")],
            id="room as before a clear in the call",
        ),
        pytest.param(
            _a_cancelled_refusal_counted_nothing,
            "settle",
            [("WHEN is_refused THEN", "WHEN false THEN")],
            id="a cancelled refusal counted",
        ),
    ],
)  # fmt: skip
async def test_a_planted_bug_is_caught(
    world: World, scenario: Scenario, function: str, changes: Sequence[tuple[str, str]]
) -> None:
    for old, new in changes:
        await world.breaks(old, new, function)
    assert not await scenario(world)


async def test_a_change_of_bounds_without_the_wait_is_caught(world: World) -> None:
    with patch("counter.storage.postgresql.control.wait_for_appends", AsyncMock()):
        assert not await _a_bound_holds_when_it_is_answered(world)


async def test_a_change_of_bounds_that_is_sent_again_waits_too(world: World) -> None:
    """The answer to the first one may be lost."""
    async with _uncommitted(world, add(), keeps_bounds=False) as append:
        with patch("counter.storage.postgresql.control.wait_for_appends", AsyncMock()):
            world.namespace = await _with_bounds(world, at_most=0)
        change = asyncio.create_task(_with_bounds(world, at_most=0))
        assert await world.waits(change)
        await append.commit()
        await change


@pytest.mark.parametrize("seed", range(3))
async def test_stores_race_for_the_last_room(world: World, seed: int) -> None:
    """Over connections of their own; some adds are sent to both, and some have no bounds."""
    draw = Random(seed)
    other = ClockedStore(PostgresqlOptions(world.dsn), world.clock)
    await other.open()
    stores = (world.store.events, other.events)
    await asyncio.gather(*(each.append(world.namespace, [add("warm")]) for each in stores))
    for turn in range(10):
        names, most = [f"{turn}/{number}" for number in range(draw.choice((1, 3)))], 5
        events = [
            bounded(number, draw.choice((1, 2, -1)), draw.choice(names), at_least=0, at_most=most)
            for number in range(40)
        ]
        sent = [(store, draw.sample(events, 10)) for store in stores * 4]
        outcomes = await asyncio.gather(
            *(store.append(world.namespace, part) for store, part in sent)
        )
        stored = await world.store.events.find(world.namespace, events)
        refused = {event for event, each in zip(events, stored, strict=True) if each and each.atom
                   and is_refusal(each.atom)}  # fmt: skip
        for (_, part), found in zip(sent, outcomes, strict=True):
            for event, outcome in zip(part, found, strict=True):
                assert (outcome is REACHED) == (event in refused), (seed, turn, event, outcome)
        totals = [sum(each.delta for each in stored if each and each.counter == name)
                  for name in names]  # fmt: skip
        assert all(0 <= total <= most for total in totals), (seed, turn, totals)
        assert refused, (seed, turn)
    await other.close()


async def test_large_appends_wait_for_each_other_without_a_deadlock(world: World) -> None:
    """Of one counter, of many in any order, plain ones, and a rollup; with few locks each."""
    draw, tasks = Random(1), []
    names = [f"c{number}" for number in range(1_000)]
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = await world.database.value(deadlocks)
    events = [bounded(number, 1, name, at_most=4) for number, name in enumerate(names)]
    async with _uncommitted(world, *events) as first:
        held = await world.database.value(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        )
        assert held <= 65
        # They are of the table: no other program's small numbers, nor another schema's.
        classes = await world.database.rows(
            "SELECT DISTINCT classid = ANY (ARRAY['{s}.counters', '{s}.datasets']::regclass[])"
            " FROM pg_locks WHERE locktype = 'advisory'"
        )
        assert [each[0] for each in classes] == [True]
        await first.commit()
    for number in range(6):
        draw.shuffle(names)
        at = 1_000 * (number + 1)
        some = [bounded(at + place, 1, name, at_most=4) for place, name in enumerate(names)]
        if number % 3 == 1:
            some = [add(name, number=at + place, delta=0) for place, name in enumerate(names)]
        elif number % 3 == 2:
            some = [bounded(at + place, 1, "c1", at_most=4) for place in range(1_000)]
        tasks.append(world.store.events.append(world.namespace, some))
    process = Process(world.store, world.clock)
    await process.api.namespaces.refresh()
    await asyncio.gather(*tasks, process.worker.tick())
    assert await world.database.value(deadlocks) == before
    [fold] = await world.store.events.tails(world.namespace, [("c1", 0)])
    assert fold.total == 4


@pytest.mark.parametrize("seed", range(4))
async def test_the_count_that_decides_is_that_of_an_accurate_read(world: World, seed: int) -> None:
    """With windows that are rolled up, recounts that are pending, clears and cancels."""
    draw, world.namespace = Random(seed), replace(world.namespace)
    one = Process(world.store, world.clock)
    reader = CountReader(world.store, MemoryCache(world.clock), world.clock)
    sent: list[Event] = []
    for number in range(60):
        name, at = draw.choice("abc"), world.clock.now_us() - draw.randrange(WINDOW)
        action = draw.choice(("add", "add", "add", "clear", "cancel", "recount", "roll", "time"))
        if action == "add":
            sent.append(add(name, at, number, draw.randrange(-9, 10)))
            await _append(world, sent[-1])
        elif action == "clear" and draw.random() < 0.3:
            await _append(world, clear(name, at, number))
        elif action == "cancel" and sent:
            event = draw.choice(sent)
            proposed = Decision(Outcome.CANCELLED_VOID, b"%d" % number)
            await world.store.decisions.cancel(world.namespace, [event], proposed)
        elif action == "recount":
            await one.api.recount(world.namespace, name, 0, world.clock.now_us())
        elif action == "roll":
            await one.roll_up()
        elif action == "time":
            world.clock.advance(draw.choice((SECOND, WINDOW, MINUTE)))
        counts = await reader.read(world.namespace, ["a", "b", "c"], 0)
        rows = await world.database.rows(
            "SELECT name, count FROM {s}.counts_of($1, $2, $3, ARRAY[0, 0, 0])",
            *(world.namespace.dataset.id, world.namespace.id, ["a", "b", "c"]),
        )
        found = {name: int(count) for name, count in rows}
        assert found == {each.counter: each.count for each in counts}, (seed, number, action)


async def test_atoms_are_those_of_python(world: World) -> None:
    draw = Random(7)
    for _ in range(300):
        size = draw.choice((3, 2**31, 2**63 - 1))
        at_least, at_most, *others = (
            draw.choice((None, draw.randrange(-size, size))) for _ in range(4)
        )
        own, default = Bounds(at_least, at_most), Bounds(*others)
        delta = draw.randrange(-size, size)
        count = draw.choice((draw.randrange(-size, size), draw.randrange(-(2**100), 2**100)))
        atom: bytes | None = draw.choice((b"f" * 16, b"")) + terms_of(delta, own)
        if own == (None, None):
            atom = draw.choice((b"f" * 16, None))
        item = draw.randrange(100)
        why = refusal(count, delta, own, default)
        expected = None if why is None else refused_atom(delta, atom, why._replace(item=item))
        row = await world.database.row(
            "SELECT {s}.payload_of($1, false, $2), {s}.bound_in($2, 1), {s}.bound_in($2, 2),"
            " {s}.refused_atom($1, $2, {s}.refusal($3::text::numeric, $1, {s}.bound_in($2, 1),"
            " {s}.bound_in($2, 2), $4, $5, $6))",
            *(delta, atom, str(count), *default, item),
        )
        assert tuple(row) == (payload_of(delta, atom), *bounds_of(atom), expected)
        if expected is not None:
            [refused] = await world.database.row("SELECT {s}.is_refusal($1)", expected)
            assert refused
            assert refusal_in(expected) == (why and why._replace(item=item))


async def test_each_scenario_holds_with_a_plan_for_each_call(world: World) -> None:
    """As many slices need it."""
    for function in ("refusals", "refusal_of_atomic"):
        await world.breaks("count(*) > 64", "count(*) > 0", function)
    assert await _what_is_stored_takes_no_room_again(world)
    assert await world.store.events.append_atomic(
        world.namespace,
        [each._replace(atom=(each.atom or b"") + terms_of(1, Bounds(at_most=10)))
         for each in atomic(("c", 1), number=3)],
    ) is REACHED  # fmt: skip


async def test_after_a_failover_no_bound_is_passed_and_answers_stay(pair: Pair) -> None:
    """Adds that timed out may be on the primary alone, and be decided again by the standby."""
    await pair.begin()
    async with service(pair.dsn) as rest:
        await added(rest, "before")
    clock = SystemClock()
    store = PostgresqlStore(PostgresqlOptions(pair.dsn), clock)
    await store.open()
    [namespace] = await store.control.namespaces()
    now_us = clock.now_us()
    events = [
        bounded(number, delta)._replace(event_time_us=now_us)
        for number, delta in ((1, 6), (2, 5), (3, 4), (4, 3))
    ]
    answered = await store.events.append(namespace, events[:2])
    assert answered == [Written.NEW, REACHED]
    pair.standby.pause()
    for event in events[2:]:
        with pytest.raises(WriteTimeoutError):
            await store.events.append(namespace, [event])
    pair.primary.pause()
    pair.standby.resume()
    await asyncio.to_thread(pair.fail_over)
    found: list[Sequence[Written | UnavailableError]] = []

    async def has_answered() -> bool:
        try:
            found.append([(await store.events.append(namespace, [each]))[0] for each in events])
        except StoreUnavailableError:
            return False
        return len(found) == 2

    await eventually(has_answered, "the standby is found")
    assert found[1][:2] == [Written.REPLAYED, REACHED]
    assert sorted(found[1][2:], key=str) == [REACHED, Written.REPLAYED]
    stored = await store.events.find(namespace, events)
    assert sum(each.delta for each in stored if each) in (9, 10)
    await store.close()
