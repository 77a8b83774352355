"""One run: a plan, carried out, healed, and judged."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random

from counter.limits import MILLISECOND, SECOND
from tests.simulation.checker import check
from tests.simulation.clients import Clients
from tests.simulation.draw import draw
from tests.simulation.history import Changed, Seen
from tests.simulation.loop import SimulatedLoop
from tests.simulation.plan import Change, Fault, Plan, Read, Step, Trap
from tests.simulation.world import START_US, World, deterministic

_ASKED_AGAIN_MAX = 40
_TURNS_MAX = 2_000_000


@dataclass(slots=True)
class Result:
    """What came of a run."""

    plan: Plan
    problems: list[str]
    trace: list[str] = field(default_factory=list)
    statements: int = 0

    @property
    def digest(self) -> str:
        """The same for the same trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def run_seed(seed: int, bug: Callable[[], AbstractContextManager[object]] = nullcontext) -> Result:
    """The run of *seed*, with *bug* planted."""
    return run_plan(draw(seed), bug)


def run_plan(plan: Plan, bug: Callable[[], AbstractContextManager[object]] = nullcontext) -> Result:
    """Carry *plan* out."""
    seed = plan.config.seed
    loop = SimulatedLoop(Random(f"turns {seed}"))
    with deterministic(seed) as faults, bug():
        run = _Run(plan, loop)
        try:
            problems = loop.run_until_complete(run.whole())
        except Exception as error:
            logging.getLogger("simulation").debug("run", exc_info=error)
            problems = [f"the run itself failed: {error!r}"]
        finally:
            loop.end()
    problems += [f"the service logged a fault of its own: {each}" for each in faults]
    problems += [f"nobody waited for: {each}" for each in loop.failures]
    return Result(plan, problems, run.trace(), run.world.cluster.statements)


class _Run:
    """A plan being carried out."""

    def __init__(self, plan: Plan, loop: SimulatedLoop) -> None:
        self._plan = plan
        self._loop = loop
        self.world = World(plan.config, loop)
        self._clients = Clients(self.world)
        self._final: list[Seen] = []

    async def whole(self) -> list[str]:
        """Everything; what is wrong."""
        await self.world.start()
        # Where every window begins: the plan means to meet their ends.
        begins_us = 2 * SECOND
        await asyncio.sleep((begins_us - self._loop.now_us % begins_us) / SECOND)
        self._begun_us = self._clients.begun_us = self._loop.now_us
        tasks = [asyncio.create_task(self._step(each)) for each in self._plan.steps]
        await self._until(self._plan.config.end_us)
        self._heal()
        await asyncio.gather(*tasks)
        problems = await self._settle()
        return problems + check(self._plan.config, self._clients.history, self._final)

    async def _until(self, at_us: int) -> None:
        left_us = self._begun_us + at_us - self._loop.now_us
        await asyncio.sleep(max(0, left_us) / SECOND)

    async def _step(self, step: Step) -> None:
        await self._until(step.at_us)
        if isinstance(step, Change):
            await self._clients.change(step)
        elif isinstance(step, Read):
            await self._clients.read(step)
        elif isinstance(step, Fault):
            self.world.note(f"fault {step.what}")
            getattr(self, f"_fault_{step.what}")(step)
        elif isinstance(step, Trap):
            self.world.members[step.who].set_trap(step)

    # Faults.

    def _fault_storm(self, fault: Fault) -> None:
        """All sorts of messages are lost, slow, or late."""
        weather, some = self.world.weather, fault.how_much
        weather.slow, weather.slow_us = 0.6 * some, fault.span_us
        weather.lost_request = weather.lost_reply = 0.05 * some
        weather.missed = 0.3 * some
        weather.repeated = weather.untold = 0.2 * some
        weather.hint_us = 3 * fault.span_us
        weather.client_lost_request = weather.client_lost_reply = 0.1 * some
        weather.client_slow = 0.3 * some
        self._loop.at(fault.for_us, weather.calm)

    def _fault_abandon(self, fault: Fault) -> None:
        """Coordinators give up writes half done."""
        weather = self.world.weather
        weather.abandoned = 0.6 * fault.how_much
        weather.hint_us = 3 * fault.span_us
        self._loop.at(fault.for_us, weather.calm)

    def _fault_crash(self, fault: Fault) -> None:
        self.world.members[fault.who].crash(fault.for_us)

    def _fault_pause(self, fault: Fault) -> None:
        self.world.members[fault.who].process.pause(fault.for_us)

    def _fault_node(self, fault: Fault) -> None:
        """A node is down."""
        node = self.world.cluster.nodes[fault.who % 3]
        node.up = False

        def rise() -> None:
            node.up = True

        self._loop.at(fault.for_us, rise)

    def _fault_wipe(self, _: Fault) -> None:
        self.world.wipe_cache()

    def _fault_skew(self, fault: Fault) -> None:
        """A clock is set, perhaps beyond the bound."""
        skew_us = self._plan.config.skew_us
        self.world.members[fault.who].skew(int((fault.how_much * 6 - 3) * skew_us))

    def _fault_recount(self, fault: Fault) -> None:
        self._loop.create_task(self._recount(fault))

    async def _recount(self, fault: Fault) -> None:
        name = self._plan.config.namespaces[0][0]
        path = f"/v1/namespaces/{name}/counters/hot/recount"
        await self.world.request(fault.who % self._plan.config.apis, "POST", path, {})

    def _fault_accept(self, fault: Fault) -> None:
        """The accept limit is changed; it will hold from a later slice."""
        self._loop.create_task(self._change_limit(fault))

    async def _change_limit(self, fault: Fault) -> None:
        name = self._plan.config.namespaces[0][0]
        body = {"accept_limit": f"{500 + int(fault.how_much * 8_000)}ms"}
        await self.world.request(
            fault.who % self._plan.config.apis, "PUT", f"/v1/namespaces/{name}", body
        )

    def _fault_compact(self, _: Fault) -> None:
        self.world.cluster.compact()

    # The end.

    def _heal(self) -> None:
        """Faults stop."""
        world = self.world
        world.weather.calm()
        for node in world.cluster.nodes:
            node.up = True
        for member in world.members:
            member.disarm()
            member.skew(0)
            if not member.process.paused:
                member.start()

    async def _settle(self) -> list[str]:
        """Ask again until every change has a definite answer, then read until all is counted."""
        config = self._plan.config
        changes = self._clients.history.changes
        await asyncio.gather(*(self._ask_again(each) for each in changes))
        slowest_us = max([config.accept_us, 9 * SECOND]) if self._changes_limit() else 0
        wait_us = 2 * config.window_us + config.lag_us + slowest_us + 2 * SECOND
        await asyncio.sleep(wait_us / SECOND)
        since_us = START_US + self._loop.now_us - wait_us + SECOND
        counters: dict[str, list[str]] = {}
        for step in self._plan.steps:
            if isinstance(step, Change):
                for name, _ in step.items:
                    counters.setdefault(step.namespace, []).append(name)
        for name, found in counters.items():
            for staleness_us in (0, wait_us):
                if not await self._read_last(name, tuple(dict.fromkeys(found)), staleness_us):
                    return [f"{name} cannot be read although nothing is wrong any more"]
        await self._wait_for_rollup(counters, since_us)
        return []

    def _changes_limit(self) -> bool:
        return any(isinstance(step, Fault) and step.what == "accept" for step in self._plan.steps)

    async def _ask_again(self, changed: Changed) -> None:
        apis = self._plan.config.apis
        for turn in range(_ASKED_AGAIN_MAX):
            if changed.is_definite:
                return
            if changed.plan.forsaken:
                break
            sent = await self._clients.send(changed, turn % apis)
            if not changed.is_definite:
                await asyncio.sleep(sent.body.get("retry_after", 1))
        changed.given_up = True
        self.world.note(f"change {changed.plan.number} has no definite answer")

    async def _read_last(self, name: str, counters: tuple[str, ...], staleness_us: int) -> bool:
        """Have *counters* read on every API; whether they could."""
        reads = self._clients.history.reads
        for api in range(self._plan.config.apis):
            for _ in range(20):
                before = len(reads)
                if await self._clients.read(Read(0, name, counters, staleness_us, api)):
                    self._final += reads[before:]
                    break
                await asyncio.sleep(0.5)
            else:
                return False
        return True

    async def _wait_for_rollup(self, counters: dict[str, list[str]], since_us: int) -> None:
        """Read as rolled up, until that is as of an instant after the last answer."""
        reads = self._clients.history.reads
        for name, found in counters.items():
            unique = tuple(dict.fromkeys(found))
            for _ in range(60):
                before = len(reads)
                await self._clients.read(Read(0, name, unique, 365 * 86_400 * SECOND, 0))
                last = reads[before:]
                if last and all(each.as_of_us >= since_us for each in last):
                    self._final += last
                    break
                await asyncio.sleep(1)
            else:
                self._clients.history.surprises.append(f"{name} is not rolled up any more")

    def trace(self) -> list[str]:
        """What happened, a line each, in order."""
        lines = list(self.world.notes)
        for changed in self._clients.history.changes:
            for sent in changed.requests:
                at_s = (sent.sent_us - START_US) / SECOND
                took_ms = ((sent.answered_us or sent.sent_us) - sent.sent_us) / MILLISECOND
                plan = changed.plan
                told = sent.body.get("code") or f"replayed {sent.body.get('replayed')}"
                if sent.body.get("applied") is not None:
                    told += f", applied {sent.body['applied']}"
                lines.append(
                    f"{at_s:10.6f} s  change {plan.number} {plan.how} {plan.namespace}"
                    f" {plan.items} of {(changed.token_us - START_US) / SECOND:.6f}"
                    f" on api-{sent.api}: {sent.status} {told} after {took_ms:g} ms"
                )
        lines = sorted([*lines, *map(_read_line, self._clients.history.reads)])
        return [*lines, f"{self._loop.turns} turns, {self.world.cluster.statements} statements"]


def _read_line(seen: Seen) -> str:
    return (
        f"{(seen.sent_us - START_US) / SECOND:10.6f} s  {seen.accuracy} read of"
        f" {seen.namespace}/{seen.counter} on api-{seen.plan.api}: {seen.count} as of"
        f" {(seen.as_of_us - START_US) / SECOND:.6f}, answered"
        f" {(seen.answered_us - START_US) / SECOND:.6f}"
    )
