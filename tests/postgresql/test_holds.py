"""A hold ends once, and its room is given away once; without each of the rules it is not so."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg
import pytest

from counter.bounds import Bounds, terms_of
from counter.errors import StoreUnavailableError
from counter.holds import Ending, Hold, HoldId, events_of_hold, held_name
from counter.limits import MINUTE, SECOND
from counter.storage.postgresql import holds
from counter.storage.postgresql.fence import pass_fence
from counter.storage.postgresql.holds import PostgresqlHolds
from counter.testing.cases import NOW, WINDOW, add, nonce
from counter.types import Decision, Event, Outcome, Token, Written
from counter.windows import fingerprint
from tests.postgresql.conftest import World

MOST: Final = Bounds(at_most=10)
LASTS: Final = MINUTE
REACHED: Final = Written.BOUND_REACHED
LOCK: Final = "PERFORM lock_counts(p_namespace, ARRAY[p_counter]);"
LATE: Final = "PERFORM late(p_dataset, p_namespace, '{}', '{}', '{}', '{}', true);"
IS_LATE: Final = (
    "is_late := late(\n        p_dataset, p_namespace, ARRAY[p_counter], ARRAY[p_time],"
    " ARRAY[p_id], ARRAY[1], true);"
)
EXPIRE: Final = "PERFORM write_end(h, p_dataset, 0, h.expiry_atom);"


def hold_of(number: int) -> HoldId:
    """The hold of counter "c" with the token of *number*."""
    return HoldId("c", Token(nonce(number), NOW))


def events_of(number: int, amount: int = 10, lasts_us: int = LASTS) -> list[Event]:
    return events_of_hold(hold_of(number), amount, lasts_us, MOST)


def bounded(world: World, number: int, delta: int) -> Event:
    event = add(at=world.clock.now_us(), number=number, delta=delta)
    return event._replace(atom=terms_of(delta, MOST))


class _Session:
    """What a store asks its database, in one transaction that is not committed."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def row(self, sql: str, *arguments: Any) -> Any:
        return await self._connection.fetchrow(sql.replace("{s}", "counter"), *arguments)

    async def value(self, sql: str, *arguments: Any) -> Any:
        return (await self.row(sql, *arguments))[0]


@asynccontextmanager
async def in_flight(world: World) -> AsyncIterator[tuple[Any, Any]]:
    """Holds whose changes commit when the caller says so, and the transaction."""
    connection = await asyncpg.connect(world.dsn)
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield PostgresqlHolds(_Session(connection)), transaction  # type: ignore[arg-type]
    finally:
        await connection.close()


async def begin(world: World, number: int, amount: int = 10, lasts_us: int = LASTS) -> Written:
    events = events_of(number, amount, lasts_us)
    return await world.store.events.append_atomic(world.namespace, events)


async def end(world: World, number: int, how: Ending, amount: int = 0) -> tuple[str, int] | None:
    """End a hold; return how it has ended then, and with what; None if it is not known."""
    ended = await _holds(world).end(world.namespace, hold_of(number), how, amount)
    return _end_of(ended)


async def append(world: World, *events: Event) -> list[Any]:
    return list(await world.store.events.append(world.namespace, events))


async def sums(world: World) -> tuple[int, int]:
    """The count, and what is held upwards, of one moment."""
    names = [("c", 0), (held_name("c", 1), 0)]
    count, held = await world.store.events.tails(world.namespace, names)
    return count.total, held.total


async def cancel(world: World, number: int) -> Decision:
    events = events_of(number)
    proposed = Decision(Outcome.CANCELLED_VOID, fingerprint(events))
    return await world.store.decisions.cancel(world.namespace, events, proposed)


async def advance(world: World, us: int) -> None:
    """Move the clock; sessions of the test see it, too."""
    world.clock.advance(us)
    await world.database.value("SELECT {s}.clock_us()")


async def under_way(world: World, work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Begin *work*; return when it waits for a lock, or has ended."""
    task = asyncio.ensure_future(work)
    for _ in range(10_000):
        waits = await world.database.value("SELECT count(*) FROM pg_locks WHERE NOT granted")
        if task.done() or waits:
            return task
    raise AssertionError("it neither waits nor ends")


def _holds(world: World) -> PostgresqlHolds:
    found = world.store.capabilities.holds
    assert isinstance(found, PostgresqlHolds)
    return found


def _end_of(hold: Hold | None) -> tuple[str, int] | None:
    return None if hold is None or hold.end is None else (hold.end.how, hold.end.amount)


async def _a_settle_and_another_end(world: World, how: Ending) -> bool:
    """The second one waits for the first, and is answered what that did."""
    await begin(world, 1)
    async with in_flight(world) as (first, transaction):
        await first.end(world.namespace, hold_of(1), Ending.SETTLED, 4)
        if how is Ending.EXPIRED:
            await advance(world, LASTS)
        else:
            await advance(world, SECOND)
        second = await under_way(world, end(world, 1, how, 0 if how is Ending.EXPIRED else 7))
        await transaction.commit()
        return await second == (Ending.SETTLED, 4) and await sums(world) == (4, 0)


async def _of_two_settles_one_counts(world: World) -> bool:
    return await _a_settle_and_another_end(world, Ending.SETTLED)


async def _a_settled_hold_is_not_released(world: World) -> bool:
    return await _a_settle_and_another_end(world, Ending.RELEASED)


async def _a_settled_hold_does_not_expire(world: World) -> bool:
    return await _a_settle_and_another_end(world, Ending.EXPIRED)


async def _a_worker_leaves_a_settled_hold(world: World) -> bool:
    """It waits for a settle that is not committed."""
    await begin(world, 1)
    async with in_flight(world) as (first, transaction):
        await first.end(world.namespace, hold_of(1), Ending.SETTLED, 4)
        await advance(world, LASTS)
        expiring = await under_way(world, _holds(world).expire(world.namespace, "c"))
        await transaction.commit()
        return await expiring == 0 and await sums(world) == (4, 0)


async def _a_worker_leaves_an_open_hold(world: World) -> bool:
    await begin(world, 1)
    await advance(world, LASTS - 1)
    return await _holds(world).expire(world.namespace, "c") == 0


async def _a_hold_takes_the_last_room(world: World) -> bool:
    """A bounded add waits for a hold that is not committed, and counts it."""
    async with in_flight(world) as (first, transaction):
        await first.begin(world.namespace, events_of(1, 6))
        adding = await under_way(world, append(world, bounded(world, 2, 5)))
        await transaction.commit()
        return await adding == [REACHED] and await append(world, bounded(world, 3, 4)) == [
            Written.NEW
        ]


async def _holds_share_the_room(world: World) -> bool:
    """A hold waits for another one, and counts it."""
    async with in_flight(world) as (first, transaction):
        await first.begin(world.namespace, events_of(1, 6))
        second = await under_way(world, begin(world, 2, 5))
        await transaction.commit()
        return await second is REACHED and await begin(world, 3, 4) is Written.NEW


async def _a_room_is_given_away_once(world: World) -> bool:
    """A clock that steps back takes nothing back from the one that got it."""
    await begin(world, 1)
    await advance(world, LASTS)
    taken = await append(world, bounded(world, 2, 10))
    await advance(world, -LASTS)
    found = [await end(world, 1, Ending.SETTLED, 10), await end(world, 1, Ending.RELEASED)]
    extended = await _holds(world).extend(world.namespace, hold_of(1), LASTS, NOW + MINUTE)
    if taken != [Written.NEW] or await sums(world) != (10, 0):
        return False
    return [*found, _end_of(extended)] == [(Ending.EXPIRED, 0)] * 3


async def _an_expiry_is_seen_under_the_lock(world: World) -> bool:
    """A settle that waits for the counter until the hold has expired is too late."""
    await begin(world, 1)
    async with in_flight(world) as (first, transaction):
        await first.begin(world.namespace, events_of(2, -1))
        settling = await under_way(world, end(world, 1, Ending.SETTLED, 4))
        await advance(world, LASTS)
        await transaction.commit()
        found: tuple[str, int] | None = await settling
        return found == (Ending.EXPIRED, 0)


async def _the_clock_does_not_step_back(world: World) -> bool:
    """A fence was passed when the hold had expired: another process may have seen it."""
    await begin(world, 1)
    await advance(world, LASTS)
    await pass_fence(world.database)
    await advance(world, -LASTS)
    return await end(world, 1, Ending.SETTLED, 4) == (Ending.EXPIRED, 0)


async def _an_end_is_in_no_closed_window(world: World) -> bool:
    """A worker may have passed windows that are later than the clock."""
    await begin(world, 1)
    through_us = NOW - NOW % WINDOW + 5 * WINDOW - 1
    await world.store.rollups.advance(world.namespace, [0], through_us)
    ended = await _holds(world).end(world.namespace, hold_of(1), Ending.SETTLED, 4)
    return ended is not None and ended.end is not None and ended.end.time_us > through_us


async def _an_end_is_not_before_its_hold(world: World) -> bool:
    await begin(world, 1)
    await advance(world, -SECOND)
    ended = await _holds(world).end(world.namespace, hold_of(1), Ending.RELEASED)
    return ended is not None and ended.end is not None and ended.end.time_us >= NOW


async def _a_fence_waits_for_an_end(world: World) -> bool:
    """A worker that closes windows waits for an end that has read its clock."""
    await begin(world, 1)
    async with in_flight(world) as (first, transaction):
        await first.end(world.namespace, hold_of(1), Ending.SETTLED, 4)
        fence = asyncio.create_task(pass_fence(world.database))
        waits = await world.waits(fence)
        await transaction.commit()
        await fence
        return waits


async def _a_cancelled_hold_never_begins(world: World) -> bool:
    """One that waits for the counter while its token is cancelled looks for the decision then."""
    async with in_flight(world) as (first, transaction):
        events = events_of(1)
        proposed = Decision(Outcome.CANCELLED_VOID, fingerprint(events))
        decided = await first.cancel(world.namespace, events, proposed)
        beginning = await under_way(world, begin(world, 1))
        await transaction.commit()
        return decided == proposed and await beginning is Written.LATE


async def _a_cancel_sees_a_hold_under_way(world: World) -> bool:
    """It waits until the hold is committed, and releases it."""
    async with in_flight(world) as (first, transaction):
        await first.begin(world.namespace, events_of(1))
        cancelling = await under_way(world, cancel(world, 1))
        await transaction.commit()
        cancelled = (await cancelling).outcome
    found = await _holds(world).find(world.namespace, hold_of(1))
    return (cancelled, _end_of(found)) == (Outcome.CANCELLED, (Ending.RELEASED, 0))


async def _a_cancelled_settle_stays(world: World) -> bool:
    await begin(world, 1)
    await end(world, 1, Ending.SETTLED, 4)
    decided = await cancel(world, 1)
    return decided.outcome is Outcome.APPLIED and await sums(world) == (4, 0)


async def _an_expired_hold_is_not_cancelled(world: World) -> bool:
    """Its end is written then, and stays."""
    await begin(world, 1)
    await advance(world, LASTS)
    first = await cancel(world, 1)
    await advance(world, -LASTS)
    second = await cancel(world, 1)
    return first.outcome is second.outcome is Outcome.APPLIED


async def _an_extension_keeps_the_room(world: World) -> bool:
    """An add that waits for it does not end the hold."""
    await begin(world, 1)
    async with in_flight(world) as (first, transaction):
        await first.extend(world.namespace, hold_of(1), 2 * LASTS, NOW + 2 * LASTS)
        await advance(world, LASTS)
        adding = await under_way(world, append(world, bounded(world, 2, 1)))
        await transaction.commit()
        added = await adding
    return added == [REACHED] and await end(world, 1, Ending.SETTLED, 9) == (Ending.SETTLED, 9)


async def _an_extension_never_shortens(world: World) -> bool:
    await begin(world, 1)
    found = await _holds(world).extend(world.namespace, hold_of(1), SECOND, NOW + 2 * LASTS)
    return found is not None and found.expires_us == NOW + LASTS


async def _only_the_same_way_is_ended(world: World) -> bool:
    """An expired hold of what may be taken away makes no room for what is added."""
    await begin(world, 1)
    await begin(world, 2, -3, SECOND)
    await advance(world, 2 * SECOND)
    refused = await append(world, bounded(world, 3, 1))
    return refused == [REACHED] and len(await _holds(world).expired(9)) == 1


async def _a_lost_slice_has_no_open_hold(world: World) -> bool:
    """It is not dropped before."""
    await begin(world, 1)
    control, dataset = world.store.control, world.namespace.dataset
    *early, its = [each for each in await control.slices(dataset) if each.start_us <= NOW]
    for each in early:
        assert await control.drop_slice(dataset, each.start_us)
    dropped = [await control.drop_slice(dataset, its.start_us)]
    if not dropped[-1]:
        await end(world, 1, Ending.RELEASED)
    dropped.append(await control.drop_slice(dataset, its.start_us))
    return dropped == [False, True]


Scenario = Callable[[World], Awaitable[bool]]
SCENARIOS: list[Scenario] = [
    _of_two_settles_one_counts,
    _a_settled_hold_is_not_released,
    _a_settled_hold_does_not_expire,
    _a_worker_leaves_a_settled_hold,
    _a_worker_leaves_an_open_hold,
    _a_hold_takes_the_last_room,
    _holds_share_the_room,
    _a_room_is_given_away_once,
    _an_expiry_is_seen_under_the_lock,
    _the_clock_does_not_step_back,
    _an_end_is_in_no_closed_window,
    _an_end_is_not_before_its_hold,
    _a_fence_waits_for_an_end,
    _a_cancelled_hold_never_begins,
    _a_cancel_sees_a_hold_under_way,
    _a_cancelled_settle_stays,
    _an_expired_hold_is_not_cancelled,
    _an_extension_keeps_the_room,
    _an_extension_never_shortens,
    _only_the_same_way_is_ended,
    _a_lost_slice_has_no_open_hold,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__.strip("_"))
async def test_a_rule_holds(world: World, scenario: Scenario) -> None:
    assert await scenario(world)


def planted(scenario: Scenario, function: str, *changes: tuple[str, str], id: str) -> Any:
    return pytest.param(scenario, function, changes, id=id)


@pytest.mark.parametrize(
    ("scenario", "function", "changes"),
    [
        planted(_of_two_settles_one_counts, "locked_hold", (LOCK, ""), id="settles without lock"),
        planted(_a_settled_hold_is_not_released, "locked_hold", (LOCK, ""), id="no lock, release"),
        planted(_a_settled_hold_does_not_expire, "locked_hold", (LOCK, ""), id="no lock, expiry"),
        planted(_a_worker_leaves_a_settled_hold, "expire_holds", (LOCK, ""), id="no lock, worker"),
        planted(
            _a_worker_leaves_an_open_hold, "expire_holds", (" AND o.expires <= now_us", ""),
            id="a worker ends what is open",
        ),
        planted(_a_hold_takes_the_last_room, "begin_hold", (LOCK, ""), id="begin without lock"),
        planted(
            _a_hold_takes_the_last_room, "held_of", ("IF NOT EXISTS", "IF true OR NOT EXISTS"),
            id="what is held is not counted",
        ),
        planted(
            _holds_share_the_room, "refusal_of_atomic", ("held := i.held", "held := 0"),
            id="what is held is not counted for a hold",
        ),
        planted(_a_room_is_given_away_once, "make_room", (EXPIRE, ""), id="room without an end"),
        planted(
            _an_expiry_is_seen_under_the_lock, "end_hold",
            ("h holds%ROWTYPE", "now_us bigint := hold_clock_us(p_dataset); h holds%ROWTYPE"),
            ("hold_clock_us(p_dataset) >= h.expires", "now_us >= h.expires"),
            id="clock before lock",
        ),
        planted(
            _an_expiry_is_seen_under_the_lock, "end_hold", (">= h.expires", "< 0"),
            id="no look at the expiry",
        ),
        planted(
            _the_clock_does_not_step_back, "hold_clock_us", ("GREATEST(", "NULLIF("),
            id="a clock without the fence",
        ),
        planted(
            _an_end_is_in_no_closed_window, "write_end", (", n.passed + 1", ""),
            id="an end in a closed window",
        ),
        planted(
            _an_end_is_not_before_its_hold, "write_end", (", h.time, n.", ", n."),
            id="an end before its hold",
        ),
        planted(_a_fence_waits_for_an_end, "locked_hold", (LATE, ""), id="no lock of appends"),
        planted(
            _a_cancelled_hold_never_begins, "begin_hold",
            (LOCK, IS_LATE), (f"\n    {IS_LATE}", f"\n    {LOCK}"),
            id="decisions before lock",
        ),
        planted(
            _a_cancel_sees_a_hold_under_way, "locked_hold", (LOCK, ""), id="cancel without lock"
        ),
        planted(
            _a_cancelled_settle_stays, "cancel_hold",
            ("IS DISTINCT FROM (", "IS NULL AND EXISTS ("),
            id="what was settled is cancelled",
        ),
        planted(
            _an_expired_hold_is_not_cancelled, "cancel_hold",
            ("h.expires <= hold_clock_us(p_dataset)", "false"),
            id="what has expired is released",
        ),
        planted(
            _an_expired_hold_is_not_cancelled, "cancel_hold", (EXPIRE, ""),
            id="an expiry that is not written",
        ),
        planted(_an_extension_keeps_the_room, "locked_hold", (LOCK, ""), id="extend without lock"),
        planted(
            _an_extension_never_shortens, "extend_hold", ("greatest(expires, ", "greatest(0, "),
            id="an extension shortens",
        ),
        planted(
            _only_the_same_way_is_ended, "make_room",
            ("AND (o.amount > 0) = (p_delta > 0)", ""),
            id="the other way is ended",
        ),
        planted(
            _a_lost_slice_has_no_open_hold, "drop_slice", ("h.time < ended", "false"),
            id="a slice is dropped",
        ),
    ],
)  # fmt: skip
async def test_a_planted_bug_is_caught(
    world: World, scenario: Scenario, function: str, changes: Sequence[tuple[str, str]]
) -> None:
    for old, new in changes:
        await world.breaks(old, new, function)
    try:
        is_kept = await scenario(world)
    except StoreUnavailableError:
        # A constraint of the tables.
        is_kept = False
    assert not is_kept


async def test_holds_that_wait_leave_connections_to_others(world: World) -> None:
    """However many wait for the lock of their counter."""
    async with in_flight(world) as (changing, transaction):
        await changing.begin(world.namespace, events_of(1, 1))
        waiting = [asyncio.ensure_future(begin(world, each, 1)) for each in range(2, 40)]
        await under_way(world, waiting[0])
        assert await append(world, add("d", number=50)) == [Written.NEW]
        await transaction.commit()
    written = await asyncio.gather(*waiting)
    assert (written.count(Written.NEW), written.count(REACHED)) == (9, 29)


async def test_what_is_answered_waits_as_a_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end that timed out is committed, and seen, on the primary alone."""
    await begin(world, 1)
    await end(world, 1, Ending.SETTLED, 4)
    transactions = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    before = await world.database.value(transactions)
    assert await end(world, 1, Ending.RELEASED) == (Ending.SETTLED, 4)
    after = await world.database.value(transactions)
    assert after > before
    monkeypatch.setattr(holds, "_FIND", holds._FIND.replace("{s}.wait_as_a_write()", "NULL"))
    await end(world, 1, Ending.RELEASED)
    assert await world.database.value(transactions) == after
