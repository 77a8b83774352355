"""Make the vectors from the code of the service and of the Python SDK.

Run ``python -m clients.conformance.make_vectors`` after a change of either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from api.document.problem_page import shapes
from api.http.problems import problem_of, problem_types
from counter import limits
from counter.clock import to_rfc3339
from counter.errors import CounterError
from counter.names import REFUSED
from counter.tokens import format_nonce
from counter_client import tokens, transport
from counter_client.answers import Added
from counter_client.calls import Call, Calls
from counter_client.errors import InvalidParameterError
from counter_client.options import Options
from counter_client.retrying import Budget, Policy
from counter_client.tokens import Credential, Key, Token

VECTORS: Final = Path(__file__).parent / "vectors"
Json = Any
Case = dict[str, Json]

_NONCE: Final = "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b"
_TEXTS: Final = (
    f"{_NONCE}@2026-01-31T08:15:30.000250Z",
    f"{_NONCE.upper()}@2026-01-31T08:15:30.000250Z",
    f"{_NONCE}@2026-01-31T08:15:30Z",
    f"{_NONCE}@2026-01-31T08:15:30.25Z",
    f"{_NONCE}@2026-01-31T10:15:30.000250+02:00",
    f"{_NONCE}@2026-01-31t03:15:30.000250-05:00",
    "00000000-0000-0000-0000-000000000000@2000-01-01T00:00:00.000000Z",
    "ffffffff-ffff-ffff-ffff-ffffffffffff@2199-12-31T23:59:59.999999Z",
    f"{_NONCE}@2028-02-29T23:59:59.999999Z",
    "",
    _NONCE,
    f"{_NONCE}@",
    f"{_NONCE}@2026-01-31T08:15:30.000250",
    f"{_NONCE}@2026-01-31T08:15:30.0002501Z",
    f"{_NONCE}@2026-02-29T08:15:30Z",
    f"{_NONCE}@2026-01-31",
    f"{_NONCE}@1769847330",
    "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4@2026-01-31T08:15:30.000250Z",
    "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4g@2026-01-31T08:15:30.000250Z",
    "order-123",
    "key:order-123",
    "key:o",
    "key:with spaces inside",
    "key:key:nested",
    'key:"quoted"',
    "key:" + "k" * limits.IDEMPOTENCY_KEY_CHARS_MAX,
    "key:",
    "key: leading",
    "key:trailing ",
    "key:tab\tinside",
    "key:line\nbreak",
    "key:grün",
    "key:" + "k" * (limits.IDEMPOTENCY_KEY_CHARS_MAX + 1),
)
_LABELS: Final = (
    *("a", "step-1", "step-2", "Lager/Süd", "倉庫", "🙂", " ", "\x00"),
    "l" * tokens.DERIVE_LABEL_CHARS_MAX,
    "ü" * tokens.DERIVE_LABEL_CHARS_MAX,
    "🙂" * tokens.DERIVE_LABEL_CHARS_MAX,
)
#: Around the code points that no name holds.
_EDGES: Final = sorted({one - 1 for one, _ in REFUSED if one} | {two + 1 for _, two in REFUSED})
_NAMES: Final = (
    *(f"a{chr(each)}b" for each in _EDGES if each <= sys.maxunicode),
    # Not assigned in some versions of Unicode, in any, and never.
    *("\U0001fae8", "a\u0378b", "\ufdd0", "\uffff"),
    # Emoji of joiners, variation selectors and tags; and other joiners.
    *("\U0001f3f3\ufe0f\u200d\U0001f308", "\u0646\u200c\u0645", "a\u200db"),
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    *("views", "a/b", ".", "..", "a.b", "a b", "100%", "a+b", "a?b#c", "-._~", "!$&'()*,;=:@"),
    *("Süd", "倉庫", "🙂", "%2F", '"q"', "back\\slash", "n" * limits.COUNTER_NAME_CHARS_MAX),
    "🙂" * limits.COUNTER_NAME_CHARS_MAX,
)
_BAD_NAMES: Final = (
    "",
    "n" * (limits.COUNTER_NAME_CHARS_MAX + 1),
    "line\nbreak",
    "nul\x00",
    # No text of JSON holds a surrogate.
    *(f"a{chr(each)}b" for edges in REFUSED for each in edges if each != 0xD800),
)
#: Dates of Retry-After: past every deadline, and over.
_FUTURE: Final = "Tue, 31 Dec 2199 23:59:59 GMT"
_PAST: Final = "Thu, 01 Jan 2015 00:00:00 GMT"
_SUCCESS: Final = {"success": True}
_LOST: Final = {"lost": True}
_GIVEN: Final = {"token": {"token": _NONCE, "generation_time": "2026-01-31T08:15:30.000250Z"}}


def shown(credential: Credential) -> Case:
    """Return *credential* as commands and outcomes have it."""
    if isinstance(credential, Key):
        return {"key": credential.text}
    nonce, time_us = credential
    return {"token": {"token": format_nonce(nonce), "generation_time": to_rfc3339(time_us)}}


def token_vectors() -> list[Case]:
    """Return texts and what parsing them returns."""
    found: list[Case] = []
    for text in _TEXTS:
        case: Case = {"text": text, "refused": True}
        with suppress(InvalidParameterError):
            case = {"text": text, **shown(Token.parse(text))}
        found.append(case)
    return found


def derivation_vectors() -> list[Case]:
    """Return tokens and keys derived from others, a second time from the derived ones too."""
    parents: list[Credential] = [
        Token.parse(_TEXTS[0]),
        Token.parse(_TEXTS[6]),
        Key("order-123"),
        Key("k" * limits.IDEMPOTENCY_KEY_CHARS_MAX),
    ]
    parents += [_derived(each, "first") for each in (parents[0], parents[2])]
    found = [
        {"from": shown(each), "label": label, "derived": shown(_derived(each, label))}
        for each in parents
        for label in _LABELS
    ]
    too_long = "l" * (tokens.DERIVE_LABEL_CHARS_MAX + 1)
    refused = [
        {"from": shown(each), "label": label, "refused": True}
        for each in (parents[0], parents[2])
        for label in ("", too_long)
    ]
    return found + refused


def _derived(credential: Credential, label: str) -> Credential:
    if isinstance(credential, Key):
        return credential.derive(label)
    return Token(*credential).derive(label)


def request_vectors() -> list[Case]:
    """Return commands and the requests that they send."""
    calls = Calls("default")
    token, key = Token.parse(_TEXTS[0]), Key("order-123")
    most, least = limits.INT64_MAX, limits.INT64_MIN
    pairs = [("a/b", most), ("倉庫", least), ("views", 0)]
    items = [{"counter": counter, "delta": str(delta)} for counter, delta in pairs]
    found: list[tuple[Case, Call[Any]]] = [
        (_add(name, 1) | shown(token), calls.add(name, 1, token)) for name in _NAMES
    ]
    found += [
        (_add("views", delta) | shown(token), calls.add("views", delta, token))
        for delta in (0, -1, 2**53 + 1, most, least)
    ]
    for each in (token, key, Key('with "quotes" and spaces')):
        found += [
            (_add("views", 3) | shown(each), calls.add("views", 3, each)),
            (
                _add("views", 3) | {"do": "add_and_get"} | shown(each),
                calls.add_and_get("views", 3, each),
            ),
            ({"do": "clear", "counter": "a/b"} | shown(each), calls.clear("a/b", each)),
            ({"do": "delete", "counter": "a/b"} | shown(each), calls.delete("a/b", each)),
            ({"do": "atomic", "items": items} | shown(each), calls.atomic(pairs, each)),
        ]
    found += [({"do": "get", "counter": name}, calls.get(name, None)) for name in _NAMES]
    found.append(
        ({"do": "get", "counter": "views", "max_staleness": "5s"}, calls.get("views", "5s"))
    )
    return [{"command": command, "request": _request(call)} for command, call in found]


def _add(counter: str, delta: int) -> Case:
    return {"do": "add", "counter": counter, "delta": str(delta)}


def _request(call: Call[Any]) -> Case:
    request = call.request
    headers = dict(request.headers)
    return {
        "method": request.method,
        "path": request.path,
        "key": headers.get("Idempotency-Key"),
        "body": None if request.body is None else json.loads(request.body),
    }


#: Any answer without results would fit it.
_OF_NOTHING: Final = {
    "operation": "atomic/add",
    "namespace": "default",
    "items": [],
    "token_text": _TEXTS[0],
}


def refused_vectors() -> list[Case]:
    """Return commands whose arguments the client refuses."""
    over = [{"counter": "c", "delta": "1"}] * (limits.ATOMIC_ITEMS_MAX + 1)
    found = [
        *(_add(name, 1) for name in _BAD_NAMES),
        *(_add("c", delta) for delta in (limits.INT64_MAX + 1, limits.INT64_MIN - 1)),
        *({"do": "get", "counter": name} for name in _BAD_NAMES),
        {"do": "clear", "counter": ""},
        {"do": "atomic", "items": []},
        {"do": "atomic", "items": over},
        {"do": "resolve", "unfinished": "{}"},
        {"do": "resolve", "unfinished": "no JSON"},
        {"do": "resolve", "unfinished": json.dumps(_OF_NOTHING)},
        _add("c", 1) | {"key": ""},
        _add("c", 1) | {"key": "grün"},
    ]
    calls = Calls("default")
    for each in found:
        if each["do"] == "add" and "key" not in each:
            _must_refuse(calls.add, each["counter"], int(each["delta"]), None)
    return found


def _must_refuse(make: Callable[..., Call[Added]], *arguments: object) -> None:
    with suppress(InvalidParameterError):
        make(*arguments)
        raise ValueError(f"the SDK takes {arguments}")


def answer_vectors() -> list[Case]:
    """Return answers to a call and its outcome."""
    found = [case for kind in problem_types() for error in shapes(kind) for case in _of(error)]
    found += [*_foreign(), *_waits(), *_after_a_lost_answer(), *_other_calls(), *_horizons()]
    found += [*_misfits(), *_misfits_of_several(), *_resolves(), *_no_problems()]
    for number, case in enumerate(found):
        # The name selects the case; the same with every credential.
        if "items" in case["command"]:
            items = case["command"]["items"]
            named = [each | {"counter": f"{number}-{at}"} for at, each in enumerate(items)]
            case["command"]["items"] = named
        elif "unfinished" in case["command"]:
            text = case["command"]["unfinished"].replace("COUNTER", f"{number}-0")
            case["command"]["unfinished"] = text
        else:
            case["command"]["counter"] = f"{number}-0"
    return found


def _case(
    name: str,
    answers: Sequence[Case],
    outcome: Case,
    requests: int,
    tokens: int = 1,
    command: Mapping[str, Json] | None = None,
) -> Case:
    return {
        "name": name,
        "command": {"do": "add", "delta": "3"} | dict(command or {}),
        "answers": list(answers),
        "outcome": outcome,
        "requests": requests,
        "tokens": tokens,
    }


def _problem(error: CounterError, **more: Json) -> Case:
    body = problem_of(error) | more
    kind = {"Content-Type": "application/problem+json"}
    return {"status": error.status, "headers": kind, "body": json.dumps(body, ensure_ascii=False)}


def _done(**more: Json) -> Case:
    return {"outcome": "done", "replayed": False} | more


def _refused(error: CounterError) -> Case:
    return {"outcome": "refused", "code": error.code, "applied": error.applied}


_UNKNOWN: Final = {"outcome": "unknown"}


def _of(error: CounterError) -> list[Case]:
    """The cases of each problem of the service."""
    # Else each retry would wait.
    error.retry_after_us = None
    name = f"{error.code}, applied {json.dumps(error.applied)}"
    problem = _problem(error)
    if error.retry == "same_token":
        return [_case(f"{name}: again with the same token", [problem, _SUCCESS], _done(), 2)]
    if error.retry == "never":
        return [_case(f"{name}: refused at once", [problem, _SUCCESS], _refused(error), 1)]
    given = _GIVEN
    return [
        _case(f"{name}: again with a new token", [problem, _SUCCESS], _done(), 2, 2),
        _case(f"{name}, the program's token", [problem, _SUCCESS], _refused(error), 1, 1, given),
    ]


def _foreign() -> list[Case]:
    """Answers that are not from a counter service."""
    page = {"headers": {"Content-Type": "text/html"}, "body": "<html>Sorry</html>"}
    json_type = {"Content-Type": "application/json"}
    found = [
        _case(f"{status} with a page: again", [{"status": status, **page}, _SUCCESS], _done(), 2)
        for status in (200, 201, 203, 408, 425, 429, 500, 502, 503, 504, 520)
    ]
    found += [
        _case(f"{status} with a page: not again", [{"status": status, **page}], _UNKNOWN, 1)
        for status in (400, 401, 403, 404, 405, 409, 410, 413)
    ]
    redirect = {"Location": "/elsewhere"}
    found += [
        _case(
            f"{status}: not followed",
            [{"status": status, "headers": redirect, "body": ""}],
            _UNKNOWN,
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
        _case(
            f"200 with {what}: again",
            [{"status": 200, "headers": json_type, "body": body}, _SUCCESS],
            _done(),
            2,
        )
        for what, body in bodies.items()
    ]
    found += [
        _case(
            f"{status} with JSON that is no problem",
            [{"status": status, "headers": json_type, "body": body}, _SUCCESS],
            _done() if status == 503 else _UNKNOWN,
            2 if status == 503 else 1,
        )
        for status in (404, 503)
        for body in ("[]", '{"code":"not_found"}', '{"error":"gone"}')
    ]
    spaces = transport.ANSWER_ONE_BYTES_MAX + 1
    found += [
        _case("200, oversized: again", [{"success": True, "spaces": spaces}, _SUCCESS], _done(), 2),
        _case(
            "503, oversized: again",
            [{"status": 503, **page, "spaces": spaces}, _SUCCESS],
            _done(),
            2,
        ),
        _case(
            "429 and 503 with pages",
            [{"status": 429, **page}, {"status": 503, **page}, _SUCCESS],
            _done(),
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
        (each, _problem(overloaded, retry_after=each)) for each in (3600, 3600.5, "3600", 1e300)
    ]
    none = [(each, _problem(overloaded, retry_after=each)) for each in strange]
    found = [
        *(_case(f"Retry-After: {each}: too late", [_asking(each)], _UNKNOWN, 1) for each in late),
        *(
            _case(f"Retry-After: {each!r}: at once", [_asking(each), _SUCCESS], _done(), 2)
            for each in early
        ),
        *(_case(f"retry_after {each!r}: too late", [asks], _UNKNOWN, 1) for each, asks in hour),
        *(
            _case(f"retry_after {each!r}: at once", [asks, _SUCCESS], _done(), 2)
            for each, asks in none
        ),
    ]
    problem = _problem(overloaded, retry_after=3600)
    problem["headers"] = problem["headers"] | {"Retry-After": "0"}
    found.append(_case("the problem's wait counts, not the header's", [problem], _UNKNOWN, 1))
    problem = _problem(overloaded)
    problem["headers"] = problem["headers"] | {"Retry-After": "3600"}
    found.append(_case("the header's wait counts if the problem has none", [problem], _UNKNOWN, 1))
    return found


def _asking(retry_after: str) -> Case:
    return {"status": 503, "headers": {"Retry-After": retry_after}, "body": "busy"}


def _after_a_lost_answer() -> list[Case]:
    """What a refusal says of the attempts before it."""
    found = [_case("lost, then done", [_LOST, _SUCCESS], _done(), 2)]
    for kind in problem_types():
        for error in shapes(kind):
            if error.retry == "never":
                error.retry_after_us = None
                decides = error.code == "token_conflict"
                outcome = _refused(error) if decides else _UNKNOWN
                name = f"lost, then {error.code}"
                found.append(_case(name, [_LOST, _problem(error), _SUCCESS], outcome, 2))
    [too_old] = [shapes(each)[0] for each in problem_types() if each.code == "token_too_old"]
    void = _problem(too_old)
    found += [
        _case("lost, then void: a new token", [_LOST, void, _SUCCESS], _done(), 3, 2),
        _case(
            "lost, then the program's token is void", [_LOST, void], _refused(too_old), 2, 1, _GIVEN
        ),
        _case(
            "lost, then a redirect",
            [_LOST, {"status": 302, "headers": {}, "body": ""}],
            _UNKNOWN,
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
    done = _done(replayed=[False, False])
    again, out = _problem(busy), _problem(gone)
    page = {"status": 404, "headers": {"Content-Type": "text/html"}, "body": "<html>404</html>"}
    found = [
        _case("clear: lost, again", [_LOST, again, _SUCCESS], _done(), 3, 1, clear),
        _case("clear: refused", [out], _refused(gone), 1, 1, clear),
        _case("atomic: lost, again", [_LOST, again, _SUCCESS], done, 3, 1, atomic),
        _case("atomic: lost, then refused", [_LOST, out], _UNKNOWN, 2, 1, atomic),
        _case("atomic: void", [_problem(too_old), _SUCCESS], done, 2, 2, atomic),
        _case("clear: 404 with a page", [page], _UNKNOWN, 1, 1, clear),
        _case("atomic: 404 with a page", [page], _UNKNOWN, 1, 1, atomic),
        _case("get: 404 with a page", [page], _UNKNOWN, 1, 0, get),
        _case("get: lost, again", [_LOST, again, _SUCCESS], _got(), 3, 0, get),
        _case("get: refused", [out], _refused(gone), 1, 0, get),
        _case("get: lost, then refused", [_LOST, out], _refused(gone), 2, 0, get),
    ]
    both = {"outcome": "done", "results": [_done(), _done()]}
    none = {"outcome": "done", "results": [_refused(gone)] * 2}
    mixed = {"outcome": "done", "results": [_done(), _refused(conflict)]}
    found += [
        _case("batch: done", [_results("added", "added")], both, 1, 2, batch),
        _case("batch: lost, again", [_LOST, again, _results("added", "added")], both, 3, 2, batch),
        _case("batch: refused", [out], none, 1, 2, batch),
        _case("batch: 404 with a page", [page], both | {"results": [_UNKNOWN] * 2}, 1, 2, batch),
        _case(
            "batch: one conflicts",
            [_results("added", problem_of(conflict))],
            mixed,
            1,
            2,
            batch,
        ),
        _case(
            "batch: lost, then one refused",
            [_LOST, _results("added", problem_of(gone))],
            {"outcome": "done", "results": [_done(), _UNKNOWN]},
            2,
            2,
            batch,
        ),
        _case(
            "batch: one again, then refused",
            [_results("added", problem_of(busy)), _results(problem_of(gone))],
            {"outcome": "done", "results": [_done(), _UNKNOWN]},
            2,
            2,
            batch,
        ),
        _case(
            "batch: one again, then a conflict",
            [_results("added", problem_of(busy)), _results(problem_of(conflict))],
            mixed,
            2,
            2,
            batch,
        ),
        _case(
            "batch: one again",
            [_results("added", problem_of(busy)), _results("added")],
            both,
            2,
            2,
            batch,
        ),
        _case(
            "batch: one void",
            [_results("added", problem_of(too_old)), _results("added")],
            both,
            2,
            3,
            batch,
        ),
        _case(
            "batch: too few results",
            [_results("added"), _results("added", "added")],
            both,
            2,
            2,
            batch,
        ),
    ]
    return found


def _horizons() -> list[Case]:
    """How long the service honours a token or a key, by ``Idempotency-TTL``."""
    by_code = {each.code: shapes(each)[0] for each in problem_types()}
    key = {"do": "add", "delta": "3", "key": "order-123"}
    two = {"items": [{"counter": "a", "delta": "1"}, {"counter": "b", "delta": "2"}]}

    def kept(ttl: str, code: str = "overloaded") -> Case:
        by_code[code].retry_after_us = None
        found = _problem(by_code[code])
        return found | {"headers": found["headers"] | {"Idempotency-TTL": ttl}}

    def resolve(until: str) -> Case:
        token_text, items = _TEXTS[0], [["COUNTER", 3]]
        open_ = {"operation": "add", "namespace": "default", "items": items}
        text = json.dumps(open_ | {"token_text": token_text, "until": until})
        return {"do": "resolve", "unfinished": text}

    void, batch = kept("0", "token_too_old"), {"do": "batch", **two}
    unknown = {"outcome": "done", "results": [_UNKNOWN] * 2}
    strange = ("soon", "-5", "", "1.5", "99999999999999999999")
    return [
        _case("TTL, old token: not again", [kept("3600"), _SUCCESS], _UNKNOWN, 1, 1, _GIVEN),
        _case("TTL, own token: again", [kept("3600"), _SUCCESS], _done(), 2),
        _case("TTL, own token, but it is over", [kept("0"), _SUCCESS], _UNKNOWN, 1),
        _case("TTL, own token, void: a new one", [void, _SUCCESS], _done(), 2, 2),
        _case("TTL, key: again", [kept("3600"), _SUCCESS], _done(), 2, 1, key),
        _case("TTL, key, but it is over", [kept("0"), _SUCCESS], _UNKNOWN, 1, 1, key),
        _case("TTLs: the earliest", [kept("3600"), kept("0"), _SUCCESS], _UNKNOWN, 2, 1, key),
        *(
            _case(f"TTL {each!r}, old token: again", [kept(each), _SUCCESS], _done(), 2, 1, _GIVEN)
            for each in strange
        ),
        _case("batch: TTL is over", [kept("0")], unknown, 1, 2, batch),
        _case("resolve: over", [_SUCCESS], _UNKNOWN, 0, 0, resolve("2026-02-01T00:00:00Z")),
        _case(
            "resolve: in time",
            [_SUCCESS],
            {"outcome": "done", "applied": True},
            *(1, 1, resolve("2199-12-31T23:59:59.999999Z")),
        ),
    ]


#: Values that do not fit, by the member of an answer. The delta is 1, which is no boolean.
_NO_TIMES: Final = (None, "soon", 1769847330, "2026-01-31", "2026-01-31T08:15:30.000250")
_MISFITS: Final[Mapping[str, Sequence[Json]]] = {
    "namespace": (None, "other", 1),
    "counter": (None, "other", ""),
    "delta": (None, 2, -1, "1", True, 1.5),
    "event_time": (*_NO_TIMES, "2026-01-31T08:15:30.000251Z"),
    "replayed": ("false", 0, "null"),
    "retry_safe": (None, "false", 0),
    "count": (None, "1", 1.5, True),
    "as_of": _NO_TIMES,
    "accuracy": (None, "exact", 1),
}
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
    both = {"outcome": "done", "results": [_done(), _done()]}
    match do:
        case "get":
            return {"do": do}, _got(), 0
        case "batch":
            return {"do": do, **_PAIR}, both, 2
        case "atomic":
            return {"do": do, **_PAIR, **_GIVEN}, _done(replayed=[False, False]), 1
        case "add_and_get":
            return {"do": do, "delta": "1", **_GIVEN}, _done(count="18446744073709551616"), 1
    return {"do": do, "delta": "1", **_GIVEN}, _done(), 1


def _misfits() -> list[Case]:
    """Each member of each answer that is missing, or does not fit the request: again."""
    found = []
    for do, members in _MEMBERS.items():
        command, done, tokens = _command(do)
        changes: list[tuple[str, Case]] = [
            (f"{name} {json.dumps(value)}", {"members": {name: value}})
            for name in members
            for value in _MISFITS[name]
        ]
        needed = [name for name in members if name != "retry_safe"]
        changes += [(f"no {name}", {"without": [name]}) for name in needed]
        # Members are found by their exact names.
        capital = {"without": ["counter"], "members": {"Counter": "COUNTER"}}
        changes.append(("a member in other letters", capital))
        found += [
            _case(f"{do}, {what}: again", [_SUCCESS | change, _SUCCESS], done, 2, tokens, command)
            for what, change in changes
        ]
        more = {"members": {"later": [1]}}
        found.append(_case(f"{do}, more", [_SUCCESS | more], done, 1, tokens, command))
    found += [
        _case(
            "add, another time of a token of its own: again",
            [_SUCCESS | {"members": {"event_time": "2026-01-31T08:15:30.000250Z"}}, _SUCCESS],
            _done(),
            2,
        ),
        _case(
            "add, the time of a BEST_EFFORT namespace",
            [_SUCCESS | {"members": {"event_time": _LATER, "retry_safe": False}}],
            _done(),
            1,
        ),
        _case(
            "add, the time of a key",
            [_SUCCESS | {"members": {"event_time": _LATER}}],
            *(_done(), 1, 1, {"key": "order-123"}),
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
            "no result": _results(),
            "one result": _results("added"),
            "three results": _results("added", "added", "added"),
            "another order": _SUCCESS | {"reversed": True},
            "a result null": _results("added", None),
            "a result text": _results("added", "counted"),
            "a result without members": _results("added", {}),
            "a code alone": _results("added", {"code": "overloaded"}),
            "a code that is a number": _results("added", {"code": 1, "retry": "never"}),
            "a retry that is unknown": _results("added", {"code": "x", "retry": "soon"}),
        }
        for text in ("{}", "null", "[]", '{"results":null}', '{"results":{}}', '{"results":2}'):
            answers[text] = {"status": 200, "headers": {}, "body": text}
        found += [
            _case(f"{do}, {what}: again", [answer, _SUCCESS], done, 2, tokens, command)
            for what, answer in answers.items()
        ]
    return found


def _resolves() -> list[Case]:
    """An add is counted only if the answer to it says so."""
    done = {"outcome": "done", "applied": True}
    by_code = {each.code: shapes(each)[0] for each in problem_types()}
    too_old = _problem(by_code["token_too_old"], applied="false")
    undecided = {"outcome": "refused", "code": "token_too_old", "applied": None}
    found = []
    for operation in ("add", "add-and-get", "clear", "delete", "atomic/add"):
        delta = 0 if operation in ("clear", "delete") else 1
        items = [["COUNTER", delta]]
        if operation == "atomic/add":
            items.append(["COUNTER-b", delta])
        open_ = {"operation": operation, "namespace": "default", "items": items}
        text = json.dumps(open_ | {"token_text": _TEXTS[0]})
        command = {"do": "resolve", "unfinished": text}
        bodies = ("{}", "null", "[]", "true", "", '{"status": "ok"}', '{"results": []}', "<html>")
        strange: dict[str, Case] = {
            each: {"status": 200, "headers": {}, "body": each} for each in bodies
        }
        strange["201"] = {"status": 201, "headers": {}, "body": "{}"}
        strange["204"] = {"status": 204, "headers": {}, "body": ""}
        for name in ("counter", "namespace"):
            strange[f"another {name}"] = _SUCCESS | {"members": {name: "other"}}
        found += [
            _case(f"resolve {operation}, {what}: again", [answer, _SUCCESS], done, 2, 1, command)
            for what, answer in strange.items()
        ]
        found.append(_case(f"resolve {operation}", [_SUCCESS], done, 1, 1, command))
        found.append(
            _case(f"resolve {operation}: applied is text", [too_old], undecided, 1, 1, command)
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
                _case(
                    f"{status}, {name} {json.dumps(value)}",
                    [{"status": status, "headers": {}, "body": body}, _SUCCESS],
                    _done() if again else _UNKNOWN,
                    2 if again else 1,
                )
            )
    capital = json.dumps({name.title(): value for name, value in problem.items()})
    answer = {"status": 404, "headers": {}, "body": capital}
    found.append(_case("404, members in other letters", [answer, _SUCCESS], _UNKNOWN, 1))
    return found


def _got() -> Case:
    return {"outcome": "done", "count": "18446744073709551616", "accuracy": "accurate"}


def _results(*results: Json) -> Case:
    return {"results": list(results)}


def retry_vectors() -> Case:
    """Return bounds of pauses, and what the retry budget gives."""
    longest = Policy(Options(), _budget(20, 1, 0.2), lambda: 0.0, draw=lambda most: most)
    backoff = [
        {"attempts": number, "pause_max_s": longest.pause_s(number, None)}
        for number in (1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 64, 1_000)
    ]
    steps: list[tuple[str, float, float]] = [
        *(("take", 0.0, 0.0),) * 4,
        ("take", 0.0, 0.25),
        ("take", 0.0, 1.0),
        ("take", 0.25, 0.0),
        ("take", 1.0, 0.0),
        *(("call", 0.0, 0.0),) * 8,
        *(("take", 1.0, 0.0),) * 3,
        ("take", 0.5, 0.0),
        ("take", 100.0, 0.0),
        *(("take", 100.0, 0.0),) * 3,
        ("take", 100.0, 10.0),
        ("take", 100.0, 10.0),
    ]
    return {
        "backoff_first_s": Options().backoff_first_s,
        "backoff_max_s": Options().backoff_max_s,
        "backoff": backoff,
        "budgets": [
            _budget_steps(_budget(at_once, per_s, per_call), steps)
            for at_once, per_s, per_call in ((3, 2, 0.25), (3, 0, 0.25), (0, 1, 0), (0, 0, 0))
        ],
    }


def _budget(at_once: float, per_s: float, per_call: float) -> Budget:
    return Budget(at_once, per_s, per_call, at_once, 0.0)


def _budget_steps(budget: Budget, steps: Sequence[tuple[str, float, float]]) -> Case:
    found: list[Case] = []
    for kind, now_s, wait_max_s in steps:
        if kind == "call":
            budget.call()
            found.append({"call": True})
        else:
            wait_s = budget.reserve(now_s, wait_max_s)
            found.append({"now_s": now_s, "wait_max_s": wait_max_s, "wait_s": wait_s})
    return {
        "retries_at_once": budget.at_once,
        "retries_per_s": budget.per_s,
        "retries_per_call": budget.per_call,
        "steps": found,
    }


def vectors() -> dict[str, str]:
    """Return the text of each file."""
    found: dict[str, Json] = {
        "tokens": token_vectors(),
        "derivation": derivation_vectors(),
        "requests": request_vectors(),
        "refused": refused_vectors(),
        "answers": answer_vectors(),
        "retries": retry_vectors(),
    }
    return {f"{name}.json": _text(value) for name, value in found.items()}


def _text(value: Json) -> str:
    """Return *value* as JSON with a line for each case, so that a change shows as a few lines."""
    if isinstance(value, dict):
        parts = (f"{json.dumps(name)}: {_lines(each)}" for name, each in value.items())
        return "{\n" + ",\n".join(parts) + "\n}\n"
    return _lines(value) + "\n"


def _lines(value: Json) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in value) + "\n]"


def main() -> None:
    """Write the files."""
    for name, text in vectors().items():
        (VECTORS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
