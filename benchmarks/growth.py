"""How cost grows: adds against counters and events on disk, the rollup against idle counters."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, check, counter_serve
from benchmarks.loads import Load, check_counted, check_counts, load
from benchmarks.prepared import BASE, NAMESPACE, Shape, name_of, prepare
from benchmarks.results import Figure, Report, figure, median, quantity, ratios
from benchmarks.rollups import Desk, Rolled, desk_on
from counter.clock import SystemClock

_SECONDS_MAX: Final = 2.0
#: Long enough for a dozen rollups.
_ROLLED_UP_S: Final = 120.0
_SAMPLED: Final = 200
#: An add appends to the end of a log that lies in time order, so it has no past to pay for.
_RATE_TARGET: Final = 0.8
_EVENTS_TARGET: Final = 0.9
_EVEN_TARGET: Final = 0.85
_P99_TARGET: Final = 1.5
_IDLE_TARGET: Final = 1.25
_COUNTERS: Final = 10_000
_EVENTS_PER_COUNTER: Final = 10
_METHOD: Final = (
    " Each load has a server of its own, on a copy of what was prepared. After it what is on disk"
    " is compared with what was acknowledged, and some counters are read through the API."
)


def counters(bench: Bench) -> Report:
    """Adds over more and more counters: skewed, and even."""
    every = (100, 1_000) if bench.quick else (1_000, 10_000, 100_000, 1_000_000)
    spreads = {
        "skewed": (every, "adds.lua", _SECONDS_MAX, _RATE_TARGET),
        "even": ((every[0], every[-1]), "evens.lua", _ROLLED_UP_S, _EVEN_TARGET),
    }
    figures: list[Figure] = []
    for spread, (sizes, script, seconds, target) in spreads.items():
        active = {size: min(size, _COUNTERS) // 10 for size in sizes}
        points = {
            f"{size:,} counters, {spread}": partial(
                _adds, bench, Shape(active[size], size - active[size], 5, 0), script, seconds
            )
            for size in sizes
        }
        loads = dict(zip(sizes, bench.alternate(points).values(), strict=True))
        figures += _figures(loads, f"{sizes[-1]:,} counters, of {sizes[0]:,}; {spread}", target)
    return Report(
        subject="growth-counters",
        title="Growth: adds against counters",
        method=(
            "`POST .../add` with a fresh token each, over all counters of a namespace that has so"
            " many, by wrk over 64 connections on the same machine. *Skewed*: a few are hot, most"
            f" are rare. *Even*: none is hotter than another, for {_ROLLED_UP_S:.0f} s, with the"
            f" rollups of that time. Flat is promised if adds go to a few at a time.{_METHOD}"
        ),
        figures=tuple(figures),
    )


def events(bench: Bench) -> Report:
    """Adds to as many counters, beside more and more events."""
    active = 100 if bench.quick else _COUNTERS
    shapes = [Shape(active, 0, each, 0) for each in ((5, 50) if bench.quick else (10, 100, 1_000))]
    points = {
        f"{shape.events:,} events": partial(_adds, bench, shape, "adds.lua", _SECONDS_MAX)
        for shape in shapes
    }
    samples = bench.alternate(points).values()
    loads = dict(zip((shape.events for shape in shapes), samples, strict=True))
    what = f"{max(loads):,} events on disk, of {min(loads):,}"
    return Report(
        subject="growth-events",
        title="Growth: adds against events on disk",
        method=(
            f"`POST .../add` with a fresh token each, over {active:,} counters (a few hot, most"
            " rare) that have so many events already, by wrk over 64 connections on the same"
            " machine. Flat is promised: the log lies in time order, so an add touches its end"
            f" only.{_METHOD}"
        ),
        figures=tuple(_figures(loads, what, _EVENTS_TARGET)),
    )


def _adds(bench: Bench, shape: Shape, script: str, seconds: float) -> Load:
    """Load a server on a past of *shape* with single adds; compare its counts with the rows."""
    data, begin_us = prepare(bench, shape), SystemClock().now_us()
    with counter_serve(bench, data) as server:
        send = partial(load, server, script, BASE, shape.counters, connections=64)
        loads = [send(seconds=1.0)] if not bench.quick else []
        loads.append(send(seconds=min(seconds, bench.seconds) if bench.quick else seconds))
        tally = server.settled_tally()
        added = _added(data, begin_us)
        check(added.total() == tally["original"], f"{added.total()} on disk, taken: {tally}")
        check_counted(added.total(), loads)
        some = {0, *random.sample(sorted(added), min(_SAMPLED, len(added)))}
        expected = {name_of(each): shape.count(each) + added[each] for each in some}
        check_counts(server.counts(BASE, list(expected), "0s"), expected)
        server.kill()
    check(_added(data, begin_us) == added, "after kill -9 other events are on disk")
    return loads[-1]


def _added(data: Path, begin_us: int) -> Counter[int]:
    """The adds since then, by the counter's position, from the rows themselves."""
    found: Counter[int] = Counter()
    with closing(sqlite3.connect(data / "counter.db")) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB 'events_*'")
        for (table,) in tables.fetchall():
            rows = connection.execute(
                f"SELECT c.name, sum(e.delta) FROM {table} e JOIN counters c"  # noqa: S608
                " ON c.id = e.counter WHERE e.event_time >= ? GROUP BY e.counter",
                (begin_us,),
            )
            found.update({int(name[1:]): total for name, total in rows})
    return found


def _figures(loads: Mapping[int, Sequence[Load]], what: str, target: float) -> list[Figure]:
    def grown(name: str, of: Callable[[Load], float], unit: str = "", **bound: float) -> Figure:
        by_size = {size: list(map(of, some)) for size, some in loads.items()}
        return _growth(f"{name} at {what}", name, by_size, unit, **bound)

    return [
        grown("adds a second", lambda each: each.per_s, at_least=target),
        grown("adds a CPU second of the server", lambda each: each.per_cpu_s, at_least=target),
        grown("p99", lambda each: each.p99_ms, "ms", at_most=_P99_TARGET),
    ]


def _growth(
    what: str,
    name: str,
    by_size: Mapping[int, Sequence[float]],
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """The value at the largest size, of that at the smallest; the note has the one at each size."""
    rounds = list(by_size.values())
    values = ", ".join(quantity(median(each), "") for each in rounds)
    note = f"{name}: {values} {unit}".rstrip()
    grown = ratios(rounds[-1], rounds[0])
    return figure(what, grown, note=note, at_least=at_least, at_most=at_most)


def rollup(bench: Bench) -> Report:
    """One window's rollup, beside more and more idle counters."""
    active = 200 if bench.quick else _COUNTERS
    sizes = (100, 1_000) if bench.quick else (1_000, 10_000, 100_000, 1_000_000)
    figures: list[Figure] = []
    for kind in ("apart from idle ones", "between idle ones"):
        shapes = {
            size: Shape(active, size, 5, 0, scattered=kind[0] == "b" and size >= active)
            for size in sizes
        }
        desks = {size: desk_on(prepare(bench, shape), shape) for size, shape in shapes.items()}
        rounds = asyncio.run(_beside_idle(bench, shapes, desks, kind))
        what = f"of a rolled-up event beside {sizes[-1]:,} idle counters, of {sizes[0]:,}; {kind}"
        wall = {size: [x.seconds * 1e6 / x.events for x in some] for size, some in rounds.items()}
        cpu = {size: [x.cpu_s * 1e6 / x.events for x in some] for size, some in rounds.items()}
        figures += [
            _growth(f"time {what}", kind, wall, "µs", at_most=_IDLE_TARGET),
            _growth(f"CPU {what}", kind, cpu, "µs"),
        ]
    return Report(
        subject="growth-rollup",
        title="Growth: the rollup against idle counters",
        method=(
            "One pass of the rollup worker over the SQLite store, in windows of 10 s, with a clock"
            f" moved by hand past their closing: {_EVENTS_PER_COUNTER} new events of each of"
            f" {active:,} active counters. Flat is promised: an idle counter is never read. That"
            " holds of rows, and what a disk reads and writes is pages: where the active ones stand"
            " evenly *between* idle ones, each comes to have a page of its own, and then costs that"
            " page, however many more idle ones there are. *Apart* from them, as counters that were"
            " made at about the same time are, it shares one. After each pass every active counter"
            " is read back, as rolled up and exactly."
        ),
        figures=tuple(figures),
    )


async def _beside_idle(
    bench: Bench, shapes: Mapping[int, Shape], desks: Mapping[int, Desk], kind: str
) -> dict[int, list[Rolled]]:
    rounds: dict[int, list[Rolled]] = {size: [] for size in shapes}
    async with AsyncExitStack() as stack:
        namespaces = {
            size: await stack.enter_async_context(desk.open(NAMESPACE))
            for size, desk in desks.items()
        }
        for number in range(1, bench.rounds + 1):
            for size, desk in desks.items():
                names = shapes[size].active_names() * _EVENTS_PER_COUNTER
                random.Random(number).shuffle(names)
                rounds[size].append(await desk.round(namespaces[size], names, 1))
                bench.say(f"round {number}: {size:,} idle counters, {kind}: {rounds[size][-1]}")
    return rounds
