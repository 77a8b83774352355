"""Errors on the wire: RFC 9457 problem documents with a stable code, ``applied`` and ``retry``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from counter.errors import CounterError, InvalidBodyError

PROBLEM_TYPE: Final = b"application/problem+json"
_VALUE_CHARS_MAX: Final = 80
_FIELDS_MAX: Final = 10
_ITEMS_EXPLAINED_MAX: Final = 10
_T = TypeVar("_T")


def problem_types() -> list[type[CounterError]]:
    """Every kind of error that a client can meet, by its code."""
    found: dict[str, type[CounterError]] = {}
    waiting: list[type[CounterError]] = [CounterError]
    while waiting:
        each = waiting.pop()
        found.setdefault(each.code, each)
        waiting += each.__subclasses__()
    return [found[code] for code in sorted(found)]


def problem_of(error: CounterError) -> dict[str, Any]:
    """The problem document of *error*."""
    wait_s = retry_after_s(error)
    return {
        "type": f"/problems#{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        "applied": error.applied,
        "retry": error.retry,
        # In the body too: the problems of a batch have no header of their own.
        **({} if wait_s is None else {"retry_after": wait_s}),
        **error.fields,
    }


def problem_bytes(error: CounterError) -> bytes:
    """The problem document of *error* in JSON."""
    return json.dumps(problem_of(error), ensure_ascii=False).encode()


def retry_after_s(error: CounterError) -> int | None:
    """Whole seconds for the Retry-After header, rounded up; None where waiting does not help."""
    if error.retry_after_us is None:
        return None
    return max(1, -(-error.retry_after_us // 1_000_000))


def body_error(error: ValidationError, at: Sequence[int | str] = ()) -> InvalidBodyError:
    """What is wrong with a body: each field, its value and the bound it breaks."""
    wrong = error.errors(include_url=False, include_context=False)[:_FIELDS_MAX]
    found = [
        {
            "field": ".".join(shown(str(part)) for part in (*at, *each["loc"])) or "body",
            "message": said(each),
            "value": shown(each["input"]) if each["type"] != "missing" else None,
        }
        for each in wrong
    ]
    first = found[0]
    value = "" if first["value"] is None else f" (it is {first['value']})"
    if wrong[0]["type"].endswith("_type") and isinstance(wrong[0]["input"], str):
        value = f" (it is the text {first['value']!r})"
    return InvalidBodyError(f"{first['field']}: {first['message']}{value}", errors=found)


def said(problem: Mapping[str, Any]) -> str:
    """Return pydantic's message, or that of a validator here, without pydantic's prefix."""
    message: str = problem["msg"]
    return message.removeprefix("Value error, ")


class ItemProblems:
    """The problems of the bad items of one batch. Only the first ones are explained, because an
    explanation costs many times what a bad item costs its sender; the others share one problem."""

    def __init__(self) -> None:
        self._found: list[CounterError] = []

    def of(self, error: _T, explain: Callable[[_T], CounterError]) -> CounterError:
        """Return the problem of one more bad item; *explain* makes it of *error*."""
        if len(self._found) < _ITEMS_EXPLAINED_MAX:
            self._found.append(explain(error))
        elif len(self._found) == _ITEMS_EXPLAINED_MAX:
            self._found.append(
                InvalidBodyError(
                    f"only the first {_ITEMS_EXPLAINED_MAX} bad items of a batch are explained"
                )
            )
        return self._found[-1]


def shown(value: Any) -> str:
    """*value* as short text that is safe to send back: text as it is, all else as JSON."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    elif not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=repr)
    text: str = value.encode("utf-8", "replace").decode()
    return text if len(text) <= _VALUE_CHARS_MAX else text[:_VALUE_CHARS_MAX] + "…"
