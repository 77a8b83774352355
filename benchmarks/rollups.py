"""The rollup: events a second, and what it costs beside idle counters and old events."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, check
from benchmarks.prepared import (
    NAMESPACE,
    Shape,
    few,
    many_counters,
    many_counters_apart,
    many_events,
    prepare,
    settings_for,
)
from benchmarks.results import Figure, Report, median, ratios
from counter.clock import SystemClock
from counter.core.namespaces import Namespaces
from counter.core.read import CountReader
from counter.limits import BATCH_ITEMS_MAX
from counter.storage.memory import MemoryCache
from counter.storage.sqlite import SqliteStore
from counter.tokens import TokenGenerator
from counter.types import Event, Namespace, Written
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker
from scripts.demo_names import read_names

_EVENTS_PER_S_TARGET: Final = 200_000
#: Log n of a B-tree is not nothing, and this is a shared machine.
_COST_TARGET: Final = 1.25
_NAMES: Final = 300_000
_WINDOWS: Final = 2
_EVENTS_PER_COUNTER: Final = 10


class SteppedClock:
    """A clock that advances only when it is moved."""

    def __init__(self) -> None:
        self._now_us = SystemClock().now_us()

    def now_us(self) -> int:
        return self._now_us

    def wall_us(self) -> int:
        return self._now_us

    def forget_after(self, time_us: int) -> None:
        """It holds no latest reading."""

    def boottime_us(self) -> int:
        return self._now_us

    def move_to(self, time_us: int) -> None:
        """Move forward to *time_us*."""
        self._now_us = max(self._now_us, time_us)


@dataclass(frozen=True, slots=True)
class Rolled:
    """One rollup, and the appends before it."""

    events: int
    seconds: float
    cpu_s: float
    append_s: float
    append_cpu_s: float

    @property
    def per_s(self) -> float:
        return self.events / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.events:,} events in {self.seconds:.3f} s ({self.cpu_s:.2f} s CPU),"
            f" {self.per_s:,.0f}/s; appended in {self.append_s:.2f} s"
            f" ({self.append_cpu_s:.2f} s CPU)"
        )


class Desk:
    """A store with a worker over it, and a clock that is moved by hand."""

    def __init__(self, data: Path) -> None:
        settings = settings_for(data)
        self.clock = SteppedClock()
        self.store = SqliteStore(data, self.clock, [settings.dataset()])
        self.namespaces = Namespaces(self.store, self.clock)
        cache = MemoryCache(self.clock, entries_max=settings.cache_entries_max)
        self.worker = RollupWorker(self.store, cache, self.clock, self.namespaces)
        self.reader = CountReader(self.store, cache, self.clock)
        self._tokens = TokenGenerator()
        self._settings = settings
        self._counted: Counter[str] = Counter()
        self._loaded: dict[str, int] = {}

    @asynccontextmanager
    async def open(self, namespace: str) -> AsyncIterator[Namespace]:
        """The store, open, with *namespace* in it."""
        await self.store.open()
        try:
            await self.namespaces.refresh()
            await Maintenance(self.store, self.clock, self.namespaces).run_once()
            if namespace not in [each.name for each in self.namespaces.all()]:
                await self.namespaces.create(namespace, self._settings.default_namespace())
            # Existing data is not part of the measured rollup.
            await self.worker.tick()
            yield self.namespaces.get(namespace)
        finally:
            await self.store.close()

    async def round(self, namespace: Namespace, names: Sequence[str], windows: int) -> Rolled:
        """Append an event for each of *names*, in order, evenly over so many windows; close them,
        roll them up, and read every counter of them back."""
        append_s, append_cpu_s = await self.fill(namespace, names, windows)
        seconds, cpu_s = await self.roll(namespace)
        return Rolled(len(names), seconds, cpu_s, append_s, append_cpu_s)

    async def fill(
        self, namespace: Namespace, names: Sequence[str], windows: int
    ) -> tuple[float, float]:
        """Append an event for each of *names*, in order, evenly over the next so many windows;
        the seconds it took by the clock, and of this process's CPU."""
        size_us = namespace.settings.rollup_window_us
        begin_us = self.clock.now_us() // size_us * size_us + size_us
        step_us = max(1, windows * size_us // len(names))
        batches = [
            [
                Event(name, begin_us + number * step_us, self._tokens.next().nonce, 0, 1)
                for number, name in enumerate(names[start : start + BATCH_ITEMS_MAX], start)
            ]
            for start in range(0, len(names), BATCH_ITEMS_MAX)
        ]
        taken = await _timed(self._append(namespace, batches))
        self._counted.update(names)
        return taken

    async def roll(self, namespace: Namespace) -> tuple[float, float]:
        """Close all windows so far and roll them up, then read every counter back; the seconds
        that the rollup took by the clock, and of this process's CPU."""
        settings, dataset = namespace.settings, namespace.dataset
        lag_us = settings.accept_limit_us + dataset.write_timeout_us
        self.clock.move_to(self.clock.now_us() + settings.rollup_window_us + lag_us)
        taken = await _timed(self.worker.tick())
        await self._check(namespace)
        return taken

    async def _append(self, namespace: Namespace, batches: Sequence[Sequence[Event]]) -> None:
        for batch in batches:
            self.clock.move_to(batch[-1].event_time_us)
            written = await self.store.events.append(namespace, batch)
            check(set(written) == {Written.NEW}, f"not every event was written: {set(written)}")

    async def _check(self, namespace: Namespace) -> None:
        names = list(self._counted)
        for start in range(0, len(names), BATCH_ITEMS_MAX):
            part = names[start : start + BATCH_ITEMS_MAX]
            heads = await self.store.rollups.heads(namespace, part)
            exact = await self.reader.read(namespace, part, 0)
            for name, head, count in zip(part, heads, exact, strict=True):
                wanted = self._loaded.get(name, 0) + self._counted[name]
                stored = None if head is None else head.checkpoint.count
                check(
                    stored == count.count == wanted,
                    f"{name}: {wanted} written, {stored} rolled up, {count.count} read",
                )

    def expect(self, loaded: dict[str, int]) -> None:
        """Note what counters were loaded with."""
        self._loaded = loaded


async def _timed(work: Awaitable[object]) -> tuple[float, float]:
    """Seconds by the clock, and of this process's CPU, all threads."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    await work
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def run(bench: Bench) -> Report:
    """Measure the rate on real names, then the cost beside more and more."""
    shapes = {
        "few counters, few events": few(bench.quick),
        "idle counters, apart": many_counters_apart(bench.quick),
        "idle counters, between": many_counters(bench.quick),
        "the same and old events": many_events(bench.quick),
    }
    data = {name: prepare(bench, shape) for name, shape in shapes.items()}
    figures = [asyncio.run(_rate(bench)), *asyncio.run(_costs(bench, shapes, data))]
    return Report(
        subject="rollups",
        title="Rollup",
        method=(
            "One pass of the rollup worker over the SQLite store, in windows of 10 s, with a clock"
            " moved by hand past their closing; what is counted is the whole pass, reading marks"
            " to dropping them. Afterwards every counter is read back, as rolled up and exactly."
            " The rate is that of real names: the name tokens of Python's standard library, in"
            f" their own order, one event each. The costs are those of {_EVENTS_PER_COUNTER} new"
            " events for each of 10,000 active counters."
        ),
        figures=tuple(figures),
    )


async def _rate(bench: Bench) -> Figure:
    limit = 20_000 if bench.quick else _NAMES
    with bench.console.status("reading names"):
        names = (await read_names(limit, lambda _total: lambda _done: None)).occurrences
    check(len(names) == limit, f"{len(names)} names were found, not {limit}")
    rounds: list[Rolled] = []
    pairs = 0
    for number in range(1, bench.rounds + 1):
        with bench.console.status(f"round {number} of {bench.rounds}: real names"):
            desk = Desk(bench.fresh_folder("data"))
            async with desk.open(NAMESPACE) as namespace:
                rounds.append(await desk.round(namespace, names, _WINDOWS))
        half = len(names) // _WINDOWS
        pairs = len(set(names[:half])) + len(set(names[half:]))
        bench.say(f"round {number}: real names: {rounds[-1]}")
    rates = [each.per_s for each in rounds]
    return Figure(
        "events rolled up a second, real names",
        median(rates),
        "/s",
        at_least=_EVENTS_PER_S_TARGET,
        rounds=tuple(rates),
        note=(
            f"{len(names):,} events of {len(set(names)):,} counters, {pairs:,} dirty windows;"
            f" {median([x.events / x.cpu_s for x in rounds]):,.0f} a CPU second"
        ),
    )


async def _costs(
    bench: Bench, shapes: Mapping[str, Shape], data: Mapping[str, Path]
) -> list[Figure]:
    rounds: dict[str, list[Rolled]] = {name: [] for name in shapes}
    desks = {name: desk_on(data[name], shape) for name, shape in shapes.items()}
    async with all_open(list(desks.values())) as namespaces:
        for number in range(1, bench.rounds + 1):
            for (name, desk), namespace in zip(desks.items(), namespaces, strict=True):
                active = shapes[name].active_names() * _EVENTS_PER_COUNTER
                random.Random(number).shuffle(active)
                rounds[name].append(await desk.round(namespace, active, 1))
                bench.say(f"round {number}: {name}: {rounds[name][-1]}")
    plain, _, counters, events = shapes.values()
    base, apart, between, beside_events = rounds.values()
    idle = f"cost beside {counters.idle:,} idle counters, of {plain.idle:,}"
    old = f"cost beside {events.events:,} old events, of {counters.events:,}"
    return [
        _cost(f"{idle}; names apart from the active ones'", base, apart),
        _cost(f"{idle}; each active one alone between 100 idle ones", base, between),
        _cost(f"{old}; half of them the active counters'", between, beside_events),
        _append_cost(f"appending these events; {old}", between, beside_events),
    ]


def desk_on(data: Path, shape: Shape) -> Desk:
    """A desk over a past of *shape*."""
    desk = Desk(data)
    loaded = {name: shape.count(at * shape.step) for at, name in enumerate(shape.active_names())}
    desk.expect(loaded)
    return desk


@asynccontextmanager
async def all_open(desks: Sequence[Desk]) -> AsyncIterator[list[Namespace]]:
    """The stores of *desks*, open, each with the namespace of its past."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(desk.open(NAMESPACE)) for desk in desks]


def _cost(what: str, base: Sequence[Rolled], beside: Sequence[Rolled]) -> Figure:
    wall = ratios([x.seconds for x in beside], [x.seconds for x in base])
    cpu = ratios([x.cpu_s for x in beside], [x.cpu_s for x in base])
    return Figure(
        what,
        median(wall),
        at_most=_COST_TARGET,
        rounds=tuple(wall),
        note=(
            f"{median([x.seconds for x in beside]):.3f} s against"
            f" {median([x.seconds for x in base]):.3f} s for {base[0].events:,} events"
            f" ({median([x.per_s for x in base]):,.0f}/s); CPU {median(cpu):.2f}"
        ),
    )


def _append_cost(what: str, base: Sequence[Rolled], beside: Sequence[Rolled]) -> Figure:
    wall = ratios([x.append_s for x in beside], [x.append_s for x in base])
    cpu = ratios([x.append_cpu_s for x in beside], [x.append_cpu_s for x in base])
    return Figure(
        what,
        median(wall),
        rounds=tuple(wall),
        note=(
            f"{median([x.append_s for x in beside]):.2f} s against"
            f" {median([x.append_s for x in base]):.2f} s for {base[0].events:,} events in commits"
            f" of {BATCH_ITEMS_MAX:,}; CPU {median(cpu):.2f}"
        ),
    )
