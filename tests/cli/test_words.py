"""Messages of the service are printed in terms of commands and flags, not of requests."""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from counter.cli.client import (
    FLAG_FIELDS,
    SERVICE_PHRASES,
    ServiceFlags,
    explain,
    in_words,
    why_unknown,
)
from counter.cli.commands.namespace import CreateFlags
from counter.cli.commands.watch import _remarked
from counter.quantities import plural
from counter_client import Unfinished, UnknownOutcomeError
from counter_client.errors import CounterError, KeyMissingError
from tests.cli.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = tomllib.loads((ROOT / "api/document/problems.toml").read_text(encoding="utf-8"))
#: Terms that a command line does not have.
REQUESTS = re.compile(
    r"/v1/|\b(?:GET|PUT|POST|DELETE|PATCH)\b|\bIf-|Authorization|Idempotency-Key|[Hh]eader|JSON"
    r"|\bthe body\b|\bquery parameter|Content-Type|idempotency_token|generation_time"
    rf"|(?<![-'\w])(?:{'|'.join(FLAG_FIELDS)})\b"
)
#: Responses to requests that no command sends, because the client makes them: with one token, with
#: a body in JSON, and to a route that exists.
NO_COMMAND = {
    *("bad_request", "token_missing", "token_ambiguous", "not_found", "method_not_allowed"),
    *("unsupported_media_type", "uri_too_long", "head_too_large", "precondition_failed"),
    *("transfer_coding_unsupported",),
}
#: And how their texts begin in the source.
NO_COMMANDS = (
    *("there are {} Idempotency-Key headers"),
    *("the body has an idempotency_token and", "namespace {} is {}: give an idempotency_token"),
    *(
        "Content-Type is {}",
        "Content-Encoding is {}",
        "query parameter {} is",
        "max_staleness is of counts: add counts",
    ),
    *("body: it is not JSON", "namespace {} has no event_rules", "there are several ce-{} headers"),
    *(
        "there is no key {}; GET /v1/keys",
        "If-Match: {}, but namespace",
        "If-None-Match: {} exists",
    ),
    "{}: {}{}; the body is too large to say",
    # It begins with its field, which becomes --key.
    "Idempotency-Key has {} characters",
)
ROOMS = ("api/routes", "api/http", "counter/core", "counter/config")


def test_no_message_of_a_problem_speaks_of_requests() -> None:
    texts = {
        code: explain(
            CounterError(" ".join(each["detail"].split()), code=code, **each.get("fields", {}))
        )
        for code, each in PROBLEMS.items()
    }
    assert set(texts) >= NO_COMMAND
    found = {code: text for code, text in texts.items() if REQUESTS.search(text)}
    assert {code: text for code, text in found.items() if code not in NO_COMMAND} == {}


def messages(source: Path) -> Iterator[str]:
    """The texts of the errors and of the warnings of a module; {} for each value in them."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
            texts: list[ast.expr | None] = list(node.args[:1])
        else:
            texts = [node.value] if isinstance(node, ast.Yield) else []
        for text in texts:
            if isinstance(text, ast.Constant):
                yield str(text.value)
            elif isinstance(text, ast.JoinedStr):
                parts = text.values
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)


def test_no_message_in_the_source_of_the_service_does_either() -> None:
    """The settings of a process are the operator's: their names stay."""
    found = {
        text: in_words(text)
        for room in ROOMS
        for source in sorted((ROOT / room).glob("*.py"))
        if source.name not in ("settings.py", "report.py")
        for text in messages(source)
    }
    assert len(found) > 80
    wrong = {text for text, words in found.items() if REQUESTS.search(words)}
    assert {text for text in wrong if not text.startswith(NO_COMMANDS)} == set()


@pytest.mark.parametrize("phrase", SERVICE_PHRASES)
def test_every_translated_phrase_occurs_in_the_service(phrase: str) -> None:
    """A message that is reworded there is put into commands here as well."""
    said = "".join(
        each.read_text(encoding="utf-8")
        for room in ROOMS
        for each in sorted((ROOT / room).glob("*.py"))
    )
    # A message may be several literals, one below the other.
    assert phrase in re.sub(r'"\s+f?"', "", said)


def test_the_settings_that_are_flags_are_named_as_flags() -> None:
    of_namespaces = {each.name for each in fields(CreateFlags) if "_" in each.name}
    assert set(FLAG_FIELDS) == of_namespaces | {"max_staleness"}
    assert in_words("accept_limit is 5m and 'key_ttl' is 1m; raise key_ttl") == (
        "--accept-limit is 5m and 'key_ttl' is 1m; raise --key-ttl"
    )
    assert in_words("a multiple of the namespace's rollup_window 1s") == (
        "a multiple of the namespace's rollup window 1s"
    )


def wrong(*errors: Any) -> CounterError:
    return CounterError("adds_per_s: no (it is -1)", code="invalid_body", errors=list(errors))


def test_each_field_that_is_wrong_is_a_line_with_its_flag() -> None:
    """Regression: only the first one was printed."""
    first = {"field": "adds_per_s", "message": "no", "value": "-1"}
    second = {"field": "requests_per_s", "message": "too many", "value": "5"}
    missing = {"field": "shards", "message": "Field required", "value": None}
    assert explain(wrong(first, second, missing)).splitlines() == [
        "--adds-per-s: no (it is -1)",
        "--requests-per-s: too many (it is 5)",
        "--shards: Field required",
    ]
    # Nested fields are no flags.
    nested = {"field": "event_rules.0.type", "message": "no", "value": None}
    assert explain(wrong(first, nested)).splitlines()[1] == "event_rules.0.type: no"


@pytest.mark.parametrize("errors", [None, "x", 5, [], ["x"], [None], [{}], [{"field": 5}, 5]])
def test_an_answer_of_another_service_is_printed_as_it_is(errors: Any) -> None:
    assert explain(CounterError("no", errors=errors)).startswith("no")


def test_commands_speak_of_no_requests() -> None:
    for source in (ROOT / "counter/cli").rglob("*.py"):
        assert "/v1/" not in source.read_text(encoding="utf-8") or source.name == "client.py"


def test_secondary_errors_are_translated_too() -> None:
    """Regression: watch and an unknown outcome printed the text of the service."""
    asked = PROBLEMS["key_missing"]["detail"]
    unfinished = Unfinished("add", "default", (("c", 1),), "key:k")
    error = UnknownOutcomeError("no", unfinished)
    error.__cause__ = KeyMissingError(asked)
    assert not REQUESTS.search(why_unknown(error))
    assert _remarked(KeyMissingError(asked), "") == asked


def test_a_setting_that_is_fixed_is_said_to_be(shell: Shell) -> None:
    """Regression: it was an unknown option."""
    for name in ("counter-type", "dataset", "rollup-window", "shards"):
        for words in ([f"--{name}", "3"], [f"--{name}=3"]):
            assert shell.run("namespace", "change", "videos", *words) == (2, "")
            assert shell.err.startswith(
                f"counter: --{name} is fixed when a namespace is created: create another namespace"
            )
    assert shell.run("namespace", "change", "videos", "--retention", "3")[0] == 2
    assert "Unknown option: --retention" in shell.err


def test_one_is_not_many() -> None:
    assert plural(1, "line") == "1 line"
    assert plural(0, "line") == "0 lines"
    assert plural(1_234, "line is", "lines are") == "1,234 lines are"


def test_the_namespace_of_a_hint_is_ready_for_a_shell() -> None:
    error = CounterError("n", code="scope_insufficient", scope="write")
    assert explain(error, ServiceFlags(namespace="a b")).endswith("--namespace 'a b' --scope write")
