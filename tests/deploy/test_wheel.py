"""The wheel, installed as a program that counts has it: with what it says the SDK takes, no more.

What it takes is linked from this environment, by what the wheels there say of each other: so each
version is the locked one, and nothing is downloaded.
"""

import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.server import ROOT, Server, served

#: What the server and the command line are made of, and the SDK must do without.
NOT_THE_SDKS = (
    *("api", "rollup", "counter.cli", "counter.config", "counter.storage"),
    *("cassandra", "cyclopts", "fastapi", "opentelemetry", "prometheus_client", "pydantic"),
    *("hiredis", "pymemcache", "redis", "rich", "starlette", "uvicorn", "xxhash"),
)
COUNT = """
import sys
import counter_client
found = sorted(set(sys.modules) & set({not_the_sdks!r}))
assert not found, found
from counter_client import CounterClient, Token
with CounterClient(sys.argv[1]) as client:
    token = Token.new()
    for _ in range(2):
        client.add("wheel", 3, token=token)
    with client.buffer(spool=sys.argv[2]) as buffer:
        buffer.add("wheel", 4)
    print(client.get("wheel").count)
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """A virtual environment with the wheel and what the SDK takes in it."""

    place: Path
    wheel: Path
    metadata: Message

    def run(self, *words: str | Path, also: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a script of it, far from this tree, with the packages in *also*."""
        return subprocess.run(
            [self.place / "bin" / words[0], *words[1:]],
            cwd=self.place,
            env={} if also is None else {"PYTHONPATH": str(also)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def needed(metadata: Message, extra: str) -> Iterator[Requirement]:
    """What *metadata* says is needed with *extra*, where this runs."""
    for line in metadata.get_all("Requires-Dist", []):
        each = Requirement(line)
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            yield each


def link(wanted: Sequence[Requirement], into: Path) -> None:
    """Put the packages of all that is *wanted*, and of what those need, *into* a directory."""
    done: set[tuple[str, str]] = set()
    open_ones = [(each.name, extra) for each in wanted for extra in ("", *each.extras)]
    while open_ones:
        name, extra = open_ones.pop()
        if (canonicalize_name(name), extra) in done:
            continue
        done.add((canonicalize_name(name), extra))
        found = distribution(name)
        for top in {Path(each.parts[0]) for each in found.files or () if each.parts[0] != ".."}:
            if not (into / top).exists():
                (into / top).symlink_to(Path(str(found.locate_file(""))) / top)
        for each in needed(found.metadata, extra):  # type: ignore[arg-type]
            open_ones += [(each.name, more) for more in ("", *each.extras)]


def made(*words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    place = tmp_path_factory.mktemp("wheel")
    made("hatchling", "build", "-t", "wheel", "-d", place)
    [wheel] = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(path).decode())
    venv = place / "venv"
    made("venv", "--without-pip", venv)
    made("pip", "--python", venv, "install", "--quiet", "--no-index", "--no-deps", wheel)
    [packages] = venv.glob("lib/python*/site-packages")
    link(list(needed(metadata, "")), packages)
    return Installed(venv, wheel, metadata)


@pytest.fixture(scope="module")
def command_line(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the extra ``cli`` has besides."""
    place = tmp_path_factory.mktemp("cli")
    link(list(needed(installed.metadata, "cli")), place)
    return place


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("service")
    with served(place) as server:
        yield server


def test_it_has_all_that_is_in_the_tree_and_nothing_else(installed: Installed) -> None:
    """Types, the console, and the licences of both too."""
    with zipfile.ZipFile(installed.wheel) as archive:
        names = {each for each in archive.namelist() if ".dist-info/" not in each}
        told = {each.partition("/")[2] for each in archive.namelist() if ".dist-info/" in each}
    tree = {
        path.relative_to(ROOT).as_posix()
        for package in ("counter", "rollup", "api")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == tree
    assert {"counter/py.typed", "api/console/static/index.html"} < names
    assert {"licenses/LICENSE", "licenses/api/console/static/uplot/LICENSE"} < told


def test_a_program_that_counts_gets_httpx_and_nothing_else(installed: Installed) -> None:
    assert [each.name for each in needed(installed.metadata, "")] == ["httpx"]
    assert installed.metadata["Description-Content-Type"] == "text/markdown"
    text = str(installed.metadata.get_payload())
    assert text.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_every_extra_of_the_service_can_serve(installed: Installed) -> None:
    extras = {
        extra: {each.name for each in needed(installed.metadata, extra)}
        for extra in installed.metadata.get_all("Provides-Extra", [])
    }
    stores = {"postgresql", "cassandra", "memcached", "redis"}
    assert set(extras) == {"cli", "server", "otel"} | stores
    assert extras["cli"] < extras["server"]
    assert all(extras["server"] < extras[each] for each in stores)


def test_the_sdk_counts_without_the_server(installed: Installed, service: Server) -> None:
    script = COUNT.format(not_the_sdks=NOT_THE_SDKS)
    done = installed.run("python", "-W", "error", "-c", script, service.url, "wheel.spool")
    assert (done.stderr, done.stdout, done.returncode) == ("", "7\n", 0)


@pytest.mark.parametrize(
    "words", [["counter"], ["counter", "serve"], ["python", "-m", "counter", "--version"]]
)
def test_the_command_line_says_how_to_install_it(installed: Installed, words: list[str]) -> None:
    done = installed.run(*words)
    [line] = done.stderr.splitlines()
    assert line.startswith("counter: the command line is not installed")
    assert line.endswith("pip install '.[server]' in its checkout")
    assert done.returncode == 2


@pytest.mark.parametrize("words", [["serve"], ["key", "list"]])
def test_a_command_of_the_server_says_how_to_install_that(
    installed: Installed, command_line: Path, words: list[str]
) -> None:
    done = installed.run("counter", *words, also=command_line)
    [line] = done.stderr.splitlines()
    assert line.startswith("counter: the server, which this takes, is not installed")
    assert line.endswith("pip install '.[server]' in its checkout")
    assert done.returncode == 2


def test_the_command_line_alone_asks_a_running_service(
    installed: Installed, command_line: Path, service: Server
) -> None:
    """Those commands take nothing of the server."""
    for words, said in ((["add", "asked", "3"], "asked: 3 added\n"), (["get", "asked"], "3\n")):
        done = installed.run("counter", *words, "--url", service.url, also=command_line)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", said)


def test_the_command_line_alone_reports_its_version_and_its_commands(
    installed: Installed, command_line: Path
) -> None:
    version = installed.metadata["Version"]
    for words in (["counter", "--version"], ["python", "-m", "counter", "--version"]):
        done = installed.run(*words, also=command_line)
        assert (done.stdout.strip(), done.returncode) == (version, 0), done.stderr
    assert "serve" in installed.run("counter", "--help", also=command_line).stdout
