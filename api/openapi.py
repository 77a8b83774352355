"""What the OpenAPI document says of each route: its summary, bodies, parameters and examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from api import models

_TOKEN: Final[Mapping[str, str]] = {
    "token": "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b",
    "generation_time": "2026-01-31T08:15:30.000250Z",
}
_ADDED: Final[Mapping[str, Any]] = {
    "namespace": "default",
    "counter": "views",
    "delta": 1,
    "event_time": "2026-01-31T08:15:30.000250Z",
    "replayed": False,
}
_COUNT: Final[Mapping[str, Any]] = {
    "namespace": "default",
    "counter": "views",
    "count": 1,
    "as_of": "2026-01-31T08:15:30.004711Z",
    "accuracy": "accurate",
}
_NAMESPACE: Final[Mapping[str, Any]] = {
    "namespace": "videos",
    "created_at": "2026-01-31T08:00:00.000000Z",
    "counter_type": "EVENTUAL",
    "dataset": "default",
    "accept_limit": "5s",
    "future_limit": "5s",
    "rollup_window": "10s",
    "shards": 1,
    "payload_check": "guard",
    "key_ttl": "1d",
    "cache_ttl": "10s",
}


@dataclass(frozen=True, slots=True)
class Doc:
    """The documentation of one route."""

    summary: str
    answer: Any
    body: type[BaseModel] | None = None
    example: Any = None
    status: int = 200
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    media: tuple[str, ...] = ("application/json",)
    also: tuple[int, ...] = ()


_KEY: Final[Mapping[str, str]] = {
    "Idempotency-Key": "Instead of the body's token: a UUIDv7, or any text of 1 to 255 characters.",
}
_MATCH: Final[Mapping[str, str]] = {
    "If-Match": "The ETag that the namespace must still have; 412 otherwise.",
}
_COUNTER: Final = "/v1/namespaces/{ns}/counters/{c}"
_PAGING: Final[Mapping[str, str]] = {
    "limit": "Items a page: 1 to 1000, 100 where it is left out.",
    "page": "The next_page of the page before.",
}
_SPAN: Final[Mapping[str, str]] = {
    "from": "The first instant, RFC 3339 with an offset.",
    "to": "The instant after the last one.",
}
_ADD_EXAMPLE: Final[Mapping[str, Any]] = {"delta": 1, "idempotency_token": _TOKEN}
_ITEM: Final[Mapping[str, Any]] = {"counter": "views", **_ADD_EXAMPLE}

DOCS: Final[Mapping[tuple[str, str], Doc]] = {
    ("POST", f"{_COUNTER}/add"): Doc(
        "Add to a counter, once for the token", _ADDED, models.AddBody, _ADD_EXAMPLE, headers=_KEY
    ),
    ("POST", f"{_COUNTER}/add-and-get"): Doc(
        "Add, and read the count with the add in it",
        {**_ADDED, "count": 1, "as_of": _COUNT["as_of"]},
        models.AddBody,
        _ADD_EXAMPLE,
        headers=_KEY,
    ),
    ("POST", f"{_COUNTER}/clear"): Doc(
        "Set a counter to 0 as of the token's time",
        {k: v for k, v in _ADDED.items() if k != "delta"},
        models.ClearBody,
        {"idempotency_token": _TOKEN},
        headers=_KEY,
    ),
    ("GET", _COUNTER): Doc(
        "Read a counter",
        _COUNT,
        query={"max_staleness": "How stale the count may be: 0s for accurate, 5s, 1h."},
    ),
    ("GET", f"{_COUNTER}/events"): Doc(
        "A counter's events, latest first",
        {
            "events": [
                {
                    "event_time": _TOKEN["generation_time"],
                    "event_id": _TOKEN["token"],
                    "event_item_key": 0,
                    "delta": 1,
                }
            ],
            "next_page": None,
        },
        query={**_PAGING, **_SPAN},
    ),
    ("GET", f"{_COUNTER}/history"): Doc(
        "A counter's count and delta a step, for charts; CSV with Accept: text/csv",
        {"points": [{"time": "2026-01-31T08:16:00.000000Z", "count": 1, "delta": 1}]},
        query={**_SPAN, "step": "A multiple of the rollup window; about 60 points without it."},
    ),
    ("POST", f"{_COUNTER}/recount"): Doc(
        "Have a counter's windows counted anew from its events",
        {"namespace": "default", "counter": "views", "windows": 3},
        models.RecountBody,
        {"from": "2026-01-31T00:00:00Z", "to": "2026-02-01T00:00:00Z"},
        status=202,
    ),
    ("GET", "/v1/namespaces/{ns}/counters"): Doc(
        "Names of counters in code point order",
        {"counters": ["likes", "views"], "next_page": None},
        query={**_PAGING, "prefix": "Only names that start with it."},
    ),
    ("POST", "/v1/namespaces/{ns}/batch/add"): Doc(
        "Add to many counters, a token each; an outcome for each item, in order",
        {"results": [_ADDED]},
        models.BatchAddBody,
        {"items": [_ITEM]},
        media=("application/json", "application/x-ndjson"),
    ),
    ("POST", "/v1/namespaces/{ns}/batch/get"): Doc(
        "Read many counters",
        {"results": [_COUNT]},
        models.BatchGetBody,
        {"counters": ["views"], "max_staleness": "0s"},
    ),
    ("POST", "/v1/namespaces/{ns}/atomic/add"): Doc(
        "Add to many counters under one token: all of them or none",
        {"results": [_ADDED]},
        models.AtomicAddBody,
        {"idempotency_token": _TOKEN, "items": [{"counter": "views", "delta": 1}]},
        headers=_KEY,
    ),
    ("GET", "/v1/namespaces"): Doc("All namespaces", {"namespaces": [_NAMESPACE]}),
    ("GET", "/v1/namespaces/{ns}"): Doc("A namespace, with its ETag", _NAMESPACE),
    ("PUT", "/v1/namespaces/{ns}"): Doc(
        "Create a namespace (201), or change what may change of it (200)",
        _NAMESPACE,
        models.NamespaceBody,
        {"counter_type": "EVENTUAL"},
        headers={**_MATCH, "If-None-Match": "`*`: only create, 412 if it exists."},
        also=(201,),
    ),
    ("DELETE", "/v1/namespaces/{ns}"): Doc(
        "Delete a namespace with its counters, events and tokens", None, status=204, headers=_MATCH
    ),
    ("POST", "/v1/tokens"): Doc(
        "Tokens in strict order, never issued twice",
        {"tokens": [_TOKEN]},
        models.TokensBody,
        {"count": 1},
    ),
}


def operation(doc: Doc, path: str) -> dict[str, Any]:
    """The OpenAPI operation object of *doc*."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    said = {"ns": "The namespace.", "c": "The counter, percent-encoded (`/` as `%2F`)."}
    parameters: list[dict[str, Any]] = [
        {"name": n, "in": "path", "required": True, "description": said[n],
         "schema": {"type": "string"}} for n in names
    ]  # fmt: skip
    for place, given in (("query", doc.query), ("header", doc.headers)):
        parameters += [
            {"name": n, "in": place, "required": False, "description": text,
             "schema": {"type": "string"}} for n, text in given.items()
        ]  # fmt: skip
    found: dict[str, Any] = {"parameters": parameters}
    if doc.body is not None:
        schema = doc.body.model_json_schema()
        # Definitions are put in place: the operation stands by itself.
        schema = _inline(schema, schema.pop("$defs", {}))
        found["requestBody"] = {
            "required": path not in ("/v1/tokens", f"{_COUNTER}/recount"),
            "content": {media: {"schema": schema, "example": doc.example} for media in doc.media},
        }
    return found


def responses(doc: Doc) -> dict[int | str, dict[str, Any]]:
    """The answers of *doc*: its own, and problems."""
    own: dict[str, Any] = {"description": "Done"}
    if doc.answer is not None:
        own["content"] = {"application/json": {"example": doc.answer}}
    problem = {
        "type": "/problems#token_conflict",
        "title": "The token was already used with another payload",
        "status": 409,
        "detail": "the token was first used with another payload on counter 'views'",
        "code": "token_conflict",
        "applied": None,
        "retry": "never",
    }
    problems = {
        "description": "A problem (RFC 9457): `code`, `applied` and `retry` say what to do",
        "content": {"application/problem+json": {"example": problem}},
    }
    also: dict[int | str, dict[str, Any]] = dict.fromkeys(doc.also, own)
    return {doc.status: own, **also, "4XX": problems, "5XX": problems}


def _inline(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}
