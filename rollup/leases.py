"""Which worker rolls up what: a fixed number of slots, shared fairly by the workers that live.

A shard belongs to a slot, so ten thousand namespaces cost no more than one. Each worker has one
lease, a row that expires unless it is renewed. Every worker reads whose rows exist and computes
the same shares as the others do, so the slots themselves are stored nowhere. Leases only spare
duplicate work: no write depends on one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import xxhash

from counter.background import pause
from counter.core.clock_guard import ClockGuard
from counter.errors import UnavailableError
from counter.limits import LEASE_LOOK_US, LEASE_SLOTS, LEASE_TIME_US, SECOND
from counter.ports import Clock, LeaseStore

_log = logging.getLogger("counter.leases")
#: The slot of the work that one worker at a time does for all: making and dropping slices.
MAINTENANCE: Final = "maintenance"
#: A worker looks at least so often in a lease's time.
_LOOKS_MIN: Final = 5
#: After failures a worker pauses for longer, up to this part of its lease's time.
_PAUSE_MAX: Final = 3
SLOTS: Final = (MAINTENANCE, *(str(number) for number in range(LEASE_SLOTS)))


def worker_id() -> str:
    """A name that no other worker has, and that tells an operator where to look."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def slot_of(namespace_id: int, shard: int) -> str:
    """The slot of a shard. A namespace's shards lie in consecutive slots, from a hashed first."""
    first = xxhash.xxh64_intdigest(namespace_id.to_bytes(8, "big"))
    return str((first + shard) % LEASE_SLOTS)


def share_out(slots: Sequence[str], workers: Sequence[str]) -> dict[str, list[str]]:
    """Deal *slots* to *workers*: the same shares whoever reckons, none larger by more than one.

    Every run of as many slots as there are workers gives each of them one, so that the shards of
    one namespace spread too. Within a run a slot goes to who ranks first for it among those left
    (rendezvous hashing), so that most slots stay where they are when a worker joins or leaves.
    """
    shares: dict[str, list[str]] = {worker: [] for worker in sorted(workers)}
    left: list[str] = []
    for slot in slots:
        left = left or list(shares)
        first = max(left, key=partial(_rank, slot))
        left.remove(first)
        shares[first].append(slot)
    return shares


def owners_of(workers: Sequence[str]) -> Mapping[str, str]:
    """The worker that each slot belongs to while *workers* live; empty where none does."""
    if not workers:
        return {}
    shares = share_out(SLOTS, workers)
    return {slot: worker for worker, share in shares.items() for slot in share}


def _rank(slot: str, worker: str) -> int:
    return xxhash.xxh64_intdigest(f"{worker}/{slot}".encode())


class Leases:
    """One worker's lease, and the slots that are its own while the lease lasts."""

    def __init__(
        self,
        store: LeaseStore,
        clock: Clock,
        worker: str,
        *,
        lease_time_us: int = LEASE_TIME_US,
        guard: ClockGuard | None = None,
    ) -> None:
        """A dead worker's slots are another's within *lease_time_us*: its lease runs out two looks
        before. So does the lease of a worker whose clock *guard* does not know to be right."""
        self._store = store
        self._clock = clock
        self._guard = guard
        self._look_us = min(LEASE_LOOK_US, lease_time_us // _LOOKS_MIN)
        self._ttl_us = lease_time_us - 2 * self._look_us
        self.worker = worker
        #: Set when slots became this worker's; whoever waits for it clears it.
        self.taken = asyncio.Event()
        #: What keeps the lease from being renewed; None while it is.
        self.trouble: str | None = None
        #: Until when the lease lasts, by this machine's clock that runs while suspended.
        self._until_us = 0
        #: Slots that changed hands, as seen from here.
        self.changes = dict.fromkeys(("taken", "given_back", "lost"), 0)
        self._live: tuple[str, ...] = ()
        self._owners: Mapping[str, str] = {}
        #: From when on a slot that a living worker gives up is free: that one may not know yet.
        self._free_us: dict[str, int] = {}
        #: The slots that were held after the last turn.
        self._had: frozenset[str] = frozenset()

    @property
    def live(self) -> tuple[str, ...]:
        """The workers that lived at the last look."""
        return self._live

    def holds(self, slot: str) -> bool:
        """Whether *slot* is this worker's, as far as it can know without asking."""
        now_us = self._clock.boottime_us()
        is_ours = self._owners.get(slot) == self.worker
        return is_ours and self._free_us.get(slot, 0) <= now_us < self._until_us

    def held(self) -> list[str]:
        """The slots that are this worker's now."""
        return [slot for slot in SLOTS if self.holds(slot)]

    async def keep(self, stop: asyncio.Event) -> None:
        """Take turns until *stop* is set. No failure ends it; after failures pauses double."""
        pause_us = self._look_us
        while not stop.is_set():
            try:
                await self.turn()
            except UnavailableError as error:
                self._note(error.detail)
            except Exception:
                self._note("a turn failed unexpectedly; see the log")
                _log.exception("a turn of the leases failed unexpectedly")
            if self.trouble is None:
                pause_us = wait_us = self._look_us
            else:
                # Random, so that workers that failed together do not try again together.
                wait_us = round(random.uniform(0.5, 1) * pause_us)
                pause_us = max(self._look_us, min(2 * pause_us, self._ttl_us // _PAUSE_MAX))
            await pause(stop, wait_us / SECOND)

    async def turn(self) -> None:
        """Renew the lease, and see which slots are this worker's now.

        Raises UnavailableError if the store fails, and ClockSkewError if this machine's clock is
        wrong: what is held stays held until the lease runs out.
        """
        now_us = self._clock.boottime_us()
        if self._had and now_us >= self._until_us:
            _log.warning("the lease ran out before it was renewed")
            self._count("lost", self._had)
            self._had = frozenset()
            # Others may hold its slots by now: begin as a worker that joins.
            self._owners = {}
        if self._guard is not None:
            # Work that goes by the clock is refused here, so another worker must get the slots. One
            # that is wrong for less than the lease's time changes nothing.
            self._guard.check_all()
        if now_us >= self._until_us:
            # Others must be able to see a worker that joins before it looks.
            await self._renew(now_us)
            live = await self._store.workers()
        else:
            _, live = await asyncio.gather(self._renew(now_us), self._store.workers())
        self._see(tuple(sorted({*live, self.worker})))
        held = frozenset(self.held())
        self._count("given_back", self._had - held)
        if taken := held - self._had:
            self._count("taken", taken)
            self.taken.set()
        self._had = held
        self._note(None)

    async def leave(self) -> None:
        """End the lease, so that others need not wait until it runs out."""
        self._until_us = 0
        try:
            await self._store.leave(self.worker)
        except UnavailableError as error:
            _log.warning("the lease could not be ended, and runs out: %s", error.detail)
        else:
            _log.info("worker %s left", self.worker)

    async def _renew(self, now_us: int) -> None:
        await self._store.heartbeat(self.worker, self._ttl_us)
        # Counted from before the call: the store's time cannot have begun earlier.
        self._until_us = now_us + self._ttl_us

    def _see(self, live: tuple[str, ...]) -> None:
        """Compute the shares of those who *live*.

        A slot that another living worker may still hold is free two looks later: by then that
        worker has seen the same. A slot that is not free yet waits again whenever the workers
        change, because others may have seen some of them in another order.
        """
        if live == self._live and self._owners:
            return
        for worker in sorted({*live} - {*self._live}):
            _log.info("worker %s joined", worker)
        for worker in sorted({*self._live} - {*live}):
            _log.info("worker %s is gone", worker)
        before, self._owners = self._owners, owners_of(live)
        now_us = self._clock.boottime_us()
        for slot, owner in self._owners.items():
            if owner != self.worker:
                continue
            if before.get(slot) == self.worker:
                waits = now_us < self._free_us.get(slot, 0)
            else:
                waits = before.get(slot) in live if before else len(live) > 1
            if waits:
                self._free_us[slot] = now_us + 2 * self._look_us
        self._live = live
        ours = sum(owner == self.worker for owner in self._owners.values())
        _log.info("%d workers live; %d of %d slots are ours", len(live), ours, len(SLOTS))

    def _count(self, change: str, slots: frozenset[str]) -> None:
        if slots:
            self.changes[change] += len(slots)
            _log.info("%s slots %s", change.replace("_", " "), ", ".join(sorted(slots)))

    def _note(self, trouble: str | None) -> None:
        """Keep what is wrong; log it once."""
        if trouble is not None and self.trouble is None:
            _log.warning("the lease cannot be renewed: %s", trouble)
        if trouble is None and self.trouble is not None:
            _log.info("the lease is renewed again")
        self.trouble = trouble
