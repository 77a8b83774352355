"""The DynamoDB adapter keeps the contracts, over Amazon's local engine."""

from pathlib import Path

import pytest

from counter.ports import Store
from counter.storage.dynamodb import DynamodbOptions, DynamodbStore
from counter.storage.dynamodb.tables import counts_partition, row_place
from counter.types import Namespace
from tests.contracts import suites
from tests.contracts.cases import DATASET
from tests.support.clock import FakeClock
from tests.support.dynamodb import FreshStore


class OnDynamodb:
    """How the suites get a DynamoDB store."""

    @pytest.fixture(autouse=True)
    def engine(self, dynamodb: DynamodbOptions) -> None:
        self.options = dynamodb

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return FreshStore(self.options, clock, [DATASET])


class TestEvents(OnDynamodb, suites.EventCases):
    """Identities, collapse, conflicts."""


class TestFolds(OnDynamodb, suites.FoldCases):
    """Sums and tails."""


class TestScans(OnDynamodb, suites.ScanCases):
    """Scans."""


class TestAtomics(OnDynamodb, suites.AtomicCases):
    """Atomic adds."""


class TestMarks(OnDynamodb, suites.MarkCases):
    """Dirty marks."""


class TestWatermarks(OnDynamodb, suites.WatermarkCases):
    """Watermarks and the fence."""


class TestCounts(OnDynamodb, suites.CountsCases):
    """Checkpoints, rows, recounts."""


class TestDecisions(OnDynamodb, suites.DecisionCases):
    """Late tokens."""


class TestReservations(OnDynamodb, suites.ReservationCases):
    """Keys without a time."""


class TestNamespaces(OnDynamodb, suites.NamespaceCases):
    """Namespaces."""


class TestSlices(OnDynamodb, suites.SliceCases):
    """Slices."""


class TestService(OnDynamodb, suites.ServiceCases):
    """Deletes, and CloudEvents that are delivered again."""


class TestListing(OnDynamodb, suites.ListingCases):
    """Listing counters."""


class TestLeases(OnDynamodb, suites.LeaseCases):
    """Leases of sequence numbers."""


class TestWorkerLeases(OnDynamodb, suites.WorkerLeaseCases):
    """Leases of background work."""


class TestKeys(OnDynamodb, suites.KeyCases):
    """API keys."""


class TestPurge(OnDynamodb, suites.PurgeCases):
    """Purging."""


class TestNonTransactional(OnDynamodb, suites.NonTransactionalCases):
    """What a store without transactions does."""


class TestAudit(OnDynamodb, suites.AuditCases):
    """The audit."""

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, DynamodbStore)
        counter, window_us = row
        key = counts_partition(namespace, counter), row_place(window_us)
        await store.driver.write_many(store.session.data(namespace.dataset), deletes=[key])


class TestSettledAudit(OnDynamodb, suites.SettledAuditCases):
    """The audit where events are gone."""
