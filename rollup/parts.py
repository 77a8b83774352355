"""The parts of a process over one store, whether it serves, rolls up, or both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from counter.background import every
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard, guard_of
from counter.core.namespaces import Namespaces
from counter.limits import DIRECTORY_READ_US, SECOND
from counter.ports import Cache, Clock, Store
from counter.storage import open_cache
from counter.storage.shared.startup_retry import StartupRetry
from counter.telemetry import open_tracing
from counter.telemetry.tracing import Tracing
from rollup.audits import audits_of
from rollup.leases import Leases, worker_id
from rollup.worker import RollupWorker

_COMPARE_EVERY_S: Final = 2.0
_READ_EVERY_S: Final = DIRECTORY_READ_US / SECOND


@dataclass(frozen=True, slots=True)
class Parts:
    """What both kinds of process have; :func:`parts_of` makes it of the settings."""

    settings: Settings
    clock: Clock
    tracing: Tracing
    store: Store
    cache: Cache
    guard: ClockGuard
    #: None over a store that one process has for itself.
    leases: Leases | None

    def worker(self, namespaces: Namespaces) -> RollupWorker:
        """Return the worker of the process, with the audits that the settings ask for."""
        worker = RollupWorker(
            *(self.store, self.cache, self.clock, namespaces),
            concurrency=self.settings.rollup_concurrency,
            leases=self.leases,
            guard=self.guard,
        )
        worker.batches.tracing = self.tracing
        worker.audits = audits_of(self.settings, self.store, self.clock, namespaces)
        return worker

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[StartupRetry]:
        """Open the store and the cache; yield what retries the further steps of a startup. Raises
        StartupError, and UnavailableError if the store stays unavailable."""
        # Waiting does not repair a local store.
        is_local = self.store.capabilities.embedded
        retry = StartupRetry(0 if is_local else self.settings.start_timeout)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.tracing.close)
            await retry.run(self.store.open)
            stack.push_async_callback(self.store.close)
            await retry.warn_of_server(self.store)
            await self.cache.open()
            stack.push_async_callback(self.cache.close)
            yield retry

    def upkeep(self, namespaces: Namespaces, stop: asyncio.Event) -> list[asyncio.Task[None]]:
        """Start the tasks that compare the clocks, and read the directory if other processes change
        it, until *stop* is set."""
        tasks = [asyncio.create_task(keep_comparing(self.guard, stop))]
        if not self.store.capabilities.embedded:
            tasks.append(asyncio.create_task(keep_reading(namespaces, stop)))
        return tasks


def parts_of(
    settings: Settings,
    *,
    store: Store | None = None,
    cache: Cache | None = None,
    clock: Clock | None = None,
    tracing: Tracing | None = None,
) -> Parts:
    """Return the parts of a process with *settings*. Tests give other adapters."""
    clock = clock or settings.kind.clock()
    tracing = tracing or open_tracing(settings)
    store = tracing.watched(store or settings.kind.open(settings, clock))
    guard = guard_of(store, clock)
    leases = None
    if not settings.kind.serves_alone:
        lease_us = settings.lease_time
        leases = Leases(store.leases, clock, worker_id(), lease_time_us=lease_us, guard=guard)
    return Parts(
        settings, clock, tracing, store, cache or open_cache(settings, clock), guard, leases
    )


async def keep_comparing(guard: ClockGuard, stop: asyncio.Event) -> None:
    """Compare the clocks every few seconds until *stop* is set."""
    log = logging.getLogger("counter.clock")
    await every(_COMPARE_EVERY_S, guard.measure, stop, log, "comparing the clocks")


async def keep_reading(namespaces: Namespaces, stop: asyncio.Event) -> None:
    """Read the directory again every second until *stop* is set."""
    log = logging.getLogger("counter.namespaces")
    await every(_READ_EVERY_S, namespaces.refresh, stop, log, "reading the namespaces")
