"""Loads by wrk: the latencies, the CPU that the server used, and the check of the counts."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import (
    ROOT,
    TICKS_PER_S,
    Bench,
    BenchError,
    MissingToolError,
    Server,
    check,
    counter_names,
    counter_serve,
    wait_until,
)

#: The namespace that is there from the start, and how many of its counters are added to.
BASE: Final = "/v1/namespaces/default"
COUNTERS: Final = 10_000
#: Windows so short that the rollup is at work during the measurement, as it is in a long run.
WINDOWS: Final = (
    "--retention=1d",
    "--slice=12h",
    "--rollup-window=2s",
    "--accept-limit=2s",
    "--write-timeout=500ms",
)
#: By then the first window is closed.
WARM_S: Final = 4.0
_SCRIPTS: Final = ROOT / "benchmarks" / "wrk"
_PACE_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one load, their latencies, and the server's CPU during it."""

    requests: int
    sent: int
    seconds: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    client_cpu_s: float = 0.0
    bytes_read: int = 0
    #: The weight of one request: the items of a batch.
    weight: int = 1
    #: Requests that were answered, and with no success.
    failed: int = 0

    @property
    def per_s(self) -> float:
        return self.requests * self.weight / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.requests * self.weight / max(self.cpu_s, 1 / TICKS_PER_S)

    def __str__(self) -> str:
        return (
            f"{self.per_s:,.0f}/s, {self.per_cpu_s:,.0f} a CPU second,"
            f" p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms; of a core, the server used"
            f" {self.cpu_s / self.seconds:.0%} and the load {self.client_cpu_s / self.seconds:.0%}"
            + (f"; {self.failed:,} failed" if self.failed else "")
        )


def find_wrk() -> str:
    """The load generator. Raises MissingToolError with the package to install."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise MissingToolError(
            "wrk is needed and not there; install it (Debian, Ubuntu: apt-get install wrk)"
        )
    return wrk


def measured(server: Server, command: Sequence[str]) -> dict[str, Any]:
    """Run *command*, which loads *server* and prints one line of results; add the CPU used."""
    before_s, client_before_s = server.cpu_s(), _children_cpu_s()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    cpu_s = server.cpu_s() - before_s
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if done.returncode != 0 or line is None:
        output = f"{done.stdout}{done.stderr}"[-1_500:]
        raise BenchError(f"{Path(command[0]).name} failed: {output}\n{server.log()}")
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found | {"cpu_s": cpu_s, "client_cpu_s": _children_cpu_s() - client_before_s}


def run_wrk(
    server: Server, script: str, *arguments: object, connections: int, seconds: float
) -> dict[str, Any]:
    """Load *server* with one of benchmarks/wrk/. Raises BenchError if a connection broke."""
    command = [find_wrk(), "--threads", "1", "--connections", str(connections), "--timeout", "30s"]
    command += ["--duration", f"{max(1, round(seconds))}s", "--script", str(_SCRIPTS / script)]
    command += [server.url, "--", secrets.token_hex(8), *map(str, arguments)]
    found = measured(server, command)
    check(found["broken"] == 0, f"{found['broken']} connections broke\n{server.log()}")
    return found


def load(
    server: Server,
    script: str,
    *arguments: object,
    connections: int,
    seconds: float,
    weight: int = 1,
    may_fail: bool = False,
) -> Load:
    """Load *server* with one of benchmarks/wrk/. Raises BenchError unless all went well; if
    requests *may_fail*, those that did are no part of its rate."""
    found = run_wrk(server, script, *arguments, connections=connections, seconds=seconds)
    return load_of(server, found, weight=weight, may_fail=may_fail)


def load_of(
    server: Server, found: Mapping[str, Any], *, weight: int = 1, may_fail: bool = False
) -> Load:
    """The load that :func:`run_wrk` *found*. Raises BenchError as :func:`load` does."""
    requests, bad = found["requests"], found["bad"]
    check(bad == 0 or may_fail, f"{bad} of {requests} answers were no success\n{server.log()}")
    check(requests > bad, f"none of {bad} answers was a success\n{server.log()}")
    return Load(
        requests=requests - bad,
        bytes_read=found["bytes"],
        weight=weight,
        failed=bad,
        **{key: found[key] for key in _SHARED},
    )


_SHARED: Final = ("sent", "seconds", "p50_ms", "p99_ms", "cpu_s", "client_cpu_s")


def single_adds(server: Server, base: str = BASE, counters: int = COUNTERS) -> Callable[..., Load]:
    """Loads of single adds, a few counters hot and most rare, over 64 connections by default."""
    return partial(load, server, "adds.lua", base, counters, connections=64)


def _children_cpu_s() -> float:
    """The CPU seconds of the processes that ended so far: of the load, while a server runs on."""
    times = os.times()
    return times.children_user + times.children_system


def at_pace(
    bench: Bench, what: str, rate: float, measure: Callable[[], Load], *, off_by: float = 0.1
) -> Load:
    """What *measure* saw once its rate was within *off_by* of *rate*: at another one it measured
    another load. Tried again if something else held the machine up; then raises BenchError. In a
    quick run any rate will do."""
    for _ in range(_PACE_TRIES):
        paced = measure()
        if bench.quick or abs(paced.per_s / rate - 1) <= off_by:
            return paced
        bench.say(f"{what}: {paced.per_s:,.0f}/s where {rate:,.0f}/s were to be; once more")
    raise BenchError(f"{what}: {rate:,.0f}/s are not reached: the machine is too slow, or too busy")


def check_counted(counted: int, loads: Sequence[Load], where: str = "") -> None:
    """Every acknowledged add of *loads* is counted once, one without a response at most once."""
    acknowledged = sum(each.requests * each.weight for each in loads)
    sent = sum(each.sent * each.weight for each in loads)
    message = f"{where}{counted} counted, {acknowledged} acknowledged, {sent} sent"
    check(acknowledged <= counted <= sent, message)


def settled_count(server: Server, base: str, counters: int) -> int:
    """The count when nothing is in flight: requests that wrk left behind end too."""
    names, totals = counter_names(counters), [-1]

    def settled() -> bool:
        totals.append(sum(server.counts(base, names, None).values()))
        return totals[-1] == totals[-2]

    wait_until("the server is still processing abandoned adds", settled, 30.0)
    return totals[-1]


def check_counts(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """Each counter of *found* is *expected*, or 0."""
    wrong = {name: n for name, n in found.items() if n != expected.get(name, 0)}
    some = [f"{name} is {n}, not {expected.get(name, 0)}" for name, n in list(wrong.items())[:5]]
    check(not wrong, f"{len(wrong)} of {len(found)} counts are wrong: {'; '.join(some)}")


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
    """The counts, read exactly, are what the server says it took for new, and what *loads* allow.
    And they are on disk: the server is killed, and another one must count the same."""
    tally = server.settled_tally()
    counted = sum(server.counts(base, counter_names(counters), "0s").values())
    expected = {"original", "refused"} if may_refuse else {"original"}
    others = {name: number for name, number in tally.items() if number and name not in expected}
    check(not others, f"all tokens were new, yet some adds were {others}")
    check(counted == tally["original"], f"{counted} counted, {tally['original']} taken for new")
    check_counted(counted, loads)
    server.kill()
    with counter_serve(bench, data) as again:
        recounted = sum(again.counts(base, counter_names(counters), "0s").values())
    check(recounted == counted, f"{counted} counted, {recounted} after kill -9 and a restart")
