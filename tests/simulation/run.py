"""One run: a plan, carried out, healed, and judged."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from api.app import Application
from counter.limits import MILLISECOND, SECOND, SLICES_AHEAD
from counter.ops.audit import Auditor, State
from counter.types import CounterType
from tests.simulation.best_effort import RoughChecker, RoughClients
from tests.simulation.checker import check
from tests.simulation.clients import Clients
from tests.simulation.draw import draw
from tests.simulation.history import History, Seen
from tests.simulation.loop import SimulatedLoop
from tests.simulation.observed import Observed, forbidden
from tests.simulation.plan import (
    BASE,
    CHANGEABLE,
    LATE,
    ROUGH,
    Change,
    Config,
    Fault,
    Plan,
    Read,
    Rebirth,
    Step,
    Trap,
)
from tests.simulation.requests import START_US, Answer
from tests.simulation.settling import Settling
from tests.simulation.trace import trace_of
from tests.simulation.world import Member, World, deterministic
from tests.support.app import forget_applications

_TURNS_MAX = 2_000_000
_TRIES_MAX = 40
#: How often a change of a namespace is asked for while it is refused.
_CHANGES_MAX = 4
#: A control act is refused for no longer: a night of all processes is shorter.
_ASKED_S = 3 * 3_600
#: A digit that no other add has.
_FIRST_LIFE = BASE**20


@dataclass(slots=True)
class Result:
    """The result of a run."""

    plan: Plan
    problems: list[str]
    trace: list[str] = field(default_factory=list)
    statements: int = 0
    #: Requests of clients that change or read counters.
    operations: int = 0
    #: The situations of tests/simulation/situations.py that it came into.
    reached: frozenset[str] = frozenset()
    #: Items of adds that were compared with the model, and those that were not by which reason.
    compared: Counter[str] = field(default_factory=Counter)

    @property
    def digest(self) -> str:
        """The same for the same trace."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()


def run_seed(
    seed: int,
    bug: Callable[[], AbstractContextManager[object]] = nullcontext,
    crowds: int = 0,
    store: str = "cassandra",
) -> Result:
    """The run of *seed*, with *bug* planted and so many crowds of clients more."""
    return run_plan(draw(seed, crowds, store), bug)


def run_plan(plan: Plan, bug: Callable[[], AbstractContextManager[object]] = nullcontext) -> Result:
    """Carry *plan* out."""
    seed = plan.config.seed

    def now_s() -> float:
        return loop.time()

    with deterministic(plan.config, now_s) as faults, bug():
        loop = SimulatedLoop(Random(f"turns {seed}"))
        try:
            run = _Run(plan, loop)
            problems = run.problems()
        finally:
            loop.end()
            forget_applications()
    problems += [f"the service logged a fault of its own: {each}" for each in faults]
    problems += [f"not awaited: {each}" for each in loop.failures]
    run.world.watch.judge(run.history)
    reached = frozenset(run.world.watch.reached)
    ran = run.world.cluster.statements, run.operations, reached, run.compared
    return Result(plan, problems, run.trace(), *ran)


class _Run:
    """A plan being carried out."""

    def __init__(self, plan: Plan, loop: SimulatedLoop) -> None:
        self._plan = plan
        self._loop = loop
        self.world = World(plan.config, loop)
        self._clients = Clients(self.world)
        self._rough = RoughClients(self.world)
        self._final: list[Seen] = []
        #: Counters of unanswered adds that no client knows.
        self._unheard: set[tuple[str, str]] = set()
        self.compared: Counter[str] = Counter()

    @property
    def history(self) -> History:
        """The requests and responses of clients."""
        return self._clients.history

    def problems(self) -> list[str]:
        """Run everything; return the problems."""
        try:
            return self._loop.run_until_complete(self._whole())
        except Exception as error:
            logging.getLogger("simulation").debug("run", exc_info=error)
            return [f"the run itself failed: {error!r}"]

    async def _whole(self) -> list[str]:
        await self.world.start()
        # Where every window begins: the plan means to meet their ends.
        begins_us = 2 * SECOND
        await asyncio.sleep((begins_us - self._loop.now_us % begins_us) / SECOND)
        self._begun_us = self._loop.now_us
        self._rough.begun_us = self._clients.begun_us = START_US + self._begun_us
        self._clients.awaited = {LATE}
        tasks = [asyncio.create_task(self._step(each)) for each in self._plan.steps]
        await self._until(self._plan.config.end_us)
        self._heal()
        if self._plan.config.wrong_us:
            await self._have_late()
        await asyncio.gather(*tasks)
        problems = await self._settle()
        problems += await self._audit()
        config = self._plan.config
        limits_us = [_accept_ms(config, each) * MILLISECOND for each in self._changes_of_limit()]
        # An era's is one of them.
        config = replace(config, accept_us=min([config.accept_us, *limits_us]))
        problems += check(config, self._clients.history, self._final)
        return problems + self._compare() + await self._judge_rough()

    async def _judge_rough(self) -> list[str]:
        """Return the problems of the BEST_EFFORT counters."""
        await self._rough.read_last()
        checker = RoughChecker(self._rough, self.world.losses_us)
        problems = checker.problems()
        self.world.watch.reached |= checker.reached
        return problems

    async def _until(self, at_us: int) -> None:
        left_us = self._begun_us + at_us - self._loop.now_us
        await asyncio.sleep(max(0, left_us) / SECOND)

    async def _step(self, step: Step) -> None:
        await self._until(step.at_us)
        if isinstance(step, Change | Read):
            clients = self._rough if step.namespace in ROUGH else self._clients
            await (clients.change(step) if isinstance(step, Change) else clients.read(step))
        elif isinstance(step, Fault) and not self.world.healed:
            self.world.note(f"fault {step.what}")
            getattr(self, f"_fault_{step.what}")(step)
        elif isinstance(step, Trap):
            self.world.members[step.who].set_trap(step)
        elif isinstance(step, Rebirth):
            await self._rebirth(step)

    async def _rebirth(self, step: Rebirth) -> None:
        """A namespace lives, is deleted, and is created again; then adds to it must count."""
        world, path = self.world, f"/v1/namespaces/{step.namespace}"
        create = partial(world.create, step.admin, step.namespace, step.counter_type)
        await self._asked(create, 200, 201)
        for api in range(world.apis):
            # Not in the history: whatever of it is counted later is left over there.
            body = {"delta": _FIRST_LIFE}
            key = {"idempotency-key": f"first life {api}"}
            status, _ = await world.request(api, "POST", f"{path}/counters/hot/add", body, key)
            if status == 0:
                # A process that pauses may carry it out in the next life.
                self._unheard.add((step.namespace, "hot"))
                return
        await asyncio.sleep(step.lives_us / SECOND)
        if step.wrong_us and not world.healed:
            world.members[step.admin].misset(step.wrong_us)
            await self._until_serving(world.members[step.admin])
        for trap in step.traps:
            world.members[trap.who].set_trap(trap)
        for who, after_us, for_us in step.pauses:
            self._loop.at(after_us, world.members[who].process.pause, for_us)

        async def delete() -> Answer:
            self._act(step.admin, "delete")
            return await world.request(step.admin, "DELETE", path)

        await self._asked(delete, 204, 404)
        world.note(f"{step.namespace} is deleted")
        await self._asked(create, 200, 201)
        world.note(f"{step.namespace} is created again")
        if step.pauses or step.traps:
            world.reach("rebirth")
        at_us = self._loop.now_us - self._begun_us
        await asyncio.gather(*(self._add_to_reborn(each, at_us) for each in step.adds))

    async def _until_serving(self, member: Member) -> None:
        """Wait until *member* has started again, but not for ever: it may be down or paused."""
        for _ in range(_TRIES_MAX):
            if member.application is not None:
                break
            await asyncio.sleep(0.1)

    async def _asked(self, ask: Callable[[], Awaitable[Answer]], *wanted: int) -> None:
        """Ask until the status is one of *wanted*, following Retry-After. Raises TimeoutError."""
        async with asyncio.timeout(_ASKED_S):
            status, answer = await ask()
            while status not in wanted:
                await asyncio.sleep(answer.get("retry_after", 0.2))
                status, answer = await ask()

    async def _add_to_reborn(self, add: Change, at_us: int) -> None:
        (attempt,) = add.attempts
        await asyncio.sleep(attempt.after_us / SECOND)
        at_us += attempt.after_us
        await self._clients.change(
            replace(add, at_us=at_us, attempts=(replace(attempt, after_us=0),))
        )

    def _act(self, api: int, act: str) -> None:
        """Note whether an API that is asked for a control act has a wrong clock."""
        member = self.world.members[api]
        serves = member.process.alive and member.application is not None
        if serves and abs(member.offset_us) > self._plan.config.skew_us:
            self.world.reach(f"wrong-clock-{act}")

    # Faults.

    def _fault_storm(self, fault: Fault) -> None:
        """All sorts of messages are lost, slow, or late."""
        weather, some = self.world.weather, fault.how_much
        weather.slow, weather.slow_us = 0.6 * some, fault.span_us
        weather.lost_request = weather.lost_reply = 0.05 * some
        weather.missed = 0.3 * some
        weather.repeated = weather.unreported = 0.2 * some
        weather.hint_us = 3 * fault.span_us
        weather.client_lost_request = weather.client_lost_reply = 0.1 * some
        weather.client_slow = 0.3 * some
        self._loop.at(fault.for_us, weather.calm)

    def _fault_deaf(self, fault: Fault) -> None:
        """Clients do not get their responses."""
        weather = self.world.weather
        weather.client_lost_reply = fault.how_much
        self._loop.at(fault.for_us, weather.calm)

    def _fault_abandon(self, fault: Fault) -> None:
        """Coordinators give up writes half done."""
        weather = self.world.weather
        weather.abandoned = 0.6 * fault.how_much
        weather.hint_us = 3 * fault.span_us
        self._loop.at(fault.for_us, weather.calm)

    def _fault_unreported(self, fault: Fault) -> None:
        """The outcome of compare-and-sets is not reported, or not decided."""
        weather = self.world.weather
        weather.unreported = 0.3 + 0.7 * fault.how_much
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

    def _fault_cut(self, fault: Fault) -> None:
        """The link from one data center to the other is cut; the way back works."""
        weather = self.world.weather
        weather.cut = (fault.who, 1 - fault.who)

        def mend() -> None:
            weather.cut = None

        self._loop.at(fault.for_us, mend)

    def _fault_hot(self, fault: Fault) -> None:
        """DynamoDB takes only a few writes a second of each partition."""
        cluster = self.world.cluster
        cluster.writes_max = int(fault.how_much * 8)
        self._loop.at(fault.for_us, cluster.calm)

    def _fault_split(self, fault: Fault) -> None:
        """DynamoDB splits some partitions, and throttles them for that time."""
        cluster = self.world.cluster
        cluster.splitting = int(fault.how_much * 3)
        self._loop.at(fault.for_us, cluster.calm)

    def _fault_wipe(self, _: Fault) -> None:
        self.world.wipe_cache()

    def _fault_cache_restart(self, fault: Fault) -> None:
        """A server of the cache restarts, and has lost everything."""
        servers = self.world.cache_servers
        servers[fault.who % len(servers)].restart(fault.for_us)

    def _fault_cache_slow(self, fault: Fault) -> None:
        """Servers of the cache respond late, or not at all; the requests are carried out."""
        for server in self.world.cache_servers:
            server.slow, server.lost = fault.how_much, fault.how_much / 2
            server.slow_us = fault.span_us
            self._loop.at(fault.for_us, server.calm)

    def _fault_skew(self, fault: Fault) -> None:
        """A clock is set, perhaps beyond the bound."""
        skew_us = self._plan.config.skew_us
        self.world.members[fault.who].skew(int((fault.how_much * 6 - 3) * skew_us))

    def _fault_recount(self, fault: Fault) -> None:
        self._act(fault.who % self._plan.config.apis, "recount")
        self._loop.create_task(self._recount(fault))

    async def _recount(self, fault: Fault) -> None:
        name = self._plan.config.namespaces[0][0]
        path = f"/v1/namespaces/{name}/counters/hot/recount"
        await self.world.request(fault.who % self._plan.config.apis, "POST", path, {})

    def _fault_accept(self, fault: Fault) -> None:
        """The accept limit is changed; it will hold from a later slice."""
        self._act(fault.who % self._plan.config.apis, "change")
        self._loop.create_task(self._change_limit(fault))

    async def _change_limit(self, fault: Fault) -> None:
        name = self._plan.config.namespaces[0][0]
        body = {"accept_limit": f"{_accept_ms(self._plan.config, fault)}ms"}
        await self._change_setting(fault.who % self._plan.config.apis, name, body)

    async def _change_setting(self, api: int, name: str, body: Mapping[str, object]) -> None:
        for _ in range(_CHANGES_MAX):
            status, _ = await self.world.request(api, "PUT", f"/v1/namespaces/{name}", body)
            if status == 200:
                for setting in body:
                    self.world.reach(f"change-{setting}")
            if status == 200 or self.world.healed:
                break
            await asyncio.sleep(0.3)

    def _fault_setting(self, fault: Fault) -> None:
        """A setting of a namespace is changed; *for_us* says which."""
        setting, some = CHANGEABLE[fault.for_us], fault.how_much
        if setting == "accept_limit":
            self._fault_accept(fault)
            return
        config = self._plan.config
        key_ttl_us = config.retention_us // 2 - int(some * SECOND)
        body = {
            "future_limit": f"{1_000 + int(some * 4_000)}ms",
            "payload_check": ("guard", "off", "strict")[int(some * 3)],
            "key_ttl": f"{key_ttl_us // MILLISECOND}ms",
            "cache_ttl": f"{int(some * 30)}s",
            # More than come.
            "requests_per_s": 1_000 + int(some * 1_000),
            "adds_per_s": 1_000 + int(some * 1_000),
            "event_rules": [{"type": "order", "counter": f"orders-{int(some * 9)}"}],
        }[setting]
        name = config.namespaces[int(some * 1_000) % len(config.namespaces)][0]
        self._loop.create_task(self._change_setting(fault.who, name, {setting: body}))

    def _fault_misset(self, fault: Fault) -> None:
        """A process starts with a clock that is far out of its bound."""
        self.world.members[fault.who].misset(fault.for_us)

    def _fault_jump(self, fault: Fault) -> None:
        """The clock of a process jumps while the process has its leases."""
        member = self.world.members[fault.who]
        if member.process.alive:
            self.world.reach("wrong-clock-jump")
        member.skew(fault.for_us)
        member.is_misset = True

    def _fault_create(self, fault: Fault) -> None:
        """Create a namespace, by a process with a clock that may be wrong."""
        self._act(fault.who, "create")
        self._loop.create_task(self._create(fault.who))

    async def _create(self, api: int) -> None:
        status, _ = await self.world.create(api, LATE, "ACCURATE")
        self.world.note(f"{LATE} by api-{api}: {status}")

    async def _have_late(self) -> None:
        """The namespace that is created late, whatever went wrong before."""
        for _ in range(_TRIES_MAX):
            status, _ = await self.world.create(0, LATE, "ACCURATE")
            if status in (200, 201):
                return
            await asyncio.sleep(0.5)
        raise RuntimeError(f"{LATE} cannot be created although nothing is wrong any more")

    def _fault_compact(self, _: Fault) -> None:
        self.world.cluster.compact()

    # The end.

    def _heal(self) -> None:
        """Faults stop."""
        world = self.world
        world.healed = True
        world.weather.calm()
        for server in world.cache_servers:
            server.calm()
            server.start()
        world.cluster.calm()
        for member in world.members:
            member.disarm()
            member.skew(0)
            if member.is_misset:
                member.misset(0)
            if not member.process.paused:
                member.start()

    async def _settle(self) -> list[str]:
        """Ask and read until all is counted."""
        config = self._plan.config
        limits_us = [_accept_ms(config, each) * MILLISECOND for each in self._changes_of_limit()]
        slowest_us = max(limits_us, default=0)
        settling = Settling(self._plan, self._clients, self.world, self.world.note)
        self._final, problems = await settling.whole(slowest_us)
        return problems

    async def _audit(self) -> list[str]:
        """Audit by a process; return the problems."""
        member = next(each for each in self.world.members if each.application is not None)
        found_problems: asyncio.Future[list[str]] = self._loop.create_future()
        member.process.spawn(self._audited(member, found_problems))
        return await found_problems

    async def _audited(self, member: Member, found_problems: asyncio.Future[list[str]]) -> None:
        try:
            if member.application is None:
                raise RuntimeError(f"{member.name} does not serve")
            found = mismatches(member.application, self.world.true_us, self._may_land_late())
            found_problems.set_result([each async for each in found])
        except Exception as error:
            found_problems.set_result([f"the audit failed: {error!r}"])

    def _may_land_late(self) -> set[tuple[str, str]]:
        """Counters of unresolved adds: writes into closed windows count only when resolved."""
        return self._unheard | {
            (changed.plan.namespace, item.counter)
            for changed in self._clients.history.changes
            for item in changed.items
            if changed.given_up and changed.plan.how != "atomic"
        }

    def _compare(self) -> list[str]:
        """Compare the observations of each add with the model; return violations."""
        serving = [each.application for each in self.world.members if each.application is not None]
        namespaces = serving[0].service.namespaces.all()
        observed = Observed(
            self._plan, namespaces, self._clients.history, self._final, self.world.recorder
        )
        self.compared = observed.covered
        return [*self.world.recorder.problems, *forbidden(observed)]

    def _changes_of_limit(self) -> list[Fault]:
        """The steps that change the accept limit."""
        return [
            step
            for step in self._plan.steps
            if isinstance(step, Fault)
            and (
                step.what == "accept"
                or (step.what == "setting" and CHANGEABLE[step.for_us] == "accept_limit")
            )
        ]

    @property
    def operations(self) -> int:
        """How many requests clients sent that change or read counters."""
        return self._clients.operations + self._rough.operations

    def trace(self) -> list[str]:
        """The events of the run, a line each, in order."""
        lines = trace_of(self._clients.history, START_US)
        lines += trace_of(self._rough.history, START_US)
        lines = sorted([*self.world.notes, *lines])
        return [*lines, f"{self._loop.turns} turns, {self.world.cluster.statements} statements"]


def _accept_ms(config: Config, fault: Fault) -> int:
    """The accept limit that *fault* sets."""
    most_ms = min(8_500, config.retention_us // 10 // MILLISECOND)
    return 200 + int(fault.how_much * (most_ms - 200))


async def mismatches(
    application: Application, now_us: int, but: Set[tuple[str, str]] = frozenset()
) -> AsyncIterator[str]:
    """Return the findings of an audit by *application*, except these counters of namespaces."""
    store = application.store
    for dataset in await store.control.datasets():
        latest_us = max(each.end_us for each in await store.control.slices(dataset))
        if latest_us > now_us + (SLICES_AHEAD + 2) * dataset.slice_us:
            yield f"slices of {dataset.name} reach {latest_us - now_us} us ahead"
    auditor = Auditor(store)
    for namespace in application.service.namespaces.all():
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            continue
        names = await store.control.counters(namespace, prefix="", after=None, limit=1_000)
        names = [each for each in names if (namespace.name, each) not in but]
        for verdict in await auditor.audit(namespace, names):
            if verdict.state is not State.RIGHT:
                yield f"an audit says of {namespace.name}: {verdict}"
