"""The image: built by buildah without a container engine, and started as compose.yaml starts it.

No registry is asked. debootstrap makes the base, of the Debian release that the Dockerfile names,
and provides its Python; pip downloads what the lock names, and the build has no other source.

Processes of the image share the network of this machine. So their addresses are changed, and
PostgreSQL and Redis (for Valkey) are Debian's; commands, users and all other settings are those of
compose.yaml. Not shown: namespaces, cgroups, volumes, a read-only file system, compose itself.
"""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from packaging.markers import Marker

from counter import __version__
from counter.types import Token
from scripts.cluster_servers import redis_missing, redis_server
from scripts.service_process import HOST, free_ports
from tests.support.needs import miss
from tests.support.rest import Rest, fresh
from tests.support.server import ROOT
from tests.support.servers import postgresql_server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
#: Ours of the profile over PostgreSQL, by the command.
SERVICES = {
    " ".join(each["command"]): each
    for each in COMPOSE["services"].values()
    if "build" in each and each["profiles"] == ["postgresql"]
}
#: The base is kept here; not in $TMPDIR, which may be memory.
KEPT = ROOT / ".cluster" / "image"
#: Bytes of all files; the stand-in for the base has 146 MB.
SIZE_MAX, SIZE_WITHOUT_EXTRAS_MAX = 250_000_000, 205_000_000
#: Packages of the base's Python, and the build tools of our wheels.
TOOLS = {"hatchling", "pip", "setuptools", "uv", "wheel"}
OF_EXTRAS = {
    *("asyncpg", "cassandra-driver", "distributed-counter-client", "hiredis"),
    *("opentelemetry-sdk", "pymemcache", "redis"),
}
BUILDS = re.compile(r"/.*/s?bin/(.*-)?(cc|gcc|g\+\+|clang|ld|as|make|pip[\d.]*|uv)")


def run(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        words,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Buildah:
    """buildah with its storage in *folder*; *wheels* are those that pip may install."""

    folder: Path
    wheels: Path

    def __call__(self, *words: str | Path) -> str:
        return run("buildah", *words, **self.environment()).strip()

    def environment(self) -> dict[str, str]:
        return {"CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf")}

    def build(self, *arguments: str) -> "Image":
        """Build the Dockerfile of this tree on the base, and a container of it."""
        settings = self.folder / "pip.conf"
        settings.write_text("[global]\nno-index = true\nfind-links = /offline\n")
        name = f"counter:{len(list(self.folder.glob('*.id')))}"
        self(
            *("bud", "--isolation", "chroot", "--format", "docker", "--pull-never", "--quiet"),
            *("--volume", f"{self.wheels}:/offline:ro", "--volume", f"{settings}:/etc/pip.conf:ro"),
            *("--build-arg", "BASE=localhost/base", *arguments, "--tag", name),
            *("--iidfile", self.folder / f"{name}.id", ROOT),
        )
        # Else it would be 1024; those of container engines are far higher.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        container = self("from", "--pull-never", "--ulimit", f"nofile={files}:{files}", name)
        return Image(self, container, Path(self("mount", container)))


@dataclass(frozen=True)
class Image:
    """A container of an image, with its files in *root*."""

    buildah: Buildah
    container: str
    root: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        found = json.loads(self.buildah("inspect", self.container))
        return dict(found["Docker"]["config"])

    @cached_property
    def files(self) -> dict[str, os.stat_result]:
        """Everything in it, by the path in a container."""
        return {
            f"/{path.relative_to(self.root)}": path.lstat() for path in sorted(self.root.rglob("*"))
        }

    @property
    def size(self) -> int:
        return sum(each.st_size for each in self.files.values() if stat.S_ISREG(each.st_mode))

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the service's packages, by name."""
        [packages] = self.root.glob("opt/counter/lib/python3.*/site-packages")
        found = distributions(path=[str(packages)])
        return {each.name.lower().replace("_", "-"): each.version for each in found}

    def words(self, service: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
        """The command that runs *service* of compose.yaml."""
        given = service["environment"] | environment
        return [
            *("buildah", "run", "--isolation", "chroot", "--user", service["user"]),
            *(f"--cap-drop={each}" for each in service["cap_drop"]),
            *(f"--env={key}={value}" for key, value in given.items()),
            *(self.container, "--", *self.config["Entrypoint"], *service["command"]),
        ]

    def run(self, service: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        return run(*self.words(service, environment), **self.buildah.environment())

    def start(
        self, service: Mapping[str, Any], logs: Path, environment: Mapping[str, str]
    ) -> "Running":
        """Start it on a free port."""
        [port] = free_ports(1)
        setting = "COUNTER_PORT" if service["command"] == ["serve"] else "COUNTER_METRICS_PORT"
        log = logs / f"{port}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.words(service, {"COUNTER_HOST": HOST, setting: str(port), **environment}),
                env=os.environ | self.buildah.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(process, f"http://{HOST}:{port}", log, service)

    @asynccontextmanager
    async def running(
        self, service: Mapping[str, Any], logs: Path, **environment: str
    ) -> AsyncIterator["Running"]:
        """Start it, and wait until it is ready."""
        began = time.monotonic()
        started = self.start(service, logs, environment)
        try:
            await started.ready()
            print(f"{' '.join(service['command'])}: ready after {time.monotonic() - began:.1f} s")
            yield started
        finally:
            started.kill()


@dataclass(frozen=True, slots=True)
class Running:
    """A process of the image below one of buildah."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    service: Mapping[str, Any]

    async def ready(self) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:

            async def asked() -> bool:
                assert self.process.poll() is None, self.log.read_text()
                try:
                    return (await http.get(f"{self.url}/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(asked, f"{self.service['command']} is ready")

    def pid(self) -> int:
        """The process of the service, which buildah's lead to."""
        *_, last = descendants(self.process.pid)
        return last

    async def stop(self) -> int:
        """Send SIGTERM, wait as long as compose would, and return the exit code."""
        os.kill(self.pid(), signal.SIGTERM)
        grace_s = int(self.service["stop_grace_period"].removesuffix("s"))
        return await asyncio.to_thread(self.process.wait, grace_s)

    def kill(self) -> None:
        if self.process.poll() is None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()


def descendants(pid: int) -> list[int]:
    """The children of *pid*, theirs and so on."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(each) for thread in threads for each in thread.read_text("ascii").split()]
    return [*children, *(each for child in children for each in descendants(child))]


def make_base(suite: str) -> Path:
    """Return the files of the base, a slim image with Python and its own pip; made once."""
    kept = KEPT / f"debian-{suite}"
    if kept.exists():
        return kept
    KEPT.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix="new-", dir=KEPT))
    new.chmod(0o755)
    run("debootstrap", "--variant=minbase", "--include=ca-certificates,python3-venv", suite, new)
    wheels = sorted((new / "usr/share/python-wheels").glob("*.whl"))
    # A container engine fills /dev.
    for path in ("dev", "var/cache/apt", "var/lib/apt/lists", "var/log"):
        shutil.rmtree(new / path)
        (new / path).mkdir()
    for each in ("doc", "info", "locale", "man"):
        shutil.rmtree(new / "usr/share" / each)
    for mark in new.glob("usr/lib/python3.*/EXTERNALLY-MANAGED"):
        mark.unlink()
    (new / "usr/bin/python").symlink_to("python3")
    inside = [f"/{each.relative_to(new)}" for each in wheels]
    [pip] = [each for each in inside if "/pip-" in each]
    install = ("python", "-m", "pip", "install", "--quiet", "--root-user-action=ignore")
    run("chroot", new, "env", f"PYTHONPATH={pip}", *install, "--no-index", *inside)
    shutil.rmtree(new / "usr/share/python-wheels")
    return new.rename(kept)


def download(wheels: Path, version: str) -> None:
    """Download the locked wheels for Python *version*; pip evaluates markers for its own only."""
    environment = {"python_full_version": version, "python_version": version.rpartition(".")[0]}

    def unmarked(entry: re.Match[str]) -> str:
        return f"{entry[1]} \\" if Marker(entry[2]).evaluate(environment) else f"{entry[0]}"

    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    (wheels / "lock").write_text(re.sub(r"^(\S+) ; (.+) \\$", unmarked, lock, flags=re.MULTILINE))
    run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
        *("--only-binary", ":all:", "--python-version", version, "--dest", wheels),
        *("--requirement", wheels / "lock"),
    )


@pytest.fixture(scope="module")
def buildah(minutes: None) -> Iterator[Buildah]:
    """It has the base, as ``base``."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            miss(f"there is no {program} (Debian: apt-get install {program})")
    if os.geteuid() != 0:
        miss("only root can make the base of an image")
    found = re.search(r"^ARG BASE=python:(3\.\d+)\.\d+-slim-(\w+)$", DOCKERFILE, re.MULTILINE)
    assert found is not None
    base = make_base(found[2])
    code = "import platform; print(platform.python_version())"
    version = run("chroot", base, "python", "-c", code).strip()
    assert version.startswith(f"{found[1]}."), f"{found[2]} has Python {version}"
    with tempfile.TemporaryDirectory(prefix="run-", dir=KEPT) as directory:
        folder = Path(directory)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
        )
        (folder / "wheels").mkdir()
        download(folder / "wheels", version)
        tool = Buildah(folder, folder / "wheels")
        empty = tool("from", "scratch")
        tool("copy", "--quiet", empty, base, "/")
        tool("commit", "--quiet", "--rm", empty, "base")
        yield tool
        tool("umount", "--all")


@pytest.fixture(scope="module")
def image(buildah: Buildah) -> Image:
    return buildah.build()


@pytest.fixture(scope="module")
def plain(buildah: Buildah) -> Image:
    """One without extras."""
    return buildah.build("--build-arg", "EXTRAS=")


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Replacements of compose.yaml's addresses: those of a PostgreSQL and a Redis of our own."""
    if problem := redis_missing():
        miss(problem)
    services = COMPOSE["services"]
    with postgresql_server() as server:
        login = services["postgresql"]["environment"]
        where = ("--host", HOST, "--port", str(server.port), "--username", login["POSTGRES_USER"])
        dsn = urlsplit(SERVICES["serve"]["environment"]["COUNTER_DSN"])
        server.run("createdb", *where, dsn.path.removeprefix("/"))
        [port] = free_ports(1)
        cache = redis_server("redis", tmp_path_factory.mktemp("cache"), HOST, port)
        cache.start()
        user = f"{dsn.username}:{dsn.password}"
        yield {
            "COUNTER_DSN": dsn._replace(netloc=f"{user}@{HOST}:{server.port}").geturl(),
            "COUNTER_CACHE": f"valkey://{HOST}:{port}",
        }
        cache.stop()


def test_the_image_has_the_locked_packages_and_no_tools(image: Image) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = set(re.findall(r"^(\S+)==(\S+)", lock, re.MULTILINE))
    own = {(f"distributed-counter-{each}", __version__) for each in ("client", "server")}
    assert own <= set(image.versions.items()) <= locked | own
    assert image.versions.keys() >= OF_EXTRAS
    assert not TOOLS & image.versions.keys()
    assert not {path for path in image.files if BUILDS.fullmatch(path)}
    assert not {path for path in image.files if path.endswith("/ensurepip")}
    assert not {"/src", "/wheels"} & image.files.keys()


def test_without_extras_it_has_no_driver(plain: Image) -> None:
    assert not (OF_EXTRAS | TOOLS) & plain.versions.keys()


def test_its_user_can_change_its_data_alone(image: Image) -> None:
    """And the places that any user can write: /tmp and its like."""
    uid, gid = map(int, image.config["User"].split(":"))
    assert {path for path, each in image.files.items() if each.st_uid != 0} == {"/data"}
    assert image.files["/data"].st_uid == uid
    shared = {path for path, each in image.files.items() if each.st_mode & stat.S_ISVTX}
    assert {path for path in shared if path.startswith("/opt")} == set()
    writable = {
        path
        for path, each in image.files.items()
        if (each.st_mode & stat.S_IWOTH or (each.st_gid == gid and each.st_mode & stat.S_IWGRP))
        and not stat.S_ISLNK(each.st_mode)
    }
    assert writable <= shared | {"/data"}


def test_its_settings_are_those_of_the_service(image: Image) -> None:
    config = image.config
    assert {config["User"]} == {each["user"] for each in SERVICES.values()}
    assert (config["StopSignal"], config["Cmd"]) == ("SIGTERM", ["serve"])
    assert list(config["Volumes"]) == ["/data"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__


def test_the_document_is_small(image: Image, plain: Image) -> None:
    """docs/how-to/deploy.md gives the figures that it prints."""
    print(f"\nimage: {image.size / 1e6:.0f} MB; without extras: {plain.size / 1e6:.0f} MB")
    assert image.size < SIZE_MAX
    assert plain.size < SIZE_WITHOUT_EXTRAS_MAX


async def test_no_add_is_lost_when_it_ends(
    image: Image, addresses: dict[str, str], tmp_path: Path
) -> None:
    """The schema, an API and a worker over PostgreSQL; clients retry without a response."""
    api, worker = SERVICES["serve"], SERVICES["rollup"]
    image.run(SERVICES["schema apply"], addresses)
    tokens: list[Token] = []
    acknowledged: list[Token] = []

    async def add_until_it_ends(rest: Rest) -> None:
        while True:
            token = fresh(time.time_ns() // 1_000)
            tokens.append(token)
            try:
                answer = await rest.add("each", 1, token)
            except httpx.TransportError:
                return
            if answer.status_code != 200:
                return
            acknowledged.append(token)

    async with image.running(worker, tmp_path, **addresses) as rollup:
        async with (
            image.running(api, tmp_path, **addresses) as first,
            httpx.AsyncClient(base_url=first.url, trust_env=False) as http,
        ):
            check_health(image, first)
            clients = [asyncio.create_task(add_until_it_ends(Rest(http))) for _ in range(8)]

            await eventually(lambda: len(acknowledged) >= 200, "200 adds are acknowledged")
            check_rights(first)
            assert await first.stop() == 0, first.log.read_text()
            await asyncio.gather(*clients)
        async with (
            image.running(api, tmp_path, **addresses) as second,
            httpx.AsyncClient(base_url=second.url, trust_env=False) as http,
        ):
            rest = Rest(http)
            counted = {token for token in tokens if await counts(rest, token)}
            assert counted >= set(acknowledged)
            assert await rest.count("each") == len(counted)
            assert await second.stop() == 0, second.log.read_text()
        assert await rollup.stop() == 0, rollup.log.read_text()
    for each in (first, second, rollup):
        assert '"level": "error"' not in each.log.read_text()
        assert "Traceback" not in each.log.read_text()


async def test_without_extras_it_serves_from_its_volume(plain: Image, tmp_path: Path) -> None:
    """With SQLite; the second process finds the data of the first one."""
    alone = SERVICES["serve"] | {"environment": {}}
    for replayed in (False, True):
        async with (
            plain.running(alone, tmp_path) as started,
            httpx.AsyncClient(base_url=started.url, trust_env=False) as http,
        ):
            answer = await Rest(http).add("plain", 7, key="one")
            assert answer.json()["replayed"] is replayed, answer.text
            assert await Rest(http).count("plain") == 7
            assert await started.stop() == 0, started.log.read_text()


async def counts(rest: Rest, token: Token) -> bool:
    """Retry the add until the response is definite: over its accept limit, it may not count."""

    async def definite() -> httpx.Response | None:
        answer = await rest.add("each", 1, token)
        known = answer.status_code == 200 or answer.json()["applied"] is not None
        return answer if known else None

    answer = await eventually(definite, f"an answer about {token}")
    return answer.status_code == 200 or bool(answer.json()["applied"])


def check_rights(started: Running) -> None:
    """It runs as the user of compose.yaml, without capabilities, far below its limits."""
    status = Path(f"/proc/{started.pid()}/status").read_text("ascii")
    uid, gid = started.service["user"].split(":")
    assert re.findall(r"^[UG]id:\t(\d+)\t(\d+)", status, re.MULTILINE) == [(uid, uid), (gid, gid)]
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    found = dict(re.findall(r"^(Threads|VmHWM):\s+(\d+)", status, re.MULTILINE))
    assert int(found["Threads"]) < started.service["pids_limit"] / 2
    assert started.service["mem_limit"] == "1g"
    assert int(found["VmHWM"]) < 1024 * 1024 / 2, "KiB"


def check_health(image: Image, started: Running) -> None:
    """The command of the image's health check, with the port that this machine had free."""
    kind, *command = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    port = str(urlsplit(started.url).port)
    prefix: Sequence[str] = ("run", "--isolation", "chroot", image.container, "--")
    image.buildah(*prefix, *(each.replace(":8080/", f":{port}/") for each in command))
    with pytest.raises(AssertionError, match="URLError"):
        image.buildah(*prefix, *(each.replace(":8080/", ":9/") for each in command))
