"""The parts of every benchmark: servers of their own, CPU time, alternating rounds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from rich.console import Console

from counter.clock import to_rfc3339

ROOT: Final = Path(__file__).resolve().parents[1]
_START_TIMEOUT_S: Final = 180.0
_STOP_TIMEOUT_S: Final = 60.0
_SETTLE_TIMEOUT_S: Final = 30.0
#: Longer than a slow commit.
_QUIET_S: Final = 1.0
_POLL_S: Final = 0.05
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_READ_AT_ONCE: Final = 1_000
_LOG_CHARS: Final = 1_500

#: Below the range that systems take outgoing ports from.
_PORTS: Final = range(20_000, 30_000)

_Sample = TypeVar("_Sample")


class BenchError(Exception):
    """A count was wrong, or a benchmark did no work: the figures mean nothing."""


class MissingToolError(Exception):
    """Something that must be installed first."""


def check(condition: bool, message: str) -> None:
    """Raise BenchError with *message* unless *condition* holds."""
    if not condition:
        raise BenchError(message)


@dataclass(slots=True)
class Bench:
    """One run: its length and rounds, its folder, and its report."""

    console: Console
    folder: Path
    rounds: int
    seconds: float
    quick: bool
    #: Prepared data directories by shape, made once a run.
    prepared: dict[Any, Path] = field(default_factory=dict)
    #: CPU seconds of the clusters that were started: they are no children of this process.
    cluster_cpu_s: float = 0.0
    _made: int = 0

    def fresh_folder(self, name: str) -> Path:
        """Return a path that does not exist yet."""
        self._made += 1
        return self.folder / f"{self._made:03}-{name}"

    def say(self, text: str) -> None:
        """A line of progress."""
        self.console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)

    def alternate(self, variants: Mapping[str, Callable[[], _Sample]]) -> dict[str, list[_Sample]]:
        """Run *variants* in turn, round after round, so that what the machine does meanwhile
        falls on all of them alike."""
        samples: dict[str, list[_Sample]] = {name: [] for name in variants}
        for number in range(1, self.rounds + 1):
            for name, run in variants.items():
                with self.console.status(f"round {number} of {self.rounds}: {name}"):
                    sample = run()
                self.say(f"round {number}: {name}: {sample}")
                samples[name].append(sample)
        return samples


def counter_names(number: int) -> list[str]:
    """The names that the scripts in benchmarks/wrk/ use."""
    return [f"c{position:07}" for position in range(number)]


def new_token() -> dict[str, str]:
    """A fresh token as JSON has it."""
    return token_json(uuid.uuid4().bytes, time.time_ns() // 1_000)


def token_json(nonce: bytes, time_us: int) -> dict[str, str]:
    """A token as JSON has it."""
    return {"token": nonce.hex(), "generation_time": to_rfc3339(time_us)}


def run_module(*arguments: str) -> str:
    """Run a module to its end; return what it printed. Raises BenchError unless it ends well."""
    command = python_module(*arguments)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    problem = f"{done.stdout[-500:]}{done.stderr[-_LOG_CHARS:]}"
    check(done.returncode == 0, f"{' '.join(arguments[:3])} failed: {problem}")
    return done.stdout


def python_module(*arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", *arguments]


def cpu_s_of(pid: int) -> float:
    """The CPU seconds that all threads of a process used so far, user and system."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Child:
    """A process that is gone when :meth:`kill` has returned, wherever an interruption came.

    It is in a session of its own: Ctrl-C reaches only its parent, which ends it in order. It is
    started in a thread, because an interruption meets only the main one: within ``Popen`` it would
    leave an unknown process.
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        self._process: subprocess.Popen[Any] | None = None
        self._starter = ThreadPoolExecutor(1)
        try:
            self._starter.submit(self._start, command, how).result()
        except BaseException:
            self.kill()
            raise

    def _start(self, command: Sequence[str], how: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(command, start_new_session=True, **how)

    @property
    def process(self) -> subprocess.Popen[Any]:
        """The started process."""
        if self._process is None:
            raise BenchError("the process is not started")
        return self._process

    def kill(self) -> None:
        """End it now, and its children."""
        self._starter.shutdown()
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Server:
    """A server in a process of its own that prints its address, as ``counter serve`` does."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._log_path = log
        self._killed = False
        with log.open("wb") as out:
            self._child = Child(
                python_module(*arguments),
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.client = httpx.Client(
            base_url=self.url, headers=headers, timeout=60.0, trust_env=False
        )

    def _wait_until_ready(self) -> str:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s and self._child.process.poll() is None:
            if url := self._ready_at():
                return url
            time.sleep(0.02)
        raise BenchError(f"the server does not get ready:\n{self.log()}")

    def _ready_at(self) -> str | None:
        """Its address; None until it serves."""
        for line in self.log().splitlines():
            if line.startswith("Serving on "):
                return line.removeprefix("Serving on ")
        return None

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def log(self) -> str:
        """Its output, the beginning and the end."""
        text = self._log_path.read_text(encoding="utf-8", errors="replace")
        if len(text) <= 2 * _LOG_CHARS:
            return text
        return f"{text[:_LOG_CHARS]}\n[...]\n{text[-_LOG_CHARS:]}"

    def cpu_s(self) -> float:
        """The CPU seconds that all its threads used so far, user and system."""
        return cpu_s_of(self.pid)

    def memory_kib(self) -> dict[str, int]:
        """The ``Vm...`` and ``Rss...`` lines of its status."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return {
            name: int(value.split()[0])
            for name, _, value in (line.partition(":") for line in lines)
            if name.startswith(("Vm", "Rss"))
        }

    def get(self, path: str) -> Any:
        """The JSON at *path*. Raises BenchError for anything but a success."""
        return self.call("GET", path)

    def create(self, base: str, **settings: Any) -> Any:
        """Create the namespace at *base*. Raises BenchError for anything but a success."""
        return self.call("PUT", base, settings)

    def post(self, path: str, body: Any) -> Any:
        """The JSON of the response to *body*. Raises BenchError for anything but a success."""
        return self.call("POST", path, body)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of the response. Raises BenchError for anything but a success."""
        try:
            answer = self.client.request(method, path, json=body)
        except httpx.TransportError as error:
            raise BenchError(f"{method} {path}: no response: {error}") from error
        problem = f"{method} {path}: {answer.status_code} {answer.text[:300]}"
        check(answer.is_success, problem)
        return answer.json() if answer.content else None

    def tally(self) -> dict[str, int]:
        """The outcomes of the adds so far, by the server's own metrics."""
        outcomes = self.metrics("counter_adds_total{outcome=")
        return {name.split('"')[1]: int(number) for name, number in outcomes.items()}

    def metrics(self, start: str) -> dict[str, float]:
        """The samples that begin with *start*."""
        lines = self.client.get("/metrics").text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if line.startswith(start))
        return {name: float(number) for name, _, number in pairs}

    def settled_tally(self) -> dict[str, int]:
        """The tally once nothing is under way any more: requests that wrk left behind end too."""
        latest, changed_s = self.tally(), time.monotonic()

        def settled() -> bool:
            nonlocal latest, changed_s
            before, latest = latest, self.tally()
            if before != latest:
                changed_s = time.monotonic()
            return time.monotonic() - changed_s >= _QUIET_S

        wait_until("the server is still processing abandoned adds", settled, _SETTLE_TIMEOUT_S)
        return latest

    def counts(self, base: str, names: Sequence[str], staleness: str | None) -> dict[str, int]:
        """Counts read by ``batch/get`` under the namespace path *base*."""
        found: dict[str, int] = {}
        for start in range(0, len(names), _READ_AT_ONCE):
            body: dict[str, Any] = {"counters": names[start : start + _READ_AT_ONCE]}
            if staleness is not None:
                body["max_staleness"] = staleness
            for each in self.post(f"{base}/batch/get", body)["results"]:
                found[each["counter"]] = each["count"]
        return found

    def stop(self) -> None:
        """End it as a user would, unless it was killed. Raises BenchError unless it ends well."""
        self.client.close()
        if self._killed:
            return
        self._child.process.terminate()
        try:
            code = self._child.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"the server does not stop:\n{self.log()}") from None
        check(code == 0, f"the server ended with exit code {code}:\n{self.log()}")

    def kill(self) -> None:
        """End it with SIGKILL, if it still runs."""
        self._killed = True
        self._child.kill()


@contextmanager
def serving(arguments: Sequence[str], log: Path, **how: Any) -> Iterator[Server]:
    """A server that is gone afterwards, whatever happens."""
    server = Server(arguments, log, **how)
    try:
        yield server
        server.stop()
    finally:
        server.kill()


@contextmanager
def counter_serve(bench: Bench, data: Path, *flags: str) -> Iterator[Server]:
    """``counter serve`` on *data* at a free port."""
    arguments = ["counter", "serve", "--port", "0", "--data", str(data), *flags]
    with serving(arguments, bench.fresh_folder("serve.log")) as server:
        yield server


def free_port() -> int:
    """A free port of 127.0.0.1."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise BenchError(f"no free port from {_PORTS.start} to {_PORTS.stop}")


def wait_until(problem: str, holds: Callable[[], bool], timeout_s: float) -> None:
    """Poll until *holds*. Raises BenchError with *problem* after *timeout_s*."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        check(time.monotonic() < end_s, f"after {timeout_s:.0f} s: {problem}")
        time.sleep(_POLL_S)


class Background:
    """Calls *work* every *every_s* seconds in a thread of its own, until stopped."""

    def __init__(self, work: Callable[[], None], every_s: float) -> None:
        self._work = work
        self._every_s = every_s
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            due_s += self._every_s
            try:
                self._work()
            except Exception as error:
                self._failure = error
                return

    def check(self) -> None:
        """Raise BenchError if *work* failed."""
        if self._failure is not None:
            raise BenchError(f"in the background: {self._failure}") from self._failure

    def stop(self) -> None:
        """End it after the call under way. Raises BenchError if *work* failed."""
        self._stop.set()
        self._thread.join()
        self.check()
