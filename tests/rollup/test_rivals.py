"""Rival workers under every interleaving: each rolls up everything, at once, and may fall asleep.

The service's own machine, with its clients, stalls, clears and restarts; its rollup is done by two
workers that know nothing of each other, a step of one between any two of the other's. One of them
may be suspended anywhere in a pass, and goes on with it minutes later.
"""

import asyncio
from contextlib import suppress
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from counter.core.namespaces import Namespaces
from counter.errors import CounterError
from counter.storage.shared.memory_cache import MemoryCache
from rollup.worker import RollupWorker
from tests.properties.stalls import StallingMachine
from tests.rollup.world import Road


class Rivals(StallingMachine):
    """The machine over memory, rolled up by two."""

    storage = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.asleep: tuple[Road, asyncio.Task[Any]] | None = None
        self.seed = 0

    async def _start(self, counter_type: str, shards: int) -> None:
        await super()._start(counter_type, shards)
        self.app.roll_up = self._roll_up_by_two  # type: ignore[method-assign]

    def _rival(self) -> tuple[Road, RollupWorker]:
        """A new process that has read everything itself."""
        self.seed += 1
        road = Road(self.app.store, self.seed)
        store, clock = road.store, self.app.clock
        namespaces = Namespaces(store, clock)
        return road, RollupWorker(store, MemoryCache(clock), clock, namespaces, batch_counters=1)

    async def _roll_up_by_two(self) -> None:
        await asyncio.gather(*(worker.tick() for _, worker in (self._rival(), self._rival())))

    @precondition(lambda self: self.asleep is None)
    @rule(steps=st.integers(1, 120))
    def falls_asleep(self, steps: int) -> None:
        """A worker is suspended in the middle of a pass, if the pass is so long."""

        async def begin() -> None:
            road, worker = self._rival()
            road.hold_at = steps
            task = asyncio.create_task(worker.tick())
            held = asyncio.create_task(road.held.wait())
            await asyncio.wait((task, held), return_when=asyncio.FIRST_COMPLETED)
            held.cancel()
            if task.done():
                task.result()
            else:
                self.asleep = (road, task)

        self.run(begin())

    @precondition(lambda self: self.asleep is not None)
    @rule()
    def wakes(self) -> None:
        """And continues with its old reads then."""

        async def go_on() -> None:
            assert self.asleep is not None
            road, task = self.asleep
            road.open.set()
            with suppress(CounterError):
                # Known slices may be gone: it would begin again.
                await task

        self.run(go_on())
        self.asleep = None

    def teardown(self) -> None:
        try:
            if self.asleep is not None:
                self.wakes()
        finally:
            super().teardown()


TestRivals = Rivals.TestCase
TestRivals.settings = settings(
    max_examples=settings().max_examples * 2 // 3,
    stateful_step_count=40,
    phases=set(Phase) - {Phase.explain},
)
