"""Store leases in one process, for the embedded stores and simulations."""

from __future__ import annotations

from collections.abc import Sequence

from counter.ports import Clock


class MemoryLeases:
    """:class:`counter.ports.LeaseStore`; leases expire by the boot clock."""

    def __init__(self, clock: Clock) -> None:
        self._time = clock
        self._workers: dict[str, int] = {}

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        self._workers[worker] = self._time.boottime_us() + ttl_us

    async def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

    async def workers(self) -> Sequence[str]:
        now_us = self._time.boottime_us()
        return sorted(name for name, until_us in self._workers.items() if until_us > now_us)
