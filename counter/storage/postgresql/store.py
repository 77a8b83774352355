"""Compose the PostgreSQL store from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from counter.capabilities import Capabilities
from counter.errors import StartupError, StoreUnavailableError
from counter.metrics import StoreTally
from counter.ports import Clock
from counter.storage.postgresql.control import PostgresqlControl
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions, lacks_schema
from counter.storage.postgresql.decisions import PostgresqlDecisions
from counter.storage.postgresql.events import PostgresqlEvents
from counter.storage.postgresql.holds import PostgresqlHolds
from counter.storage.postgresql.keys import PostgresqlKeys, PostgresqlLeases
from counter.storage.postgresql.rollups import PostgresqlRecounts, PostgresqlRollups
from counter.storage.postgresql.schema import check_version
from counter.storage.postgresql.server import check_server


class PostgresqlStore:
    """:class:`counter.ports.Store` over one schema of a PostgreSQL database."""

    def __init__(self, options: PostgresqlOptions, clock: Clock) -> None:
        database = self._database = PostgresqlDatabase(options)
        self.tally = StoreTally(("write", "read"))
        holds = PostgresqlHolds(database)
        self.events = PostgresqlEvents(database, self.tally, holds)
        self.separate_writes = None
        self.rollups = PostgresqlRollups(database, clock)
        self.recounts = PostgresqlRecounts(database, self.events.forget)
        self.decisions = PostgresqlDecisions(database, holds)
        self.control = PostgresqlControl(database, clock)
        self.leases = PostgresqlLeases(database)
        self.keys = PostgresqlKeys(database)
        self.capabilities = Capabilities(
            busiest=self.events.busiest,
            server_warnings=partial(check_server, database),
            bounds=True,
            holds=holds,
        )

    async def open(self) -> None:
        """Connect. Raises StartupError and StoreUnavailableError."""
        await self._database.open()
        try:
            version = await self._database.value("SELECT version FROM {s}.meta")
            if version is None:
                raise StartupError("the schema is empty: run `counter schema apply`")
            check_version(version)
            await check_server(self._database)
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
        """Finish what is under way, and close the connections."""
        await self.events.close()
        await self._database.close()

    async def ping(self) -> None:
        """Raise StoreUnavailableError where a write would not succeed now."""
        await self._database.rows("UPDATE {s}.tokens SET next = next")

    def queues(self) -> Mapping[str, int]:
        """Return the length of each of its queues."""
        return {"store_write": self.events.waiting}
