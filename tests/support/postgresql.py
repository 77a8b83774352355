"""A real PostgreSQL server on a free port, of Debian's package."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from counter.storage.postgresql import PostgresqlOptions, PostgresqlStore, apply_schema
from counter.storage.postgresql.database import Database
from counter.types import Dataset
from scripts.postgresql_server import PostgresqlServer, postgresql_missing
from tests.support.clock import FakeClock
from tests.support.needs import miss


class ClockedDatabase(Database):
    """A database whose functions read the time that the test says."""

    clock: FakeClock
    _told_us = -1

    async def rows(self, sql: str, *arguments: Any) -> Sequence[Any]:
        now_us = self.clock.now_us()
        if now_us != self._told_us:
            self._told_us = now_us
            await super().rows("UPDATE {s}.test_clock SET us = $1", now_us)
        return await super().rows(sql, *arguments)


class FreshStore(PostgresqlStore):
    """A store that opens as if it were new."""

    def __init__(
        self, options: PostgresqlOptions, clock: FakeClock, datasets: Sequence[Dataset]
    ) -> None:
        super().__init__(options, clock)
        self._clock = clock
        self._datasets = datasets

    async def open(self) -> None:
        database = Database(self._database.options)
        await database.open()
        await database.rows("DROP SCHEMA IF EXISTS {s} CASCADE")
        await apply_schema(database, self._datasets)
        await database.rows("CREATE TABLE {s}.test_clock AS SELECT 0::bigint AS us")
        await database.rows(
            "CREATE OR REPLACE FUNCTION {s}.clock_us() RETURNS bigint LANGUAGE sql VOLATILE"
            " AS 'SELECT us FROM {s}.test_clock'"
        )
        await database.close()
        self._database.__class__ = ClockedDatabase
        self._database.clock = self._clock  # type: ignore[attr-defined]
        await super().open()


@contextmanager
def postgresql_server() -> Iterator[PostgresqlServer]:
    """A server of the caller's own.

    Its directory is not pytest's: that one is closed to the user that the server runs as.
    """
    if problem := postgresql_missing():
        miss(problem)
    with tempfile.TemporaryDirectory(prefix="postgresql-") as directory:
        Path(directory).chmod(0o711)
        server = PostgresqlServer(Path(directory) / "server")
        server.start()
        yield server
        server.stop()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One server for all tests that need no more than a database of it."""
    with postgresql_server() as server:
        yield server
