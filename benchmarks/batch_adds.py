"""Durable batch adds over HTTP: adds a second, and adds a second of the server's CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.harness import Bench, Load, check_adds, check_answers, counter_serve, load, variant
from benchmarks.results import Figure, Report, median, ratios, spread
from benchmarks.single_adds import BASE, COUNTERS, WARM_S, WINDOWS

CONNECTIONS: Final = 4
_TARGET_PER_CPU_S: Final = 100_000
_SIZES: Final = (1_000, 100)


def run(bench: Bench) -> Report:
    """Measure each size of batch, with and without storage in turn."""
    figures: list[Figure] = []
    for size in _SIZES:
        names: dict[str, Callable[[], Load]] = {
            f"durable batches of {size}": partial(_durable, bench, size),
            f"batches of {size}, no storage": partial(_no_storage, bench, size),
        }
        durable, none = bench.alternate(names).values()
        figures += _figures(size, durable, none)
    return Report(
        subject="batch-adds",
        title="Batch adds",
        method=(
            f"`POST .../batch/add` over {CONNECTIONS} connections, a fresh token for every item,"
            f" over {COUNTERS:,} counters, by wrk on the same machine; the rollup runs meanwhile in"
            " windows of 2 s, and its CPU is in the server's. CPU is user and system time of the"
            " server's process, all threads, from `/proc/PID/stat`."
        ),
        figures=tuple(figures),
    )


def _figures(size: int, durable: list[Load], none: list[Load]) -> list[Figure]:
    per_cpu = [x.per_cpu_s for x in durable]
    of_none = ratios(per_cpu, [x.per_cpu_s for x in none])
    return [
        Figure(
            f"durable adds a CPU second, batches of {size:,}",
            median(per_cpu),
            "/s",
            at_least=_TARGET_PER_CPU_S if size == _SIZES[0] else None,
            note=f"rounds {spread(per_cpu)}",
        ),
        Figure(
            f"durable adds a second by the clock, batches of {size:,}",
            median([x.per_s for x in durable]),
            "/s",
            note=(
                f"rounds {spread([x.per_s for x in durable])}; p99 of a batch"
                f" {median([x.p99_ms for x in durable]):.0f} ms; the server used"
                f" {median([x.cpu_s / x.seconds for x in durable]):.2f} cores"
            ),
        ),
        Figure(
            f"adds a CPU second, of the same without storage, batches of {size:,}",
            median(of_none),
            note=f"{median([x.per_cpu_s for x in none]):,.0f}/s without storage",
        ),
    ]


def _durable(bench: Bench, size: int) -> Load:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        warm, measured = (
            load(
                server, "batches.lua", BASE, COUNTERS, size,
                connections=CONNECTIONS, seconds=seconds, weight=size,
            )
            for seconds in (1.0 if bench.quick else WARM_S, bench.seconds)
        )  # fmt: skip
        check_adds(bench, server, BASE, data, COUNTERS, (warm, measured))
        return measured


def _no_storage(bench: Bench, size: int) -> Load:
    with variant(bench, "no-storage") as server:
        measured = load(
            server, "batches.lua", BASE, COUNTERS, size,
            connections=CONNECTIONS, seconds=bench.seconds, weight=size,
        )  # fmt: skip
        check_answers(server, (measured,))
        return measured
