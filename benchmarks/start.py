"""From starting ``counter serve`` to its first response."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from benchmarks.harness import ROOT, Bench, check, cpu_s_of, new_token, python_module
from benchmarks.results import Figure, Report, figure, median

_STARTS: Final = 5
_TARGET_S: Final = 0.8
_ANSWER_TIMEOUT_S: Final = 60.0
_PATH: Final = "/v1/namespaces/default/counters/starts"


@dataclass(frozen=True, slots=True)
class Started:
    """One start: until the first response, by the clock and by the process's CPU."""

    seconds: float
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s to the first answer, {self.cpu_s:.2f} s of CPU"


def run(bench: Bench) -> Report:
    """Start it on an empty folder and again on the same one, several times."""
    if not bench.quick:
        # Files that it reads from disk are in memory from here on.
        _start(bench.fresh_folder("data"), 1)
    first: list[Started] = []
    second: list[Started] = []
    for number in range(1 if bench.quick else max(_STARTS, bench.rounds)):
        data = bench.fresh_folder("data")
        first.append(_start(data, 1))
        second.append(_start(data, 2))
        bench.say(f"round {number + 1}: empty folder: {first[-1]}; again: {second[-1]}")
    return Report(
        subject="start",
        title="Start",
        method=(
            "From starting the process `counter serve` to the answer to its first request, an add,"
            " on an empty folder and then again on the same one; its files are in the page cache."
            " Each add must be counted, those before the restart too."
        ),
        figures=(
            _figure("on an empty folder", first),
            _figure("on a folder that holds data", second),
        ),
    )


def _figure(where: str, starts: list[Started]) -> Figure:
    return figure(
        f"from the start of the process to its first answer, {where}",
        [each.seconds for each in starts],
        "s",
        at_most=_TARGET_S,
        note=f"{len(starts)} starts; {median([x.cpu_s for x in starts]):.2f} s of CPU",
    )


def _start(data: Path, adds: int) -> Started:
    """Start it, add 1, and end it; the count must be *adds* then."""
    begin_s = time.perf_counter()
    with _process(data) as process:
        if process.stdout is None:
            raise TypeError("its output is not read")
        line = process.stdout.readline()
        check(line.startswith("Serving on "), f"the server does not start: {line!r}")
        address = urlsplit(line.removeprefix("Serving on ").strip()).netloc
        asked = http.client.HTTPConnection(address, timeout=_ANSWER_TIMEOUT_S)
        body = json.dumps({"delta": 1, "idempotency_token": new_token()})
        asked.request("POST", f"{_PATH}/add", body, {"Content-Type": "application/json"})
        answer = asked.getresponse()
        started = Started(time.perf_counter() - begin_s, cpu_s_of(process.pid))
        check(answer.status == http.client.OK, f"the first add: {answer.status} {answer.read()!r}")
        answer.read()
        asked.request("GET", f"{_PATH}?max_staleness=0s")
        count = json.load(asked.getresponse())["count"]
        check(count == adds, f"{count} counted where {adds} were acknowledged")
        asked.close()
    check(process.returncode == 0, f"the server ended with exit code {process.returncode}")
    return started


@contextmanager
def _process(data: Path) -> Iterator[subprocess.Popen[str]]:
    """``counter serve`` on *data*, ended in order; killed if anything goes wrong."""
    command = python_module("counter", "serve", "--port", "0", "--data", str(data))
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        process.terminate()
        process.wait(_ANSWER_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
