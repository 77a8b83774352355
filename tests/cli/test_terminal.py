"""Nothing that comes from a service or a file controls the terminal of a person."""

import json
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counter.cli.terminal import print_out, printable, remark, table
from counter_client import Options
from tests.cli.shell import Shell
from tests.client.stranger import http, stranger

#: It clears the screen, sets its title, turns the writing round, and has half a character.
HOSTILE = "before\x1b[2J\x1b]0;owned\x07\x9b31m\r\x7f\u202e\ud800after"
PROBLEM = {"code": "counter_missing", "retry": "never", "applied": None, "detail": HOSTILE}
UNFINISHED = '{"operation":"add","namespace":"default","items":[["c",1]],"token_text":"key:k"}'
MOMENT = "2026-11-21T13:01:23.875103Z"
COUNT = {"namespace": "default", "counter": HOSTILE, "count": 3, "as_of": MOMENT}
BUSIEST = {
    "since": MOMENT, "as_of": MOMENT, "complete": True,
    "counters": [{"counter": HOSTILE, "adds_per_s": 1.5, "count": 3}],
}  # fmt: skip


def is_harmless(text: str) -> bool:
    return all(each in "\n\t" or unicodedata.category(each)[0] != "C" for each in text)


@given(st.text())
def test_printed_text_has_no_control_characters(text: str) -> None:
    assert is_harmless(printable(text).replace("\u200c", "").replace("\u200d", ""))
    assert "\n" not in printable(text)
    document = json.dumps({"name": text}, ensure_ascii=False)
    # A half of a character is written as it was read.
    assert json.loads(printable(document, lines=True)) == {"name": text}


@pytest.mark.parametrize("text", ["views", "größe €", "日本 語", "👩\u200d💻", "a\u00a0b"])
def test_valid_names_are_printed_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize("say", [print_out, remark, lambda text: print_out("", [text])])
def test_output_is_escaped(say: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: it reached the terminal as it came; half a character ended in a traceback."""
    say(HOSTILE)
    out, err = capsys.readouterr()
    assert is_harmless(out + err)
    assert "\\u001b[2J" in out + err


@pytest.fixture
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry may be cut off by the time limit: then a command reports that it had no answer."""
    monkeypatch.setattr(
        "counter.cli.client.Options", partial(Options, retries_at_once=0, retries_per_s=0)
    )


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        ("404 Not Found", PROBLEM, ["get", "c"]),
        ("404 Not Found", PROBLEM, ["add", "c"]),
        ("404 Not Found", PROBLEM, ["get", "c", "--json"]),
        ("404 Not Found", PROBLEM, ["watch", "c"]),
        ("404 Not Found", PROBLEM, ["namespace", "show", "n"]),
        ("200 OK", {"results": [{**COUNT, "accuracy": HOSTILE}] * 2}, ["get", "c", "d"]),
        ("200 OK", {**COUNT, "accuracy": HOSTILE}, ["get", "c", "--json"]),
        ("200 OK", BUSIEST, ["top"]),
        ("200 OK", BUSIEST, ["top", "--json"]),
        ("200 OK", {"namespace": HOSTILE, HOSTILE: HOSTILE}, ["namespace", "show", "n"]),
        ("200 OK", {"warnings": [HOSTILE]}, ["namespace", "show", "n"]),
        ("200 OK", {"namespaces": [{"namespace": HOSTILE}]}, ["namespace", "list"]),
        ("302 Found", {}, ["get", "c"]),
    ],
)
def test_every_command_escapes_what_a_service_sends(
    status: str, body: Any, words: list[str], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = http(status, json.dumps(body).encode(), "Location: https://x/\x1b[2J")
    with stranger(answer) as other:
        monkeypatch.setenv("COUNTER_URL", other.url)
        _, out = shell.run(*words, "--timeout", "20s")
    assert is_harmless(out + shell.err)
    assert "x1b" in out + shell.err or "u001b" in out + shell.err


#: A service that wants its problem to look like lines of the command's own.
FORGED = "no\nc: 1 added\r\n\u2028\x85\x0band so on"


@pytest.mark.usefixtures("one_attempt")
@pytest.mark.parametrize("code", ["token_conflict", "scope_insufficient", "counter_missing"])
@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("404 Not Found", ["add", "c"]),
        ("404 Not Found", ["get", "c"]),
        ("503 Service Unavailable", ["add", "c"]),
        ("410 Gone", ["token", "resolve", UNFINISHED]),
        ("404 Not Found", ["watch", "c"]),
        ("503 Service Unavailable", ["namespace", "show", "c"]),
        ("404 Not Found", ["export", "-"]),
    ],
)
def test_a_problem_cannot_look_like_lines_of_the_command(
    status: str, words: list[str], code: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each line of a problem's text got the program's name in front of it."""
    wrong = [{"field": FORGED, "message": FORGED, "value": FORGED}] * 2
    body = {**PROBLEM, "code": code, "detail": FORGED, "scope": FORGED, "errors": wrong}
    answer = http(status, json.dumps(body | {"warnings": [FORGED]}).encode())
    with stranger(answer) as other:
        monkeypatch.setenv("COUNTER_URL", other.url)
        _, out = shell.run(*words, "--timeout", "20s")
    lines = [line for line in (out + shell.err).split("\n") if "added" in line or "so on" in line]
    assert lines
    assert not [each for each in lines if each.startswith(("counter: c: 1", "counter: and so on"))]
    assert set(out + shell.err).isdisjoint("\r\u2028\x85\x0b")


def test_a_remark_has_only_the_given_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    remark("one\u2028two\x0bthree\nfour")
    assert capsys.readouterr().err == "counter: one\\u2028two\\u000bthree\ncounter: four\n"


def test_a_column_is_as_wide_as_its_widest_cell_on_a_terminal() -> None:
    assert table(("A", "N"), [("計", 1), ("b", -20)]) == "A     N\n計    1\nb   -20"
