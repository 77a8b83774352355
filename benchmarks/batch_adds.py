"""Durable batch adds over HTTP: adds a second, and adds a second of the server's CPU."""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.harness import Bench, Load, check_adds, check_answers, counter_serve, load, variant
from benchmarks.results import Figure, Report, by_clock, by_cpu, median, ratio
from benchmarks.single_adds import BASE, COUNTERS, WARM_S, WINDOWS, durable_adds

CONNECTIONS: Final = 4
_TARGET_PER_CPU_S: Final = 100_000
_TARGET_PER_S: Final = 150_000
_TARGET_OF_SINGLE: Final = 20
_SINGLE_CONNECTIONS: Final = 64
_SIZES: Final = (1_000, 100)


def run(bench: Bench) -> Report:
    """Measure large batches, with and without storage, and single adds in turn; then small ones."""
    large, small = _SIZES
    durable, none, single = bench.alternate(
        {
            f"durable batches of {large}": partial(durable_batches, bench, large),
            f"batches of {large}, no storage": partial(_no_storage, bench, large),
            "durable single adds": partial(durable_adds, bench, _SINGLE_CONNECTIONS),
        }
    ).values()
    [light] = bench.alternate(
        {f"durable batches of {small}": partial(durable_batches, bench, small)}
    ).values()
    return Report(
        subject="batch-adds",
        title="Batch adds",
        method=(
            f"`POST .../batch/add` over {CONNECTIONS} connections, a fresh token for every item,"
            f" over {COUNTERS:,} counters, by wrk on the same machine; the rollup runs meanwhile in"
            " windows of 2 s, and its CPU is in the server's. CPU is user and system time of the"
            " server's process, all threads, from `/proc/PID/stat`."
        ),
        figures=(
            *_figures(large, durable, _TARGET_PER_CPU_S, _TARGET_PER_S),
            ratio(
                f"durable adds a second, batches of {large:,}, of single adds over"
                f" {_SINGLE_CONNECTIONS} connections",
                by_clock(durable, single),
                at_least=_TARGET_OF_SINGLE,
                note=f"{median([x.per_s for x in single]):,.0f} single adds a second",
            ),
            Figure(
                f"adds a CPU second, of the same without storage, batches of {large:,}",
                median(by_cpu(durable, none)),
                note=f"{median([x.per_cpu_s for x in none]):,.0f}/s without storage",
            ),
            *_figures(small, light),
        ),
    )


def _figures(
    size: int,
    durable: list[Load],
    target_per_cpu_s: float | None = None,
    target_per_s: float | None = None,
) -> list[Figure]:
    per_cpu, per_s = [x.per_cpu_s for x in durable], [x.per_s for x in durable]
    return [
        Figure(
            f"durable adds a CPU second, batches of {size:,}",
            median(per_cpu),
            "/s",
            at_least=target_per_cpu_s,
            rounds=tuple(per_cpu),
        ),
        Figure(
            f"durable adds a second by the clock, batches of {size:,}",
            median(per_s),
            "/s",
            at_least=target_per_s,
            rounds=tuple(per_s),
            note=(
                f"p99 of a batch {median([x.p99_ms for x in durable]):.0f} ms; the server used"
                f" {median([x.cpu_s / x.seconds for x in durable]):.2f} cores"
            ),
        ),
    ]


def durable_batches(bench: Bench, size: int) -> Load:
    """Load a server of its own with batches of *size*."""
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
