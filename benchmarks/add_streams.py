"""Streams of adds beside batches of 1,000, and how long a line waits for its response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.adds import BATCH_CONNECTIONS, durable_batches
from benchmarks.harness import Bench, Server, counter_serve, python_module
from benchmarks.loads import (
    BASE,
    COUNTERS,
    WARM_S,
    WINDOWS,
    Load,
    at_pace,
    check_adds,
    measured,
)
from benchmarks.results import Report, figure, median, p99_ms, per_cpu_s, per_s, ratios

_SIZE: Final = 1_000
_TARGET_MS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Halved:
    """A load at its peak, and at half of it."""

    peak: Load
    half: Load

    def __str__(self) -> str:
        return f"at its peak {self.peak}; at half of it {self.half}"


def run(bench: Bench) -> Report:
    """Measure streams and batches in turn."""
    streams: list[Halved] = []

    def stream() -> Load:
        streams.append(_streams(bench))
        return streams[-1].peak

    variants: dict[str, Callable[[], Load]] = {
        "streams": stream,
        "batches": partial(durable_batches, bench, _SIZE),
    }
    peaks, batches = bench.alternate(variants).values()
    by_cpu = ratios(per_cpu_s(peaks), per_cpu_s(batches))
    halves = [each.half for each in streams]
    of_batches = f"of batches of {_SIZE:,}"
    return Report(
        subject="add-streams",
        title="Streams of adds",
        method=(
            f"`POST .../batch/add` of lines over {BATCH_CONNECTIONS} connections, which are sent"
            " and answered as long as each connection lives; beside it batches of"
            f" {_SIZE:,}, by wrk over as many connections. A fresh token for every line, over"
            f" {COUNTERS:,} counters; the rollup runs meanwhile in windows of 2 s. A line's wait is"
            " from its write to its answer, at half of the rate of the peak."
        ),
        figures=(
            figure(
                f"lines a second, {of_batches}", ratios(per_s(peaks), per_s(batches)), at_least=1
            ),
            figure(f"lines a CPU second, {of_batches}", by_cpu),
            figure("lines a second", per_s(peaks), "/s"),
            figure(
                "p99 from line to answer at half of the peak",
                p99_ms(halves),
                "ms",
                at_most=_TARGET_MS,
                note=f"p50 {median([each.p50_ms for each in halves]):.1f} ms",
            ),
        ),
    )


def _streams(bench: Bench) -> Halved:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        loads = [_load(server, each) for each in (1.0 if bench.quick else WARM_S, bench.seconds)]
        peak = loads[-1]

        def half() -> Load:
            loads.append(_load(server, bench.seconds, peak.per_s / 2))
            return loads[-1]

        found = Halved(peak, at_pace(bench, "streams", peak.per_s / 2, half))
        check_adds(bench, server, BASE, data, COUNTERS, loads)
    return found


def _load(server: Server, seconds: float, rate: float = 0) -> Load:
    """Load *server* with as many lines as it takes, or *rate* a second."""
    numbers = map(str, (COUNTERS, BATCH_CONNECTIONS, seconds, rate))
    command = python_module("benchmarks.stream_load", server.url, BASE, *numbers)
    return Load(**measured(server, command))
