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
_APART: Final = "apart from idle ones"
_BETWEEN: Final = "between idle ones"
#: Twenty million adds a day.
_PER_S: Final = 250
_OUTAGES_S: Final = (60, 600, 3_600)
_FILLED_AT_ONCE_S: Final = 600

#: How active counters stand, and how many idle ones there are.
_Place = tuple[str, int]


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


def idle(bench: Bench) -> Report:
    """One window's rollup, beside more and more idle counters."""
    active = 200 if bench.quick else _ACTIVE
    sizes = (100, 1_000) if bench.quick else (1_000, 10_000, 100_000, 1_000_000)
    shapes = {
        (kind, size): Shape(active, size, 5, 0, scattered=kind == _BETWEEN and size >= active)
        for kind in (_APART, _BETWEEN)
        for size in sizes
    }
    desks = {place: desk_on(prepare(bench, shape), shape) for place, shape in shapes.items()}
    rounds = asyncio.run(_beside_idle(bench, shapes, desks))
    figures: list[Figure] = []
    wall: list[Curve] = []
    cpu: list[Curve] = []
    for kind in (_APART, _BETWEEN):
        some = {size: rounds[kind, size] for size in sizes}
        wall.append(curve(kind, some, lambda each: each.seconds * 1e6 / each.events))
        cpu.append(curve(kind, some, lambda each: each.cpu_s * 1e6 / each.events))
        what = f"of a rolled-up event beside {sizes[-1]:,} idle counters, of {sizes[0]:,}; {kind}"
        figures += [
            wall[-1].figure(f"time {what}", at_most=_IDLE_TARGET, unit="µs"),
            cpu[-1].figure(f"CPU {what}", unit="µs"),
        ]
    return Report(
        subject="growth-rollup",
        title="Growth: the rollup against idle counters",
        method=(
            "One pass of the rollup worker over the SQLite store, in windows of 10 s, with a clock"
            f" moved by hand past their closing: {_EVENTS_PER_COUNTER} new events of each of"
            f" {_ACTIVE:,} active counters. Flat is promised: an idle counter is never read. That"
            " holds of rows, and what a disk reads and writes is pages: where the active ones stand"
            " evenly *between* idle ones, each comes to have a page of its own, and then costs that"
            " page, however many more idle ones there are. *Apart* from them, as counters that were"
            " made at about the same time are, it shares one. After each pass every active counter"
            " is read back, as rolled up and exactly. Bands are the rounds' range."
        ),
        figures=tuple(figures),
        plots=(
            plot("growth-rollup-time", "Time of a rolled-up event against idle counters",
                 "idle counters", "µs", *wall),
            plot("growth-rollup-cpu", "CPU of a rolled-up event against idle counters",
                 "idle counters", "µs", *cpu),
        ),
    )  # fmt: skip


async def _beside_idle(
    bench: Bench, shapes: Mapping[_Place, Shape], desks: Mapping[_Place, Desk]
) -> dict[_Place, list[Rolled]]:
    places = list(shapes)
    rounds: dict[_Place, list[Rolled]] = {place: [] for place in places}
    async with all_open(list(desks.values())) as opened:
        namespaces = dict(zip(places, opened, strict=True))
        for number in range(1, bench.rounds + 1):
            for place in places:
                names = shapes[place].active_names() * _EVENTS_PER_COUNTER
                random.Random(number).shuffle(names)
                rolled = await desks[place].round(namespaces[place], names, 1)
                bench.say(f"round {number}: {place[1]:,} idle counters, {place[0]}: {rolled}")
                rounds[place].append(rolled)
    return rounds


def backlog(bench: Bench) -> Report:
    """All the windows of longer and longer outages."""
    caught_up = asyncio.run(_after_outages(bench))
    took = curve("caught up in", caught_up, lambda each: each.seconds)
    pace = curve("times real time", caught_up, lambda each: each.pace)
    *_, long, longest = caught_up
    paces = [each.pace for each in caught_up[longest]]
    target = {size: [size / _CATCH_UP_TARGET] for size in caught_up}
    return Report(
        subject="growth-backlog",
        title="Growth: the rollup against backlog",
        method=(
            f"{_PER_S} adds a second to {_ACTIVE:,} counters, a few hot and most rare, came for so"
            " long while no worker ran; then one pass of the worker over the SQLite store, in"
            " windows of 10 s. Flat is promised of the pace: a window's rollup costs its events,"
            " however many wait behind it. (Of the first windows it costs less: their rows lie in"
            " few pages.) After each pass every counter is read back, as rolled up and exactly."
            " Bands are the rounds' range."
        ),
        figures=(
            Figure(
                f"times real time at which {longest:,} s of outage are caught up",
                median(paces),
                at_least=_CATCH_UP_TARGET,
                rounds=tuple(paces),
                note=(
                    f"{caught_up[longest][0].events:,} events in"
                    f" {median([each.seconds for each in caught_up[longest]]):.1f} s"
                    f" ({median([each.cpu_s for each in caught_up[longest]]):.1f} s CPU)"
                ),
            ),
            pace.figure(
                f"times real time after {longest:,} s, of {long:,} s",
                at_least=_PACE_TARGET,
                base=long,
            ),
        ),
        plots=(
            plot(
                "growth-backlog",
                "How long an outage takes to catch up",
                "seconds of outage",
                "seconds",
                took,
                Curve(f"{_CATCH_UP_TARGET:.0f} times real time", target),
                log_y=True,
            ),
        ),
    )


async def _after_outages(bench: Bench) -> dict[int, list[CaughtUp]]:
    outages = (10, 20) if bench.quick else _OUTAGES_S
    rounds: dict[int, list[CaughtUp]] = {outage_s: [] for outage_s in outages}
    for number in range(1, bench.rounds + 1):
        for outage_s in outages:
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
            windows = span_s * SECOND // namespace.settings.rollup_window_us
            await desk.fill(namespace, names, windows)
            left_s -= span_s
        seconds, cpu_s = await desk.roll(namespace)
    return CaughtUp(outage_s, outage_s * _PER_S, seconds, cpu_s)
