"""Clients of BEST_EFFORT namespaces, and what they may see.

A retry counts again, and what the cache loses is gone. But no add counts more often than it was
sent, none counts elsewhere, and one that was acknowledged counts unless the cache lost it.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tests.simulation.clients import Clients
from tests.simulation.history import Item, Seen, Sent
from tests.simulation.plan import CLEARS, ROUGH_BASE, Read

_READS_MAX: Final = 20


class RoughClients(Clients):
    """Clients that send only to the namespaces of ROUGH."""

    async def read_last(self) -> None:
        """Read every counter once more on each API."""
        found: dict[str, dict[str, None]] = {}
        for changed in self.history.changes:
            for item in changed.items:
                found.setdefault(changed.plan.namespace, {})[item.counter] = None
        for name, counters in found.items():
            for api in range(self._place.apis):
                await self._read_last(Read(0, name, tuple(counters), None, api))

    async def _read_last(self, plan: Read) -> None:
        for _ in range(_READS_MAX):
            if await self.read(plan):
                return
            await asyncio.sleep(0.5)
        self.history.surprises.append(f"{plan.namespace} cannot be read any more")

    def _note(self, item: Item, sent: Sent, answer: Mapping[str, Any]) -> None:
        code = answer.get("code")
        if code is None:
            item.applied_us = item.applied_us or self._now_us()
            if answer["retry_safe"] is not False or answer["replayed"] is not None:
                self._surprise(item, f"got {dict(answer)}")
        elif not self._is_expected(code, item.change.plan.namespace):
            self._surprise(item, f"got {sent.status} {dict(answer)}")


class RoughChecker:
    """Judges the observations of *clients*; the cache lost entries at *losses_us*."""

    def __init__(self, clients: RoughClients, losses_us: Sequence[int]) -> None:
        self._history = clients.history
        self._losses_us = losses_us
        self._items: dict[tuple[str, str], list[Item]] = {}
        for changed in self._history.changes:
            for item in changed.items:
                key = (changed.plan.namespace, item.counter)
                self._items.setdefault(key, []).append(item)
        #: The situations that the run came into.
        self.reached: set[str] = set()

    def problems(self) -> list[str]:
        """Return the problems."""
        found = list(self._history.surprises)
        for seen in self._history.reads:
            name = f"BEST_EFFORT read of {seen.namespace}/{seen.counter}: {seen.count}"
            found += [f"{name}: {each}" for each in self._wrong(seen)]
        return found

    def _wrong(self, seen: Seen) -> Iterator[str]:
        if seen.accuracy != "best_effort":
            yield f"it is {seen.accuracy}"
        items = self._items[seen.namespace, seen.counter]
        left = seen.count
        for item in items:
            if item.delta is None:
                continue
            # A count is of the sign of all its deltas, or has something left over.
            times = seen.count // item.delta % ROUGH_BASE
            left -= times * item.delta
            yield from self._wrong_times(item, seen, times)
        if left:
            yield f"{left} is left over"

    def _wrong_times(self, item: Item, seen: Seen, times: int) -> Iterator[str]:
        """Return the problems if *item* is in the count so often."""
        number, requests = item.change.plan.number, item.change.requests
        sent = [each for each in requests if each.sent_us <= seen.answered_us]
        if times > len(sent):
            yield f"change {number} counts {times} times, and was sent {len(sent)} times"
        confirmed = [each for each in sent if _is_confirmed(item, each, seen.sent_us)]
        kept = [each for each in confirmed if not self._may_be_lost(item, each.sent_us, seen)]
        if times < len(kept):
            yield f"change {number} counts {times} times, and was confirmed {len(kept)} times"
        if times > 1:
            self.reached.add("best-effort-again")
        if times > len(confirmed):
            self.reached.add("best-effort-unreported")
        if times < len(confirmed):
            self.reached.add("best-effort-lost")
        elif confirmed and kept:
            self.reached.add("best-effort")

    def _may_be_lost(self, item: Item, sent_us: int, seen: Seen) -> bool:
        """Whether the cache lost something, or a clear may have come, since then."""
        if any(sent_us <= each <= seen.answered_us for each in self._losses_us):
            return True
        clears = [
            each
            for other in self._items[seen.namespace, seen.counter]
            if other.change.plan.how in CLEARS
            for each in other.change.requests
        ]
        # One that was not answered may be done at any time.
        return any(
            each.sent_us <= seen.answered_us
            and (each.status != 200 or (each.answered_us or 0) >= sent_us)
            for each in clears
        )


def _is_confirmed(item: Item, sent: Sent, by_us: int) -> bool:
    """Whether the request *sent* was answered with success of *item* until then."""
    if sent.status != 200 or sent.answered_us is None or sent.answered_us > by_us:
        return False
    if item.change.plan.how != "batch":
        return True
    return "code" not in sent.body["results"][item.change.items.index(item)]
