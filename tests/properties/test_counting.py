"""Sends, retries, hedges, clears, rollups, restarts: however they mix, a token counts once."""

import pytest
from hypothesis import Phase, settings

from tests.properties.machine import CounterMachine
from tests.properties.stalls import StallingMachine
from tests.simulation.calm import no_deadline_by_the_wall

#: A failure is made small before it is shown, and that takes minutes.
pytestmark = pytest.mark.timeout(600)

#: A run has many steps, so there are fewer of them than of other properties.
STEPS = settings(
    max_examples=settings().max_examples // 3,
    stateful_step_count=40,
    # Explaining a failure traces every line of every run, failing or not.
    phases=set(Phase) - {Phase.explain},
)


class OverSqlite(CounterMachine):
    storage = "sqlite"


class OverPostgresql(CounterMachine):
    storage = "postgresql"

    def __init__(self) -> None:
        super().__init__()
        self.patches.enter_context(no_deadline_by_the_wall())


class OverMemory(StallingMachine):
    storage = "memory"


class OverCassandra(StallingMachine):
    """The adapter as it is, over three simulated replicas. Strict, for a guard in memory forgets
    payloads at a restart."""

    storage = "simulated"
    payload_check = "strict"
    tells_atomics_apart = False

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
