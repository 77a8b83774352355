"""Store everything in SQLite, for one process and one data directory.

The write transaction itself checks a token's age and its decision, so most races of a distributed
store cannot happen here; the core and the roller are the same code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counter.config.store_kinds import StoreKind
from counter.errors import StartupError
from counter.limits import WAL_BYTES_MAX
from counter.ports import Capabilities, Clock
from counter.storage.memory.store import MemoryLeases
from counter.storage.sqlite.control import SqliteControl
from counter.storage.sqlite.copying import DATABASE
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.decisions import SqliteDecisions
from counter.storage.sqlite.events import SqliteEvents
from counter.storage.sqlite.keys import SqliteKeys
from counter.storage.sqlite.page_sums import ALL_PAGES
from counter.storage.sqlite.rollups import SqliteRollups
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.config.findings import Finding
    from counter.config.settings import Settings

__all__ = ["ALL_PAGES", "SqliteKeys", "SqliteKind", "SqliteStore"]


class SqliteStore:
    """:class:`counter.ports.Store` over one data directory."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        datasets: Sequence[Dataset],
        *,
        wal_bytes_max: int = WAL_BYTES_MAX,
    ) -> None:
        self.database = database = SqliteDatabase(directory, clock, datasets, wal_bytes_max)
        self.events = SqliteEvents(database)
        self.rollups = SqliteRollups(database)
        self.decisions = SqliteDecisions(database)
        self.control = SqliteControl(database)
        # In memory, because only one process holds the directory.
        self.leases = MemoryLeases(clock)
        self.keys = SqliteKeys(directory)
        self.capabilities = Capabilities(
            transactional=True, embedded=True, busiest=self.events.busiest
        )
        self.tally = database.tally
        self.queues, self.close, self.ping = database.queues, database.close, database.ping

    async def open(self) -> None:
        """Open the database. Raises StartupError."""
        await self.database.open(self.control.load)


class SqliteKind(StoreKind["Settings"]):
    """The kind of store of SQLite."""

    name = "sqlite"
    serves_alone = True

    def problems(self, settings: Settings) -> Iterator[str]:
        if settings.workers > 1:
            yield (
                f"workers is {settings.workers} and store is sqlite, whose data directory only one"
                " process can use: use --workers 1, or --store cassandra, postgresql or dynamodb"
            )

    def open(self, settings: Settings, clock: Clock, *, to_audit: bool = False) -> SqliteStore:
        if to_audit and not (settings.data / DATABASE).exists():
            raise StartupError(
                f"{settings.data} holds no counters: give the data directory of `counter serve`"
                " with --data, or --store cassandra"
            )
        most = settings.wal_bytes_max
        store = SqliteStore(settings.data, clock, settings.datasets(), wal_bytes_max=most)
        if to_audit:
            # Events that are damaged would be compared with counts of the same damage.
            store.database.pages_checked = ALL_PAGES
        return store

    @asynccontextmanager
    async def opened_keys(
        self, settings: Settings, clock: Clock
    ) -> AsyncIterator[tuple[SqliteKeys, None]]:
        yield SqliteKeys(settings.data), None

    async def apply_schema(self, settings: Settings) -> Sequence[str]:
        return [f"SQLite needs no schema to be applied: {settings.data} is made at the start"]

    async def begin_new_life(
        self, settings: Settings, act: AbstractAsyncContextManager[Any]
    ) -> str:
        raise StartupError("store is sqlite: `counter restore` does all that is needed there")

    async def check(self, settings: Settings, clock: Clock) -> AsyncIterator[Finding]:
        from counter.storage.sqlite.check import check_directory, check_disk

        for each in (*check_directory(settings, clock), check_disk(settings.data)):
            yield each
