"""The cases of ``answers.json`` of adds, clears and single reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from api.document.problem_page import shapes
from api.http.problems import problem_of, problem_types
from clients.conformance.cases import (
    GIVEN,
    LOST,
    MISFITS,
    SUCCESS,
    TOKEN_TEXT,
    UNKNOWN,
    Case,
    Json,
    done_outcome,
    error_of,
    got_outcome,
    make_case,
    problem_answer,
    refused_outcome,
    results_answer,
)
from counter.errors import CounterError
from counter_client import transport

#: Dates of Retry-After: past every deadline, and over.
_FUTURE: Final = "Tue, 31 Dec 2199 23:59:59 GMT"
_PAST: Final = "Thu, 01 Jan 2015 00:00:00 GMT"


def add_cases() -> list[Case]:
    """Return the cases; the member that names the counter is still missing."""
    found = [case for kind in problem_types() for error in shapes(kind) for case in _of(error)]
    found += [*_foreign(), *_waits(), *_after_a_lost_answer(), *_other_calls(), *_horizons()]
    return [*found, *_misfits(), *_misfits_of_several(), *_resolves(), *_no_problems()]


def _of(error: CounterError) -> list[Case]:
    """The cases of each problem of the service."""
    # Else each retry would wait.
    error.retry_after_us = None
    name = f"{error.code}, applied {json.dumps(error.applied)}"
    problem = problem_answer(error)
    if error.retry == "same_token":
        return [
            make_case(f"{name}: again with the same token", [problem, SUCCESS], done_outcome(), 2)
        ]
    if error.retry == "never" and error.code != "token_too_old":
        return [
            make_case(f"{name}: refused at once", [problem, SUCCESS], refused_outcome(error), 1)
        ]
    given = GIVEN
    return [
        make_case(f"{name}: again with a new token", [problem, SUCCESS], done_outcome(), 2, 2),
        make_case(
            f"{name}, the program's token", [problem, SUCCESS], refused_outcome(error), 1, 1, given
        ),
    ]


def _foreign() -> list[Case]:
    """Answers that are not from a counter service."""
    page = {"headers": {"Content-Type": "text/html"}, "body": "<html>Sorry</html>"}
    json_type = {"Content-Type": "application/json"}
    found = [
        make_case(
            f"{status} with a page: again", [{"status": status, **page}, SUCCESS], done_outcome(), 2
        )
        for status in (200, 201, 203, 408, 425, 429, 500, 502, 503, 504, 520)
    ]
    found += [
        make_case(f"{status} with a page: not again", [{"status": status, **page}], UNKNOWN, 1)
        for status in (400, 401, 403, 404, 405, 409, 410, 413)
    ]
    redirect = {"Location": "/elsewhere"}
    found += [
        make_case(
            f"{status}: not followed",
            [{"status": status, "headers": redirect, "body": ""}],
            UNKNOWN,
            1,
        )
        for status in (301, 302, 303, 307, 308)
    ]
    bodies = {
        "nothing": "",
        "no JSON": "{",
        "null": "null",
        "a list": "[]",
        "a number": "1",
        "no members": "{}",
        "no time": '{"namespace":"default","counter":"c","delta":3,"replayed":false}',
        "deep": "[" * 20_000,
    }
    found += [
        make_case(
            f"200 with {what}: again",
            [{"status": 200, "headers": json_type, "body": body}, SUCCESS],
            done_outcome(),
            2,
        )
        for what, body in bodies.items()
    ]
    found += [
        make_case(
            f"{status} with JSON that is no problem",
            [{"status": status, "headers": json_type, "body": body}, SUCCESS],
            done_outcome() if status == 503 else UNKNOWN,
            2 if status == 503 else 1,
        )
        for status in (404, 503)
        for body in ("[]", '{"code":"not_found"}', '{"error":"gone"}')
    ]
    spaces = transport.ANSWER_ONE_BYTES_MAX + 1
    found += [
        make_case(
            "200, oversized: again",
            [{"success": True, "spaces": spaces}, SUCCESS],
            done_outcome(),
            2,
        ),
        make_case(
            "503, oversized: again",
            [{"status": 503, **page, "spaces": spaces}, SUCCESS],
            done_outcome(),
            2,
        ),
        make_case(
            "429 and 503 with pages",
            [{"status": 429, **page}, {"status": 503, **page}, SUCCESS],
            done_outcome(),
            3,
        ),
    ]
    return found


def _waits() -> list[Case]:
    """What the service asks to wait, as proxies write it; an hour is past the deadline."""
    known = problem_types()
    [overloaded] = [shapes(each)[0] for each in known if each.code == "overloaded"]
    overloaded.retry_after_us = None
    strange: Sequence[Json] = (0, -1, "soon", [], {}, None)
    late = ("3600", "99999999999999999999", _FUTURE)
    early = ("0", _PAST, "soon", "", "-5", "Thu, 99 Jan 2015 00:00:00 GMT")
    hour = [
        (each, problem_answer(overloaded, retry_after=each))
        for each in (3600, 3600.5, "3600", 1e300)
    ]
    none = [(each, problem_answer(overloaded, retry_after=each)) for each in strange]
    found = [
        *(
            make_case(f"Retry-After: {each}: too late", [_asking(each)], UNKNOWN, 1)
            for each in late
        ),
        *(
            make_case(
                f"Retry-After: {each!r}: at once", [_asking(each), SUCCESS], done_outcome(), 2
            )
            for each in early
        ),
        *(make_case(f"retry_after {each!r}: too late", [asks], UNKNOWN, 1) for each, asks in hour),
        *(
            make_case(f"retry_after {each!r}: at once", [asks, SUCCESS], done_outcome(), 2)
            for each, asks in none
        ),
    ]
    problem = problem_answer(overloaded, retry_after=3600)
    problem["headers"] = problem["headers"] | {"Retry-After": "0"}
    found.append(make_case("the problem's wait counts, not the header's", [problem], UNKNOWN, 1))
    problem = problem_answer(overloaded)
    problem["headers"] = problem["headers"] | {"Retry-After": "3600"}
    found.append(
        make_case("the header's wait counts if the problem has none", [problem], UNKNOWN, 1)
    )
    return found


def _asking(retry_after: str) -> Case:
    return {"status": 503, "headers": {"Retry-After": retry_after}, "body": "busy"}


def _after_a_lost_answer() -> list[Case]:
    """What a refusal says of the attempts before it."""
    found = [make_case("lost, then done", [LOST, SUCCESS], done_outcome(), 2)]
    for kind in problem_types():
        for error in shapes(kind):
            if error.retry == "never":
                error.retry_after_us = None
                conflicts = error.code in ("token_conflict", "hold_settled")
                decides = error.applied is False or conflicts
                outcome = refused_outcome(error) if decides else UNKNOWN
                name = f"lost, then {error.code}"
                found.append(make_case(name, [LOST, problem_answer(error), SUCCESS], outcome, 2))
    [too_old] = [shapes(each)[0] for each in problem_types() if each.code == "token_too_old"]
    void = problem_answer(too_old)
    found += [
        make_case("lost, then void: a new token", [LOST, void, SUCCESS], done_outcome(), 3, 2),
        make_case(
            "lost, then the program's token is void",
            [LOST, void],
            refused_outcome(too_old),
            2,
            1,
            GIVEN,
        ),
        make_case(
            "lost, then a redirect",
            [LOST, {"status": 302, "headers": {}, "body": ""}],
            UNKNOWN,
            2,
        ),
    ]
    return found


def _other_calls() -> list[Case]:
    """The same of calls other than an add."""
    by_code = {each.code: shapes(each)[0] for each in problem_types()}
    gone, busy = by_code["namespace_unknown"], by_code["store_unavailable"]
    conflict, too_old = by_code["token_conflict"], by_code["token_too_old"]
    gone.retry_after_us = busy.retry_after_us = None
    clear, get = {"do": "clear"}, {"do": "get"}
    two = {"items": [{"counter": "a", "delta": "1"}, {"counter": "b", "delta": "2"}]}
    atomic, batch = {"do": "atomic", **two}, {"do": "batch", **two}
    done = done_outcome(replayed=[False, False])
    again, out = problem_answer(busy), problem_answer(gone)
    page = {"status": 404, "headers": {"Content-Type": "text/html"}, "body": "<html>404</html>"}
    found = [
        make_case("clear: lost, again", [LOST, again, SUCCESS], done_outcome(), 3, 1, clear),
        make_case("clear: refused", [out], refused_outcome(gone), 1, 1, clear),
        make_case("atomic: lost, again", [LOST, again, SUCCESS], done, 3, 1, atomic),
        make_case("atomic: lost, then refused", [LOST, out], UNKNOWN, 2, 1, atomic),
        make_case("atomic: void", [problem_answer(too_old), SUCCESS], done, 2, 2, atomic),
        make_case("clear: 404 with a page", [page], UNKNOWN, 1, 1, clear),
        make_case("atomic: 404 with a page", [page], UNKNOWN, 1, 1, atomic),
        make_case("get: 404 with a page", [page], UNKNOWN, 1, 0, get),
        make_case("get: lost, again", [LOST, again, SUCCESS], got_outcome(), 3, 0, get),
        make_case("get: refused", [out], refused_outcome(gone), 1, 0, get),
        make_case("get: lost, then refused", [LOST, out], refused_outcome(gone), 2, 0, get),
    ]
    both = {"outcome": "done", "results": [done_outcome(), done_outcome()]}
    none = {"outcome": "done", "results": [refused_outcome(gone)] * 2}
    mixed = {"outcome": "done", "results": [done_outcome(), refused_outcome(conflict)]}
    found += [
        make_case("batch: done", [results_answer("added", "added")], both, 1, 2, batch),
        make_case(
            "batch: lost, again", [LOST, again, results_answer("added", "added")], both, 3, 2, batch
        ),
        make_case("batch: refused", [out], none, 1, 2, batch),
        make_case("batch: 404 with a page", [page], both | {"results": [UNKNOWN] * 2}, 1, 2, batch),
        make_case(
            "batch: one conflicts",
            [results_answer("added", problem_of(conflict))],
            mixed,
            1,
            2,
            batch,
        ),
        make_case(
            "batch: lost, then one refused",
            [LOST, results_answer("added", problem_of(gone))],
            {"outcome": "done", "results": [done_outcome(), UNKNOWN]},
            2,
            2,
            batch,
        ),
        make_case(
            "batch: one again, then refused",
            [results_answer("added", problem_of(busy)), results_answer(problem_of(gone))],
            {"outcome": "done", "results": [done_outcome(), UNKNOWN]},
            2,
            2,
            batch,
        ),
        make_case(
            "batch: one again, then a conflict",
            [results_answer("added", problem_of(busy)), results_answer(problem_of(conflict))],
            mixed,
            2,
            2,
            batch,
        ),
        make_case(
            "batch: one again",
            [results_answer("added", problem_of(busy)), results_answer("added")],
            both,
            2,
            2,
            batch,
        ),
        make_case(
            "batch: one void",
            [results_answer("added", problem_of(too_old)), results_answer("added")],
            both,
            2,
            3,
            batch,
        ),
        make_case(
            "batch: too few results",
            [results_answer("added"), results_answer("added", "added")],
            both,
            2,
            2,
            batch,
        ),
    ]
    return [*found, *_batches(batch, both)]


def _batches(batch: Case, both: Case) -> Iterator[Case]:
    """Batches of two items that are split, that wait, and whose tokens are too old to look up."""
    busy, gone, too_many = map(error_of, ("store_unavailable", "namespace_unknown", "invalid_body"))
    old = problem_of(error_of("token_too_old")) | {"retry": "never", "applied": None}
    void, again = problem_of(error_of("token_too_old")), problem_of(busy)
    limit = problem_answer(too_many, field="items")
    added = results_answer("added", "added")
    hour = {"retry_after": 3600}

    def case(
        name: str, answers: Sequence[Case], results: Sequence[Case], requests: int, tokens: int = 2
    ) -> Case:
        ends = both | {"results": results}
        return make_case(f"batch: {name}", answers, ends, requests, tokens, batch)

    done = done_outcome()
    for what, answer in (
        ("too many items", limit),
        ("too large", problem_answer(error_of("body_too_large"))),
    ):
        yield case(f"{what}: in two parts", [answer, SUCCESS], [done] * 2, 3)
        out = [answer, SUCCESS, problem_answer(gone)]
        yield case(f"{what}, and one part is refused", out, [done, refused_outcome(gone)], 3)
    other = [problem_answer(too_many, field="idempotency_token"), SUCCESS]
    yield case("another field is wrong", other, [refused_outcome(too_many)] * 2, 1)
    for what, late, tokens in (("waits", again, 2), ("is void", void, 3)):
        waits = [results_answer(again | hour, late), added]
        yield case(f"one waits long, and one {what}: the shortest", waits, [done] * 2, 2, tokens)
    waits = [results_answer(problem_of(gone) | hour, again), results_answer("added")]
    yield case("a refused one waits for nothing", waits, [refused_outcome(gone), done], 2)
    unknown = [done, UNKNOWN]
    last = results_answer("added", old), results_answer("added")
    yield case("one too old: a new token", last, [done] * 2, 2, 3)
    yield case("lost, then one too old", [LOST, last[0]], unknown, 2)
    first = results_answer("added", again)
    yield case("one again, then too old", [first, results_answer(old)], unknown, 2)


def _horizons() -> list[Case]:
    """How long the service honours a token or a key, by ``Idempotency-TTL``."""
    by_code = {each.code: shapes(each)[0] for each in problem_types()}
    key = {"do": "add", "delta": "3", "key": "order-123"}
    two = {"items": [{"counter": "a", "delta": "1"}, {"counter": "b", "delta": "2"}]}

    def kept(ttl: str, code: str = "overloaded") -> Case:
        by_code[code].retry_after_us = None
        found = problem_answer(by_code[code])
        return found | {"headers": found["headers"] | {"Idempotency-TTL": ttl}}

    def resolve(until: str) -> Case:
        token_text, items = TOKEN_TEXT, [["COUNTER", 3]]
        open_ = {"operation": "add", "namespace": "default", "items": items}
        text = json.dumps(open_ | {"token_text": token_text, "until": until})
        return {"do": "resolve", "unfinished": text}

    void, batch = kept("0", "token_too_old"), {"do": "batch", **two}
    unknown = {"outcome": "done", "results": [UNKNOWN] * 2}
    strange = ("soon", "-5", "", "1.5", "99999999999999999999")
    return [
        make_case("TTL, old token: not again", [kept("3600"), SUCCESS], UNKNOWN, 1, 1, GIVEN),
        make_case("TTL, own token: again", [kept("3600"), SUCCESS], done_outcome(), 2),
        make_case("TTL, own token, but it is over", [kept("0"), SUCCESS], UNKNOWN, 1),
        make_case("TTL, own token, void: a new one", [void, SUCCESS], done_outcome(), 2, 2),
        make_case("TTL, key: again", [kept("3600"), SUCCESS], done_outcome(), 2, 1, key),
        make_case("TTL, key, but it is over", [kept("0"), SUCCESS], UNKNOWN, 1, 1, key),
        make_case("TTLs: the earliest", [kept("3600"), kept("0"), SUCCESS], UNKNOWN, 2, 1, key),
        *(
            make_case(
                f"TTL {each!r}, old token: again",
                [kept(each), SUCCESS],
                done_outcome(),
                2,
                1,
                GIVEN,
            )
            for each in strange
        ),
        make_case("batch: TTL is over", [kept("0")], unknown, 1, 2, batch),
        make_case("resolve: over", [SUCCESS], UNKNOWN, 0, 0, resolve("2026-02-01T00:00:00Z")),
        make_case(
            "resolve: in time",
            [SUCCESS],
            {"outcome": "done", "applied": True},
            *(1, 1, resolve("2199-12-31T23:59:59.999999Z")),
        ),
    ]


_OF_CLEAR: Final = ("namespace", "counter", "event_time", "replayed", "retry_safe")
_OF_ADD: Final = (*_OF_CLEAR, "delta")
_MEMBERS: Final[Mapping[str, Sequence[str]]] = {
    "add": _OF_ADD,
    "add_and_get": (*_OF_ADD, "count", "as_of"),
    "clear": _OF_CLEAR,
    "delete": _OF_CLEAR,
    "atomic": _OF_ADD,
    "batch": _OF_ADD,
    "get": ("namespace", "counter", "count", "as_of", "accuracy"),
}
_PAIR: Final = {"items": [{"counter": "a", "delta": "1"}, {"counter": "b", "delta": "1"}]}


def _command(do: str) -> tuple[Case, Case, int]:
    """Return a command, its outcome after a proper answer, and how many tokens it sends."""
    both = {"outcome": "done", "results": [done_outcome(), done_outcome()]}
    match do:
        case "get":
            return {"do": do}, got_outcome(), 0
        case "batch":
            return {"do": do, **_PAIR}, both, 2
        case "atomic":
            return {"do": do, **_PAIR, **GIVEN}, done_outcome(replayed=[False, False]), 1
        case "add_and_get":
            return {"do": do, "delta": "1", **GIVEN}, done_outcome(count="18446744073709551616"), 1
    return {"do": do, "delta": "1", **GIVEN}, done_outcome(), 1


def _misfits() -> list[Case]:
    """Each member of each answer that is missing, or does not fit the request: again."""
    found = []
    for do, members in _MEMBERS.items():
        command, done, tokens = _command(do)
        changes: list[tuple[str, Case]] = [
            (f"{name} {json.dumps(value)}", {"members": {name: value}})
            for name in members
            for value in MISFITS[name]
        ]
        needed = [name for name in members if name != "retry_safe"]
        changes += [(f"no {name}", {"without": [name]}) for name in needed]
        # Members are found by their exact names.
        capital = {"without": ["counter"], "members": {"Counter": "COUNTER"}}
        changes.append(("a member in other letters", capital))
        found += [
            make_case(f"{do}, {what}: again", [SUCCESS | change, SUCCESS], done, 2, tokens, command)
            for what, change in changes
        ]
        more = {"members": {"later": [1]}}
        found.append(make_case(f"{do}, more", [SUCCESS | more], done, 1, tokens, command))
    found += [
        make_case(
            "add, another time of a token of its own: again",
            [SUCCESS | {"members": {"event_time": "2026-01-31T08:15:30.000250Z"}}, SUCCESS],
            done_outcome(),
            2,
        ),
        make_case(
            "add, the time of a BEST_EFFORT namespace",
            [SUCCESS | {"members": {"event_time": _LATER, "retry_safe": False}}],
            done_outcome(),
            1,
        ),
        make_case(
            "add, the time of a key",
            [SUCCESS | {"members": {"event_time": _LATER}}],
            *(done_outcome(), 1, 1, {"key": "order-123"}),
        ),
    ]
    return found


_LATER: Final = "2026-01-31T09:00:00.000000Z"


def _misfits_of_several() -> list[Case]:
    """Results that are too few, too many, in another order, or of another kind."""
    found = []
    for do in ("atomic", "batch"):
        command, done, tokens = _command(do)
        answers: dict[str, Case] = {
            "no result": results_answer(),
            "one result": results_answer("added"),
            "three results": results_answer("added", "added", "added"),
            "another order": SUCCESS | {"reversed": True},
            "a result null": results_answer("added", None),
            "a result text": results_answer("added", "counted"),
            "a result without members": results_answer("added", {}),
            "a code alone": results_answer("added", {"code": "overloaded"}),
            "a code that is a number": results_answer("added", {"code": 1, "retry": "never"}),
            "a retry that is unknown": results_answer("added", {"code": "x", "retry": "soon"}),
        }
        for text in ("{}", "null", "[]", '{"results":null}', '{"results":{}}', '{"results":2}'):
            answers[text] = {"status": 200, "headers": {}, "body": text}
        found += [
            make_case(f"{do}, {what}: again", [answer, SUCCESS], done, 2, tokens, command)
            for what, answer in answers.items()
        ]
    return found


def _resolves() -> list[Case]:
    """An add is counted only if the answer to it says so."""
    done = {"outcome": "done", "applied": True}
    by_code = {each.code: shapes(each)[0] for each in problem_types()}
    too_old = problem_answer(by_code["token_too_old"], applied="false")
    undecided = {"outcome": "refused", "code": "token_too_old", "applied": None}
    found = []
    for operation in ("add", "add-and-get", "clear", "delete", "atomic/add"):
        delta = 0 if operation in ("clear", "delete") else 1
        items = [["COUNTER", delta]]
        if operation == "atomic/add":
            items.append(["COUNTER-b", delta])
        open_ = {"operation": operation, "namespace": "default", "items": items}
        text = json.dumps(open_ | {"token_text": TOKEN_TEXT})
        command = {"do": "resolve", "unfinished": text}
        bodies = ("{}", "null", "[]", "true", "", '{"status": "ok"}', '{"results": []}', "<html>")
        strange: dict[str, Case] = {
            each: {"status": 200, "headers": {}, "body": each} for each in bodies
        }
        strange["201"] = {"status": 201, "headers": {}, "body": "{}"}
        strange["204"] = {"status": 204, "headers": {}, "body": ""}
        for name in ("counter", "namespace"):
            strange[f"another {name}"] = SUCCESS | {"members": {name: "other"}}
        found += [
            make_case(f"resolve {operation}, {what}: again", [answer, SUCCESS], done, 2, 1, command)
            for what, answer in strange.items()
        ]
        found.append(make_case(f"resolve {operation}", [SUCCESS], done, 1, 1, command))
        found.append(
            make_case(f"resolve {operation}: applied is text", [too_old], undecided, 1, 1, command)
        )
    return found


def _no_problems() -> list[Case]:
    """Errors whose members are not those of a problem: only the service refuses."""
    problem = {"code": "namespace_unknown", "retry": "never", "applied": None, "detail": "gone"}
    changes: Sequence[Case] = (
        *({"code": each} for each in (None, 1, True, ["x"])),
        *({"retry": each} for each in (None, 1, "", "soon", "Never")),
    )
    found = []
    for change in changes:
        body = json.dumps(problem | change)
        name, value = next(iter(change.items()))
        for status in (404, 503):
            again = status == 503
            found.append(
                make_case(
                    f"{status}, {name} {json.dumps(value)}",
                    [{"status": status, "headers": {}, "body": body}, SUCCESS],
                    done_outcome() if again else UNKNOWN,
                    2 if again else 1,
                )
            )
    capital = json.dumps({name.title(): value for name, value in problem.items()})
    answer = {"status": 404, "headers": {}, "body": capital}
    found.append(make_case("404, members in other letters", [answer, SUCCESS], UNKNOWN, 1))
    return found
