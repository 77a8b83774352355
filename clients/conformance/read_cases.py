"""Commands of reads, namespaces and buffers: their requests, refusals and cases.

In a case, ``CASE`` stands for its number as text, and ``"NUMBER"`` for the number itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from api.http.problems import problem_of
from clients.conformance.cases import (
    LOST,
    MISFITS,
    NO_TIMES,
    PAGE,
    SUCCESS,
    TIME,
    UNKNOWN,
    Case,
    Json,
    error_of,
    make_case,
    problem_answer,
    refused_outcome,
    results_answer,
)
from clients.conformance.scripted import COUNT, event_ids
from counter import limits
from counter_client import transport
from counter_client.calls import Call, Calls, tokens

_FROM: Final = "2026-01-31T08:00:00.000000Z"
_TO: Final = "2026-01-31T09:00:00.000000Z"
_SETTINGS: Final = {"counter_type": "EVENTUAL", "cache_ttl": "1s"}
_COUNT: Final = str(COUNT)


def read_requests(calls: Calls) -> list[tuple[Case, Call[Any]]]:
    """Return commands, and the calls of the Python SDK that they are."""
    begin, end = datetime(2026, 1, 31, 8, tzinfo=UTC), datetime(2026, 1, 31, 9, tzinfo=UTC)
    span = {"from": _FROM, "to": _TO}
    names = ["a/b", "倉庫", "views"]
    found: list[tuple[Case, Call[Any]]] = [
        ({"do": "get_many", "counters": names}, calls.batch_get(names, None)),
        (
            {"do": "get_many", "counters": names, "max_staleness": "0s"},
            calls.batch_get(names, "0s"),
        ),
        ({"do": "names"}, calls.counters(None, None)),
        ({"do": "list"}, calls.counts(None, None, False, None)),
        ({"do": "list", "limit": 5}, calls.counts(None, None, False, None, 5)),
        (
            {"do": "list", "prefix": "a/b", "order": "-count", "max_staleness": "5s"},
            calls.counts("a/b", None, True, "5s"),
        ),
        ({"do": "sum"}, calls.sum(None, None)),
        ({"do": "busiest", "limit": 5, "span": "30s"}, calls.busiest(5, "30s")),
        ({"do": "tokens", "number": 1_000}, tokens(1_000)),
        (
            {"do": "create_namespace", "settings": _SETTINGS},
            calls.create_namespace(dict(_SETTINGS)),
        ),
        (
            {"do": "change_namespace", "settings": {"key_ttl": "1h"}},
            calls.change_namespace({"key_ttl": "1h"}),
        ),
    ]
    for prefix in ("a b&c", "Süd/", "倉庫", "100%"):
        found += [
            ({"do": "names", "prefix": prefix}, calls.counters(prefix, None)),
            ({"do": "sum", "prefix": prefix, "max_staleness": "5s"}, calls.sum(prefix, "5s")),
        ]
    for name in ("a/b", ".", "倉庫"):
        of_one: Case = {"counter": name}
        found += [
            ({"do": "between", **of_one, **span}, calls.between(name, begin, end, None)),
            (
                {"do": "between", **of_one, "from": "today", "tz": "Europe/Berlin"},
                calls.between(name, "today", None, "Europe/Berlin"),
            ),
            ({"do": "history", **of_one}, calls.history(name, None, None, None, None)),
            (
                {"do": "history", **of_one, **span, "step": "day", "tz": "Europe/Berlin"},
                calls.history(name, begin, end, "day", "Europe/Berlin"),
            ),
            ({"do": "events", **of_one}, calls.events(name, None, None, None)),
            (
                {"do": "events", **of_one, **span, "limit": 7},
                calls.events(name, begin, end, None, 7),
            ),
            ({"do": "live", **of_one, "until": _COUNT}, calls.live(name)),
            ({"do": "recount", **of_one}, calls.recount(name)),
        ]
    return found


def read_refusals() -> list[Case]:
    """Return commands whose arguments the client refuses."""
    span = {"from": _FROM, "to": _TO}
    found: list[Case] = []
    for name in ("", "line\nbreak", "n" * (limits.COUNTER_NAME_CHARS_MAX + 1)):
        found += [
            {"do": "get_many", "counters": ["c", name]},
            {"do": "between", "counter": name, **span},
            *({"do": do, "counter": name} for do in ("history", "events", "recount")),
            {"do": "live", "counter": name, "until": "0"},
            {"do": "buffer", "items": [{"counter": name, "delta": "1"}]},
        ]
    naive = _FROM.removesuffix("Z")
    found += [{"do": do, "counter": "c", "from": naive} for do in ("between", "history", "events")]
    delta = str(limits.INT64_MAX + 1)
    return [*found, {"do": "buffer", "items": [{"counter": "c", "delta": delta}]}]


def read_cases() -> list[Case]:
    """Return the cases of all these commands."""
    found = [_of(f"{do}", [SUCCESS], do, 1) for do in _COMMANDS]
    found += [case for do in _COMMANDS for case in _ends(do)]
    found += [case for do in _FIELDS for case in _misfits(do)]
    found += [*_alike(), *_oversized(), *_pages(), *_of_many(), *_live(), *_buffers()]
    return [*found, _bounded_events()]


def _counted(name: str) -> Case:
    return {"counter": name, "count": _COUNT, "accuracy": "accurate"}


def _event(key: int, *, clear: bool = False) -> Case:
    return event_ids(key) | {"delta": "0" if clear else str(limits.INT64_MAX), "clear": clear}


_BOTH: Final = [_counted("CASE-0"), _counted("CASE-1")]
_POINTS: Final = [{"time": TIME, "count": _COUNT, "delta": each} for each in ("3", "-3")]
#: Each command, and its outcome after a proper answer.
_COMMANDS: Final[Mapping[str, tuple[Case, Case]]] = {
    "get_many": ({"counters": ["CASE-0", "CASE-1"]}, {"counts": _BOTH}),
    "names": ({"prefix": "CASE-"}, {"counters": ["CASE-0", "CASE-1"]}),
    "list": ({"prefix": "CASE-", "order": "-count"}, {"counts": _BOTH}),
    "sum": ({"prefix": "CASE-"}, {"sum": _COUNT, "counters": 2}),
    "between": ({"counter": "CASE-0", "from": _FROM, "to": _TO}, {"count": _COUNT, "delta": "3"}),
    "history": ({"counter": "CASE-0"}, {"points": _POINTS}),
    "events": ({"counter": "CASE-0"}, {"events": [_event(0), _event(1, clear=True)]}),
    "live": ({"counter": "CASE-0", "until": _COUNT}, {"count": _COUNT}),
    "busiest": (
        {"limit": 2, "span": "CASEs"},
        {"counters": [{"counter": each, "count": _COUNT} for each in ("a", "b")]},
    ),
    "recount": ({"counter": "CASE-0"}, {"windows": 3}),
    "tokens": ({"number": "NUMBER"}, {"tokens": "NUMBER"}),
    "create_namespace": (
        {"settings": {"counter_type": "EVENTUAL", "requests_per_s": "NUMBER"}},
        {"counter_type": "EVENTUAL"},
    ),
    "change_namespace": (
        {"settings": {"cache_ttl": "1s", "requests_per_s": "NUMBER"}},
        {"counter_type": "ACCURATE"},
    ),
}
_NO_LISTS: Final[Sequence[Json]] = (None, {}, "text", 1)
_NO_NUMBERS: Final = (None, "1", 1.5, True)
_NO_TEXTS: Final = (None, 1)
_OF_COUNT: Final = {
    "namespace": MISFITS["namespace"],
    "count": MISFITS["count"],
    "as_of": NO_TIMES,
    "accuracy": MISFITS["accuracy"],
}
_REFUSED: Final = {"delta": 2, "count": COUNT, "at_most": 9}
_NO_REFUSALS: Final[Sequence[Json]] = (
    *(*_NO_LISTS, []),
    *(_REFUSED | {name: "1"} for name in _REFUSED),
    *({name: _REFUSED[name] for name in _REFUSED if name != left} for left in _REFUSED),
)
_OF_PAGE: Final[Mapping[str, Sequence[Json]]] = {"next_page": (1, True, [])}
#: Values that do not fit, by the list or the object of the answer ("" for the answer itself) and
#: its member. All of them are needed, but for those of ``_OPTIONAL``.
_FIELDS: Final[Mapping[str, Mapping[str, Mapping[str, Sequence[Json]]]]] = {
    "get_many": {
        "": {"results": (*_NO_LISTS, [])},
        "results": {**_OF_COUNT, "counter": MISFITS["counter"]},
    },
    "names": {"": {**_OF_PAGE, "counters": (*_NO_LISTS, [1], ["a", None])}},
    "list": {
        "": {**_OF_PAGE, "counts": (*_NO_LISTS, [1], [None])},
        "counts": {**_OF_COUNT, "counter": _NO_TEXTS},
    },
    "sum": {
        "": {"sum": (None, [], 1)},
        "sum": {
            **{each: _OF_COUNT[each] for each in ("count", "as_of", "accuracy")},
            "counters": _NO_NUMBERS,
        },
    },
    "between": {
        "": {**_OF_COUNT, "counter": MISFITS["counter"], "delta": _NO_NUMBERS, "from": NO_TIMES}
    },
    "history": {
        "": {"points": (*_NO_LISTS, [1])},
        "points": {"time": NO_TIMES, "count": _NO_NUMBERS, "delta": _NO_NUMBERS},
    },
    "events": {
        "": {**_OF_PAGE, "events": (*_NO_LISTS, [1])},
        "events": {
            "event_time": NO_TIMES,
            "event_id": _NO_TEXTS,
            "event_item_key": _NO_NUMBERS,
            "delta": _NO_NUMBERS,
            "clear": (None, "true", 1),
            **dict.fromkeys(("at_least", "at_most"), _NO_NUMBERS),
            "refused": _NO_REFUSALS,
        },
    },
    "busiest": {
        "": {
            **dict.fromkeys(("since", "as_of"), NO_TIMES),
            "complete": (None, 0, "true"),
            "counters": (*_NO_LISTS, [1]),
        },
        "counters": {
            "counter": _NO_TEXTS,
            "adds_per_s": (None, "1", True),
            "count": _NO_NUMBERS,
        },
    },
    "recount": {"": {"windows": _NO_NUMBERS}},
    "tokens": {
        "": {"tokens": (*_NO_LISTS, [])},
        "tokens": {"token": (None, "x", 1), "generation_time": NO_TIMES},
    },
    **{
        f"{each}_namespace": {
            "": {"namespace": MISFITS["namespace"], "counter_type": _NO_TEXTS},
        }
        for each in ("create", "change")
    },
}
_OPTIONAL: Final = {
    ("events", name) for name in ("delta", "clear", "at_least", "at_most", "refused")
}


def _of(
    name: str, answers: Sequence[Case], do: str, requests: int, outcome: Case | None = None
) -> Case:
    """A case of the command *do*, which succeeds unless there is an *outcome*."""
    command, done = _COMMANDS[do]
    ends = {"outcome": "done", **done} if outcome is None else outcome
    found = make_case(name, answers, ends, requests, 0, {"do": do, **command})
    del found["command"]["delta"]
    return found


def _ends(do: str) -> Iterator[Case]:
    """What becomes of any read."""
    busy, gone = error_of("store_unavailable"), error_of("namespace_unknown")
    again, out, page = problem_answer(busy), problem_answer(gone), {"status": 404, **PAGE}
    late = problem_answer(busy, retry_after=3600)
    redirect = {"status": 307, "headers": {"Location": "/elsewhere"}, "body": ""}
    yield _of(f"{do}: lost, again", [LOST, again, SUCCESS], do, 3)
    yield _of(f"{do}: refused", [out], do, 1, refused_outcome(gone))
    yield _of(f"{do}: lost, then refused", [LOST, out], do, 2, refused_outcome(gone))
    yield _of(f"{do}: 404 with a page", [page], do, 1, UNKNOWN)
    yield _of(f"{do}: a redirect", [redirect], do, 1, UNKNOWN)
    yield _of(f"{do}: 502 with a page", [{"status": 502, **PAGE}, SUCCESS], do, 2)
    yield _of(f"{do}: too late", [late], do, 1, UNKNOWN)
    for body in ("", "{}", "null", "[]", '{"status":"ok"}'):
        answer = {"status": 200, "headers": {}, "body": body}
        yield _of(f"{do}, {body}: again", [answer, SUCCESS], do, 2)


def _misfits(do: str) -> Iterator[Case]:
    """Each member of an answer that is missing, or does not fit: again."""
    for place, members in _FIELDS[do].items():
        for member, values in members.items():
            where = f"{do}, {place} {member}"
            for value in values:
                answer = SUCCESS | {"of": place, "members": {member: value}}
                yield _of(f"{where} {json.dumps(value)}: again", [answer, SUCCESS], do, 2)
            if (place, member) not in _OPTIONAL:
                answer = SUCCESS | {"of": place, "without": [member]}
                yield _of(f"{where} is missing: again", [answer, SUCCESS], do, 2)
    more = SUCCESS | {"of": "", "members": {"later": [1]}}
    yield _of(f"{do}, more", [more], do, 1)


def _alike() -> Iterator[Case]:
    """Commands whose requests are all alike: one case has all wrong answers, and a proper one."""
    kind = {"counter_type": "ACCURATE"}
    bodies: Mapping[str, Sequence[Json]] = {
        "namespaces": (
            *({"namespaces": each} for each in _NO_LISTS),
            *({"namespaces": [each]} for each in (1, {}, kind, kind | {"namespace": 1})),
            {"namespaces": [{"namespace": "default"}]},
        ),
        "namespace": (*(kind | {"namespace": each} for each in MISFITS["namespace"]), kind),
        "delete_namespace": ({"namespace": "default"}, 1),
    }
    ends: Mapping[str, Case] = {
        "namespaces": {"namespaces": ["default", "other"]},
        "namespace": {"counter_type": "ACCURATE"},
        "delete_namespace": {},
    }
    busy = problem_answer(error_of("store_unavailable"))
    for do, found in bodies.items():
        texts = ["", "{}", "[]", "<html>", *map(json.dumps, found)]
        wrong = [{"status": 200, "headers": {}, "body": each} for each in texts]
        answers = [LOST, busy, {"status": 502, **PAGE}, *wrong, SUCCESS]
        case = make_case(do, answers, {"outcome": "done", **ends[do]}, len(answers), 0, {"do": do})
        del case["command"]["delta"]
        yield case


def _oversized() -> Iterator[Case]:
    """Answers with many items may be larger."""
    spaces = transport.ANSWER_ONE_BYTES_MAX + 1
    for do in _FIELDS:
        is_one = do in ("between", "recount", "create_namespace", "change_namespace")
        answers: list[Case] = [SUCCESS | {"spaces": spaces}, SUCCESS]
        yield _of(f"{do}, oversized for one", answers, do, 2 if is_one else 1)


def _pages() -> Iterator[Case]:
    """Pages until there is no next one, or as many items as were asked for."""
    second, third = ({"of": "", "members": {"next_page": each}} for each in ("b+&=", "c"))
    pages: list[Case] = [SUCCESS | second, SUCCESS | third, SUCCESS]
    names = ["CASE-0", "CASE-1", "CASE-b+&=0", "CASE-b+&=1", "CASE-c0", "CASE-c1"]
    events = [_event(0), _event(1, clear=True)]
    wanted: Mapping[str, Case] = {
        "names": {"counters": names},
        "list": {"counts": [_counted(each) for each in names]},
        "events": {"events": events * 3},
    }
    for do, members in wanted.items():
        yield _of(f"{do}: three pages", pages, do, 3, {"outcome": "done", **members})
        lost: list[Case] = [pages[0], LOST, {"status": 200, **PAGE}, *pages[1:]]
        yield _of(f"{do}: a page is lost", lost, do, 5, {"outcome": "done", **members})
    for do, key in (("list", "counts"), ("events", "events")):
        for limit, requests in ((1, 1), (2, 1), (3, 2), (4, 2), (9, 3)):
            ends = {"outcome": "done", key: wanted[do][key][:limit]}
            case = _of(f"{do}: at most {limit}", pages, do, requests, ends)
            case["command"]["limit"] = limit
            yield case


def _bounded_events() -> Case:
    """Adds of the event log: accepted, refused by its own bound, and by one of the namespace."""
    least, most = limits.INT64_MIN, limits.INT64_MAX
    lowest = {"delta": -1, "count": -COUNT, "at_least": least}
    logged: list[tuple[Mapping[str, int], Mapping[str, int]]] = [
        ({"delta": most, "at_least": least, "at_most": most}, {}),
        ({"delta": 0, "at_most": 9}, _REFUSED),
        ({"delta": 0}, lowest),
    ]
    answered, shown = [], []
    for key, (numbers, refused) in enumerate(logged):
        why = {"refused": refused} if refused else {}
        answered.append({**event_ids(key), **numbers, **why})
        texts = {name: _digits(each) for name, each in why.items()}
        shown.append({**_event(key), **_digits(numbers), **texts})
    answer = SUCCESS | {"of": "", "members": {"events": answered}}
    ends = {"outcome": "done", "events": shown}
    return _of("events: bounded adds", [answer], "events", 1, ends)


def _digits(numbers: Mapping[str, int]) -> dict[str, str]:
    return {name: str(each) for name, each in numbers.items()}


def _of_many() -> Iterator[Case]:
    """Results of a get of many that are too few, in another order, or problems."""
    busy, gone = error_of("store_unavailable"), error_of("namespace_unknown")

    def last(result: Json) -> Case:
        return SUCCESS | {"last": result}

    for what, answer in (
        ("another order", SUCCESS | {"reversed": True}),
        ("a result null", last(None)),
        ("a result without members", last({})),
        ("a code alone", last({"code": "overloaded"})),
        ("a busy result", last(problem_of(busy))),
    ):
        yield _of(f"get_many, {what}: again", [answer, SUCCESS], "get_many", 2)
    refused = refused_outcome(gone)
    yield _of("get_many, a refused result", [last(problem_of(gone))], "get_many", 1, refused)


def _stream(*parts: str) -> Case:
    return {
        "status": 200,
        "headers": {"Content-Type": "text/event-stream"},
        "body": "".join(parts),
    }


def _live() -> Iterator[Case]:
    """Streams: what is an event, and after what the client connects again."""
    count = {"namespace": "default", "counter": "CASE-0", "count": COUNT, "as_of": TIME}
    data = json.dumps(count | {"accuracy": "accurate"})
    before = json.dumps(count | {"count": 1, "accuracy": "accurate"})
    last = f"event: count\ndata: {data}\n\n"
    first = f"event: count\ndata: {before}\n\n"
    busy, gone = error_of("store_unavailable"), error_of("namespace_unknown")
    problem = f"event: problem\ndata: {json.dumps(problem_of(busy))}\n\n"
    out = f"event: problem\ndata: {json.dumps(problem_of(gone))}\n\n"
    for what, stream in (
        ("a later count", _stream(first, first, last)),
        ("comments, and other fields", _stream(":\n\n", "id: 1\nretry: 9\n", ": x\n", last)),
        ("other events", _stream(f"event: other\ndata: {data[:-1]}\n\n", "data: 1\n\n", last)),
        ("lines that end in CR LF", _stream(last.replace("\n", "\r\n"))),
        ("no spaces", _stream(last.replace(": ", ":"))),
        ("data in two lines", _stream(last.replace(', "count"', ',\ndata: "count"'))),
        ("a problem that passes", _stream(problem, last)),
    ):
        yield _of(f"live: {what}", [stream], "live", 1)
    long = " " * transport.ANSWER_ONE_BYTES_MAX
    half = f"data: {long[: len(long) // 2]}\n"
    for what, stream in (
        ("it ends", _stream(first, "event: end\ndata: {}\n\n")),
        ("it ends after a comment", _stream(": x\n\n")),
        ("it ends within an event", _stream(first, last[:-1])),
        ("another counter", _stream(last.replace("CASE-0", "other"))),
        ("another namespace", _stream(last.replace("default", "other"))),
        ("a number as text", _stream(last.replace(_COUNT, f'"{_COUNT}"'))),
        ("no JSON", _stream("event: count\ndata: {\n\n", last)),
        ("a problem that is none", _stream("event: problem\ndata: {}\n\n", last)),
        ("a long line", _stream(f": {long}\n\n", last)),
        ("a line without an end", _stream(f": {long}")),
        ("much data", _stream(f"event: count\n{half}{half}data: x\n\n", last)),
    ):
        yield _of(f"live, {what}: again", [stream, SUCCESS], "live", 2)
    yield _of("live: refused later", [_stream(first, out)], "live", 1, refused_outcome(gone))


def _buffers() -> Iterator[Case]:
    """Buffers: one token for each total, and what is not counted for sure."""
    busy, gone = error_of("store_unavailable"), error_of("namespace_unknown")
    conflict, too_old = error_of("token_conflict"), error_of("token_too_old")
    cancelled = error_of("token_cancelled")
    over = problem_answer(busy)
    over = over | {"headers": over["headers"] | {"Idempotency-TTL": "0"}}

    def case(
        name: str, answers: Sequence[Case], requests: int, *failed: Case, tokens: int = 2
    ) -> Case:
        adds = (("CASE-0", "1"), ("CASE-1", "2"), ("CASE-0", "3"))
        items = [{"counter": counter, "delta": delta} for counter, delta in adds]
        ends = {"outcome": "done", "failed": list(failed)}
        command = {"do": "buffer", "items": items}
        found = make_case(f"buffer: {name}", answers, ends, requests, tokens, command)
        del found["command"]["delta"]
        return found

    first, second = ({"counter": "CASE-0", "delta": "4"}, {"counter": "CASE-1", "delta": "2"})
    refused = second | refused_outcome(conflict)
    one_busy, one_gone = (results_answer("added", problem_of(each)) for each in (busy, gone))
    yield case("done", [SUCCESS], 1)
    yield case("lost, again", [LOST, problem_answer(busy), {"status": 502, **PAGE}, SUCCESS], 4)
    yield case("one conflicts", [results_answer("added", problem_of(conflict))], 1, refused)
    one_cancelled = results_answer("added", problem_of(cancelled))
    not_counted = second | refused_outcome(cancelled)
    yield case("one is cancelled", [one_cancelled], 1, not_counted)
    yield case("lost, then one is cancelled", [LOST, one_cancelled], 2, not_counted)
    yield case("one again", [one_busy, results_answer("added")], 2)
    yield case("one refused", [one_gone], 1, second | refused_outcome(gone))
    yield case("lost, then one refused", [LOST, one_gone], 2, second | UNKNOWN)
    void = results_answer("added", problem_of(too_old))
    yield case("one void", [void, results_answer("added")], 2, tokens=3)
    old = problem_of(too_old) | {"retry": "never", "applied": None}
    one_old = results_answer("added", old)
    yield case("one too old: a new token", [one_old, results_answer("added")], 2, tokens=3)
    yield case("lost, then one too old", [LOST, one_old], 2, second | UNKNOWN)
    limit = problem_answer(error_of("invalid_body"), field="items")
    yield case("too many items: in two parts", [limit, SUCCESS], 3)
    # It is closed before it would send them again.
    out, hour = refused_outcome(gone), {"retry_after": 3600}
    yield case("refused as a whole", [problem_answer(gone, **hour)], 1, first | out, second | out)
    page = {"status": 403, **PAGE, "headers": {"Retry-After": "3600"}}
    yield case("403 with a page", [page], 1, first | UNKNOWN, second | UNKNOWN)
    waits = results_answer(problem_of(busy) | hour, problem_of(busy))
    yield case("one waits long: the shortest", [waits, SUCCESS], 2)
    yield case("TTL is over", [over], 1, first | UNKNOWN, second | UNKNOWN)
    yield case("too few results", [results_answer("added"), SUCCESS], 2)
    none = case("nothing", [SUCCESS], 1, tokens=1)
    none["command"]["items"] = [{"counter": "CASE-0", "delta": "0"}]
    most = case("totals past 64 bits", [SUCCESS], 1, tokens=2)
    delta = str(limits.INT64_MAX)
    most["command"]["items"] = [{"counter": "CASE-0", "delta": delta}] * 2
    yield from (none, most)
