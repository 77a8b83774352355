"""Store everything in PostgreSQL, for any number of processes.

An append is one statement: it shares its dataset's lock, reads the server's clock, checks age and
decision, and inserts. docs/architecture.md explains the lock and the fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from counter.storage.postgresql.settings import PostgresqlSettings
from counter.storage.server_kind import ServerKind

if TYPE_CHECKING:
    from counter.ports import Clock, Store


class PostgresqlKind(ServerKind[PostgresqlSettings]):
    """The kind of store of PostgreSQL."""

    name, title, driver = "postgresql", "PostgreSQL", "asyncpg"
    start, look = "set dsn right, start PostgreSQL", "look at PostgreSQL's log"
    settings, backed_up_by, leads_clocks = PostgresqlSettings, "pg_dump", True

    def open(self, settings: PostgresqlSettings, clock: Clock, *, to_audit: bool = False) -> Store:
        self.require_driver()
        from counter.storage.postgresql.database import postgresql_options
        from counter.storage.postgresql.store import PostgresqlStore

        return PostgresqlStore(postgresql_options(settings), clock)

    async def apply_schema(self, settings: PostgresqlSettings) -> Sequence[str]:
        self.require_driver()
        from counter.storage.postgresql.schema import apply_for

        return await apply_for(settings)

    async def begin_new_life(
        self, settings: PostgresqlSettings, act: AbstractAsyncContextManager[Any]
    ) -> str:
        self.require_driver()
        from counter.storage.postgresql.schema import begin_new_life

        async with act:
            await begin_new_life(settings)
        # A restored database is of one moment, and needs no repair.
        return "and run counter audit --all"
