"""The cases of cancels: in ``answers.json``, and what each sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any, Final

from api.document.problem_page import shapes
from api.http.problems import problem_of, problem_types
from clients.conformance.cases import (
    LOST,
    MISFITS,
    PAGE,
    SUCCESS,
    TOKEN_TEXT,
    UNKNOWN,
    Case,
    Json,
    done_outcome,
    error_of,
    make_case,
    problem_answer,
    refused_outcome,
    results_answer,
)
from counter_client.calls import Call, Calls
from counter_client.failures import Unfinished

OPERATIONS: Final = ("add", "add-and-get", "clear", "delete", "atomic/add")
_KEY_TEXT: Final = "key:order-123"
_DONE: Final = {"outcome": "done", "was_counted": False}
_MISFITS: Final = {
    "cancelled": (None, False, 1, "true"),
    "was_counted": (None, "false", 0),
    "event_time": MISFITS["event_time"],
}


def cancel_of(operation: str, *, token_text: str = TOKEN_TEXT, until: str | None = None) -> Case:
    """Return the command that cancels an *operation*."""
    delta = 0 if operation in ("clear", "delete") else 3
    items = [["COUNTER", delta]]
    if operation == "atomic/add":
        items.append(["COUNTER-b", delta])
    found: Json = {"operation": operation, "namespace": "default", "items": items}
    found["token_text"] = token_text
    if until is not None:
        found["until"] = until
    return {"do": "cancel", "unfinished": json.dumps(found)}


def cancel_cases() -> Iterator[Case]:
    """Return the cases; the name of the counter is still missing."""
    pending, conflict, gone = map(
        error_of, ("token_pending", "token_conflict", "namespace_unknown")
    )
    for operation in OPERATIONS:
        command = cancel_of(operation)
        wait, out = problem_answer(pending), problem_answer(gone)
        for name, answers, outcome in (
            ("done", [SUCCESS], _DONE),
            (
                "counted before",
                [SUCCESS | {"members": {"was_counted": True}}],
                _DONE | {"was_counted": True},
            ),
            ("lost, pending, again", [LOST, wait, {"status": 502, **PAGE}, SUCCESS], _DONE),
            ("refused", [out], refused_outcome(gone)),
            ("lost, then refused", [LOST, out], UNKNOWN),
            ("404 with a page", [{"status": 404, **PAGE}], UNKNOWN),
            ("pending for too long", [problem_answer(pending, retry_after=3600)], UNKNOWN),
        ):
            yield make_case(
                f"cancel {operation}: {name}", answers, outcome, len(answers), 1, command
            )
    command = cancel_of("add")
    for name, error in (("another payload", conflict), *_too_old()):
        end, answer = refused_outcome(error), problem_answer(error)
        yield make_case(f"cancel: {name}", [answer], end, 1, 1, command)
        end = UNKNOWN if error.code == "token_too_old" and error.applied is None else end
        yield make_case(f"cancel: lost, then {name}", [LOST, answer], end, 2, 1, command)
    yield from _misfits(command)
    yield from _horizons()
    yield from _after_a_cancel()


def _too_old() -> Iterator[tuple[str, Any]]:
    """A cancel never has another token."""
    [kind] = [each for each in problem_types() if each.code == "token_too_old"]
    for error in shapes(kind):
        yield f"too old, applied {json.dumps(error.applied)}", error


def _misfits(command: Case) -> Iterator[Case]:
    changes: list[tuple[str, Case]] = [
        (f"{name} {json.dumps(value)}", {"members": {name: value}})
        for name, values in _MISFITS.items()
        for value in values
    ]
    changes += [(f"no {name}", {"without": [name]}) for name in _MISFITS]
    for what, change in changes:
        answers = [SUCCESS | change, SUCCESS]
        yield make_case(f"cancel, {what}: again", answers, _DONE, 2, 1, command)
    later = SUCCESS | {"members": {"event_time": "2026-01-31T09:00:00.000000Z", "later": [1]}}
    command = cancel_of("add", token_text=_KEY_TEXT)
    yield make_case("cancel, the time of a key", [later], _DONE, 1, 1, command)


def _horizons() -> Iterator[Case]:
    """A key that is forgotten is a new one, whose cancel would change nothing."""
    key = cancel_of("add", token_text=_KEY_TEXT)
    pending = problem_answer(error_of("token_pending"))
    over = pending | {"headers": pending["headers"] | {"Idempotency-TTL": "0"}}
    yield make_case("cancel: TTL, key, but it is over", [over, SUCCESS], UNKNOWN, 1, 1, key)
    past = cancel_of("add", until="2026-02-01T00:00:00Z")
    yield make_case("cancel: over", [SUCCESS], UNKNOWN, 0, 0, past)


def _after_a_cancel() -> Iterator[Case]:
    """An add that was cancelled is not counted, whatever came before."""
    cancelled = error_of("token_cancelled")
    end, result = refused_outcome(cancelled), results_answer("added", problem_of(cancelled))
    pair = [{"counter": "a", "delta": "1"}, {"counter": "b", "delta": "2"}]
    batch = {"do": "batch", "items": pair}
    ends = {"outcome": "done", "results": [done_outcome(), end]}
    again = cancel_of("add") | {"do": "resolve"}
    for what, before in (("cancelled", []), ("lost, then cancelled", [LOST])):
        sent = len(before) + 1
        yield make_case(f"batch: one is {what}", [*before, result], ends, sent, 2, batch)
        answers = [*before, problem_answer(cancelled)]
        yield make_case(f"resolve: {what}", answers, end, sent, 1, again)
        atomic = {"do": "atomic", "items": pair}
        yield make_case(f"atomic: {what}", answers, end, sent, 1, atomic)


def cancel_requests(calls: Calls) -> Iterator[tuple[Case, Call[Any]]]:
    """Return commands and their calls."""
    for operation, token_text in product(OPERATIONS, (TOKEN_TEXT, _KEY_TEXT)):
        text = cancel_of(operation, token_text=token_text)["unfinished"].replace("COUNTER", "a/b")
        yield (
            {"do": "cancel", "unfinished": text},
            calls.cancel_unfinished(Unfinished.parse(text)),
        )
