"""The SQLite adapter keeps the contracts."""

from pathlib import Path

from counter.ports import Store
from counter.storage.sqlite import SqliteStore
from tests.contracts import suites
from tests.contracts.cases import DATASET
from tests.support.clock import FakeClock


class OnSqlite:
    """How the suites get a SQLite store."""

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return SqliteStore(directory, clock, [DATASET])


class TestEvents(OnSqlite, suites.EventCases):
    """Identities, collapse, conflicts."""


class TestFolds(OnSqlite, suites.FoldCases):
    """Sums and tails."""


class TestScans(OnSqlite, suites.ScanCases):
    """Scans."""


class TestAtomics(OnSqlite, suites.AtomicCases):
    """Atomic adds."""


class TestMarks(OnSqlite, suites.MarkCases):
    """Dirty marks."""


class TestWatermarks(OnSqlite, suites.WatermarkCases):
    """Watermarks and the fence."""


class TestCounts(OnSqlite, suites.CountsCases):
    """Checkpoints, rows, recounts."""


class TestDecisions(OnSqlite, suites.DecisionCases):
    """Late tokens."""


class TestReservations(OnSqlite, suites.ReservationCases):
    """Keys without a time."""


class TestNamespaces(OnSqlite, suites.NamespaceCases):
    """Namespaces."""


class TestSlices(OnSqlite, suites.SliceCases):
    """Slices."""


class TestListing(OnSqlite, suites.ListingCases):
    """Listing counters."""


class TestLeases(OnSqlite, suites.LeaseCases):
    """Leases of sequence numbers."""


class TestPurge(OnSqlite, suites.PurgeCases):
    """Purging."""


class TestTransactional(OnSqlite, suites.TransactionalCases):
    """What one transaction does."""
