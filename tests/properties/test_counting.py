"""Sends, retries, hedges, clears, rollups, restarts: however they mix, a token counts once."""

import asyncio
from itertools import cycle
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.properties.bounded import BoundedMachine
from tests.properties.stalls import StallingMachine
from tests.support.app import App
from tests.support.model import Send
from tests.support.rest import Rest
from tests.support.virtual import no_deadline_by_the_wall

#: A run has many steps, so there are fewer of them than of other properties.
STEPS = settings(
    max_examples=settings().max_examples * 2 // 3,
    stateful_step_count=40,
    # Explaining a failure traces every line of every run, failing or not.
    phases=set(Phase) - {Phase.explain},
)


class OverSqlite(BoundedMachine):
    storage = "sqlite"


class OverPostgresql(BoundedMachine):
    """Two processes: sends alternate, hedges go to the other, and both roll up at once."""

    storage = "postgresql"

    def __init__(self) -> None:
        super().__init__()
        self.patches.enter_context(no_deadline_by_the_wall())

    async def _start(self, counter_type: str, shards: int) -> None:
        await super()._start(counter_type, shards)
        self.other = App(self.storage, self.directory, small=True, beside=self.app)
        await self.other.start()
        self.turns = cycle((self.other, self.app))
        self.at = self.app
        works = self.app.roll_up

        async def roll_up_twice() -> None:
            await asyncio.gather(works(), self.other.roll_up())

        self.app.roll_up = roll_up_twice  # type: ignore[method-assign]

    @property
    def rest(self) -> Rest:
        return self.at.rest.within("p")

    async def _ask(self, each: Send) -> Any:
        at = next(self.turns)
        directory, latest = (each.application.service.namespaces for each in (at, self.app))
        # As a process does every second, of which the test's clock passes many.
        if not directory.is_fresh or directory.get("p") != latest.get("p"):
            await directory.refresh()
        self.at = at
        try:
            return await super()._ask(each)
        finally:
            self.at = self.app

    async def _check_all(self) -> None:
        try:
            await super()._check_all()
        finally:
            await self.other.stop()


class OverMemory(StallingMachine):
    storage = "memory"


class OverCassandra(StallingMachine):
    """Over three simulated replicas. Strict, because a guard in memory forgets at a restart."""

    storage = "simulated"
    payload_check = "strict"
    distinguishes_atomics = False

    def __init__(self) -> None:
        super().__init__()
        self.patches.enter_context(no_deadline_by_the_wall())


TestOverSqlite = OverSqlite.TestCase
TestOverSqlite.settings = STEPS
TestOverMemory = OverMemory.TestCase
TestOverMemory.settings = STEPS
TestOverCassandra = OverCassandra.TestCase
TestOverCassandra.settings = settings(STEPS, max_examples=settings().max_examples // 6)
TestOverPostgresql = pytest.mark.usefixtures("postgresql")(OverPostgresql.TestCase)
TestOverPostgresql.settings = settings(STEPS, max_examples=settings().max_examples // 6)
