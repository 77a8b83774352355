"""Assemble the application from all its parts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from fastapi import FastAPI

from api.http.auth import Authorizer
from api.http.call import AsgiScope, Receive, Send
from api.http.connections import Connections, ReadQueue
from api.http.load_shedding import LoadShedder
from api.http.pipeline import Observer, Pipeline
from api.http.routing import routes_of
from api.routes.add_stream import AddStreams
from api.routes.cancels import CancelRoutes
from api.routes.counters import CounterRoutes
from api.routes.events import EventRoutes
from api.routes.holds import HoldRoutes
from api.routes.insight import InsightRoutes
from api.routes.keys import KeyRoutes
from api.routes.live import LiveRoutes
from api.routes.namespaces import NamespaceRoutes
from api.routes.overview import OverviewRoutes
from api.routes.reports import LongReads, ReportRoutes
from api.routes.site import site_of
from api.telemetry.activity import STEP_US, Activity
from api.telemetry.exposition import ApiExposition
from api.telemetry.health import ApiHealth
from api.telemetry.metrics import Metrics, RequestMetrics
from api.telemetry.request_log import RequestLog
from counter.background import every
from counter.config.namespace_rules import check_settings, fitted
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard
from counter.core.service import CounterService
from counter.errors import PreconditionFailedError
from counter.limits import SECOND
from counter.ports import Cache, Clock, Store
from counter.quantities import format_duration
from counter.security.audit_log import AdminLog
from counter.security.host_rule import HostRule
from counter.security.key_admin import KeyAdmin
from counter.security.keys import KeyRing
from counter.telemetry.store_metrics import ClockMetrics, StoreMetrics
from counter.telemetry.tracing import Tracing
from counter.types import Dataset
from rollup.metrics import RollupMetrics
from rollup.parts import Parts, parts_of
from rollup.worker import RollupWorker

#: Least time for background work to end, even if draining requests took all of the drain time.
_END_S_MIN: Final = 1.0
_log = logging.getLogger("counter.api")


@dataclass(slots=True)
class Application:
    """An ASGI application and the parts that a process or a test uses."""

    pipeline: Pipeline
    #: FastAPI's application, behind the pipeline.
    site: FastAPI
    service: CounterService
    worker: RollupWorker
    store: Store
    cache: Cache
    settings: Settings
    clock: Clock
    guard: ClockGuard
    health: ApiHealth
    keys: KeyRing
    requests: RequestMetrics
    exposition: ApiExposition
    activity: Activity
    connections: Connections
    parts: Parts
    live: LiveRoutes
    streams: AddStreams
    #: Set when the rollup is to end; and when the drain began.
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    drains_since_s: float | None = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        await self.pipeline(scope, receive, send)

    @asynccontextmanager
    async def running(self, *, rollup: bool) -> AsyncIterator[None]:
        """Open the store and the cache, create what is missing, run the background tasks, and roll
        up if asked. Raises StartupError, and UnavailableError if the store stays unavailable."""
        self.health.rolls_up = rollup
        async with self.parts.opened() as retry:
            await retry.run(self._prepare)
            stop = asyncio.Event()
            tasks = [
                asyncio.create_task(self.keys.run(stop)),
                asyncio.create_task(
                    every(STEP_US / SECOND, self.activity.sample, stop, _log, "sampling the adds")
                ),
                *self.parts.upkeep(self.service.namespaces, stop),
            ]
            if rollup:
                tasks.append(
                    asyncio.create_task(self.worker.run(self.ending, self.settings.drain_timeout))
                )
            try:
                yield
            finally:
                stop.set()
                self.ending.set()
                await self._end(tasks)

    def announce_shutdown(self) -> None:
        """Make /readyz report that this process is shutting down."""
        self.health.is_leaving = True

    def drain(self) -> None:
        """End the rollup and all streams while admitted requests are answered."""
        if self.drains_since_s is None:
            self.drains_since_s = time.monotonic()
            self.ending.set()
            self.live.close()
            self.streams.close()

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for *tasks* to end during the rest of the drain time, then cancel them."""
        if not tasks:
            return
        self.drain()
        gone_s = time.monotonic() - (self.drains_since_s or 0)
        left_s = max(_END_S_MIN, self.settings.drain_timeout / SECOND - gone_s)
        _, late = await asyncio.wait(tasks, timeout=left_s)
        for task in late:
            _log.warning("background work did not end in time and is cancelled")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self) -> None:
        """Create what requests need. This is idempotent, and other processes may do it at the same
        time."""
        await self.guard.measure()
        await self.keys.refresh()
        await self.service.namespaces.refresh()
        await self._create_default_namespace()
        datasets = await self.store.control.datasets()
        # If the clock is wrong, the worker creates them once it is right.
        if self.guard.trouble is None:
            await self._create_slices(datasets)
        self._warn_of_ignored_settings(datasets)

    async def _create_slices(self, datasets: Sequence[Dataset]) -> None:
        """Create the slices that adds need.

        If a slice costs a table, the worker creates the others: after a long stop thousands may be
        missing."""
        maintenance = self.worker.maintenance
        if self.store.capabilities.embedded:
            await maintenance.run_once()
            return
        now_us = self.clock.now_us()
        for dataset in datasets:
            slices = await self.store.control.slices(dataset)
            if not any(each.start_us <= now_us < each.end_us for each in slices):
                await maintenance.make_slices(dataset, past_max=0)

    async def _create_default_namespace(self) -> None:
        """Create it at the first start on a data directory, when no slice exists; with Cassandra,
        at any start that does not find it."""
        dataset = self.settings.dataset()
        first = True
        for each in await self.store.control.datasets():
            if each.name == dataset.name:
                first = not await self.store.control.slices(each)
        namespaces = self.service.namespaces
        missing = all(each.name != "default" for each in namespaces.all())
        if missing and (first or not self.settings.kind.serves_alone):
            dataset = await namespaces.dataset(dataset.name)
            settings = fitted(self.settings.default_namespace(), dataset)
            check_settings(settings, dataset)
            try:
                await namespaces.create("default", settings)
            except PreconditionFailedError:
                await namespaces.refresh()

    def _warn_of_ignored_settings(self, datasets: Sequence[Dataset]) -> None:
        asked = self.settings.dataset()
        stored = next((each for each in datasets if each.name == asked.name), asked)
        for name in ("retention", "slice", "write_timeout"):
            old, new = getattr(stored, f"{name}_us"), getattr(asked, f"{name}_us")
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
    tracing: Tracing | None = None,
) -> Application:
    """Wire everything. Tests wire the same parts with other adapters.

    The lifespan opens the store and the cache; with ``rollup=False`` the worker does not run.
    """
    parts = parts_of(settings, store=store, cache=cache, clock=clock, tracing=tracing)
    clock, store, cache, guard = parts.clock, parts.store, parts.cache, parts.guard
    service = CounterService(store, cache, clock, guard)
    service.load.wait_max_us = settings.write_wait_max
    worker = parts.worker(service.namespaces)
    keys = KeyRing(store.keys, clock, guard)
    health = ApiHealth(store, cache, worker, guard, clock, keys)

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with application.running(rollup=rollup):
            yield

    requests = RequestMetrics()
    authorizer = _authorizer(keys, settings, clock)
    shedder = LoadShedder(service.load)
    connections = Connections(lambda: clock.boottime_us() / SECOND)
    exposition = ApiExposition(
        (
            Metrics(service, health, authorizer, shedder.bodies, connections.unfinished),
            requests,
            StoreMetrics(store, cache),
            ClockMetrics(guard),
            connections,
            *([RollupMetrics(worker, clock, parts.leases)] if rollup and settings.rollup else []),
        )
    )
    streams, live = _streams(settings, service, authorizer, connections.queue)
    long_reads = LongReads()
    handlers = _handlers(settings, service, store, clock, guard, authorizer, streams, long_reads)
    insight = InsightRoutes(service, store, clock, health, exposition)
    activity = _activity(service, exposition, clock)
    overview = OverviewRoutes(service, store, insight, activity, long_reads)
    routes = routes_of(*handlers, live, insight, overview)
    site = site_of(routes, health, exposition, lifespan)
    pipeline = Pipeline(
        routes,
        service.namespaces,
        site,
        authorizer,
        shedder,
        requests,
        body_bytes_max=settings.body_bytes_max,
        observers=_observers(settings, parts.tracing),
    )
    application = Application(
        *(pipeline, site, service, worker, store, cache, settings, clock, guard, health),
        keys=keys,
        requests=requests,
        exposition=exposition,
        activity=activity,
        connections=connections,
        parts=parts,
        live=live,
        streams=streams,
    )
    return application


def _activity(service: CounterService, exposition: ApiExposition, clock: Clock) -> Activity:
    family, tally = "counter_namespace_adds", service.tally.namespaces
    return Activity(lambda: exposition.totals(family, "namespace", tally.totals()), clock)


def _authorizer(keys: KeyRing, settings: Settings, clock: Clock) -> Authorizer:
    return Authorizer(
        keys,
        settings.rates(),
        lambda: clock.boottime_us() / SECOND,
        hosts=HostRule(settings.hosts, any_host=settings.insecure),
        origins=settings.cors_origins,
    )


def _streams(
    settings: Settings, service: CounterService, authorizer: Authorizer, queue: ReadQueue
) -> tuple[AddStreams, LiveRoutes]:
    # Behind a proxy all streams come from one address.
    shares = not settings.tls_in_front
    adds = AddStreams(
        service, authorizer, settings.batch_items_max, queue, shares_by_address=shares
    )
    return adds, LiveRoutes(service, authorizer, shares_by_address=shares)


def _observers(settings: Settings, tracing: Tracing) -> list[Observer]:
    observers: list[Observer] = [RequestLog(settings.log_requests)]
    if tracing.tracer is not None:
        from api.telemetry.request_traces import RequestSpans

        observers.append(RequestSpans(tracing.tracer))
    return observers


def _handlers(
    settings: Settings,
    service: CounterService,
    store: Store,
    clock: Clock,
    guard: ClockGuard,
    authorizer: Authorizer,
    streams: AddStreams,
    long_reads: LongReads,
) -> tuple[object, ...]:
    """The handlers that need nothing but these, the hottest first: routes are tried in order."""
    admin_log = AdminLog(settings.audit_log, clock)
    return (
        CounterRoutes(service, store, clock, settings.batch_items_max, streams, streams.queue),
        EventRoutes(service, settings.batch_items_max, streams.queue),
        CancelRoutes(service, settings.batch_items_max, streams.queue),
        HoldRoutes(service),
        ReportRoutes(service, store, clock, admin_log, authorizer, long_reads),
        NamespaceRoutes(service, settings, admin_log),
        KeyRoutes(KeyAdmin(store.keys, clock, guard), authorizer, clock, admin_log),
    )
