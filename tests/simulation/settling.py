"""After the faults: every change gets a definite answer, and everything is read until it counts."""

import asyncio
from collections.abc import Callable

from counter.limits import SECOND
from tests.simulation.clients import Clients, Place
from tests.simulation.history import Changed, Seen
from tests.simulation.plan import Plan, Read

_ASKED_AGAIN_MAX = 40
_READS_MAX = 20
_ROLLUP_LOOKS_MAX = 60


class Settling:
    """The end of a plan, in virtual time or in real."""

    def __init__(
        self, plan: Plan, clients: Clients, place: Place, note: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._clients = clients
        self._place = place
        self._note = note
        self._final: list[Seen] = []

    async def whole(self, slowest_us: int = 0) -> tuple[list[Seen], list[str]]:
        """Return the final reads and the problems. Windows may close this much later than
        planned."""
        config = self._plan.config
        await self.ask_again()
        await asyncio.sleep(self._ahead_us() / SECOND)
        wait_us = 2 * config.window_us + config.lag_us + slowest_us + 2 * SECOND
        await asyncio.sleep(wait_us / SECOND)
        since_us = self._place.true_us - wait_us + SECOND
        counters: dict[str, list[str]] = {}
        for changed in self._clients.history.changes:
            for item in changed.items:
                counters.setdefault(changed.plan.namespace, []).append(item.counter)
        for name, found in counters.items():
            for staleness_us in (0, wait_us):
                if not await self._read_last(name, tuple(dict.fromkeys(found)), staleness_us):
                    return self._final, [
                        f"{name} cannot be read although nothing is wrong any more"
                    ]
        await self._wait_for_rollup(counters, since_us)
        return self._final, []

    def _ahead_us(self) -> int:
        """How far ahead of now the latest event is: a token may be from a clock that is."""
        items = [item for changed in self._clients.history.changes for item in changed.items]
        latest_us = max((item.event_time_us or 0 for item in items), default=0)
        return max(0, latest_us - self._place.true_us)

    async def ask_again(self) -> None:
        """Until every change has a definite answer."""
        changes = self._clients.history.changes
        await asyncio.gather(*(self._ask_again(each) for each in changes))
        # Others stay as they are: a cancel that no client finishes must not count in part.
        some = [each for each in changes if each.plan.is_cancelled and each.plan.number % 2]
        await asyncio.gather(*(self._cancel_again(each) for each in some))

    async def _cancel_again(self, changed: Changed) -> None:
        for turn in range(_ASKED_AGAIN_MAX):
            if changed.is_cancelled or self._is_forgotten(changed):
                return
            sent = await self._clients.send(changed, turn % self._place.apis, cancels=True)
            if not changed.is_cancelled:
                await asyncio.sleep(sent.body.get("retry_after", 1))
        self._note(f"the cancel of change {changed.plan.number} has no definite answer")

    async def _ask_again(self, changed: Changed) -> None:
        for turn in range(_ASKED_AGAIN_MAX):
            if changed.is_definite:
                return
            if changed.plan.forsaken or (turn >= self._place.apis and self._is_forgotten(changed)):
                break
            sent = await self._clients.send(changed, turn % self._place.apis)
            if not changed.is_definite:
                await asyncio.sleep(sent.body.get("retry_after", 1))
        changed.given_up = True
        self._note(f"change {changed.plan.number} has no definite answer")

    def _is_forgotten(self, changed: Changed) -> bool:
        """Whether no process knows the outcome any more: each was asked for its own record."""
        retention_us = self._plan.config.retention_us
        return changed.plan.key is None and self._place.true_us > changed.token_us + retention_us

    async def _read_last(self, name: str, counters: tuple[str, ...], staleness_us: int) -> bool:
        """Have *counters* read on every API; whether they could."""
        reads = self._clients.history.reads
        for api in range(self._place.apis):
            for _ in range(_READS_MAX):
                before = len(reads)
                if await self._clients.read(Read(0, name, counters, staleness_us, api)):
                    self._final += reads[before:]
                    break
                await asyncio.sleep(0.5)
            else:
                return False
        return True

    async def _wait_for_rollup(self, counters: dict[str, list[str]], since_us: int) -> None:
        """Read as rolled up, until that is as of an instant after the last response."""
        reads = self._clients.history.reads
        for name, found in counters.items():
            unique = tuple(dict.fromkeys(found))
            for _ in range(_ROLLUP_LOOKS_MAX):
                before = len(reads)
                await self._clients.read(Read(0, name, unique, 365 * 86_400 * SECOND, 0))
                last = reads[before:]
                if last and all(each.as_of_us >= since_us for each in last):
                    self._final += last
                    names = await self._clients.names(name, 0)
                    if names is not None:
                        self._clients.history.listed[name] = names
                    break
                await asyncio.sleep(1)
            else:
                self._clients.history.surprises.append(f"{name} is not rolled up any more")
