"""The routes of ``/v1``: FastAPI matches and documents them, and the front answers them.

Parameters and bodies are declared for the document. :class:`api.http.call.Call` reads them, because
errors must come in one order (key, namespace, parameters, body) and name the value and the bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from inspect import Parameter, Signature
from typing import Annotated, Any, Final, NamedTuple, Protocol

from fastapi import Depends, Header, HTTPException, Path, Query, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema
from starlette.routing import Route as PlainRoute

from api.http.call import AsgiScope, Call, Handler, Receive, Send
from api.http.models import DurationOut, TimeOut
from api.http.response_headers import Label
from counter import limits
from counter.types import Scope

_BEARER: Final = HTTPBearer(
    scheme_name="key",
    description="An API key. A service without keys answers every request.",
    auto_error=False,
)
#: Statuses of problems that every route may answer, and those of a body.
_ALWAYS: Final = frozenset({400, 401, 403, 429, 431, 500, 503})
_WITH_BODY: Final = frozenset({408, 413, 415})
_REQUEST_ID: Final[Mapping[str, Any]] = {
    "X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}
}
NAMESPACE: Final = "/v1/namespaces/{namespace}"
COUNTER: Final = f"{NAMESPACE}/counters/{{counter}}"
REPLAYED: Final = "Idempotency-Replayed"
ETAG: Final = "ETag"


class EventStream(Response):
    """The media type of ``live``."""

    media_type = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Doc:
    """What the document says of a route besides its path."""

    operation_id: str
    summary: str
    tag: str
    answer: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    #: Dependencies that declare the parameters beside those of the path.
    reads: tuple[Callable[..., None], ...] = ()
    #: The statuses of its problems, beside those that every route may answer.
    problems: tuple[int, ...] = ()
    #: Headers of its answer, as components name them.
    headers: tuple[str, ...] = ()
    status: int = 200
    body_may_be_empty: bool = False
    response_class: type[Response] = JSONResponse
    #: Further forms and statuses of its answer, and forms of its body.
    responses: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


class Answering(Protocol):
    """What answers a route's requests."""

    async def serve(self, route: Route, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer the request of *scope* by its route's handler."""
        ...


class Exchange(NamedTuple):
    """What the front puts into the scope of a request to ``/v1``, as ``counter``."""

    front: Answering
    call: Call
    label: Label
    only_head: bool


class Route(PlainRoute):
    """One route: ``path`` with ``{namespace}`` and ``{counter}``.

    One that *writes* events wants a fresh copy of the namespace's settings; one that shows or
    changes them, the *latest*. *adds* are those that any request to it makes; a batch's handler
    says for itself how many it brings.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        scope: Scope,
        doc: Doc | None = None,
        *,
        writes: bool = False,
        latest: bool = False,
        adds: int = 0,
    ) -> None:
        super().__init__(path, handler, name=f"{method} {path}")
        # An empty name is a wrong name, and not another path.
        self.path_regex = re.compile(self.path_regex.pattern.replace("[^/]+", "[^/]*"))
        # Starlette adds HEAD to GET; here the front answers HEAD.
        self.methods = {method}
        self.method = method
        self.handler = handler
        self.scope = scope
        self.doc = doc
        self.writes = writes
        self.latest = latest
        self.adds = adds

    def described(self) -> APIRoute:
        """The route as FastAPI describes it, for the document.

        Made when the document is made: to analyze the parameters of all routes takes most of a
        start.
        """
        described = (
            {"include_in_schema": False, "response_model": None}
            if self.doc is None
            else _described(self.doc, self.path, self.scope)
        )
        return APIRoute(self.path, self.handler, methods=[self.method], **described)

    async def handle(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Have the front answer: without the framework's request, dependencies and response, which
        cost more than the count."""
        if scope["method"] != self.method:
            raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED)
        await scope["counter"].front.serve(self, scope, receive, send)


def call_of(request: Request) -> Call:
    """The request as handlers see it."""
    exchange: Exchange = request.scope["counter"]
    return exchange.call


#: What the handler of a route takes.
CallOf = Annotated[Call, Depends(call_of)]


def _described(doc: Doc, path: str, scope: Scope) -> dict[str, Any]:
    """What FastAPI makes the operation of."""
    statuses = _ALWAYS.union(doc.problems)
    reads = list(doc.reads)
    if "{counter}" in path:
        reads.insert(0, of_counter)
    elif "{namespace}" in path:
        reads.insert(0, of_namespace)
    if reads and reads[0] in (of_counter, of_namespace):
        statuses |= {404}
    if doc.body is not None:
        statuses |= _WITH_BODY
        reads.append(_body_of(doc.body, optional=doc.body_may_be_empty))
    own = {
        "headers": {
            **_REQUEST_ID,
            **{name: {"$ref": f"#/components/headers/{name}"} for name in doc.headers},
        }
    }
    answers = {doc.status: {}, **doc.responses}
    return {
        "operation_id": doc.operation_id,
        "summary": doc.summary,
        "tags": [doc.tag],
        "status_code": doc.status,
        "response_model": doc.answer,
        "response_class": Response if doc.status == HTTPStatus.NO_CONTENT else doc.response_class,
        "response_description": "Done",
        "responses": {
            **{status: {**own, **each} for status, each in answers.items()},
            **{status: problem(status) for status in sorted(statuses)},
        },
        "dependencies": [
            Security(_BEARER, scopes=[scope.name.lower()]),
            *(Depends(each) for each in reads),
        ],
        "openapi_extra": dict(doc.extra) or None,
    }


def problem(status: int) -> dict[str, Any]:
    """The response of the document's components with the problems of *status*."""
    return {"$ref": f"#/components/responses/{problem_name(status)}"}


def problem_name(status: int) -> str:
    """The name of that response, such as ``NotFound``."""
    return "".join(HTTPStatus(status).phrase.title().split())


_Nothing = SkipJsonSchema[None]
_Text = str | _Nothing


def _body_of(model: type[BaseModel], *, optional: bool) -> Callable[..., None]:
    """A dependency that declares a body."""

    def body(**_: Any) -> None:
        return None

    kind = Parameter.POSITIONAL_OR_KEYWORD
    taken = Parameter("body", kind, annotation=model)
    if optional:
        taken = taken.replace(annotation=model | _Nothing, default=None)
    body.__signature__ = Signature([taken])  # type: ignore[attr-defined]
    return body


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
        Header(alias="If-None-Match", description="`*`: only create, 412 if it exists."),
    ] = None,
) -> None:
    """A change that may create."""


def staleness(
    max_staleness: Annotated[
        DurationOut | _Nothing,
        Query(description="How stale the count may be: 0s for accurate, 5s, 1h."),
    ] = None,
) -> None:
    """A read."""


def paged(
    limit: Annotated[
        int, Query(ge=1, le=limits.PAGE_ITEMS_MAX, description="Items a page.")
    ] = limits.PAGE_ITEMS_DEFAULT,
    page: Annotated[_Text, Query(description="The next_page of the page before.")] = None,
) -> None:
    """A list that comes in pages."""


def prefixed(
    prefix: Annotated[_Text, Query(description="Only names that start with it.")] = None,
) -> None:
    """A list of names."""


def spanned(
    from_: Annotated[
        TimeOut | _Nothing,
        Query(alias="from", description="The first instant, RFC 3339 with an offset."),
    ] = None,
    to: Annotated[TimeOut | _Nothing, Query(description="The instant after the last one.")] = None,
) -> None:
    """A part of a counter's past."""


def stepped(
    step: Annotated[
        DurationOut | _Nothing,
        Query(description="A multiple of the rollup window; about 60 points without it."),
    ] = None,
) -> None:
    """A chart."""


def busy(
    limit: Annotated[int, Query(ge=1, le=100, description="At most so many counters.")] = 10,
    span: Annotated[DurationOut, Query(description="How long a time, at most 1m.")] = "10s",
) -> None:
    """What is busy."""
