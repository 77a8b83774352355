"""No append changes summed windows and decisions; without each part of the fence it is seen to."""

import asyncio
from collections.abc import Awaitable, Callable
from unittest.mock import AsyncMock, patch

import asyncpg
import pytest

from counter.storage.postgresql.fence import pass_fence
from counter.testing.cases import NOW, WINDOW, add
from counter.types import Decision, Outcome, Written
from tests.postgresql.conftest import LIMIT, World

VOID = Decision(Outcome.VOID, b"fingerprint")


async def _sum_is_final(world: World) -> bool:
    """A worker that passed the fence sums a window before a stalled append writes to it."""
    connection, transaction = await world.stalled(add())
    fence = asyncio.create_task(pass_fence(world.database))
    if not await world.waits(fence):
        await transaction.rollback()
        await connection.close()
        return False
    await transaction.commit()
    await connection.close()
    await fence
    [fold] = await world.store.events.sums(world.namespace, [("c", NOW)])
    return fold.total == 1


async def _a_late_lock_reads_a_late_clock(world: World) -> bool:
    """An append that waits for its lock until the event is too old is refused."""
    blocker = await asyncpg.connect(world.dsn)
    key = "('counter.datasets'::regclass::oid::bigint << 32) | $1"
    await blocker.fetch(f"SELECT pg_advisory_lock({key})", world.namespace.dataset.id)
    append = asyncio.create_task(world.store.events.append(world.namespace, [add()]))
    await world.until("SELECT count(*) FROM pg_locks WHERE NOT granted")
    world.clock.advance(LIMIT + 1)
    await pass_fence(world.database)
    await blocker.fetch(f"SELECT pg_advisory_unlock({key})", world.namespace.dataset.id)
    outcomes = await append
    await blocker.close()
    return list(outcomes) == [Written.LATE]


async def _void_is_final(world: World) -> bool:
    """A token is not void while an append of it may commit."""
    connection, transaction = await world.stalled(add())
    deciding = asyncio.create_task(world.store.decisions.decide(world.namespace, [add()], VOID))
    waits = await world.waits(deciding)
    await transaction.commit()
    await connection.close()
    decision = await deciding
    [found] = await world.store.events.find(world.namespace, [add()])
    return waits and (decision.outcome is Outcome.APPLIED) == (found is not None)


async def _an_open_decision_refuses(world: World) -> bool:
    """While a decision waits for an append, another append of the token is refused."""
    connection, transaction = await world.stalled(add("other"))
    deciding = asyncio.create_task(world.store.decisions.decide(world.namespace, [add()], VOID))
    await world.until("SELECT count(*) FROM {s}.resolutions")
    outcomes = await world.store.events.append(world.namespace, [add()])
    await transaction.commit()
    await connection.close()
    decision = await deciding
    return list(outcomes) == [Written.LATE] and decision.outcome is Outcome.VOID


async def _a_clock_behind_admits_nothing_old(world: World) -> bool:
    """After a failover to a server with a slow clock, time stops at the fence."""
    world.clock.advance(LIMIT + 1)
    await pass_fence(world.database)
    world.clock.advance(-LIMIT)
    assert await pass_fence(world.database) == NOW + LIMIT + 1
    outcomes = await world.store.events.append(world.namespace, [add(), add(at=NOW + 1)])
    return list(outcomes) == [Written.LATE, Written.NEW]


async def _what_was_rolled_up_takes_nothing(world: World) -> bool:
    """A watermark refuses events up to it, whatever their age."""
    await world.store.rollups.advance(world.namespace, [0], NOW + WINDOW - 1)
    events = [add(), add(at=NOW + WINDOW)]
    outcomes = await world.store.events.append(world.namespace, events)
    return list(outcomes) == [Written.LATE, Written.NEW]


Scenario = Callable[[World], Awaitable[bool]]
LOCK = "PERFORM pg_advisory_xact_lock_shared(('datasets'::regclass::oid::bigint << 32) | p_dataset)"
SCENARIOS: list[Scenario] = [
    _sum_is_final,
    _a_late_lock_reads_a_late_clock,
    _void_is_final,
    _an_open_decision_refuses,
    _a_clock_behind_admits_nothing_old,
    _what_was_rolled_up_takes_nothing,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__.strip("_"))
async def test_the_fence_holds(world: World, scenario: Scenario) -> None:
    assert await scenario(world)


@pytest.mark.parametrize(
    ("scenario", "old", "new"),
    [
        pytest.param(_sum_is_final, LOCK, "PERFORM 1", id="no lock"),
        pytest.param(
            _a_late_lock_reads_a_late_clock,
            LOCK,
            f"now_us := clock_us(); {LOCK}",
            id="clock before lock",
        ),
        pytest.param(
            _an_open_decision_refuses, "earliest > d.resolved_through", "true", id="no decision"
        ),
        pytest.param(
            _a_clock_behind_admits_nothing_old, ", d.fence", "", id="failover without fence"
        ),
        pytest.param(
            _what_was_rolled_up_takes_nothing, "earliest > n.passed", "true", id="no watermark"
        ),
    ],
)
async def test_a_planted_bug_is_caught(
    world: World, scenario: Scenario, old: str, new: str
) -> None:
    await world.breaks(old, new)
    if new.startswith("now_us"):
        await world.breaks("now_us := greatest(clock_us(), d.fence)", "PERFORM 1")
    assert not await scenario(world)


async def test_a_void_without_the_fence_is_caught(world: World) -> None:
    with patch("counter.storage.postgresql.decisions.wait_for_appends", AsyncMock()):
        assert not await _void_is_final(world)


async def test_a_decision_of_another_process_is_returned_as_a_write_is(world: World) -> None:
    """A transaction that only reads would not wait for the synchronous standby."""
    transactions = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    decide = world.store.decisions.decide
    seen: list[int] = []

    async def another_settles(*_: object) -> None:
        with patch("counter.storage.postgresql.decisions.wait_for_appends", AsyncMock()):
            assert await decide(world.namespace, [add()], VOID) == VOID
        seen.append(await world.database.value(transactions))

    with patch("counter.storage.postgresql.decisions.wait_for_appends", another_settles):
        assert await decide(world.namespace, [add()], VOID) == VOID
    assert await world.database.value(transactions) > seen[0]
