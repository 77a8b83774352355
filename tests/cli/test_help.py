"""Every command of the command line: its help has examples that hold and its exit codes, and what
it prints it prints as JSON too."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import signature

import pytest
from cyclopts import App

from counter.cli.app import app
from counter.security.keys import id_in

#: They print nothing, or a script; what is served logs JSON with --log-format.
NO_JSON = {"serve", "rollup", "completion", "namespace delete"}
#: They end when they are told to, or at once.
NO_INTERRUPT = {"serve", "rollup", "completion", "config check", "token derive"}


def commands(of: App, *path: str) -> Iterator[tuple[str, App]]:
    """Every command, by the words that call it."""
    for name in of:
        if name.startswith("-"):
            continue
        command = of[name]
        if command.default_command is None:
            yield from commands(command, *path, name)
        else:
            yield " ".join([*path, name]), command


ALL = dict(commands(app))


def test_all_commands_are_looked_at() -> None:
    assert {"serve", "key create", "schema restored", "export", "import", "doctor"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_its_help_has_examples_that_hold_and_its_exit_codes(name: str) -> None:
    text = ALL[name].help or ""
    examples = examples_of(name)
    assert examples, text
    for words in examples:
        app.parse_args(words, print_error=False, exit_on_error=False)
    codes = text.partition("Exit codes: ")[2]
    assert re.search(r"\b0\b", codes), text
    assert re.search(r"\b2\b| of counter ", codes), text
    assert name in NO_INTERRUPT or name.startswith("plan ") or "130" in codes, text


def examples_of(name: str) -> list[list[str]]:
    """The words of each example in a command's help."""
    found = re.findall(rf"^  (counter {name}\b.*)$", ALL[name].help or "", re.MULTILINE)
    return [shlex.split(re.split(r" [|>] ", each)[0])[1:] for each in found]


@pytest.mark.parametrize("name", [each for each in ALL if each.startswith("plan ")])
def test_an_example_of_a_plan_is_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: one gave a number in a form that is not read."""
    for words in examples_of(name):
        if "--rates" not in words:
            app(words, result_action="return_value")
            assert capsys.readouterr().out


@pytest.mark.parametrize("name", ["key rotate", "key revoke"])
def test_an_example_names_a_key_as_keys_are_named(name: str) -> None:
    for words in examples_of(name):
        assert id_in(words[2]) == words[2]


@pytest.mark.parametrize("name", sorted(set(ALL) - NO_JSON))
def test_what_it_prints_it_prints_as_json_too(name: str) -> None:
    command = ALL[name].default_command
    assert command is not None
    given = signature(command, eval_str=True).parameters.values()
    names = {each.name for each in given}
    for each in given:
        for kind in getattr(each.annotation, "__args__", (each.annotation,)):
            if is_dataclass(kind):
                names |= {field.name for field in fields(kind)}
    assert "json" in names
