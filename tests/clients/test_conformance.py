"""Every client keeps to clients/conformance/README.md, and counts exactly through any fault."""

import json
import random
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from clients.conformance.cancel_cases import OPERATIONS
from clients.conformance.make_vectors import VECTORS, plain_query
from clients.conformance.misbehaving import (
    FAULTS,
    LIES,
    answered_as_another,
    lost_after,
    lost_before,
    misbehaving,
    regular,
    surplus,
)
from clients.conformance.scripted import Asked, case_of, scripted
from tests.clients.programs import PROGRAMS, run
from tests.support.server import Server, served

Json = Any
#: No retry is refused for the budget, and no pause costs time.
QUICK = {
    "timeout": "40s",
    "attempt_timeout": "20s",
    "backoff_first": "1ms",
    "backoff_max": "20ms",
    "retries": "1000",
}
API_KEY = "ck_reader_secret"
WRITES = (
    *("add", "add_and_get", "clear", "delete", "atomic", "batch", "resolve", "cancel", "buffer"),
    *("hold", "settle", "release"),
)


def vectors(name: str) -> Json:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session", params=sorted(PROGRAMS))
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, child_processes: None
) -> list[str]:
    """Each client's program, built once."""
    return PROGRAMS[request.param](tmp_path_factory.mktemp("programs"))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program with the commands of all vectors."""

    outcomes: dict[str, list[Json]]
    #: The requests to the server, by what selects their cases.
    asked: dict[str, list[Asked]]
    strange: list[str]


def commands(name: str) -> list[Json]:
    match name:
        case "tokens":
            return [{"do": "parse", "text": each["text"]} for each in vectors(name)]
        case "derivation":
            return [{"do": "derive", "label": x["label"], **x["from"]} for x in vectors(name)]
        case "refused":
            return list(vectors(name))
        case "new":
            return [{"do": "new"}] * 100
    return [each["command"] for each in vectors(name)]


@pytest.fixture(scope="session")
def done(program: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All vectors at once: each case of answers.json is selected by its command."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(f"{API_KEY}\n")
    answers = {case_of(case["command"]): case["answers"] for case in vectors("answers")}
    assert len(answers) == len(vectors("answers"))
    names = ("tokens", "derivation", "new", "refused", "requests", "answers")
    parts = [(name, command) for name in names for command in commands(name)]
    with scripted(answers) as server:
        found = run(program, server.url, [x for _, x in parts], api_key_file=str(key), **QUICK)
    outcomes: dict[str, list[Json]] = {name: [] for name in names}
    for (name, _), outcome in zip(parts, found, strict=True):
        outcomes[name].append(outcome)
    return Run(outcomes, server.asked, server.strange)


def expected(case: Json, found: Json) -> Json:
    """The outcome of a case that is refused, or finds a token or a key."""
    if case.get("refused"):
        return {"outcome": "refused", "code": "invalid_parameter", "applied": None}
    return {"outcome": "done", **{name: found[name] for name in ("token", "key") if name in found}}


def test_texts_of_tokens_are_parsed(done: Run) -> None:
    assert done.outcomes["tokens"] == [expected(each, each) for each in vectors("tokens")]


def test_tokens_and_keys_are_derived(done: Run) -> None:
    wanted = [expected(each, each.get("derived")) for each in vectors("derivation")]
    assert done.outcomes["derivation"] == wanted


def test_new_tokens_differ(done: Run) -> None:
    assert len({each["token"]["token"] for each in done.outcomes["new"]}) == 100


def test_arguments_out_of_bounds_are_refused(done: Run) -> None:
    """Nothing is sent for them: the next test compares all requests."""
    ends = {(each["outcome"], each.get("code")) for each in done.outcomes["refused"]}
    assert ends == {("refused", "invalid_parameter")}


def test_each_command_sends_its_request(program: list[str], done: Run) -> None:
    """Method, path, token and body."""
    # URLs in JavaScript drop these parts of a path: the client refuses the counters.
    dropped = {".", ".."} if program[0] == "node" else set()
    cases = vectors("requests")
    carried = [each["command"].get("counter") not in dropped for each in cases]
    ends = [each["outcome"] for each in done.outcomes["requests"]]
    assert ends == ["done" if each else "refused" for each in carried]
    answered = {case_of(each["command"]) for each in vectors("answers")}
    sent = [each for case, asked in done.asked.items() if case not in answered for each in asked]
    shown = [
        {
            "method": each.method,
            "path": each.path.partition("?")[0],
            "query": plain_query(each.path.partition("?")[2]),
            "key": each.key,
            "if_match": each.headers.get("if-match"),
            "if_none_match": each.headers.get("if-none-match"),
            "body": each.body,
        }
        for each in sent
    ]
    wanted = [
        each["request"] for each, is_carried in zip(cases, carried, strict=True) if is_carried
    ]
    assert sorted(map(text_of, shown)) == sorted(map(text_of, wanted))


def test_headers_are_those_of_the_protocol(done: Run) -> None:
    sent = [each for asked in done.asked.values() for each in asked]
    bodies = [each for each in sent if each.body is not None]
    assert {each.headers.get("authorization") for each in sent} == {f"Bearer {API_KEY}"}
    assert {each.headers.get("content-type") for each in bodies} == {"application/json"}
    writes = [each for each in bodies if each.tokens()]
    limits_ms = [int(each.headers["request-timeout"].removesuffix("ms")) for each in writes]
    assert 0 < min(limits_ms) <= max(limits_ms) == 10_000


def test_each_response_means_what_the_protocol_says(done: Run) -> None:
    wrong = []
    for at, case in enumerate(vectors("answers")):
        asked = done.asked[case_of(case["command"])]
        outcome = without_unfinished(done.outcomes["answers"][at], case)
        tokens = len(set[str]().union(*(each.tokens() for each in asked)))
        seen = {"outcome": outcome, "requests": len(asked), "tokens": tokens}
        wanted = {name: case[name] for name in seen}
        if seen != wanted:
            wrong.append(f"{case['name']}: {seen}, not {wanted}")
    assert wrong == []


def test_redirects_are_not_followed(done: Run) -> None:
    assert done.strange == []


def without_unfinished(outcome: Json, case: Json) -> Json:
    """The parts of an outcome in the vectors; an unknown add must have an Unfinished."""
    for name in {"results", "failed"} & set(outcome):
        items = [without_unfinished(each, case) for each in outcome[name]]
        return outcome | {name: items if name == "results" else sorted(items, key=text_of)}
    left = dict(outcome)
    unfinished = left.pop("unfinished", None)
    if "hold" not in case["outcome"]:
        # Its id is that of a token that no vector has.
        left.pop("hold", None)
    is_open = outcome["outcome"] in ("unknown", "unsent") and case["command"]["do"] in WRITES
    assert (unfinished is not None) == is_open, (case["name"], outcome)
    return left


def text_of(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


#: Many faults happen within seconds: a client gives up on an attempt early, and pauses little.
HASTY = {
    "timeout": "20s",
    "attempt_timeout": "600ms",
    "backoff_first": "5ms",
    "backoff_max": "50ms",
    "retries": "10000",
}
SLOW_S = 0.7
DECK = (*FAULTS, *LIES, *[regular] * len(FAULTS))
OF_A_KIND = 16


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that writes no token older than half a second: retries meet late and void tokens too."""
    with served(tmp_path_factory.mktemp("service")) as server:
        yield server


def adds(name: str) -> list[Json]:
    """Commands for counters of their own; of two kinds all have one key or one token."""
    # Later than a slow start: the token is not late when it is sent first.
    later = datetime.now(UTC) + timedelta(seconds=3)
    token = {"token": {"token": str(uuid4()), "generation_time": later.isoformat()}}
    found: list[Json] = []
    for at in range(OF_A_KIND):
        own = f"{name}-{at}"
        items = [{"counter": f"{own}-{part}", "delta": str(at + part)} for part in range(3)]
        others = [each | {"counter": f"{each['counter']}-of-a-batch"} for each in items]
        found += [
            {"do": "add", "counter": f"{own}-add", "delta": str(at + 1)},
            {"do": "add_and_get", "counter": f"{own}-get", "delta": str(-at - 1)},
            {"do": "add", "counter": f"{own}-key", "delta": "3", "key": f"{own} key"},
            {"do": "add", "counter": f"{name}-one-key", "delta": "5", "key": name},
            {"do": "add", "counter": f"{name}-one-token", "delta": "7", **token},
            {"do": "clear", "counter": f"{own}-clear"},
            {"do": "delete", "counter": f"{own}-delete"},
            {"do": "atomic", "items": items},
        ]
        if at % 3 == 0:
            merged = [each | {"counter": f"{each['counter']}-of-a-buffer"} for each in items]
            found += [
                {"do": "batch", "items": others},
                {"do": "buffer", "items": [*merged, *merged[:2]]},
            ]
    return found


def each_add(commands: Sequence[Json], outcomes: Sequence[Json]) -> Iterator[tuple[Json, Json]]:
    """Items and outcome of each add; those of a batch, and the totals of a buffer, are adds of
    their own."""
    for command, outcome in zip(commands, outcomes, strict=True):
        if command["do"] == "batch":
            for item, result in zip(command["items"], outcome["results"], strict=True):
                yield [item], result
        elif command["do"] == "buffer":
            totals = Counter[str]()
            for item in command["items"]:
                totals[item["counter"]] += int(item["delta"])
            failed = {each["counter"]: each for each in outcome["failed"]}
            for counter, delta in totals.items():
                total = {"counter": counter, "delta": str(delta)}
                end = failed.pop(counter, total | {"outcome": "done"})
                assert end["delta"] == total["delta"]
                yield [total], end
            assert failed == {}
        else:
            yield command.get("items", [command]), outcome


def test_counts_are_exact_through_any_fault(program: list[str], service: Server) -> None:
    """Done counts once, refused or unsent never, and unknown as resolve says."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    name = f"faults-{uuid4().hex[:8]}"
    commands = adds(name)
    with misbehaving(service.url, seed, SLOW_S, DECK) as proxy:
        found = list(each_add(commands, run(program, proxy.url, commands, **HASTY)))
        unknown = [end["unfinished"] for _, end in found if end["outcome"] == "unknown"]
        resolved = resolve(program, proxy.url, unknown, HASTY)
        # A response of the proxy's own may end a resolve too, and says nothing.
        left = [each for each in unknown if each not in resolved]
    resolved |= resolve(program, service.url, left, QUICK)
    assert set(resolved) == set(unknown)
    assert set(proxy.dealt) == {fault.__name__ for fault in DECK}

    expected: dict[str, int] = {}
    for items, end in found:
        is_counted = end["outcome"] == "done" or resolved.get(end.get("unfinished"), False)
        for each in items:
            once = int(each.get("delta", 0)) if is_counted else 0
            # One add of several under one token is enough.
            expected[each["counter"]] = once or expected.get(each["counter"], 0)
    assert counts(service, expected) == expected
    ends = Counter(end["outcome"] for _, end in found)
    print(f"{sum(proxy.dealt.values())} requests; {dict(ends)}; {Counter(resolved.values())}")
    assert ends["done"] > 0


def test_a_buffer_reports_what_it_could_not_send_in_time(
    program: list[str], service: Server
) -> None:
    """No answer arrives before it closes: each total counts as resolve says."""
    name = f"buffer-{uuid4().hex[:8]}"
    items = [{"counter": f"{name}-{at % 4}", "delta": "3"} for at in range(12)]
    with misbehaving(service.url, 1, SLOW_S, [lost_before, lost_after]) as proxy:
        # Time for an attempt on a busy machine: without one an add would be unsent.
        short = HASTY | {"timeout": "3s"}
        [end] = run(program, proxy.url, [{"do": "buffer", "items": items}], **short)
    failed = {each["counter"]: each for each in end["failed"]}
    names = {each["counter"] for each in items}
    assert set(failed) == names
    assert {(each["delta"], each["outcome"]) for each in end["failed"]} == {("9", "unknown")}
    unknown = [each["unfinished"] for each in end["failed"]]
    resolved = resolve(program, service.url, unknown, QUICK)
    assert counts(service, names) == {
        each: 9 * resolved[failed[each]["unfinished"]] for each in names
    }


def cancellable(name: str, at: int, operation: str, credential: Json) -> tuple[Json, Json]:
    """An add or a clear of counters of its own, and the command that cancels it."""
    counter = f"{name}-{at}-{operation.partition('/')[0]}"
    delta = 0 if operation in ("clear", "delete") else at + 1
    items = [{"counter": counter, "delta": str(delta)}]
    if operation == "atomic/add":
        items.append({"counter": f"{counter}-b", "delta": str(delta)})
    do = operation.partition("/")[0].replace("-", "_")
    payload = {"items": items} if do == "atomic" else items[0]
    key, token = credential.get("key"), credential.get("token", {})
    unfinished = {
        "operation": operation,
        "namespace": "default",
        "items": [[each["counter"], delta] for each in items],
        "token_text": "@".join(token.values()) if key is None else f"key:{key}",
    }
    cancel = {"do": "cancel", "unfinished": json.dumps(unfinished)}
    return {"do": do, **payload, **credential}, cancel


CANCELLED = {"outcome": "refused", "code": "token_cancelled", "applied": False}


def test_cancels_are_final_through_any_fault(program: list[str], service: Server) -> None:
    """Of what was counted, of what never arrived, and of what arrives at the same time."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    name = f"cancels-{uuid4().hex[:8]}"
    # Later than a slow start, so that few adds are late; and each token has a time of its own.
    begin = datetime.now(UTC) + timedelta(seconds=3)
    pairs = []
    for at, operation in enumerate(OPERATIONS * 8):
        moment = (begin + timedelta(microseconds=at)).isoformat(timespec="microseconds")
        token = {"token": {"token": str(uuid4()), "generation_time": moment}}
        pairs.append(cancellable(name, at, operation, token))
    adds, cancels = [add for add, _ in pairs], [cancel for _, cancel in pairs]
    before = run(program, service.url, adds[::2], **QUICK)
    with misbehaving(service.url, seed, SLOW_S, DECK) as proxy:
        ends = run(program, proxy.url, [*cancels, *adds, *cancels], **HASTY)
        assert set(proxy.dealt) == {fault.__name__ for fault in DECK}
    print(Counter(each["outcome"] for each in (*before, *ends)))
    final = run(program, service.url, cancels, **QUICK)
    for at, end in enumerate(final):
        assert end["outcome"] == "done"
        first, added, second = ends[at :: len(adds)]
        for each in (first, second):
            assert each == end or each["outcome"] in ("unknown", "unsent")
        adding = [added] if at % 2 else [before[at // 2], added]
        assert all(each["applied"] is False for each in adding if each["outcome"] == "refused")
        if "done" in [each["outcome"] for each in adding]:
            assert end["was_counted"] is True
    assert "done" in [each["outcome"] for each in ends]
    assert run(program, service.url, adds, **QUICK) == [CANCELLED] * len(adds)
    names = [x["counter"] for add in adds for x in add.get("items", [add])]
    assert counts(service, names) == dict.fromkeys(names, 0)


def test_a_cancel_is_of_a_key_and_a_payload(program: list[str], service: Server) -> None:
    """A clear that is cancelled leaves the count, and so does a cancel of another payload."""
    name = f"cancels-{uuid4().hex[:8]}"
    keyed = [
        cancellable(name, at, operation, {"key": f"{name} {at}"})
        for at, operation in enumerate(OPERATIONS)
    ]
    adds, cancels = [add for add, _ in keyed], [cancel for _, cancel in keyed]
    ended = [each["counter"] for each in adds if each["do"] in ("clear", "delete")]
    before = [{"do": "add", "counter": each, "delta": "7"} for each in ended]
    for commands in (before, adds):
        ends = run(program, service.url, commands, **QUICK)
        assert {each["outcome"] for each in ends} == {"done"}
    names = [x["counter"] for add in adds for x in add.get("items", [add])]
    was = counts(service, names)
    assert [was[each] for each in ended] == [0, 0]
    others = []
    for cancel in cancels:
        found = json.loads(cancel["unfinished"])
        found["items"] = [[counter, delta + 1] for counter, delta in found["items"]]
        if found["operation"] not in ("clear", "delete"):
            others.append(cancel | {"unfinished": json.dumps(found)})
    conflict = {"outcome": "refused", "code": "token_conflict", "applied": None}
    assert run(program, service.url, others, **QUICK) == [conflict] * 3
    assert counts(service, names) == was
    for _ in range(2):
        ends = run(program, service.url, cancels, **QUICK)
        assert ends == [{"outcome": "done", "was_counted": True}] * len(cancels)
    assert run(program, service.url, adds, **QUICK) == [CANCELLED] * len(adds)
    assert counts(service, names) == {each: 7 * (each in ended) for each in names}


def bounded(counter: str, number: int) -> list[tuple[Json, Json]]:
    """Adds of 3 to *counter* until it is 60, and the commands that cancel them."""
    # Later than a slow start, so that few adds are late; and each token has a time of its own.
    begin = datetime.now(UTC) + timedelta(seconds=3)
    bounds = {"at_least": 0, "at_most": 60}
    texts = {name: str(bound) for name, bound in bounds.items()}
    found = []
    for at in range(number):
        operation = ("add", "add-and-get", "atomic/add")[at % 3]
        moment = (begin + timedelta(microseconds=at)).isoformat(timespec="microseconds")
        credential: Json = {"token": {"token": str(uuid4()), "generation_time": moment}}
        if at % 2:
            credential = {"key": f"{counter} {at}"}
        add, cancel = cancellable(counter, at, operation, credential)
        one = add["items"][0] if "items" in add else add
        one |= {"counter": counter, "delta": "3", **texts}
        unfinished = json.loads(cancel["unfinished"])
        unfinished["items"][0] = [counter, 3, bounds]
        found.append((add, cancel | {"unfinished": json.dumps(unfinished)}))
    return found


def verdict(outcome: Json) -> Json:
    """What every retry must repeat."""
    return outcome if outcome["outcome"] == "refused" else outcome["outcome"]


def test_bounds_hold_through_any_fault(program: list[str], service: Server) -> None:
    """Each add is accepted or refused once and for all, and the accepted ones have room."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    counter = f"bounds-{uuid4().hex[:8]}"
    # Those under keys alone are more than there is room for: on a busy machine tokens are too old.
    adds, cancels = zip(*bounded(counter, 48), strict=True)
    item = {"counter": counter, "delta": "3", "at_most": "60"}
    # An answer to another add would be taken for its own: all look alike.
    deck = [each for each in DECK if each not in MIXING]
    with misbehaving(service.url, seed, SLOW_S, deck) as proxy:
        batch: Json = {"do": "batch", "items": [item] * 6}
        *ends, several = run(program, proxy.url, [*adds, batch], **HASTY)
    final = list(map(verdict, run(program, service.url, adds, **QUICK)))
    for add, end, last in zip(adds, ends, final, strict=True):
        assert verdict(end) in (last, "unknown", "unsent"), (add, end)
    assert list(map(verdict, run(program, service.url, adds, **QUICK))) == final
    codes = Counter(each if each == "done" else each["code"] for each in final)
    print(codes)
    assert codes["done"] > 0
    assert codes["bound_reached"] > 0

    of_batch = several["results"]
    again = [
        {"do": "resolve", "unfinished": each["unfinished"]}
        for each in of_batch
        if "unfinished" in each
    ]
    resolved = [each.get("applied") for each in run(program, service.url, again, **QUICK)]
    merged = 3 * ([verdict(each) for each in of_batch].count("done") + resolved.count(True))
    assert counts(service, [counter]) == {counter: 3 * codes["done"] + merged}
    assert 3 * codes["done"] + merged <= 60

    bare = [json.loads(cancel["unfinished"]) for cancel in cancels]
    for unfinished in bare:
        unfinished["items"] = [each[:2] for each in unfinished["items"]]
    others = [
        {"do": "cancel", "unfinished": json.dumps(each)}
        for each, end in zip(bare, final, strict=True)
        if end == "done" or end["code"] == "bound_reached"
    ]
    conflict = {"outcome": "refused", "code": "token_conflict", "applied": None}
    assert run(program, service.url, others, **QUICK) == [conflict] * len(others)
    cancelled = run(program, service.url, cancels, **QUICK)
    assert cancelled == [{"outcome": "done", "was_counted": each == "done"} for each in final]
    assert counts(service, [counter]) == {counter: merged}
    [end] = run(program, service.url, [{"do": "add", **item}], **QUICK)
    assert end == {"outcome": "done", "replayed": False}


def held(counter: str, number: int) -> list[Json]:
    """Holds of 3 of *counter* until 60 are held, under keys and tokens."""
    # Later than a slow start, so that few are late; and each token has a time of its own.
    begin = datetime.now(UTC) + timedelta(seconds=3)
    found = []
    for at in range(number):
        moment = (begin + timedelta(microseconds=at)).isoformat(timespec="microseconds")
        credential: Json = {"token": {"token": str(uuid4()), "generation_time": moment}}
        if at % 2:
            credential = {"key": f"{counter} {at}"}
        wanted = {"counter": counter, "amount": "3", "expires_in": "300s", "at_most": "60"}
        found.append({"do": "hold", **wanted, **credential})
    return found


def end_of(outcome: Json) -> Json:
    """What became of a hold, by the outcome of a settle or a release; None if it does not say."""
    if outcome["outcome"] == "refused":
        return outcome["code"].removeprefix("hold_"), outcome.get("settled")
    if outcome["outcome"] != "done":
        return None
    return ("settled", outcome["settled"]) if "settled" in outcome else ("released", None)


def test_holds_end_once_through_any_fault(program: list[str], service: Server) -> None:
    """Each is open or refused once and for all, and the open ones have room; then each is settled
    or released, and every call that is answered reports the same end."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    counter = f"holds-{uuid4().hex[:8]}"
    holds = held(counter, 30)
    # An answer to another hold would be taken for its own: all look alike.
    deck = [each for each in DECK if each not in MIXING]
    with misbehaving(service.url, seed, SLOW_S, deck) as proxy:
        ends = run(program, proxy.url, holds, **HASTY)
    final = run(program, service.url, holds, **QUICK)
    for end, last in zip(ends, final, strict=True):
        assert verdict(end) in (verdict(last), "unknown", "unsent"), (end, last)
    ids = [each["hold"] for each in final if each["outcome"] == "done"]
    get = {"do": "get", "counter": counter, "max_staleness": "0s"}
    [found] = run(program, service.url, [get], **QUICK)
    assert (found["count"], found["held"]) == ("0", str(3 * len(ids)))
    assert 0 < 3 * len(ids) <= 60
    [found] = run(program, service.url, [{"do": "holds", "counter": counter}], **QUICK)
    assert sorted(each["hold"] for each in found["holds"]) == sorted(ids)

    calls: list[Json] = []
    for at, hold in enumerate(ids):
        if at % 3 != 2:
            calls.append({"do": "settle", "hold": hold, "amount": str(at % 5)})
        if at % 3 != 0:
            calls.append({"do": "release", "hold": hold})
    with misbehaving(service.url, seed, SLOW_S, deck) as proxy:
        outcomes = run(program, proxy.url, [*calls, *calls], **HASTY)
    states = run(program, service.url, [{"do": "get_hold", "hold": x} for x in ids], **QUICK)
    assert {each["outcome"] for each in states} == {"done"}, states
    by_id = {each["hold"]: (each["state"], each.get("settled")) for each in states}
    assert None not in map(end_of, run(program, service.url, calls, **QUICK))
    states = run(program, service.url, [{"do": "get_hold", "hold": x} for x in ids], **QUICK)
    for call, outcome in zip([*calls, *calls], outcomes, strict=True):
        assert end_of(outcome) in (by_id[call["hold"]], None), (call, outcome)
    ended = {each["hold"]: (each["state"], each.get("settled")) for each in states}
    assert all(by_id[each] in (end, ("open", None)) for each, end in ended.items())
    print(Counter(ended.values()))
    spent = sum(int(settled) for _, settled in ended.values() if settled is not None)
    [found] = run(program, service.url, [get], **QUICK)
    assert (found["count"], "held" in found) == (str(spent), False)
    rest = {"do": "add", "counter": counter, "delta": str(60 - spent), "at_most": "60"}
    assert run(program, service.url, [rest], **QUICK) == [{"outcome": "done", "replayed": False}]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service whose counts only a test of reads changes."""
    with served(tmp_path_factory.mktemp("quiet")) as server:
        yield server


def reads(name: str, sums: Mapping[str, int]) -> list[tuple[Json, Json]]:
    """Commands, and the members of their outcomes; *name* is the counters' prefix."""
    names = sorted(sums)
    counted = [{"counter": x, "count": str(sums[x]), "accuracy": "accurate"} for x in names]
    largest = sorted(counted, key=lambda each: -int(each["count"]))
    before = {"from": "2020-01-01T00:00:00Z"}
    found: list[tuple[Json, Json]] = [
        ({"do": "get_many", "counters": names, "max_staleness": "0s"}, {"counts": counted}),
        ({"do": "names", "prefix": name}, {"counters": names}),
        ({"do": "list", "prefix": name}, {"counts": counted}),
        ({"do": "list", "prefix": name, "order": "-count", "limit": 2}, {"counts": largest[:2]}),
        (
            {"do": "sum", "prefix": name},
            {"sum": str(sum(sums.values())), "counters": len(names)},
        ),
        ({"do": "tokens", "number": 7}, {"tokens": 7}),
        ({"do": "namespaces"}, {"namespaces": ["default"]}),
        ({"do": "namespace"}, {"counter_type": "ACCURATE"}),
        ({"do": "change_namespace", "settings": {"cache_ttl": "9s"}}, {"counter_type": "ACCURATE"}),
    ]
    for each in names:
        of_one, count = {"counter": each}, str(sums[each])
        found += [
            ({"do": "get", **of_one}, {"count": count, "accuracy": "accurate"}),
            ({"do": "between", **of_one, **before}, {"count": count, "delta": count}),
            ({"do": "live", **of_one, "until": count}, {"count": count}),
        ]
    return found


#: Names and sums do not say what was asked: what answers another request fits them.
UNNAMED = ("names", "list", "sum", "tokens")
PRECONDITION_FAILED = {"outcome": "refused", "code": "precondition_failed", "applied": None}
MIXING = (answered_as_another, surplus)


@pytest.mark.parametrize("unnamed", [False, True])
def test_reads_are_right_through_any_fault(
    program: list[str], quiet: Server, unnamed: bool
) -> None:
    """Done has the value, and any other end says that there is none."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    name = f"reads-{uuid4().hex[:8]}-"
    sums = {f"{name}{at}": 10**at for at in range(8)}
    added = run(
        program,
        quiet.url,
        [{"do": "add", "counter": each, "delta": str(delta)} for each, delta in sums.items()],
        **QUICK,
    )
    assert {each["outcome"] for each in added} == {"done"}
    asked = [x for x in reads(name, sums) * 4 if (x[0]["do"] in UNNAMED) == unnamed]
    deck = [each for each in DECK if not unnamed or each not in MIXING]
    with misbehaving(quiet.url, seed, SLOW_S, deck) as proxy:
        # A busy service answers fewer of the first attempts: most calls need several.
        patient = HASTY | {"timeout": "60s"}
        found = run(program, proxy.url, [command for command, _ in asked], **patient)
    ends = Counter(each["outcome"] for each in found)
    print(f"{sum(proxy.dealt.values())} requests; {dict(ends)}")
    for (command, members), end in zip(asked, found, strict=True):
        allowed = [{"outcome": "done", **members}, {"outcome": "unknown"}]
        if command["do"] == "change_namespace":
            # The other of two changes at the same time.
            allowed.append(PRECONDITION_FAILED)
        assert end in allowed, command
    assert ends["done"] > ends["unknown"]


def test_a_namespace_has_a_life(program: list[str], quiet: Server) -> None:
    """One command after another: created once, changed, and deleted with its counters."""
    name = f"videos-{uuid4().hex[:8]}"
    settings = {"counter_type": "ACCURATE"}
    unknown = {"outcome": "refused", "code": "namespace_unknown", "applied": None}
    done = {"outcome": "done", **settings}
    steps: list[tuple[Json, Json]] = [
        ({"do": "namespace"}, unknown),
        ({"do": "change_namespace", "settings": settings}, PRECONDITION_FAILED),
        ({"do": "create_namespace", "settings": settings}, done),
        ({"do": "create_namespace", "settings": settings}, PRECONDITION_FAILED),
        ({"do": "change_namespace", "settings": {"cache_ttl": "1s"}}, done),
        ({"do": "namespaces"}, {"outcome": "done", "namespaces": ["default", name]}),
        (
            {"do": "buffer", "items": [{"counter": "a", "delta": "2"}]},
            {"outcome": "done", "failed": []},
        ),
        ({"do": "recount", "counter": "a"}, None),
        (
            {"do": "busiest", "span": "1m"},
            {"outcome": "done", "counters": [{"counter": "a", "count": "2"}]},
        ),
        ({"do": "events", "counter": "a"}, None),
        ({"do": "history", "counter": "a"}, None),
        ({"do": "delete_namespace"}, {"outcome": "done"}),
        ({"do": "delete_namespace"}, unknown),
    ]
    for command, wanted in steps:
        [end] = run(program, quiet.url, [command], **QUICK, namespace=name)
        if wanted is None:
            assert end["outcome"] == "done", command
        else:
            assert end == wanted, command


def resolve(
    program: list[str], url: str, unknown: Sequence[str], options: Mapping[str, str]
) -> dict[str, bool]:
    """Whether each add is counted, of those with a definite answer."""
    commands = [{"do": "resolve", "unfinished": each} for each in unknown]
    ends = run(program, url, commands, **options)
    assert {each["outcome"] for each in ends} <= {"done", "unknown"}
    return {
        each: end["applied"]
        for each, end in zip(unknown, ends, strict=True)
        if end["outcome"] == "done"
    }


def counts(service: Server, counters: Iterable[str]) -> dict[str, int]:
    body = {"counters": list(counters), "max_staleness": "0s"}
    url = f"{service.url}/v1/namespaces/default/batch/get"
    answer = httpx.post(url, json=body, timeout=30, trust_env=False)
    return {each["counter"]: each["count"] for each in answer.json()["results"]}


def test_without_a_connection_an_add_is_unsent(program: list[str], service: Server) -> None:
    """And any client can finish an unfinished add of another one."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    name = f"unsent-{uuid4().hex[:8]}"
    items = [{"counter": f"{name}-{at}", "delta": "4"} for at in range(4)]
    commands: list[Json] = [
        {"do": "add", **items[0]},
        {"do": "atomic", "items": items[1:3]},
        {"do": "batch", "items": items[3:]},
    ]
    found = run(program, url, commands, **HASTY | {"timeout": "300ms"})
    ends = [end for _, end in each_add(commands, found)]
    assert [each["outcome"] for each in ends] == ["unsent"] * 3
    names = [each["counter"] for each in items]
    assert counts(service, names) == dict.fromkeys(names, 0)

    unfinished = [each["unfinished"] for each in ends]
    finished = resolve(PROGRAMS["python"](Path()), service.url, unfinished, QUICK)
    applied = {json.loads(each)["items"][0][0]: finished[each] for each in unfinished}
    expected = {each: 4 * applied.get(each, applied[names[1]]) for each in names}
    assert counts(service, names) == expected
