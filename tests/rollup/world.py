"""Several processes over one store, in this one: each with its own eyes, and a road that may block.

The store takes each call at once and whole; what may come between two calls of a process is drawn
from a seed, or held up by the test.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.core.service import CounterService
from counter.limits import LEASE_READ_EVERY_US, MINUTE, SECOND
from counter.storage.memory import MemoryStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.telemetry.store_calls import wrapped
from counter.testing.clock import FakeClock
from counter.types import (
    CounterType,
    Dataset,
    Head,
    Namespace,
    NamespaceSettings,
    PayloadCheck,
    Token,
)
from rollup.leases import Leases
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker
from tests.support.times import START_US

LEASE_TIME = 10 * SECOND
WINDOW = SECOND
#: The time until a window of now is closed.
CLOSING = 10 * SECOND
DATASET = Dataset(
    id=1,
    name="default",
    retention_us=60 * MINUTE,
    slice_us=10 * MINUTE,
    time_bucket_us=10 * MINUTE,
    event_buckets=1,
    write_timeout_us=SECOND,
    clock_skew_max_us=SECOND // 2,
)
SETTINGS = NamespaceSettings(
    counter_type=CounterType.ACCURATE,
    dataset="default",
    accept_limit_us=3 * SECOND,
    future_limit_us=2 * SECOND,
    rollup_window_us=WINDOW,
    shards=16,
    payload_check=PayloadCheck.OFF,
    key_ttl_us=10 * MINUTE,
    cache_ttl_us=SECOND,
)


class Road:
    """A process's way to the store: others get ahead on it, and the test may block it.

    With ``hold_at`` set, the process is held up there, between two of its steps, until ``open``.
    """

    def __init__(self, store: MemoryStore, seed: int = 0) -> None:
        self.store = wrapped(store, self._through)
        self._random = Random(seed)
        self.steps = 0
        self.hold_at: int | None = None
        self.hold_in: str | None = None
        self.open = asyncio.Event()
        self.held = asyncio.Event()

    def _through(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def stepped(*arguments: Any, **named: Any) -> Any:
            await self._step(name)
            result = await call(*arguments, **named)
            await self._step(f"{name} done")
            return result

        return stepped

    async def _step(self, name: str) -> None:
        self.steps += 1
        if self.steps == self.hold_at or name == self.hold_in:
            self.hold_in = None
            self.held.set()
            await self.open.wait()
        for _ in range(self._random.randrange(3)):
            await asyncio.sleep(0)


class Process:
    """A rollup process: its road, its directory of namespaces, its worker."""

    def __init__(
        self,
        store: MemoryStore,
        clock: FakeClock,
        name: str | None,
        *,
        seed: int = 0,
        guard: ClockGuard | None = None,
    ) -> None:
        self.road = Road(store, seed)
        seen = self.road.store
        self.namespaces = Namespaces(seen, clock)
        self.leases = None
        if name is not None:
            self.leases = Leases(store.leases, clock, name, lease_time_us=LEASE_TIME, guard=guard)
        self.worker = RollupWorker(
            seen,
            MemoryCache(clock),
            clock,
            self.namespaces,
            batch_counters=3,
            leases=self.leases,
            guard=guard,
        )

    async def held_in(self, step: str) -> asyncio.Task[int]:
        """Begin a pass; return it when it is held up in that call of the store, until ``open``."""
        self.road.hold_in = step
        begun = asyncio.create_task(self.worker.tick())
        await self.road.held.wait()
        return begun


class World:
    """One store and the API over it; its processes are the test's to make."""

    def __init__(self, dataset: Dataset = DATASET) -> None:
        self.clock = FakeClock(START_US)
        self.store = MemoryStore(self.clock, [dataset])
        self.api = CounterService(self.store, MemoryCache(self.clock), self.clock)
        self._nonces = iter(range(1, 2**62))

    async def begin(self, **settings: Any) -> Namespace:
        """Make slices, and the namespace ``n``."""
        await Maintenance(self.store, self.clock).run_once()
        return await self.create("n", **settings)

    async def create(self, name: str, **settings: Any) -> Namespace:
        return await self.api.namespaces.create(name, replace(SETTINGS, **settings))

    def process(self, name: str | None = None, **named: Any) -> Process:
        """One more process; one without a name has no leases and takes everything for its own."""
        return Process(self.store, self.clock, name, **named)

    async def shared(self, *names: str) -> list[Process]:
        """Processes that have shared out the slots among them."""
        found = [self.process(name, seed=seed) for seed, name in enumerate(names)]
        await self.turns(*found)
        return found

    async def turns(self, *processes: Process) -> None:
        """Let each look three times: a released slot is free two looks later."""
        for _ in range(3):
            self.clock.advance(LEASE_READ_EVERY_US)
            for each in processes:
                assert each.leases is not None
                await each.leases.update()

    def token(self, age_us: int = 0) -> Token:
        return Token(next(self._nonces).to_bytes(16, "big"), self.clock.now_us() - age_us)

    async def add(self, counter: str, delta: int = 1, *, namespace: str = "n") -> None:
        await self.api.add(self.api.namespaces.get(namespace), counter, delta, self.token())

    async def add_many(self, number: int) -> dict[str, int]:
        """Add to this many counters; return the expected counts."""
        for each in range(number):
            await self.add(f"c{each}", each)
        return {f"c{each}": each for each in range(number)}

    async def roll_up(self, *processes: Process, after_us: int = CLOSING, times: int = 1) -> None:
        """Let time pass, by default until a window of now is closed, and each do a pass."""
        for _ in range(times):
            self.clock.advance(after_us)
            for each in processes:
                await each.worker.tick()

    async def pass_slices(self, process: Process, number: int = 12) -> None:
        """Let slices pass: *process* makes, retires and drops them, in a pass each."""
        for _ in range(number):
            self.clock.advance(DATASET.slice_us)
            for _ in range(3):
                await process.worker.tick()

    async def head(self, namespace: Namespace, counter: str = "c") -> Head:
        [found] = await self.store.rollups.heads(namespace, [counter])
        assert found is not None
        return found

    async def counts(self, namespace: Namespace, *counters: str) -> list[int]:
        """The accurate counts."""
        return [each.count for each in await self.api.reader.read(namespace, counters, 0)]

    async def rolled_up(self, namespace: Namespace) -> dict[str, int]:
        """The stored checkpoints."""
        names = await self.store.control.counters(namespace, prefix="", after=None, limit=10_000)
        heads = await self.store.rollups.heads(namespace, names)
        return {n: h.checkpoint.count for n, h in zip(names, heads, strict=True) if h is not None}


async def begun(dataset: Dataset = DATASET, **settings: Any) -> tuple[World, Namespace]:
    """A world with slices, and its namespace ``n``."""
    world = World(dataset)
    return world, await world.begin(**settings)
