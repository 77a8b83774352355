"""The SQLite adapter keeps the contracts."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest

from counter.ports import Store
from counter.storage.sqlite import SqliteStore
from counter.testing import suites
from counter.testing.cases import DATASET, NOW
from counter.testing.clock import FakeClock
from counter.types import Namespace


class OnSqlite:
    """How the suites get a SQLite store."""

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return SqliteStore(directory, clock, [DATASET])


@pytest.fixture
def no_tail() -> Iterator[None]:
    """Have the live tail hold nothing."""
    with patch("counter.storage.sqlite.live._TAIL_BYTES_MAX", 0):
        yield


class TestEvents(OnSqlite, suites.EventCases):
    """Identities, collapse, conflicts."""


class TestFolds(OnSqlite, suites.FoldCases):
    """Sums and tails."""


class TestScans(OnSqlite, suites.ScanCases):
    """Scans."""


class TestAtomics(OnSqlite, suites.AtomicCases):
    """Atomic adds."""


class TestViews(OnSqlite, suites.ViewCases):
    """Several counters as of one moment."""


class TestMarks(OnSqlite, suites.MarkCases):
    """Dirty marks."""


@pytest.mark.usefixtures("no_tail")
class TestMarksOfTheLog(OnSqlite, suites.MarkCases):
    """Dirty marks where the log must be read for them."""


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


class TestService(OnSqlite, suites.ServiceCases):
    """Deletes, and CloudEvents that are delivered again."""


class TestListing(OnSqlite, suites.ListingCases):
    """Listing counters."""


class TestLeases(OnSqlite, suites.LeaseCases):
    """Leases of sequence numbers."""


class TestWorkerLeases(OnSqlite, suites.WorkerLeaseCases):
    """Leases of background work."""


class TestKeys(OnSqlite, suites.KeyCases):
    """API keys."""


class TestPurge(OnSqlite, suites.PurgeCases):
    """Purging."""


class TestTransactional(OnSqlite, suites.TransactionalCases):
    """What one transaction does."""


@pytest.mark.usefixtures("no_tail")
class TestTransactionalOverTheLog(OnSqlite, suites.TransactionalCases):
    """The same where the log must be read for what is dirty."""


async def test_a_database_of_an_earlier_version_is_upgraded(tmp_path: Path) -> None:
    """Existing data stay; the token numbers continue."""
    clock = FakeClock(NOW)
    store = SqliteStore(tmp_path, clock, [DATASET])
    await store.open()
    before = await store.control.lease_tokens(7, NOW)
    await store.close()
    # An older version keeps no checksums of pages.
    (tmp_path / "counter.db-sums").unlink()
    with closing(sqlite3.connect(tmp_path / "counter.db")) as connection:
        connection.executescript("ALTER TABLE tokens DROP COLUMN time; PRAGMA user_version = 1;")
    store = SqliteStore(tmp_path, clock, [DATASET])
    await store.open()
    after = await store.control.lease_tokens(1, NOW)
    await store.close()
    assert after == before._replace(first=before.first + 7)


class TestAudit(OnSqlite, suites.AuditCases):
    """The audit."""

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, SqliteStore)
        sql = "DELETE FROM windows WHERE start = ? AND counter IN (SELECT id FROM counters"
        sql += " WHERE namespace = ? AND name = ?)"
        key = (row[1], namespace.id, row[0])
        await store.database.write(lambda connection: connection.execute(sql, key))


class TestSettledAudit(OnSqlite, suites.SettledAuditCases):
    """The audit where events are gone."""
