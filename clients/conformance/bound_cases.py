"""The cases of adds with bounds: in ``answers.json``, what each sends, and what clients refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from api.http.problems import problem_of
from clients.conformance.cases import (
    GIVEN,
    LOST,
    SUCCESS,
    TOKEN_TEXT,
    Case,
    Json,
    done_outcome,
    error_of,
    make_case,
    problem_answer,
    refused_outcome,
    results_answer,
)
from counter import limits
from counter.errors import BoundReachedError
from counter_client.calls import Call, Calls
from counter_client.failures import Unfinished
from counter_client.tokens import Bounds, Key, Token

_MOST: Final = {"at_most": "9"}
_PAIR: Final = [{"counter": "a", "delta": "3", **_MOST}, {"counter": "b", "delta": "3"}]
_KEY: Final = {"key": "order-123"}
#: The bounds of a request, and of its command.
_BOUNDS: Final = (
    Bounds(at_least=0),
    Bounds(at_most=9),
    Bounds(0, 0),
    Bounds(limits.INT64_MIN, limits.INT64_MAX),
)


def _commands() -> dict[str, tuple[Case, Case]]:
    """Return commands with bounds, and their outcomes if they are accepted."""
    add = {"delta": "3", **_MOST, **GIVEN}
    counted = done_outcome(count="18446744073709551616")
    several = {"do": "atomic", "items": _PAIR, **GIVEN}
    applied = {"outcome": "done", "applied": True}
    return {
        "add": ({"do": "add", **add}, done_outcome()),
        "add of a key": ({"do": "add", "delta": "3", **_MOST, **_KEY}, done_outcome()),
        "add of a new token": ({"do": "add", "delta": "3", **_MOST}, done_outcome()),
        "add_and_get": ({"do": "add_and_get", **add}, counted),
        "atomic": (several, done_outcome(replayed=[False, False])),
        "resolve": (_unfinished("resolve", "add", Bounds(at_most=9)), applied),
    }


def _unfinished(do: str, operation: str, bounds: Bounds, token_text: str = TOKEN_TEXT) -> Case:
    """Return the command that resolves or cancels a bounded add; *do* is which."""
    items: list[Json] = [["COUNTER", 3, bounds.members()]]
    if operation == "atomic/add":
        items.append(["COUNTER-b", 3])
    found = {"operation": operation, "namespace": "default", "items": items}
    return {"do": do, "unfinished": json.dumps(found | {"token_text": token_text})}


def _reached(**bound: int) -> BoundReachedError:
    """Return a refusal whose numbers have up to 64 bits and more."""
    room = 2**63 if "at_least" in bound else 1
    return BoundReachedError("why", counter="c", count=2**64, room=room, **bound)


def bound_cases() -> Iterator[Case]:
    """Return the cases; the name of the counter is still missing."""
    most, least = _reached(at_most=9), _reached(at_least=limits.INT64_MIN)
    busy, unsupported = error_of("store_unavailable"), error_of("not_supported")
    for name, (command, done) in _commands().items():
        refused, no = problem_answer(most), problem_answer(unsupported)
        for what, answers, outcome, requests in (
            ("accepted", [SUCCESS], done, 1),
            ("lost, then accepted", [LOST, SUCCESS], done, 2),
            ("refused", [refused, SUCCESS], refused_outcome(most), 1),
            ("refused by the least count", [problem_answer(least)], refused_outcome(least), 1),
            ("lost, then refused", [LOST, refused, SUCCESS], refused_outcome(most), 2),
            ("again, then refused", [problem_answer(busy), refused], refused_outcome(most), 2),
            ("not supported", [no, SUCCESS], refused_outcome(unsupported), 1),
        ):
            yield make_case(f"bounds of {name}: {what}", answers, outcome, requests, 1, command)
    yield from _replays()
    yield from _batches(most)
    yield from _bare(most)
    for operation in ("add", "add-and-get", "atomic/add"):
        command = _unfinished("cancel", operation, Bounds(at_most=9))
        ends = {"outcome": "done", "was_counted": False}
        yield make_case(f"cancel bounded {operation}", [LOST, SUCCESS], ends, 2, 1, command)


def _replays() -> Iterator[Case]:
    command, _ = _commands()["add"]
    again = SUCCESS | {"members": {"replayed": True}}
    yield make_case("bounds: a replay", [again], done_outcome(replayed=True), 1, 1, command)


def _batches(most: BoundReachedError) -> Iterator[Case]:
    """A refused item leaves the others alone."""
    command = {"do": "batch", "items": _PAIR}
    end, result = refused_outcome(most), problem_of(most)
    done, busy = done_outcome(), problem_of(error_of("store_unavailable"))
    for what, answers, ends in (
        ("accepted", [SUCCESS], [done, done]),
        ("one refused", [results_answer(result, "added")], [end, done]),
        ("both refused", [results_answer(result, result)], [end, end]),
        ("lost, then one refused", [LOST, results_answer(result, "added")], [end, done]),
        (
            "one refused, the other again",
            [results_answer(result, busy), results_answer("added")],
            [end, done],
        ),
        (
            "one again, then refused",
            [results_answer(busy, "added"), results_answer(result)],
            [end, done],
        ),
    ):
        outcome = {"outcome": "done", "results": ends}
        name = f"bounds of a batch: {what}"
        yield make_case(name, answers, outcome, len(answers), 2, command)


def _bare(most: BoundReachedError) -> Iterator[Case]:
    """What the refusal says is reported only if it says all of it."""
    command, _ = _commands()["add"]
    bare = {"outcome": "refused", "code": most.code, "applied": False}
    kinds: dict[str, Json] = {"counter": 7, "count": "8", "at_most": 1.5, "room": None}
    for name, other in kinds.items():
        answer = problem_answer(most, **{name: other})
        what = f"bounds: {name} {json.dumps(other)}"
        yield make_case(what, [answer], bare, 1, 1, command)
        body = problem_of(most)
        del body[name]
        answer |= {"body": json.dumps(body)}
        yield make_case(f"bounds: no {name}", [answer], bare, 1, 1, command)


def bound_requests(calls: Calls) -> Iterator[tuple[Case, Call[Any]]]:
    """Return commands and their calls."""
    token, key = Token.parse(TOKEN_TEXT), Key(_KEY["key"])
    for bounds in _BOUNDS:
        text = {name: str(each) for name, each in bounds.members().items()}
        one, several = {"counter": "views", "delta": "3", **text}, [("views", 3, bounds)]
        for given, shown in ((token, GIVEN), (key, _KEY)):
            yield {"do": "add", **one, **shown}, calls.add("views", 3, given, bounds)
            yield (
                {"do": "add_and_get", **one, **shown},
                calls.add_and_get("views", 3, given, bounds),
            )
            yield (
                {"do": "atomic", "items": [one, {"counter": "b", "delta": "-1"}], **shown},
                calls.atomic([*several, ("b", -1)], given),
            )
        for operation in ("add", "add-and-get", "atomic/add"):
            for do, make in (("resolve", calls.resolve), ("cancel", calls.cancel_unfinished)):
                command = _unfinished(do, operation, bounds)
                unfinished = command["unfinished"].replace("COUNTER", "views")
                yield command | {"unfinished": unfinished}, make(Unfinished.parse(unfinished))


def bound_refusals() -> list[Case]:
    """Return commands whose bounds the client refuses."""
    over, under = str(limits.INT64_MAX + 1), str(limits.INT64_MIN - 1)
    found: list[Case] = []
    for bounds in ({"at_most": over}, {"at_least": under}, {"at_least": "2", "at_most": "1"}):
        one = {"counter": "c", "delta": "1", **bounds}
        found += [{"do": do, **one} for do in ("add", "add_and_get")]
        found.append({"do": "atomic", "items": [one]})
    bad = _unfinished("resolve", "add", Bounds(2, 1))
    return [*found, bad, bad | {"do": "cancel"}]
