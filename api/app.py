"""The application, assembled in one place: from here a reader finds every part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from api.answers import problem_reply
from api.call import Receive, Scope, Send
from api.counters import CounterRoutes
from api.front import Front, Route
from api.metrics import Metrics
from api.namespaces import NamespaceRoutes
from api.openapi import DOCS, operation, responses
from api.problems import problems_page
from api.reports import ReportRoutes
from counter.clock import SystemClock
from counter.config import Settings
from counter.durations import format_duration
from counter.errors import (
    CounterError,
    MethodNotAllowedError,
    NotFoundError,
    PreconditionFailedError,
    StartupError,
    UnavailableError,
)
from counter.namespaces import SETTLED_S, check_settings
from counter.ports import Cache, Clock, Store
from counter.service import CounterService
from counter.storage.memory import MemoryCache
from counter.storage.sqlite import SqliteStore
from counter.types import Dataset
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker

_log = logging.getLogger("counter.api")
_DESCRIPTION = (
    "Counting that survives retries: every acknowledged add counts exactly once, an unacknowledged"
    " one at most once, and a definite answer about a token stays true for ever."
)


@dataclass(slots=True)
class Application:
    """An ASGI application and the parts that a process, or a test, works with."""

    front: Front
    service: CounterService
    worker: RollupWorker
    store: Store
    settings: Settings
    clock: Clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)

    @asynccontextmanager
    async def running(self, *, rollup: bool) -> AsyncIterator[None]:
        """Open the store, have slices and the default namespace there, and roll up if asked."""
        try:
            # Before anything is made: what a first start fixes is fixed for ever.
            check_settings(self.settings.default_namespace(), self.settings.dataset())
        except CounterError as error:
            raise StartupError(error.detail) from error
        await self.store.open()
        try:
            await self.service.namespaces.refresh()
            await self._have_default_namespace()
            await Maintenance(self.store, self.clock, self.service.namespaces).run_once()
            stop = asyncio.Event()
            work = asyncio.create_task(self.worker.run(stop)) if rollup else None
            try:
                yield
            finally:
                stop.set()
                if work is not None:
                    await work
        finally:
            await self.store.close()

    async def _have_default_namespace(self) -> None:
        """Make it at the first start, which is the one that finds no slice yet."""
        dataset = self.settings.dataset()
        for each in await self.store.datasets():
            if each.name != dataset.name:
                continue
            self._tell_what_stands(each, dataset)
            if await self.store.slices(each):
                return
        namespaces = self.service.namespaces
        try:
            await namespaces.create("default", self.settings.default_namespace())
        except PreconditionFailedError:
            await namespaces.refresh()

    def _tell_what_stands(self, standing: Dataset, asked: Dataset) -> None:
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

    The lifespan opens the store; with ``rollup=False`` the worker is there and is not started.
    """
    clock = clock or SystemClock()
    store = store or SqliteStore(settings.data, clock, [settings.dataset()])
    cache = cache or MemoryCache(clock, entries_max=settings.cache_entries_max)
    service = CounterService(store, cache, clock)
    worker = RollupWorker(store, cache, clock, service.namespaces)
    routes = _routes(settings, service, store, clock)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with application.running(rollup=rollup):
            yield

    site = _site(routes, store, worker, Metrics(service), lifespan)
    front = Front(routes, service.namespaces, site, body_bytes_max=settings.body_bytes_max)
    application = Application(front, service, worker, store, settings, clock)
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


def _site(
    routes: list[Route],
    store: Store,
    worker: RollupWorker,
    metrics: Metrics,
    lifespan: Callable[[FastAPI], object],
) -> FastAPI:
    """What is not hot: documentation, health, metrics. The routes of ``/v1`` are registered for the
    OpenAPI document only."""
    site = FastAPI(
        title="Distributed counter",
        version="0.1.0",
        description=_DESCRIPTION,
        lifespan=lifespan,  # type: ignore[arg-type]
    )
    for route in routes:
        doc = DOCS[route.method, route.path]
        site.add_api_route(
            route.path,
            _documented,
            methods=[route.method],
            summary=doc.summary,
            status_code=doc.status,
            response_class=Response,
            responses=responses(doc),
            openapi_extra=operation(doc, route.path),
            name=f"{route.method} {route.path}",
        )

    @site.get("/healthz", summary="The process is alive")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @site.get("/readyz", summary="The store can be written", response_model=None)
    async def readyz() -> Response:
        try:
            await store.ping()
        except CounterError as error:
            return _response(error)
        if worker.trouble is not None:
            return _response(UnavailableError(f"the rollup does not work: {worker.trouble}"))
        return JSONResponse({"status": "ready", "store": "ok", "rollup": "ok"})

    @site.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def exposition() -> Response:
        registry = CollectorRegistry()
        registry.register(metrics)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @site.get("/problems", summary="What each problem means", response_class=HTMLResponse)
    async def problems() -> HTMLResponse:
        return HTMLResponse(problems_page())

    @site.exception_handler(404)
    async def not_found(request: Request, _error: Exception) -> Response:
        return _response(NotFoundError(f"there is nothing at {request.url.path[:200]!r}"))

    @site.exception_handler(405)
    async def not_allowed(request: Request, _error: Exception) -> Response:
        detail = f"the method {request.method[:20]} is not supported here; use GET"
        return _response(MethodNotAllowedError(detail, allow=["GET", "HEAD"]))

    return site


def _response(error: CounterError) -> Response:
    reply = problem_reply(error)
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    media = reply.content_type.decode()
    return Response(reply.body, reply.status, headers, media_type=media)


async def _documented() -> Response:
    """Stands for a route of ``/v1`` in the OpenAPI document; the front answers it before this."""
    return _response(NotFoundError("the routes of /v1 are answered elsewhere"))
