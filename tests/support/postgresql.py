"""The store over a real PostgreSQL server."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from counter.errors import StartupError
from counter.ports import Clock
from counter.storage.postgresql import store
from counter.storage.postgresql.database import (
    PostgresqlDatabase,
    PostgresqlOptions,
    postgresql_options,
)
from counter.storage.postgresql.schema import apply_for, apply_schema
from counter.storage.postgresql.settings import PostgresqlSettings
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.clock import FakeClock
from counter.types import Dataset
from scripts.postgresql_server import PostgresqlServer
from tests.support.server import SMALL_WINDOWS
from tests.support.servers import postgresql_server

_EMPTY = """
DO $$
DECLARE
    each regclass;
BEGIN
    FOR each IN SELECT inhrelid FROM pg_inherits WHERE inhparent = '{s}.events'::regclass LOOP
        EXECUTE format('DROP TABLE %s', each);
    END LOOP;
    FOR each IN SELECT oid FROM pg_class WHERE relnamespace = '{s}'::regnamespace
        AND relkind = 'r' AND relname NOT IN ('meta', 'tokens', 'test_clock')
        ORDER BY relname = 'datasets'
    LOOP
        EXECUTE format('DELETE FROM %s', each);
    END LOOP;
    UPDATE {s}.tokens SET next = 0, time = 0;
END $$"""


class ClockedDatabase(PostgresqlDatabase):
    """A database with functions that read the test's clock."""

    def __init__(self, options: PostgresqlOptions, clock: FakeClock) -> None:
        super().__init__(options)
        self._clock = clock
        self._set_us = -1
        self._setting = asyncio.Lock()

    async def rows(self, sql: str, *arguments: Any) -> Sequence[Any]:
        async with self._setting:
            now_us = self._clock.now_us()
            if now_us != self._set_us:
                await super().rows("UPDATE {s}.test_clock SET us = $1", now_us)
                self._set_us = now_us
        return await super().rows(sql, *arguments)


class ClockedStore(PostgresqlStore):
    """A store over the schema of a :class:`FreshStore`; *clock* is the server's clock."""

    def __init__(
        self, options: PostgresqlOptions, clock: FakeClock, own: Clock | None = None
    ) -> None:
        with patch.object(
            store, "PostgresqlDatabase", lambda options: ClockedDatabase(options, clock)
        ):
            super().__init__(options, own or clock)


class FreshStore(ClockedStore):
    """A store that opens as if it were new.

    With *keeps_schema* it empties the tables that an earlier one left, which takes a few
    milliseconds: no test may change the functions of that schema.
    """

    def __init__(
        self,
        options: PostgresqlOptions,
        clock: FakeClock,
        datasets: Sequence[Dataset],
        *,
        keeps_schema: bool = False,
        own: Clock | None = None,
    ) -> None:
        super().__init__(options, clock, own)
        self._datasets = datasets
        self._keeps_schema = keeps_schema

    async def open(self) -> None:
        if self._keeps_schema:
            # Unless there is no schema yet.
            with suppress(StartupError):
                await super().open()
                await self._database.rows(_EMPTY)
                await apply_schema(self._database, self._datasets)
                return
        database = PostgresqlDatabase(self._database.options)
        await database.open()
        await database.rows("DROP SCHEMA IF EXISTS {s} CASCADE")
        await apply_schema(database, self._datasets)
        await database.rows("CREATE TABLE {s}.test_clock AS SELECT 0::bigint AS us")
        await database.rows(
            "CREATE OR REPLACE FUNCTION {s}.clock_us() RETURNS bigint LANGUAGE sql VOLATILE"
            " AS 'SELECT us FROM {s}.test_clock'"
        )
        # Tests drop slices with data that they look for.
        await database.rows(
            "CREATE OR REPLACE FUNCTION {s}.is_past_retention(p_dataset integer, p_until bigint)"
            " RETURNS boolean LANGUAGE sql STABLE AS 'SELECT true'"
        )
        await database.close()
        await super().open()


class _Shared:
    """The server of the fixture ``postgresql``, for code that is no fixture."""

    server: ClassVar[PostgresqlServer | None] = None


def stores_of(dataset: Dataset, clock: FakeClock) -> Callable[[], PostgresqlStore]:
    """Return a factory of stores over the same tables, which are empty at first."""
    assert _Shared.server is not None, "use the fixture postgresql"
    options = PostgresqlOptions(_Shared.server.dsn(), schema="kept")
    first = iter([FreshStore(options, clock, [dataset], keeps_schema=True)])
    return lambda: next(first, None) or ClockedStore(options, clock)


@pytest.fixture(scope="session")
def postgresql(child_processes: None) -> Iterator[PostgresqlServer]:
    """One server for all tests that need no more than a schema of it."""
    with postgresql_server() as server:
        _Shared.server = server
        yield server
        _Shared.server = None


async def settings_of_new(
    server: PostgresqlServer, given: Mapping[str, str], patched: pytest.MonkeyPatch
) -> Mapping[str, str]:
    """Make a new schema, and return the settings of a service over it: those that are *given*, and
    where the schema is."""
    patched.setenv("COUNTER_DSN", server.dsn())
    found: dict[str, Any] = {**given, "store": "postgresql"}
    settings = PostgresqlSettings(**{**SMALL_WINDOWS, **found})
    database = PostgresqlDatabase(postgresql_options(settings))
    await database.open()
    await database.rows("DROP SCHEMA IF EXISTS {s} CASCADE")
    await database.close()
    await apply_for(settings)
    return found
