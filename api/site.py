"""What is not hot: documentation, health, metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from api.answers import problem_reply
from api.front import Route
from api.health import Health
from api.metrics import Metrics
from api.openapi import DOCS, operation, problem, responses
from api.problems import problems_page
from counter.errors import CounterError, MethodNotAllowedError, NotFoundError

_DESCRIPTION: Final = (
    "Counting that survives retries: every acknowledged add counts exactly once, an unacknowledged"
    " one at most once, and a definite answer about a token stays true for ever."
)


def site_of(
    routes: list[Route],
    health: Health,
    metrics: Metrics,
    lifespan: Callable[[FastAPI], object],
) -> FastAPI:
    """The application behind the front. The routes of ``/v1`` are registered for the OpenAPI
    document only."""
    # The documentation's page works where there is no way out to the network, too.
    site = FastAPIOffline(
        title="Distributed counter",
        version="0.1.0",
        description=_DESCRIPTION,
        redoc_url=None,
        lifespan=lifespan,
    )
    _describe(site, routes)

    @site.get("/healthz", summary="The process is alive")
    async def healthz() -> dict[str, str]:
        return {"status": "alive"}

    @site.get(
        "/readyz",
        summary="Requests may be sent here",
        response_model=None,
        responses={503: problem()},
    )
    async def readyz() -> Response:
        found = await health.look()
        if found.failure is not None:
            return _response(found.failure)
        return JSONResponse(
            {
                "status": "degraded" if found.cache else "ready",
                "store": "ok",
                "cache": found.cache or "ok",
                "rollup": "ok" if health.rolls_up else "elsewhere",
            }
        )

    @site.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
    async def exposition() -> Response:
        await health.look()
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


def _describe(site: FastAPI, routes: list[Route]) -> None:
    """Have the routes of ``/v1`` in the OpenAPI document."""
    for route in routes:
        doc = DOCS[route.method, route.path]
        site.add_api_route(
            route.path,
            _documented,
            methods=[route.method],
            summary=doc.summary,
            status_code=doc.status,
            response_class=Response,
            responses=responses(doc, route.path),
            openapi_extra=operation(doc, route.path),
            name=f"{route.method} {route.path}",
        )


def _response(error: CounterError) -> Response:
    reply = problem_reply(error)
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    media = reply.content_type.decode()
    return Response(reply.body, reply.status, headers, media_type=media)


async def _documented() -> Response:
    """Stands for a route of ``/v1`` in the OpenAPI document; the front answers it before this."""
    return _response(NotFoundError("the routes of /v1 are answered elsewhere"))
