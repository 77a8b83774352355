"""The adapter for DynamoDB over the simulated DynamoDB: its contracts, and a few seeds."""

from pathlib import Path

import pytest

from counter.ports import Store
from counter.testing import suites
from counter.testing.cases import DATASET
from counter.testing.clock import FakeClock
from tests.simulation.dynamodb_store import CalmStore, calm_server
from tests.simulation.run import run_seed
from tests.simulation.shrink import report, shrink

#: How many seeds each run of the tests tries.
SEEDS = 6


class OnSimulation:
    """How the suites get a store."""

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return CalmStore(DATASET, clock, calm_server(clock))


class TestEvents(OnSimulation, suites.EventCases):
    """Identities, collapse, conflicts."""


class TestFolds(OnSimulation, suites.FoldCases):
    """Sums and tails."""


class TestScans(OnSimulation, suites.ScanCases):
    """Scans."""


class TestAtomics(OnSimulation, suites.AtomicCases):
    """Atomic adds."""


class TestMarks(OnSimulation, suites.MarkCases):
    """Dirty marks."""


class TestWatermarks(OnSimulation, suites.WatermarkCases):
    """Watermarks and the fence."""


class TestCounts(OnSimulation, suites.CountsCases):
    """Checkpoints, rows, recounts."""


class TestDecisions(OnSimulation, suites.DecisionCases):
    """Late tokens."""


class TestReservations(OnSimulation, suites.ReservationCases):
    """Keys without a time."""


class TestNamespaces(OnSimulation, suites.NamespaceCases):
    """Namespaces."""


class TestSlices(OnSimulation, suites.SliceCases):
    """Slices."""


class TestListing(OnSimulation, suites.ListingCases):
    """Listing counters."""


class TestLeases(OnSimulation, suites.LeaseCases):
    """Leases of sequence numbers."""


class TestWorkerLeases(OnSimulation, suites.WorkerLeaseCases):
    """Leases of background work."""


class TestKeys(OnSimulation, suites.KeyCases):
    """API keys."""


class TestNonTransactional(OnSimulation, suites.NonTransactionalCases):
    """The suite of stores without transactions."""


class TestSettledAudit(OnSimulation, suites.SettledAuditCases):
    """The audit if events are gone."""


def test_nothing_promised_is_broken() -> None:
    for seed in range(SEEDS):
        result = run_seed(seed, store="dynamodb")
        if result.problems:
            pytest.fail(report(shrink(result)), pytrace=False)
