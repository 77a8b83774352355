"""What answers look like, as JSON Schemas: the part of the OpenAPI document that clients are made
from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from api.http.models import NamespaceBody
from api.http.problems import problem_types
from counter.core.results import TALLIES
from counter.types import Accuracy, CounterType, PayloadCheck

Schema = Mapping[str, Any]

_TEXT: Final[Mapping[str, Any]] = {"type": "string"}
_INTEGER: Final[Mapping[str, Any]] = {"type": "integer"}
_BOOLEAN: Final[Mapping[str, Any]] = {"type": "boolean"}
_TIME: Final[Mapping[str, Any]] = {"type": "string", "format": "date-time"}
_UUID: Final[Mapping[str, Any]] = {"type": "string", "format": "uuid"}
DURATION: Final[Mapping[str, Any]] = {"type": "string", "pattern": "^([0-9]+(us|ms|s|m|h|d))+$"}
_PAGE: Final[Mapping[str, Any]] = {
    "type": ["string", "null"],
    "description": "What to ask for the next page with; null where this is the last.",
}


def _of(members: Mapping[str, Schema], **optional: Schema) -> Schema:
    """An object of exactly these members, of which *optional* may be missing."""
    return {
        "type": "object",
        "properties": {**members, **optional},
        "required": list(members),
        "additionalProperties": False,
    }


def _said(schema: Schema, description: str) -> Schema:
    """*schema* with what it is for."""
    return {**schema, "description": description}


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


PROBLEM: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "type": _said(_TEXT, "Where it is explained: `/problems#<code>`."),
        "title": _said(_TEXT, "The kind of problem, for people."),
        "status": {"type": "integer", "minimum": 400, "maximum": 599},
        "detail": _said(_TEXT, "The value, the bound and the way out."),
        "code": {"type": "string", "enum": [each.code for each in problem_types()]},
        "applied": {
            "type": ["boolean", "null"],
            "description": "Whether the token's add is counted; null: not known from this answer.",
        },
        "retry": {
            "type": "string",
            "enum": ["same_token", "new_token", "never"],
            "description": "What to do next.",
        },
        "retry_after": {
            "type": "integer",
            "minimum": 0,
            "description": "How many seconds to wait first, where waiting helps.",
        },
    },
    "required": ["type", "title", "status", "detail", "code", "applied", "retry"],
}

_WHOSE: Final[Mapping[str, Schema]] = {
    "namespace": _said(_TEXT, "The namespace."),
    "counter": _said(_TEXT, "The counter."),
}
_DELTA: Final = _said(_INTEGER, "What was added.")
_TOLD: Final[Mapping[str, Schema]] = {
    "event_time": _said(_TIME, "The token's time, which is that of the add."),
    "replayed": {
        "type": ["boolean", "null"],
        "description": "Whether it was there before; null where the store was not asked.",
    },
}
_READ: Final[Mapping[str, Schema]] = {
    "count": _said(_INTEGER, "The count, of any size: read it as a big integer."),
    "as_of": _said(_TIME, "The instant that the count is exact as of."),
}
_SAFE: Final = _said(_BOOLEAN, "Always false, and only of BEST_EFFORT: a retry may count twice.")

ADDED: Final = _of({**_WHOSE, "delta": _DELTA, **_TOLD}, retry_safe=_SAFE)
ADDED_AND_READ: Final = _of({**_WHOSE, "delta": _DELTA, **_TOLD, **_READ}, retry_safe=_SAFE)
CLEARED: Final = _of({**_WHOSE, **_TOLD}, retry_safe=_SAFE)
_ACCURACY: Final = _said(
    {"type": "string", "enum": [each.value for each in Accuracy]}, "What the count is worth."
)
COUNT: Final = _of({**_WHOSE, **_READ, "accuracy": _ACCURACY}, retry_safe=_SAFE)
EVENTS: Final = _of(
    {
        "events": _list_of(
            _of(
                {
                    "event_time": _TIME,
                    "event_id": _said(_UUID, "The token's nonce."),
                    "event_item_key": _said(
                        _INTEGER, "0, or the place among the counter's items of an atomic add."
                    ),
                },
                delta=_said(_INTEGER, "What was added; not there for a clear."),
                clear={"const": True, "description": "It is a clear."},
            )
        ),
        "next_page": _PAGE,
    }
)
HISTORY: Final = _of(
    {
        "points": _list_of(
            _of(
                {
                    "time": _said(_TIME, "The end of the step."),
                    "count": _said(_INTEGER, "The count then."),
                    "delta": _said(_INTEGER, "Its change since the step began."),
                }
            )
        )
    }
)
RECOUNTED: Final = _of({**_WHOSE, "windows": _said(_INTEGER, "How many are counted anew.")})
NAMES: Final = _of({"counters": _list_of(_TEXT), "next_page": _PAGE})
#: An outcome for each item, in order: what it would be alone, or a problem.
ADDED_EACH: Final = _of({"results": _list_of({"anyOf": [ADDED, PROBLEM]})})
COUNTS: Final = _of({"results": _list_of({"anyOf": [COUNT, PROBLEM]})})
ADDED_ALL: Final = _of({"results": _list_of(ADDED)})
_SETTINGS: Final[Mapping[str, Schema]] = {
    "counter_type": {"type": "string", "enum": [each.value for each in CounterType]},
    "dataset": _TEXT,
    "accept_limit": DURATION,
    "future_limit": DURATION,
    "rollup_window": DURATION,
    "shards": _INTEGER,
    "payload_check": {"type": "string", "enum": [each.value for each in PayloadCheck]},
    "key_ttl": DURATION,
    "cache_ttl": DURATION,
    "requests_per_s": _INTEGER,
    "adds_per_s": _INTEGER,
}
_NAMESPACE: Final[Mapping[str, Schema]] = {
    "namespace": _said(_TEXT, "Its name."),
    "created_at": _TIME,
    **{
        name: _said(schema, NamespaceBody.model_fields[name].description or "")
        for name, schema in _SETTINGS.items()
    },
}
NAMESPACE: Final = _of(_NAMESPACE)
#: What a PUT answers: it also says what does not fit, if anything.
NAMESPACE_PUT: Final = _of(_NAMESPACE, warnings=_list_of(_TEXT))
NAMESPACES: Final = _of({"namespaces": _list_of(NAMESPACE)})
#: One event of a stream: in the data of a ``count`` is what a get answers.
STREAMED: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"event": {"enum": ["count", "problem", "end"]}, "data": _TEXT},
    "required": ["event", "data"],
}
SHARDS: Final = _of(
    {
        "namespace": _TEXT,
        "as_of": _TIME,
        "shards": _list_of(
            _of(
                {
                    "shard": _INTEGER,
                    "watermark": _said(_TIME, "Up to here all events are rolled up."),
                    "lag_seconds": {
                        "type": "number",
                        "description": "How far that is behind the clock.",
                    },
                    "overdue_seconds": {
                        "type": "number",
                        "minimum": 0,
                        "description": "How much of that is more than the settings make it.",
                    },
                    "owner": {
                        "type": ["string", "null"],
                        "description": "The worker whose share the shard is in.",
                    },
                }
            )
        ),
    }
)
BUSIEST: Final = _of(
    {
        "namespace": _TEXT,
        "since": _TIME,
        "as_of": _TIME,
        "complete": {"type": "boolean"},
        "counters": _list_of(
            _of(
                {
                    "counter": _TEXT,
                    "adds_per_s": {"type": "number", "minimum": 0},
                    "count": _INTEGER,
                }
            )
        ),
    }
)
OUTCOMES: Final = _of(
    {
        "as_of": _TIME,
        "outcomes": _of({each: {"type": "integer", "minimum": 0} for each in TALLIES}),
    }
)
TOKENS: Final = _of({"tokens": _list_of(_of({"token": _UUID, "generation_time": _TIME}))})
