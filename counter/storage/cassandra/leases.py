"""Leases of background work in Cassandra. Their time is counted by Cassandra's own clocks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Final

from counter.limits import SECOND
from counter.ports import Clock
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.ground import NO_OP
from counter.storage.cassandra.options import CassandraOptions

_HEARTBEAT: Final = (
    "INSERT INTO {control}.workers (everyone, worker) VALUES (0, ?) USING TTL ? AND TIMESTAMP ?"
)
_LEAVE: Final = "DELETE FROM {control}.workers USING TIMESTAMP ? WHERE everyone = 0 AND worker = ?"
_WORKERS: Final = "SELECT worker FROM {control}.workers WHERE everyone = 0"

_SLOT: Final = "SELECT worker, op FROM {control}.leases WHERE slot = ?"
_SLOTS: Final = "SELECT slot, worker FROM {control}.leases"
#: An update and no insert: its cells are all there is of the row, and expire together.
_TAKE: Final = (
    "UPDATE {control}.leases USING TTL ? SET worker = ?, op = ? WHERE slot = ? IF worker = ?"
)
_TRIES: Final = 3
_RELEASE: Final = "DELETE FROM {control}.leases WHERE slot = ? IF worker = ?"


class CassandraLeases(CassandraBase):
    """:class:`counter.ports.LeaseStore`. A time is rounded up to whole seconds."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        #: (slot, worker) that were held when last heard of: a guess that saves a round trip.
        self._held: set[tuple[str, str]] = set()

    async def heartbeat(self, worker: str, ttl_us: int) -> Sequence[str]:
        now_us = self._clock.now_us()
        await self._control.write(_HEARTBEAT, worker, _seconds(ttl_us), now_us)
        return [name for (name,) in await self._control.read(_WORKERS)]

    async def leave(self, worker: str) -> None:
        # A heartbeat of the same instant loses against it.
        await self._control.write(_LEAVE, self._clock.now_us(), worker)

    async def acquire(self, slots: Sequence[str], worker: str, ttl_us: int) -> Sequence[bool]:
        ttl_s = _seconds(ttl_us)
        return await asyncio.gather(*(self._take(slot, worker, ttl_s) for slot in slots))

    async def release(self, slots: Sequence[str], worker: str) -> None:
        await asyncio.gather(*(self._release(slot, worker) for slot in slots))

    async def holders(self) -> Mapping[str, str]:
        rows = await self._control.read(_SLOTS)
        return {slot: worker for slot, worker in sorted(rows) if worker is not None}

    async def _take(self, slot: str, worker: str, ttl_s: int) -> bool:
        """Take *slot* from nobody, or from *worker* itself."""
        holder = worker if (slot, worker) in self._held else None
        for _ in range(_TRIES):
            op = os.urandom(16)
            applied, row = await self._control.compare(
                _TAKE,
                (ttl_s, worker, op, slot, holder),
                seen_by=(_SLOT, (slot,)),
                mine=op,
                at=1,
            )
            if applied:
                self._held.add((slot, worker))
                return True
            holder = row[0] if row else None
            if holder not in (None, worker):
                break
        self._held.discard((slot, worker))
        return False

    async def _release(self, slot: str, worker: str) -> None:
        self._held.discard((slot, worker))
        await self._control.compare(
            _RELEASE, (slot, worker), seen_by=(_SLOT, (slot,)), mine=NO_OP, at=1
        )


def _seconds(us: int) -> int:
    return max(1, -(-us // SECOND))
