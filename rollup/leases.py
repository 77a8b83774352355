"""Who rolls up what: a fixed number of lease slots, shared fairly by the workers that live.

A shard belongs to a slot, so ten thousand namespaces cost no more leases than one. Each worker says
that it lives, sees who else does, reckons the same shares as they do, gives back what is not its
own and takes what is. Leases only spare duplicate work: no write depends on one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

import xxhash

from counter.errors import UnavailableError
from counter.limits import LEASE_LOOK_US, LEASE_SLOTS, LEASE_TIME_US, SECOND
from counter.ports import Clock
from counter.ports_control import LeaseStore

_log = logging.getLogger("counter.leases")
#: The slot of the work that one worker at a time does for all: making and dropping slices.
MAINTENANCE: Final = "maintenance"
#: A worker looks at least so often in a lease's time.
_LOOKS_MIN: Final = 5
#: One call of the store for so many slots.
_ASKED_TOGETHER: Final = 8
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


def _rank(slot: str, worker: str) -> int:
    return xxhash.xxh64_intdigest(f"{worker}/{slot}".encode())


class Leases:
    """One worker's part of the slots."""

    def __init__(
        self, store: LeaseStore, clock: Clock, worker: str, *, lease_time_us: int = LEASE_TIME_US
    ) -> None:
        """A dead worker's slots are another's within *lease_time_us*: what runs out does so two
        looks before."""
        self._store = store
        self._clock = clock
        look_us = min(LEASE_LOOK_US, lease_time_us // _LOOKS_MIN)
        self._ttl_us = lease_time_us - 2 * look_us
        self._look_s = look_us / SECOND
        self.worker = worker
        #: Set when slots became this worker's; whoever waits for it clears it.
        self.taken = asyncio.Event()
        #: What keeps the leases from being renewed; None while they are.
        self.trouble: str | None = None
        #: Until when each slot is held, by this machine's clock that runs while suspended.
        self._until_us: dict[str, int] = {}
        #: Slots that were asked for and not refused: the store may hold them for this worker.
        self._asked: set[str] = set()
        #: Slots that changed hands, as seen from here.
        self.changes = dict.fromkeys(("taken", "given_back", "lost"), 0)
        self._live: tuple[str, ...] = ()
        self._share: frozenset[str] = frozenset()

    @property
    def live(self) -> tuple[str, ...]:
        """The workers that lived at the last look."""
        return self._live

    def holds(self, slot: str) -> bool:
        """Whether *slot* is this worker's, as far as it can know without asking."""
        return self._clock.boottime_us() < self._until_us.get(slot, 0)

    def held(self) -> list[str]:
        """The slots that are this worker's now."""
        return [slot for slot in SLOTS if self.holds(slot)]

    async def keep(self, stop: asyncio.Event) -> None:
        """Take turns until *stop* is set. No failure ends it."""
        while not stop.is_set():
            try:
                await self.turn()
            except UnavailableError as error:
                self._note(error.detail)
            except Exception:
                self._note("a turn failed in a way that it should not; see the log")
                _log.exception("a turn of the leases failed in a way that it should not")
            try:
                await asyncio.wait_for(stop.wait(), self._look_s)
            except TimeoutError:
                continue

    async def turn(self) -> None:
        """Say that this worker lives, and bring what it holds in line with its share.

        Raises UnavailableError where the store of leases fails: what is held stays held until its
        time is over, and nothing is renewed.
        """
        live = await self._store.heartbeat(self.worker, self._ttl_us)
        self._reckon(tuple(sorted({*live, self.worker})))
        await self._give_back([slot for slot in self._asked if slot not in self._share])
        now_us = self._clock.boottime_us()
        due_us = now_us + self._ttl_us - self._ttl_us // 3
        wanted = [
            slot for slot in SLOTS if slot in self._share and self._until_us.get(slot, 0) <= due_us
        ]
        if wanted:
            await self._take(wanted, now_us)
        self._note(None)

    async def leave(self) -> None:
        """Give everything back, so that others need not wait until its time is over."""
        self._until_us.clear()
        try:
            await self._store.leave(self.worker)
            await self._give_back(list(self._asked))
        except UnavailableError as error:
            _log.warning("the leases could not be given back, and run out: %s", error.detail)
        else:
            _log.info("worker %s left", self.worker)

    def _reckon(self, live: tuple[str, ...]) -> None:
        if live == self._live:
            return
        for worker in sorted({*live} - {*self._live}):
            _log.info("worker %s joined", worker)
        for worker in sorted({*self._live} - {*live}):
            _log.info("worker %s is gone", worker)
        self._live = live
        self._share = frozenset(share_out(SLOTS, live)[self.worker])
        _log.info("%d workers live; %d of %d slots are ours", *self._counts())

    def _counts(self) -> tuple[int, int, int]:
        return len(self._live), len(self._share), len(SLOTS)

    async def _give_back(self, slots: Sequence[str]) -> None:
        if not slots:
            return
        for slot in slots:
            # First here, so that no work on them is begun any more.
            self._until_us.pop(slot, None)
        await self._store.release(slots, self.worker)
        self._asked.difference_update(slots)
        self.changes["given_back"] += len(slots)
        _log.info("gave back slots %s", ", ".join(sorted(slots)))

    async def _take(self, slots: Sequence[str], now_us: int) -> None:
        """Ask for *slots*, a few at a time: what fails costs only those that it was asked for with.

        Raises the first failure, after all that was answered is noted.
        """
        self._asked.update(slots)
        groups = [slots[at : at + _ASKED_TOGETHER] for at in range(0, len(slots), _ASKED_TOGETHER)]
        found = await asyncio.gather(
            *(self._store.acquire(each, self.worker, self._ttl_us) for each in groups),
            return_exceptions=True,
        )
        before = set(self.held())
        for group, answers in zip(groups, found, strict=True):
            if not isinstance(answers, BaseException):
                self._note_answers(group, answers, now_us)
        after = set(self.held())
        if taken := [slot for slot in slots if slot in after - before]:
            self.taken.set()
            self.changes["taken"] += len(taken)
            _log.info("took slots %s", ", ".join(taken))
        if lost := [slot for slot in slots if slot in before - after]:
            self.changes["lost"] += len(lost)
            _log.warning("lost slots %s to another worker", ", ".join(lost))
        for answers in found:
            if isinstance(answers, BaseException):
                raise answers

    def _note_answers(self, slots: Sequence[str], answers: Sequence[bool], now_us: int) -> None:
        """The time of what was taken counts from before the question."""
        for slot, is_ours in zip(slots, answers, strict=True):
            if is_ours:
                self._until_us[slot] = now_us + self._ttl_us
            else:
                self._asked.discard(slot)
                self._until_us.pop(slot, None)

    def _note(self, trouble: str | None) -> None:
        """Keep what is wrong; log it once."""
        if trouble is not None and self.trouble is None:
            _log.warning("the leases cannot be renewed: %s", trouble)
        if trouble is None and self.trouble is not None:
            _log.info("the leases are renewed again")
        self.trouble = trouble
