"""Holds over SQLite: transactions that fail, processes that start again, and what is purged."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from counter.bounds import Bounds, terms_if_bounded
from counter.capabilities import HoldStore
from counter.core.adds import events_of_atomic
from counter.core.results import Item
from counter.errors import SliceMissingError
from counter.holds import Ending, HoldId, events_of_hold, held_name
from counter.limits import MINUTE, SECOND
from counter.storage.sqlite import SqliteStore
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    T0,
    make_namespace,
    make_slices,
    nonce,
)
from counter.testing.clock import FakeClock
from counter.testing.service_cases import Process
from counter.types import Namespace, Token, Written


class Desk:
    """A store with a namespace, and holds of counter "c"."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = FakeClock(NOW)

    async def open(self) -> None:
        self.store = SqliteStore(self.directory, self.clock, [DATASET])
        await self.store.open()
        self.process = Process(self.store, self.clock)

    async def begin(self) -> None:
        await self.open()
        await make_slices(self.store)
        self.namespace: Namespace = await make_namespace(self.store, accept_limit_us=5 * SECOND)

    async def restart(self, after_us: int) -> None:
        """Start again with a clock that is so much later."""
        await self.store.close()
        self.clock.advance(after_us)
        await self.open()

    @property
    def holds(self) -> HoldStore:
        holds = self.store.capabilities.holds
        assert holds is not None
        return holds

    async def hold(
        self, number: int, amount: int, at_most: int | None = None, at_us: int | None = None
    ) -> Written:
        """Hold *amount* for a minute under the token of *number*."""
        hold = HoldId("c", Token(nonce(number), at_us or NOW))
        events = events_of_hold(hold, amount, MINUTE, Bounds(at_most=at_most))
        return await self.store.events.append_atomic(self.namespace, events)

    async def counts(self) -> list[int]:
        """The count, and what is held upwards."""
        return await self.process.counts(self.namespace, "c", held_name("c", 1))

    def rows(self) -> int:
        """Number of open holds in the index."""
        sql = "SELECT count(*) FROM holds"
        return int(self.store.database._writing.execute(sql).fetchone()[0])


@pytest.fixture
async def desk(fast_dir: Path) -> AsyncIterator[Desk]:
    desk = Desk(fast_dir)
    await desk.begin()
    yield desk
    await desk.store.close()


def hold_of(number: int) -> HoldId:
    return HoldId("c", Token(nonce(number), NOW))


async def test_an_end_that_is_rolled_back_with_its_change_leaves_the_hold_open(desk: Desk) -> None:
    """What the transaction writes besides stays, and what decides is without the end."""
    await desk.hold(1, 10)
    desk.clock.advance(MINUTE)
    found = await desk.holds.find(desk.namespace, hold_of(1))
    assert found is not None

    def change(connection: sqlite3.Connection) -> None:
        desk.store.events.holds.write_end(connection, desk.namespace, found, Ending.EXPIRED)
        raise SliceMissingError("there is no slice")

    calls = [
        desk.store.database.write(change),
        desk.hold(2, 5, at_most=10, at_us=desk.clock.now_us()),
        desk.hold(3, 6, at_most=10, at_us=desk.clock.now_us()),
    ]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(outcomes[0], SliceMissingError)
    assert outcomes[1:] == [Written.NEW, Written.BOUND_REACHED]
    assert await desk.counts() == [0, 5]


async def test_an_atomic_add_sees_what_is_held(desk: Desk) -> None:
    """And ends what has expired of it."""
    await desk.hold(1, 9)
    item = Item("c", 2, terms_if_bounded(2, None, 10))
    for number, written in ((2, Written.BOUND_REACHED), (3, Written.NEW)):
        add = events_of_atomic([item], Token(nonce(number), desk.clock.now_us()))
        assert await desk.store.events.append_atomic(desk.namespace, add) is written
        desk.clock.advance(MINUTE)
    assert await desk.counts() == [2, 0]


async def test_an_end_is_in_a_window_that_no_worker_has_passed(desk: Desk) -> None:
    """Also of a process that starts with an earlier clock: a rollup would not see it."""
    await desk.hold(1, 10)
    desk.clock.advance(30 * SECOND)
    await desk.process.roll_up()
    [watermark_us] = await desk.store.rollups.watermarks(desk.namespace)
    assert watermark_us > NOW
    await desk.restart(-30 * SECOND)
    ended = await desk.holds.end(desk.namespace, hold_of(1), Ending.SETTLED, 7)
    assert ended is not None
    assert ended.end == (Ending.SETTLED, 7, watermark_us + 1)
    for _ in range(2):
        assert await desk.counts() == [7, 0]
        desk.clock.advance(MINUTE)
        await desk.process.roll_up()


async def test_holds_are_known_after_a_restart(desk: Desk) -> None:
    await desk.hold(1, 10)
    await desk.restart(SECOND)
    assert await desk.hold(2, 1, at_most=10) is Written.BOUND_REACHED
    assert await desk.counts() == [0, 10]
    ended = await desk.holds.end(desk.namespace, hold_of(1), Ending.RELEASED)
    assert ended is not None
    await desk.restart(SECOND)
    assert await desk.holds.find(desk.namespace, hold_of(1)) == ended
    assert await desk.hold(3, 10, at_most=10) is Written.NEW


async def test_a_clock_that_steps_back_opens_no_ended_hold(desk: Desk) -> None:
    """The room of an expired one was given away; a restart forgets how late it was."""
    await desk.hold(1, 10)
    desk.clock.advance(MINUTE)
    assert await desk.hold(2, 10, at_most=10, at_us=desk.clock.now_us()) is Written.NEW
    await desk.restart(-30 * SECOND)
    for how in (Ending.SETTLED, Ending.RELEASED, Ending.EXPIRED):
        ended = await desk.holds.end(desk.namespace, hold_of(1), how, 10)
        assert ended is not None
        assert ended.end is not None
        assert ended.end.how is Ending.EXPIRED
    assert await desk.counts() == [0, 10]


async def test_a_deleted_namespace_leaves_no_holds(desk: Desk) -> None:
    """No worker ends them, and they keep no slice."""
    await desk.hold(1, 10)
    desk.clock.advance(MINUTE)
    assert await desk.holds.expired(9) == [(desk.namespace.id, "c")]
    await desk.store.control.delete_namespace(desk.namespace)
    assert await desk.holds.expired(9) == []
    while await desk.store.control.purge(desk.clock.now_us()):
        pass
    assert desk.rows() == 0


async def test_a_slice_with_an_open_hold_is_not_dropped(desk: Desk) -> None:
    """A worker ends the hold first."""
    await desk.hold(1, 10)
    for start_us in range(FIRST_SLICE, T0, DATASET.slice_us):
        assert await desk.store.control.drop_slice(DATASET, start_us)
    desk.clock.advance(MINUTE)
    assert not await desk.store.control.drop_slice(DATASET, T0)
    await desk.holds.end(desk.namespace, hold_of(1), Ending.EXPIRED)
    assert await desk.store.control.drop_slice(DATASET, T0)
