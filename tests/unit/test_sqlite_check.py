"""The checks of a data directory from outside."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from counter.errors import StartupError
from counter.storage.sqlite.offline import DATABASE, inspect


def test_the_version_is_seen_while_all_is_in_the_log_yet(tmp_path: Path) -> None:
    """Regression: of a service that had just begun it was 0, as if the next start raised it."""
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        assert inspect(tmp_path)[0] == 0
        for version in (1, 7):
            database.execute(f"CREATE TABLE t{version} (value)")
            database.execute(f"PRAGMA user_version = {version}")
            assert inspect(tmp_path)[0] == version
    assert inspect(tmp_path)[0] == 7


def test_a_database_that_was_cut_is_distinguished_from_a_whole_one(tmp_path: Path) -> None:
    """Regression: unchecked parts were reported as right."""
    path = tmp_path / DATABASE
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE t AS SELECT zeroblob(100000)")
        database.commit()
        # Its end may still be in the log.
        inspect(tmp_path)
    inspect(tmp_path)
    path.write_bytes(path.read_bytes()[:40_000])
    with pytest.raises(StartupError, match="is damaged; restore it"):
        inspect(tmp_path)


def test_a_glance_leaves_no_file_behind(tmp_path: Path) -> None:
    """Regression: SQLite made a log beside a database that no process had open."""
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("PRAGMA journal_mode = WAL")
    assert inspect(tmp_path)[0] == 0
    assert [each.name for each in tmp_path.iterdir()] == [DATABASE]
