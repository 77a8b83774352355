"""A cancel over SQLite removes the events at once; a rollup that has summed them must not restore
them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from counter.errors import StoreUnavailableError, TokenCancelledError
from counter.limits import MINUTE, SECOND
from counter.ops.audit import Auditor, State
from counter.storage.sqlite import SqliteStore, decisions, window_rollup
from counter.testing.cases import (
    DATASET,
    NOW,
    WINDOW,
    make_namespace,
    make_slices,
    nonce,
)
from counter.testing.clock import FakeClock
from counter.testing.service_cases import Process
from counter.types import Namespace, Token
from tests.support.parts import followed
from tests.unit.test_sqlite_faults import Failing


class Desk:
    """A process over SQLite, with a namespace and two adds to counter ``c``."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock(NOW)
        self.store = SqliteStore(directory, self.clock, [DATASET])
        self.process = Process(self.store, self.clock)
        self.is_cancelled = False
        self.kept, self.token = Token(nonce(1), NOW), Token(nonce(2), NOW)

    async def begin(self) -> None:
        await self.store.open()
        await make_slices(self.store)
        self.namespace: Namespace = await make_namespace(self.store, accept_limit_us=5 * SECOND)
        for each in (self.kept, self.token):
            await self.process.add(self.namespace, "c", each)

    async def cancel(self) -> None:
        cancelled = await self.process.cancel(self.namespace, "c", self.token)
        assert cancelled.was_counted
        self.is_cancelled = True

    async def count(self) -> int:
        [count] = await self.process.counts(self.namespace, "c")
        return count

    async def check(self, count: int) -> None:
        """The count is this one, from every source, now and after further rollups."""
        assert self.is_cancelled
        for _ in range(3):
            assert await self.count() == count
            self.clock.advance(MINUTE)
            await self.process.roll_up()
        [stored] = await self.process.api.reader.read(self.namespace, ["c"], 10 * MINUTE)
        assert stored.count == count
        settled, rows, _ = await self.process.api.reader.history(self.namespace, "c", NOW + WINDOW)
        assert settled.count + sum(row.total for row in rows) == count
        [head] = await self.store.rollups.heads(self.namespace, ["c"])
        assert head is not None
        assert head.pending == ()
        [verdict] = await Auditor(self.store).audit(self.namespace, ["c"])
        assert verdict.state is State.RIGHT
        with pytest.raises(TokenCancelledError):
            await self.process.add(self.namespace, "c", self.token)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Desk]:
    desk = Desk(directory)
    await desk.begin()
    yield desk
    await desk.store.close()


@pytest.fixture
async def desk(fast_dir: Path) -> AsyncIterator[Desk]:
    async with opened(fast_dir) as desk:
        yield desk


@pytest.mark.parametrize("step", ["dirty", "heads"])
async def test_a_rollup_that_has_summed_the_event_is_repeated(desk: Desk, step: str) -> None:
    """The removal has left a mark and a pending recount, in one transaction with itself."""
    desk.clock.advance(5 * MINUTE)
    with (
        patch.object(window_rollup, "_COUNTERS_MIN", 1_000),
        followed(desk.store, step, by=desk.cancel),
    ):
        await desk.process.roll_up()
    await desk.check(1)


async def test_a_window_that_the_store_rolls_up_itself_is_repeated(desk: Desk) -> None:
    with patch.object(window_rollup, "_COUNTERS_MIN", 1):
        desk.clock.advance(5 * MINUTE)
        sums = window_rollup.SqliteWindowRollup._roll_part

        async def after_the_cancel(*given: object) -> object:
            await desk.cancel()
            return await sums(*given)  # type: ignore[arg-type]

        with patch.object(window_rollup.SqliteWindowRollup, "_roll_part", after_the_cancel):
            await desk.process.worker._namespaces.refresh()
            await desk.process.worker.tick()
    await desk.check(1)


async def test_the_mark_is_left_in_a_window_that_no_worker_has_passed(desk: Desk) -> None:
    """Even if the clock was set back behind the watermark."""
    desk.clock.advance(10 * MINUTE)
    await desk.process.roll_up()
    desk.clock.advance(-9 * MINUTE)
    await desk.cancel()
    assert await desk.count() == 1
    desk.clock.advance(20 * MINUTE)
    await desk.check(1)


async def test_a_process_that_starts_with_an_earlier_clock_knows_what_workers_have_passed(
    fast_dir: Path,
) -> None:
    async with opened(fast_dir) as desk:
        desk.clock.advance(10 * MINUTE)
        await desk.process.roll_up()
        namespace = desk.namespace
    again = Desk(fast_dir)
    again.namespace = namespace
    await again.store.open()
    again.clock.advance(MINUTE)
    await again.cancel()
    assert await again.count() == 1
    again.clock.advance(20 * MINUTE)
    await again.check(1)
    await again.store.close()


async def test_the_mark_is_in_no_window_that_a_worker_is_passing(desk: Desk) -> None:
    """Even if the clock was set back since the worker has read it."""

    async def cancel_in_the_past() -> None:
        desk.clock.advance(-2 * MINUTE)
        await desk.cancel()
        desk.clock.advance(2 * MINUTE)

    desk.clock.advance(5 * MINUTE)
    with (
        patch.object(window_rollup, "_COUNTERS_MIN", 1_000),
        followed(desk.store, "heads", by=cancel_in_the_past),
    ):
        await desk.process.roll_up()
    await desk.check(1)


async def test_the_mark_is_not_earlier_than_the_window_to_recount(desk: Desk) -> None:
    """A worker would ignore it: the window is not closed, and nothing is left to ask again."""
    desk.clock.advance(WINDOW - SECOND)
    desk.token = Token(nonce(3), NOW + WINDOW + SECOND)
    await desk.process.add(desk.namespace, "c", desk.token)
    await desk.cancel()
    await desk.check(2)


@pytest.mark.parametrize("lands", [False, True])
async def test_a_commit_that_fails_may_be_on_disk(desk: Desk, lands: bool) -> None:
    """So the live tail is read from the log again."""
    database = desk.store.database
    database._writing = Failing(database._writing, "COMMIT", after=lands)  # type: ignore[assignment]
    with pytest.raises(StoreUnavailableError):
        await desk.cancel()
    assert await desk.count() == (1 if lands else 2)
    await desk.cancel()
    await desk.check(1)


async def test_a_cancel_that_fails_half_way_removes_nothing(desk: Desk) -> None:
    """The live tail keeps the event, too."""
    with (
        patch.object(decisions, "_remove_events", side_effect=StoreUnavailableError("full")),
        pytest.raises(StoreUnavailableError),
    ):
        await desk.cancel()
    assert await desk.count() == 2
    assert (await desk.process.add(desk.namespace, "c", desk.token)).replayed
    await desk.cancel()
    await desk.check(1)


@pytest.mark.parametrize("most", [0, 1, 10_000])
async def test_a_cancelled_token_of_the_future_is_refused(fast_dir: Path, most: int) -> None:
    """Whether it is remembered by its time or not, and after a restart."""
    ahead = [Token(nonce(number), NOW + number) for number in range(3, 6)]
    with patch.object(decisions, "_CANCELLED_MAX", most):
        async with opened(fast_dir) as desk:
            for each in ahead:
                await desk.process.cancel(desk.namespace, "d", each)
            for each in ahead:
                with pytest.raises(TokenCancelledError):
                    await desk.process.add(desk.namespace, "d", each)
            await desk.process.add(desk.namespace, "d", Token(nonce(9), NOW + 9))
            namespace = desk.namespace
    desk = Desk(fast_dir)
    await desk.store.open()
    for each in ahead:
        with pytest.raises(TokenCancelledError):
            await desk.process.add(namespace, "d", each)
    assert await desk.process.counts(namespace, "d") == [1]
    await desk.store.close()
