"""Every command has help with valid examples and exit codes, and a JSON form of its output."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from inspect import signature

import pytest
from cyclopts import App

from counter.cli.app import app
from counter.config.report import is_secret
from counter.config.settings import own_settings
from counter.config.store_kinds import store_kind, store_names
from counter.security.keys import id_in
from scripts.docs_commands import commands_page

#: They print nothing, or a script; servers log JSON with --log-format.
NO_JSON = {"serve", "rollup", "completion", "namespace delete"}
NO_JSON |= {"context add", "context use", "context remove"}


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


def test_the_first_help_has_each_command_once_in_six_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = helped(capsys)
    assert re.findall(r"^╭─ (\w+)", text, re.MULTILINE) == [
        *("Count", "Hold", "Look", "Move", "Run", "Check", "Options")
    ]
    shown = re.findall(r"^│ ([a-z]+) ", text, re.MULTILINE)
    assert sorted(shown) == sorted({name.partition(" ")[0] for name in ALL})
    # Each in one line.
    assert len(shown) == len(re.findall(r"^│ (?!-)", text, re.MULTILINE))


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The output of ``--help`` of a command."""
    app([*words, "--help"], result_action="return_value")
    return capsys.readouterr().out


def test_the_help_of_an_add_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, "add")
    assert text.startswith("Usage: counter add [OPTIONS] NAME [DELTA]\n")
    assert len(text.splitlines()) <= 42
    assert re.findall(r"^╭─ (\w+)", text, re.MULTILINE) == ["Arguments", "Parameters", "Service"]
    assert "--url -u URL" in text
    assert "--namespace -n NAME" in text


def test_a_command_beside_the_store_has_the_flags_that_it_needs_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: the help of key create had five panels, of which retries and buckets were two."""
    beside = ("key create", "key list", "audit", "backup", "restore", "schema restored")
    for name in beside:
        text = helped(capsys, *name.split())
        panels = re.findall(r"^╭─ ([\w ]+) ─", text, re.MULTILINE)
        assert panels[-2:] == ["Store", "Other settings"], name
        assert set(panels[:-2]) <= {"Arguments", "Parameters"}
        store = text.partition("╭─ Store")[2].partition("╰")[0]
        places = [own_settings(store_kind(each))[0] for each in store_names()]
        assert re.findall(r"^│ --([a-z-]+)", store, re.MULTILINE) == [
            *("config", "store"),
            *(each.replace("_", "-") for each in places if not is_secret(each)),
            "keyspace",
        ]


def test_the_help_of_the_server_begins_with_what_most_need_and_ends_with_one_store_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    panels = dict(re.findall(r"^╭─ ([\w -]+?) ─+╮$(.*?)^╰", helped(capsys, "serve"), re.M | re.S))
    flags = {name: re.findall(r"^│ --([a-z-]+)", text, re.M) for name, text in panels.items()}
    first, *others = flags
    assert first == "Start"
    assert {"store", "data", "host", "port"} < set(flags[first])
    for store in store_names():
        own = {each.replace("_", "-") for each in own_settings(store_kind(store))}
        elsewhere = {
            each for name in flags if not name.endswith(f" {store}") for each in flags[name]
        }
        assert own & elsewhere <= {"data"}, store
    assert [each.startswith("Only with --store ") for each in others] == sorted(
        each.startswith("Only with --store ") for each in others
    )


@pytest.mark.parametrize("name", ALL)
def test_help_names_values_by_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: STR and INT did not describe the value."""
    assert re.findall(r"\b(STR|INT|PATH)\b", helped(capsys, *name.split())) == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["add"], "NAME is missing: give the name of a counter, or --stream\n"),
        (["get"], "NAME is missing: give the name of a counter, or of several\n"),
        (["context", "add", "a"], "--url is missing\n"),
        (["get", "c", "--namespace"], "--namespace needs a value\n"),
        (["add", "c", "1", "2", "3"], "'2 3' is more than the command takes\n"),
        (["add", "c", "--gte"], "--gte is not a flag of this command"),
        (["ad", "c"], 'Unknown command "ad". Did you mean "add"?'),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_a_usage_error_is_written_like_other_errors(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        app(words)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"counter: {why}")) == ("", True), err


def test_the_reference_has_each_usage_once_and_no_empty_panel() -> None:
    text = commands_page()
    assert "\ncounter add [OPTIONS] NAME [DELTA]\n" in text
    assert "\ncounter token resolve [OPTIONS] TOKEN [NAME [DELTA]]\n" in text
    assert (
        re.findall(r"\*\*(?:Start|Store|Other settings|Log|Dataset|Access|Limits)\*\*", text) == []
    )


@pytest.mark.parametrize("name", ALL)
def test_help_has_valid_examples_and_exit_codes(name: str) -> None:
    text = ALL[name].help or ""
    examples = examples_of(name)
    assert examples, text
    # A line that is folded cannot be copied; of a token every character is needed.
    lines = [line for line in text.splitlines() if line.startswith("  ") and "@" not in line]
    assert [line for line in lines if len(line) > 80] == []
    for words in examples:
        app.parse_args(words, print_error=False, exit_on_error=False)
    assert "Exit codes: 0 " in text


def examples_of(name: str) -> list[list[str]]:
    """The words of each example in a command's help."""
    found = re.findall(rf"^  (counter {name}\b.*)$", ALL[name].help or "", re.MULTILINE)
    return [shlex.split(re.split(r" [|<>] ", each)[0])[1:] for each in found]


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
def test_every_output_has_a_json_form(name: str) -> None:
    command = ALL[name].default_command
    assert command is not None
    given = signature(command, eval_str=True).parameters.values()
    names = {each.name for each in given}
    for each in given:
        for kind in getattr(each.annotation, "__args__", (each.annotation,)):
            if is_dataclass(kind):
                names |= {field.name for field in fields(kind)}
    assert "json" in names
