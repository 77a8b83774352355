"""What every benchmark needs: servers of their own, load from wrk, CPU time, alternating rounds."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from rich.console import Console

ROOT: Final = Path(__file__).resolve().parents[1]
WRK_SCRIPTS: Final = ROOT / "benchmarks" / "wrk"
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 60.0
_SETTLE_TIMEOUT_S: Final = 30.0
#: Longer than what a slow commit takes, and than the appends that the fence's benchmark has stall.
_QUIET_S: Final = 1.0
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_READ_AT_ONCE: Final = 1_000
_LOG_CHARS: Final = 1_500

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
    """One run: its length and rounds, where it may write, and where it reports."""

    console: Console
    folder: Path
    rounds: int
    seconds: float
    quick: bool
    #: Prepared data directories by shape, made once a run.
    prepared: dict[Any, Path] = field(default_factory=dict)
    #: CPU seconds of the clusters that were started: they are no children of this process.
    cluster_cpu_s: float = 0.0
    #: In a quick run, clusters by their number of nodes, started once; they end with ``kept``.
    clusters: dict[int, Any] = field(default_factory=dict)
    kept: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
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


def python_module(*arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", *arguments]


def cpu_s_of(pid: int) -> float:
    """The CPU seconds that all threads of a process used so far, user and system."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


class Server:
    """A server in a process of its own that says where it serves, as ``counter serve`` does."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log_path = log
        self._killed = False
        self.api_key = ""
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                python_module(*arguments),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            self.url = self._wait_until_ready()
        except BaseException:
            self.kill()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    def _wait_until_ready(self) -> str:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < end_s and self._process.poll() is None:
            if url := self._ready_at():
                return url
            time.sleep(0.02)
        raise BenchError(f"the server does not get ready:\n{self.log()}")

    def _ready_at(self) -> str | None:
        """Where it serves; None while it does not."""
        for line in self.log().splitlines():
            if line.startswith("Serving on "):
                return line.removeprefix("Serving on ")
        return None

    @property
    def pid(self) -> int:
        return self._process.pid

    def use_key(self, key: str) -> None:
        """Have every request show the API key *key*, those of wrk too."""
        self.api_key = key
        self.client.headers["Authorization"] = f"Bearer {key}"

    def log(self) -> str:
        """What it wrote, the beginning and the end."""
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
        """The JSON at *path*. Raises BenchError for anything but 200."""
        answer = self.client.get(path)
        check(answer.status_code == 200, f"GET {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def post(self, path: str, body: Any) -> Any:
        """The JSON that *path* answers to *body*. Raises BenchError for anything but 200."""
        answer = self.client.post(path, json=body)
        check(answer.status_code == 200, f"POST {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def tally(self) -> dict[str, int]:
        """What became of the adds so far, by the server's own metrics."""
        found: dict[str, int] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith("counter_adds_total{outcome="):
                name, _, number = line.partition("} ")
                found[name.split('"')[1]] = int(float(number))
        return found

    def settled_tally(self) -> dict[str, int]:
        """The tally once nothing is under way any more: requests that wrk left behind end too."""
        end_s = time.monotonic() + _SETTLE_TIMEOUT_S
        latest, changed_s = self.tally(), time.monotonic()
        while time.monotonic() < end_s:
            time.sleep(0.2)
            before, latest = latest, self.tally()
            if before != latest:
                changed_s = time.monotonic()
            elif time.monotonic() - changed_s >= _QUIET_S:
                return latest
        raise BenchError("the server is still processing abandoned adds")

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
        self._process.terminate()
        try:
            code = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"the server does not stop:\n{self.log()}") from None
        check(code == 0, f"the server ended with exit code {code}:\n{self.log()}")

    def kill(self) -> None:
        """End it with SIGKILL, if it still runs."""
        self._killed = True
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[Server]:
    """A server that is gone afterwards, whatever happens."""
    server = Server(arguments, log)
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


@contextmanager
def variant(bench: Bench, *arguments: str) -> Iterator[Server]:
    """One of the servers of benchmarks/variants.py."""
    log = bench.fresh_folder("variant.log")
    with serving(["benchmarks.variants", *arguments], log) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Load:
    """What wrk saw, and the CPU that the server used meanwhile."""

    requests: int
    sent: int
    seconds: float
    bytes_read: int
    p50_ms: float
    p99_ms: float
    cpu_s: float
    client_cpu_s: float
    #: What one request counts for: the items of a batch.
    weight: int = 1
    #: Requests that were answered, and with no success.
    failed: int = 0

    @property
    def per_s(self) -> float:
        return self.requests * self.weight / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.requests * self.weight / max(self.cpu_s, 1 / _TICKS_PER_S)

    def __str__(self) -> str:
        return (
            f"{self.per_s:,.0f}/s, {self.per_cpu_s:,.0f} a CPU second,"
            f" p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms; of a core, the server used"
            f" {self.cpu_s / self.seconds:.0%} and wrk {self.client_cpu_s / self.seconds:.0%}"
            + (f"; {self.failed:,} failed" if self.failed else "")
        )


def find_wrk() -> str:
    """The load generator. Raises MissingToolError, saying what to install."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise MissingToolError(
            "wrk is needed and not there; install it (Debian, Ubuntu: apt-get install wrk)"
        )
    return wrk


def load(
    server: Server,
    script: str,
    *arguments: object,
    connections: int,
    seconds: float,
    weight: int = 1,
    may_fail: bool = False,
) -> Load:
    """Load *server* with one of benchmarks/wrk/. Raises BenchError unless all went well; where
    requests *may_fail*, those that did are no part of its rate."""
    command = [find_wrk(), "--threads", "1", "--connections", str(connections), "--timeout", "30s"]
    command += ["--duration", f"{max(1, round(seconds))}s", "--script", str(WRK_SCRIPTS / script)]
    command += [server.url, "--", secrets.token_hex(8), *map(str, arguments)]
    before_s, client_before_s = server.cpu_s(), children_cpu_s()
    env = {**os.environ, "BENCH_API_KEY": server.api_key}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    cpu_s = server.cpu_s() - before_s
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if done.returncode != 0 or line is None:
        raise BenchError(f"wrk failed: {done.stdout}{done.stderr}")
    found = json.loads(line.removeprefix("RESULT "))
    bad, broken = found["bad"], found["broken"]
    check(
        bad == 0 or may_fail,
        f"{bad} of {found['requests']} answers were no success\n{server.log()}",
    )
    check(broken == 0, f"{broken} connections broke or timed out\n{server.log()}")
    check(found["requests"] > bad, f"none of {bad} answers was a success\n{server.log()}")
    return Load(
        requests=found["requests"] - bad,
        sent=found["sent"],
        seconds=found["seconds"],
        bytes_read=found["bytes"],
        p50_ms=found["p50_ms"],
        p99_ms=found["p99_ms"],
        cpu_s=cpu_s,
        client_cpu_s=children_cpu_s() - client_before_s,
        weight=weight,
        failed=bad,
    )


def children_cpu_s() -> float:
    """The CPU seconds of the processes that ended so far: of wrk, while a server runs on."""
    times = os.times()
    return times.children_user + times.children_system


def check_adds(
    bench: Bench,
    server: Server,
    base: str,
    data: Path,
    counters: int,
    loads: Sequence[Load],
    *,
    may_refuse: bool = False,
) -> None:
    """Every acknowledged add of *loads* is counted once, one without an answer at most once, and
    nothing else is: the counts, read exactly, are what the server says it took for new. And they
    are on disk: the server is killed, and another one must count the same."""
    tally = server.settled_tally()
    acknowledged = sum(each.requests * each.weight for each in loads)
    sent = sum(each.sent * each.weight for each in loads)
    counted = sum(server.counts(base, counter_names(counters), "0s").values())
    expected = {"original", "refused"} if may_refuse else {"original"}
    others = {name: number for name, number in tally.items() if number and name not in expected}
    check(not others, f"all tokens were new, yet some adds were {others}")
    check(counted == tally["original"], f"{counted} counted, {tally['original']} taken for new")
    check(
        acknowledged <= counted <= sent,
        f"{counted} counted, {acknowledged} acknowledged, {sent} sent",
    )
    server.kill()
    with counter_serve(bench, data) as again:
        if server.api_key:
            again.use_key(server.api_key)
        recounted = sum(again.counts(base, counter_names(counters), "0s").values())
    check(recounted == counted, f"{counted} counted, {recounted} after kill -9 and a restart")


def check_answers(server: Server, loads: Sequence[Load]) -> None:
    """A server without storage took every acknowledged add of *loads*."""
    taken = server.settled_tally()["original"]
    acknowledged = sum(each.requests * each.weight for each in loads)
    sent = sum(each.sent * each.weight for each in loads)
    check(
        acknowledged <= taken <= sent,
        f"{taken} adds were taken, {acknowledged} acknowledged, {sent} sent",
    )


def counter_names(number: int) -> list[str]:
    """The names that the scripts in benchmarks/wrk/ use."""
    return [f"c{position:07}" for position in range(number)]
