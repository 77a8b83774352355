"""Clients, faults, and a verdict."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Final, Protocol

from counter.limits import SECOND
from tests.chaos.deployments import Deployment
from tests.chaos.faults import Faults
from tests.chaos.site import Site
from tests.simulation.checker import check
from tests.simulation.clients import Clients, Place
from tests.simulation.draw import Drawing
from tests.simulation.history import Changed, History
from tests.simulation.plan import Change, Config, Plan, Read, Step
from tests.simulation.reported import untrue
from tests.simulation.settling import Settling
from tests.simulation.trace import trace_of

#: Plans under way at once.
_AT_ONCE: Final = 8
#: Numbers of changes, so that no two of a run are the same.
_NUMBERS_OF_A_PLAN: Final = 1_000


class PlannedPlace(Place, Protocol):
    """The view of clients, with the settings of plans and of the checker."""

    config: Config
    #: When all namespaces existed.
    created_us: int
    #: Whether the store has transactions, and the fence of PostgreSQL.
    has_transactions: bool


class Play:
    """One plan of the simulation in real time: counters of its own, clients, and their results."""

    def __init__(self, site: PlannedPlace, number: int) -> None:
        self.plan = Plan(site.config)
        source = Random(f"chaos {site.config.seed} {number}")
        first = number * _NUMBERS_OF_A_PLAN
        Drawing(self.plan, source, f"p{number}-", first).draw_clients()
        self.clients = Clients(site)
        self.notes: list[str] = []
        #: Items of adds that were compared with the model, and those that were not by which reason.
        self.compared: Counter[str] = Counter()
        self._site = site

    async def run(self) -> None:
        """Follow the plan, each step at its time."""
        self.clients.begun_us = self._site.true_us
        async with asyncio.TaskGroup() as steps:
            for each in self.plan.steps:
                steps.create_task(self._step(each))

    async def _step(self, step: Step) -> None:
        await asyncio.sleep(step.at_us / SECOND)
        if isinstance(step, Change):
            await self.clients.change(step)
        elif isinstance(step, Read):
            await self.clients.read(step)

    async def judge(self) -> list[str]:
        """When all is repaired: resolve and count everything; return the problems."""
        settling = Settling(self.plan, self.clients, self._site, self.notes.append)
        final, problems = await settling.whole()
        problems += check(self.plan.config, self.clients.history, final)
        forbidden, self.compared = untrue(
            self.plan.config,
            self.clients.history,
            final,
            self._site.created_us,
            is_fenced=self._site.has_transactions,
        )
        return problems + forbidden

    def trace(self) -> list[str]:
        """The events."""
        return [*self.notes, *trace_of(self.clients.history, self.clients.begun_us)]


@dataclass(slots=True)
class Verdict:
    """The result of a run."""

    seed: int
    plays: list[Play]
    problems: dict[int, list[str]]
    faults: Counter[str]
    reported: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for play in self.plays:
            self._tally(play.clients.history)

    def _tally(self, history: History) -> None:
        self.reported["counts read"] += len(history.reads)
        for changed in history.changes:
            self.reported["changes"] += 1
            self.reported["requests"] += len(changed.requests)
            self.reported["requests without an answer"] += sum(
                each.status == 0 for each in changed.requests
            )
            self.reported[_what_became_of(changed)] += 1


def _what_became_of(changed: Changed) -> str:
    if changed.given_up:
        return "not retried"
    if any(item.conflict_us is not None for item in changed.items):
        return "conflicts"
    return "void" if all(item.void_us is not None for item in changed.items) else "counted"


async def _judged(plays: list[Play]) -> list[list[str]]:
    return await asyncio.gather(*(each.judge() for each in plays))


def _wrong_in(logs: Mapping[str, str]) -> Iterator[str]:
    for name, text in logs.items():
        for line in text.splitlines():
            if "Traceback" in line:
                yield f"{name} wrote a trace into its log: {line}"
        if name.startswith("rollup-") and "taken slots" not in text:
            yield f"{name} rolled up nothing: API processes do it, too"


async def play(
    folder: Path,
    deployment: Deployment,
    seconds: float,
    seed: int | None,
    say: Callable[[str], None],
) -> Verdict:
    """Break things for *seconds*, mend them, and judge."""
    seed = random.randrange(2**32) if seed is None else seed
    site = Site(folder, seed, deployment)
    say(f"seed {seed}: starting {deployment.what} and four processes")
    plays: list[Play] = []
    numbers = count(1)
    async with site.running():
        faults = Faults(site, Random(f"faults {seed}"), say)
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                each = Play(site, next(numbers))
                plays.append(each)
                await each.run()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(faults.run(stop))
            for _ in range(_AT_ONCE):
                tasks.create_task(client())
            asyncio.get_running_loop().call_later(seconds, stop.set)
        say("all is mended: every token is asked about again, every counter is read")
        deployment.mend()
        found = await _judged(plays)
        await site.stop()
        await deployment.lose(Random(f"losing {seed}"), say)
        await site.start()
        say("it all runs again: every counter is read once more")
        found = [x + y for x, y in zip(found, await _judged(plays), strict=True)]
        await site.stop()
        problems = {number: each for number, each in enumerate(found) if each}
        if wrong := list(_wrong_in(site.logs())):
            problems[-1] = wrong
    return Verdict(seed, plays, problems, faults.done)
