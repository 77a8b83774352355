"""The rollup: events a second, and what it costs beside idle counters and old events."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, check
from benchmarks.peer_stores import postgres
from benchmarks.prepared import (
    NAMESPACE,
    Shape,
    few,
    many_counters,
    many_counters_apart,
    many_events,
    name_of,
    prepare,
    settings_for,
)
from benchmarks.results import Figure, Report, median, ratios
from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.core.namespaces import Namespaces
from counter.core.read import CountReader
from counter.limits import BATCH_ITEMS_MAX
from counter.ports import Store
from counter.storage.memory import MemoryCache
from counter.storage.postgresql import PostgresqlOptions, PostgresqlStore, apply_schema
from counter.storage.postgresql.database import Database
from counter.storage.sqlite import SqliteStore
from counter.tokens import TokenGenerator
from counter.types import Event, Namespace, Written
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker
from scripts.demo_names import read_names

_EVENTS_PER_S_TARGET: Final = 200_000
_EVENTS_PER_S_TARGET_POSTGRESQL: Final = 100_000
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
        self._use(SqliteStore(data, self.clock, [settings.dataset()]), settings)

    def _use(self, store: Store, settings: Settings) -> None:
        self.store = store
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
            await Maintenance(self.store, self.clock).run_once()
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
        await self.move_to(self.clock.now_us() + settings.rollup_window_us + lag_us)
        taken = await _timed(self.worker.tick())
        await self._check(namespace)
        return taken

    async def _append(self, namespace: Namespace, batches: Sequence[Sequence[Event]]) -> None:
        for batch in batches:
            await self.move_to(batch[-1].event_time_us)
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

    async def move_to(self, time_us: int) -> None:
        """Move the clock forward to *time_us*."""
        self.clock.move_to(time_us)

    def expect(self, loaded: dict[str, int]) -> None:
        """Note what counters were loaded with."""
        self._loaded = loaded


class PostgresqlDesk(Desk):
    """The same over a PostgreSQL, whose clock is moved along."""

    def __init__(self, dsn: str) -> None:
        self.clock = SteppedClock()
        self._dataset = settings_for(Path()).dataset()
        self._database = Database(PostgresqlOptions(dsn))
        self._use(PostgresqlStore(self._database.options, self.clock), settings_for(Path()))

    @asynccontextmanager
    async def open(self, namespace: str) -> AsyncIterator[Namespace]:
        await self._database.open()
        try:
            await self._database.rows("DROP SCHEMA IF EXISTS {s} CASCADE")
            await apply_schema(self._database, [self._dataset])
            await self._database.rows("CREATE TABLE {s}.bench_clock AS SELECT 0::bigint AS us")
            await self._database.rows(
                "CREATE OR REPLACE FUNCTION {s}.clock_us() RETURNS bigint LANGUAGE sql VOLATILE"
                " AS 'SELECT us FROM {s}.bench_clock'"
            )
            await self.move_to(self.clock.now_us())
            async with super().open(namespace) as opened:
                yield opened
        finally:
            await self._database.close()

    async def move_to(self, time_us: int) -> None:
        self.clock.move_to(time_us)
        await self._database.rows("UPDATE {s}.bench_clock SET us = $1", self.clock.now_us())


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
    sqlite = partial(_sqlite_desk, bench)
    figures = [
        asyncio.run(_rate(bench, sqlite, _EVENTS_PER_S_TARGET)),
        *asyncio.run(_costs(bench, shapes, data)),
    ]
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


def over_postgresql(bench: Bench) -> Report:
    """Measure the rate over PostgreSQL, with the server on this machine."""
    with postgres(bench) as server:
        dsn = f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
        figures = asyncio.run(_rates(bench, partial(PostgresqlDesk, dsn)))
    return Report(
        subject="postgresql-rollups",
        title="Rollup over PostgreSQL",
        method=(
            "One pass of one rollup worker over PostgreSQL with Debian's settings on the same"
            " machine, in windows of 10 s, with a clock moved by hand past their closing; what is"
            " counted is the whole pass. Afterwards every counter is read back, as rolled up and"
            " exactly. CPU is the worker's alone."
        ),
        figures=tuple(figures),
    )


async def _rates(bench: Bench, new_desk: Callable[[], Desk]) -> list[Figure]:
    """The rate on real names, and on names spread evenly over many counters."""
    events = 20_000 if bench.quick else _NAMES
    figures = [await _rate(bench, new_desk, _EVENTS_PER_S_TARGET_POSTGRESQL)]
    for counters in (1_000, 5_000) if bench.quick else (10_000, 100_000):
        names = [name_of(number % counters) for number in range(events)]
        random.Random(counters).shuffle(names)
        what = f"spread evenly over {counters:,} counters"
        figures.append(await _rate_of(what, bench, new_desk, names))
    return figures


def _sqlite_desk(bench: Bench) -> Desk:
    return Desk(bench.fresh_folder("data"))


async def _rate(bench: Bench, new_desk: Callable[[], Desk], target: int) -> Figure:
    limit = 20_000 if bench.quick else _NAMES
    with bench.console.status("reading names"):
        names = (await read_names(limit, lambda _total: lambda _done: None)).occurrences
    check(len(names) == limit, f"{len(names)} names were found, not {limit}")
    return await _rate_of("real names", bench, new_desk, names, target)


async def _rate_of(
    what: str,
    bench: Bench,
    new_desk: Callable[[], Desk],
    names: Sequence[str],
    target: int | None = None,
) -> Figure:
    rounds: list[Rolled] = []
    for number in range(1, bench.rounds + 1):
        with bench.console.status(f"round {number} of {bench.rounds}: {what}"):
            desk = new_desk()
            async with desk.open(NAMESPACE) as namespace:
                rounds.append(await desk.round(namespace, names, _WINDOWS))
        bench.say(f"round {number}: {what}: {rounds[-1]}")
    half = len(names) // _WINDOWS
    pairs = len(set(names[:half])) + len(set(names[half:]))
    rates = [each.per_s for each in rounds]
    return Figure(
        f"events rolled up a second, {what}",
        median(rates),
        "/s",
        at_least=target,
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
