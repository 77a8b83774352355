"""The supervisor of several API processes, played by a test."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from api.workers import Supervisor
from tests.support.waiting import eventually


class Played:
    """A worker that follows the test."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.exit_code = 0
        self.sent: list[int] = []

    def send(self, number: int) -> None:
        self.sent.append(number)

    def end(self, code: int) -> None:
        self.exit_code = code
        self.ended.set()


class Stage:
    """A supervisor and all the workers that it started, in order."""

    def __init__(self, count: int) -> None:
        self.started: list[tuple[int, Played]] = []
        self.ready_calls = 0
        self.supervisor = Supervisor(count, self._start, drain_s=0.05, pause_min_s=0.001)
        self.running = asyncio.create_task(self.supervisor.run(self._ready))

    def _start(self, number: int) -> Played:
        worker = Played()
        self.started.append((number, worker))
        return worker

    def _ready(self) -> None:
        self.ready_calls += 1

    async def nth(self, count: int) -> Played:
        """The worker that was started *count*-th, as soon as it is."""

        await eventually(lambda: len(self.started) >= count, f"{count} workers were started")
        return self.started[count - 1][1]

    async def both_ready(self) -> tuple[Played, Played]:
        first = await self.nth(1)
        first.ready.set()
        second = await self.nth(2)
        second.ready.set()

        await eventually(lambda: self.ready_calls == 1, "it reported that all are ready")
        return first, second

    async def end(self) -> int:
        """Have it end, every worker in order."""
        self.supervisor.end()
        for _, worker in self.started:
            worker.end(0)
        return await self.running


@asynccontextmanager
async def stage(count: int = 2) -> AsyncIterator[Stage]:
    each = Stage(count)
    yield each
    if not each.running.done():
        each.running.cancel()


async def test_the_first_worker_starts_alone() -> None:
    """If it cannot start, none can: the reason is logged once."""
    async with stage() as it:
        (await it.nth(1)).end(2)
        assert await it.running == 2
        assert len(it.started) == 1


async def test_the_other_workers_start_when_the_first_is_ready() -> None:
    async with stage(3) as it:
        (await it.nth(1)).ready.set()
        await it.nth(3)
        assert [number for number, _ in it.started] == [0, 1, 2]
        assert it.ready_calls == 0


async def test_a_worker_that_dies_is_started_again_in_its_place() -> None:
    async with stage() as it:
        _, second = await it.both_ready()
        second.end(-signal.SIGKILL)
        await it.nth(3)
        assert it.started[2][0] == 1
        assert await it.end() == 0
        assert it.ready_calls == 1


async def test_a_worker_that_cannot_restart_ends_no_other() -> None:
    """The store may be down for a moment: it is tried again, and those that run go on."""
    async with stage() as it:
        first, second = await it.both_ready()
        second.end(1)
        for count in (3, 4, 5):
            (await it.nth(count)).end(2)
        assert not first.ended.is_set()
        assert not it.running.done()


async def test_on_shutdown_all_workers_end_and_none_restarts() -> None:
    async with stage() as it:
        first, second = await it.both_ready()
        assert await it.end() == 0
        assert (first.sent, second.sent) == ([signal.SIGTERM], [signal.SIGTERM])
        assert len(it.started) == 2


async def test_a_second_interrupt_is_passed_on_and_a_first_one_is_a_plain_end() -> None:
    async with stage() as it:
        first, _ = await it.both_ready()
        it.supervisor.end(signal.SIGINT)
        it.supervisor.end(signal.SIGINT)
        assert first.sent == [signal.SIGTERM, signal.SIGINT]
        await it.end()


async def test_a_worker_that_does_not_end_is_killed() -> None:
    async with stage() as it:
        first, second = await it.both_ready()
        it.supervisor.end()
        first.end(0)

        await eventually(lambda: signal.SIGKILL in second.sent, "the worker that hangs is killed")
        second.end(-signal.SIGKILL)
        assert await it.running == 0


@pytest.mark.parametrize("code", [0, -signal.SIGTERM])
async def test_an_end_before_any_is_ready_is_an_end_in_order(code: int) -> None:
    async with stage() as it:
        first = await it.nth(1)
        it.supervisor.end()
        first.end(code)
        assert await it.running == 0
