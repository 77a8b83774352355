"""The routes of ``/v1``: FastAPI documents them, and the pipeline finds and answers them.

A handler declares its namespace, query and body as in FastAPI, and FastAPI makes the document from
that. :class:`Route` reads them, because errors must come in one order (key, namespace, parameters,
body) and name the value and the bound, and because FastAPI's own way costs more than the count.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from inspect import signature
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

from fastapi import Depends, Header, Path, Security
from fastapi import Response as PlainResponse
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema
from starlette.routing import Route as PlainRoute

from api.http.call import NO_CONTENT, Call
from api.http.responses import Response
from counter import limits
from counter.api_keys import Scope
from counter.core.namespaces import unknown
from counter.core.service import CounterService
from counter.types import Namespace

_BEARER: Final = HTTPBearer(
    scheme_name="key",
    description="An API key. A service without keys answers every request.",
    auto_error=False,
)
#: Statuses of problems that every route may have, and those of a body.
_ALWAYS: Final = frozenset({400, 401, 403, 429, 431, 500, 503})
_WITH_BODY: Final = frozenset({408, 413, 415})
NAMESPACE: Final = "/v1/namespaces/{namespace}"
HOLD: Final = f"{NAMESPACE}/holds/{{hold}}"
COUNTER: Final = f"{NAMESPACE}/counters/{{counter}}"
REPLAYED: Final = "Idempotency-Replayed"
TTL: Final = "Idempotency-TTL"
ETAG: Final = "ETag"

Handler = Callable[..., Awaitable[Response | BaseModel]]
_Handler = TypeVar("_Handler", bound=Handler)


class EventStream(PlainResponse):
    """The media type of ``live``."""

    media_type = "text/event-stream"


class OpenMetrics(PlainResponse):
    """The media type of a namespace's ``metrics``."""

    media_type = "application/openmetrics-text"


def call_of() -> Call:
    """Stand for the call, which the pipeline passes to handlers, in the document."""
    raise NotImplementedError


#: The first parameter of every handler.
CallOf = Annotated[Call, Depends(call_of)]


def namespace_of(call: CallOf) -> Namespace:
    """Return the namespace of the path. Raises NamespaceUnknownError."""
    if call.known_namespace is None:
        raise unknown(call.namespace)
    return call.known_namespace


#: The parameter of a handler whose namespace must exist.
InNamespace = Annotated[Namespace, Depends(namespace_of)]


class Route(PlainRoute):
    """One route: ``path`` with ``{namespace}`` and ``{counter}``.

    The *handler* takes the call and, by these names, a ``namespace``, a ``query`` and a ``body``.
    Its name is the operation's id, and the first line of its docstring is the summary.

    A route that *writes* events needs a fresh copy of the namespace's settings; one that shows or
    changes the settings needs the *latest*. Each request counts as *adds* adds in rate limits; a
    batch's handler counts its adds itself. *shows* names what only a namespace with events has.
    *by_key* says that what it writes has arbitrary keys without the header, such as CloudEvents.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        scope: Scope,
        *,
        writes: bool = False,
        latest: bool = False,
        adds: int = 0,
        shows: str | None = None,
        **described: Any,
    ) -> None:
        super().__init__(path, handler, name=f"{method} {path}")
        # An empty name is an invalid name, not another path.
        self.path_regex = re.compile(self.path_regex.pattern.replace("[^/]+", "[^/]*"))
        # Starlette adds HEAD to GET; here the pipeline answers HEAD.
        self.methods = {method}
        hints = _hints_of(getattr(handler, "__func__", handler))
        self.method = method
        self.handler = handler
        self.scope = scope
        self.writes = writes
        self.latest = latest
        self.adds = adds
        self.shows = shows
        self.by_key: bool = described.pop("by_key", False)
        #: Whether its requests have tokens, so that each response says how long they are honoured.
        self.takes_tokens = TTL in described.get("headers", ())
        self.takes_namespace = "namespace" in hints
        self.query: Any = _model(hints.get("query"))
        self.body: Any = _model(hints.get("body"))
        self.body_may_be_empty = self.body not in (None, hints.get("body"))
        self._described = {"model": _model(hints.get("return")), **described}

    async def read(self, call: Call) -> Mapping[str, Any]:
        """Return the handler's arguments from *call*: the namespace, the query and the body."""
        arguments: dict[str, Any] = {}
        if self.takes_namespace:
            arguments["namespace"] = namespace = namespace_of(call)
            if self.shows is not None:
                CounterService.require_events(namespace, self.shows)
        if self.query is not None:
            arguments["query"] = call.query(self.query)
        if self.body is not None:
            arguments["body"] = await call.json(self.body, may_be_empty=self.body_may_be_empty)
        return arguments

    def described(self) -> APIRoute:
        """Return the route as FastAPI describes it.

        Only the document needs it: analyzing the parameters of all routes would take most of a
        start.
        """
        return self._as_described(**self._described)

    def _as_described(
        self,
        *,
        model: type[BaseModel] | None,
        tag: str = "",
        status: int = 200,
        problems: Sequence[int] = (),
        headers: Sequence[str] = (),
        declares: Sequence[Callable[..., None]] = (),
        responses: Mapping[int, Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> APIRoute:
        """*problems* are the statuses of its problems besides those of every route, *headers* those
        of its response, *declares* functions with the parameters that the handler reads itself,
        *responses* further forms of its response."""
        declares = list(declares)
        if "{counter}" in self.path:
            declares.insert(0, of_counter)
        elif "{hold}" in self.path:
            declares.insert(0, of_hold)
        elif "{namespace}" in self.path:
            declares.insert(0, of_namespace)
        elif "{key}" in self.path:
            declares.insert(0, of_key)
        statuses = _ALWAYS.union(problems, {404} if "{" in self.path else ())
        if "{namespace}" in self.path:
            # A BEST_EFFORT namespace has no events.
            statuses |= {501}
        if self.body is not None or any("body" in signature(each).parameters for each in declares):
            statuses |= _WITH_BODY
        own = {"headers": headers_of(*headers)}
        forms: dict[int, Mapping[str, Any]] = {status: {}, **(responses or {})}
        first, *words = self.handler.__name__.split("_")
        more.setdefault("response_class", PlainResponse if status == NO_CONTENT else JSONResponse)
        made = APIRoute(
            *(self.path, self.handler),
            methods=[self.method],
            operation_id=first + "".join(map(str.title, words)),
            summary=(self.handler.__doc__ or "").partition("\n")[0].rstrip("."),
            tags=[tag],
            status_code=status,
            response_model=model,
            response_description="Done",
            responses={
                **{each: {**own, **form} for each, form in forms.items()},
                **{each: problem(each) for each in sorted(statuses)},
            },
            dependencies=[
                Security(_BEARER, scopes=[self.scope.name.lower()]),
                *map(Depends, declares),
            ],
            **more,
        )
        # FastAPI takes the whole docstring, whose first line is the summary already.
        made.description = ""
        return made


def route(method: str, path: str, scope: Scope, **described: Any) -> Callable[[_Handler], _Handler]:
    """Mark a method as the handler of a :class:`Route`."""

    def mark(handler: _Handler) -> _Handler:
        handler.__dict__["route"] = method, path, scope, described
        return handler

    return mark


def routes_of(*owners: object) -> list[Route]:
    """Return the routes of the handlers of *owners*, in the order of their classes."""
    marked = [
        (getattr(owner, name), each.route)
        for owner in owners
        for name, each in vars(type(owner)).items()
        if hasattr(each, "route")
    ]
    return [
        Route(method, path, handler, scope, **described)
        for handler, (method, path, scope, described) in marked
    ]


@cache
def _hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a method, which are strings: to evaluate them takes half of the
    time in which an application is made."""
    return get_type_hints(function, include_extras=True)


def _model(hint: Any) -> type[BaseModel] | None:
    """Return the model in a parameter's annotation, None if it has none."""
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def headers_of(*names: str) -> dict[str, Any]:
    """Return references to the headers of a response: the request id, and those of *names*."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *names)}


def problem(status: int) -> dict[str, Any]:
    """Return a reference to the response for the problems of *status*."""
    return {"$ref": f"#/components/responses/{problem_name(status)}"}


def problem_name(status: int) -> str:
    """Return the name of that response, such as ``NotFound``."""
    return "".join(HTTPStatus(status).phrase.title().split())


_Text = str | SkipJsonSchema[None]
_NamespaceName = Annotated[
    str, Path(pattern="^[a-z][a-z0-9_-]{0,62}$", description="The namespace.")
]
_CounterName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=limits.COUNTER_NAME_CHARS_MAX,
        description="The counter, percent-encoded (`/` as `%2F`).",
    ),
]


def of_namespace(namespace: _NamespaceName) -> None:
    """A path with a namespace."""


def of_key(
    key: Annotated[
        str,
        Path(pattern="^[a-z2-7]{12}$", description="The id of the key, never the key itself."),
    ],
) -> None:
    """A path with a key."""


def of_hold(
    namespace: _NamespaceName,
    hold: Annotated[str, Path(description="The id of the hold, as it was answered.")],
) -> None:
    """A path with a namespace and a hold."""


def of_counter(namespace: _NamespaceName, counter: _CounterName) -> None:
    """A path with a namespace and a counter."""


def keyed(
    idempotency_key: Annotated[
        _Text,
        Header(
            alias="Idempotency-Key",
            min_length=1,
            max_length=limits.IDEMPOTENCY_KEY_CHARS_MAX,
            description="Instead of the body's token: a UUIDv7, or any text of 1 to 255"
            " characters.",
        ),
    ] = None,
) -> None:
    """A write under an arbitrary key."""


def matched(
    if_match: Annotated[
        _Text,
        Header(
            alias="If-Match",
            description="The ETag that the namespace must still have; 412 otherwise.",
        ),
    ] = None,
) -> None:
    """A change of what was read before."""


def created(
    if_none_match: Annotated[
        _Text,
        Header(
            alias="If-None-Match",
            description="`*`: only create, 412 if it exists; or ETags that it must not have.",
        ),
    ] = None,
) -> None:
    """A change that may create."""


def prefers(
    prefer: Annotated[
        _Text,
        Header(description="`return=representation` asks for the outcomes (RFC 7240)."),
    ] = None,
) -> None:
    """A request whose response is empty unless it asks for more."""
