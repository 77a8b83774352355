"""The pages on web applications and on Celery are followed, and every process on them is killed."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from celery import Celery

from counter_client import AsyncCounterClient, Options
from tests.support.documents import page, save_programs
from tests.support.server import Server, ports_in_a_row
from tests.support.waiting import eventually
from tests.test_readme import WRITTEN_URL

WEB = page("how-to/count-in-web-applications.md")
CELERY = page("how-to/count-in-celery-tasks.md")
SPOOL = "counts.spool"
#: No worker is killed because it is slow to start, and no socket is made in the home directory.
ON_A_BUSY_MACHINE = {
    "GUNICORN_CMD_ARGS": "--no-control-socket --timeout 120",
    "UVICORN_TIMEOUT_WORKER_HEALTHCHECK": "120",
}
#: Requests that run at once at each site.
CLIENTS = 3
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, child_processes: None) -> Iterator[Server]:
    """A service that keeps its address when it is started again."""
    place = tmp_path_factory.mktemp("service")
    server = Server(place / "data", place / "logs", {"port": str(ports_in_a_row(1))})
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.clean_up()


@pytest.fixture
async def client(service: Server) -> AsyncIterator[AsyncCounterClient]:
    async with AsyncCounterClient(service.url, options=Options(trust_env=False)) as client:
        yield client


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client that keeps no connection, so that requests go to all workers."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=30.0, trust_env=False, limits=limits) as client:
        yield client


class Program:
    """A command of a page, which leads a group of processes."""

    def __init__(self, command: str, folder: Path) -> None:
        program, *words = shlex.split(command)
        self.command = command
        with (folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name(program)), *words],
                cwd=folder,
                env=os.environ | ON_A_BUSY_MACHINE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def workers(self) -> list[int]:
        """The processes that do the work."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [
            int(each)
            for each in children
            if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()
        ]

    def kill_a_worker(self) -> None:
        os.kill(self.workers()[-1], signal.SIGKILL)

    def kill(self) -> None:
        """``kill -9`` of all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def stop(self) -> int:
        """End it as an operator does; its exit code."""
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, 100)


@asynccontextmanager
async def started(commands: Sequence[str], folder: Path) -> AsyncIterator[list[Program]]:
    """The programs, killed at the end. A failing test shows their logs."""
    programs = [Program(each, folder) for each in commands]
    try:
        yield programs
    except BaseException:
        print((folder / "log").read_text(encoding="utf-8", errors="replace"))
        raise
    finally:
        for each in programs:
            each.kill()


def save(text: str, service: Server, folder: Path) -> list[str]:
    """Save the programs of a page; their names. They do not wait long for a dead service."""
    for written, real in {WRITTEN_URL: service.url, "deadline_s=10": "deadline_s=5"}.items():
        assert written in text
        text = text.replace(written, real)
    return save_programs(text, folder)


def commands_of(text: str) -> list[str]:
    """The servers that a page starts."""
    return re.findall(r"^    ((?:gunicorn|uvicorn|celery) .*)$", text, re.MULTILINE)


async def counts(client: AsyncCounterClient, prefix: str) -> dict[str, int]:
    """The exact count of each counter with *prefix*."""
    found = client.counts(prefix, max_staleness="0s")
    return {each.counter: each.count async for each in found}


async def send_the_rest(client: AsyncCounterClient, folder: Path) -> None:
    """Send the rest of the spool: the counts must be right after that, too."""
    async with client.buffer(spool=folder / SPOOL) as buffer:
        await buffer.flush()


@dataclass
class Visitors:
    """Requests to one site, each for a page of its own, and which of them were answered."""

    name: str
    site: Program
    sent: list[str] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)

    @property
    def address(self) -> tuple[str, int]:
        [port] = re.findall(r"(?:127\.0\.0\.1:|--port )(\d+)", self.site.command)
        return "127.0.0.1", int(port)

    async def is_open(self) -> bool:
        assert self.site.process.poll() is None, f"{self.site.command} ended"
        try:
            _, writer = await asyncio.open_connection(*self.address)
        except OSError:
            return False
        writer.close()
        return True

    async def visit(self, http: httpx.AsyncClient) -> None:
        """Send one request."""
        number = str(len(self.sent))
        self.sent.append(f"{self.name}:{number}")
        host, port = self.address
        answer = await http.post(f"http://{host}:{port}/view/{number}")
        assert (answer.status_code, answer.json()) == (200, {"counted": number})
        self.answered.add(f"{self.name}:{number}")

    async def visit_until_it_ends(self, http: httpx.AsyncClient) -> None:
        """Send one request after another; a killed worker leaves some without a response."""
        while self.site.process.poll() is None:
            try:
                await self.visit(http)
            except httpx.TransportError:
                await asyncio.sleep(0)

    async def answers(self) -> None:
        """Wait for ten more answers."""
        target = len(self.answered) + 10

        await eventually(lambda: len(self.answered) >= target, f"{self.name} answers ten requests")


async def test_each_answered_request_counts_once_despite_kills(
    service: Server, client: AsyncCounterClient, fast_dir: Path, http: httpx.AsyncClient
) -> None:
    """Workers, service and web servers are killed; the next servers send the spool."""
    names = ("flask", "django", "fastapi")
    assert save(WEB, service, fast_dir) == ["counting.py", *(f"{each}_site.py" for each in names)]
    first = ports_in_a_row(len(names))
    text = re.sub(r"\b800([123])\b", lambda at: str(first + int(at[1]) - 1), WEB)
    flask, django, uvicorn, asgi = commands_of(text)

    async with started([flask, django, uvicorn], fast_dir) as sites:
        visitors = [Visitors(name, site) for name, site in zip(names, sites, strict=True)]

        async def all_answer() -> None:
            await asyncio.gather(*(each.answers() for each in visitors))

        for each in visitors:
            await eventually(each.is_open, each.site.command)
        async with asyncio.TaskGroup() as group:
            for each in visitors:
                for _ in range(CLIENTS):
                    group.create_task(each.visit_until_it_ends(http))
            await all_answer()
            for site in sites:
                site.kill_a_worker()
            await all_answer()
            service.kill()
            await all_answer()
            for site in sites:
                site.kill()

    await service.start()
    preloaded = flask.replace("gunicorn ", "gunicorn --preload ")
    fewer = [each.replace("--workers 2", "--workers 1") for each in (preloaded, asgi)]
    async with started(fewer, fast_dir) as sites:
        for each, site in zip((visitors[0], visitors[2]), sites, strict=True):
            each.site = site
            await eventually(each.is_open, site.command)
            await each.visit(http)
        for each in visitors:

            async def all_count(visitors: Visitors = each) -> bool:
                return visitors.answered <= (await counts(client, visitors.name)).keys()

            await eventually(all_count, "the next servers send what is in the spool")
        for each in (visitors[0], visitors[2]):
            await each.visit(http)
        assert [await site.stop() for site in sites] == [0, 0]
    # Each worker sent the rest at its end.
    for each in visitors:
        assert each.answered <= (await counts(client, each.name)).keys()
    await send_the_rest(client, fast_dir)
    for each in visitors:
        found = await counts(client, each.name)
        assert each.answered <= found.keys() <= set(each.sent)
        assert set(found.values()) == {1}


#: Each task's process dies once, after the add and before the acknowledgement. One more task does
#: what the page warns of.
DEADLY = """
import os, signal
from pathlib import Path
from celery.signals import task_postrun
from shop import app, viewed

app.conf.worker_lost_wait = 0.1
app.conf.broker_transport_options["polling_interval"] = 0.1
app.task(name="again", acks_late=True, reject_on_worker_lost=True)(viewed.run)

@task_postrun.connect
def die_once(task_id, state, **_):
    if state == "SUCCESS" and not Path(task_id).exists() and "last" not in task_id:
        Path(task_id).touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


async def test_a_task_that_is_delivered_again_counts_once(
    service: Server, client: AsyncCounterClient, fast_dir: Path
) -> None:
    """Killed before the acknowledgement, with the service down, and after the acknowledgement."""
    assert save(CELERY, service, fast_dir) == ["shop.py"]
    (fast_dir / "deadly.py").write_text(DEADLY, encoding="utf-8")
    for name in ("queue", "control"):
        (fast_dir / name).mkdir()
    caller = Celery(broker="filesystem://localhost", set_as_current=False)
    caller.conf.broker_transport_options = {
        "data_folder_in": fast_dir / "queue",
        "data_folder_out": fast_dir / "queue",
        "control_folder": fast_dir / "control",
    }

    def call(task: str, item: str) -> None:
        caller.send_task(task, [item], task_id=f"{task}-{item}")

    async def logged(line: str, times: int = 1) -> None:
        await eventually(
            lambda: (fast_dir / "log").read_text(encoding="utf-8").count(line) >= times, line
        )

    async def counted(expected: dict[str, int]) -> None:
        async def is_counted() -> bool:
            return expected.items() <= (await counts(client, "")).items()

        await eventually(is_counted, f"{expected} are counted")

    [command] = commands_of(CELERY)
    deadly = command.replace("--app shop", "--app deadly") + " --loglevel INFO --without-mingle"
    async with started([deadly], fast_dir) as [worker]:
        call("shop.sell", "tea")
        call("shop.viewed", "tea")
        call("again", "twice")
        await logged("shop.sell[shop.sell-tea] succeeded", 2)
        await counted({"sold:tea": 1, "viewed:tea": 1, "viewed:twice": 2})
        service.kill()
        call("shop.sell", "milk")
        call("shop.viewed", "milk")
        await logged("shop.viewed[shop.viewed-milk] succeeded")
        await logged("shop.sell[shop.sell-milk] retry")
        await service.start()
        await logged("shop.sell[shop.sell-milk] succeeded", 2)
        await counted({"viewed:milk": 1})
        call("shop.sell", "tea")
        await logged("shop.sell[shop.sell-tea] succeeded", 3)
        call("shop.viewed", "last")
        await logged("shop.viewed[shop.viewed-last] succeeded")
        assert await worker.stop() == 0
    expected = {"sold:tea": 1, "sold:milk": 1}
    expected |= {"viewed:tea": 1, "viewed:twice": 2, "viewed:milk": 1, "viewed:last": 1}
    found = await counts(client, "")
    assert {name: found.get(name) for name in expected} == expected
    await send_the_rest(client, fast_dir)
    assert expected.items() <= (await counts(client, "")).items()
