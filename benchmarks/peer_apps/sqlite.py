"""SQLite as one begins with it: a transaction a request, on disk before the answer."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

_TABLES = """\
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS tokens (token BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
"""
_SEE = "INSERT INTO tokens VALUES (?) ON CONFLICT DO NOTHING"
_COUNT = "INSERT INTO counters VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class SqliteStore:
    """A commit a request, on the event loop's thread: SQLite takes one writer at a time, and a
    thread pool made it slower, not faster."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path)

    async def open(self) -> None:
        """Make the tables."""
        self._database.executescript(_TABLES)

    async def close(self) -> None:
        """Close the file."""
        self._database.close()

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """Insert the token, count where it is new, commit."""
        with self._database as transaction:
            is_new = transaction.execute(_SEE, (token.bytes,)).rowcount == 1
            if is_new:
                transaction.execute(_COUNT, (counter, delta))
        return is_new

    async def counts(self, counters: Sequence[str]) -> list[int]:
        """A SELECT each."""
        select = "SELECT n FROM counters WHERE name = ?"
        rows = (self._database.execute(select, (name,)).fetchone() for name in counters)
        return [row[0] if row else 0 for row in rows]
