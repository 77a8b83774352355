"""Store API keys and the leases of workers in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from counter.api_keys import ApiKey
from counter.storage.postgresql.database import PostgresqlDatabase
from counter.storage.shared.key_documents import KeyReader, key_document


class PostgresqlKeys:
    """See :class:`counter.api_keys.KeyStore`."""

    def __init__(self, database: PostgresqlDatabase) -> None:
        self._database = database
        self._key_reader = KeyReader()

    async def api_keys(self) -> Sequence[ApiKey]:
        rows = await self._database.rows("SELECT id, document, used FROM {s}.api_keys")
        return self._key_reader.keys(tuple(row) for row in rows)

    async def create_api_key(self, key: ApiKey) -> bool:
        made = await self._database.value(
            "INSERT INTO {s}.api_keys (id, document) VALUES ($1, $2)"
            " ON CONFLICT DO NOTHING RETURNING id",
            *(key.id, key_document(key)),
        )
        if made is None:
            await self._database.confirm()
        return made is not None

    async def change_api_key(self, old: ApiKey, new: ApiKey) -> bool:
        changed = await self._database.value(
            "UPDATE {s}.api_keys SET document = $3 WHERE id = $1 AND document = $2 RETURNING id",
            *(old.id, key_document(old), key_document(new)),
        )
        return changed is not None

    async def forget_api_key(self, key: ApiKey) -> bool:
        forgotten = await self._database.value(
            "DELETE FROM {s}.api_keys WHERE id = $1 AND document = $2 RETURNING id",
            *(key.id, key_document(key)),
        )
        return forgotten is not None

    async def note_api_key_uses(self, uses: Sequence[tuple[str, int]]) -> None:
        await self._database.rows(
            "UPDATE {s}.api_keys k SET used = greatest(k.used, u.used) FROM (SELECT id,"
            " max(used) AS used FROM unnest($1::text[], $2::bigint[]) u (id, used) GROUP BY id) u"
            " WHERE k.id = u.id",
            [key_id for key_id, _ in uses],
            [used_us for _, used_us in uses],
        )


class PostgresqlLeases:
    """See :class:`counter.capabilities.LeaseStore`: by the server's clock."""

    def __init__(self, database: PostgresqlDatabase) -> None:
        self._database = database

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        await self._database.rows(
            "INSERT INTO {s}.leases VALUES ($1, {s}.clock_us() + $2) ON CONFLICT (worker)"
            " DO UPDATE SET expires = excluded.expires",
            *(worker, ttl_us),
        )

    async def leave(self, worker: str) -> None:
        await self._database.rows("DELETE FROM {s}.leases WHERE worker = $1", worker)

    async def workers(self) -> Sequence[str]:
        rows = await self._database.rows(
            "SELECT worker FROM {s}.leases WHERE expires > {s}.clock_us() ORDER BY worker"
        )
        return [row[0] for row in rows]
