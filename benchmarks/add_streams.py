"""Streams of adds beside batches of 1,000, and how long a line waits for its answer."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.batch_adds import CONNECTIONS, durable_batches
from benchmarks.harness import (
    ROOT,
    Bench,
    BenchError,
    Load,
    Server,
    check_adds,
    children_cpu_s,
    counter_serve,
    python_module,
)
from benchmarks.pacing import at_pace
from benchmarks.results import Figure, Report, by_clock, by_cpu, median, ratio
from benchmarks.single_adds import BASE, COUNTERS, WARM_S, WINDOWS

_SIZE: Final = 1_000
_TARGET_MS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Loads:
    """The load at its peak, and half of it where that is measured."""

    peak: Load
    half: Load | None = None

    def __str__(self) -> str:
        return f"{self.peak}; at half of it {self.half}" if self.half else str(self.peak)


def run(bench: Bench) -> Report:
    """Measure streams and batches in turn."""
    streams, batches = bench.alternate(
        {
            "streams": partial(_streams, bench),
            "batches": partial(_batches, bench),
        }
    ).values()
    peaks, halves = [each.peak for each in streams], [each.half for each in streams if each.half]
    of_batches = [each.peak for each in batches]
    return Report(
        subject="add-streams",
        title="Streams of adds",
        method=(
            f"`POST .../batch/add` of lines over {CONNECTIONS} connections, which are sent and"
            " answered as long as each connection lives; beside it batches of"
            f" {_SIZE:,}, by wrk over as many connections. A fresh token for every line, over"
            f" {COUNTERS:,} counters; the rollup runs meanwhile in windows of 2 s. A line's wait is"
            " from its write to its answer, at half of the rate of the peak."
        ),
        figures=(
            ratio(
                f"lines a second, of batches of {_SIZE:,}", by_clock(peaks, of_batches), at_least=1
            ),
            ratio(f"lines a CPU second, of batches of {_SIZE:,}", by_cpu(peaks, of_batches)),
            Figure(
                "lines a second",
                median([each.per_s for each in peaks]),
                "/s",
                rounds=tuple(each.per_s for each in peaks),
            ),
            Figure(
                "p99 from line to answer at half of the peak",
                median([each.p99_ms for each in halves]),
                "ms",
                at_most=_TARGET_MS,
                rounds=tuple(each.p99_ms for each in halves),
                note=f"p50 {median([each.p50_ms for each in halves]):.1f} ms",
            ),
        ),
    )


def _streams(bench: Bench) -> Loads:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        warm = _load(server, 1.0 if bench.quick else WARM_S)
        peak = _load(server, bench.seconds)
        loads = [warm, peak]

        def half() -> Load:
            loads.append(_load(server, bench.seconds, peak.per_s / 2))
            return loads[-1]

        streamed = Loads(peak, at_pace(bench, "streams", peak.per_s / 2, half))
        check_adds(bench, server, BASE, data, COUNTERS, loads)
        return streamed


def _batches(bench: Bench) -> Loads:
    return Loads(durable_batches(bench, _SIZE))


def _load(server: Server, seconds: float, rate: float = 0) -> Load:
    """Load *server* with as many lines as it takes, or *rate* a second."""
    before_s, client_before_s = server.cpu_s(), children_cpu_s()
    command = python_module("benchmarks.stream_load", server.url, BASE, str(COUNTERS))
    command += [str(CONNECTIONS), str(seconds), str(rate)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"the streams failed: {done.stderr[-1_500:]}\n{server.log()}")
    cpu_s = server.cpu_s() - before_s
    return Load(
        **json.loads(done.stdout.removeprefix("RESULT ")),
        bytes_read=0,
        cpu_s=cpu_s,
        client_cpu_s=children_cpu_s() - client_before_s,
    )
