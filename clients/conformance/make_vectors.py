"""Make the vectors from the code of the service and of the Python SDK.

Run ``python -m clients.conformance.make_vectors`` after a change of either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

from clients.conformance.add_cases import add_cases
from clients.conformance.bound_cases import bound_cases, bound_refusals, bound_requests
from clients.conformance.cancel_cases import cancel_cases, cancel_of, cancel_requests
from clients.conformance.cases import NONCE, TOKEN, Case, Json
from clients.conformance.hold_cases import hold_cases, hold_refusals, hold_requests
from clients.conformance.read_cases import read_cases, read_refusals, read_requests
from counter import limits
from counter.clock import to_rfc3339
from counter.quantities import REFUSED
from counter.tokens import format_nonce
from counter_client import tokens
from counter_client.answers import Added
from counter_client.calls import Call, Calls
from counter_client.errors import InvalidParameterError
from counter_client.options import Options
from counter_client.retrying import Budget, Policy
from counter_client.tokens import Credential, HoldId, Key, Token

VECTORS: Final = Path(__file__).parent / "vectors"
_TEXTS: Final = (
    f"{NONCE}@2026-01-31T08:15:30.000250Z",
    f"{NONCE.upper()}@2026-01-31T08:15:30.000250Z",
    f"{NONCE}@2026-01-31T08:15:30Z",
    f"{NONCE}@2026-01-31T08:15:30.25Z",
    f"{NONCE}@2026-01-31T10:15:30.000250+02:00",
    f"{NONCE}@2026-01-31t03:15:30.000250-05:00",
    "00000000-0000-0000-0000-000000000000@2000-01-01T00:00:00.000000Z",
    "ffffffff-ffff-ffff-ffff-ffffffffffff@2199-12-31T23:59:59.999999Z",
    f"{NONCE}@2028-02-29T23:59:59.999999Z",
    "",
    NONCE,
    f"{NONCE}@",
    f"{NONCE}@2026-01-31T08:15:30.000250",
    f"{NONCE}@2026-01-31T08:15:30.0002501Z",
    f"{NONCE}@2026-02-29T08:15:30Z",
    f"{NONCE}@2026-01-31",
    f"{NONCE}@1769847330",
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
    found += [*bound_requests(calls), *cancel_requests(calls), *read_requests(calls)]
    found += hold_requests(calls)
    return [{"command": command, "request": _request(call)} for command, call in found]


def _add(counter: str, delta: int) -> Case:
    return {"do": "add", "counter": counter, "delta": str(delta)}


def _request(call: Call[Any]) -> Case:
    request = call.request
    headers = dict(request.headers)
    path, _, query = request.path.partition("?")
    return {
        "method": request.method,
        "path": path,
        "query": plain_query(query),
        "key": headers.get("Idempotency-Key"),
        "if_match": headers.get("If-Match"),
        "if_none_match": headers.get("If-None-Match"),
        "body": None if request.body is None else json.loads(request.body),
    }


def plain_query(text: str) -> dict[str, str]:
    """Return a query by name, with its times in UTC: clients may escape and write them
    differently."""
    found = dict(parse_qsl(text))
    for name in {"from", "to"} & set(found):
        if found[name] != "today":
            found[name] = to_rfc3339(tokens.parse_rfc3339(found[name]))
    return found


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
        {"do": "cancel", "unfinished": "{}"},
        {"do": "cancel", "unfinished": json.dumps(_OF_NOTHING)},
        cancel_of("increment"),
        _add("c", 1) | {"key": ""},
        _add("c", 1) | {"key": "grün"},
        *bound_refusals(),
        *hold_refusals(),
        *read_refusals(),
    ]
    calls = Calls("default")
    for each in found:
        if each["do"] == "add" and set(each) == {"do", "counter", "delta"}:
            _must_refuse(calls.add, each["counter"], int(each["delta"]), None)
    return found


def answer_vectors() -> list[Case]:
    """Return answers to a call and its outcome."""
    found = [*add_cases(), *cancel_cases(), *bound_cases(), *hold_cases()]
    for number, case in enumerate(found):
        # The name selects the case; the same with every credential.
        if "items" in case["command"]:
            items = case["command"]["items"]
            named = [each | {"counter": f"{number}-{at}"} for at, each in enumerate(items)]
            case["command"]["items"] = named
        elif "unfinished" in case["command"]:
            text = case["command"]["unfinished"].replace("COUNTER", f"{number}-0")
            case["command"]["unfinished"] = text
        elif "hold" not in case["command"]:
            case["command"]["counter"] = f"{number}-0"
        hold = json.dumps(str(HoldId(TOKEN, f"{number}-0")))
        found[number] = json.loads(json.dumps(case).replace('"HOLD"', hold))
    for number, case in enumerate(read_cases(), len(found)):
        text = json.dumps(case).replace('"NUMBER"', str(number)).replace("CASE", str(number))
        found.append(json.loads(text))
    return found


def _must_refuse(make: Callable[..., Call[Added]], *arguments: object) -> None:
    with suppress(InvalidParameterError):
        make(*arguments)
        raise ValueError(f"the SDK takes {arguments}")


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
