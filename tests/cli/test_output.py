"""A failure to print never changes the meaning of an exit code of an add."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from unittest.mock import patch

import pytest

from counter.cli.client import ServiceFlags, finishing
from counter.cli.terminal import OutputError, StandardError, exiting
from counter_client import CounterClient, Unfinished
from tests.cli.shell import Shell
from tests.client.stranger import http, stranger
from tests.support.in_thread import Service

pytestmark = pytest.mark.usefixtures("at_service")

#: Cyrillic, which cp1251 has, Japanese, and a character of two UTF-16 units.
NAMES = ("продажи", "売上", "x🎉")
#: Commands that may leave out the name.
NAMELESS = ("watch", "history", "events", "token")
FULL = Path("/dev/full")


def run(
    service: str,
    *words: str,
    encoding: str = "cp1252",
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
    closed: str = "",
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line as a process; a shell has *closed* a stream, such as ``2>&-``."""
    command: Sequence[str] = [sys.executable, "-m", "counter", *words]
    if closed:
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COUNTER_URL": service},
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "encoding"), [*zip(NAMES, ("cp1252", "ascii", "utf-8"), strict=True)]
)
@pytest.mark.usefixtures("child_processes")
def test_an_add_is_counted_once_in_every_encoding(
    service: Service, name: str, encoding: str
) -> None:
    """Regression: it was counted, and ended with a traceback and 1, which says it is not."""
    done = run(service.url, "add", name, "--get", encoding=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"1\n", b"")
    done = run(service.url, "add", name, "2", encoding=encoding)
    shown = done.stdout.decode(encoding).removesuffix(": 2 added\n")
    assert (done.returncode, json.loads(f'"{shown}"'), done.stderr) == (0, name, b"")
    done = run(service.url, "get", name, "--json", encoding=encoding)
    assert json.loads(done.stdout.decode(encoding))["count"] == 3


@pytest.mark.parametrize(
    "words",
    [
        ["add", "{name}", "--json"],
        ["clear", "{name}"],
        ["delete", "{name}"],
        ["get", "{name}", "other"],
        ["get", "{name}", "other", "--json"],
        ["list", "{name}"],
        ["list", "{name}", "--json"],
        ["watch", "{name}", "--count", "1"],
        ["watch", "{name}", "--count", "1", "--json"],
        ["history", "{name}"],
        ["events", "{name}"],
        ["top"],
    ],
    ids=" ".join,
)
def test_unencodable_characters_are_printed_as_json_escapes(
    words: Sequence[str], shell: Shell
) -> None:
    name = f"売上🎉 {words[0]} {len(words)}"
    shell.said("add", name)
    kept = io.BytesIO()
    out = io.TextIOWrapper(kept, encoding="cp1252")
    with patch("sys.stdout", out):
        code, _ = shell.run(*(each.format(name=name) for each in words))
    assert code == 0, shell.err
    shown = kept.getvalue()
    assert b"\\u58f2\\u4e0a\\ud83c\\udf89" in shown or words[0] in NAMELESS


@pytest.mark.parametrize("words", [["add", "full"], ["add", "full", "--json"], ["clear", "full"]])
@pytest.mark.usefixtures("child_processes")
def test_a_full_disk_does_not_make_an_add_uncounted(service: Service, words: list[str]) -> None:
    """Regression: with standard error on the full disk, too, it ended with a traceback and 1."""
    with FULL.open("wb", buffering=0) as full:
        assert run(service.url, *words, stdout=full).returncode == 141
        assert run(service.url, *words, stderr=full).returncode == 0
        assert run(service.url, *words, stdout=full, stderr=full).returncode == 141


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", "2>&- >&-", "<&-"])
@pytest.mark.usefixtures("child_processes")
def test_a_stream_that_is_closed_or_full_leaves_the_exit_code(
    closed: str, service: Service
) -> None:
    """Regression: 2>&- printed errors on standard output; 2>/dev/full and <&- ended with 1."""
    for words, code in (
        (["add", "closed"], 0),
        (["add", "closed", "--key", "k", "--namespace", "none-there"], 1),
        (["add", "closed", "--frob"], 2),
        (["add", "closed", "--url", "http://127.0.0.1:9", "--timeout", "1s"], 2),
        (["export", "-"], 141 if closed.endswith(" >&-") else 0),
    ):
        done = run(service.url, *words, closed=closed)
        assert done.returncode == code, (words, done)
        assert code == 0 or b"counter:" not in done.stdout


@pytest.mark.usefixtures("child_processes")
def test_lines_need_a_standard_input(service: Service) -> None:
    done = run(service.url, "add", "--stream", closed="<&-")
    assert (done.returncode, b"standard input is closed" in done.stderr) == (2, True)


@pytest.mark.usefixtures("child_processes")
def test_help_that_cannot_be_printed_ends_with_141() -> None:
    """Regression: it ended with 1."""
    for words in (["add", "--help"], ["--help"], ["--version"]):
        with FULL.open("wb", buffering=0) as full:
            done = run("http://127.0.0.1:9", *words, stdout=full)
        message = b"counter: standard output: No space left on device\n"
        assert (done.returncode, done.stderr.replace(b"\r", b"")) == (141, message)
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            done = run("http://127.0.0.1:9", *words, stdout=pipe)
        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("answer", "words", "code"),
    [
        # No response to the add: unknown.
        (b"", ["add", "c", "--json"], 4),
        # It is too old, and void.
        (
            http(
                "410 Gone",
                b'{"code":"token_too_old","retry":"new_token","applied":false,"detail":"late"}',
            ),
            ["token", "resolve", "--json", '{"operation":"add","namespace":"default",'
             '"items":[["c",1]],"token_text":"key:k"}'],
            1,
        ),
    ],
)  # fmt: skip
def test_an_outcome_that_cannot_be_printed_keeps_its_exit_code(
    answer: bytes, words: list[str], code: int, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it ended with 141, which says that the add is counted."""
    accurate = {"counter_type": "ACCURATE", "namespace": "default"}
    with stranger(answer) as other, FULL.open("w") as full:
        monkeypatch.setenv("COUNTER_URL", other.url)
        with (
            patch("sys.stdout", full),
            patch.object(CounterClient, "namespace", lambda _: accurate),
        ):
            assert shell.run(*words, "--timeout", "3s")[0] == code
    assert "standard output: No space left on device" in shell.err


def test_an_existing_exit_code_is_kept() -> None:
    with pytest.raises(OutputError), exiting(0):
        raise OutputError
    with exiting(0):
        pass
    with pytest.raises(SystemExit, match="3"), exiting(3):
        pass
    with pytest.raises(SystemExit, match="3"), exiting(3):
        raise OutputError


def test_the_command_that_finishes_an_add_names_the_counter_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: copied from a terminal, it counted in a counter with another name."""
    what = Unfinished("add", "default", (("売上", 2),), "key:k")
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert "'売上'" in finishing(what, ServiceFlags()) or "売上" in finishing(what, ServiceFlags())
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    shown = finishing(what, ServiceFlags())
    assert shown.isascii()
    assert shown.startswith("counter token resolve '{")
    assert Unfinished.parse(shown.split("'")[1]) == what


def test_standard_error_that_cannot_be_written_is_discarded() -> None:
    with FULL.open("w") as full:
        failing = StandardError(full)
        failing.write("x")
        failing.flush()
        failing.write("y")
        failing.flush()
        assert failing.encoding == full.encoding
    closed = StandardError(None)
    closed.write("x")
    closed.close()
