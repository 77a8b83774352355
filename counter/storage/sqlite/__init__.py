"""Store everything in SQLite, for one process and one data directory.

The write transaction itself checks a token's age and its decision, so most races of a distributed
store cannot happen here; the core and the roller are the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from counter.limits import WAL_BYTES_MAX
from counter.ports import Capabilities, Clock
from counter.storage.memory.store import MemoryLeases
from counter.storage.sqlite.control import SqliteControl
from counter.storage.sqlite.database import Database
from counter.storage.sqlite.decisions import SqliteDecisions
from counter.storage.sqlite.events import SqliteEvents
from counter.storage.sqlite.keys import SqliteKeys
from counter.storage.sqlite.page_sums import ALL_PAGES
from counter.storage.sqlite.rollups import SqliteRollups
from counter.types import Dataset

__all__ = ["ALL_PAGES", "SqliteKeys", "SqliteStore"]


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
        self.database = database = Database(directory, clock, datasets, wal_bytes_max)
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
