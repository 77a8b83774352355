"""The cases of holds: in ``answers.json``, what each sends, and what clients refuse.

In a case, ``"HOLD"`` stands for the id of the case's hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from clients.conformance.cases import (
    GIVEN,
    LOST,
    MISFITS,
    NO_TIMES,
    PAGE,
    SUCCESS,
    TIME,
    TOKEN_TEXT,
    UNKNOWN,
    Case,
    Json,
    error_of,
    make_case,
    problem_answer,
    refused_outcome,
)
from clients.conformance.scripted import COUNT, HELD
from counter import limits
from counter.errors import (
    BoundReachedError,
    CounterError,
    HoldExpiredError,
    HoldReleasedError,
    HoldSettledError,
    HoldUnknownError,
)
from counter_client.calls import Call, Calls
from counter_client.failures import Unfinished
from counter_client.tokens import Bounds, HoldId, Key, Token

_LASTS: Final = "900s"
_WANTED: Final = {"amount": str(HELD), "expires_in": _LASTS}
_KEY: Final = {"key": "order-123"}
_SUMS: Final = {"count": str(COUNT), "held": str(COUNT)}
_BEGUN: Final[Case] = {"outcome": "done", "amount": str(HELD), **_SUMS}
_OPEN: Final[Case] = {"hold": "HOLD", "amount": str(HELD), "state": "open", "over": False}
_UNTIL: Final = {"expires_at": TIME}
_SETTLED: Final[Case] = {"outcome": "done", "settled": "37", "over": False, **_SUMS}
_HELD: Final[Case] = {"do": "get", "counter": "c"}
#: Commands, and their outcomes if they succeed.
_CALLS: Final[Mapping[str, tuple[Case, Case]]] = {
    "hold": ({"do": "hold", **_WANTED, "at_most": "9", **GIVEN}, _BEGUN | {"hold": "HOLD"}),
    "hold of a key": ({"do": "hold", **_WANTED, **_KEY}, _BEGUN),
    "hold of a new token": ({"do": "hold", **_WANTED}, _BEGUN),
    "settle": ({"do": "settle", "hold": "HOLD", "amount": "37"}, _SETTLED),
    "release": ({"do": "release", "hold": "HOLD"}, {"outcome": "done", **_SUMS}),
}
_READS: Final[Mapping[str, tuple[Case, Case]]] = {
    "extend": (
        {"do": "extend", "hold": "HOLD", "expires_in": _LASTS},
        {"outcome": "done", **_OPEN, **_UNTIL},
    ),
    "get_hold": ({"do": "get_hold", "hold": "HOLD"}, {"outcome": "done", **_OPEN, **_UNTIL}),
}
_MISFITS: Final[Mapping[str, Sequence[Json]]] = {
    "namespace": MISFITS["namespace"],
    "counter": MISFITS["counter"],
    "hold": (None, "", "AAAA", 1, str(HoldId(Token(bytes(16), 0), "c"))),
    "amount": (None, "5", 1.5, True),
    "over": (None, 1, "true"),
}


def _unfinished(do: str, operation: str, token_text: str = TOKEN_TEXT) -> Case:
    """Return the command that resolves or cancels a hold or its end; *do* is which."""
    amount = {"hold": HELD, "settle": 37}.get(operation, 0)
    item: list[Json] = ["COUNTER", amount]
    found: Json = {"operation": operation, "namespace": "default", "items": [item]}
    if operation == "hold":
        item.append({"at_most": 9})
        found["expires_in"] = _LASTS
    return {"do": do, "unfinished": json.dumps(found | {"token_text": token_text})}


def _ends() -> dict[str, CounterError]:
    """Return how a hold has ended that is asked for something else."""
    return {
        "settled": HoldSettledError("why", settled=limits.INT64_MIN, ended_at=TIME),
        "released": HoldReleasedError("why", ended_at=TIME),
        "expired": HoldExpiredError("why", ended_at=TIME),
    }


def hold_cases() -> Iterator[Case]:
    """Return the cases; the name of the counter is still missing."""
    busy, gone = error_of("store_unavailable"), error_of("namespace_unknown")
    unknown, no = HoldUnknownError("why"), error_of("not_supported")
    slow = problem_answer(busy, retry_after=3600)
    for name, (command, done) in _CALLS.items():
        tokens = 0 if "hold" in command else 1
        cases: list[tuple[str, Sequence[Case], Case]] = [
            ("done", [SUCCESS], done),
            ("lost, then done", [LOST, SUCCESS], done),
            ("again, then done", [problem_answer(busy), {"status": 502, **PAGE}, SUCCESS], done),
            ("404 with a page", [{"status": 404, **PAGE}], UNKNOWN),
            ("refused", [problem_answer(gone)], refused_outcome(gone)),
            ("lost, then refused", [LOST, problem_answer(gone)], UNKNOWN),
            ("unknown", [problem_answer(unknown)], refused_outcome(unknown)),
            ("lost, then unknown", [LOST, problem_answer(unknown)], UNKNOWN),
            ("not supported", [problem_answer(no)], refused_outcome(no)),
            ("again too late", [slow], UNKNOWN),
        ]
        for how, error in _ends().items():
            end, answer = refused_outcome(error), problem_answer(error)
            cases.append((how, [answer], end))
            cases.append((f"lost, then {how}", [LOST, answer], end))
        for what, answers, outcome in cases:
            yield make_case(f"{name}: {what}", answers, outcome, len(answers), tokens, command)
    for name, (command, done) in _READS.items():
        for what, answers, outcome in (
            ("done", [SUCCESS], done),
            ("lost, then done", [LOST, SUCCESS], done),
            ("settled", [problem_answer(_ends()["settled"])], refused_outcome(_ends()["settled"])),
            ("again too late", [slow], UNKNOWN),
        ):
            yield make_case(f"{name}: {what}", answers, outcome, len(answers), 0, command)
    yield from _states()
    yield from _bounds()
    yield from _misfits()
    yield from _renewed()
    yield from _unfinished_cases()
    yield from _counts()


def _states() -> Iterator[Case]:
    """A hold with its end, and an amount that is over."""
    command, _ = _READS["get_hold"]
    ended = {"outcome": "done", **_OPEN, "ended_at": TIME}
    states: list[tuple[str, Case]] = [
        ("released", {}),
        ("expired", {}),
        ("settled", {"settled": -(2**63)}),
        ("settled", {"settled": 51, "over": True}),
    ]
    for state, more in states:
        answer = SUCCESS | {"members": {"state": state, "ended_at": TIME, **more}}
        shown = {name: str(x) if name == "settled" else x for name, x in more.items()}
        wanted = ended | {"state": state} | shown
        yield make_case(f"get_hold: {state} {more}", [answer], wanted, 1, 0, command)
    command, done = _CALLS["settle"]
    over = SUCCESS | {"members": {"over": True}}
    yield make_case("settle: over", [over], done | {"over": True}, 1, 0, command)
    bare = problem_answer(_ends()["settled"], settled="7")
    end = {"outcome": "refused", "code": "hold_settled", "applied": True}
    yield make_case("settle: settled with text", [bare], end, 1, 0, command)


def _bounds() -> Iterator[Case]:
    """What is held is reported if the answer says so; another type is as no number."""
    error = BoundReachedError("why", counter="c", count=2**64, room=1, at_most=9, held=COUNT)
    bare = {"outcome": "refused", "code": error.code, "applied": False}
    commands: dict[str, Case] = {
        "hold": _CALLS["hold"][0],
        "add": {"do": "add", "delta": "3", "at_most": "9", **GIVEN},
    }
    for name, command in commands.items():
        refused = problem_answer(error)
        for before in ([], [LOST]):
            answers = [*before, refused]
            what = f"{name}: {'lost, then ' if before else ''}no room with what is held"
            yield make_case(what, answers, refused_outcome(error), len(answers), 1, command)
    other = problem_answer(error, room="1")
    yield make_case("hold: no room in text", [other], bare, 1, 1, _CALLS["hold"][0])


def _misfits() -> Iterator[Case]:
    """Answers that are about another hold, or none."""
    sums = {"count": MISFITS["count"], "held": MISFITS["count"], "as_of": NO_TIMES}
    open_ = {"expires_at": NO_TIMES, "state": (None, "closed", "settled", "released", "Open")}
    ended = {"ended_at": NO_TIMES, "state": (None, "open", "expired")}
    other = {"amount": (None, 51, "50")}
    settled = {"settled": (None, 36, "37", 37.5, True)}
    for name, misfits in (
        ("hold", {**_MISFITS, **sums, **open_, **other}),
        ("settle", {**_MISFITS, **sums, **ended, **settled}),
        ("release", {**_MISFITS, **sums, **ended}),
        ("extend", {**_MISFITS, **open_}),
        ("get_hold", {**_MISFITS, **open_}),
    ):
        command, done = {**_CALLS, **_READS}[name]
        tokens = 0 if "hold" in command else 1
        for member, values in misfits.items():
            changes: list[Case] = [{"members": {member: value}} for value in values]
            if member != "over":
                changes.append({"without": [member]})
            for change in changes:
                answers = [SUCCESS | change, SUCCESS]
                what = f"{name}, {json.dumps(change)}: again"
                yield make_case(what, answers, done, 2, tokens, command)


def _renewed() -> Iterator[Case]:
    """A void token of the client's own is replaced; one of the program's is not."""
    void = error_of("token_too_old")
    void.applied, void.retry = False, "new_token"
    new, given = _CALLS["hold of a new token"], _CALLS["hold"]
    answers = [problem_answer(void), SUCCESS]
    yield make_case("hold: a new token", answers, new[1], 2, 2, new[0])
    yield make_case("hold: a void token", answers, refused_outcome(void), 1, 1, given[0])
    pending = problem_answer(error_of("token_pending"))
    over = pending | {"headers": pending["headers"] | {"Idempotency-TTL": "0"}}
    key = _CALLS["hold of a key"][0]
    yield make_case("hold: TTL, key, but it is over", [over, SUCCESS], UNKNOWN, 1, 1, key)


def _unfinished_cases() -> Iterator[Case]:
    released = _ends()["released"]
    for operation in ("hold", "settle", "release"):
        command, tokens = _unfinished("resolve", operation), int(operation == "hold")
        for what, answers, outcome in (
            ("done", [SUCCESS], {"outcome": "done", "applied": True}),
            ("lost, then done", [LOST, SUCCESS], {"outcome": "done", "applied": True}),
            ("released", [problem_answer(released)], refused_outcome(released)),
            ("refused", [LOST, problem_answer(error_of("namespace_unknown"))], UNKNOWN),
        ):
            name = f"resolve {operation}: {what}"
            yield make_case(name, answers, outcome, len(answers), tokens, command)
    command = _unfinished("cancel", "hold")
    settled = _ends()["settled"]
    for what, answers, outcome in (
        ("done", [LOST, SUCCESS], {"outcome": "done", "was_counted": False}),
        ("settled", [problem_answer(settled)], refused_outcome(settled)),
        ("lost, then settled", [LOST, problem_answer(settled)], refused_outcome(settled)),
    ):
        yield make_case(f"cancel hold: {what}", answers, outcome, len(answers), 1, command)


def _counts() -> Iterator[Case]:
    """What is held, beside a count."""
    done = {"outcome": "done", "count": str(COUNT), "accuracy": "accurate"}
    for members, more in (
        ({"held": COUNT}, {"held": str(COUNT)}),
        ({"held_down": -COUNT}, {"held_down": str(-COUNT)}),
    ):
        answer = SUCCESS | {"members": members}
        yield make_case(f"get: {members}", [answer], done | more, 1, 0, _HELD)
    others: list[Case] = [{"held": "1"}, {"held": 1.5}, {"held": 1, "held_down": None}]
    for each in others:
        answers: list[Case] = [SUCCESS | {"members": each}, SUCCESS]
        yield make_case(f"get: {each}: again", answers, done, 2, 0, _HELD)
    listed = [{**_OPEN, **_UNTIL}] * 2
    last = {"outcome": "done", "holds": listed}
    command = {"do": "holds", "counter": "c"}
    more_ = SUCCESS | {"members": {"next_page": "2"}}
    several = last | {"holds": listed * 2}
    yield make_case("holds: one page", [SUCCESS], last, 1, 0, command)
    yield make_case("holds: two pages", [more_, LOST, SUCCESS], several, 3, 0, command)
    changes: list[Case] = [{"members": {"next_page": 1}}, {"without": ["holds"]}]
    for change in changes:
        name = f"holds, {json.dumps(change)}: again"
        yield make_case(name, [SUCCESS | change, SUCCESS], last, 2, 0, command)
    changes = [{"members": {"hold": "AAAA"}}, {"without": ["state"]}]
    for change in changes:
        answers = [SUCCESS | change | {"of": "holds"}, SUCCESS]
        yield make_case(f"holds, one of {json.dumps(change)}: again", answers, last, 2, 0, command)


def hold_requests(calls: Calls) -> Iterator[tuple[Case, Call[Any]]]:
    """Return commands and their calls."""
    token, key = Token.parse(TOKEN_TEXT), Key(_KEY["key"])
    for bounds in (Bounds(), Bounds(at_least=0), Bounds(limits.INT64_MIN, limits.INT64_MAX)):
        text = {name: str(each) for name, each in bounds.members().items()}
        for counter, amount in (("a/b", 50), ("倉庫", limits.INT64_MIN)):
            command = {"do": "hold", "counter": counter, "amount": str(amount), **text}
            for given, shown in ((token, GIVEN), (key, _KEY)):
                yield (
                    command | {"expires_in": _LASTS} | shown,
                    calls.hold(counter, amount, _LASTS, given, bounds),
                )
    for name in (".", "a/b", "倉庫", "n" * limits.COUNTER_NAME_CHARS_MAX):
        hold = str(HoldId(Token(bytes(range(16)), 1_769_847_330_000_250), name))
        of_one = {"hold": hold}
        for amount in (0, -1, limits.INT64_MAX, limits.INT64_MIN):
            yield {"do": "settle", **of_one, "amount": str(amount)}, calls.settle(hold, amount)
        yield {"do": "release", **of_one}, calls.release(hold)
        yield {"do": "extend", **of_one, "expires_in": _LASTS}, calls.extend(hold, _LASTS)
        yield {"do": "get_hold", **of_one}, calls.get_hold(hold)
    yield {"do": "holds", "counter": "a/b"}, calls.holds("a/b", None)
    for token_text in (TOKEN_TEXT, "key:order-123"):
        for do, make in (("resolve", calls.resolve), ("cancel", calls.cancel_unfinished)):
            command = _unfinished(do, "hold", token_text)
            written = command["unfinished"].replace("COUNTER", "views")
            yield command | {"unfinished": written}, make(Unfinished.parse(written))
    for operation in ("settle", "release"):
        command = _unfinished("resolve", operation)
        written = command["unfinished"].replace("COUNTER", "views")
        yield command | {"unfinished": written}, calls.resolve(Unfinished.parse(written))


def hold_refusals() -> list[Case]:
    """Return commands whose arguments the client refuses."""
    over = str(limits.INT64_MAX + 1)
    hold = str(HoldId(Token(bytes(range(16)), 1_769_847_330_000_250), "c"))
    late = str(HoldId(Token(bytes(16), 253_402_300_800_000_000), "c"))
    empty = str(HoldId(Token(bytes(16), 0), ""))
    bad_ids = ("", "AAAA", f"{hold}=", f"{hold}A", hold[:-1] + "!", empty, late, "a/b")
    found: list[Case] = [{"do": "get_hold", "hold": each} for each in bad_ids]
    for do, more in (
        ("settle", {"amount": "1"}),
        ("release", {}),
        ("extend", {"expires_in": "1s"}),
    ):
        found += [{"do": do, "hold": each, **more} for each in bad_ids[:2]]
    one = {"do": "hold", "counter": "c", **_WANTED}
    found += [one | {"amount": over}, one | {"counter": ""}, one | {"at_most": over}]
    found += [one | {"at_least": "2", "at_most": "1"}, one | {"expires_in": ""}]
    found += [{"do": "settle", "hold": hold, "amount": over}, {"do": "holds", "counter": ""}]
    for operation in ("settle", "release"):
        found.append(_unfinished("cancel", operation))
        found.append(_unfinished("resolve", operation, "key:order-123"))
    for change in ({"expires_in": None}, {"expires_in": ""}, {"operation": "add"}):
        text = json.loads(_unfinished("resolve", "hold")["unfinished"]) | change
        found.append({"do": "resolve", "unfinished": json.dumps(text)})
    return found
