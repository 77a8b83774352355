"""The common parts of the commands against a service: the flags, the client, and exit codes."""

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cyclopts import App

from counter.__main__ import main
from counter.cli.app import app as counter
from counter.cli.client import (
    ServiceFlags,
    exit_code,
    exit_codes,
    finishing,
    open_client,
    options_of,
)
from counter.cli.terminal import print_out
from counter.config.report import load
from counter.errors import StartupError
from counter_client import Attempt, Token, Unfinished, UnknownOutcomeError
from counter_client.errors import (
    BadRequestError,
    CounterError,
    InvalidParameterError,
    KeyMissingError,
    NamespaceUnknownError,
    NotSupportedError,
    OverloadedError,
    ScopeInsufficientError,
    TokenConflictError,
    TokenTooOldError,
)
from counter_client.failures import UnreachableError

TOKEN = "5f3a0f0e-6f0c-4f7e-9d3b-0c5f1d2e3a4b@2026-11-21T13:01:12.649416Z"
AWAY = ServiceFlags(url="http://127.0.0.1:9", timeout="20ms")


def parsed(*words: str) -> ServiceFlags:
    """The flags that *words* give."""
    found: list[ServiceFlags] = []
    app = App()

    @app.default
    def keep(flags: ServiceFlags | None = None) -> None:
        found.append(flags or ServiceFlags())

    app(list(words), result_action="return_value")
    return found[0]


def end_of(error: BaseException, flags: ServiceFlags | None = None) -> int:
    """The exit code that *error* leads to."""
    with pytest.raises(SystemExit) as end, exit_codes(flags):
        raise error
    return int(end.value.code or 0)


def test_flags_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed() == ServiceFlags()
    monkeypatch.setenv("COUNTER_URL", "http://there:1")
    monkeypatch.setenv("COUNTER_NAMESPACE", "videos")
    assert parsed() == ServiceFlags(url="http://there:1", namespace="videos")
    assert parsed("--url", "http://here:2").url == "http://here:2"


def test_client_variables_are_not_unknown_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COUNTER_URL", "COUNTER_NAMESPACE", "COUNTER_API_KEY", "COUNTER_CONTEXT"):
        monkeypatch.setenv(name, "x")
    assert load({}).warnings == ()


def test_the_key_is_of_its_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error names its source, and never the key."""
    monkeypatch.setenv("COUNTER_API_KEY", "no key at all")
    with pytest.raises(InvalidParameterError) as error, open_client(AWAY):
        pass
    assert "no key at all" not in error.value.detail
    path = tmp_path / "key"
    path.write_text("ck_1\n")
    with open_client(replace(AWAY, api_key_file=path)):
        pass
    with (
        pytest.raises(StartupError, match="No such file"),
        open_client(replace(AWAY, api_key_file=tmp_path / "gone")),
    ):
        pass


@pytest.mark.parametrize(
    "flags",
    [
        ServiceFlags(timeout="soon"),
        ServiceFlags(timeout="0s"),
        ServiceFlags(url="ftp://x"),
        ServiceFlags(url=""),
    ],
    ids=["no time", "none", "another scheme", "nowhere"],
)
def test_an_invalid_option_ends_with_2(
    flags: ServiceFlags, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, exit_codes(), open_client(flags):
        pass
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("counter: ")


def test_a_read_whose_connection_is_refused_is_not_retried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: it was, until --timeout had passed."""
    flags = replace(AWAY, timeout="1h")
    with pytest.raises(SystemExit) as end, exit_codes(flags), open_client(flags) as client:
        client.get("c")
    assert end.value.code == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("counter: http://127.0.0.1:9 does not answer: ConnectError")
    assert "start one with counter serve, or say where it is with --url" in last


def test_the_second_attempt_without_an_answer_is_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = options_of(AWAY).on_attempt
    assert report is not None
    said = []
    for number in range(3):
        report(Attempt("POST", "add", AWAY.url, number, False, None, 0.0))
        said.append(capsys.readouterr().err)
    assert said == ["", f"counter: {AWAY.url} does not answer; trying again for 20ms\n", ""]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NamespaceUnknownError("n"), 1),
        (TokenConflictError("n"), 1),
        (ScopeInsufficientError("n"), 1),
        (NotSupportedError("n"), 1),
        (TokenTooOldError("n", applied=False), 1),
        (TokenTooOldError("n", applied=None), 4),
        (BadRequestError("n"), 2),
        (KeyMissingError("n"), 2),
        (OverloadedError("n"), 2),
        (UnreachableError("n"), 2),
        (CounterError("n"), 2),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, CounterError) else None,
)
def test_each_error_has_its_exit_code(error: CounterError, code: int) -> None:
    assert exit_code(error) == code == end_of(error)


def test_a_scope_that_is_too_low_is_answered_by_the_command_that_makes_a_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: it was no command that runs."""
    assert end_of(ScopeInsufficientError("n", scope="write"), ServiceFlags(namespace="shop")) == 1
    _, hint = capsys.readouterr().err.splitlines()
    command = hint.partition("such a key: counter ")[2].split()
    assert command == ["key", "create", "--namespace", "shop", "--scope", "write"]
    counter.parse_args(command, print_error=False, exit_on_error=False)


def test_other_errors_have_exit_codes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_of(KeyboardInterrupt()) == 130
    assert end_of(StartupError("no")) == 2
    assert end_of(FileNotFoundError(2, "No such file", "here")) == 2
    assert capsys.readouterr().err.endswith("counter: here: No such file\n")


def test_a_closed_pipe_ends_with_141_and_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert end_of(BrokenPipeError()) == 141
    sys.stdout.flush()
    assert capfd.readouterr().err == ""


def test_a_full_standard_output_ends_with_141(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: an add that was counted ended with 2, which says that nothing was sent."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as caught, exit_codes():
            print("counted")
    assert caught.value.code == 141
    assert capfd.readouterr().err == "counter: standard output: No space left on device\n"


@pytest.mark.usefixtures("child_processes")
def test_a_full_unbuffered_standard_output_ends_with_141(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Regression: with PYTHONUNBUFFERED an add ended with 2, other commands with a trace."""
    message = "counter: standard output: No space left on device\n"
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        io.TextIOWrapper(full, write_through=True) as unbuffered,
    ):
        monkeypatch.setattr(sys, "stdout", unbuffered)
        with pytest.raises(SystemExit) as caught, exit_codes():
            print_out("counted")
        assert (caught.value.code, capfd.readouterr().err) == (141, message)
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = subprocess.run(
            [sys.executable, "-m", "counter", "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, message)


def test_an_interrupt_during_imports_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Ctrl-C during the imports of a command printed a traceback."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("counter.cli.app.main", interrupted)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


def unfinished(operation: str, *items: tuple[str, int], token: str = TOKEN) -> Unfinished:
    return Unfinished(operation, "videos", items, token)


def test_an_unknown_outcome_is_reported_with_the_command_that_finds_it_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = UnknownOutcomeError("after a while", unfinished("add", ("views", -5)))
    assert end_of(error, ServiceFlags(url="http://there:1")) == 4
    *_, command = capsys.readouterr().err.splitlines()
    assert command == (
        f"counter add views -5 --token {TOKEN} --url http://there:1 --namespace videos"
    )


def test_the_command_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: flags equal to a default were left out, so the environment replaced them."""
    what = replace(unfinished("add", ("views", 1)), namespace="default")
    plain = f"counter add views 1 --token {TOKEN}"
    assert finishing(what, ServiceFlags()) == plain
    monkeypatch.setenv("COUNTER_NAMESPACE", "videos")
    monkeypatch.setenv("COUNTER_URL", "http://there:1")
    where = "--url http://127.0.0.1:8080 --namespace default"
    assert finishing(what, ServiceFlags()) == f"{plain} {where}"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (unfinished("add-and-get", ("a b", 1)), ["add", "a b", "1", "--get", "--token", TOKEN]),
        (unfinished("clear", ("c", 0)), ["clear", "c", "--token", TOKEN]),
        (unfinished("delete", ("c", 0)), ["delete", "c", "--token", TOKEN]),
        (unfinished("add", ("c", 1), token="key:o 1"), ["add", "c", "1", "--key", "o 1"]),
        (unfinished("add", ("c", 1), token="key:-o"), ["add", "c", "1", "--key=-o"]),
    ],
    ids=["add-and-get", "clear", "delete", "key", "a key like a flag"],
)
def test_the_command_is_ready_for_a_shell(what: Unfinished, words: Sequence[str]) -> None:
    given = shlex.split(finishing(what, ServiceFlags()))
    assert given == ["counter", *words, "--namespace", "videos"]


def test_a_name_like_a_flag_comes_after_the_flags() -> None:
    text = finishing(unfinished("add", ("--help", 1)), ServiceFlags())
    assert text.endswith("--namespace videos -- --help 1")


def test_an_atomic_add_is_finished_by_its_text() -> None:
    what = unfinished("atomic/add", ("a", -1), ("b", 1))
    _, command, verb, text, *_ = shlex.split(finishing(what, ServiceFlags()))
    assert (command, verb) == ("token", "resolve")
    assert Unfinished.parse(text) == what
    assert isinstance(Unfinished.parse(text).token, Token)


def test_without_standard_output_a_finished_command_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: an add that was counted ended with 1, which says that it is not."""
    monkeypatch.setattr(sys, "stdout", None)
    with exit_codes():
        pass
