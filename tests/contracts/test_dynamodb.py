"""The DynamoDB adapter keeps the contracts, over Amazon's local engine."""

from pathlib import Path

import pytest

from counter.limits import HOUR, MINUTE, SECOND
from counter.ports import Store
from counter.storage.dynamodb.decisions import decision_key, reservation_key
from counter.storage.dynamodb.driver import DynamodbOptions, Key
from counter.storage.dynamodb.layout import COUNTS, EXPIRES, partition, row_place
from counter.storage.dynamodb.store import DynamodbStore
from counter.testing import suites
from counter.testing.cases import DATASET, FIRST_SLICE, NOW, add, decided, nonce, write
from counter.testing.clock import FakeClock
from counter.testing.control_cases import purge
from counter.types import Decision, Namespace, Outcome
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
    """Purging. Keys and decisions are not looked for: DynamoDB deletes them by its own clock."""

    async def test_expired_keys_go_and_others_stay(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Each may go an hour after its expiry, not before; a replaced one as the new one."""
        for n in range(5):
            await store.decisions.reserve(namespace, nonce(n), NOW, NOW + n * HOUR)
        await store.decisions.reserve(
            namespace, nonce(0), NOW + 1, NOW + 1 + 9 * HOUR, replaces_us=NOW
        )
        await purge(store, NOW + 3 * HOUR)
        for n, hours in enumerate((9, 1, 2, 3, 4)):
            expires_s = await self.expires_s(store, namespace, reservation_key(namespace, nonce(n)))
            assert expires_s * SECOND // HOUR * HOUR == NOW // HOUR * HOUR + (hours + 1) * HOUR

    async def test_a_decision_lives_as_long_as_its_event(
        self, store: Store, namespace: Namespace
    ) -> None:
        """It is made while the event is kept, and outlives the slice that the event is in."""
        event, decision = add(at=FIRST_SLICE + 5 * MINUTE), Decision(Outcome.APPLIED, b"")
        await write(store, namespace, event)
        await store.decisions.decide(namespace, [event], decision)
        await purge(store, NOW)
        assert await decided(store, namespace, [event]) == decision
        expires_s = await self.expires_s(store, namespace, decision_key(namespace, [event]))
        assert expires_s * SECOND == NOW + 2 * DATASET.retention_us + DATASET.slice_us

    async def expires_s(self, store: Store, namespace: Namespace, key: Key) -> int:
        """When DynamoDB may delete the item of *key*, by the attribute that it looks at."""
        assert isinstance(store, DynamodbStore)
        item = await store.driver.get(store.session.data(namespace.dataset), key)
        return int(item[EXPIRES])


class TestNonTransactional(OnDynamodb, suites.NonTransactionalCases):
    """What a store without transactions does."""


class TestAudit(OnDynamodb, suites.AuditCases):
    """The audit."""

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, DynamodbStore)
        counter, window_us = row
        key = partition(namespace, COUNTS, counter), row_place(window_us)
        await store.driver.write_many(store.session.data(namespace.dataset), deletes=[key])


class TestSettledAudit(OnDynamodb, suites.SettledAuditCases):
    """The audit where events are gone."""
