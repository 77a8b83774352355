"""Memory of the served process against how many counters it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.growth import Standing, curve, plot, standing
from benchmarks.harness import Bench, load
from benchmarks.memory import TARGET_MB, mb, wait_for_rollup
from benchmarks.prepared import BASE, Shape
from benchmarks.results import Figure, Report
from counter.clock import SystemClock

#: What is kept of counters is bounded, and these many fill it.
_FULL: Final = 100_000
_FLAT_TARGET: Final = 1.25
_BATCH: Final = 1_000
_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Held:
    """Resident memory of a server: just started, after its work, and the most there ever was."""

    begin_mb: float
    end_mb: float
    most_mb: float

    def __str__(self) -> str:
        return (
            f"{self.begin_mb:.0f} MB at first, {self.end_mb:.0f} MB after,"
            f" {self.most_mb:.0f} MB at most"
        )


def run(bench: Bench) -> Report:
    """The same work for servers of more and more counters."""
    sizes = (100, 1_000) if bench.quick else (1_000, 10_000, _FULL, 1_000_000)
    shapes = [Shape(size // 10, size - size // 10, 5, 0) for size in sizes]
    with standing(bench, shapes) as servers:
        once: dict[int, list[Held]] = {}
        for size, server in zip(sizes, servers, strict=True):
            once[size] = [_work(bench, server, size)]
            bench.say(f"{size:,} counters: {once[size][0]}")
    most, full = sizes[-1], sizes[-2]
    end = curve("after adds, gets and a rollup", once, lambda each: each.end_mb)
    return Report(
        subject="growth-memory",
        title="Growth: memory against counters",
        method=(
            "Resident set (`VmRSS` of `/proc/PID/status`) of `counter serve` on so many counters:"
            f" just started, and after {_SECONDS:g} s each of adds in batches of {_BATCH:,}, of"
            " single adds and of gets, evenly spread over all counters or skewed, and the rollup"
            " of all that. Flat is promised from"
            f" {_FULL:,} on: all that is kept of counters is bounded. 1 MB is 10^6 bytes."
        ),
        figures=(
            Figure(
                f"resident with {most:,} counters", end.rounds[most][0], "MB", at_most=TARGET_MB
            ),
            end.figure(
                f"resident with {most:,} counters, of {full:,}",
                at_most=_FLAT_TARGET,
                base=full,
                unit="MB",
            ),
        ),
        plots=(
            plot(
                "growth-memory",
                "Resident memory against counters",
                "counters",
                "MB",
                end,
                curve("just started", once, lambda each: each.begin_mb),
                curve("the most there ever was", once, lambda each: each.most_mb),
            ),
        ),
    )


def _work(bench: Bench, standing: Standing, counters: int) -> Held:
    seconds = 1.0 if bench.quick else _SECONDS
    with standing.awake() as server:
        begin = server.memory_kib()
        standing.load(
            "batches.lua", counters, _BATCH, connections=4, seconds=seconds, weight=_BATCH
        )
        if not bench.quick:
            standing.load("evens.lua", counters, connections=64, seconds=seconds)
            load(server, "gets.lua", BASE, counters, 0, connections=64, seconds=seconds)
            wait_for_rollup(bench, server, SystemClock().now_us())
        standing.check()
        end = server.memory_kib()
    return Held(mb(begin["VmRSS"]), mb(end["VmRSS"]), mb(end["VmHWM"]))
