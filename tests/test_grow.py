"""docs/how-to/grow.md is run: its file, its commands in their order, its examples."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from scripts.cluster_nodes import Cluster
from scripts.postgresql_server import PostgresqlServer
from tests.support.documents import page
from tests.support.rest import Rest
from tests.support.server import ROOT
from tests.support.waiting import eventually
from tests.test_readme import compare

SECTION = page("how-to/grow.md")
#: Its block of commands, and the file in it.
SETUP = "\n".join(line[4:] for line in SECTION.splitlines() if line.startswith("    "))
_PORT = re.compile(r"--port (\d+)")
#: The output of a process that works.
_SERVING = re.compile(r"Serving on (\S+)")
_WORKING = re.compile(r"(?:Serving on|Rolling up as) \S+")


def commands(text: str) -> list[list[str]]:
    """The words of each `counter` command of *text*."""
    found = re.findall(r"^counter ([^#&\n]+)", text, re.MULTILINE)
    return [each.split() for each in found]


def configuration(cassandra: Cluster, memcached: Cluster) -> str:
    """The page's file, for servers that are elsewhere."""
    text = SETUP.partition("<<'END'\n")[2].partition("END\n")[0]
    port = cassandra.shape.cassandra_port
    (node,) = cassandra.contact_points
    return text.replace("memcached://127.0.0.1", memcached.memcached_url).replace(
        '["127.0.0.1"]', f'["{node}:{port}"]'
    )


@contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the page, at a port of its own choice; ended in the end."""
    command = _PORT.sub("--port 0", " ".join(words)).split()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "counter", *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


async def works(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a process says that it works; its log."""

    async def state() -> str | None:
        text = await asyncio.to_thread(log.read_text, encoding="utf-8")
        assert process.poll() is None, text
        return text if _WORKING.search(text) else None

    return await eventually(state, "the process works")


async def applied(words: list[str]) -> None:
    """Run the page's command that makes the schema."""
    assert words == ["schema", "apply"]
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "counter", *words], cwd=ROOT, check=False
    )
    assert done.returncode == 0


@pytest.mark.slow
async def test_processes_of_grow_share_a_postgresql_server(
    postgresql: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = re.findall(r"^```sh\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    assert "COUNTER_STORE=postgresql COUNTER_DSN=postgresql://" in text
    monkeypatch.setenv("COUNTER_STORE", "postgresql")
    monkeypatch.setenv("COUNTER_DSN", postgresql.dsn())
    # The server is shared with other tests.
    monkeypatch.setenv("COUNTER_KEYSPACE", "grow")
    apply, *others = commands(text)
    await applied(apply)
    replayed = []
    async with AsyncExitStack() as stack:
        for number, words in enumerate(others):
            log = tmp_path / f"{number}.log"
            process = stack.enter_context(started(words, log))
            serving = _SERVING.search(await works(process, log))
            assert serving is not None
            rest = Rest(
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        base_url=serving[1], timeout=30, trust_env=False, verify=False
                    )
                )
            )
            replayed.append((await rest.add("orders", 1, key="order-7")).json()["replayed"])
            assert await rest.count("orders") == 1
    assert replayed == [False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("child_processes")
async def test_the_commands_of_grow_make_a_cluster(
    cassandra: Cluster, memcached: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SETUP.startswith("./scripts/cluster start --nodes 1 ")
    (tmp_path / "cluster.toml").write_text(configuration(cassandra, memcached), encoding="utf-8")
    monkeypatch.setenv("COUNTER_CONFIG", str(tmp_path / "cluster.toml"))
    # The node is shared with other tests.
    monkeypatch.setenv("COUNTER_KEYSPACE", "grow")
    apply, *others = commands(SETUP)
    await applied(apply)
    urls: dict[str, str] = {}
    with ExitStack() as stack:
        running = []
        for number, words in enumerate(others):
            log = tmp_path / f"{number}.log"
            process = stack.enter_context(started(words, log))
            running.append(process)
            serving = _SERVING.search(await works(process, log))
            written = _PORT.search(" ".join(words))
            if serving and written:
                urls[f"http://127.0.0.1:{written[1]}"] = serving[1]
        assert len(urls) == 2
        await compare(SECTION, urls, tmp_path)
    assert [each.returncode for each in running] == [0] * len(others)
