"""Adds at half of the peak load for many minutes: their latency, and whether it stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.harness import Bench, check, counter_serve
from benchmarks.loads import BASE, COUNTERS, WINDOWS, Load, check_adds, load, load_of, run_wrk
from benchmarks.results import Figure, Report, figure

_PARTS: Final = 6
_MINUTE_S: Final = 60
_CONNECTIONS: Final = 64
_GROWTH_TARGET: Final = 1.2
_CPU_TARGET: Final = 1.15


@dataclass(frozen=True, slots=True)
class Soak:
    """A load at the peak and one at half of it, and the p99 of each part of that."""

    peak: Load
    half: Load
    p99_ms: list[float]

    def __str__(self) -> str:
        curve = ", ".join(f"{each:.1f}" for each in self.p99_ms)
        return f"{self.half.per_s:,.0f}/s of {self.peak.per_s:,.0f}/s; p99 of each part: {curve} ms"


def long(bench: Bench) -> Report:
    """Measure half an hour with the default windows, at 10,000 and at 100,000 counters."""
    return _report(bench, "soak", (COUNTERS, 10 * COUNTERS), 5 * _MINUTE_S, ())


def short(bench: Bench) -> Report:
    """Measure six minutes with windows of 2 s, as many as half an hour of default ones."""
    return _report(bench, "half-load", (COUNTERS,), 1 if bench.quick else _MINUTE_S, WINDOWS)


def _report(
    bench: Bench, subject: str, sizes: tuple[int, ...], part_s: int, flags: tuple[str, ...]
) -> Report:
    figures: list[Figure] = []
    for size in sizes:
        soak = _soak(bench, size, part_s, flags)
        bench.say(f"{size:,} counters: {soak}")
        figures += _figures(soak, f"at half of the peak, {size:,} counters")
    return Report(
        subject=subject,
        title=f"Adds at half of the peak load, for {_PARTS * part_s // _MINUTE_S} minutes",
        method=(
            f"Durable single adds over HTTP to `counter serve`, embedded, over {_CONNECTIONS}"
            " connections of wrk at half of the peak rate, evenly over all counters. Each add has"
            " its turn, whether responses come or not, and its latency is counted from there."
            f" Rollups run meanwhile, in windows of {'2' if flags else '10'} s. Parts are of"
            f" {part_s} s each. One round."
        ),
        figures=tuple(figures),
    )


def _figures(soak: Soak, what: str) -> tuple[Figure, ...]:
    # The first part begins with no rows.
    growth = soak.p99_ms[-1] / soak.p99_ms[1]
    cpu = soak.peak.per_cpu_s / soak.half.per_cpu_s
    return (
        figure(f"p99 of the second part; {what}", [soak.p99_ms[1]], "ms", note=str(soak)),
        figure(f"p99 of the last part, of the second; {what}", [growth], at_most=_GROWTH_TARGET),
        figure(f"CPU of an add, of that at the peak; {what}", [cpu], at_most=_CPU_TARGET),
    )


def _soak(bench: Bench, counters: int, part_s: int, flags: tuple[str, ...]) -> Soak:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *flags) as server:
        send = partial(load, server, "evens.lua", BASE, counters, connections=_CONNECTIONS)
        # Each counter is made before the time begins: a new one costs more than its next adds.
        loads = [send(seconds=max(1, min(part_s, 10))), send(seconds=bench.seconds)]
        peak, seconds = loads[-1], _PARTS * part_s
        found = run_wrk(
            *(server, "soak.lua", BASE, counters, peak.per_s / 2, part_s),
            connections=_CONNECTIONS,
            seconds=seconds,
        )
        loads.append(load_of(server, found))
        parts = found["p99s_ms"]
        check(len(parts) >= _PARTS, f"{len(parts)} parts were measured, not {_PARTS}")
        check_adds(bench, server, BASE, data, counters, loads)
    return Soak(peak, loads[-1], parts[:_PARTS])
