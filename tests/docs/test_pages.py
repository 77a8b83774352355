"""Pages that are followed step by step are followed here: commands, programs and all."""

import asyncio
import os
import re
import sqlite3
import sys
import time
import tomllib
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from counter.config.settings import settings_model
from counter_client import Token
from scripts.postgresql_server import PostgresqlServer
from tests.support.child import run_python
from tests.support.documents import page, python_of, save_programs
from tests.support.server import ROOT, Server, ports_in_a_row, served, serving
from tests.support.servers import postgresql_server
from tests.test_readme import WRITTEN_URL, compare, defaults, steps, without

#: Pages that share a service: each has counters of its own.
TOGETHER = (
    "quick-start.md",
    "tutorials/count-views.md",
    "tutorials/saga.md",
    "how-to/choose-a-counter-type.md",
    "how-to/correct-a-count.md",
    "how-to/sell-at-most.md",
    "how-to/keep-a-budget.md",
    "how-to/count-cloud-events.md",
    "how-to/read-an-outage.md",
)
#: Ports of the servers that pages start.
PORTS = ("8000", "8090", "8443")
BACKUP = "how-to/back-up-and-restore.md"
_PRINTED = re.compile(r"print\(.*\)  # (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("service")
    with served(place, defaults()) as server:
        yield server


@pytest.fixture(autouse=True)
def commands_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("name", TOGETHER)
async def test_a_page_can_be_followed(name: str, service: Server, tmp_path: Path) -> None:
    await _follow(name, {WRITTEN_URL: service.url}, tmp_path)


def test_pages_that_are_followed_with_one_service_have_namespaces_of_their_own() -> None:
    """A page that creates the namespace of another one would go on with its settings and counts."""
    pages = (*TOGETHER, "tutorials/three-nodes.md", "tutorials/sqlite-to-postgresql.md")
    found = [
        (name, each)
        for each in pages
        for name in set(re.findall(r"(?:namespaces/|namespace create )([\w-]+)", page(each)))
    ]
    number = Counter(name for name, _ in found if name != "default")
    assert [each for each in found if number[each[0]] > 1] == []


@pytest.mark.usefixtures("child_processes")
async def test_the_readers_service_can_be_secured(tmp_path: Path) -> None:
    """Its data are in the reader's directory."""
    async with serving(tmp_path / "data", tmp_path / "logs", **defaults()) as server:
        await _follow("how-to/secure-it.md", {WRITTEN_URL: server.url}, tmp_path)


@pytest.mark.usefixtures("child_processes")
async def test_the_readers_service_can_be_restored(tmp_path: Path) -> None:
    """Its data are in the reader's directory."""
    async with serving(tmp_path / "data", tmp_path / "logs", **defaults()) as server:
        text = without(page(BACKUP), "PostgreSQL")
        await _follow(BACKUP, {WRITTEN_URL: server.url}, tmp_path, text)


async def test_counts_move_from_embedded_to_a_cluster(service: Server, tmp_path: Path) -> None:
    """The servers of the cluster are tried by tests/test_grow.py; here another process is both."""
    text = page("tutorials/three-nodes.md")
    [file] = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert set(tomllib.loads(file)) <= set(settings_model().model_fields)
    async with serving(tmp_path / "data", tmp_path / "logs", **defaults()) as new:
        both = dict.fromkeys(["http://127.0.0.1:8081", "http://127.0.0.1:8082"], new.url)
        places = {WRITTEN_URL: service.url, **both}
        assert await _follow("tutorials/three-nodes.md", places, tmp_path) == ["sales.py"]
        sales = (tmp_path / "sales.py").read_text(encoding="utf-8")
        sales = sales.replace("2_001", "201").replace("% 500", "% 50")  # enough without a fault
        (tmp_path / "sales.py").write_text(sales, encoding="utf-8")
        said = await asyncio.to_thread(_said, tmp_path, "sales.py")
    assert said == [f"{sold} acknowledged; counted: {sold + 15}" for sold in (50, 100, 150, 200)]


async def test_counts_move_from_sqlite_to_postgresql(
    service: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page("tutorials/sqlite-to-postgresql.md")
    before, heading, after = text.partition("## Move the counts")
    with postgresql_server() as database:
        as_superuser(database, before)
        [written] = set(re.findall(r"postgresql://\S+", before))
        dsn = database.dsn("counter", "counter_owner")
        await compare(before, {WRITTEN_URL: service.url, written: dsn}, tmp_path)
        flags = {**defaults(), "store": "postgresql"}
        monkeypatch.setenv("COUNTER_DSN", dsn)
        async with AsyncExitStack() as stack:
            places = {WRITTEN_URL: service.url}
            for port in (8081, 8082):
                new = serving(tmp_path / str(port), tmp_path / f"logs-{port}", **flags)
                places[f"http://127.0.0.1:{port}"] = (await stack.enter_async_context(new)).url
            await compare(heading + after, places, tmp_path)


def as_superuser(database: PostgresqlServer, text: str) -> None:
    """Run the SQL of a page."""
    for block in re.findall(r"^```sql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        # One by one: a database is not created in a transaction.
        for statement in filter(str.strip, block.split(";")):
            database.run("psql", "-qX", "-d", database.dsn(), "-c", statement)


async def test_an_order_that_waited_long_is_finished_once(service: Server, tmp_path: Path) -> None:
    """Its token is too old: each step gets a new token and keeps it, also if two run the order."""
    text = page("tutorials/saga.md").replace(WRITTEN_URL, service.url)
    text = text.replace('"shop"', '"late-shop"')
    assert save_programs(text, tmp_path) == ["orders.py"]
    async with service.client("late-shop") as rest:
        await rest.http.put("/v1/namespaces/late-shop", json={"counter_type": "ACCURATE"})
        first = await asyncio.to_thread(_said, tmp_path, "orders.py", "1001")
        assert first == ["reserve: done", "charge: done", "count: done", "order 1001: done"]
        _left_for_a_minute(tmp_path / "orders.sqlite3", "1002")
        runs = [asyncio.to_thread(_said, tmp_path, "orders.py", "1002") for _ in range(2)]
        await asyncio.gather(*runs)
        said = await asyncio.to_thread(_said, tmp_path, "orders.py", "1002")
        assert said == ["reserve: was done", "charge: was done", "count: was done", said[-1]]
        answer = await rest.batch_get(["stock", "sold"])
        assert [each["count"] for each in answer.json()["results"]] == [-2, 2]


async def _follow(
    name: str, urls: Mapping[str, str], home: Path, text: str | None = None
) -> list[str]:
    """Save the programs of a page, follow its steps, and run its Python as one program."""
    text = page(name) if text is None else text
    first = ports_in_a_row(len(PORTS))
    ports = {f"127.0.0.1:{each}": f"127.0.0.1:{first + at}" for at, each in enumerate(PORTS)}
    ports |= {f"--port {each}": f"--port {first + at}" for at, each in enumerate(PORTS)}
    places = {**urls, **{written: real for written, real in ports.items() if written in text}}
    real = text
    for written, place in places.items():
        real = real.replace(written, place)
    programs = save_programs(real, home)
    async with asyncio.timeout(300):  # commands that wait may wait for what never comes
        await compare(text, places, home)
    program = python_of(real, without=[each for each in programs if each in _started(text)])
    if expected := _PRINTED.findall(program):
        (home / "page.py").write_text(program, encoding="utf-8")
        assert await asyncio.to_thread(_said, home, "page.py") == expected
    return programs


def _started(text: str) -> str:
    """The commands of a page, and the programs that they name: an application by its module."""
    commands = " ".join(each.command for each in steps(text))
    return re.sub(r"uvicorn (\w+):", r"\1.py ", commands)


def _said(home: Path, *command: str) -> list[str]:
    """The output of a program in *home*."""
    done = run_python(*command, cwd=home, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def _left_for_a_minute(database: Path, number: str) -> None:
    """An order that was begun a minute ago, and no further."""
    token = Token(uuid.uuid4().bytes, time.time_ns() // 1_000 - 60_000_000)
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("INSERT INTO orders VALUES (?, ?, 'open')", (number, str(token)))
