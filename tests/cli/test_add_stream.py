"""``counter add --stream``: adds from the lines of a pipe."""

import asyncio
import shlex
import signal
import sys
from asyncio.subprocess import PIPE
from unittest.mock import patch
from uuid import uuid4

import pytest

from counter_client import Buffer, CounterClient, RejectedError, UnsentError
from counter_client.errors import CounterError, TokenTooOldError
from counter_client.failures import Rejected
from tests.cli.shell import Shell
from tests.cli.test_service_commands import answers_lost
from tests.support.in_thread import Service
from tests.support.server import ROOT
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("at_service")


def stream(shell: Shell, lines: str, *words: str) -> tuple[int, str]:
    """The exit code, and the output."""
    return shell.run("add", "--stream", *words, stdin=lines.encode())


def test_each_line_is_counted(shell: Shell, name: str) -> None:
    """A name with spaces needs a tab; empty lines are none, and the last one may have no end."""
    word = name.replace(" ", "")
    lines = f"{word}\n{name}\t-7\r\n\n  \n{word} 5\n{name}\t\n{name}\t+2"
    assert stream(shell, lines) == (0, "5 lines are counted, which come to 2\n")
    assert (shell.said("get", word), shell.said("get", name)) == ("6", "-4")
    # The mark that Windows' tools write before a text is no part of a name.
    assert stream(shell, f"\ufeff{word} 0\n") == (0, "1 line is counted, which comes to 0\n")
    assert stream(shell, "") == (0, "0 lines are counted, which come to 0\n")


def test_a_line_with_bounds_is_decided_after_those_before_it(shell: Shell, name: str) -> None:
    """The flags are the bounds of lines without their own; refusals are counted separately."""
    lines = f"{name}\t3\n{name}\t-4\tat_least=0\n{name}\t-3 at_least=0 at_most=9\nx at_most=-1\n"
    assert stream(shell, lines) == (
        5,
        "2 lines are counted, which come to 0; 2 lines are refused because of a bound\n",
    )
    assert f"counter: line 2: counter '{name}' was 3, and -4 would have taken it past" in shell.err
    assert "counter: line 4: " in shell.err
    assert shell.said("get", name) == "0"
    lines = f"{name}\t2\n{name}\t3\n{name}\t3\tat_most=5\n"
    assert stream(shell, lines, "--at-most", "4") == (
        5,
        "2 lines are counted, which come to 5; 1 line is refused because of a bound\n",
    )
    assert shell.said("get", name) == "5"


def test_lines_that_are_merged_are_refused_together(shell: Shell, name: str) -> None:
    """By the bounds of the namespace; lines after them go on."""
    made = ("--namespace", f"made-{uuid4().hex}")
    shell.said("namespace", "create", made[1], "--at-most", "5")
    lines = f"{name}\t6\n{name}\t2\n{name}\t2\tat_least=0\n{name}\t2\tat_least=0\n"
    assert stream(shell, lines, *made) == (5, "")
    refused = f"{name}: +6 is not counted: counter '{name}' was 0, and +6 would have taken it past"
    assert refused in shell.err
    assert "counter: line 4: " in shell.err
    assert "counter: 4 lines were read; what is not named here is counted" in shell.err
    assert shell.said("get", name, *made) == "4"


def test_a_bounded_line_without_an_answer_is_printed_as_a_command(shell: Shell, name: str) -> None:
    with answers_lost():
        lines = f"{name}\t3\tat_most=3\n{name}\t1\n"
        assert stream(shell, lines, "--timeout", "2s") == (4, "")
    [command] = printed_commands(shell)
    assert "counter: 1 line was read; what is not named here is counted" in shell.err
    assert shell.said(*command[1:]).endswith("was counted before, and is not again")
    assert shell.said("get", name) == "3"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"page home\n", "DELTA: 'home' is not an integer; write it like 5 or -5"),
        (b"page home 5\n", "it has more than a NAME and a DELTA; put a tab between them"),
        (b"a\t9223372036854775808\n", "9223372036854775808"),
        (b"\t5\n", "a counter's name has 1 to"),
        (b"\xff\n", "'utf-8' codec can't decode byte 0xff"),
        (b"a 1 at_last=5\n", "'at_last' is neither at_least nor at_most"),
        (b"a 1 at_least=5 at_most=4\n", "no count is both"),
        (b"a 1 at_most=9223372036854775808\n", "9223372036854775808"),
        (b"a" * 20_000 + b"\n", "it has more than 16,384 bytes"),
    ],
)
def test_a_wrong_line_ends_the_stream(shell: Shell, name: str, wrong: bytes, why: str) -> None:
    """Lines before it are counted, and none after it."""
    line = f"{name}\t1\n".encode()
    assert "counter: line 4: " in shell.fails(
        2, "add", "--stream", stdin=line + b"\n" + line + wrong + line
    )
    assert why in shell.err
    assert "counter: 2 lines are counted, which come to 2; no line after that" in shell.err
    assert shell.said("get", name) == "2"


def test_other_flags_are_refused(shell: Shell) -> None:
    for words in (["views"], ["--get"], ["--key", "k"], ["--json"]):
        assert stream(shell, "views\n", *words) == (2, "")
        assert "--stream: it takes no NAME, --get, --token, --key or --json" in shell.err
    assert "NAME is missing" in shell.fails(2, "add")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--url", "http://127.0.0.1:9"], "start one with counter serve"),
        (["--namespace", "nowhere"], "there is no namespace 'nowhere'"),
    ],
)
def test_a_service_that_does_not_answer_ends_it_at_the_first_line(
    shell: Shell, name: str, words: list[str], why: str
) -> None:
    """It is not counted, and printed, so that it can be added later."""
    left = f"{name}\t3\n"
    assert stream(shell, f"{left}unread\n", *words, "--timeout", "2s") == (4, left)
    assert why in shell.err
    assert printed_commands(shell) == []
    assert "counter: 1 line was read; what is not named here is counted" in shell.err


def printed_commands(shell: Shell) -> list[list[str]]:
    """The words of those that it printed to be copied."""
    lines = shell.err.splitlines()
    return [shlex.split(line) for line in lines if line.startswith("counter add ")]


def test_unknown_outcomes_are_printed_as_commands(shell: Shell, name: str) -> None:
    with answers_lost():
        assert stream(shell, f"{name}\t3\n", "--timeout", "2s") == (4, "")
    [command] = printed_commands(shell)
    assert shell.said(*command[1:]).endswith("was counted before, and is not again")
    assert shell.said("get", name) == "3"


@pytest.mark.parametrize(
    "error",
    [
        UnsentError("the buffer is not empty", (), {"a b": -2, "c": 5}),
        RejectedError((Rejected("a b", 7, CounterError("it is over the bound")),)),
        RejectedError(
            (Rejected("a b", 7, TokenTooOldError("it is past retention", applied=None)),)
        ),
    ],
)
def test_uncounted_adds_are_printed(shell: Shell, name: str, error: CounterError) -> None:
    """Unsent adds are printed as input lines; rejected ones with their reason."""
    close = Buffer.close

    def closes(buffer: Buffer, timeout: float | None = None) -> None:
        close(buffer, timeout)
        raise error

    with patch.object(Buffer, "close", closes):
        ended = stream(shell, f"{name}\t1\n")
    assert "counter: 1 line was read; what is not named here is counted" in shell.err
    if "retention" in str(error):
        # Regression: it was said not to be counted, and who adds it again may count it twice.
        assert ended == (4, "")
        assert "counter: a b: +7 may be counted: it is past retention\n" in shell.err
    elif isinstance(error, RejectedError):
        assert ended == (1, "")
        assert "counter: a b: +7 is not counted: it is over the bound\n" in shell.err
    else:
        assert ended == (4, "a b\t-2\nc\t5\n")
        assert stream(shell, ended[1]) == (0, "2 lines are counted, which come to 3\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("child_processes")
async def test_a_signal_ends_the_reading_and_loses_nothing(
    service: Service, name: str, number: signal.Signals
) -> None:
    words = ["-m", "counter", "add", "--stream", "--url", service.url]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert process.stdin is not None
    process.stdin.write(f"{name}\t1\n".encode() * 1_000)
    await process.stdin.drain()
    with CounterClient(service.url) as client:
        await eventually(
            lambda: client.get(name).count == 1_000, "the lines are counted while the pipe is open"
        )
        process.send_signal(number)
        out, err = await process.communicate()
        assert (process.returncode, out) == (128 + number, b"")
        assert err.decode() == (
            "counter: interrupted: 1,000 lines are counted, which come to 1,000\n"
        )
        assert client.get(name).count == 1_000
