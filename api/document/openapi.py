"""The OpenAPI document: what FastAPI makes of the routes, and the components that they refer to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.document.problem_page import shapes
from api.http.problems import PROBLEM_TYPE, problem_of, problem_types
from api.http.routing import ETAG, REPLAYED, TTL, Route, headers_of, problem_name
from counter.limits import INT64_MAX

DESCRIPTION: Final = (
    "Counting that survives retries: every acknowledged add counts exactly once, an unacknowledged"
    " one at most once, and a definite answer about a token never changes."
)
TAGS: Final = (
    {"name": "counters", "description": "Add to a counter, read it, clear it."},
    {"name": "batches", "description": "The same for many counters in one request."},
    {"name": "cancels", "description": "Cancel what a token counted, or would count."},
    {"name": "holds", "description": "Reserve an amount; settle, release or extend it."},
    {"name": "events", "description": "CloudEvents, which rules map to counters."},
    {"name": "history", "description": "Events, charts, names and recounts."},
    {"name": "namespaces", "description": "Settings that counters share."},
    {"name": "tokens", "description": "Idempotency tokens made by the service."},
    {"name": "keys", "description": "API keys: list, create, revoke."},
    {"name": "insight", "description": "How the service does."},
    {"name": "service", "description": "Health, metrics and what problems mean."},
)
LICENSE: Final[Mapping[str, str]] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
#: This one, wherever the document was read.
SERVERS: Final[Sequence[Mapping[str, str]]] = ({"url": "/"},)
#: Enumerations whose values generators would name as another one's.
_OWN_PREFIX: Final = frozenset({"Accuracy"})
_TEXT: Final[Mapping[str, Any]] = {"type": "string"}
_INTEGER: Final[Mapping[str, Any]] = {"type": "integer", "minimum": 0}


def _header(description: str, schema: Mapping[str, Any] = _TEXT) -> dict[str, Any]:
    return {"description": description, "schema": schema}


_HEADERS: Final[Mapping[str, Any]] = {
    "X-Request-Id": _header("The request's name in every log: the client's own, or a new one."),
    REPLAYED: _header("`true` if the token was counted before.", {**_TEXT, "const": "true"}),
    TTL: _header(
        "Seconds from the token's time, or from the first use of an arbitrary key, in which a retry"
        " is not a second add and gets a definite answer. Also on problems.",
        _INTEGER,
    ),
    ETAG: _header("The version of the settings, for `If-Match`."),
    "Retry-After": _header("Seconds to wait before the next try.", _INTEGER),
    "WWW-Authenticate": _header("The scheme of keys."),
    "RateLimit": _header("What is left of the limit."),
    "RateLimit-Policy": _header("The limit that was reached."),
}
#: Headers of the problems of a status.
_OF_STATUS: Final[Mapping[int, tuple[str, ...]]] = {
    401: ("WWW-Authenticate",),
    409: ("Retry-After",),
    429: ("Retry-After", "RateLimit", "RateLimit-Policy"),
    503: ("Retry-After",),
}


def document_of(app: FastAPI) -> dict[str, Any]:
    """The document of *app*."""
    used: set[str] = set()
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=[each.described() if isinstance(each, Route) else each for each in app.routes],
        tags=app.openapi_tags,
        license_info=app.license_info,
        servers=app.servers,
    )
    components = document["components"]
    for operations in document["paths"].values():
        for operation in operations.values():
            # What FastAPI would answer to a wrong parameter: here that is a problem.
            operation["responses"].pop("422", None)
            used.update(operation["responses"])
            for response in operation["responses"].values():
                if "$ref" in response:
                    # It is the name of the status, and what is referred to has one.
                    response.pop("description", None)
    components["headers"] = _HEADERS
    components["parameters"] = _shared_parameters(document["paths"])
    components["responses"] = _problems(used)
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    for name, schema in components["schemas"].items():
        if schema.get("title") == name:
            del schema["title"]
        for each in schema.get("properties", {}).values():
            # It is the name of the property again.
            each.pop("title", None)
    _keep_integers(document)
    for name in _OWN_PREFIX & components["schemas"].keys():
        schema = components["schemas"][name]
        schema["x-enum-varnames"] = [f"{name}_{each}".upper() for each in schema["enum"]]
    return document


def _shared_parameters(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that several operations have, and let these refer to them."""
    lists = [
        operation["parameters"]
        for operations in paths.values()
        for operation in operations.values()
        if "parameters" in operation
    ]
    uses = Counter(json.dumps(each) for each in chain.from_iterable(lists))
    shared: dict[str, Any] = {}
    for parameters in lists:
        for place, each in enumerate(parameters):
            # Generators do not name the alternatives of a shared parameter.
            if uses[json.dumps(each)] > 1 and "anyOf" not in each["schema"]:
                name = each["name"].title().replace("-", "")
                while shared.setdefault(name, each) != each:
                    name += "2"
                parameters[place] = {"$ref": f"#/components/parameters/{name}"}
    return shared


def _keep_integers(part: Any) -> None:
    """Write the bounds of integers as integers: FastAPI writes floats, which generators refuse and
    which cannot hold INT64_MAX."""
    if isinstance(part, dict):
        if part.get("type") == "integer":
            for bound in ("minimum", "maximum"):
                if bound in part:
                    part[bound] = min(int(part[bound]), INT64_MAX)
        part = part.values()
    elif not isinstance(part, list):
        return
    for each in part:
        _keep_integers(each)


def _problems(used: Collection[str]) -> dict[str, Any]:
    """A response for each of the statuses that are *used*, with an example for each code."""
    kinds = [each for each in problem_types() if str(each.status) in used]
    return {
        problem_name(status): {
            "description": ", ".join(f"`{each.code}`" for each in kinds if each.status == status),
            "headers": headers_of(*_OF_STATUS.get(status, ())),
            "content": {
                PROBLEM_TYPE.decode(): {
                    "schema": {"$ref": "#/components/schemas/Problem"},
                    "examples": {
                        each.code: {"value": problem_of(shapes(each)[0])}
                        for each in kinds
                        if each.status == status
                    },
                }
            },
        }
        for status in sorted({each.status for each in kinds})
    }
