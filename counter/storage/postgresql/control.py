"""Store namespaces, datasets and slices in PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from counter.bounds import NO_BOUNDS
from counter.holds import AFTER_HELD
from counter.ports import Clock
from counter.storage.postgresql.database import PostgresqlDatabase
from counter.storage.postgresql.fence import wait_for_appends
from counter.types import (
    DELETED,
    ClockReading,
    Dataset,
    Era,
    Namespace,
    NamespaceSettings,
    Slice,
    TokenBlock,
)
from counter.windows import first_watermark

_PURGE_ROWS: Final = 10_000
_NAMESPACES: Final = (
    "SELECT n.id, n.name, n.settings, n.era_from, n.era_limit, n.created_at, n.version,"
    " d.id, d.name, d.body FROM {s}.namespaces n JOIN {s}.datasets d ON d.id = n.dataset"
    " WHERE n.name IS NOT NULL ORDER BY n.name"
)


class PostgresqlControl:
    """See :class:`counter.ports.ControlPlane`."""

    def __init__(self, database: PostgresqlDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def read_clock(self) -> ClockReading:
        """Return how far the server's clock is ahead of this process's, and behind the fence."""
        began_us = self._clock.boottime_us()
        wall_us = self._clock.wall_us()
        time_us, fence_us = await self._database.row(
            "SELECT {s}.clock_us(), (SELECT max(fence) FROM {s}.datasets)"
        )
        half_us = (self._clock.boottime_us() - began_us) // 2
        return ClockReading(time_us - wall_us - half_us, half_us, max(0, fence_us - time_us))

    async def datasets(self) -> Sequence[Dataset]:
        rows = await self._database.rows("SELECT id, name, body FROM {s}.datasets ORDER BY id")
        return [_dataset(*row) for row in rows]

    async def namespaces(self) -> Sequence[Namespace]:
        rows = await self._database.rows(_NAMESPACES)
        return [_namespace(row) for row in rows]

    async def create_namespace(
        self, name: str, settings: NamespaceSettings, now_us: int
    ) -> Namespace | None:
        [dataset] = [each for each in await self.datasets() if each.name == settings.dataset]
        through_us = first_watermark(dataset, settings, now_us)
        made = await self._database.value(
            "WITH made AS (INSERT INTO {s}.namespaces"
            " (name, dataset, settings, era_from, era_limit, created_at, passed)"
            " VALUES ($1, $2, $3, ARRAY[0], ARRAY[$4::bigint], $5, $6)"
            " ON CONFLICT (name) DO NOTHING RETURNING id),"
            " marked AS (INSERT INTO {s}.watermarks SELECT made.id, shard, $6 FROM made,"
            " generate_series(0, $7::integer - 1) shard) SELECT id FROM made",
            name,
            dataset.id,
            json.dumps(settings.document()),
            settings.accept_limit_us,
            now_us,
            through_us,
            settings.shards,
        )
        if made is None:
            await self._database.confirm()
            return None
        eras = (Era(0, settings.accept_limit_us),)
        return Namespace(made, name, settings, eras, dataset, now_us, 1)

    async def update_namespace(self, namespace: Namespace, updated: Namespace) -> bool:
        """Do as the port says, and wait for the appends that may not know the bounds yet. Appends
        that still keep bounds that were taken away came before the change."""
        version = await self._database.value(
            "UPDATE {s}.namespaces SET settings = $3, era_from = $4, era_limit = $5,"
            " version = version + 1 WHERE id = $1 AND version = $2 AND name IS NOT NULL"
            " RETURNING version",
            namespace.id,
            namespace.version,
            json.dumps(updated.document()),
            [era.from_us for era in updated.eras],
            [era.accept_limit_us for era in updated.eras],
        )
        if version is not None and updated.settings.bounds != NO_BOUNDS:
            await wait_for_appends(self._database, namespace.dataset.id)
        return version is not None

    async def delete_namespace(self, namespace: Namespace) -> bool:
        """Do as the port says, and wait for the appends that may still be acknowledged."""
        deleted = await self._database.value(
            "UPDATE {s}.namespaces SET name = NULL"
            " WHERE id = $1 AND version = $2 AND name IS NOT NULL RETURNING id",
            namespace.id,
            namespace.version,
        )
        if deleted is not None:
            await wait_for_appends(self._database, namespace.dataset.id)
        return deleted is not None

    async def counters(
        self, namespace: Namespace, *, prefix: str, after: str | None, limit: int
    ) -> Sequence[str]:
        rows = await self._database.rows(
            "SELECT name FROM {s}.counters c WHERE namespace = $1 AND name >= $2 AND name > $3"
            " AND starts_with(name, $2) AND NOT EXISTS (SELECT FROM {s}.pending p"
            " WHERE p.namespace = $1 AND p.counter = c.name AND p.recount = $5)"
            " ORDER BY name LIMIT $4",
            *(namespace.id, prefix, after or AFTER_HELD, limit, DELETED),
        )
        return [row[0] for row in rows]

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        rows = await self._database.rows(
            "SELECT start, until, time_bucket, event_buckets, retired_at FROM {s}.slices"
            " WHERE dataset = $1 ORDER BY start",
            dataset.id,
        )
        return [Slice(*row) for row in rows]

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        await self._database.rows(
            "SELECT {s}.make_slice($1, start, until, time_bucket, event_buckets)"
            " FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::integer[])"
            " s (start, until, time_bucket, event_buckets)",
            dataset.id,
            [each.start_us for each in slices],
            [each.end_us for each in slices],
            [each.time_bucket_us for each in slices],
            [each.event_buckets for each in slices],
        )

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        await self._database.rows(
            "UPDATE {s}.slices SET retired_at = $3"
            " WHERE dataset = $1 AND start = $2 AND retired_at IS NULL",
            *(dataset.id, start_us, now_us),
        )

    async def drop_slice(self, dataset: Dataset, start_us: int) -> bool:
        dropped: bool = await self._database.value(
            "SELECT {s}.drop_slice($1, $2)", dataset.id, start_us
        )
        return dropped

    async def dropped_before(self, dataset: Dataset) -> int:
        time_us: int = await self._database.value(
            "SELECT dropped_before FROM {s}.datasets WHERE id = $1", dataset.id
        )
        return time_us

    async def lease_tokens(self, count: int, now_us: int) -> TokenBlock:
        issuer, next_number, time_us = await self._database.row(
            "UPDATE {s}.tokens SET next = next + $1, time = greatest(time, $2)"
            " RETURNING issuer, next, time",
            *(count, now_us),
        )
        return TokenBlock(issuer, next_number - count, time_us)

    async def purge(self, now_us: int) -> bool:
        horizon_us = min(
            (now_us - 2 * each.retention_us - each.slice_us for each in await self.datasets()),
            default=0,
        )
        more: bool = await self._database.value(
            "SELECT {s}.purge($1, $2, $3)", now_us, horizon_us, _PURGE_ROWS
        )
        return more


def _dataset(dataset_id: int, name: str, body: str) -> Dataset:
    return Dataset(id=dataset_id, name=name, **json.loads(body))


def _namespace(row: Sequence[Any]) -> Namespace:
    namespace_id, name, text, era_from, era_limit, created_at_us, version, *dataset = row
    document = json.loads(text)
    return Namespace(
        id=namespace_id,
        name=name,
        settings=NamespaceSettings.from_document(document),
        eras=tuple(map(Era, era_from, era_limit)),
        dataset=_dataset(*dataset),
        created_at_us=created_at_us,
        version=version,
        announced_eras=Namespace.announced_in(document),
    )
