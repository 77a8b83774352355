"""Processes that die between two chosen steps, over a store that does not.

A step is the instant before or after a call of the store: dead before it, the call never happened;
dead after it, it happened, and its response was lost. Whatever the process did in memory is gone.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from counter.core.namespaces import Namespaces
from counter.core.service import CounterService
from counter.errors import TokenPendingError, TokenTooOldError, UnavailableError
from counter.ports import Store
from counter.storage.memory import MemoryStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import SqliteStore
from counter.telemetry.store_calls import wrapped
from counter.testing.clock import FakeClock
from counter.types import Namespace, Token
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker
from tests.rollup.world import DATASET, SETTINGS
from tests.support.needs import need
from tests.support.times import SECOND, START_US

#: More steps than any of the works has: one that does not end in so many would never end.
STEPS_MAX = 2_000
#: A few: each shard adds the same steps, and a process dies in each of them.
SHARDS = 4


class DeathError(BaseException):
    """The process is dead. No code of it may handle that, so it is no Exception."""


class Mortal:
    """A process's way to the store, which ends at a chosen step."""

    def __init__(self, store: Store) -> None:
        self.store = wrapped(store, self._through)
        self._dies_at: int | None = None
        self._steps = 0

    def die_at(self, step: int | None) -> None:
        """Live through the steps before *step*, counted from now; for ever if it is None."""
        self._dies_at, self._steps = step, 0

    def _through(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def stepped(*arguments: Any, **named: Any) -> Any:
            self._step()
            result = await call(*arguments, **named)
            self._step()
            return result

        return stepped

    def _step(self) -> None:
        self._steps += 1
        if self._dies_at is not None and self._steps >= self._dies_at:
            raise DeathError


class Process:
    """An API process and a worker, of one memory."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self.mortal = Mortal(store)
        self.clock = clock
        road = self.mortal.store
        self.cache = MemoryCache(clock)
        self.service = CounterService(road, self.cache, clock)
        self.worker = RollupWorker(
            road, self.cache, clock, self.service.namespaces, batch_counters=2
        )

    @property
    def namespace(self) -> Namespace:
        return self.service.namespaces.get("n")

    async def add(self, counter: str, delta: int, token: Token | str) -> Any:
        return await self.service.add(await self._looked(), counter, delta, token)

    async def clear(self, counter: str, token: Token) -> Any:
        return await self.service.clear(await self._looked(), counter, token)

    async def delete(self, counter: str, token: Token) -> Any:
        return await self.service.delete(await self._looked(), counter, token)

    async def add_atomic(self, items: list[tuple[str, int]], token: Token) -> Any:
        return await self.service.add_atomic(await self._looked(), items, token)

    async def _looked(self) -> Namespace:
        """The namespace, as a request that writes finds it."""
        if self.service.namespaces.needs_reread("n", writes=True):
            await self.service.namespaces.refresh()
        return self.namespace

    async def roll_up(self) -> None:
        # If the store is one file, the worker learns of namespaces only here.
        await self.worker._namespaces.refresh()
        await self.worker.tick()

    async def counts(self, *counters: str) -> list[int]:
        """As an accurate read shows them, and as rolled up: the same once windows are closed."""
        accurate = await self.service.reader.read(self.namespace, counters, 0)
        rolled_up = await self.service.reader.read(self.namespace, counters, 10 * 60 * SECOND)
        found = [each.count for each in accurate]
        assert [each.count for each in rolled_up] == found
        return found

    async def names(self) -> list[str]:
        """The listed counters."""
        control = self.mortal.store.control
        return list(await control.counters(self.namespace, prefix="", after=None, limit=100))


class Place:
    """One store, and the processes that come and go over it."""

    def __init__(self, storage: str, directory: Path) -> None:
        self.clock = FakeClock(START_US)
        self._new_store: Callable[[], Store]
        if storage == "sqlite":
            self._new_store = lambda: SqliteStore(directory, self.clock, [DATASET])
        elif storage == "postgresql":
            self._new_store = need(f"tests.support.{storage}").stores_of(DATASET, self.clock)
        else:
            memory = MemoryStore(self.clock, [DATASET])
            self._new_store = lambda: memory
        self._store: Store | None = None
        self._nonces = iter(range(1, 2**62))

    async def open(self) -> None:
        """Make slices, and the namespace ``n``."""
        store = await self._opened()
        namespaces = Namespaces(store, self.clock)
        await Maintenance(store, self.clock).run_once()
        await namespaces.create("n", replace(SETTINGS, shards=SHARDS))

    async def process(self, dies_at: int | None = None) -> Process:
        """A new process over the durable data of the one before."""
        await self.close()
        found = Process(await self._opened(), self.clock)
        await found.service.namespaces.refresh()
        found.mortal.die_at(dies_at)
        return found

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
            self._store = None

    async def _opened(self) -> Store:
        if self._store is None:
            self._store = self._new_store()
            await self._store.open()
        return self._store

    def token(self, age_us: int = 0) -> Token:
        return Token(next(self._nonces).to_bytes(16, "big"), self.clock.now_us() - age_us)

    async def close_windows(self, process: Process) -> None:
        """Let time pass until everything up to now is rolled up."""
        self.clock.advance(10 * SECOND)
        for _ in range(2):
            await process.roll_up()


async def until_answered(place: Place, ask: Callable[[], Awaitable[Any]]) -> bool:
    """Whether a token counts, asked until the response is definite."""
    for _ in range(60):
        try:
            await ask()
        except TokenTooOldError as error:
            if error.applied is None:
                raise
            return False
        except (TokenPendingError, UnavailableError):
            place.clock.advance(SECOND)
        else:
            return True
    raise AssertionError("no definite answer in a minute")
