"""SQLite's writer, its readers, its checkpoints and its end, in drawn orders of their threads."""

import asyncio
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from counter.core.results import Add, Added
from counter.core.service import CounterService
from counter.errors import CounterError, OverloadedError, UnavailableError
from counter.limits import MILLISECOND
from counter.storage.shared import batching, bridge
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import SqliteStore, live
from counter.types import Namespace, Token
from rollup.worker import RollupWorker
from tests.properties.seeds import Fault, check_seeds, is_found, planted
from tests.properties.turns import Lock, Loop, Queue, Thread, Turns
from tests.support import filled

SEEDS = settings().max_examples // 2
SITUATIONS = frozenset(
    {
        *("preempted", "failed statement", "failed commit"),
        *(
            "unavailable",
            "overloaded",
            "checkpoint",
            "retry",
            "read",
            "atomic",
            "read failed",
            "tick failed",
        ),
    }
)
FILES = tuple(
    f"counter/storage/{each}.py"
    for each in ("sqlite/database", "sqlite/live", "sqlite/page_sums", "shared/bridge")
)
START_US = 1_800_000_000_000_000
NAMES = ("a", "b")
#: On the clock of the run, a slow write is too late, and windows are soon closed.
DATASET = replace(filled.DATASET, write_timeout_us=50 * MILLISECOND)
SETTINGS = replace(filled.SETTINGS, accept_limit_us=200 * MILLISECOND)


class Clock:
    """The loop's time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def now_us(self) -> int:
        return START_US + self._loop.now_us

    wall_us = boottime_us = now_us

    def forget_after(self, time_us: int) -> None:
        """It holds no latest reading."""


@dataclass
class Tried:
    """One add: number n of a counter adds 4**n."""

    counter: str
    delta: int
    began: int
    #: When it was acknowledged, in steps of the run.
    ended: int | None = None
    #: The other items of the same atomic add.
    other: "Tried | None" = None


class Failing(sqlite3.Connection):
    """The writer's statements may fail."""

    world: "World"

    def execute(self, sql: str, *given: Any) -> Any:
        current = self.world.turns.current
        is_writer = current is not None and current.name == "counter-writer"
        if sql == "PRAGMA wal_checkpoint":
            self.world.seen["checkpoint"] += 1
        elif is_writer and sql != "ROLLBACK" and self.world.draw.random() < self.world.failures:
            self.world.seen["failed commit" if sql == "COMMIT" else "failed statement"] += 1
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(sql, *given)


class World:
    """One run: writers, readers and a rollup over one store, which is closed under them."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.turns = Turns(self.draw, FILES, self.draw.choice((0.0, 0.02, 0.2)))
        self.loop = Loop(self.turns)
        self.clock = Clock(self.loop)
        self.failures = 0.0
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.adds: dict[str, list[Tried]] = {name: [] for name in NAMES}
        self.moment = 0
        parent = Path("/dev/shm")
        self.place = Path(mkdtemp(prefix="threads-", dir=parent if parent.is_dir() else None))

    def now(self) -> int:
        """A number that grows with each call."""
        self.moment += 1
        return self.moment

    async def run(self) -> None:
        draw = self.draw
        store = SqliteStore(self.place, self.clock, [DATASET])
        store.database._wal_pages = draw.choice((1, 10, 4_000))
        await store.open()
        service = CounterService(store, MemoryCache(self.clock), self.clock)
        worker = RollupWorker(store, MemoryCache(self.clock), self.clock, service.namespaces)
        await worker.maintenance.run_once()
        namespace = await service.namespaces.create("threads", SETTINGS)
        self.failures = draw.choice((0.0, 0.0, 0.02, 0.1))
        with self.turns.traced():
            work = [self.write(service, namespace) for _ in range(draw.choice((1, 2, 4)))]
            work += [self.read(service, namespace) for _ in range(draw.choice((1, 2)))]
            work.append(self.roll(worker))
            tasks = [asyncio.ensure_future(each) for each in work]
            if draw.random() < 0.5:
                await asyncio.wait(tasks, timeout=draw.choice((0.0, 0.05, 0.5)))
                await store.close()
                await asyncio.gather(*tasks)
            else:
                await asyncio.gather(*tasks)
                self.failures = 0.0
                await self.check_read(service, namespace)
                await store.close()
        self.failures = 0.0
        await self.check_disk()

    async def check_disk(self) -> None:
        """Open the directory again: it has all acknowledged adds, once."""
        store = SqliteStore(self.place, self.clock, [DATASET])
        await store.open()
        service = CounterService(store, MemoryCache(self.clock), self.clock)
        await service.namespaces.refresh()
        namespace = service.namespaces.get("threads")
        for _ in range(4):
            await self.check_read(service, namespace)
        await store.close()

    async def pause(self) -> None:
        await asyncio.sleep(self.draw.choice((0.0, 0.0, 0.001, 0.02, 0.15)))

    async def write(self, service: CounterService, namespace: Namespace) -> None:
        draw = self.draw
        for _ in range(draw.randrange(1, 5)):
            await self.pause()
            is_atomic = draw.random() < 0.4
            adds, tokens = [], []
            for name in NAMES if is_atomic else draw.choices(NAMES, k=draw.choice((1, 1, 3))):
                made = self.adds[name]
                made.append(Tried(name, 4 ** len(made), self.now()))
                adds.append(made[-1])
                tokens.append(Token(draw.randbytes(16), self.clock.now_us()))
            if is_atomic:
                adds[0].other, adds[1].other = adds[1], adds[0]
            for attempt in range(draw.choice((1, 2))):
                self.seen["retry"] += attempt
                given = [Add(x.counter, x.delta, y) for x, y in zip(adds, tokens, strict=True)]
                results: Sequence[Added | CounterError]
                try:
                    if is_atomic:
                        items = [(each.counter, each.delta) for each in adds]
                        results = await service.add_atomic(namespace, items, tokens[0])
                    elif len(adds) == 1:
                        results = [await service.add(namespace, *given[0][:3])]
                    else:
                        results = await service.add_many(namespace, given)
                except CounterError as error:
                    results = [error] * len(adds)
                for add, result in zip(adds, results, strict=True):
                    if isinstance(result, OverloadedError):
                        self.seen["overloaded"] += 1
                    elif isinstance(result, UnavailableError):
                        self.seen["unavailable"] += 1
                    elif isinstance(result, Exception):
                        self.seen[type(result).__name__] += 1
                    elif add.ended is None:
                        add.ended = self.now()

    async def read(self, service: CounterService, namespace: Namespace) -> None:
        for _ in range(self.draw.randrange(1, 8)):
            await self.pause()
            try:
                await self.check_read(service, namespace)
            except UnavailableError:
                self.seen["read failed"] += 1

    async def check_read(self, service: CounterService, namespace: Namespace) -> None:
        """Read all adds acknowledged before, none begun later, and atomic adds whole."""
        self.seen["read"] += 1
        began = self.now()
        if self.draw.random() < 0.3:
            names = self.draw.choices(NAMES)
            found = [await service.reader.read_one(namespace, names[0], 0)]
        else:
            names = [*NAMES]
            found = await service.reader.read(namespace, names, 0)
        ended = self.now()
        shown = {name: each.count for name, each in zip(names, found, strict=True)}
        for name in names:
            for each in self.adds[name]:
                times = shown[name] // each.delta % 4
                least = each.ended is not None and each.ended < began
                if not least <= times <= (each.began < ended):
                    self.wrong.append(f"read {began} to {ended}: {each} counts {times} times")
                other = each.other
                if other is not None and len(names) > 1:
                    self.seen["atomic"] += 1
                    if shown[other.counter] // other.delta % 4 != times:
                        self.wrong.append(f"read {began} to {ended} shows half of {each}")
            if shown[name] >> 2 * len(self.adds[name]):
                self.wrong.append(f"{name} has {shown[name]}, which is too much")

    async def roll(self, worker: RollupWorker) -> None:
        for _ in range(self.draw.randrange(1, 6)):
            await self.pause()
            try:
                await worker.tick()
            except CounterError:
                self.seen["tick failed"] += 1


@contextmanager
def patched(world: World) -> Iterator[None]:
    connect = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Thread, "turns", world.turns, raising=False)
        patch.setattr(Failing, "world", world, raising=False)
        patch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **{"factory": Failing, **k}))
        patch.setattr(bridge, "threading", SimpleNamespace(Thread=Thread))
        patch.setattr(bridge, "SimpleQueue", Queue)
        patch.setattr(live, "threading", SimpleNamespace(Lock=Lock))
        yield


def run(seed: int) -> World:
    """Run the world of *seed*; ``wrong`` has the problems."""
    world = World(seed)
    with patched(world):
        try:
            world.loop.run_until_complete(world.run())
        except BaseException as error:
            world.wrong.append(repr(error))
        finally:
            world.loop.end()
    world.seen["preempted"] += world.turns.preempted
    world.wrong += world.loop.failures
    shutil.rmtree(world.place)
    return world


def test_results_are_committed() -> None:
    check_seeds(run, SEEDS, SITUATIONS)


def acknowledge_failed_commits(patch: pytest.MonkeyPatch) -> None:
    """A batch with a failed commit is answered as if it had succeeded."""
    execute = Failing.execute

    def careless(self: Failing, sql: str, *given: Any) -> Any:
        try:
            return execute(self, sql, *given)
        except sqlite3.OperationalError:
            if sql != "COMMIT":
                raise
            return sqlite3.Connection.execute(self, "ROLLBACK") if self.in_transaction else None

    patch.setattr(Failing, "execute", careless)


def show_the_tail_late(patch: pytest.MonkeyPatch) -> None:
    """The live tail gets the events of a batch with those of the next one."""
    commit = live.LiveTail.commit
    late: list[Any] = []

    def careless(self: live.LiveTail) -> None:
        fresh, self.written = self.written, [*late]
        late[:] = fresh
        commit(self)

    patch.setattr(live.LiveTail, "commit", careless)


def keep_ids_of_a_failed_commit(patch: pytest.MonkeyPatch) -> None:
    """Ids of counters that were rolled back stay known."""
    patch.setattr(live.Ids, "rollback", live.Ids.commit)


def close_without_waiting(patch: pytest.MonkeyPatch) -> None:
    """The end does not wait for the jobs that were accepted."""

    async def careless(self: Any) -> None:
        self._is_closed = True

    patch.setattr(batching.Batcher, "close", careless)


def forget_the_lock_of_the_tail(patch: pytest.MonkeyPatch) -> None:
    """The loop reads the live tail while a commit changes it."""
    patch.setattr(Lock, "__enter__", lambda _: None)


FAULTS: list[tuple[Fault, int]] = [
    (acknowledge_failed_commits, 4),
    (show_the_tail_late, 4),
    (keep_ids_of_a_failed_commit, 4),
    (close_without_waiting, 7),
    (forget_the_lock_of_the_tail, 13),
]


@planted(FAULTS)
def test_a_planted_fault_is_found(fault: Fault, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert is_found(run, seed)
