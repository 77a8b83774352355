"""Durable, retry-safe adds over HTTP, embedded: single ones, and in batches."""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.harness import Bench, counter_serve
from benchmarks.loads import (
    BASE,
    COUNTERS,
    WARM_S,
    WINDOWS,
    Load,
    check_adds,
    load,
    single_adds,
)
from benchmarks.results import Figure, Report, figure, per_cpu_s, rate

CONNECTIONS: Final = (64, 256)
BATCH_CONNECTIONS: Final = 4
_SIZES: Final = (1_000, 100)
#: Of adds in batches of 1,000.
_BATCHED_PER_S: Final = 150_000
_BATCHED_PER_CPU_S: Final = 100_000


def single(bench: Bench) -> Report:
    """Measure at each number of connections."""
    rounds = bench.alternate(
        {f"{number} connections": partial(_single, bench, number) for number in CONNECTIONS}
    )
    return Report(
        subject="single-adds",
        title="Single adds",
        method=(
            f"`POST .../add` with a fresh token each, over {COUNTERS:,} counters (a few hot, most"
            " rare), by wrk on the same machine; the rollup runs meanwhile in windows of 2 s. What"
            " the same load does to an application that stores nothing is in *Single adds beside"
            " peers*."
        ),
        figures=tuple(
            each
            for name, loads in rounds.items()
            for each in (
                rate(f"adds a second at {name}", loads),
                figure(f"adds a CPU second of the server at {name}", per_cpu_s(loads), "/s"),
            )
        ),
    )


def _single(bench: Bench, connections: int) -> Load:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        send = partial(single_adds(server), connections=connections)
        loads = [send(seconds=each) for each in (_warm_s(bench), bench.seconds)]
        check_adds(bench, server, BASE, data, COUNTERS, loads)
        return loads[-1]


def batches(bench: Bench) -> Report:
    """Measure large batches and small ones."""
    rounds = bench.alternate(
        {f"batches of {size:,}": partial(durable_batches, bench, size) for size in _SIZES}
    )
    return Report(
        subject="batch-adds",
        title="Batch adds",
        method=(
            f"`POST .../batch/add` over {BATCH_CONNECTIONS} connections, a fresh token for every"
            f" item, over {COUNTERS:,} counters, by wrk on the same machine; the rollup runs"
            " meanwhile in windows of 2 s, and its CPU is in the server's. CPU is user and system"
            " time of the server's process, all threads, from `/proc/PID/stat`."
        ),
        figures=tuple(
            each
            for size, (name, loads) in zip(_SIZES, rounds.items(), strict=True)
            for each in _batch_figures(name, loads, has_targets=size == _SIZES[0])
        ),
    )


def _batch_figures(name: str, loads: list[Load], *, has_targets: bool) -> tuple[Figure, Figure]:
    least_cpu, least = (_BATCHED_PER_CPU_S, _BATCHED_PER_S) if has_targets else (None, None)
    by_cpu = per_cpu_s(loads)
    return (
        figure(f"durable adds a CPU second, {name}", by_cpu, "/s", at_least=least_cpu),
        rate(f"durable adds a second by the clock, {name}", loads, at_least=least),
    )


def durable_batches(bench: Bench, size: int) -> Load:
    """Load a server of its own with batches of *size*."""
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        send = partial(load, server, "batches.lua", BASE, COUNTERS, size, weight=size)
        send = partial(send, connections=BATCH_CONNECTIONS)
        loads = [send(seconds=each) for each in (_warm_s(bench), bench.seconds)]
        check_adds(bench, server, BASE, data, COUNTERS, loads)
        return loads[-1]


def _warm_s(bench: Bench) -> float:
    return 1.0 if bench.quick else WARM_S
