"""The service's processes over the simulated cluster, put together as in production."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from random import Random
from typing import Any
from unittest.mock import patch

from api.app import Application, create_app
from api.http.auth import Authorizer
from api.telemetry.request_log import RequestLog
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.limits import MILLISECOND, SECOND
from counter.ports import Cache, Clock
from counter.storage.shared.memory_cache import MemoryCache
from counter.types import Dataset
from rollup.leases import MAINTENANCE, Leases
from rollup.partitions import EVENT_BYTES
from rollup.parts import keep_comparing, keep_reading
from rollup.worker import RollupWorker
from tests.simulation.caches import CacheServer, cache_over
from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.observed import Recorder
from tests.simulation.plan import BRIEF, DIRECTORY, ROUGH, Config, Trap
from tests.simulation.requests import START_US, Requests
from tests.simulation.situations import Watch
from tests.simulation.weather import CENTERS, UNMET, Met

#: The simulated stores: each module has its options, servers, adapter, recorder and patches.
_STORES = {"cassandra": "tests.simulation.store", "dynamodb": "tests.simulation.dynamodb_store"}
_BOOT_US = 1_000 * SECOND
_SLOTS = 3
_PAUSE_US = 150 * MILLISECOND
_IDLE_PAUSE_US = 2 * SECOND
_DATA = "counter_default."
#: The bounds of pages and batches.
_PAGES = (
    "rollup.worker._MARKS_PER_READ",
    "rollup.worker._WINDOWS_FIRST",
    "rollup.worker._WINDOWS_MAX",
    "rollup.worker._BATCH",
    "counter.limits.BATCH_ITEMS_MAX",
)


class SimulatedClock:
    """A process's clocks: off by a given amount, and never stepping back."""

    def __init__(self, loop: SimulatedLoop, offset_us: int) -> None:
        self._loop = loop
        self.offset_us = offset_us
        self._latest_us = 0

    def now_us(self) -> int:
        self._latest_us = max(self._latest_us, START_US + self._loop.now_us + self.offset_us)
        return self._latest_us

    def wall_us(self) -> int:
        return START_US + self._loop.now_us + self.offset_us

    def forget_after(self, time_us: int) -> None:
        self._latest_us = min(self._latest_us, time_us)

    def boottime_us(self) -> int:
        return _BOOT_US + self._loop.now_us


class Member:
    """A place for a process: one after another runs in it."""

    process: Process

    def __init__(self, world: "World", number: int) -> None:
        self.world: World = world
        self.number = number
        self.is_api = number < world.config.apis
        self.name = f"{'api' if self.is_api else 'worker'}-{number}"
        self.offset_us = world.config.offsets_us[number]
        self.is_misset = False
        self.application: Application | None = None
        self.lives = 0
        #: When the last crash is over.
        self._back_us = 0
        self._traps: list[list[Any]] = []
        self.ready = asyncio.Event()
        self.start()

    def start(self) -> None:
        """Start a process, unless one runs."""
        if self.lives and (self.process.alive or self.world.loop.now_us < self._back_us):
            return
        self.lives += 1
        self.process = Process(self.world.loop, f"{self.name}/{self.lives}")
        self.clock = SimulatedClock(self.world.loop, self.offset_us)
        self.application = None
        self.process.spawn(self._api() if self.is_api else self._worker())

    def crash(self, for_us: int) -> None:
        """Crash, and start again later, whenever an earlier crash would have been over."""
        self.process.crash()
        self._back_us = self.world.loop.now_us + for_us
        self.world.loop.at(for_us, self.start)

    def misset(self, offset_us: int) -> None:
        """Start again with a clock that is off by so much."""
        self.skew(offset_us)
        self.is_misset = offset_us != 0
        self.crash(0)

    def disarm(self) -> None:
        """Forget the traps that nothing fell into, and how long a crash lasts."""
        self._traps.clear()
        self._back_us = 0

    def skew(self, offset_us: int) -> None:
        """Set the clock."""
        if offset_us < self.offset_us and self.process.alive and not self.world.healed:
            self.world.reach("clock-back")
        self.offset_us = self.clock.offset_us = offset_us

    def _store(self) -> Any:
        world, options = self.world, self.world.options
        if world.config.homes:
            center = CENTERS[world.config.homes[self.number]]
            options = replace(options, local_datacenter=center)
        store = world.stores.SimulatedStore(options, self.clock, world.cluster)
        store.simulated.meet = self._meet
        self.world.watch.watch(store)
        self.world.recorder.watch(store)
        return store

    def set_trap(self, trap: Trap) -> None:
        """Have a statement from now on meet *trap*."""
        self._traps.append([trap.nth, trap])

    def _meet(self, table: str, updates: bool) -> Met:
        """The fate of a statement on *table* that is about to be sent."""
        for each in self._traps:
            trap: Trap = each[1]
            if not _is_meant(trap, table, updates):
                continue
            each[0] -= 1
            if each[0] == 0:
                self._traps.remove(each)
                return self._caught(trap, table)
        return UNMET

    def _caught(self, trap: Trap, table: str) -> Met:
        self.world.note(f"{self.process.name}: {trap.action} at {table.partition('.')[2]}")
        action, _, when = trap.action.partition("-")
        if action == "hold":
            return Met(hold_us=trap.for_us)
        if action == "lose":
            return Met(loses=True)
        if action == "abandon":
            return Met(abandons=True)
        if action == "pause":
            self.process.pause(trap.for_us)
            return Met(hold_us=trap.for_us if when == "before" else 0)
        self.crash(trap.for_us)
        return Met(vanishes=when == "before")

    async def _api(self) -> None:
        world = self.world
        while True:
            cache = world.cache_for(self.clock)
            application = create_app(
                world.settings, store=self._store(), cache=cache, clock=self.clock, rollup=False
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
        world, store, clock = self.world, self._store(), self.clock
        while True:
            try:
                await store.open()
                break
            except Exception as error:
                world.note(f"{self.process.name} cannot start: {error!r}")
                await asyncio.sleep(0.5)
        guard, namespaces = ClockGuard(store.control, clock), Namespaces(store, clock)
        leases = Leases(
            store.leases, clock, self.process.name, lease_time_us=world.config.lease_us, guard=guard
        )
        cache = world.cache_for(clock)
        await cache.open()
        worker: Any = RollupWorker(store, cache, clock, namespaces, leases=leases, guard=guard)
        worker._pause_us = world.pause_us
        await guard.measure()
        stop = asyncio.Event()
        upkeep = (keep_comparing(guard, stop), keep_reading(namespaces, stop))
        await asyncio.gather(*upkeep, worker.run(stop))


class World(Requests):
    """Everything that runs."""

    def __init__(self, config: Config, loop: SimulatedLoop) -> None:
        super().__init__(config, loop)
        centers = (0, 0, 1) if config.levels else (0, 0, 0)
        self.stores: Any = import_module(_STORES[config.store])
        clock = lambda: START_US + loop.now_us  # noqa: E731
        self.cluster: Any = self.stores.Servers(loop.at, clock, self.weather, centers)
        #: When the cache lost entries.
        self.losses_us: list[int] = []
        #: Whether faults are over.
        self.healed = False
        self.watch = Watch(config, lambda: START_US + loop.now_us)
        self.cluster.reach = self.reach
        self.cluster.page = config.page
        self.cluster.restamps = config.paxos_restamps
        for node in self.cluster.nodes:
            node.offset_us = config.nodes_us[node.number]
        self.recorder: Recorder = self.stores.recorder(self.cluster)
        self._cache = MemoryCache(SimulatedClock(loop, 0))
        self.cache_servers = [self._cache_server(number) for number in range(config.cache_servers)]
        self.dataset = Dataset(
            1,
            "default",
            config.retention_us,
            config.slice_us,
            config.time_bucket_us,
            config.event_buckets,
            config.write_timeout_us,
            config.skew_us,
            event_buckets_max=max(1, config.event_buckets_max),
        )
        self.options = self.stores.options_of(config, self.dataset)
        self.settings = _settings(config.store, config.skew_us // MILLISECOND)

    def asked(self, api: int) -> Member:
        return self.members[api]

    def reach(self, situation: str) -> None:
        if not self.loop.ending:
            self.watch.reached.add(situation)

    def pause_us(self) -> int:
        """How long a worker pauses: soon after a window closes, longer without requests."""
        config = self.config
        idle_us = self.loop.now_us - self._asked_us
        return _PAUSE_US if idle_us < config.window_us + config.lag_us else _IDLE_PAUSE_US

    def wipe_cache(self) -> None:
        """Have the cache forget everything."""
        self.losses_us.append(self.true_us)
        for each in (self._cache._entries, self._cache._values, self._cache._guarded):
            each.clear()
        for server in self.cache_servers:
            server.restart(0)

    def cache_for(self, clock: Clock) -> Cache:
        """The cache of a process: over servers, or one that all processes share."""
        kind = self.config.cache
        return cache_over(kind, self.cache_servers, clock) if kind else self._cache

    def _cache_server(self, number: int) -> CacheServer:
        random = Random(f"cache {number} {self.config.seed}")
        loop, items_max = self.loop, self.config.cache_items
        server = CacheServer(loop.at, lambda: loop.now_us, random, items_max)
        server.reach = self._reach_in_cache
        return server

    def _reach_in_cache(self, situation: str) -> None:
        if situation in ("cache-evicts", "cache-restarts"):
            self.losses_us.append(self.true_us)
        self.reach(situation)

    async def start(self) -> None:
        """Apply the schema, start every process, create the namespaces."""
        await self.stores.have_schema(self.cluster, self.options, self.dataset)
        config = self.config
        self.members = [Member(self, n) for n in range(config.apis + config.workers)]
        for each in self.members[: config.apis]:
            await asyncio.wait_for(each.ready.wait(), 60)
        more = [(BRIEF, "ACCURATE")] if config.key_ttl_us else []
        more += [(name, "BEST_EFFORT") for name in ROUGH if config.has_rough]
        for name, counter_type in (*config.namespaces, *more):
            status, answer = await self.create(0, name, counter_type)
            if status != 201:
                raise RuntimeError(f"namespace {name} is not created: {answer}")
        # Processes learn of them when they are asked for them, or when they look next.
        await asyncio.sleep(0.1)


def _is_meant(trap: Trap, table: str, updates: bool) -> bool:
    """Whether *trap* is for a statement on *table*, which *updates* rows or does not."""
    if trap.table == DIRECTORY:
        return updates and table == f"counter.{DIRECTORY}"
    return table.startswith(_DATA + trap.table)


@lru_cache
def _settings(store: str, skew_ms: int) -> Settings:
    return Settings.model_validate(
        {
            "store": store,
            "clock_skew_max": f"{skew_ms}ms",
            # A tenth of the shortest retention of a run.
            "accept_limit": "2s",
            # The supervisor restarts what cannot start.
            "start_timeout": "0s",
        }
    )


class _Faults(logging.Handler):
    """Collects internal errors from the service's log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            self.found.append(f"{record.getMessage()}\n{text}")


@contextmanager
def _bounded(config: Config) -> Iterator[None]:
    """Replace the bounds of production by small ones, and what the store draws by the seed's."""
    bounds: dict[str, object] = {"counter.limits.KEY_TTL_MIN_US": SECOND}
    if config.event_buckets_max:
        bounds |= {
            "rollup.worker._PARTITIONS_EVERY_US": 2 * SECOND,
            "rollup.partitions.PARTITION_BYTES_MAX": EVENT_BYTES,
        }
    if config.page:
        bounds |= dict.fromkeys(_PAGES, config.page)
    bounds |= import_module(_STORES[config.store]).patches_of(config)
    with ExitStack() as stack:
        for name, bound in bounds.items():
            stack.enter_context(patch(name, bound))
        yield


@contextmanager
def deterministic(config: Config, now_s: Callable[[], float]) -> Iterator[list[str]]:
    """Take all randomness from the seed, and time from *now_s*; yields logged internal errors."""
    seed = config.seed
    source = Random(f"urandom {seed}")
    faults = _Faults()
    logger = logging.getLogger("counter")
    was_on, level = logger.propagate, logger.level
    logger.addHandler(faults)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    slots = (MAINTENANCE, *(str(number) for number in range(_SLOTS)))
    try:
        with (
            _bounded(config),
            patch("os.urandom", source.randbytes),
            # They default to the clock of the machine.
            patch.object(RequestLog.__init__, "__defaults__", (now_s,)),
            patch.object(Authorizer.__init__, "__defaults__", (None, now_s)),
            patch("rollup.leases.random", Random(f"leases {seed}")),
            # The work of every process in every second would be most of the run.
            patch("rollup.parts._READ_EVERY_S", 3.0),
            patch("counter.security.keys._READ_EVERY_S", 10.0),
            patch("rollup.parts._COMPARE_EVERY_S", 4.0),
            patch("counter.core.clock_guard._READINGS", 1),
            patch("rollup.worker._MAINTENANCE_EVERY_US", 3 * SECOND),
            patch("rollup.leases.LEASE_READ_EVERY_US", 3 * SECOND),
            patch("rollup.leases.LEASE_SLOTS", _SLOTS),
            patch("rollup.leases.SLOTS", slots),
        ):
            yield faults.found
    finally:
        logger.removeHandler(faults)
        logger.propagate = was_on
        logger.setLevel(level)
