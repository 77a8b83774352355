"""Leases in one process: what the embedded stores need, and what a simulation runs over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from counter.ports import Clock


class MemoryLeases:
    """:class:`counter.ports.LeaseStore`; a time that is over counts from the clock that runs while
    the machine is suspended."""

    def __init__(self, clock: Clock) -> None:
        self._time = clock
        self._workers: dict[str, int] = {}
        self._slots: dict[str, tuple[str, int]] = {}

    async def heartbeat(self, worker: str, ttl_us: int) -> Sequence[str]:
        now_us = self._time.boottime_us()
        self._workers[worker] = now_us + ttl_us
        return sorted(name for name, until_us in self._workers.items() if until_us > now_us)

    async def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

    async def acquire(self, slots: Sequence[str], worker: str, ttl_us: int) -> Sequence[bool]:
        now_us = self._time.boottime_us()
        answers = []
        for slot in slots:
            holder, until_us = self._slots.get(slot, (worker, 0))
            mine = holder == worker or until_us <= now_us
            if mine:
                self._slots[slot] = (worker, now_us + ttl_us)
            answers.append(mine)
        return answers

    async def release(self, slots: Sequence[str], worker: str) -> None:
        for slot in slots:
            if self._slots.get(slot, ("", 0))[0] == worker:
                del self._slots[slot]

    async def holders(self) -> Mapping[str, str]:
        now_us = self._time.boottime_us()
        held = sorted(self._slots.items())
        return {slot: holder for slot, (holder, until_us) in held if until_us > now_us}
