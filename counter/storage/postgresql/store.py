"""Compose the PostgreSQL store from its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from counter.errors import StartupError, StoreUnavailableError
from counter.metrics import StoreTally
from counter.ports import Capabilities, Clock
from counter.storage.postgresql.control import PostgresqlControl
from counter.storage.postgresql.database import Database, PostgresqlOptions, lacks_schema
from counter.storage.postgresql.decisions import PostgresqlDecisions
from counter.storage.postgresql.events import PostgresqlEvents
from counter.storage.postgresql.keys import PostgresqlKeys, PostgresqlLeases
from counter.storage.postgresql.rollups import PostgresqlRollups
from counter.storage.postgresql.schema import check_version

#: Settings of the server that an acknowledged add depends on, and what is too little.
_DURABILITY = (
    ("fsync", ("off",)),
    ("full_page_writes", ("off",)),
    ("synchronous_commit", ("off",)),
)


class PostgresqlStore:
    """:class:`counter.ports.Store` over one schema of a PostgreSQL database."""

    def __init__(self, options: PostgresqlOptions, clock: Clock) -> None:
        database = self._database = Database(options)
        self.events = PostgresqlEvents(database)
        self.rollups = PostgresqlRollups(database)
        self.decisions = PostgresqlDecisions(database)
        self.control = PostgresqlControl(database, clock)
        self.leases = PostgresqlLeases(database)
        self.keys = PostgresqlKeys(database)
        self.tally = StoreTally(("write", "read"))
        self.capabilities = Capabilities(transactional=True, busiest=self.events.busiest)

    async def open(self) -> None:
        """Connect. Raises StartupError and StoreUnavailableError."""
        await self._database.open()
        try:
            version = await self._database.value("SELECT version FROM {s}.meta")
            if version is None:
                raise StartupError("the schema is empty: run `counter schema apply`")
            check_version(version)
            await self._check_server()
        except StoreUnavailableError as error:
            await self._database.close()
            if lacks_schema(error):
                # Waiting does not make it.
                raise StartupError(error.detail) from error
            raise
        except BaseException:
            await self._database.close()
            raise

    async def close(self) -> None:
        """Close the connections."""
        await self._database.close()

    async def ping(self) -> None:
        """Raise StoreUnavailableError where a write would not succeed now."""
        await self._database.rows("UPDATE {s}.tokens SET next = next")

    def queues(self) -> Mapping[str, int]:
        """Return the length of each of its queues."""
        return {}

    async def _check_server(self) -> None:
        """Raise StartupError if the server may lose what it acknowledges, or sorts differently."""
        names: Sequence[str] = [name for name, _ in _DURABILITY]
        rows = await self._database.rows(
            "SELECT name, setting FROM pg_settings WHERE name = ANY($1::text[])", names
        )
        found = dict(rows)
        for name, refused in _DURABILITY:
            if found[name] in refused:
                raise StartupError(
                    f"PostgreSQL runs with {name} = {found[name]}, and would lose acknowledged"
                    f" adds in a crash: set {name} = on"
                )
        encoding = await self._database.value("SHOW server_encoding")
        if encoding != "UTF8":
            raise StartupError(
                f"the database has the encoding {encoding}: create one with ENCODING 'UTF8'"
            )
