"""The real thing: ``python -m counter serve`` as a process that a test may kill."""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx

from tests.support.problems import check_end
from tests.support.rest import Rest
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
#: Small windows, so that real time passes them while a test looks on. A write has time: a busy
#: machine is slow, and only tests of time-outs want a short one.
SMALL_WINDOWS: Mapping[str, str] = {
    "retention": "1h",
    "slice": "10m",
    "write_timeout": "2s",
    "rollup_window": "200ms",
    "accept_limit": "500ms",
}
_COUNTER = (sys.executable, "-m", "counter")
_SERVING = re.compile(r"Serving on (https?://127\.0\.0\.1:\d+)")


def _flags(data: Path, flags: Mapping[str, str]) -> list[str]:
    """The flags of the command: small windows and a free port, unless *flags* say otherwise."""
    settings = {"port": "0", "data": str(data), **SMALL_WINDOWS, **flags}
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def ports_in_a_row(count: int) -> int:
    """The first of *count* free ports in a row, drawn at random."""
    places = range(28_000, 32_000, count)
    for first in random.sample(places, len(places)):
        try:
            with ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    raise AssertionError("no ports are free")


class Server:
    """One service process after another on the same data directory."""

    def __init__(
        self, data: Path, logs: Path, flags: Mapping[str, str], program: Sequence[str] = _COUNTER
    ) -> None:
        self.data = data
        self.url = ""
        self.starts = 0
        self._logs = logs
        self._flags = flags
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start the server first"
        return self._process

    def output(self, stream: str) -> str:
        """The latest process's output in ``out`` or ``err``."""
        path = self._logs / f"{self.starts}.{stream}"
        return path.read_text(encoding="utf-8", errors="replace")

    async def start(self) -> None:
        """Start a process and wait until it listens."""
        code = await self.try_start()
        assert code is None, f"exit {code} at the start:\n{self.output('err')}"

    async def try_start(self) -> int | None:
        """The same, or the exit code of a process that ends instead."""
        assert self._process is None, "it runs already"
        self.starts += 1
        process = self._process = self._launch()

        async def decided() -> bool:
            found = _SERVING.search(self.output("out"))
            self.url = found[1] if found else ""
            return found is not None or process.poll() is not None

        await eventually(decided, "the service listens")
        if self.url:
            return None
        self._process = None
        return process.returncode

    async def kill_once(self, sign: Callable[[], bool], what: str) -> None:
        """Start a process and kill it as soon as *sign* holds, wherever its start has got to."""
        assert self._process is None, "it runs already"
        self.starts += 1
        self._process = self._launch()
        await eventually(sign, what)
        self.kill()

    def _launch(self) -> subprocess.Popen[bytes]:
        self._logs.mkdir(parents=True, exist_ok=True)
        with (
            (self._logs / f"{self.starts}.out").open("wb") as out,
            (self._logs / f"{self.starts}.err").open("wb") as err,
        ):
            return subprocess.Popen(
                [*self._program, "serve", *_flags(self.data, self._flags)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def kill(self) -> None:
        """``kill -9``: nothing of the process gets to run again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._process = None

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """The exit code of a process that was asked to end."""
        process = self.process

        await eventually(lambda: process.poll() is not None, "the service ends after SIGTERM")
        self._process = None
        assert process.returncode is not None
        return process.returncode

    async def stop(self) -> int:
        """Ask it to end, and wait; its exit code."""
        self.terminate()
        return await self.ended()

    def all_errors(self) -> str:
        """Everything that every process wrote to stderr."""
        logs = sorted(self._logs.glob("*.err"))
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def clean_up(self) -> None:
        """Leave nothing running, whatever happened."""
        if self._process is not None:
            self.kill()

    @asynccontextmanager
    async def client(self, namespace: str = "default") -> AsyncIterator[Rest]:
        """The API of the process that listens now."""
        async with httpx.AsyncClient(
            base_url=self.url,
            timeout=100.0,
            trust_env=False,
            verify=False,
            event_hooks={"response": [check_end]},
        ) as http:
            yield Rest(http, namespace)


@asynccontextmanager
async def serving(data: Path, logs: Path, **flags: str) -> AsyncIterator[Server]:
    """A started server, cleaned up at the end."""
    server = Server(data, logs, flags)
    try:
        await server.start()
        yield server
    finally:
        server.clean_up()


@contextmanager
def served(
    place: Path, flags: Mapping[str, str] | None = None, program: Sequence[str] = _COUNTER
) -> Iterator[Server]:
    """The same for tests that have no event loop, in the folder *place*, of another *program*."""
    server = Server(place / "data", place / "logs", flags or {}, program)
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.clean_up()


def refused(data: Path, **flags: str) -> tuple[int, str]:
    """Exit code and stderr of a start that must fail; one that serves is ended and fails."""
    try:
        done = subprocess.run(
            [*_COUNTER, "serve", *_flags(data, flags)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=100,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"it serves, or hangs, on {data}: {error.stdout!r}") from error
    return done.returncode, done.stderr.decode()
