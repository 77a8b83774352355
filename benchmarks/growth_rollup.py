"""The rollup against idle counters, and against the backlog that an outage leaves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks.growth import Curve, curve, plot
from benchmarks.harness import Bench
from benchmarks.prepared import NAMESPACE, Shape, name_of, prepare
from benchmarks.results import Figure, Report, median
from benchmarks.rollups import Desk, Rolled, all_open, desk_on
from counter.limits import SECOND

_IDLE_TARGET: Final = 1.25
_CATCH_UP_TARGET: Final = 20.0
_PACE_TARGET: Final = 0.8
_ACTIVE: Final = 10_000
_EVENTS_PER_COUNTER: Final = 10
#: A working day's mean of a service that is used: a few counters take most of it.
_PER_S: Final = 500
_OUTAGES_S: Final = (60, 600, 3_600)
_FILLED_AT_ONCE_S: Final = 600


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A backlog that was rolled up."""

    backlog_s: int
    events: int
    seconds: float
    cpu_s: float

    @property
    def pace(self) -> float:
        """Seconds of backlog a second."""
        return self.backlog_s / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.events:,} events in {self.seconds:.2f} s ({self.cpu_s:.2f} s CPU),"
            f" {self.pace:,.0f} times real time"
        )


def run(bench: Bench) -> Report:
    """Beside more and more idle counters; then after longer and longer outages."""
    active = 200 if bench.quick else _ACTIVE
    sizes = (100, 1_000) if bench.quick else (1_000, 10_000, 100_000, 1_000_000)
    shapes = {size: Shape(active, size, 5, 0, scattered=size >= active) for size in sizes}
    desks = {size: desk_on(prepare(bench, shape), shape) for size, shape in shapes.items()}
    idle = asyncio.run(_beside_idle(bench, shapes, desks))
    backlog = asyncio.run(_after_outages(bench))
    cost = curve("µs of an event", idle, lambda each: each.seconds * 1e6 / each.events)
    cpu = curve("µs of CPU", idle, lambda each: each.cpu_s * 1e6 / each.events)
    pace = curve("times real time", backlog, lambda each: each.pace)
    least, most = min(idle), max(idle)
    longest = max(backlog)
    return Report(
        subject="growth-rollup",
        title="Growth: the rollup against idle counters and backlog",
        method=(
            "One pass of the rollup worker over the SQLite store, in windows of 10 s, with a clock"
            " moved by hand past their closing. *Idle counters*:"
            f" {_EVENTS_PER_COUNTER} new events of each of {_ACTIVE:,} active counters, which stand"
            " evenly among the idle ones. Flat is promised: an idle counter is never read."
            f" *Backlog*: {_PER_S} adds a second to {_ACTIVE:,} counters, a few hot and most rare,"
            " came for so long while no worker ran. Flat is promised of the pace: a window's"
            " rollup costs its events, however many wait behind it. After each pass every counter"
            " is read back, as rolled up and exactly."
        ),
        figures=(
            cost.figure(
                f"rollup of an event beside {most:,} idle counters, of {least:,}",
                at_most=_IDLE_TARGET,
                unit="µs",
            ),
            cpu.figure(f"the same by CPU, {most:,} idle counters, of {least:,}", unit="µs"),
            _longest(longest, backlog[longest]),
            pace.figure(
                f"times real time after {longest:,} s, of {min(backlog):,} s",
                at_least=_PACE_TARGET,
                unit="times real time",
            ),
        ),
        plots=(
            plot("growth-rollup-idle", "Rollup of an event against idle counters",
                 "idle counters", "µs", cost, cpu),
            plot("growth-rollup-backlog", "How long an outage takes to catch up",
                 "seconds of outage", "seconds",
                 curve("caught up in", backlog, lambda each: each.seconds),
                 Curve(f"real time by {_CATCH_UP_TARGET:.0f}",
                       {size: [size / _CATCH_UP_TARGET] for size in backlog}), log_y=True),
        ),
    )  # fmt: skip


def _longest(backlog_s: int, rounds: list[CaughtUp]) -> Figure:
    paces = [each.pace for each in rounds]
    return Figure(
        f"times real time at which {backlog_s:,} s of outage are caught up",
        median(paces),
        at_least=_CATCH_UP_TARGET,
        rounds=tuple(paces),
        note=(
            f"{rounds[0].events:,} events in {median([each.seconds for each in rounds]):.1f} s"
            f" ({median([each.cpu_s for each in rounds]):.1f} s CPU)"
        ),
    )


async def _beside_idle(
    bench: Bench, shapes: Mapping[int, Shape], desks: Mapping[int, Desk]
) -> dict[int, list[Rolled]]:
    sizes = list(shapes)
    rounds: dict[int, list[Rolled]] = {size: [] for size in sizes}
    async with all_open(list(desks.values())) as namespaces:
        places = dict(zip(sizes, namespaces, strict=True))
        for number in range(1, bench.rounds + 1):
            for size in sizes[:: 1 if number % 2 else -1]:
                names = shapes[size].active_names() * _EVENTS_PER_COUNTER
                random.Random(number).shuffle(names)
                rounds[size].append(await desks[size].round(places[size], names, 1))
                bench.say(f"round {number}: {size:,} idle counters: {rounds[size][-1]}")
    return rounds


async def _after_outages(bench: Bench) -> dict[int, list[CaughtUp]]:
    outages = (10, 20) if bench.quick else _OUTAGES_S
    rounds: dict[int, list[CaughtUp]] = {outage_s: [] for outage_s in outages}
    for number in range(1, bench.rounds + 1):
        for outage_s in outages[:: 1 if number % 2 else -1]:
            with bench.console.status(f"round {number}: {outage_s:,} s of outage"):
                caught_up = await _after(bench, outage_s, random.Random(number))
            bench.say(f"round {number}: {outage_s:,} s of outage: {caught_up}")
            rounds[outage_s].append(caught_up)
    return rounds


async def _after(bench: Bench, outage_s: int, rng: random.Random) -> CaughtUp:
    desk = Desk(bench.fresh_folder("data"))
    async with desk.open(NAMESPACE) as namespace:
        left_s = outage_s
        while left_s:
            span_s = min(left_s, _FILLED_AT_ONCE_S)
            names = [name_of(int(_ACTIVE ** rng.random()) - 1) for _ in range(span_s * _PER_S)]
            await desk.fill(
                namespace, names, span_s * SECOND // namespace.settings.rollup_window_us
            )
            left_s -= span_s
        seconds, cpu_s = await desk.roll(namespace)
    return CaughtUp(outage_s, outage_s * _PER_S, seconds, cpu_s)
