"""The adapter for DynamoDB over the simulated DynamoDB: its contracts, and a few seeds."""

from pathlib import Path

import pytest

from counter.ports import Store
from counter.testing.cases import DATASET
from counter.testing.clock import FakeClock
from counter.testing.suites import add_suites
from tests.dynamodb.cases import DynamodbCases, DynamodbPurgeCases
from tests.simulation.dynamodb_store import CalmStore, calm_server
from tests.simulation.run import run_seed
from tests.simulation.shrink import report, shrink

#: How many seeds each run of the tests tries.
SEEDS = 6


class OnSimulation(DynamodbCases):
    """How the suites get a store."""

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return CalmStore(DATASET, clock, calm_server(clock))


class TestPurge(OnSimulation, DynamodbPurgeCases):
    """Purging."""


add_suites(globals(), OnSimulation)


def test_nothing_promised_is_broken() -> None:
    for seed in range(SEEDS):
        result = run_seed(seed, store="dynamodb")
        if result.problems:
            pytest.fail(report(shrink(result)), pytrace=False)
