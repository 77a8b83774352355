"""The SQLite adapter keeps the contracts."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import AsyncMock, patch

import pytest

from counter.errors import StoreUnavailableError
from counter.ports import Store
from counter.storage.sqlite import SqliteStore, window_rows
from counter.testing.atomic_cases import TransactionalCases
from counter.testing.audit_cases import AuditCases, SettledAuditCases
from counter.testing.cases import DATASET, NOW, T0, WINDOW, StoreCases, make_namespace
from counter.testing.clock import FakeClock
from counter.testing.control_cases import PurgeCases
from counter.testing.fold_cases import ScanCases
from counter.testing.rollup_cases import CountsCases, MarkCases, apply, end, row, update
from counter.testing.service_cases import ServiceBoundCases
from counter.testing.suites import add_suites
from counter.types import Namespace


class OnSqlite(StoreCases):
    """How the suites get a SQLite store."""

    transactional = True
    one_moment = True
    bounds = True

    def new_store(self, clock: FakeClock, directory: Path) -> Store:
        return SqliteStore(directory, clock, [DATASET])

    async def lose_row(self, store: Store, namespace: Namespace, row: tuple[str, int]) -> None:
        assert isinstance(store, SqliteStore)
        sql = "start = ? AND counter IN (SELECT id FROM counters WHERE namespace = ? AND name = ?)"
        key = (row[1], namespace.id, row[0])

        def lose(connection: sqlite3.Connection) -> None:
            for table in ("windows", "recent_windows"):
                connection.execute(f"DELETE FROM {table} WHERE {sql}", key)

        await store.database.write(lose)


add_suites(globals(), OnSqlite)


@pytest.fixture
def no_tail() -> Iterator[None]:
    """Have the live tail hold nothing."""
    with patch("counter.storage.sqlite.live._TAIL_BYTES_MAX", 0):
        yield


@pytest.mark.usefixtures("no_tail")
class TestBoundsOfTheLog(OnSqlite, ServiceBoundCases):
    """Bounds where the log must be read for each count."""


@pytest.mark.usefixtures("no_tail")
class TestMarksOfTheLog(OnSqlite, MarkCases):
    """Dirty marks where the log must be read for them."""


@pytest.mark.usefixtures("no_tail")
class TestTransactionalOverTheLog(OnSqlite, TransactionalCases):
    """The same where the log must be read for what is dirty."""


@pytest.fixture
def groups_of_one() -> Iterator[None]:
    """Have only the latest window's rows be in order of time."""
    with patch("counter.storage.sqlite.window_rows._GROUP_WINDOWS", 1):
        yield


@pytest.mark.usefixtures("groups_of_one")
class TestCountsOfGroups(OnSqlite, CountsCases):
    """Rows and checkpoints where a rollup moves the rows of the windows before."""


@pytest.mark.usefixtures("groups_of_one")
class TestAuditOfGroups(OnSqlite, AuditCases):
    """Audits where rows are moved."""


@pytest.mark.usefixtures("groups_of_one")
class TestSettledAuditOfGroups(OnSqlite, SettledAuditCases):
    """Audits of settled folds where rows are moved."""


@pytest.mark.usefixtures("groups_of_one")
class TestScanOfGroups(OnSqlite, ScanCases):
    """Scans of events, which find windows by their rows, where rows are moved."""


@pytest.mark.usefixtures("groups_of_one")
class TestPurgeOfGroups(OnSqlite, PurgeCases):
    """Deleted namespaces where rows are moved."""


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


async def test_rows_of_passed_groups_are_moved_as_others_are_written(tmp_path: Path) -> None:
    """Rows of the group of windows that is rolled up are in order of time, and none is there for
    longer than the next group takes."""
    group, counters = window_rows._GROUP_WINDOWS, ("a", "b", "c")
    store = SqliteStore(tmp_path, FakeClock(NOW), [DATASET])
    await store.open()
    namespace = await make_namespace(store)
    for number in range(3 * group):
        updates = [
            update(row(number, 1), through=number, count=number + 1, counter=name)
            for name in counters
        ]
        await apply(store, namespace, *updates)
        recent, moved = await store.database.read(_starts)
        group_us = end(number) - end(number) % (group * WINDOW)
        assert recent[-1] == T0 + number * WINDOW
        assert recent[0] >= group_us - group * WINDOW
        assert not moved or moved[-1] < group_us
        assert len(recent) + len(moved) == number + 1
        assert bool(moved) == (group_us > T0), "a passed group moves with the next rollup"
    await store.close()


async def test_dropping_marks_is_over_when_it_returns(tmp_path: Path) -> None:
    """A worker goes on then, and the next marks of the same windows must stay."""
    store = SqliteStore(tmp_path, FakeClock(NOW), [DATASET])
    await store.open()
    namespace = await make_namespace(store)
    failing = AsyncMock(side_effect=StoreUnavailableError("planted"))
    with patch.object(store.database, "write", failing), pytest.raises(StoreUnavailableError):
        await store.rollups.drop_marks(namespace, 0, NOW)
    await store.close()


def _starts(connection: sqlite3.Connection) -> tuple[list[int], list[int]]:
    """The starts of windows with rows in order of time, and of those in order of counters."""
    sql = "SELECT DISTINCT start FROM {} ORDER BY start"
    recent, moved = (
        [start_us for (start_us,) in connection.execute(sql.format(table))]
        for table in ("recent_windows", "windows")
    )
    return recent, moved
