"""The documents are run: each example against a real service, each list against the code.

In a block marked ``console`` a line after ``$ `` is a command for the shell and the lines below it
are its response. The commands of one document run in one shell, in order. Times, ids and page
tokens are masked on both sides, and everything else must be the same.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from api.http.problems import problem_types
from counter.config.settings import Settings
from counter.errors import CounterError, TokenTooOldError
from counter.quantities import format_duration
from tests.support.app import running
from tests.support.needs import miss
from tests.support.server import ROOT, SMALL_WINDOWS, serving
from tests.support.store_folders import is_here

README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
HTTP = ROOT / "docs" / "http.md"
#: The address of the service in the documents.
WRITTEN_URL = "http://127.0.0.1:8080"

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAGS = re.compile(r"^ +\./scripts/run --data \S+ (--.*)$", re.MULTILINE)
_END_OF_ANSWER = "\x1e"
_MASKS = (
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"), "<time>"),
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "<id>"),
    (re.compile(r"(?<=x-request-id: )\S+"), "<id>"),
    (re.compile(r'"next_page":"[\w-]+"'), '"next_page":"<page>"'),
    (re.compile(r'(?<="hold":")[\w-]+'), "<hold>"),
    (re.compile(r'(?<=retry-after: )\d+|(?<="retry_after": )\d+'), "<seconds>"),
    (re.compile(r"\d+(\.\d+)? s\b"), "<seconds> s"),
    (re.compile(r"\d+(\.\d+)? [kM]B\b"), "<size>"),
)


def read(document: Path) -> str:
    return document.read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a document and the response that is written below it."""

    line: int
    command: str
    answer: str


def steps(text: str) -> Iterator[Step]:
    """The commands of a document, with their responses."""
    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1)) + 1
        for part in re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]:
            command, _, answer = _joined(part).partition("\n")
            yield Step(line, command, answer.rstrip("\n"))
            line += part.count("\n")


def _joined(part: str) -> str:
    """*part* with lines that end in a backslash made one with the next."""
    return part.replace("\\\n", "")


def masked(text: str) -> str:
    """*text* without the values that differ each time."""
    for pattern, name in _MASKS:
        text = pattern.sub(name, text)
    return text


async def answers(commands: list[str], urls: Mapping[str, str], home: Path) -> list[str]:
    """The responses of one shell to *commands*, sent to the services of *urls*."""
    if shutil.which("curl") is None:
        miss("there is no curl")
    script = "\n".join(f"{each}\nprintf '\\n{_END_OF_ANSWER}'" for each in commands)
    for written, real in urls.items():
        script = script.replace(written, real)
    shell = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        script,
        cwd=home,
        # A configuration of curl, or a proxy, is none of the documents' business.
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "LC_ALL": "C",
            # The default address of the command line.
            "COUNTER_URL": urls.get(WRITTEN_URL, WRITTEN_URL),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await shell.communicate()
    finally:
        # What a document starts beside itself ends with it, also where an example never does.
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    text = out.decode().replace("\r\n", "\n")
    for written, real in urls.items():
        text = text.replace(real, written)
    found = [each.strip("\n") for each in text.split(_END_OF_ANSWER)[:-1]]
    assert len(found) == len(commands), err.decode()
    return found


async def check(document: str, flags: Mapping[str, str], tmp_path: Path) -> None:
    """Every example of the text *document* answers as it says."""
    async with serving(tmp_path / "data", tmp_path / "logs", **flags) as server:
        await compare(document, {WRITTEN_URL: server.url}, tmp_path)


async def compare(document: str, urls: Mapping[str, str], home: Path) -> None:
    """The same with running services: *urls* has the real addresses by the written ones."""
    expected = list(steps(document))
    assert expected
    given = await answers([each.command for each in expected], urls, home)
    wrong = [
        f"line {step.line}: $ {step.command}\n  written: {masked(step.answer)}\n"
        f"  given:   {masked(answer)}"
        for step, answer in zip(expected, given, strict=True)
        if masked(step.answer) != masked(answer)
    ]
    assert not wrong, "\n".join(wrong)


def defaults() -> dict[str, str]:
    """The program's own windows, in place of the short ones of the tests."""
    settings = Settings()
    return {name: format_duration(getattr(settings, name)) for name in SMALL_WINDOWS}


def flags_of(document: str) -> dict[str, str]:
    """The flags that a document says its service was started with, without its data directory."""
    found = _FLAGS.search(document)
    assert found is not None
    pairs = re.findall(r"--(\S+) (\S+)", found[1])
    return {name.replace("-", "_"): value for name, value in pairs}


@pytest.mark.usefixtures("child_processes")
async def test_every_example_of_the_readme_is_true(tmp_path: Path) -> None:
    """The first page of the documentation has an example of the same kind."""
    await check(read(README) + read(INDEX), defaults(), tmp_path)


def section(text: str, heading: str) -> str:
    """A section of a document, from its heading on."""
    start = text.index(f"\n## {heading}\n")
    return text[start : text.index("\n## ", start + 1)]


def without(text: str, *headings: str) -> str:
    """A document without some of its sections."""
    for heading in headings:
        text = text.replace(section(text, heading), "")
    return text


@pytest.mark.slow
@pytest.mark.usefixtures("child_processes")
async def test_every_example_of_the_http_document_is_true(tmp_path: Path) -> None:
    """With the short windows that it names: some of its examples wait for the rollup."""
    text = read(HTTP)
    await check(text, flags_of(text), tmp_path)


async def test_every_route_has_its_section(tmp_path: Path) -> None:
    """docs/http.md and the OpenAPI document name the same routes."""
    async with running("memory", tmp_path) as app:
        paths = (await app.http.get("/openapi.json")).json()["paths"]
    described = {f"{method.upper()} {path}" for path, each in paths.items() for method in each}
    text = read(HTTP)
    assert set(re.findall(r"^### `([A-Z]+ /\S*)`$", text, re.MULTILINE)) == described


def test_every_problem_is_in_the_table() -> None:
    """docs/http.md and counter/errors.py know the same codes, and mean the same by them."""
    text = read(HTTP)
    row = r"^\| `([a-z_]+)` \| (\d{3}) \| (true|false|null) \| (\w+) \|"
    assert sorted(re.findall(row, text, re.MULTILINE)) == sorted(map(row_of, problems()))


def problems() -> Iterator[CounterError]:
    """Every error that a client can meet, in every shape it has."""
    for each in problem_types():
        if each is TokenTooOldError:
            yield from (TokenTooOldError("", applied=applied) for applied in (False, None))
        else:
            yield each("")


def row_of(error: CounterError) -> tuple[str, str, str, str]:
    """An error as the table writes it."""
    return error.code, str(error.status), json.dumps(error.applied), error.retry


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/architecture.md",
        "docs/configuration.md",
        "docs/console.md",
        "docs/http.md",
        "docs/operations.md",
        "docs/planning.md",
        "docs/python.md",
        "docs/security.md",
        "docs/tokens.md",
        "docs/how-to/grow.md",
    ],
)
def test_what_it_points_at_is_there(document: str) -> None:
    """Files and headings that are linked, and paths of this tree in backticks."""
    path = ROOT / document
    text = read(path)
    links = [path.parent / each for each in re.findall(r"\]\((?!\w+:)([^)#]+)", text)]
    folders = "api|benchmarks|counter|docs|rollup|scripts|tests"
    named = re.findall(rf"(?:\./|`)((?:{folders})/[\w./]*)", text)
    gone = [str(each) for each in links if not each.exists()]
    gone += [each for each in named if is_here(each) and not (ROOT / each).exists()]
    headings = [_anchor(each) for each in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    gone += [each for each in re.findall(r"\]\(#([^)]+)\)", text) if each not in headings]
    assert gone == []


def test_no_page_says_to_install_it_by_its_name() -> None:
    """A package index has another project by that name, which no reader should run."""
    by_name = re.compile(r"pip install\b.*distributed-counter")
    row_of = [README, *(ROOT / "docs").rglob("*.md")]
    for part in ("api", "counter", "rollup"):
        row_of += (ROOT / part).rglob("*.py")
    assert [each.name for each in row_of if by_name.search(read(each))] == []


def _anchor(heading: str) -> str:
    """The anchor that hosts of Markdown give a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
