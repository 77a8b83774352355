"""The PostgreSQL adapter keeps the contracts, over a real server whose clock the test holds."""

from pathlib import Path

import pytest

from counter.ports import Store
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing import suites
from counter.testing.cases import DATASET
from counter.testing.clock import FakeClock
from counter.types import Namespace
from scripts.postgresql_server import PostgresqlServer
from tests.support.postgresql import FreshStore


class OnPostgresql:
    """How the suites get a PostgreSQL store."""

    @pytest.fixture(autouse=True)
    def database(self, postgresql: PostgresqlServer) -> None:
        self.options = PostgresqlOptions(postgresql.dsn(), schema="kept")

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return FreshStore(self.options, clock, [DATASET], keeps_schema=True)


class TestEvents(OnPostgresql, suites.EventCases):
    """Identities, collapse, conflicts."""


class TestFolds(OnPostgresql, suites.FoldCases):
    """Sums and tails."""


class TestScans(OnPostgresql, suites.ScanCases):
    """Scans."""


class TestAtomics(OnPostgresql, suites.AtomicCases):
    """Atomic adds."""


class TestViews(OnPostgresql, suites.ViewCases):
    """Several counters as of one moment."""


class TestMarks(OnPostgresql, suites.MarkCases):
    """Dirty marks."""


class TestWatermarks(OnPostgresql, suites.WatermarkCases):
    """Watermarks and the fence."""


class TestCounts(OnPostgresql, suites.CountsCases):
    """Checkpoints, rows, recounts."""


class TestDecisions(OnPostgresql, suites.DecisionCases):
    """Late tokens."""


class TestReservations(OnPostgresql, suites.ReservationCases):
    """Keys without a time."""


class TestNamespaces(OnPostgresql, suites.NamespaceCases):
    """Namespaces."""


class TestSlices(OnPostgresql, suites.SliceCases):
    """Slices."""


class TestService(OnPostgresql, suites.ServiceCases):
    """Deletes, and CloudEvents that are delivered again."""


class TestListing(OnPostgresql, suites.ListingCases):
    """Listing counters."""


class TestLeases(OnPostgresql, suites.LeaseCases):
    """Leases of sequence numbers."""


class TestWorkerLeases(OnPostgresql, suites.WorkerLeaseCases):
    """Leases of background work."""


class TestKeys(OnPostgresql, suites.KeyCases):
    """API keys."""


class TestPurge(OnPostgresql, suites.PurgeCases):
    """Purging."""


class TestTransactional(OnPostgresql, suites.TransactionalCases):
    """What one transaction does."""


class TestAudit(OnPostgresql, suites.AuditCases):
    """The audit."""

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, PostgresqlStore)
        await store._database.rows(
            "DELETE FROM {s}.windows WHERE namespace = $1 AND counter = $2 AND start = $3",
            *(namespace.id, *row),
        )


class TestSettledAudit(OnPostgresql, suites.SettledAuditCases):
    """The audit where events are gone."""
