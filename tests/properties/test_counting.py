"""Any interleaving of sends, retries, hedges, clears, rollups and restarts counts each token once."""

from hypothesis import Phase, settings

from tests.properties.machine import CounterMachine
from tests.support.needs import in_ci

#: A few hundred steps a run at a desk, many more in the gate.
STEPS = settings(
    max_examples=100 if in_ci() else 25,
    stateful_step_count=40 if in_ci() else 30,
    # Explaining a failure traces every line of every run, failing or not.
    phases=set(Phase) - {Phase.explain},
)


class OverSqlite(CounterMachine):
    storage = "sqlite"


class OverMemory(CounterMachine):
    storage = "memory"


TestOverSqlite = OverSqlite.TestCase
TestOverSqlite.settings = STEPS
TestOverMemory = OverMemory.TestCase
TestOverMemory.settings = STEPS
