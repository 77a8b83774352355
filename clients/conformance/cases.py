"""What the cases of ``answers.json`` are made of."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from api.document.problem_page import shapes
from api.http.problems import problem_of, problem_types
from counter.errors import BoundReachedError, CounterError, HoldSettledError
from counter_client.tokens import Token, parse_rfc3339

Json = Any
Case = dict[str, Json]
NONCE: Final = "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b"
SUCCESS: Final = {"success": True}
LOST: Final = {"lost": True}
TIME: Final = "2026-01-31T08:15:30.000250Z"
TOKEN_TEXT: Final = f"{NONCE}@{TIME}"
TOKEN: Final = Token(uuid.UUID(NONCE).bytes, parse_rfc3339(TIME))
GIVEN: Final = {"token": {"token": NONCE, "generation_time": TIME}}
UNKNOWN: Final = {"outcome": "unknown"}
PAGE: Final = {"headers": {"Content-Type": "text/html"}, "body": "<html>Sorry</html>"}
#: Values that do not fit, by the member of an answer. The delta is 1, which is no boolean.
NO_TIMES: Final = (None, "soon", 1769847330, "2026-01-31", "2026-01-31T08:15:30.000250")
MISFITS: Final[Mapping[str, Sequence[Json]]] = {
    "namespace": (None, "other", 1),
    "counter": (None, "other", ""),
    "delta": (None, 2, -1, "1", True, 1.5),
    "event_time": (*NO_TIMES, "2026-01-31T08:15:30.000251Z"),
    "replayed": ("false", 0, "null"),
    "retry_safe": (None, "false", 0),
    "count": (None, "1", 1.5, True),
    "as_of": NO_TIMES,
    "accuracy": (None, "exact", 1),
}


def make_case(
    name: str,
    answers: Sequence[Case],
    outcome: Case,
    requests: int,
    tokens: int = 1,
    command: Mapping[str, Json] | None = None,
) -> Case:
    """Return a case: *command*, by default an add, gets *answers* and has *outcome*."""
    return {
        "name": name,
        "command": {"do": "add", "delta": "3"} | dict(command or {}),
        "answers": list(answers),
        "outcome": outcome,
        "requests": requests,
        "tokens": tokens,
    }


def error_of(code: str) -> CounterError:
    """Return the first error that the service documents with *code*, to retry at once."""
    [error] = [shapes(each)[0] for each in problem_types() if each.code == code]
    error.retry_after_us = None
    return error


def problem_answer(error: CounterError, **more: Json) -> Case:
    """Return the service's answer with *error*; *more* replaces members."""
    body = problem_of(error) | more
    kind = {"Content-Type": "application/problem+json"}
    return {"status": error.status, "headers": kind, "body": json.dumps(body, ensure_ascii=False)}


def done_outcome(**more: Json) -> Case:
    """Return the outcome of an add that succeeded."""
    return {"outcome": "done", "replayed": False} | more


def refused_outcome(error: CounterError) -> Case:
    """Return the outcome of a call that the service refused with *error*."""
    found = {"outcome": "refused", "code": error.code, "applied": error.applied}
    if isinstance(error, BoundReachedError):
        found |= {name: str(value) for name, value in error.fields.items()}
    elif isinstance(error, HoldSettledError):
        found["settled"] = str(error.fields["settled"])
    return found


def got_outcome() -> Case:
    """Return the outcome of a get."""
    return {"outcome": "done", "count": "18446744073709551616", "accuracy": "accurate"}


def results_answer(*results: Json) -> Case:
    """Return an answer to several items: ``"added"``, or what replaces a result."""
    return {"results": list(results)}
