"""Every client keeps to clients/conformance/README.md, and counts exactly through any fault."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from clients.conformance.make_vectors import VECTORS
from clients.conformance.scripted import Asked, scripted
from tests.clients.programs import PROGRAMS, run

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


def vectors(name: str) -> Json:
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session", params=sorted(PROGRAMS))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Each client's program, built once."""
    return PROGRAMS[request.param](tmp_path_factory.mktemp("programs"))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a program with the commands of all vectors."""

    outcomes: dict[str, list[Json]]
    #: What was sent to the server, by the first counter's name up to a dash.
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
    """All vectors at once: each case of answers.json has a counter of its own."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(f"{API_KEY}\n")
    answers = {str(at): case["answers"] for at, case in enumerate(vectors("answers"))}
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
    ends = {(each["outcome"], each["code"]) for each in done.outcomes["refused"]}
    assert ends == {("refused", "invalid_parameter")}


def test_each_command_sends_its_request(done: Run) -> None:
    """Method, path, token and body."""
    assert {each["outcome"] for each in done.outcomes["requests"]} == {"done"}
    cases = {str(at) for at in range(len(vectors("answers")))}
    sent = [each for case, asked in done.asked.items() if case not in cases for each in asked]
    shown = [
        {
            "method": each.method,
            "path": each.path,
            "key": each.headers.get("idempotency-key"),
            "body": each.body,
        }
        for each in sent
    ]
    wanted = [each["request"] for each in vectors("requests")]
    assert sorted(map(text_of, shown)) == sorted(map(text_of, wanted))


def test_headers_are_those_of_the_protocol(done: Run) -> None:
    sent = [each for asked in done.asked.values() for each in asked]
    writes = [each for each in sent if each.method == "POST"]
    assert {each.headers.get("authorization") for each in sent} == {f"Bearer {API_KEY}"}
    assert {each.headers.get("content-type") for each in writes} == {"application/json"}
    limits_ms = [int(each.headers["request-timeout"].removesuffix("ms")) for each in writes]
    assert 0 < min(limits_ms) <= max(limits_ms) == 10_000


def test_each_answer_means_what_the_protocol_says(done: Run) -> None:
    wrong = []
    for at, case in enumerate(vectors("answers")):
        asked = done.asked[str(at)]
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
    """What the vectors have of an outcome; an add that is unknown must have an Unfinished."""
    if "results" in outcome:
        items = [without_unfinished(each, case) for each in outcome["results"]]
        return outcome | {"results": items}
    left = dict(outcome)
    unfinished = left.pop("unfinished", None)
    is_open = outcome["outcome"] in ("unknown", "unsent") and case["command"]["do"] != "get"
    assert (unfinished is not None) == is_open, (case["name"], outcome)
    return left


def text_of(value: Json) -> str:
    return json.dumps(value, sort_keys=True)
