"""The processes of ``scripts/capacity``: the measured ones and the load. None outlives a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.capacity.load import Done, Job
from counter.errors import InvariantError, StartupError

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.02
_TELL_EVERY_S: Final = 0.1
_LOG_CHARS: Final = 1_500
_REQUEST_TIMEOUT_S: Final = 30.0


class BenchError(Exception):
    """A count was wrong, or a load did no work: the figures mean nothing."""


class Child:
    """A process that is gone when :meth:`kill` has returned, wherever an interruption came.

    It is in a session of its own: Ctrl-C reaches only whoever started it, who ends it in order. It
    is started in a thread, because an interruption meets only the main one: within ``Popen`` it
    would leave an unknown process.
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        self._command = command
        self._how = how
        self._starter = ThreadPoolExecutor(1)
        self._process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Start it."""
        self._starter.submit(self._start).result()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, start_new_session=True, **self._how)

    @property
    def process(self) -> subprocess.Popen[Any]:
        """What was started."""
        if self._process is None:
            raise InvariantError("it was started before it is asked for")
        return self._process

    def kill(self) -> None:
        """End it now, and what it started."""
        self._starter.shutdown()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def free_port() -> int:
    """Return a free port of this machine. Another process may take it before it is used; the system
    gives out others first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


class Process(Child):
    """``counter`` with *arguments*, as a process of its own that says when it is ready."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self._log = folder / f"{arguments[0]}.log"
        self._out = self._log.open("wb")
        super().__init__(
            [sys.executable, "-m", "counter", *arguments],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, start: str) -> str:
        """Wait for a line that begins with *start*; the rest of it. Raises StartupError."""
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s and self.process.poll() is None:
            for each in self.log().splitlines():
                if each.startswith(start):
                    return each.removeprefix(start)
            time.sleep(_POLL_S)
        raise StartupError(f"what is to be measured does not get ready:\n{self.log().strip()}")

    def log(self) -> str:
        """The end of what it wrote."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]

    def cpu_s(self) -> float | None:
        """The CPU seconds of all its threads so far; None where the system does not tell."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Stop it gracefully, and kill it if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        super().kill()
        self._out.close()


@contextmanager
def running(arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> Iterator[Process]:
    """A process that is gone afterwards, whatever happens."""
    process = Process(arguments, folder, env)
    try:
        process.start()
        yield process
        process.stop()
    finally:
        process.kill()


class Api:
    """An API process, as an administrator speaks to it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.host, _, port = url.removeprefix("http://").rpartition(":")
        self.port = int(port)
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=_REQUEST_TIMEOUT_S, trust_env=False
        )

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of the answer. Raises BenchError for any but a success."""
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise BenchError(f"{method} {path}: the process does not answer: {error}") from error
        if not answer.is_success:
            raise BenchError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json() if answer.content else None

    def delete(self, path: str) -> None:
        """Delete what is at *path*, if anything is. Raises BenchError where it stays."""
        try:
            self.call("DELETE", path)
        except BenchError as error:
            if f"DELETE {path}: 404 " not in str(error):
                raise

    def metric(self, name: str) -> int | None:
        """The sum of the samples of *name*; None where there is none."""
        found = None
        for line in self._http.get("/metrics").text.splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                found = (found or 0) + int(float(line.rpartition(" ")[2]))
        return found

    def close(self) -> None:
        self._http.close()


def load(job: Job, wait: Callable[[float], None]) -> Done:
    """Do *job* in a process of its own; *wait* is called with the seconds gone, now and then.

    Raises BenchError where it did no work.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = Child([sys.executable, "-m", "benchmarks.capacity.load"], **pipes)
    try:
        child.start()
        began_s, given = time.monotonic(), json.dumps(asdict(job))
        while True:
            try:
                out, _ = child.process.communicate(given, timeout=_TELL_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                # What was given is remembered: it may be given once only.
                given = ""
                wait(time.monotonic() - began_s)
    finally:
        child.kill()
    if child.process.returncode != 0:
        raise BenchError(f"the load ended with exit code {child.process.returncode}")
    done = Done(**json.loads(out))
    if not done.requests:
        raise BenchError(f"not one of the {job.kind} succeeded: {done.first_failure}")
    return done
