"""Store everything in SQLite, for one process and one data directory.

The write transaction itself checks a token's age and its decision, so most races of a distributed
store cannot happen here; the core and the roller are the same code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counter.capabilities import Capabilities
from counter.config.store_kinds import Backup, Progress, StoreKind
from counter.errors import StartupError
from counter.limits import WAL_BYTES_MAX
from counter.ports import Clock
from counter.storage.memory.store import MemoryLeases
from counter.storage.sqlite.control import SqliteControl
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.decisions import SqliteDecisions
from counter.storage.sqlite.events import SqliteEvents
from counter.storage.sqlite.keys import SqliteKeys
from counter.storage.sqlite.offline import DATABASE
from counter.storage.sqlite.page_sums import ALL_PAGES
from counter.storage.sqlite.rollups import SqliteRecounts, SqliteRollups
from counter.storage.sqlite.settings import SqliteSettings
from counter.storage.sqlite.window_rollup import SqliteWindowRollup
from counter.types import Dataset

if TYPE_CHECKING:
    from counter.config.findings import Finding

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
        self.separate_writes = None
        self.rollups = SqliteRollups(database)
        self.recounts = SqliteRecounts(database)
        self.decisions = SqliteDecisions(database, self.events.holds)
        self.control = SqliteControl(database)
        # In memory, because only one process holds the directory.
        self.leases = MemoryLeases(clock)
        self.keys = SqliteKeys(directory)
        self.capabilities = Capabilities(
            embedded=True,
            bounds=True,
            holds=self.events.holds,
            busiest=self.events.busiest,
            roll_window=SqliteWindowRollup(database, self.rollups).roll,
        )
        self.tally = database.tally
        self.queues, self.close, self.ping = database.queues, database.close, database.ping

    async def open(self) -> None:
        """Open the database. Raises StartupError."""
        await self.database.open(self.control.load)


class SqliteKind(StoreKind[SqliteSettings]):
    """The kind of store of SQLite."""

    name, settings = "sqlite", SqliteSettings
    serves_alone = True

    def open(
        self, settings: SqliteSettings, clock: Clock, *, to_audit: bool = False
    ) -> SqliteStore:
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
        self, settings: SqliteSettings, clock: Clock
    ) -> AsyncIterator[tuple[SqliteKeys, None]]:
        yield SqliteKeys(settings.data), None

    async def apply_schema(self, settings: SqliteSettings) -> Sequence[str]:
        return [f"SQLite needs no schema to be applied: {settings.data} is made at the start"]

    def back_up(
        self,
        settings: SqliteSettings,
        target: Path,
        *,
        now_us: int,
        bytes_per_s: float,
        progress: Progress,
    ) -> Backup:
        from counter.storage.sqlite.offline import back_up

        return back_up(
            settings.data,
            target,
            now_us=now_us,
            bytes_per_s=bytes_per_s,
            progress=progress,
            wal_bytes_max=settings.wal_bytes_max,
        )

    def restore(
        self,
        settings: SqliteSettings,
        source: Path,
        *,
        now_us: int,
        progress: Progress,
        without_keys: bool,
    ) -> Backup:
        from counter.storage.sqlite.offline import restore

        return restore(
            source, settings.data, now_us=now_us, progress=progress, without_keys=without_keys
        )

    async def begin_new_life(
        self, settings: SqliteSettings, act: AbstractAsyncContextManager[Any]
    ) -> str:
        raise StartupError("store is sqlite: `counter restore` does all that is needed there")

    async def check(self, settings: SqliteSettings, clock: Clock) -> AsyncIterator[Finding]:
        from counter.storage.sqlite.offline import check_directory

        for each in check_directory(settings.data, clock):
            yield each
