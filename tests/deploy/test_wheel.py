"""The wheels of the service and of the client, each installed as its users have it.

What they need is linked from this environment, by what the wheels there say of each other: so each
version is the locked one, and nothing is downloaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import counter
import counter_client
from tests.support.server import ROOT, Server, served

CLIENT, SERVER = "distributed_counter_client", "distributed_counter_server"
#: Packages that the client must not need.
NOT_THE_CLIENTS = (
    *("api", "counter", "rollup", "cassandra", "cyclopts", "fastapi", "opentelemetry"),
    *("prometheus_client", "pydantic", "hiredis", "pymemcache", "redis", "rich", "starlette"),
    *("uvicorn", "xxhash"),
)
COUNT = """
import sys
import counter_client
found = sorted(set(sys.modules) & set({not_the_clients!r}))
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
    """A virtual environment with wheels and their requirements."""

    place: Path

    @property
    def packages(self) -> Path:
        [found] = self.place.glob("lib/python*/site-packages")
        return found

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a script of it, far from this tree."""
        return subprocess.run(
            [self.place / "bin" / words[0], *words[1:]],
            cwd=self.place,
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(path).decode())


def needed(metadata: Message, extra: str) -> Iterator[Requirement]:
    """The requirements of *metadata* with *extra* on this platform."""
    for line in metadata.get_all("Requires-Dist", []):
        each = Requirement(line)
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            yield each


def link(wanted: Sequence[Requirement], into: Path) -> None:
    """Put the packages of all *wanted*, and of their requirements, *into* a directory."""
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


def made(*words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        words, cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> dict[str, Path]:
    """The wheels by the names of their distributions."""
    place = tmp_path_factory.mktemp("dist")
    made(ROOT / "scripts" / "package", place)
    return {each.name.partition("-")[0]: each for each in place.glob("*.whl")}


def installed(place: Path, *wheels: Path) -> Installed:
    uv = (sys.executable, "-m", "uv", "--quiet", "--offline", "--no-config")
    made(*uv, "venv", "--python", sys.executable, place)
    made(*uv, "pip", "install", "--python", place, "--no-deps", *wheels)
    found = Installed(place)
    link([each for wheel in wheels for each in needed(metadata_of(wheel), "")], found.packages)
    return found


@pytest.fixture(scope="module")
def client(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return installed(tmp_path_factory.mktemp("client") / "venv", wheels[CLIENT])


@pytest.fixture(scope="module")
def server(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return installed(tmp_path_factory.mktemp("server") / "venv", wheels[SERVER])


@pytest.fixture(scope="module")
def service(server: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``counter serve`` of the server's wheel, without the client's."""
    program = (str(server.place / "bin" / "counter"),)
    # A token is not too old when a program on a busy machine has connected.
    flags = {"accept_limit": "1m"}
    with served(tmp_path_factory.mktemp("service"), flags, program) as each:
        yield each


def files_of(wheel: Path, *, metadata: bool) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {each for each in archive.namelist() if (".dist-info/" in each) is metadata}


def tree(folder: Path, *packages: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for package in packages
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_of_the_server_has_the_tree_and_nothing_else(wheels: dict[str, Path]) -> None:
    """Types, the console, and the licences of both too."""
    names = files_of(wheels[SERVER], metadata=False)
    assert names == tree(ROOT, "counter", "rollup", "api")
    assert {"counter/py.typed", "api/console/static/index.html"} < names
    licences = {each.partition("/")[2] for each in files_of(wheels[SERVER], metadata=True)}
    assert {"licenses/LICENSE", "licenses/api/console/static/uplot/LICENSE"} < licences


def test_the_wheel_of_the_client_has_the_client_alone(wheels: dict[str, Path]) -> None:
    names = files_of(wheels[CLIENT], metadata=False)
    assert names == tree(ROOT / "clients" / "python", "counter_client")
    assert "counter_client/py.typed" in names
    licences = {each.partition("/")[2] for each in files_of(wheels[CLIENT], metadata=True)}
    assert "licenses/LICENSE" in licences
    own = (ROOT / "clients" / "python" / "LICENSE").read_bytes()
    assert own == (ROOT / "LICENSE").read_bytes()


def test_the_client_needs_httpx_and_nothing_else(wheels: dict[str, Path]) -> None:
    assert [each.name for each in needed(metadata_of(wheels[CLIENT]), "")] == ["httpx"]


def test_the_server_needs_no_client(wheels: dict[str, Path]) -> None:
    """Nor a driver: each store is an extra, and the client one too."""
    metadata = metadata_of(wheels[SERVER])
    extras = {
        extra: {each.name for each in needed(metadata, extra)}
        for extra in ("", *metadata.get_all("Provides-Extra", []))
    }
    more = {extra: names - extras[""] for extra, names in extras.items() if extra}
    telemetry = more.pop("otel")
    assert all(each.startswith("opentelemetry-") for each in telemetry)
    assert more == {
        "client": {"distributed-counter-client"},
        "cassandra": {"cassandra-driver"},
        "dynamodb": {"aiobotocore"},
        "memcached": {"pymemcache"},
        "postgresql": {"asyncpg"},
        "redis": {"redis"},
        "testing": {"pytest", "pytest-asyncio"},
    }


def test_a_server_without_pytest_has_the_suites(server: Installed) -> None:
    """They need their extra, and are not imported otherwise."""
    assert (server.packages / "counter" / "testing" / "suites.py").is_file()
    assert not {"pytest", "_pytest"} & {path.name for path in server.packages.iterdir()}
    done = server.run("python", "-c", "import counter.testing.suites")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'pytest'"


def test_the_pages_of_the_wheels_are_their_readmes(wheels: dict[str, Path]) -> None:
    """Links lead to the project's home, for a page of an index has no files beside it."""
    for name, folder in ((SERVER, ROOT), (CLIENT, ROOT / "clients" / "python")):
        metadata = metadata_of(wheels[name])
        assert metadata["Description-Content-Type"] == "text/markdown"
        [home] = [
            url.removeprefix("Homepage, ")
            for url in metadata.get_all("Project-URL", [])
            if url.startswith("Homepage")
        ]
        text = str(metadata.get_payload())
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert all(each.startswith(("https://", "http://", "#")) for each in links), links
        readme = (folder / "README.md").read_text(encoding="utf-8")
        assert text.replace(f"]({home}/", "](").strip() == readme.strip()


def test_indexes_take_the_wheels(wheels: dict[str, Path]) -> None:
    made(sys.executable, "-m", "twine", "check", "--strict", *wheels.values())
    for wheel in wheels.values():
        metadata = metadata_of(wheel)
        assert all(metadata[each] for each in ("Author", "License-Expression", "Summary"))


def test_the_same_sources_give_the_same_bytes(wheels: dict[str, Path], tmp_path: Path) -> None:
    """In another folder, at another time, with other permissions."""
    copy = tmp_path / "copy"
    tracked = ("api", "clients/python", "counter", "rollup")
    for folder in tracked:
        shutil.copytree(
            ROOT / folder,
            copy / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
            copy_function=shutil.copyfile,
        )
    for file in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copyfile(ROOT / file, copy / file)
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    time = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    epoch = {} if time.returncode else {"SOURCE_DATE_EPOCH": time.stdout.strip()}
    for name, project in ((SERVER, copy), (CLIENT, copy / "clients" / "python")):
        build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel")
        made(*build, "--directory", tmp_path, cwd=project, env=epoch)
        assert (tmp_path / wheels[name].name).read_bytes() == wheels[name].read_bytes()


def test_the_client_counts_without_the_server(client: Installed, service: Server) -> None:
    assert not {"api", "counter", "rollup"} & {path.name for path in client.packages.iterdir()}
    script = COUNT.format(not_the_clients=NOT_THE_CLIENTS)
    done = client.run("python", "-W", "error", "-c", script, service.url, "wheel.spool")
    assert (done.stderr, done.stdout, done.returncode) == ("", "7\n", 0)


def test_the_server_serves_without_the_client(server: Installed, service: Server) -> None:
    """It counts, and shows the files beside its modules."""
    assert "counter_client" not in {path.name for path in server.packages.iterdir()}
    url = f"{service.url}/v1/namespaces/default/counters/plain"
    head = {"Content-Type": "application/json", "Idempotency-Key": "one"}
    for replayed in (False, True):
        with urlopen(Request(f"{url}/add", b'{"delta": 5}', head)) as answer:
            assert json.load(answer)["replayed"] is replayed
    with urlopen(url) as answer:
        assert json.load(answer)["count"] == 5
    for path in ("/console", "/console/uplot/uPlot.iife.min.js", "/docs", "/problems"):
        with urlopen(service.url + path) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "words", [["counter", "--version"], ["python", "-m", "counter", "--version"]]
)
def test_it_reports_its_version(
    server: Installed, wheels: dict[str, Path], words: list[str]
) -> None:
    done = server.run(*words)
    version = metadata_of(wheels[SERVER])["Version"]
    assert (done.stdout.strip(), done.returncode) == (version, 0), done.stderr
    assert version == counter.__version__ == counter_client.__version__
    assert version == metadata_of(wheels[CLIENT])["Version"]


@pytest.mark.parametrize("words", [["get", "x"], ["doctor", "--url", "http://127.0.0.1:9"]])
def test_a_command_that_needs_the_client_says_how_to_install_it(
    server: Installed, words: list[str]
) -> None:
    done = server.run("counter", *words)
    [line] = done.stderr.splitlines()
    assert line.startswith("counter: this command asks a service, and the client is not installed")
    assert line.endswith(": install the wheel of the server again, with the extra client")
    assert done.returncode == 2


def test_with_both_wheels_the_commands_reach_the_service(
    wheels: dict[str, Path], service: Server, tmp_path: Path
) -> None:
    """The extra of the server finds the client beside it, in one folder of wheels."""
    both = installed(tmp_path / "venv", wheels[SERVER])
    link([*needed(metadata_of(wheels[CLIENT]), "")], both.packages)
    pip = (sys.executable, "-m", "pip", "--isolated", "--python", both.place, "install")
    made(*pip, "--no-index", "--find-links", wheels[SERVER].parent, f"{SERVER}[client]")
    for words, said in ((["add", "asked", "3"], "asked: 3 added\n"), (["get", "asked"], "3\n")):
        done = both.run("counter", *words, "--url", service.url)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", said)
