"""The page of the command line: its examples are run, in this process, and its table is whole."""

import asyncio
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from counter.cli.app import app
from tests.cli.shell import Shell
from tests.support.documents import page
from tests.support.server import Server, served
from tests.support.waiting import eventually
from tests.test_readme import Step, flags_of, masked, steps

_SAVED = re.compile(r"(\w+)=\$\((.*)\)")
#: Values that differ each time, besides those of all documents.
_MASKS = (
    # The last attempt may begin a moment before the time limit.
    (re.compile(r"(?<=does not answer: )Connect(?:Error|Timeout) .*"), "<refused>"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"), "<time>"),
    (re.compile(r"(?<= )\d+\.\d(?= (?!s\b))"), "<rate>"),
)
#: Waits for the rollup, or for a shared look.
_PATIENT = ("counter history", "counter top")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("service")
    with served(place, flags_of(page("cli.md"))) as server:
        yield server


class Terminal:
    """A shell that knows ``counter``, variables, and the exit code of the last command."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._known = {"?": "0"}

    def answer(self, command: str) -> str:
        """The output of *command*: standard output, then standard error."""
        if saved := _SAVED.fullmatch(command):
            self._known[saved[1]] = self.answer(saved[2]).strip()
            return ""
        first, pipe, last = command.partition(" | ")
        stdin = subprocess.check_output(["bash", "-c", first]) if pipe else None
        words = [self._filled(word) for word in shlex.split(last or first)]
        if words[0] == "echo":
            return " ".join(words[1:])
        assert words[0] == "counter"
        code, out = self._shell.run(*words[1:], stdin=stdin)
        self._known["?"] = str(code)
        return (out + self._shell.err).rstrip("\n")

    def _filled(self, word: str) -> str:
        return self._known[word[1:]] if word.startswith("$") else word


def plain(text: str) -> str:
    """*text* without the values that differ each time."""
    for pattern, name in _MASKS:
        text = pattern.sub(name, text)
    return masked(text)


@pytest.mark.slow
def test_every_example_is_true(
    service: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTER_URL", service.url)
    terminal = Terminal(Shell(capsys))
    for step in steps(page("cli.md")):

        def given(step: Step = step) -> str:
            return plain(terminal.answer(step.command).replace(f" --url {service.url}", ""))

        async def is_as_written(step: Step = step) -> bool:
            return await asyncio.to_thread(given) == plain(step.answer)

        if step.command.startswith(_PATIENT):
            what = f"line {step.line}: $ {step.command} answers\n{step.answer}"
            asyncio.run(eventually(is_as_written, what))
        else:
            assert given() == plain(step.answer), f"line {step.line}: $ {step.command}"


def test_the_table_of_exit_codes_has_each_command_once() -> None:
    _, _, *rows = re.findall(r"^\|(.*)\|$", page("cli.md").partition("## Exit codes")[2], re.M)
    written = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[0])]
    parts = re.split(r"^#+ counter ?(.*)$", app.generate_docs(heading_level=1), flags=re.M)[1:]
    named = [name for name, text in zip(parts[::2], parts[1::2], strict=True) if "Exit" in text]
    assert sorted(written) == sorted(named)
