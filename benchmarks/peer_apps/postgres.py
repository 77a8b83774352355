"""PostgreSQL: a row a token, inserted unless it is there, and the counter's row updated with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

import asyncpg

CONNECTIONS: Final = 16
_TABLES: Final = """\
CREATE TABLE IF NOT EXISTS tokens (token uuid PRIMARY KEY);
CREATE TABLE IF NOT EXISTS counters (name text PRIMARY KEY, n numeric NOT NULL);
"""
_SEE_AND_COUNT: Final = """\
WITH seen AS (INSERT INTO tokens (token) VALUES ($1) ON CONFLICT DO NOTHING RETURNING true)
INSERT INTO counters (name, n) SELECT $2, $3::bigint FROM seen
ON CONFLICT (name) DO UPDATE SET n = counters.n + excluded.n
RETURNING true
"""
_COUNTS: Final = "SELECT name, n FROM counters WHERE name = ANY($1)"


class PostgresStore:
    """Both in one statement, which is a transaction of its own. Tokens are kept for ever."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: asyncpg.Pool

    async def open(self) -> None:
        """Make the tables, and all connections of the pool."""
        self._pool = await asyncpg.create_pool(
            self._url, min_size=CONNECTIONS, max_size=CONNECTIONS, reset=_keep
        )
        await self._pool.execute(_TABLES)

    async def close(self) -> None:
        """Close all connections of the pool."""
        await self._pool.close()

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """Run the statement, which returns a row if the token is new."""
        return bool(await self._pool.fetchval(_SEE_AND_COUNT, token, counter, delta))

    async def counts(self, counters: Sequence[str]) -> list[int]:
        """One SELECT."""
        found = {row[0]: int(row[1]) for row in await self._pool.fetch(_COUNTS, list(counters))}
        return [found.get(name, 0) for name in counters]


async def _keep(_connection: object) -> None:
    """Skip the session reset on release; sessions set no state."""
