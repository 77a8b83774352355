"""One seed: clients, processes over one PostgreSQL server, and the order of their statements."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final
from unittest.mock import patch

from api.app import Application, create_app
from counter.clock import StoreClock
from counter.config.settings import Settings
from counter.core.clock_guard import guard_of
from counter.core.namespaces import Namespaces
from counter.limits import MILLISECOND, MINUTE, SECOND, TIME_MAX_US
from counter.storage.postgresql import store
from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.store import PostgresqlStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.types import Dataset
from rollup.leases import Leases
from rollup.parts import keep_comparing, keep_reading
from rollup.worker import RollupWorker
from tests.postgresql.backends import Server
from tests.postgresql.observed import Observed
from tests.postgresql.orders import DrawnDatabase, Met, Orders
from tests.simulation.ambush import Ambush
from tests.simulation.checker import check
from tests.simulation.clients import Clients
from tests.simulation.draw import Drawing, draw_bounds, draw_cancels
from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.plan import Attempt, Change, Config, Fault, Plan, Read, Step, Trap
from tests.simulation.reported import untrue
from tests.simulation.requests import START_US, Requests
from tests.simulation.run import mismatches
from tests.simulation.settling import Settling
from tests.simulation.trace import trace_of
from tests.simulation.world import deterministic
from tests.support.app import forget_applications

#: Events of a run that is this long are dropped within it.
_RETENTION_US: Final = 20 * SECOND
_LATE_US: Final = 34 * SECOND
_CONNECTIONS: Final = 4
#: How far the server's clock is set: not so far that processes hold it for wrong.
_STEP_US: Final = 4 * SECOND
#: The statements on such a table.
_TRAPPED: Final = {
    "events_": (".append(", ".append_atomic("),
    "dirty": ("SET fence",),
    "resolutions": ("resolutions r SET", ".resolutions VALUES"),
    "counts": (".apply(",),
}


def dataset_of(config: Config) -> Dataset:
    return Dataset(
        1,
        "default",
        config.retention_us,
        config.slice_us,
        config.time_bucket_us,
        config.event_buckets,
        config.write_timeout_us,
        0,
        event_buckets_max=1,
    )


def draw_plan(seed: int) -> Plan:
    """The steps of clients; faults are drawn during them."""
    draw = Random(f"orders {seed}")
    window_us = draw.choice((1, 1, 2)) * SECOND
    apis, workers = draw.choice((1, 2, 2, 3)), draw.choice((1, 2))
    is_long = draw.random() < 0.2
    slice_us = 10 * SECOND
    config = Config(
        seed=seed,
        window_us=window_us,
        accept_us=draw.choice((200, 500, 1_000, 2_000)) * MILLISECOND,
        write_timeout_us=draw.choice((200, 500, 1_000)) * MILLISECOND,
        # The error of a process's estimate of the server's clock.
        skew_us=20 * MILLISECOND,
        retention_us=_RETENTION_US if is_long else 2 * MINUTE,
        slice_us=slice_us,
        time_bucket_us=slice_us,
        event_buckets=1,
        shards=draw.choice((1, 1, 2)),
        lease_us=draw.choice((3, 10)) * SECOND,
        payload_check="guard",
        cache_ttl_us=draw.choice((0, 1, 30)) * SECOND,
        namespaces=draw.choice(((("one", "ACCURATE"),), (("one", "EVENTUAL"),))),
        offsets_us=(0,) * (apis + workers),
        apis=apis,
        workers=workers,
        end_us=draw.randrange(3, 7) * SECOND,
        wrong_us=_STEP_US,
    )
    plan = Plan(config)
    drawing = Drawing(plan, draw)
    eras = Random(f"eras {seed}")
    has_eras = not is_long and eras.random() < 0.4
    if has_eras:
        later_us = eras.choice((200, 500, 1_000, 2_000, 4_000)) * MILLISECOND
        plan.config = config = replace(config, later_accept_us=later_us)
    limits_us = (config.accept_us, config.later_accept_us or config.accept_us)
    for _ in range(draw.choice((4, 8, 12))):
        aimed = replace(config, accept_us=eras.choice(limits_us))
        plan.steps += Ambush(drawing, draw, aimed).draw()
    drawing.draw_clients()
    plan.steps += _traps_of_workers(config, draw)
    if is_long:
        plan.config = replace(config, end_us=config.end_us + _LATE_US)
        plan.steps = [_later(each, draw, apis) for each in plan.steps]
    elif draw.random() < 0.3 and not has_eras:
        _set_clock(plan, draw)
    draw_cancels(plan, Random(f"cancels {seed}"))
    draw_bounds(plan, Random(f"bounds {seed}"))
    plan.steps.sort(key=lambda step: step.at_us)
    return plan


def _traps_of_workers(config: Config, draw: Random) -> list[Step]:
    """Workers that are held up, or die, while other processes go on."""
    return [
        Trap(
            draw.randrange(config.end_us),
            config.apis + draw.randrange(config.workers),
            draw.choice(("counts", "counts", "dirty")),
            1,
            draw.choice(("hold", "hold", "abandon", "lose", "crash-after")),
            draw.choice((1, 2)) * (config.lag_us + config.window_us),
        )
        for _ in range(draw.choice((0, 1, 3)))
    ]


def _set_clock(plan: Plan, draw: Random) -> None:
    """Let the server's clock run ahead until it is followed, then correct it, like a failover."""
    config = plan.config
    begin_us, length_us = draw.randrange(SECOND), 6 * SECOND
    plan.config = replace(config, end_us=config.end_us + length_us)
    plan.steps = [
        replace(each, at_us=each.at_us + length_us) if draw.random() < 0.7 else each
        for each in plan.steps
    ]
    ahead_us = int(draw.uniform(0.3, 1) * _STEP_US)
    end_us = begin_us + length_us - draw.randrange(SECOND)
    plan.steps += [Fault(begin_us, "clock", 0, ahead_us), Fault(end_us, "clock", 0, 0)]


def _later(step: Step, draw: Random, apis: int) -> Step:
    """Delay *step* until earlier slices are dropped, or resend a token then."""
    made = replace(step, key=None) if isinstance(step, Change) else step
    if draw.random() < 0.4:
        return replace(made, at_us=made.at_us + _LATE_US)
    if isinstance(made, Change) and draw.random() < 0.4:
        again = Attempt(_LATE_US, draw.randrange(apis), False)
        return replace(made, attempts=(*made.attempts, again))
    return made


class ProcessClock(StoreClock):
    """The clock of a process, which follows the server's."""

    def __init__(self, loop: SimulatedLoop, at_boot_us: int) -> None:
        self._loop = loop
        super().__init__()
        self._at_boot_us = at_boot_us

    def boottime_us(self) -> int:
        return 1_000 * SECOND + self._loop.now_us


class Member:
    """A place for a process: one after another runs in it."""

    process: Process

    def __init__(self, world: "OrderWorld", number: int) -> None:
        self._world = world
        self._number = number
        self._lives = 0
        self._traps: list[list[Any]] = []
        self.application: Application | None = None
        self.ready = asyncio.Event()
        self.start()

    def start(self) -> None:
        """Start a process, unless one runs."""
        if self._lives and self.process.alive:
            return
        world = self._world
        self._lives += 1
        is_api = self._number < world.config.apis
        self.process = Process(world.loop, f"{'api' if is_api else 'worker'}-{self._number}")
        # A machine may have any time of its own.
        self.clock = ProcessClock(world.loop, world.draw.choice((START_US, 0, 2 * START_US)))
        self.application = None
        self.process.spawn(self._api() if is_api else self._worker())

    def crash(self, for_us: int) -> None:
        """Crash, and start again later."""
        if not self.process.alive:
            return
        self._world.seen["crashed"] += 1
        self.process.crash()
        self.application = None
        self._database.pool.crash()
        self._world.loop.at(for_us, self.start)

    def disarm(self) -> None:
        """Forget the traps that nothing fell into."""
        self._traps.clear()

    def set_trap(self, trap: Trap) -> None:
        """Have a statement from now on meet *trap*."""
        self._traps.append([trap.nth, trap])

    def _meet(self, sql: str) -> Met:
        """The fate of a statement that is about to be sent."""
        for each in self._traps:
            trap: Trap = each[1]
            if not any(name in sql for name in _TRAPPED[trap.table]):
                continue
            each[0] -= 1
            if each[0] == 0:
                self._traps.remove(each)
                return self._caught(trap, sql)
        return Met()

    def _caught(self, trap: Trap, sql: str) -> Met:
        world, (action, _, when) = self._world, trap.action.partition("-")
        world.note(f"{self.process.name}: {trap.action} at {sql[:60]}")
        world.seen[f"trap {action}"] += 1
        if action == "hold":
            return Met(hold_us=trap.for_us)
        if action == "lose":
            return Met(unanswered=True)
        if action == "abandon":
            return Met(hold_us=trap.for_us, kill_us=int(world.draw.random() * trap.for_us) + 1)
        if action == "pause":
            self.process.pause(trap.for_us)
            return Met(hold_us=trap.for_us if when == "before" else 0)
        world.loop.at(0, self.crash, trap.for_us)
        return Met(unsent=when == "before")

    def _store(self) -> PostgresqlStore:
        options = PostgresqlOptions(
            "postgresql://unused", self._world.orders.server.name, _CONNECTIONS
        )
        self._database = DrawnDatabase(options, self._world.orders, self._meet)
        with patch.object(store, "PostgresqlDatabase", lambda _: self._database):
            return PostgresqlStore(options, self.clock)

    async def _api(self) -> None:
        world = self._world
        while True:
            application = create_app(
                world.settings,
                store=self._store(),
                cache=world.cache,
                clock=self.clock,
                rollup=False,
            )
            try:
                async with application.running(rollup=False):
                    self.application = application
                    self.ready.set()
                    await asyncio.Event().wait()
            except Exception as error:
                world.note(f"{self.process.name} cannot start: {error!r}")
            await asyncio.sleep(0.5)

    async def _worker(self) -> None:
        world, clock = self._world, self.clock
        store = self._store()
        guard, namespaces = guard_of(store, clock), Namespaces(store, clock)
        leases = Leases(
            store.leases,
            clock,
            f"{self.process.name}/{self._lives}",
            lease_time_us=world.config.lease_us,
            guard=guard,
        )
        worker = RollupWorker(store, world.cache, clock, namespaces, leases=leases, guard=guard)
        while True:
            try:
                await store.open()
                await guard.measure()
                break
            except Exception as error:
                world.note(f"{self.process.name} cannot start: {error!r}")
                await asyncio.sleep(0.5)
        stop = asyncio.Event()
        upkeep = (keep_comparing(guard, stop), keep_reading(namespaces, stop))
        await asyncio.gather(*upkeep, worker.run(stop))


class OrderWorld(Requests):
    """Everything that runs."""

    def __init__(self, plan: Plan, loop: SimulatedLoop, server: Server) -> None:
        super().__init__(plan.config, loop)
        self.plan = plan
        self.draw = Random(f"world {plan.config.seed}")
        self.orders = Orders(loop, server, Random(f"turns {plan.config.seed}"), START_US)
        self.orders.note = self.note
        self.cache = MemoryCache(ProcessClock(loop, START_US))
        self.clients = Clients(self)
        self.settings = Settings.model_validate(
            {
                "store": "postgresql",
                "accept_limit": "2s",
                "start_timeout": "0s",
            }
        )
        self.seen = self.orders.seen
        self.observed = Observed(plan.config, self.orders, self._limit_at)
        #: From when on the accept limit is another one.
        self._era_us = TIME_MAX_US
        #: How many items were compared with the model, and how many were not by which reason.
        self.compared: Counter[str] = Counter()
        self.wrong: list[str] = []

    def asked(self, api: int) -> Member:
        return self.members[api]

    async def whole(self) -> list[str]:
        """Run it all; return the problems."""
        config = self.config
        self.members = [Member(self, n) for n in range(config.apis + config.workers)]
        for each in self.members[: config.apis]:
            await asyncio.wait_for(each.ready.wait(), 60)
        for name, counter_type in config.namespaces:
            status, answer = await self.create(0, name, counter_type)
            if status != 201:
                raise RuntimeError(f"namespace {name} is not created: {answer}")
        created_us = self.true_us
        if config.later_accept_us:
            await self._change_limit()
        await asyncio.sleep(2 - self.loop.now_us % (2 * SECOND) / SECOND)
        self._begun_us = self.loop.now_us
        self.clients.begun_us = START_US + self._begun_us
        self._draw_trouble()
        tasks = [asyncio.create_task(self._step(each)) for each in self.plan.steps]
        await self._until(config.end_us)
        self._heal()
        await asyncio.gather(*tasks)
        final, problems = await Settling(self.plan, self.clients, self, self.note).whole(
            _STEP_US + config.later_accept_us
        )
        problems += await self._audit()
        history = self.clients.history
        unreported, self.compared = untrue(
            config,
            history,
            final,
            created_us,
            is_fenced=True,
            stored=self.observed.letters,
            limit_at=self._limit_at,
        )
        items = [item for changed in history.changes for item in changed.items]
        self.seen["cancelled"] += sum(item.cancelled_us is not None for item in items)
        self.seen["refused"] += sum(item.refused for item in items)
        shortest_us = min(config.accept_us, config.later_accept_us or config.accept_us)
        checked = replace(config, accept_us=shortest_us)
        return [*problems, *check(checked, history, final), *unreported]

    def _limit_at(self, time_us: int) -> int:
        config = self.config
        return config.accept_us if time_us < self._era_us else config.later_accept_us

    async def _change_limit(self) -> None:
        """Have the accept limit change at an instant that lies within the run."""
        [(name, _)] = self.config.namespaces
        limit_ms = self.config.later_accept_us // MILLISECOND
        body = {"accept_limit": f"{limit_ms}ms"}
        status, answer = await self.request(0, "PUT", f"/v1/namespaces/{name}", body)
        application = self.members[0].application
        if status != 200 or application is None:
            raise RuntimeError(f"the accept limit is not changed: {answer}")
        self._era_us = application.service.namespaces.get(name).eras[-1].from_us
        self.seen["limit changed"] += 1
        ahead_us = self._era_us - self.true_us - int(self.draw.random() * self.config.end_us)
        await asyncio.sleep(max(0, ahead_us) / SECOND)

    def trace(self) -> list[str]:
        """The events, a line each, in order."""
        return sorted([*self.notes, *trace_of(self.clients.history, START_US)])

    async def _until(self, at_us: int) -> None:
        await asyncio.sleep(max(0, self._begun_us + at_us - self.loop.now_us) / SECOND)

    async def _step(self, step: Step) -> None:
        await self._until(step.at_us)
        if isinstance(step, Change):
            await self.clients.change(step)
        elif isinstance(step, Read):
            await self.clients.read(step)
        elif isinstance(step, Trap):
            self.members[step.who].set_trap(step)
        elif isinstance(step, Fault):
            self._set_clock(step.for_us)

    def _draw_trouble(self) -> None:
        config, draw, trouble = self.config, self.draw, self.orders.trouble
        trouble.stops = draw.choice((0.1, 0.3, 0.6))
        trouble.slow = draw.choice((0.0, 0.02, 0.1, 0.3))
        lag_us = config.lag_us + config.window_us
        trouble.slow_us = draw.choice((config.write_timeout_us, config.accept_us, lag_us, lag_us))
        trouble.unsent = trouble.unanswered = draw.choice((0.0, 0.0, 0.02, 0.1))
        some = draw.choice((0, 0.05, 0.2))
        self.weather.client_lost_request = self.weather.client_lost_reply = some
        for _ in range(draw.choice((0, 0, 2, 8))):
            self.loop.at(self._instant(), self.orders.kill)
        for _ in range(draw.choice((0, 1, 2))):
            self.loop.at(self._instant(), self._strike)
        for _ in range(draw.choice((0, 0, 2))):
            self.loop.at(self._instant(), self._recount)
        for _ in range(draw.choice((0, 0, 0, 2))):
            self.loop.at(self._instant(), self._set_clock, draw.randint(-_STEP_US, _STEP_US))

    def _instant(self) -> int:
        """When something happens, from now."""
        at_us = self.draw.choice(self.plan.steps).at_us
        return at_us + int(self.draw.expovariate(1) * 100 * MILLISECOND)

    def _strike(self) -> None:
        """Have a process pause or crash."""
        if self.orders.trouble.stops == 0:
            return
        member, for_us = self.draw.choice(self.members), int(self.draw.random() * 4 * SECOND)
        if self.draw.random() < 0.5:
            member.process.pause(for_us)
        else:
            member.crash(for_us)

    def _set_clock(self, step_us: int) -> None:
        """Set the server's clock, as a failover or NTP may."""
        if self.orders.trouble.stops:
            self.seen["clock set"] += 1
            self.orders.set_clock(step_us)

    def _recount(self) -> None:
        path = f"/v1/namespaces/{self.config.namespaces[0][0]}/counters/hot/recount"
        api = self.draw.randrange(self.apis)
        self.loop.create_task(self.request(api, "POST", path, {}))

    def _heal(self) -> None:
        """Nothing goes wrong from now on."""
        self.orders.trouble.calm()
        self.orders.set_clock(0)
        self.weather.calm()
        for each in self.members:
            each.disarm()
            if not each.process.paused:
                each.start()

    async def _audit(self) -> list[str]:
        """Compare the stored data with the events; return the problems."""
        application = next(each.application for each in self.members if each.application)
        return [each async for each in mismatches(application, self.true_us)]


def run_orders(server: Server, seed: int) -> OrderWorld:
    """Run the world of *seed*; ``wrong`` has the problems."""
    plan = draw_plan(seed)
    server.fresh(dataset_of(plan.config))
    loop = SimulatedLoop(Random(f"turns {seed}"))
    with (
        deterministic(plan.config, loop.time) as faults,
        patch("rollup.worker._PAUSE_MAX_US", SECOND),
        patch.object(store, "check_server", _unchecked),
    ):
        world = OrderWorld(plan, loop, server)
        try:
            world.wrong = loop.run_until_complete(world.whole())
        except Exception as error:
            world.wrong = [f"the run itself failed: {error!r}"]
        finally:
            # Closing it earlier fails.
            world.wrong += [f"the service logged a fault of its own: {each}" for each in faults]
            world.orders.close()
            loop.end()
            forget_applications()
    world.wrong += [f"not awaited: {each}" for each in loop.failures]
    return world


async def _unchecked(_: object) -> Sequence[str]:
    """The sessions do not wait for the disk, which no run needs."""
    return ()
