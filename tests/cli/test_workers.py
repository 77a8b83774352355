"""Several real processes on one port: who answers, who is started again, and that all end."""

import asyncio
import errno
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock, patch

import httpx
import pytest

from api.workers import supervise
from counter.config.settings import Settings
from counter.errors import StartupError
from tests.support.certificates import Authority
from tests.support.child import run_python
from tests.support.needs import miss
from tests.support.promtool import promtool
from tests.support.server import ROOT, ports_in_a_row
from tests.support.waiting import eventually

WORKERS = 2
_LOOKED_UP = 'counter_requests_total{route="GET /v1/namespaces/{namespace}",status="200"}'
_ADDS = 'counter_namespace_adds_total{namespace="default"}'
pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    """The workers that process *pid* started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(each) for each in text.split() if "spawn_main" in command(int(each))]


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return ""


def patient(verify: ssl.SSLContext | bool = False) -> httpx.AsyncClient:
    """A client that waits for a process on a busy machine."""
    return httpx.AsyncClient(timeout=100, trust_env=False, verify=verify)


class Service:
    """The supervisor, from outside."""

    def __init__(self, port: int, errors: Path, **settings: str) -> None:
        self.port = port
        with errors.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.workers", str(WORKERS), str(port)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                env=os.environ | {f"COUNTER_{name.upper()}": v for name, v in settings.items()},
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
            async with patient() as http:
                url = f"http://127.0.0.1:{self.port + offset}/readyz"
                return (await http.get(url)).status_code == 200
        except httpx.TransportError:
            return False

    async def exposition(self, offset: int = 0) -> str:
        """The metrics at the shared port (0), or at a worker's own."""
        async with patient() as http:
            return (await http.get(f"http://127.0.0.1:{self.port + offset}/metrics")).text

    async def metrics(self, offset: int = 0) -> dict[str, float]:
        """The same, by sample."""
        text = await self.exposition(offset)
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#"]
        return {sample: float(value) for sample, value in lines}

    async def look_up(self, offset: int, times: int) -> None:
        """Send so many requests to one worker alone."""
        async with patient() as http:
            for _ in range(times):
                url = f"http://127.0.0.1:{self.port + offset}/v1/namespaces/default"
                assert (await http.get(url)).status_code == 200

    async def add(self, offset: int) -> None:
        """Send one add to one worker alone."""
        async with patient() as http:
            url = f"http://127.0.0.1:{self.port + offset}/v1/namespaces/default/counters/c/add"
            answer = await http.post(url, json={"delta": 1}, headers={"idempotency-key": "a"})
            assert answer.status_code == 200, answer.text

    async def all_answer(self) -> bool:
        return all([await self.answers(offset) for offset in range(WORKERS + 1)])


@contextmanager
def running(tmp_path: Path, **settings: str) -> Iterator[Service]:
    """Two workers and their supervisor, gone at the end."""
    if not Path("/proc/self/task").is_dir():
        miss("there is no /proc to find the workers in")
    each = Service(ports_in_a_row(WORKERS + 1), tmp_path / "err", **settings)
    try:
        yield each
    finally:
        _clean_up(each)


def _clean_up(each: Service) -> None:
    if each.process.poll() is None:
        for pid in [*children(each.process.pid), each.process.pid]:
            os.kill(pid, signal.SIGKILL)
    each.process.wait()
    assert each.process.stdout is not None
    each.process.stdout.close()


@pytest.fixture
def service(tmp_path: Path, child_processes: None) -> Iterator[Service]:
    with running(tmp_path) as each:
        yield each


@pytest.fixture
async def workers(service: Service) -> list[int]:
    """The process ids of the workers, all of them ready."""
    return await service.ready()


async def gone(pids: list[int]) -> None:
    """Wait until none of *pids* runs."""

    await eventually(lambda: not any(map(command, pids)), f"{pids} ended")


async def test_a_killed_worker_is_restarted(service: Service, workers: list[int]) -> None:
    """Each reports the sum over all, the dead one included: it must not decrease."""
    await service.look_up(1, 3)
    await service.look_up(2, 4)
    await service.add(2)

    async def summed() -> bool:
        found = await service.metrics()
        up = [found.get(f'counter_worker_up{{worker="{n}"}}') for n in range(WORKERS)]
        # Each writes what it counts now and then: the add may be shown later than the look-ups.
        return (found.get(_LOOKED_UP), found.get(_ADDS)) == (7, 1) and up == [1, 1]

    await eventually(summed, "a scrape shows both workers")
    assert [(await service.metrics(own))[_LOOKED_UP] for own in (1, 2)] == [3, 4]
    promtool("check", "metrics", given=await service.exposition())

    assert (await service.metrics())[_ADDS] == 1
    os.kill(workers[1], signal.SIGKILL)

    async def replaced() -> bool:
        now = children(service.process.pid)
        return len(now) == WORKERS and now != workers and await service.all_answer()

    await eventually(replaced, "a new worker answers")
    assert await service.answers(0)
    found = await service.metrics(2)
    assert _LOOKED_UP not in found
    assert found[_ADDS] == 0, "the new worker shows the namespaces that the dead one showed"
    assert (await service.metrics())[_ADDS] == 1
    for _ in range(5):
        assert (await service.metrics())[_LOOKED_UP] == 7
    await service.look_up(2, 1)

    async def goes_on() -> bool:
        return (await service.metrics())[_LOOKED_UP] == 8

    await eventually(goes_on, "the new worker's requests come on top")


async def test_no_worker_outlives_a_killed_supervisor(service: Service, workers: list[int]) -> None:
    service.process.kill()
    await gone(workers)


@pytest.mark.usefixtures("child_processes")
async def test_workers_serve_tls_and_end_in_order(tmp_path: Path) -> None:
    """On the shared port and on their own. On shutdown the shared port is closed at once."""
    authority = Authority(tmp_path / "authority")
    own = authority.sign()
    files = {"https_cert": str(own.cert), "https_key": str(own.key)}
    with running(tmp_path, **files) as service:
        workers = await service.ready()
        assert len(workers) == WORKERS
        async with patient(authority.client()) as http:
            for offset in range(WORKERS + 1):
                url = f"https://localhost:{service.port + offset}/readyz"
                assert (await http.get(url)).status_code == 200
            os.kill(workers[0], signal.SIGSTOP)
            service.process.terminate()
            await gone(workers[1:])
            assert service.process.poll() is None
            os.kill(workers[0], signal.SIGCONT)

            async def closed() -> bool:
                return not await listens(service.port)

            await eventually(closed, "the shared port is closed")
        assert await asyncio.to_thread(service.process.wait) == 0
        await gone(workers)


async def listens(port: int) -> bool:
    """Whether anybody does at *port*."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except (ConnectionRefusedError, ConnectionResetError):
        # Reset: it was closed before it accepted this connection.
        return False
    writer.close()
    return True


@pytest.mark.usefixtures("child_processes")
def test_a_failed_start_of_all_workers_is_reported_once() -> None:
    done = run_python("-m", "tests.support.workers", str(WORKERS), "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "counter: there is no store here; start one\n"


def test_a_start_without_a_temporary_folder_names_the_fix() -> None:
    """It holds the metrics of each worker."""
    full = OSError(errno.ENOSPC, "No space left on device")
    settings = Settings(workers=2)
    with (
        patch("api.workers.TemporaryDirectory", side_effect=full),
        pytest.raises(StartupError, match=r"No space left.*TMPDIR"),
    ):
        supervise(settings, Mock(), Mock(), Mock())
