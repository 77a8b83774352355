"""The documentation: an application of a framework's, loaded when somebody first wants to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline

from api.document.openapi import DOCS, operation, problem, responses
from api.document.problem_page import POLICY, problems_page
from api.http.answers import problem_reply
from api.http.call import Route
from counter.errors import CounterError, MethodNotAllowedError, NotFoundError, invariant

_DESCRIPTION: Final = (
    "Counting that survives retries: every acknowledged add counts exactly once, an unacknowledged"
    " one at most once, and a definite answer about a token stays true for ever."
)

_READY: Final[Mapping[str, str]] = {
    "status": "ready",
    "store": "ok",
    "cache": "ok",
    "rollup": "ok",
}
_METRIC: Final = 'counter_adds_total{outcome="original"} 1.0\n'


def documents_of(routes: Sequence[Route], lifespan: Callable[[Any], Any]) -> FastAPI:
    """The document of all routes and its page, what problems mean, and a problem for every path
    that leads nowhere. Routes that are answered before this are registered to be described."""
    # The documentation's page works where there is no way out to the network, too.
    app = FastAPIOffline(
        title="Distributed counter",
        version="0.1.0",
        description=_DESCRIPTION,
        redoc_url=None,
        # It would lead to whatever Host says.
        redirect_slashes=False,
        lifespan=lifespan,
    )
    for route in routes:
        doc = DOCS[route.method, route.path]
        app.add_api_route(
            route.path,
            _answered_elsewhere,
            methods=[route.method],
            summary=doc.summary,
            status_code=doc.status,
            response_class=Response,
            responses=responses(doc, route.path),
            openapi_extra=operation(doc, route.path),
            name=f"{route.method} {route.path}",
        )
    _describe_service(app)
    # Made once: it takes a while, and who asks need not have a key.
    page = problems_page()

    @app.get("/problems", summary="What each problem means", response_class=HTMLResponse)
    async def problems() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    _keep_document(app)

    @app.exception_handler(404)
    async def not_found(request: Request, _error: Exception) -> Response:
        path = request.url.path
        # Where a start says that it serves, and a terminal makes a link of that.
        hint = "; /console is a page for people, and /docs tells of the API" if path == "/" else ""
        return _response(NotFoundError(f"there is nothing at {path[:200]!r}{hint}"))

    @app.exception_handler(405)
    async def not_allowed(request: Request, _error: Exception) -> Response:
        detail = f"the method {request.method[:20]} is not supported here; use GET"
        return _response(MethodNotAllowedError(detail, allow=["GET", "HEAD"]))

    return app


def _keep_document(app: FastAPI) -> None:
    """Have the document of all routes that *app* has by now made once, and not for each reader."""
    path = app.openapi_url
    invariant(path is not None, "the document has a path")
    document = JSONResponse(app.openapi()).body
    routes = app.router.routes
    routes[:] = [each for each in routes if getattr(each, "path", None) != path]

    @app.get(str(path), include_in_schema=False)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")


def _describe_service(app: FastAPI) -> None:
    """Have what :class:`api.routes.site.Site` answers itself in the document."""
    app.add_api_route(
        "/healthz",
        _answered_elsewhere,
        summary="The process is alive",
        response_model=dict[str, str],
        responses={200: _example({"status": "alive"})},
    )
    app.add_api_route(
        "/readyz",
        _answered_elsewhere,
        summary="Requests may be sent here",
        response_model=None,
        responses={200: _example(_READY), 503: problem()},
    )
    app.add_api_route(
        "/metrics",
        _answered_elsewhere,
        summary="Metrics for Prometheus",
        response_class=PlainTextResponse,
        responses={200: _example(_METRIC, "text/plain")},
    )


def _example(example: Any, media: str = "application/json") -> dict[str, Any]:
    """An answer that looks so."""
    return {"content": {media: {"example": example}}}


def _response(error: CounterError) -> Response:
    reply = problem_reply(error)
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    media = reply.content_type.decode()
    return Response(reply.body, reply.status, headers, media_type=media)


async def _answered_elsewhere() -> Response:
    """Stands for a route that is answered before a request comes here."""
    return _response(NotFoundError("this route is answered elsewhere"))
