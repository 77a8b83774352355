"""Processes race for holds and for their room, and a standby takes over: no answer turns."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest

from counter.bounds import Bounds, terms_of
from counter.clock import SystemClock
from counter.errors import StoreUnavailableError, UnavailableError, WriteTimeoutError
from counter.holds import (
    ENDED_AT_ONCE_MAX,
    FIRST,
    End,
    Ending,
    HoldId,
    events_of_hold,
    held_name,
)
from counter.limits import MINUTE, SECOND
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.holds import PostgresqlHolds
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.cases import add, atomic, nonce
from counter.types import Event, Namespace, Token, Written
from tests.postgresql.conftest import World
from tests.postgresql.pair import Pair
from tests.postgresql.test_faults import added, service
from tests.support.postgresql import ClockedStore
from tests.support.waiting import eventually

REACHED = Written.BOUND_REACHED


class Holder:
    """A process that begins and ends holds of a namespace."""

    def __init__(self, store: PostgresqlStore, namespace: Namespace) -> None:
        self.store, self.namespace = store, namespace
        found = store.capabilities.holds
        assert isinstance(found, PostgresqlHolds)
        self.holds = found

    async def begin(self, hold: HoldId, amount: int, lasts_us: int, most: int) -> Written:
        events = events_of_hold(hold, amount, lasts_us, Bounds(at_most=most))
        return await self.store.events.append_atomic(self.namespace, events)

    async def end(self, hold: HoldId, how: Ending, amount: int = 0) -> End | None:
        """End a hold; return its end, None if it has not expired yet."""
        found = await self.holds.end(self.namespace, hold, how, amount)
        assert found is not None
        return found.end

    async def extend(self, hold: HoldId, lasts_us: int) -> End | None:
        latest_us = hold.token.generation_time_us + 10 * MINUTE
        found = await self.holds.extend(self.namespace, hold, lasts_us, latest_us)
        assert found is not None
        return found.end

    async def append(self, *events: Event) -> Sequence[Written | UnavailableError]:
        return await self.store.events.append(self.namespace, events)

    async def sums(self, name: str) -> tuple[int, int]:
        """The count, and what is held upwards, of one moment."""
        names = [(name, 0), (held_name(name, 1), 0)]
        count, held = await self.store.events.tails(self.namespace, names)
        return count.total, held.total


def bounded(name: str, at_us: int, number: int, delta: int, most: int) -> Event:
    event = add(name, at_us, number, delta)
    return event._replace(atom=terms_of(delta, Bounds(at_most=most)))


@pytest.fixture
async def holders(world: World) -> AsyncIterator[tuple[Holder, Holder]]:
    other = ClockedStore(PostgresqlOptions(world.dsn), world.clock)
    await other.open()
    yield Holder(world.store, world.namespace), Holder(other, world.namespace)
    await other.close()


async def test_concurrent_holds_never_pass_a_bound(
    world: World, holders: tuple[Holder, Holder]
) -> None:
    """200 of one counter, over both processes, half of them sent twice."""
    now_us, most = world.clock.now_us(), 70
    held = [HoldId("c", Token(nonce(number), now_us)) for number in range(200)]
    sent = [*held, *held[::2]]
    outcomes = await asyncio.gather(
        *(holders[place % 2].begin(hold, 1, MINUTE, most) for place, hold in enumerate(sent))
    )
    assert outcomes.count(Written.NEW) == most
    assert await holders[0].sums("c") == (0, most)
    answers: dict[HoldId, set[bool]] = defaultdict(set)
    for hold, outcome in zip(sent, outcomes, strict=True):
        answers[hold].add(outcome is REACHED)
    assert {len(each) for each in answers.values()} == {1}


@pytest.mark.parametrize("seed", range(4))
async def test_each_hold_ends_once(world: World, holders: tuple[Holder, Holder], seed: int) -> None:
    """However two processes settle, release, extend, look at, and make room by it, at once, and
    whatever the clock does; and at no moment a bound is passed."""
    draw, most, past = Random(seed), 12, 0
    number = 0
    for turn in range(5):
        name, now_us = f"{turn}", world.clock.now_us()
        amounts: dict[HoldId, int] = {}
        for _ in range(8):
            number += 1
            amounts[HoldId(name, Token(nonce(number), now_us))] = draw.randrange(1, 5)
        begun = await asyncio.gather(
            *(
                draw.choice(holders).begin(hold, amount, draw.choice((1, 2, 9)) * SECOND, most)
                for hold, amount in amounts.items()
            )
        )
        held = [hold for hold, out in zip(amounts, begun, strict=True) if out is Written.NEW]
        assert 0 < sum(amounts[each] for each in held) <= most, seed
        adds: list[Event] = []
        calls: list[Awaitable[Any]] = []
        ends: dict[HoldId, list[Awaitable[End | None]]] = defaultdict(list)
        for hold in held:
            for _ in range(draw.choice((2, 3))):
                holder, how = draw.choice(holders), draw.choice(("settle", "release", "look", "on"))
                if how == "settle":
                    work = holder.end(hold, Ending.SETTLED, draw.randrange(amounts[hold] + 1))
                elif how == "release":
                    work = holder.end(hold, Ending.RELEASED)
                elif how == "look":
                    work = holder.end(hold, Ending.EXPIRED)
                else:
                    work = holder.extend(hold, draw.choice((SECOND, 5 * SECOND)))
                ends[hold].append(asyncio.ensure_future(work))
        for _ in range(8):
            number += 1
            adds.append(bounded(name, now_us, number, draw.randrange(1, 4), most))
            calls.append(draw.choice(holders).append(adds[-1]))

        async def watch(name: str = name) -> None:
            for step_us in draw.choices((SECOND, 2 * SECOND, -SECOND, 0), k=4):
                world.clock.advance(step_us)
                assert sum(await holders[0].sums(name)) <= most, seed

        appended = [first for [first] in (await asyncio.gather(*calls, watch()))[:-1]]
        for hold, tasks in ends.items():
            found = {end for end in await asyncio.gather(*tasks) if end is not None}
            stored = await holders[1].holds.find(world.namespace, hold)
            assert stored is not None
            assert found <= {stored.end}, (seed, hold, found, stored)
            past += stored.end is not None and stored.end.how is Ending.EXPIRED
        left = await holders[0].holds.open(world.namespace, name, FIRST, 100)
        settled = [await holders[0].end(hold, Ending.EXPIRED) for hold in held]
        counted = sum(each.amount for each in settled if each is not None)
        counted += sum(each.delta for each, out in zip(adds, appended, strict=True)
                       if out is Written.NEW)  # fmt: skip
        count, now_held = await holders[1].sums(name)
        assert count == counted, (seed, turn)
        open_now = [each for each, end in zip(held, settled, strict=True) if end is None]
        assert now_held == sum(amounts[each] for each in open_now), (seed, turn)
        assert {*open_now} <= {each.id for each in left}, (seed, turn)
    assert past, seed


async def test_an_append_writes_what_can_be_decided(
    world: World, holders: tuple[Holder, Holder]
) -> None:
    """Beside an add that needs more expired holds ended than one transaction may."""
    one, other = holders
    now_us, most = world.clock.now_us(), ENDED_AT_ONCE_MAX + 20
    for number in range(most):
        hold = HoldId("c", Token(nonce(number + 1), now_us))
        assert await one.begin(hold, 1, SECOND, most) is Written.NEW
    world.clock.advance(SECOND)
    whole = bounded("c", now_us, 1_000, most, most)
    sent = (whole, bounded("d", now_us, 1_001, 1, 1), whole, bounded("c", now_us, 1_002, -5, 0))
    found = await other.append(*sent)
    assert [isinstance(each, UnavailableError) for each in found] == [True, False, True, False]
    assert {found[1], found[3]} == {Written.NEW}
    assert await one.sums("c") == (-5, 20)
    items = [
        each._replace(atom=(each.atom or b"") + terms_of(1, Bounds(at_most=most)))
        for each in atomic(("c", most), ("e", 1), at=now_us, number=1_003)
    ]
    assert await one.store.events.append_atomic(one.namespace, items) is Written.NEW
    assert await other.sums("c") == (most - 5, 5)
    assert await other.append(whole) == [REACHED]


async def test_an_atomic_add_that_cannot_be_decided_writes_nothing(
    world: World, holders: tuple[Holder, Holder]
) -> None:
    """But the ends of holds stay, so that it is decided when it is sent again."""
    one, other = holders
    now_us, most = world.clock.now_us(), ENDED_AT_ONCE_MAX + 1
    for number in range(most):
        hold = HoldId("c", Token(nonce(number + 1), now_us))
        assert await one.begin(hold, 1, SECOND, most) is Written.NEW
    world.clock.advance(SECOND)
    items = [
        each._replace(atom=(each.atom or b"") + terms_of(each.delta, Bounds(at_most=most)))
        for each in atomic(("c", most), ("e", 1), at=now_us, number=1_000)
    ]
    with pytest.raises(UnavailableError, match="send it again"):
        await other.store.events.append_atomic(other.namespace, items)
    assert await other.store.events.find(other.namespace, items) == [None, None]
    assert await one.sums("c") == (0, 1)
    assert await other.store.events.append_atomic(other.namespace, items) is Written.NEW


async def test_after_a_failover_no_end_turns_and_no_room_is_given_twice(pair: Pair) -> None:
    """Ends that timed out may be on the primary alone; the standby's clock is behind."""
    await pair.begin()
    async with service(pair.dsn) as rest:
        await added(rest, "before")
    clock = SystemClock()
    store = PostgresqlStore(PostgresqlOptions(pair.dsn), clock)
    await store.open()
    [namespace] = await store.control.namespaces()
    holder, now_us, most = Holder(store, namespace), clock.now_us(), 20
    settled, released, expired, late = (
        HoldId("h", Token(nonce(number), now_us)) for number in range(1, 5)
    )
    for hold in (settled, released, late):
        assert await holder.begin(hold, 5, MINUTE, most) is Written.NEW
    assert await holder.begin(expired, 5, 1, most) is Written.NEW
    taken = bounded("h", now_us, 5, 5, most)
    assert await holder.append(taken) == [Written.NEW]
    first = await holder.end(late, Ending.SETTLED, 5)
    pair.standby.pause()
    wanted: list[Callable[[], Awaitable[Any]]] = [
        lambda: holder.end(settled, Ending.SETTLED, 4),
        lambda: holder.end(released, Ending.RELEASED),
        lambda: holder.append(bounded("h", now_us, 6, 5, most)),
    ]
    others: list[Callable[[], Awaitable[Any]]] = [
        lambda: holder.end(released, Ending.SETTLED, 5),
        lambda: holder.end(settled, Ending.RELEASED),
        lambda: holder.end(expired, Ending.SETTLED, 5),
        lambda: holder.end(late, Ending.RELEASED),
    ]
    for call in wanted:
        with pytest.raises(WriteTimeoutError):
            await call()
    pair.primary.pause()
    pair.standby.resume()
    await asyncio.to_thread(pair.fail_over)
    found: list[list[Any]] = []

    async def has_answered() -> bool:
        try:
            found.append([await call() for call in (*others, *wanted)])
        except StoreUnavailableError:
            return False
        return len(found) == 2

    await eventually(has_answered, "the standby is found")
    one, again = found
    assert one[:6] == again[:6]
    how = [None if each is None else each.how for each in one[:6]]
    assert how[2:4] == [Ending.EXPIRED, Ending.SETTLED]
    assert one[3] == first
    # Each of them asked twice, and was answered the same.
    assert (one[1], one[0]) == (one[4], one[5])
    count, held = await holder.sums("h")
    assert held == 0
    assert count <= most
    await store.close()
