"""Leases of background work in Cassandra. Their time is counted by Cassandra's own clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from counter.limits import SECOND
from counter.storage.cassandra.base import CassandraBase

_HEARTBEAT: Final = (
    "INSERT INTO {control}.workers (everyone, worker) VALUES (0, ?) USING TTL ? AND TIMESTAMP ?"
)
_LEAVE: Final = "DELETE FROM {control}.workers USING TIMESTAMP ? WHERE everyone = 0 AND worker = ?"
_WORKERS: Final = "SELECT worker FROM {control}.workers WHERE everyone = 0"


class CassandraLeases(CassandraBase):
    """:class:`counter.ports.LeaseStore`. A time is rounded up to whole seconds."""

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        ttl_s = max(1, -(-ttl_us // SECOND))
        await self._control.write(_HEARTBEAT, worker, ttl_s, self._clock.now_us())

    async def leave(self, worker: str) -> None:
        # A heartbeat of the same instant loses against it.
        await self._control.write(_LEAVE, self._clock.now_us(), worker)

    async def workers(self) -> Sequence[str]:
        return [name for (name,) in await self._control.read(_WORKERS)]
