"""Everything that one data directory does, beside a million events and beside a hundred million."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.growth import Standing, curve, plot, short, standing
from benchmarks.harness import Bench, Load, check, counter_serve, load
from benchmarks.memory import mb
from benchmarks.prepared import BASE, NAMESPACE, Shape, name_of, prepare
from benchmarks.results import Figure, Report, median, ratios
from benchmarks.rollups import Desk, Rolled, desk_on
from counter.ops.audit import Auditor, State
from counter.storage.sqlite.schema import events_table
from counter.types import Event, Namespace, Written

#: A rate of that at the smallest size; a latency may be as much longer.
_RATE_TARGET: Final = 0.8
_MEMORY_TARGET_MB: Final = 200.0
_START_TARGET_S: Final = 1.0
_DROP_TARGET_MS: Final = 50.0
_EVENTS_PER_COUNTER: Final = 10
_AUDITED: Final = 500


@dataclass(frozen=True, slots=True)
class Dropped:
    """The appends during a slice's drop: how many, the slowest, and what it was like before."""

    events: int
    seconds: float
    appends: int
    worst_ms: float
    worst_before_ms: float

    def __str__(self) -> str:
        return (
            f"{self.events:,} events dropped in {self.seconds:.2f} s beside {self.appends:,}"
            f" appends, the slowest {self.worst_ms:.1f} ms; before {self.worst_before_ms:.1f} ms"
        )


@dataclass(frozen=True, slots=True)
class Worked:
    """What one store did without a server."""

    rolled: Sequence[Rolled]
    audited_s: Sequence[float]
    dropped: Dropped


def run(bench: Bench) -> Report:
    """Load both sizes over HTTP in turn; then start, audit, roll up and drop on each."""
    shapes = _shapes(bench.quick)
    large = max(shapes)
    with standing(bench, list(shapes.values())) as servers:
        by_size = dict(zip(shapes, servers, strict=True))
        points = {
            f"{size:,} events: {what}": partial(run_load, by_size[size])
            for what, run_load in _LOADS.items()
            for size in shapes
        }
        samples = iter(bench.alternate(points).values())
        loads = {what: {size: next(samples) for size in shapes} for what in _LOADS}
        resident = {size: server.server.memory_kib()["VmRSS"] for size, server in by_size.items()}
        folders = {size: server.data for size, server in by_size.items()}
    starts = {size: [_start(bench, folders[size]) for _ in range(bench.rounds)] for size in shapes}
    bench.say(f"starts: {starts}")
    worked = {size: asyncio.run(_work(bench, shape)) for size, shape in shapes.items()}
    figures = [figure for what in _LOADS for figure in _load_figures(what, loads[what])]
    figures += [
        Figure(
            f"resident after all loads, {size:,} events",
            mb(resident[size]),
            "MB",
            at_most=_MEMORY_TARGET_MB,
        )
        for size in shapes
    ]
    figures += [
        Figure(
            f"from the start of the process after kill -9 until it serves, {size:,} events",
            median(starts[size]),
            "s",
            at_most=_START_TARGET_S,
            rounds=tuple(starts[size]),
        )
        for size in shapes
    ]
    figures += _work_figures(worked)
    return Report(
        subject="growth-large",
        title="Growth: a hundred million events and ten million counters",
        method=(
            f"Data directories with {' and '.join(_said(each) for each in shapes.values())}, over"
            f" {shapes[large].past_days + 1} days. Adds (skewed over all counters, and even) and"
            " gets of random counters by wrk over 64 connections, the servers in turn, counts"
            " verified after each load; resident memory after all of them; then the servers are"
            " killed, and started again. Without a server, over copies of the same data: one"
            f" pass of the rollup of {_EVENTS_PER_COUNTER} new events of each of"
            f" {shapes[large].active:,} active counters; an audit of {_AUDITED} random counters,"
            " which reads all events once; and the drop of the earliest slice, beside appends of"
            " an event each, one after the other."
        ),
        figures=tuple(figures),
        plots=(
            plot(
                "growth-large",
                "Requests a second against events on disk",
                "events on disk",
                "a second",
                *(curve(what, loads[what], lambda each: each.per_s) for what in _LOADS),
            ),
        ),
    )


def _shapes(quick: bool) -> dict[int, Shape]:
    """The shapes by their events; ten events a counter, half of all those of a few counters."""
    shapes = (
        (Shape(200, 800, 55, 800, past_days=6), Shape(200, 9_800, 505, 9_800, past_days=6))
        if quick
        else (
            Shape(10_000, 90_000, 55, 90_000, past_days=6),
            Shape(10_000, 9_990_000, 5_005, 9_990_000, past_days=6),
        )
    )
    return {shape.events: shape for shape in shapes}


def _said(shape: Shape) -> str:
    return f"{shape.events:,} events of {shape.counters:,} counters"


def _adds(server: Standing, script: str) -> Load:
    server.roll_up()
    return server.adds(server.shape.counters, script=script)


def _gets(standing: Standing) -> Load:
    standing.roll_up()
    with standing.awake() as server:
        return load(
            server, "gets.lua", BASE, standing.shape.counters, 0, connections=64, seconds=2.0
        )


_LOADS: Final[Mapping[str, Callable[[Standing], Load]]] = {
    "adds, skewed": partial(_adds, script="adds.lua"),
    "adds, even": partial(_adds, script="evens.lua"),
    "gets of random counters": _gets,
}


def _load_figures(what: str, loads: Mapping[int, Sequence[Load]]) -> list[Figure]:
    rate = curve("a second", loads, lambda each: each.per_s)
    cpu = curve("a CPU second", loads, lambda each: each.per_cpu_s)
    p99 = curve("p99", loads, lambda each: each.p99_ms)
    sizes = f"at {max(loads):,} events, of {min(loads):,}"
    return [
        rate.figure(f"{what}: a second {sizes}", at_least=_RATE_TARGET),
        cpu.figure(f"{what}: a CPU second of the server {sizes}"),
        p99.figure(f"{what}: p99 {sizes}", at_most=1 / _RATE_TARGET, unit="ms"),
    ]


def _work_figures(worked: Mapping[int, Worked]) -> list[Figure]:
    small, large = min(worked), max(worked)
    sizes = f"at {large:,} events, of {small:,}"
    rolled = {size: [each.per_s for each in some.rolled] for size, some in worked.items()}
    audits = {size: [size / each for each in some.audited_s] for size, some in worked.items()}
    rates = {"events rolled up a second": rolled, "events that an audit reads a second": audits}
    figures = [
        Figure(
            f"{what} {sizes}",
            median(ratios(rounds[large], rounds[small])),
            at_least=_RATE_TARGET,
            rounds=tuple(ratios(rounds[large], rounds[small])),
            note=", ".join(f"{short(median(each))}/s" for each in rounds.values()),
        )
        for what, rounds in rates.items()
    ]
    dropped = worked[large].dropped
    return [
        *figures,
        Figure(
            f"the slowest append while a slice of {dropped.events:,} events is dropped",
            dropped.worst_ms,
            "ms",
            at_most=_DROP_TARGET_MS,
            note=str(dropped),
        ),
    ]


def _start(bench: Bench, data: Path) -> float:
    """Seconds until a server serves that ends in order, and is the next one's past."""
    began_s = time.perf_counter()
    with counter_serve(bench, data) as server:
        seconds = time.perf_counter() - began_s
        server.kill()
    return seconds


async def _work(bench: Bench, shape: Shape) -> Worked:
    data = prepare(bench, shape)
    desk = desk_on(data, shape)
    rolled: list[Rolled] = []
    audited_s: list[float] = []
    async with desk.open(NAMESPACE) as namespace:
        for number in range(1, bench.rounds + 1):
            names = shape.active_names() * _EVENTS_PER_COUNTER
            random.Random(number).shuffle(names)
            rolled.append(await desk.round(namespace, names, 1))
            audited_s.append(await _audit(desk, namespace, shape, random.Random(number)))
            bench.say(
                f"round {number}: {shape.events:,} events: {rolled[-1]};"
                f" audited in {audited_s[-1]:.2f} s"
            )
        dropped = await _drop(desk, namespace, shape, data)
        bench.say(f"{shape.events:,} events: {dropped}")
    return Worked(rolled, audited_s, dropped)


async def _audit(desk: Desk, namespace: Namespace, shape: Shape, rng: random.Random) -> float:
    names = [name_of(each) for each in rng.sample(range(shape.counters), _AUDITED)]
    began_s = time.perf_counter()
    verdicts = await Auditor(desk.store).audit(namespace, names)
    wrong = [each for each in verdicts if each.state is not State.RIGHT]
    check(not wrong, f"{len(wrong)} counters are wrong: {wrong[:3]}")
    return time.perf_counter() - began_s


async def _drop(desk: Desk, namespace: Namespace, shape: Shape, data: Path) -> Dropped:
    """Drop the earliest slice beside appends; the counts that are rolled up stay."""
    control, dataset = desk.store.control, namespace.dataset
    first, *_ = await control.slices(dataset)
    names = [name_of(each) for each in range(0, shape.counters, shape.counters // 100)]
    before = await desk.reader.read(namespace, names, None)
    table = events_table(dataset.id, first.start_us)
    with closing(sqlite3.connect(data / "counter.db")) as connection:
        (events,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608

    async def drop() -> None:
        check(await control.drop_slice(dataset, first.start_us), "the slice was not dropped")
        while await control.purge(desk.clock.now_us()):
            pass

    before_ms = await _append_ms(desk, namespace, asyncio.sleep(1.0))
    began_s = time.perf_counter()
    during_ms = await _append_ms(desk, namespace, drop())
    seconds = time.perf_counter() - began_s
    with closing(sqlite3.connect(data / "counter.db")) as connection:
        left = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    check(left is None, "the table of the slice is still there")
    check(await desk.reader.read(namespace, names, None) == before, "the drop changed counts")
    return Dropped(events, seconds, len(during_ms), max(during_ms), max(before_ms))


async def _append_ms(desk: Desk, namespace: Namespace, work: Awaitable[None]) -> list[float]:
    """How long each append took, one after the other, while *work* went on; at least one."""
    working = asyncio.ensure_future(work)
    took_ms: list[float] = []
    while not (working.done() and took_ms):
        event = Event(name_of(0), desk.clock.now_us(), random.randbytes(16), 0, 1)
        began_s = time.perf_counter()
        written = await desk.store.events.append(namespace, [event])
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        check(written == [Written.NEW], f"an event was not written: {written}")
    await working
    return took_ms
