"""Several real processes on one port: who answers, who is started again, and that all end."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.needs import miss
from tests.support.server import ROOT, ports_in_a_row
from tests.support.waiting import eventually

WORKERS = 2
pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    """The workers that process *pid* started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(each) for each in text.split() if "spawn_main" in command(int(each))]


def command(pid: int) -> str:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return ""


class Service:
    """The supervisor, from outside."""

    def __init__(self, port: int, errors: Path) -> None:
        self.port = port
        with errors.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.workers", str(WORKERS), str(port)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                start_new_session=True,
            )

    async def ready(self) -> list[int]:
        """Wait until all are ready; their process ids."""
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line == b"ready\n"
        return children(self.process.pid)

    async def answers(self, offset: int) -> bool:
        """Whether somebody answers at the shared port (0), or at a worker's own."""
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                url = f"http://127.0.0.1:{self.port + offset}/readyz"
                return (await http.get(url)).status_code == 200
        except httpx.TransportError:
            return False

    async def all_answer(self) -> bool:
        return all([await self.answers(offset) for offset in range(WORKERS + 1)])


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    if not Path("/proc/self/task").is_dir():
        miss("there is no /proc to find the workers in")
    each = Service(ports_in_a_row(WORKERS + 1), tmp_path / "err")
    yield each
    if each.process.poll() is None:
        for pid in [*children(each.process.pid), each.process.pid]:
            os.kill(pid, signal.SIGKILL)
    each.process.wait()
    assert each.process.stdout is not None
    each.process.stdout.close()


@pytest.fixture
async def workers(service: Service) -> list[int]:
    """The process ids of the workers, all of them ready."""
    return await service.ready()


async def gone(pids: list[int]) -> None:
    """Wait until none of *pids* runs."""

    async def ended() -> bool:
        return not any(map(command, pids))

    await eventually(ended, f"{pids} ended")


async def test_each_answers_and_all_end_in_order(service: Service, workers: list[int]) -> None:
    assert len(workers) == WORKERS
    assert await service.all_answer()
    service.process.terminate()
    assert await asyncio.to_thread(service.process.wait) == 0
    await gone(workers)


async def test_one_that_is_killed_is_started_again(service: Service, workers: list[int]) -> None:
    os.kill(workers[1], signal.SIGKILL)

    async def replaced() -> bool:
        now = children(service.process.pid)
        return len(now) == WORKERS and now != workers and await service.all_answer()

    await eventually(replaced, "a new worker answers")
    assert await service.answers(0)


async def test_none_outlives_a_supervisor_that_is_killed(
    service: Service, workers: list[int]
) -> None:
    service.process.kill()
    await gone(workers)


def test_where_none_can_start_it_says_why_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.workers", str(WORKERS), "0"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.decode() == "counter: there is no store here; start one\n"
    assert done.stdout == b""
