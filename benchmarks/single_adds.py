"""Durable, retry-safe single adds over HTTP, against the same handler without any storage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.harness import Bench, Load, check_adds, check_answers, counter_serve, load, variant
from benchmarks.results import Figure, Report, median, ratios

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
_TARGETS: Final = ((64, 0.5), (256, 0.65))


def run(bench: Bench) -> Report:
    """Measure at each number of connections, both servers in turn."""
    figures: list[Figure] = []
    for connections, target in _TARGETS:
        names: dict[str, Callable[[], Load]] = {
            f"durable, {connections} connections": partial(durable_adds, bench, connections),
            f"no storage, {connections} connections": partial(_no_storage, bench, connections),
        }
        durable, none = bench.alternate(names).values()
        figures += _figures(connections, target, durable, none)
    return Report(
        subject="single-adds",
        title="Single adds",
        method=(
            f"`POST .../add` with a fresh token each, over {COUNTERS:,} counters (a few hot, most"
            " rare), by wrk on the same machine; the rollup runs meanwhile in windows of 2 s. The"
            " other server has the same process set-up, front, parsing and answers, checks the"
            " token, and writes nothing."
        ),
        figures=tuple(figures),
    )


def _figures(
    connections: int, target: float, durable: list[Load], none: list[Load]
) -> list[Figure]:
    wall = ratios([x.per_s for x in durable], [x.per_s for x in none])
    cpu = ratios([x.per_cpu_s for x in durable], [x.per_cpu_s for x in none])
    return [
        Figure(
            f"adds a second at {connections} connections, of the same without storage",
            median(wall),
            at_least=target,
            rounds=tuple(wall),
            note=(
                f"{median([x.per_s for x in durable]):,.0f}/s (p99"
                f" {median([x.p99_ms for x in durable]):.1f} ms) against"
                f" {median([x.per_s for x in none]):,.0f}/s"
            ),
        ),
        Figure(
            f"adds a CPU second of the server at {connections} connections",
            median([x.per_cpu_s for x in durable]),
            "/s",
            note=(
                f"{median(cpu):.2f} of the {median([x.per_cpu_s for x in none]):,.0f}/s without"
                " storage"
            ),
        ),
    ]


def durable_adds(bench: Bench, connections: int) -> Load:
    """Load a service of its own with single adds; every one is counted once, after a kill too."""
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        warm_s = 1.0 if bench.quick else WARM_S
        warm = load(server, "adds.lua", BASE, COUNTERS, connections=connections, seconds=warm_s)
        measured = load(
            server, "adds.lua", BASE, COUNTERS, connections=connections, seconds=bench.seconds
        )
        check_adds(bench, server, BASE, data, COUNTERS, (warm, measured))
        return measured


def _no_storage(bench: Bench, connections: int) -> Load:
    with variant(bench, "no-storage") as server:
        warm = load(server, "adds.lua", BASE, COUNTERS, connections=connections, seconds=1.0)
        measured = load(
            server, "adds.lua", BASE, COUNTERS, connections=connections, seconds=bench.seconds
        )
        check_answers(server, (warm, measured))
        return measured
