"""FastAPI's application: the routes of ``/v1``, and what is beside them: health, metrics, pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.routing import Route as PlainRoute

from api.console.pages import PATH, Console
from api.document.openapi import DESCRIPTION, LICENSE, SERVERS, TAGS, document_of
from api.document.problem_page import POLICY, problems_page
from api.http.call import preferred
from api.http.problems import PROBLEM_TYPE
from api.http.response_models import HealthAnswer, ReadyAnswer
from api.http.routing import Route, problem
from api.telemetry.exposition import ApiExposition
from api.telemetry.health import ApiHealth
from counter import __version__
from counter.errors import NotFoundError

#: Pages need no key, except one that shows all namespaces: see Pipeline.
_OPEN: Final[Mapping[str, Any]] = {"openapi_extra": {"security": []}}
_HTML: Final = b"text/html"
_OF_ALL: Final[Mapping[str, Any]] = {"security": [{"key": ["read"]}]}
_METRIC: Final = 'counter_adds_total{outcome="original"} 1.0\n'
#: FastAPI would record and export by itself what this service records.
_TELEMETRY: Final = ("tracing", "metrics", "logs", "auto_configure")


def site_of(
    routes: Sequence[Route],
    health: ApiHealth,
    exposition: ApiExposition,
    lifespan: Callable[[Any], Any] | None,
) -> FastAPI:
    """The application behind the pipeline: it matches ``/v1`` routes and answers all others."""
    # The documentation's page works without a way out to the network, too.
    return FastAPIOffline(
        title="Distributed counter",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=list(TAGS),
        license_info=dict(LICENSE),
        servers=[dict(each) for each in SERVERS],
        redoc_url=None,
        # It would lead to whatever Host says.
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=dict.fromkeys(_TELEMETRY, False),
        routes=[*routes, *_pages(health, exposition)],
    )


class JsonLine(JSONResponse):
    """JSON, and a newline for those who read it in a terminal."""

    def render(self, content: Any) -> bytes:
        return b"%s\n" % super().render(content)


def _pages(health: ApiHealth, exposition: ApiExposition) -> list[PlainRoute]:
    """The routes that are not of ``/v1``."""
    making = Lock()
    page = cache(problems_page)

    @cache
    def made(app: FastAPI) -> bytes:
        return bytes(JsonLine(document_of(app)).body)

    def document(request: Request) -> Response:
        """On a thread and once: it takes as long as hundreds of adds, and needs no key."""
        with making:
            return Response(made(request.app), media_type="application/json")

    async def problems() -> HTMLResponse:
        return HTMLResponse(page(), headers={"content-security-policy": POLICY})

    async def healthz() -> HealthAnswer:
        return HealthAnswer(status="alive")

    async def readyz() -> ReadyAnswer:
        found = await health.check()
        if found.failure is not None:
            raise found.failure
        return ReadyAnswer(
            status="degraded" if found.parts["cache"] else "ready",
            store="ok",
            cache=found.parts["cache"] or "ok",
            rollup="ok" if health.rolls_up else "elsewhere",
            **({"troubles": found.incidents} if found.incidents else {}),
        )

    async def metrics(request: Request) -> Response:
        await health.check()
        _, port = request.scope.get("server") or (None, None)
        text = await exposition.text_at(port)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def page_of(path: str, endpoint: Callable[..., Any], summary: str, **more: Any) -> APIRoute:
        name = endpoint.__name__
        return APIRoute(
            *(path, endpoint),
            response_class=more.pop("response_class", JsonLine),
            **{"summary": summary, "operation_id": name, "tags": ["service"], **_OPEN, **more},
        )

    return [
        page_of("/healthz", healthz, "The process is alive"),
        page_of(
            *("/readyz", readyz, "Requests may be sent here"),
            response_model_exclude_unset=True,
            responses={503: problem(503)},
        ),
        page_of(
            *("/metrics", metrics, "Metrics for Prometheus"),
            response_class=PlainTextResponse,
            openapi_extra=_OF_ALL,
            responses={
                200: {"content": {"text/plain": {"example": _METRIC}}},
                **{status: problem(status) for status in (401, 403, 429, 503)},
            },
        ),
        page_of(*("/problems", problems, "What each problem means"), response_class=HTMLResponse),
        PlainRoute("/", _home),
        PlainRoute("/openapi.json", document),
        PlainRoute(PATH, Console()),
        PlainRoute(f"{PATH}/{{rest:path}}", Console()),
    ]


async def _home(request: Request) -> Response:
    """Lead a browser to the console: terminals make the address of the service a link."""
    if preferred(request.scope["headers"], (PROBLEM_TYPE, _HTML)) != _HTML:
        raise NotFoundError(
            "there is nothing at '/'; /console is a page for people, and /docs describes the API"
        )
    # Relative, so that it works behind a proxy with a path prefix.
    return RedirectResponse(PATH.removeprefix("/"), 303, {"vary": "Accept"})
