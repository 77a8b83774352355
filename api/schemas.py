"""What answers look like, as JSON Schemas: the part of the OpenAPI document that clients are made
from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from api.problems import problem_types
from counter.types import Accuracy, CounterType, PayloadCheck

Schema = Mapping[str, Any]

_TEXT: Final[Mapping[str, Any]] = {"type": "string"}
_INTEGER: Final[Mapping[str, Any]] = {"type": "integer"}
_BOOLEAN: Final[Mapping[str, Any]] = {"type": "boolean"}
_TIME: Final[Mapping[str, Any]] = {"type": "string", "format": "date-time"}
_UUID: Final[Mapping[str, Any]] = {"type": "string", "format": "uuid"}
DURATION: Final[Mapping[str, Any]] = {"type": "string", "pattern": "^([0-9]+(us|ms|s|m|h|d))+$"}
_PAGE: Final[Mapping[str, Any]] = {"type": ["string", "null"]}


def _of(members: Mapping[str, Schema], **optional: Schema) -> Schema:
    """An object of exactly these members, of which *optional* may be missing."""
    return {
        "type": "object",
        "properties": {**members, **optional},
        "required": list(members),
        "additionalProperties": False,
    }


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


PROBLEM: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": _TEXT,
        "code": {"type": "string", "enum": [each.code for each in problem_types()]},
        "applied": {"type": ["boolean", "null"]},
        "retry": {"type": "string", "enum": ["same_token", "new_token", "never"]},
        "retry_after": {"type": "integer", "minimum": 0},
    },
    "required": ["type", "title", "status", "detail", "code", "applied", "retry"],
}

_WHOSE: Final[Mapping[str, Schema]] = {"namespace": _TEXT, "counter": _TEXT}
_TOLD: Final[Mapping[str, Schema]] = {
    "event_time": _TIME,
    "replayed": {"type": ["boolean", "null"]},
}
_READ: Final[Mapping[str, Schema]] = {"count": _INTEGER, "as_of": _TIME}

ADDED: Final = _of({**_WHOSE, "delta": _INTEGER, **_TOLD}, retry_safe=_BOOLEAN)
ADDED_AND_READ: Final = _of({**_WHOSE, "delta": _INTEGER, **_TOLD, **_READ}, retry_safe=_BOOLEAN)
CLEARED: Final = _of({**_WHOSE, **_TOLD}, retry_safe=_BOOLEAN)
COUNT: Final = _of(
    {**_WHOSE, **_READ, "accuracy": {"type": "string", "enum": [each.value for each in Accuracy]}},
    retry_safe=_BOOLEAN,
)
EVENTS: Final = _of(
    {
        "events": _list_of(
            _of(
                {"event_time": _TIME, "event_id": _UUID, "event_item_key": _INTEGER},
                delta=_INTEGER,
                clear={"const": True},
            )
        ),
        "next_page": _PAGE,
    }
)
HISTORY: Final = _of(
    {"points": _list_of(_of({"time": _TIME, "count": _INTEGER, "delta": _INTEGER}))}
)
RECOUNTED: Final = _of({**_WHOSE, "windows": _INTEGER})
NAMES: Final = _of({"counters": _list_of(_TEXT), "next_page": _PAGE})
#: An outcome for each item, in order: what it would be alone, or a problem.
ADDED_EACH: Final = _of({"results": _list_of({"anyOf": [ADDED, PROBLEM]})})
COUNTS: Final = _of({"results": _list_of({"anyOf": [COUNT, PROBLEM]})})
ADDED_ALL: Final = _of({"results": _list_of(ADDED)})
NAMESPACE: Final = _of(
    {
        "namespace": _TEXT,
        "created_at": _TIME,
        "counter_type": {"type": "string", "enum": [each.value for each in CounterType]},
        "dataset": _TEXT,
        "accept_limit": DURATION,
        "future_limit": DURATION,
        "rollup_window": DURATION,
        "shards": _INTEGER,
        "payload_check": {"type": "string", "enum": [each.value for each in PayloadCheck]},
        "key_ttl": DURATION,
        "cache_ttl": DURATION,
    }
)
NAMESPACES: Final = _of({"namespaces": _list_of(NAMESPACE)})
TOKENS: Final = _of({"tokens": _list_of(_of({"token": _UUID, "generation_time": _TIME}))})
