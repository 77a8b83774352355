"""Adds at half of the peak load for many minutes: whether their p99 stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.harness import Bench, check, counter_serve
from benchmarks.loads import BASE, COUNTERS, WINDOWS, check_adds, load, load_of, run_wrk
from benchmarks.results import Report, figure, quantity

_PARTS: Final = 6
_GROWTH_TARGET: Final = 1.2
_MINUTE_S: Final = 60
_CONNECTIONS: Final = 64


@dataclass(frozen=True, slots=True)
class Soak:
    """The adds of one load at a steady rate, and their latency in each part of it."""

    per_s: float
    part_s: int
    p50_ms: list[float]
    p99_ms: list[float]

    @property
    def growth(self) -> float:
        """The p99 of the last part, of that of the second: the first one begins with no rows."""
        return self.p99_ms[-1] / self.p99_ms[1]

    def __str__(self) -> str:
        curve = ", ".join(f"{each:.1f}" for each in self.p99_ms)
        return f"{self.per_s:,.0f}/s, p99 in ms every {self.part_s} s: {curve}"


def run(bench: Bench) -> Report:
    """Measure half an hour with the default windows, at 10,000 and at 100,000 counters."""
    return _report(bench, "soak", (COUNTERS, 10 * COUNTERS), 5 * _MINUTE_S, ())


def short(bench: Bench) -> Report:
    """Measure six minutes with windows of 2 s, as many as half an hour of default ones."""
    return _report(bench, "soak-short", (COUNTERS,), 1 if bench.quick else _MINUTE_S, WINDOWS)


def _report(
    bench: Bench, subject: str, sizes: tuple[int, ...], part_s: int, flags: tuple[str, ...]
) -> Report:
    rounds = bench.alternate(
        {f"{size:,} counters": partial(_soak, bench, size, part_s, flags) for size in sizes}
    )
    return Report(
        subject=subject,
        title=f"Adds at half of the peak load, for {_PARTS * part_s // _MINUTE_S} minutes",
        method=(
            f"Durable single adds over HTTP to `counter serve`, embedded, over {_CONNECTIONS}"
            " connections of wrk at half of the peak rate, evenly over all counters. Each add has"
            " its turn, whether responses come or not, and its latency is counted from there."
            f" Rollups run meanwhile, in windows of {'2' if flags else '10'} s."
        ),
        figures=tuple(
            figure(
                f"p99 of the last {part_s} s, of that of the second; {name}",
                [each.growth for each in soaks],
                at_most=_GROWTH_TARGET,
                note=f"{soaks[-1]}; p50 {quantity(soaks[-1].p50_ms[-1], 'ms')}",
            )
            for name, soaks in rounds.items()
        ),
    )


def _soak(bench: Bench, counters: int, part_s: int, flags: tuple[str, ...]) -> Soak:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *flags) as server:
        send = partial(load, server, "evens.lua", BASE, counters, connections=_CONNECTIONS)
        # Each counter is made before the time begins: a new one costs more than its next adds.
        loads = [send(seconds=max(1, min(part_s, 10))), send(seconds=bench.seconds)]
        rate, seconds = loads[-1].per_s / 2, _PARTS * part_s
        found = run_wrk(
            *(server, "soak.lua", BASE, counters, rate, part_s),
            connections=_CONNECTIONS,
            seconds=seconds,
        )
        parts = found["parts"]
        check(len(parts) >= _PARTS, f"{len(parts)} parts were measured, not {_PARTS}")
        loads.append(load_of(server, found))
        check_adds(bench, server, BASE, data, counters, loads)
    p50s, p99s = zip(*parts[:_PARTS], strict=True)
    return Soak(loads[-1].per_s, part_s, list(p50s), list(p99s))
