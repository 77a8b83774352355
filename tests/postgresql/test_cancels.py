"""A cancel removes what it cancels, whatever is under way; without each of its parts it fails."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from unittest.mock import AsyncMock, patch

import asyncpg
import pytest

from counter.core.resolve import Resolver
from counter.errors import InvariantError, NamespaceUnknownError, StoreUnavailableError
from counter.limits import MINUTE
from counter.storage.postgresql.decisions import PostgresqlDecisions
from counter.storage.postgresql.fence import pass_fence, wait_for_appends
from counter.testing.cases import NOW, WINDOW, add, atomic
from counter.testing.service_cases import Process
from counter.types import OTHER_PAYLOAD, Decision, Event, Outcome, Span, Written
from counter.windows import fingerprint
from tests.postgresql.conftest import World

PRINT: Final = fingerprint([add()])
CANCELLED: Final = Decision(Outcome.CANCELLED, PRINT)
CANCELLED_VOID: Final = Decision(Outcome.CANCELLED_VOID, PRINT)
VOID: Final = Decision(Outcome.VOID, PRINT)
#: Columns that the recount of a cancel writes, and what it then never writes.
_MARK: Final = "start, counter, recount FROM recounted"
_PENDING: Final = "counter, recount, start FROM recounted"
_NEVER: Final = " WHERE false"
#: It takes the lock of appends.
_LATE: Final = "PERFORM late(p_dataset, p_namespace, '{}', '{}', '{}', '{}', true);"
WAIT: Final = "counter.storage.postgresql.decisions.wait_for_appends"


async def _cancel(world: World, *events: Event) -> Decision:
    """Cancel the token of *events*, or of an add."""
    events = events or (add(),)
    proposed = Decision(Outcome.CANCELLED_VOID, fingerprint(events))
    return await world.store.decisions.cancel(world.namespace, events, proposed)


async def _open_cancel(world: World, *events: Event) -> None:
    """Cancel in a process that crashes when the cancel is open."""
    with (
        patch(WAIT, AsyncMock(side_effect=StoreUnavailableError("gone"))),
        pytest.raises(StoreUnavailableError),
    ):
        await _cancel(world, *events)


async def _stored_count(world: World) -> int:
    [found] = await world.store.events.find(world.namespace, [add()])
    [fold] = await world.store.events.sums(world.namespace, [("c", NOW - NOW % WINDOW)])
    assert (found is not None) == bool(fold.total)
    return fold.total


async def _an_append_in_flight_counts_nothing(world: World) -> bool:
    """It found no decision before the cancel, and commits while the cancel waits."""
    connection, transaction = await world.stalled(add())
    cancel = asyncio.create_task(_cancel(world))
    waits = await world.waits(cancel)
    await transaction.commit()
    await connection.close()
    return waits and await cancel == CANCELLED and await _stored_count(world) == 0


async def _an_open_cancel_refuses(world: World) -> bool:
    """While it waits for an append, another append of the token is refused."""
    connection, transaction = await world.stalled(add("other"))
    cancel = asyncio.create_task(_cancel(world))
    assert await world.waits(cancel)
    outcomes = await world.store.events.append(world.namespace, [add()])
    await transaction.commit()
    await connection.close()
    return await cancel == CANCELLED_VOID and list(outcomes) == [Written.LATE]


async def _a_cancelled_token_is_refused(world: World) -> bool:
    """So is one that is decided as applied: a cancel that replaces this may be settled by a caller
    that waited for an earlier decision."""
    await world.store.events.append(world.namespace, [add()])
    await _cancel(world)
    await world.store.events.append(world.namespace, [add("d")])
    await world.store.decisions.decide(world.namespace, [add("d")], VOID)
    outcomes = await world.store.events.append(world.namespace, [add(), add("d"), add("e")])
    return list(outcomes) == [Written.LATE, Written.LATE, Written.NEW]


async def _a_sum_of_before_is_counted_again(world: World) -> bool:
    """A worker has summed the window when the event is removed, and writes its sum then."""
    one = Process(world.store, world.clock)
    await world.store.events.append(world.namespace, [add(), add(number=2, delta=4)])
    world.clock.advance(5 * MINUTE)
    apply = world.store.rollups.apply
    cancelled: list[Decision] = []

    async def late_apply(*arguments: Any, **named: Any) -> None:
        if not cancelled:
            cancelled.append(await _cancel(world))
        await apply(*arguments, **named)

    with patch.object(world.store.rollups, "apply", late_apply):
        await one.worker._namespaces.refresh()
        await one.worker.tick()
    assert cancelled == [CANCELLED]
    counts = await one.counts(world.namespace, "c")
    world.clock.advance(5 * MINUTE)
    await one.roll_up()
    counts += await one.counts(world.namespace, "c")
    [head] = await world.store.rollups.heads(world.namespace, ["c"])
    assert head is not None
    return counts == [4, 4] and head.checkpoint.count == 4 and not head.pending


async def _its_recount_is_in_no_closed_window(world: World) -> bool:
    """A worker passes windows while the cancel waits for the lock of appends."""
    await world.store.events.append(world.namespace, [add()])
    blocker = await asyncpg.connect(world.dsn)
    key = "('counter.datasets'::regclass::oid::bigint << 32) | $1"
    await blocker.fetch(f"SELECT pg_advisory_lock({key})", world.namespace.dataset.id)
    cancel = asyncio.create_task(_cancel(world))
    await world.until("SELECT count(*) FROM pg_locks WHERE NOT granted")
    world.clock.advance(5 * MINUTE)
    passed_us = await pass_fence(world.database)
    await blocker.fetch(f"SELECT pg_advisory_unlock({key})", world.namespace.dataset.id)
    await blocker.close()
    assert await cancel == CANCELLED
    marked_us = await world.database.value("SELECT start FROM {s}.marks")
    pending_us = await world.database.value("SELECT start FROM {s}.pending")
    return bool(marked_us == pending_us == passed_us - passed_us % WINDOW)


Scenario = Callable[[World], Awaitable[bool]]
SCENARIOS: list[Scenario] = [
    _an_append_in_flight_counts_nothing,
    _an_open_cancel_refuses,
    _a_cancelled_token_is_refused,
    _a_sum_of_before_is_counted_again,
    _its_recount_is_in_no_closed_window,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__.strip("_"))
async def test_a_cancel_holds(world: World, scenario: Scenario) -> None:
    assert await scenario(world)


@pytest.mark.parametrize(
    ("scenario", "function", "changes"),
    [
        pytest.param(
            _an_open_cancel_refuses,
            "late",
            [("earliest > d.resolved_through", "true")],
            id="appends look at no decision",
        ),
        pytest.param(
            _a_cancelled_token_is_refused,
            "late",
            [("r.event_id = e.id", "r.event_id = e.id AND r.outcome <> 'applied'")],
            id="an applied decision refuses nothing",
        ),
        pytest.param(
            _a_cancelled_token_is_refused,
            "late",
            [("r.event_id = e.id", "r.event_id = e.id AND r.outcome NOT LIKE 'cancelled%'")],
            id="a cancelled decision refuses nothing",
        ),
        pytest.param(
            _a_sum_of_before_is_counted_again,
            "remove_token",
            [(_MARK, _MARK + _NEVER)],
            id="no mark",
        ),
        pytest.param(
            _a_sum_of_before_is_counted_again,
            "remove_token",
            [(_PENDING, _PENDING + _NEVER)],
            id="nothing pending",
        ),
        pytest.param(
            _its_recount_is_in_no_closed_window,
            "settle",
            [
                (_LATE, "PERFORM 1;"),
                ("p_item, p_window);", f"p_item, p_window); {_LATE}"),
            ],
            id="clock before lock",
        ),
    ],
)
async def test_a_planted_bug_is_caught(
    world: World, scenario: Scenario, function: str, changes: Sequence[tuple[str, str]]
) -> None:
    for old, new in changes:
        await world.breaks(old, new, function)
    assert not await scenario(world)


async def test_a_cancel_without_the_wait_is_caught(world: World) -> None:
    with patch(WAIT, AsyncMock()):
        assert not await _an_append_in_flight_counts_nothing(world)


async def test_a_cancel_that_is_open_only_after_the_wait_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = PostgresqlDecisions._note

    async def waits_first(*arguments: Any) -> Decision:
        await wait_for_appends(world.database)
        with patch(WAIT, AsyncMock()):
            return await note(*arguments)

    monkeypatch.setattr(PostgresqlDecisions, "_note", waits_first)
    assert not await _an_open_cancel_refuses(world)


@pytest.mark.parametrize("was_counted", [True, False])
@pytest.mark.parametrize("first", ["cancel", "decide", "decided"])
async def test_an_open_cancel_that_a_crash_left_is_ended_by_the_next_call(
    world: World, first: str, was_counted: bool
) -> None:
    store, namespace = world.store.decisions, world.namespace
    if was_counted:
        await world.store.events.append(namespace, [add()])
    await _open_cancel(world)
    ends: dict[str, Callable[[], Awaitable[Decision | None]]] = {
        "cancel": lambda: _cancel(world),
        "decide": lambda: store.decide(namespace, [add()], VOID),
        "decided": lambda: store.decided(namespace, [add()]),
    }
    expected = CANCELLED if was_counted else CANCELLED_VOID
    for end in (ends[first], *ends.values()):
        assert await end() == expected
    assert await _stored_count(world) == 0


@pytest.mark.parametrize("first", [Outcome.APPLIED, Outcome.VOID])
async def test_an_open_cancel_remembers_the_decision_that_it_replaces(
    world: World, first: Outcome
) -> None:
    """Whether the token was counted, that says, not the look-up."""
    store, namespace = world.store.decisions, world.namespace
    await store.decide(namespace, [add()], Decision(first, PRINT))
    for _ in range(2):
        await _open_cancel(world)
    expected = CANCELLED if first is Outcome.APPLIED else CANCELLED_VOID
    assert await store.decided(namespace, [add()]) == expected


async def test_a_retry_of_the_add_whose_cancel_is_open_gets_one_answer(world: World) -> None:
    """Applied as long as its event counts; and cancelled if it never arrived."""
    store, namespace = world.store, world.namespace
    never = add("never")
    await store.events.append(namespace, [add()])
    await _open_cancel(world)
    await _open_cancel(world, never)
    resolver = Resolver(store, world.clock)
    assert await resolver.resolve(namespace, [add()]) is Outcome.APPLIED
    world.clock.advance(5 * MINUTE)
    assert await resolver.resolve(namespace, [never]) is Outcome.CANCELLED_VOID
    assert await resolver.resolve(namespace, [add()], cancels=True) is Outcome.CANCELLED
    assert await resolver.resolve(namespace, [add()]) is Outcome.CANCELLED
    assert await store.events.append(namespace, [add(), never]) == [Written.LATE, Written.LATE]


async def test_a_cancel_that_is_met_while_a_decision_waits_is_ended_as_one(world: World) -> None:
    """And the cancel adopts it; an append that both wait for has committed by then."""
    connection, transaction = await world.stalled(add())
    decide = world.store.decisions.decide(world.namespace, [add()], VOID)
    calls = [asyncio.create_task(decide)]
    assert await world.waits(calls[0])
    calls += [asyncio.create_task(_cancel(world)) for _ in range(2)]
    await world.until("SELECT count(*) FROM {s}.resolutions WHERE outcome LIKE 'cancelling%'")
    assert not any(each.done() for each in calls)
    await transaction.commit()
    await connection.close()
    assert await asyncio.gather(*calls) == [CANCELLED] * 3
    assert await world.database.value("SELECT count(*) FROM {s}.marks") == 1
    assert await _stored_count(world) == 0


async def test_one_of_two_concurrent_settlements_removes_the_event(world: World) -> None:
    """The second waits for the row of the decision."""
    await world.store.events.append(world.namespace, [add()])
    await _open_cancel(world)
    first = await asyncpg.connect(world.dsn)
    async with first.transaction():
        await first.fetch("SELECT FROM counter.resolutions FOR UPDATE")
        calls = [asyncio.create_task(_settle(world)) for _ in range(2)]
        await world.until("SELECT count(*) > 1 FROM pg_locks WHERE NOT granted")
        assert not any(each.done() for each in calls)
    await first.close()
    assert await asyncio.gather(*calls) == [CANCELLED, CANCELLED]
    assert await _stored_count(world) == 0


async def _settle(world: World, *events: Event) -> Decision:
    events = events or (add(),)
    return await world.store.decisions._settle(world.namespace, events, fingerprint(events))


async def test_another_payload_ends_an_open_cancel_as_far_as_it_can_tell(world: World) -> None:
    """Its own event is applied; no event is cancelled; any other event may be the cancel's."""
    store, namespace = world.store, world.namespace
    for number, used, expected in (
        (1, 5, Decision(Outcome.APPLIED, fingerprint([add(delta=5)]))),
        (2, None, CANCELLED_VOID),
        (3, 1, Decision(Outcome.APPLIED, OTHER_PAYLOAD)),
        (4, 7, Decision(Outcome.APPLIED, OTHER_PAYLOAD)),
    ):
        if used is not None:
            await store.events.append(namespace, [add(number=number, delta=used)])
        await _open_cancel(world, add(number=number))
        assert await store.decisions.decided(namespace, [add(number=number, delta=5)]) == expected
    assert await _cancel(world, add(number=1)) == Decision(
        Outcome.APPLIED, fingerprint([add(delta=5)])
    )
    assert await _cancel(world, add(number=2)) == CANCELLED_VOID
    assert await _cancel(world, add(number=3)) == CANCELLED
    assert (await _cancel(world, add(number=4))).fingerprint == OTHER_PAYLOAD
    right = add(number=4, delta=7)
    assert (await _cancel(world, right)).outcome is Outcome.CANCELLED
    assert await store.events.find(namespace, [right]) == [None]


async def test_an_atomic_add_is_removed_with_its_header(world: World) -> None:
    """The recounts are of its counters, each in its shard."""
    store, namespace = world.store, world.namespace
    items = atomic(("b", 2), ("a", 1), ("a", 4))
    await store.events.append_atomic(namespace, items)
    await _open_cancel(world, *items)
    decided = await store.decisions.decided(namespace, items)
    assert decided == Decision(Outcome.CANCELLED, fingerprint(items))
    assert await store.events.find(namespace, items) == [None] * 3
    assert await world.database.value("SELECT count(*) FROM {s}.events") == 0
    page = await store.rollups.dirty(namespace, 0, Span.after(0, NOW + WINDOW), 10)
    assert [each.counter for each in page.marks] == ["a", "b"]


async def test_a_cancel_in_a_namespace_that_was_deleted_fails(world: World) -> None:
    await world.store.events.append(world.namespace, [add()])
    assert await world.store.control.delete_namespace(world.namespace)
    with pytest.raises(NamespaceUnknownError):
        await _cancel(world)


async def test_a_decision_that_is_gone_when_it_is_settled_is_an_error(world: World) -> None:
    """It was purged although a process that serves its token runs."""
    with pytest.raises(InvariantError, match="is gone"):
        await _settle(world)
