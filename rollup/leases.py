"""Assign shards to workers: a fixed number of slots, shared evenly by the live workers.

A shard belongs to a slot, so ten thousand namespaces cost no more than one. Each worker has one
lease, a row that expires unless it is renewed. Every worker reads the existing rows and computes
the same shares, so the slots themselves are not stored. Leases only avoid duplicate work: no write
depends on one.
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
from counter.capabilities import LeaseStore
from counter.core.clock_guard import ClockGuard
from counter.errors import UnavailableError
from counter.limits import LEASE_READ_EVERY_US, LEASE_SLOTS, LEASE_TIME_US, SECOND
from counter.ports import Clock

_log = logging.getLogger("counter.leases")
#: The slot of the work that one worker at a time does for all: making and dropping slices.
MAINTENANCE: Final = "maintenance"
#: The minimum number of reads within a lease's time.
_READS_MIN: Final = 5
#: After failures a worker pauses longer, up to this fraction of its lease's time.
_PAUSE_MAX: Final = 3
SLOTS: Final = (MAINTENANCE, *(str(number) for number in range(LEASE_SLOTS)))


def worker_id() -> str:
    """Return a unique name that shows the worker's host and process."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def slot_of(namespace_id: int, shard: int) -> str:
    """Return the slot of a shard. A namespace's shards have consecutive slots, the first by
    hash."""
    first = xxhash.xxh64_intdigest(namespace_id.to_bytes(8, "big"))
    return str((first + shard) % LEASE_SLOTS)


def share_out(slots: Sequence[str], workers: Sequence[str]) -> dict[str, list[str]]:
    """Assign *slots* to *workers*: every process computes the same shares, which differ by at most
    one.

    Each run of as many slots as there are workers gives each worker one, so that the shards of one
    namespace are spread, too. Within a run a slot goes to the worker that ranks first for it among
    those left (rendezvous hashing), so that few slots move when a worker joins or leaves.
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
    """Return the worker of each slot while *workers* are alive; empty if there are none."""
    if not workers:
        return {}
    shares = share_out(SLOTS, workers)
    return {slot: worker for worker, share in shares.items() for slot in share}


def _rank(slot: str, worker: str) -> int:
    return xxhash.xxh64_intdigest(f"{worker}/{slot}".encode())


class Leases:
    """One worker's lease, and the slots that it holds while the lease lasts."""

    def __init__(
        self,
        store: LeaseStore,
        clock: Clock,
        worker: str,
        *,
        lease_time_us: int = LEASE_TIME_US,
        guard: ClockGuard | None = None,
    ) -> None:
        """Another worker gets a dead worker's slots within *lease_time_us*, because the lease
        expires two reads earlier. The same applies to a worker whose clock *guard* rejects."""
        self._store = store
        self._clock = clock
        self._guard = guard
        self._read_every_us = min(LEASE_READ_EVERY_US, lease_time_us // _READS_MIN)
        self._ttl_us = lease_time_us - 2 * self._read_every_us
        self.worker = worker
        #: Set when this worker got slots; the waiting task clears it.
        self.taken = asyncio.Event()
        #: Why the lease cannot be renewed; None if it can.
        self.trouble: str | None = None
        #: When the lease ends, by the boot clock.
        self._until_us = 0
        #: Slots that changed hands, as observed by this worker.
        self.changes = dict.fromkeys(("taken", "given_back", "lost"), 0)
        self._live: tuple[str, ...] = ()
        self._owners: Mapping[str, str] = {}
        #: When a slot of another live worker becomes free: until then that worker may not know the
        #: change.
        self._free_us: dict[str, int] = {}
        #: The slots that were held after the last update.
        self._held_before: frozenset[str] = frozenset()

    @property
    def live(self) -> tuple[str, ...]:
        """The workers that were alive at the last read."""
        return self._live

    def holds(self, slot: str) -> bool:
        """Return whether this worker holds *slot*, without asking the store."""
        now_us = self._clock.boottime_us()
        is_ours = self._owners.get(slot) == self.worker
        return is_ours and self._free_us.get(slot, 0) <= now_us < self._until_us

    def held(self) -> list[str]:
        """The slots that this worker holds now."""
        return [slot for slot in SLOTS if self.holds(slot)]

    async def keep(self, stop: asyncio.Event) -> None:
        """Call :meth:`update` until *stop* is set. Errors do not stop the loop; pauses double after
        them."""
        pause_us = self._read_every_us
        while not stop.is_set():
            try:
                await self.update()
            except UnavailableError as error:
                self._set_trouble(error.detail)
            except Exception:
                self._set_trouble("a turn failed unexpectedly; see the log")
                _log.exception("a turn of the leases failed unexpectedly")
            if self.trouble is None:
                pause_us = wait_us = self._read_every_us
            else:
                # Random, so that workers that failed together do not retry together.
                wait_us = round(random.uniform(0.5, 1) * pause_us)
                pause_us = max(self._read_every_us, min(2 * pause_us, self._ttl_us // _PAUSE_MAX))
            await pause(stop, wait_us / SECOND)

    async def update(self) -> None:
        """Renew the lease, and compute which slots this worker holds now.

        Raises UnavailableError if the store fails, and ClockSkewError if this machine's clock is
        wrong: slots stay held until the lease expires.
        """
        now_us = self._clock.boottime_us()
        if self._held_before and now_us >= self._until_us:
            _log.warning("the lease ran out before it was renewed")
            self._count("lost", self._held_before)
            self._held_before = frozenset()
            # Other workers may hold its slots by now: start as a worker that joins.
            self._owners = {}
        if self._guard is not None:
            # With a wrong clock this worker cannot roll up, so another one must get the slots. A
            # clock that is wrong for less than the lease time changes nothing.
            self._guard.check_all()
        if now_us >= self._until_us:
            # A worker that joins must be visible to the others before it reads.
            await self._heartbeat(now_us)
            live = await self._store.workers()
        else:
            _, live = await asyncio.gather(self._heartbeat(now_us), self._store.workers())
        self._share_slots(tuple(sorted({*live, self.worker})))
        held = frozenset(self.held())
        self._count("given_back", self._held_before - held)
        if taken := held - self._held_before:
            self._count("taken", taken)
            self.taken.set()
        self._held_before = held
        self._set_trouble(None)

    async def leave(self) -> None:
        """End the lease, so that others need not wait until it expires."""
        self._until_us = 0
        try:
            await self._store.leave(self.worker)
        except UnavailableError as error:
            _log.warning("the lease could not be ended, and runs out: %s", error.detail)
        else:
            _log.info("worker %s left", self.worker)

    async def _heartbeat(self, now_us: int) -> None:
        await self._store.heartbeat(self.worker, self._ttl_us)
        # Measured from before the call: the store's time-to-live cannot have begun earlier.
        self._until_us = now_us + self._ttl_us

    def _share_slots(self, live: tuple[str, ...]) -> None:
        """Compute the shares of the *live* workers.

        A slot that another live worker may still hold is free two reads later, because by then that
        worker has read the same. If the workers change before that, the wait begins again, because
        workers may read the changes in different orders.
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
                self._free_us[slot] = now_us + 2 * self._read_every_us
        self._live = live
        ours = sum(owner == self.worker for owner in self._owners.values())
        _log.info("%d workers live; %d of %d slots are ours", len(live), ours, len(SLOTS))

    def _count(self, change: str, slots: frozenset[str]) -> None:
        if slots:
            self.changes[change] += len(slots)
            _log.info("%s slots %s", change.replace("_", " "), ", ".join(sorted(slots)))

    def _set_trouble(self, trouble: str | None) -> None:
        """Set *trouble*, and log when it begins and ends."""
        if trouble is not None and self.trouble is None:
            _log.warning("the lease cannot be renewed: %s", trouble)
        if trouble is None and self.trouble is not None:
            _log.info("the lease is renewed again")
        self.trouble = trouble
