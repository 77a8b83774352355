"""Store everything in SQLite, for one process and one data directory.

The write transaction itself checks a token's age and its decision, so most races of a distributed
store cannot happen here; the core and the roller are the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from counter.limits import WAL_BYTES_MAX
from counter.ports import Clock
from counter.storage.memory.leases import MemoryLeases
from counter.storage.sqlite.control import SqliteControl
from counter.storage.sqlite.decisions import SqliteDecisions
from counter.storage.sqlite.keys import SqliteKeys
from counter.storage.sqlite.rollups import SqliteRollups
from counter.types import Dataset

__all__ = ["SqliteKeys", "SqliteStore"]


class SqliteStore(SqliteDecisions, SqliteRollups, SqliteControl, MemoryLeases, SqliteKeys):
    """All the ports of :class:`counter.ports.Store` over one data directory.

    Leases are in memory, because only one process holds the directory.
    """

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        datasets: Sequence[Dataset],
        *,
        wal_bytes_max: int = WAL_BYTES_MAX,
    ) -> None:
        super().__init__(directory, clock, datasets)
        self.tally.wal_bytes_max = wal_bytes_max
        MemoryLeases.__init__(self, clock)
        SqliteKeys.__init__(self, directory)
