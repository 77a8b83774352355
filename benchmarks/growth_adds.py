"""Single adds over HTTP against counters, against events on disk, against connections."""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.growth import CONNECTIONS, Standing, curve, plot, standing
from benchmarks.harness import Bench, Load
from benchmarks.plots import Plot
from benchmarks.prepared import Shape
from benchmarks.results import Figure, Report

#: An add appends to the end of a log that lies in time order, so it has no past to pay for.
_RATE_TARGET: Final = 0.8
_EVENTS_TARGET: Final = 0.9
_EVEN_TARGET: Final = 0.85
_P99_TARGET: Final = 1.5
_COUNTERS: Final = 10_000
#: Of a queue whose every place is taken, the last is served after the mean wait; the rest is luck.
_TAIL_TARGET: Final = 3.0

_Loads = dict[int, list[Load]]


def counters(bench: Bench) -> Report:
    """Adds over more and more counters: skewed, and even."""
    sizes = (100, 1_000) if bench.quick else (1_000, 10_000, 100_000, 1_000_000)
    shapes = [Shape(min(size, _COUNTERS) // 10, size - min(size, _COUNTERS) // 10, 5, 0)
              for size in sizes]  # fmt: skip
    scripts = {"skewed": "adds.lua", "even": "evens.lua"}
    spreads = list(scripts)[: 1 if bench.quick else None]
    with standing(bench, shapes) as servers:
        # A server's turns lie far apart: what it had to roll up, it has by then, or nearly.
        points = {
            f"{size:,} counters, {spread}": partial(_adds, server, size, scripts[spread])
            for spread in spreads
            for size, server in zip(sizes, servers, strict=True)
        }
        samples = iter(bench.alternate(points).values())
    by_spread = {spread: {size: next(samples) for size in sizes} for spread in spreads}
    figures: list[Figure] = []
    for spread, loads in by_spread.items():
        target = _RATE_TARGET if spread == "skewed" else _EVEN_TARGET
        figures += _figures(loads, f"{sizes[-1]:,} counters, of {sizes[0]:,}; {spread}", target)
    return Report(
        subject="growth-counters",
        title="Growth: adds against counters",
        method=(
            "`POST .../add` with a fresh token each, over all counters of a namespace that has so"
            f" many, by wrk over {CONNECTIONS} connections on the same machine. *Skewed*: a few"
            " are hot, most are rare. *Even*: none is hotter than another. Flat is promised where"
            " adds go to a few at a time. " + _METHOD
        ),
        figures=tuple(figures),
        plots=_plots("counters", "counters", by_spread),
    )


_METHOD: Final = (
    "Servers of all sizes are ready, and one runs at a time; what it took in its last turn is"
    " rolled up before the next, so no rollup falls into a load. After each load what is on disk is"
    " compared with what was acknowledged, and some counters are read through the API; at the end"
    " the servers are killed, and their disks read again. Bands are the rounds' range."
)


def events(bench: Bench) -> Report:
    """Adds to as many counters, beside more and more events."""
    active = 100 if bench.quick else _COUNTERS
    each = (5, 50) if bench.quick else (10, 100, 1_000)
    shapes = [Shape(active, 0, some, 0) for some in each]
    sizes = [shape.events for shape in shapes]
    with standing(bench, shapes) as servers:
        points = {
            f"{size:,} events": partial(_adds, server, active)
            for size, server in zip(sizes, servers, strict=True)
        }
        loads = dict(zip(sizes, bench.alternate(points).values(), strict=True))
    return Report(
        subject="growth-events",
        title="Growth: adds against events on disk",
        method=(
            f"`POST .../add` with a fresh token each, over {active:,} counters (a few hot, most"
            f" rare) that have so many events already, by wrk over {CONNECTIONS} connections on the"
            " same machine. Flat is promised: the log lies in time order, so an add touches its"
            " end only. " + _METHOD
        ),
        figures=tuple(
            _figures(loads, f"{sizes[-1]:,} events on disk, of {sizes[0]:,}", _EVENTS_TARGET)
        ),
        plots=_plots("events", "events on disk", {"skewed": loads}),
    )


def connections(bench: Bench) -> Report:
    """Adds over more and more connections to one server."""
    sizes = (1, 64) if bench.quick else (1, 4, 16, 64, 256, 1_024)
    active = 100 if bench.quick else _COUNTERS
    with standing(bench, [Shape(active, 0, 10, 0)]) as [server]:
        points = {
            f"{size:,} connections": partial(server.adds, active, connections=size)
            for size in sizes
        }
        loads = dict(zip(sizes, bench.alternate(points).values(), strict=True))
    rate = curve("adds a second", loads, lambda each: each.per_s)
    most = sizes[-1]
    tail = [each.p99_ms / (1_000 * most / each.per_s) for each in loads[most]]
    return Report(
        subject="growth-connections",
        title="Growth: adds against connections",
        method=(
            f"`POST .../add` with a fresh token each, over {active:,} counters (a few hot, most"
            " rare), by wrk over so many connections on the same machine, a request at a time over"
            " each. Flat is promised from 64 connections on: while one commit is under way the"
            " next one gathers, so more of them make larger commits. Below, a commit has too few"
            " to share. The rollup runs meanwhile. After each load what is on disk is compared with"
            " what was acknowledged. Bands are the rounds' range."
        ),
        figures=(
            rate.figure(
                f"adds a second at {most:,} connections, of {_base(sizes):,}",
                at_least=_RATE_TARGET,
                base=_base(sizes),
                unit="/s",
            ),
            Figure(
                f"p99 at {most:,} connections, of the mean wait that the rate makes",
                sorted(tail)[len(tail) // 2],
                at_most=_TAIL_TARGET,
                rounds=tuple(tail),
                note="the mean wait is the connections by the adds a second",
            ),
        ),
        plots=(
            plot("growth-connections-rate", "Adds against connections", "connections",
                 "adds a second", rate,
                 curve("adds a CPU second", loads, lambda each: each.per_cpu_s)),
            plot("growth-connections-p99", "How long an add takes, against connections",
                 "connections", "ms", curve("p50", loads, lambda each: each.p50_ms),
                 curve("p99", loads, lambda each: each.p99_ms), log_y=True),
        ),
    )  # fmt: skip


def _adds(server: Standing, counters: int, script: str = "adds.lua") -> Load:
    server.roll_up()
    return server.adds(counters, script=script)


def _base(sizes: tuple[int, ...]) -> int:
    return 64 if 64 in sizes[:-1] else sizes[0]


def _figures(loads: _Loads, what: str, target: float) -> list[Figure]:
    rate = curve("adds a second", loads, lambda each: each.per_s)
    cpu = curve("adds a CPU second", loads, lambda each: each.per_cpu_s)
    p99 = curve("p99", loads, lambda each: each.p99_ms)
    return [
        rate.figure(f"adds a second at {what}", at_least=target),
        cpu.figure(f"adds a CPU second of the server at {what}"),
        p99.figure(f"p99 at {what}", at_most=_P99_TARGET, unit="ms"),
    ]


def _plots(name: str, x: str, by_spread: dict[str, _Loads]) -> tuple[Plot, ...]:
    rates = [curve(s, loads, lambda each: each.per_s) for s, loads in by_spread.items()]
    tails = [curve(s, loads, lambda each: each.p99_ms) for s, loads in by_spread.items()]
    return (
        plot(f"growth-{name}-rate", f"Adds against {x}", x, "adds a second", *rates),
        plot(f"growth-{name}-p99", f"p99 of adds against {x}", x, "ms", *tails),
    )
