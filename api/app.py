"""The application, assembled in one place: from here a reader finds every part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from api.call import Receive, Scope, Send
from api.counters import CounterRoutes
from api.front import Front, Route
from api.health import Health
from api.metrics import Metrics
from api.namespaces import NamespaceRoutes
from api.reports import ReportRoutes
from api.site import Site
from counter.clock import SystemClock
from counter.config import Settings
from counter.durations import format_duration
from counter.errors import PreconditionFailedError
from counter.limits import SECOND
from counter.namespaces import SETTLED_S
from counter.patience import Patience
from counter.ports import Cache, Clock, Store
from counter.service import CounterService
from counter.skew import ClockGuard
from counter.storage import open_cache, open_store
from counter.types import Dataset
from rollup.leases import Leases, worker_id
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker

_log = logging.getLogger("counter.api")


@dataclass(slots=True)
class Application:
    """An ASGI application and the parts that a process, or a test, works with."""

    front: Front
    service: CounterService
    worker: RollupWorker
    store: Store
    cache: Cache
    settings: Settings
    clock: Clock
    #: None where the store's clock is this process's own.
    guard: ClockGuard | None
    health: Health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    @asynccontextmanager
    async def running(self, *, rollup: bool) -> AsyncIterator[None]:
        """Open store and cache, have slices and the default namespace there, watch what other
        processes and the clock do, and roll up if asked. Raises StartupError, and UnavailableError
        where the store stays in trouble."""
        self.health.rolls_up = rollup
        # What ails a store of this process's own does not pass by waiting.
        patience = Patience(0 if self.store.transactional else self.settings.start_timeout)
        async with AsyncExitStack() as stack:
            await patience.through(self.store.open)
            stack.push_async_callback(self.store.close)
            await self.cache.open()
            stack.push_async_callback(self.cache.close)
            await patience.through(self._prepare)
            stop = asyncio.Event()
            tasks = []
            if self.guard is not None:
                tasks.append(asyncio.create_task(self.guard.run(stop)))
            if not self.store.transactional:
                tasks.append(asyncio.create_task(self.service.namespaces.run(stop)))
            if rollup:
                tasks.append(asyncio.create_task(self.worker.run(stop)))
            try:
                yield
            finally:
                stop.set()
                await self._end(tasks)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for *tasks*, which were asked to stop, for as long as a drain may take."""
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=self.settings.drain_timeout / SECOND)
        for task in late:
            _log.warning("background work did not end in time, and is left as it is")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self) -> None:
        """Have there what requests need. Other processes may do the same at the same time, and it
        may be done again."""
        if self.guard is not None:
            await self.guard.measure()
        await self.service.namespaces.refresh()
        await self._have_default_namespace()
        now_us = self.clock.now_us()
        datasets = await self.store.datasets()
        for dataset in datasets:
            slices = await self.store.slices(dataset)
            if self.store.transactional or not any(
                each.start_us <= now_us < each.end_us for each in slices
            ):
                # Else a worker looks after them, one for all.
                await Maintenance(self.store, self.clock, self.service.namespaces).run_once()
                break
        self._tell_what_stands(datasets)

    async def _have_default_namespace(self) -> None:
        """Make it at the first start on a data directory, which is the one that finds no slice
        yet; over Cassandra, at any start that does not find it."""
        dataset = self.settings.dataset()
        first = True
        for each in await self.store.datasets():
            if each.name == dataset.name:
                first = not await self.store.slices(each)
        namespaces = self.service.namespaces
        missing = all(each.name != "default" for each in namespaces.all())
        if missing and (first or self.settings.store == "cassandra"):
            settings = await namespaces.fitted(self.settings.default_namespace())
            try:
                await namespaces.create("default", settings)
            except PreconditionFailedError:
                await namespaces.refresh()

    def _tell_what_stands(self, datasets: Sequence[Dataset]) -> None:
        asked = self.settings.dataset()
        standing = next((each for each in datasets if each.name == asked.name), asked)
        for name in ("retention", "slice", "write_timeout"):
            old, new = getattr(standing, f"{name}_us"), getattr(asked, f"{name}_us")
            if old != new and name in self.settings.model_fields_set:
                _log.warning(
                    "%s stays %s as the first start set it, and does not become %s",
                    *(name, format_duration(old), format_duration(new)),
                )


def create_app(
    settings: Settings,
    *,
    store: Store | None = None,
    cache: Cache | None = None,
    clock: Clock | None = None,
    rollup: bool = True,
) -> Application:
    """Wire everything. A test wires the same thing with other adapters.

    The lifespan opens store and cache; with ``rollup=False`` the worker is there and stands still.
    """
    clock = clock or SystemClock()
    store = store or open_store(settings, clock)
    cache = cache or open_cache(settings, clock)
    guard = None if store.transactional else ClockGuard(store, clock)
    service = CounterService(store, cache, clock, guard)
    leases = None
    if settings.store == "cassandra":
        # Other processes roll up too.
        leases = Leases(store, clock, worker_id(), lease_time_us=settings.lease_time)
    worker = RollupWorker(
        store,
        cache,
        clock,
        service.namespaces,
        concurrency=settings.rollup_concurrency,
        leases=leases,
        guard=guard,
    )
    health = Health(store, cache, worker, guard)
    routes = _routes(settings, service, store, clock)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with application.running(rollup=rollup):
            yield

    site = Site(routes, health, Metrics(service, health, guard), lifespan)
    front = Front(routes, service.namespaces, site, body_bytes_max=settings.body_bytes_max)
    application = Application(front, service, worker, store, cache, settings, clock, guard, health)
    return application


def _routes(settings: Settings, service: CounterService, store: Store, clock: Clock) -> list[Route]:
    counters = CounterRoutes(service, batch_items_max=settings.batch_items_max)
    reports = ReportRoutes(service, store, clock)
    # Where other processes take adds too, each needs a moment to learn of a deletion.
    settle_s = SETTLED_S if settings.store == "cassandra" else 0.0
    namespaces = NamespaceRoutes(service, settings.default_namespace(), settle_s=settle_s)
    one = "/v1/namespaces/{ns}/counters/{c}"
    return [
        Route("POST", f"{one}/add", counters.add, writes=True),
        Route("POST", f"{one}/add-and-get", counters.add_and_get, writes=True),
        Route("POST", f"{one}/clear", counters.clear, writes=True),
        Route("GET", one, counters.get),
        Route("GET", f"{one}/events", reports.events),
        Route("GET", f"{one}/history", reports.history),
        Route("POST", f"{one}/recount", reports.recount, writes=True),
        Route("GET", "/v1/namespaces/{ns}/counters", reports.counters),
        Route("POST", "/v1/namespaces/{ns}/batch/add", counters.batch_add, writes=True),
        Route("POST", "/v1/namespaces/{ns}/batch/get", counters.batch_get),
        Route("POST", "/v1/namespaces/{ns}/atomic/add", counters.atomic_add, writes=True),
        Route("GET", "/v1/namespaces", namespaces.list, latest=True),
        Route("GET", "/v1/namespaces/{ns}", namespaces.get, latest=True),
        Route("PUT", "/v1/namespaces/{ns}", namespaces.put, latest=True),
        Route("DELETE", "/v1/namespaces/{ns}", namespaces.delete, latest=True),
        Route("POST", "/v1/tokens", namespaces.tokens),
    ]
