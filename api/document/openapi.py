"""What the OpenAPI document says of each route: its summary, bodies, parameters and examples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from api.document import schemas
from api.http import models
from counter import limits
from counter.core.results import TALLIES

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
    "requests_per_s": 0,
    "adds_per_s": 0,
}


class Parameter(NamedTuple):
    """What a parameter of the path, the query or a header is for, and what it looks like."""

    description: str
    schema: Mapping[str, Any]


class Lines(NamedTuple):
    """A body and an answer of a line an item, beside those in JSON."""

    body: Mapping[str, Any]
    example: str


NDJSON: Final = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Doc:
    """The documentation of one route."""

    summary: str
    answer: Any
    schema: Mapping[str, Any] = field(default_factory=dict)
    body: type[BaseModel] | None = None
    example: Any = None
    status: int = 200
    query: Mapping[str, Parameter] = field(default_factory=dict)
    headers: Mapping[str, Parameter] = field(default_factory=dict)
    #: What it answers in.
    media: str = "application/json"
    #: Another form of the body.
    lines: Lines | None = None
    #: What else it answers in, with an example: where the request asks for it.
    other_media: Mapping[str, str] = field(default_factory=dict)
    also: tuple[int, ...] = ()
    #: The statuses of its problems, beside those that every route may answer.
    problems: tuple[int, ...] = ()


_TEXT: Final[Mapping[str, Any]] = {"type": "string"}
_TIME: Final[Mapping[str, Any]] = {"type": "string", "format": "date-time"}
_KEY: Final[Mapping[str, Parameter]] = {
    "Idempotency-Key": Parameter(
        "Instead of the body's token: a UUIDv7, or any text of 1 to 255 characters.",
        {"type": "string", "minLength": 1, "maxLength": limits.IDEMPOTENCY_KEY_CHARS_MAX},
    ),
}
_MATCH: Final[Mapping[str, Parameter]] = {
    "If-Match": Parameter("The ETag that the namespace must still have; 412 otherwise.", _TEXT),
}
_NAMES: Final[Mapping[str, Parameter]] = {
    "ns": Parameter("The namespace.", {"type": "string", "pattern": "^[a-z][a-z0-9_-]{0,62}$"}),
    "c": Parameter(
        "The counter, percent-encoded (`/` as `%2F`).",
        {"type": "string", "minLength": 1, "maxLength": limits.COUNTER_NAME_CHARS_MAX},
    ),
}
_COUNTER: Final = "/v1/namespaces/{ns}/counters/{c}"
_PAGING: Final[Mapping[str, Parameter]] = {
    "limit": Parameter(
        "Items a page: 1 to 1000, 100 where it is left out.",
        {"type": "integer", "minimum": 1, "maximum": limits.PAGE_ITEMS_MAX},
    ),
    "page": Parameter("The next_page of the page before.", _TEXT),
}
_SPAN: Final[Mapping[str, Parameter]] = {
    "from": Parameter("The first instant, RFC 3339 with an offset.", _TIME),
    "to": Parameter("The instant after the last one.", _TIME),
}
_ADD_PROBLEMS: Final = (409, 410)
_ADD_EXAMPLE: Final[Mapping[str, Any]] = {"delta": 1, "idempotency_token": _TOKEN}
_ITEM: Final[Mapping[str, Any]] = {"counter": "views", **_ADD_EXAMPLE}

DOCS: Final[Mapping[tuple[str, str], Doc]] = {
    ("POST", f"{_COUNTER}/add"): Doc(
        "Add to a counter, once for the token",
        _ADDED,
        schemas.ADDED,
        models.AddBody,
        _ADD_EXAMPLE,
        headers=_KEY,
        problems=_ADD_PROBLEMS,
    ),
    ("POST", f"{_COUNTER}/add-and-get"): Doc(
        "Add, and read the count with the add in it",
        {**_ADDED, "count": 1, "as_of": _COUNT["as_of"]},
        schemas.ADDED_AND_READ,
        models.AddBody,
        _ADD_EXAMPLE,
        headers=_KEY,
        problems=_ADD_PROBLEMS,
    ),
    ("POST", f"{_COUNTER}/clear"): Doc(
        "Set a counter to 0 as of the token's time",
        {k: v for k, v in _ADDED.items() if k != "delta"},
        schemas.CLEARED,
        models.ClearBody,
        {"idempotency_token": _TOKEN},
        headers=_KEY,
        problems=_ADD_PROBLEMS,
    ),
    ("GET", _COUNTER): Doc(
        "Read a counter",
        _COUNT,
        schemas.COUNT,
        query={
            "max_staleness": Parameter(
                "How stale the count may be: 0s for accurate, 5s, 1h.", schemas.DURATION
            )
        },
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
        schemas.EVENTS,
        query={**_PAGING, **_SPAN},
    ),
    ("GET", f"{_COUNTER}/history"): Doc(
        "A counter's count and delta a step, for charts; CSV with Accept: text/csv",
        {"points": [{"time": "2026-01-31T08:16:00.000000Z", "count": 1, "delta": 1}]},
        schemas.HISTORY,
        query={
            **_SPAN,
            "step": Parameter(
                "A multiple of the rollup window; about 60 points without it.", schemas.DURATION
            ),
        },
        other_media={"text/csv": "time,count,delta\r\n2026-01-31T08:16:00.000000Z,1,1\r\n"},
    ),
    ("GET", f"{_COUNTER}/live"): Doc(
        "A counter's count as it changes, by server-sent events",
        f"event: count\ndata: {json.dumps(_COUNT)}\n\n",
        schemas.STREAMED,
        media="text/event-stream",
    ),
    ("POST", f"{_COUNTER}/recount"): Doc(
        "Have a counter's windows counted anew from its events",
        {"namespace": "default", "counter": "views", "windows": 3},
        schemas.RECOUNTED,
        models.RecountBody,
        {"from": "2026-01-31T00:00:00Z", "to": "2026-02-01T00:00:00Z"},
        status=202,
    ),
    ("GET", "/v1/namespaces/{ns}/counters"): Doc(
        "Names of counters in code point order",
        {"counters": ["likes", "views"], "next_page": None},
        schemas.NAMES,
        query={**_PAGING, "prefix": Parameter("Only names that start with it.", _TEXT)},
    ),
    ("GET", "/v1/namespaces/{ns}/shards"): Doc(
        "How far the rollup of each shard has come, and who does it",
        {
            "namespace": "default",
            "as_of": _COUNT["as_of"],
            "shards": [
                {
                    "shard": 0,
                    "watermark": "2026-01-31T08:15:09.999999Z",
                    "lag_seconds": 20.004712,
                    "overdue_seconds": 0.0,
                    "owner": "counter-1-4711-0a1b2c3d",
                }
            ],
        },
        schemas.SHARDS,
    ),
    ("GET", "/v1/namespaces/{ns}/busiest"): Doc(
        "The counters that are added to the most just now",
        {
            "namespace": "default",
            "since": "2026-01-31T08:15:20.000250Z",
            "as_of": _COUNT["as_of"],
            "complete": True,
            "counters": [{"counter": "views", "adds_per_s": 120.3, "count": 42}],
        },
        schemas.BUSIEST,
        query={
            "limit": Parameter(
                "At most so many counters: 1 to 100, 10 where it is left out.",
                {"type": "integer", "minimum": 1, "maximum": 100},
            ),
            "span": Parameter("How long a time: 10s, at most 1m.", schemas.DURATION),
        },
    ),
    ("POST", "/v1/namespaces/{ns}/batch/add"): Doc(
        "Add to many counters, a token each; an outcome for each item, in order",
        {"results": [_ADDED]},
        schemas.ADDED_EACH,
        models.BatchAddBody,
        {"items": [_ITEM]},
        # One item a line in, one result a line out.
        lines=Lines(_TEXT, json.dumps(_ITEM) + "\n"),
        other_media={NDJSON: json.dumps(_ADDED) + "\n"},
    ),
    ("POST", "/v1/namespaces/{ns}/batch/get"): Doc(
        "Read many counters",
        {"results": [_COUNT]},
        schemas.COUNTS,
        models.BatchGetBody,
        {"counters": ["views"], "max_staleness": "0s"},
    ),
    ("POST", "/v1/namespaces/{ns}/atomic/add"): Doc(
        "Add to many counters under one token: all of them or none",
        {"results": [_ADDED]},
        schemas.ADDED_ALL,
        models.AtomicAddBody,
        {"idempotency_token": _TOKEN, "items": [{"counter": "views", "delta": 1}]},
        headers=_KEY,
        problems=_ADD_PROBLEMS,
    ),
    ("GET", "/v1/namespaces"): Doc(
        "All namespaces", {"namespaces": [_NAMESPACE]}, schemas.NAMESPACES
    ),
    ("GET", "/v1/namespaces/{ns}"): Doc(
        "A namespace, with its ETag", _NAMESPACE, schemas.NAMESPACE
    ),
    ("PUT", "/v1/namespaces/{ns}"): Doc(
        "Create a namespace (201), or change what may change of it (200)",
        _NAMESPACE,
        schemas.NAMESPACE_PUT,
        models.NamespaceBody,
        {"counter_type": "EVENTUAL"},
        headers={
            **_MATCH,
            "If-None-Match": Parameter("`*`: only create, 412 if it exists.", _TEXT),
        },
        also=(201,),
        problems=(409, 412),
    ),
    ("DELETE", "/v1/namespaces/{ns}"): Doc(
        "Delete a namespace with its counters, events and tokens",
        None,
        status=204,
        headers=_MATCH,
        problems=(412,),
    ),
    ("GET", "/v1/outcomes"): Doc(
        "Adds and clears by what became of them",
        {"as_of": _COUNT["as_of"], "outcomes": {**dict.fromkeys(TALLIES, 0), "original": 1}},
        schemas.OUTCOMES,
    ),
    ("POST", "/v1/tokens"): Doc(
        "Tokens in strict order, never issued twice",
        {"tokens": [_TOKEN]},
        schemas.TOKENS,
        models.TokensBody,
        {"count": 1},
    ),
}


def operation(doc: Doc, path: str) -> dict[str, Any]:
    """The OpenAPI operation object of *doc*."""
    said = [("path", name, _NAMES[name]) for name in ("ns", "c") if f"{{{name}}}" in path]
    said += [("query", *each) for each in doc.query.items()]
    said += [("header", *each) for each in doc.headers.items()]
    found: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": place, "required": place == "path", **each._asdict()}
            for place, name, each in said
        ]
    }
    if doc.body is not None:
        schema = doc.body.model_json_schema()
        # Definitions are put in place: the operation stands by itself.
        schema = _inline(schema, schema.pop("$defs", {}))
        content: dict[str, Any] = {"application/json": {"schema": schema, "example": doc.example}}
        if doc.lines is not None:
            content[NDJSON] = {"schema": doc.lines.body, "example": doc.lines.example}
        found["requestBody"] = {
            "required": path not in ("/v1/tokens", f"{_COUNTER}/recount"),
            "content": content,
        }
    return found


def responses(doc: Doc, path: str) -> dict[int | str, dict[str, Any]]:
    """The answers of *doc*: its own, and problems."""
    own: dict[str, Any] = {"description": "Done"}
    if doc.answer is not None:
        own["content"] = {
            doc.media: {"schema": doc.schema, "example": doc.answer},
            **{
                media: {"schema": _TEXT, "example": example}
                for media, example in doc.other_media.items()
            },
        }
    statuses = {400, 401, 403, 429, 431, 500, 503, *doc.problems}
    if "{ns}" in path:
        statuses.add(404)
    if doc.body is not None:
        statuses |= {408, 413, 415}
    also: dict[int | str, dict[str, Any]] = dict.fromkeys(doc.also, own)
    return {doc.status: own, **also, **dict.fromkeys(sorted(statuses), problem())}


def problem() -> dict[str, Any]:
    """An answer that is a problem."""
    example = {
        "type": "/problems#token_conflict",
        "title": "The token was already used with another payload",
        "status": 409,
        "detail": "the token was first used with another payload on counter 'views'",
        "code": "token_conflict",
        "applied": None,
        "retry": "never",
    }
    return {
        "description": "A problem (RFC 9457): `code`, `applied` and `retry` say what to do",
        "content": {"application/problem+json": {"schema": schemas.PROBLEM, "example": example}},
    }


def _inline(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}
