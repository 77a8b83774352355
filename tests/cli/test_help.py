"""Every command of the command line: its help has examples that hold and its exit codes, and what
it prints it prints as JSON too."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import signature

import pytest
from cyclopts import App

from counter.cli import app

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
    examples = re.findall(rf"^  (counter {name}\b.*)$", text, re.MULTILINE)
    assert examples, text
    for each in examples:
        words = shlex.split(re.split(r" [|>] ", each)[0])[1:]
        app.parse_args(words, print_error=False, exit_on_error=False)
    codes = text.partition("Exit codes: ")[2]
    assert re.search(r"\b0\b", codes), text
    assert re.search(r"\b2\b| of counter ", codes), text
    assert name in NO_INTERRUPT or name.startswith("plan ") or "130" in codes, text


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
