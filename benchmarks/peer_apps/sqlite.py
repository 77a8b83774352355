"""SQLite as one begins with it: a transaction a request, on disk before the answer."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from uuid import UUID

from fastapi.concurrency import run_in_threadpool

_TABLES = """\
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS tokens (token BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
"""
_SEE = "INSERT INTO tokens VALUES (?) ON CONFLICT DO NOTHING"
_COUNT = "INSERT INTO counters VALUES (?, ?) ON CONFLICT DO UPDATE SET n = n + excluded.n"


class SqliteStore:
    """On the event loop's thread: the least CPU, and nothing else goes on during a commit."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, check_same_thread=False)

    async def open(self) -> None:
        """Make the tables."""
        self._database.executescript(_TABLES)

    async def close(self) -> None:
        """Close the file."""
        self._database.close()

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """Insert the token, count where it is new, commit."""
        return self._add(counter, token, delta)

    def _add(self, counter: str, token: UUID, delta: int) -> bool:
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


class ThreadStore(SqliteStore):
    """In FastAPI's pool of threads, as a route without `async` would be: a commit waits for the
    disk while the loop reads requests."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # SQLite takes one writer at a time.
        self._turn = Lock()

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """The same, in a thread, when its turn comes."""
        return await run_in_threadpool(self._in_turn, counter, token, delta)

    def _in_turn(self, counter: str, token: UUID, delta: int) -> bool:
        with self._turn:
            return self._add(counter, token, delta)
