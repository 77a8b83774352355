"""The rollup: events a second over SQLite and over PostgreSQL."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, check
from benchmarks.peer_stores import postgres
from benchmarks.prepared import NAMESPACE, Shape, settings_for
from benchmarks.results import Figure, Report, figure, median
from counter.clock import SystemClock
from counter.config.settings import Settings
from counter.core.namespaces import Namespaces
from counter.core.read import CountReader
from counter.limits import BATCH_ITEMS_MAX
from counter.ports import Store
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import SqliteStore
from counter.types import Event, Namespace, Written
from rollup.maintenance import Maintenance
from rollup.worker import RollupWorker
from scripts.library_names import read_names

_EVENTS_PER_S_TARGET: Final = 200_000
_EVENTS_PER_S_TARGET_POSTGRESQL: Final = 100_000
_NAMES: Final = 300_000
_WINDOWS: Final = 2


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

    @property
    def per_s(self) -> float:
        return self.events / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.events:,} events in {self.seconds:.3f} s ({self.cpu_s:.2f} s CPU),"
            f" {self.per_s:,.0f}/s"
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
        await self._fill(namespace, names, windows)
        settings, dataset = namespace.settings, namespace.dataset
        lag_us = settings.accept_limit_us + dataset.write_timeout_us
        await self.move_to(self.clock.now_us() + settings.rollup_window_us + lag_us)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        await self.worker.tick()
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        await self._check(namespace)
        return Rolled(len(names), seconds, cpu_s)

    async def _fill(self, namespace: Namespace, names: Sequence[str], windows: int) -> None:
        size_us = namespace.settings.rollup_window_us
        begin_us = self.clock.now_us() // size_us * size_us + size_us
        step_us = max(1, windows * size_us // len(names))
        for start in range(0, len(names), BATCH_ITEMS_MAX):
            batch = [
                Event(name, begin_us + number * step_us, uuid.uuid4().bytes, 0, 1)
                for number, name in enumerate(names[start : start + BATCH_ITEMS_MAX], start)
            ]
            await self.move_to(batch[-1].event_time_us)
            written = await self.store.events.append(namespace, batch)
            check(set(written) == {Written.NEW}, f"not every event was written: {set(written)}")
        self._counted.update(names)

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
        """Note the loaded counts."""
        self._loaded = loaded


class PostgresqlDesk(Desk):
    """The same over a PostgreSQL with a clock that is moved along."""

    def __init__(self, dsn: str) -> None:
        self.clock = SteppedClock()
        self._dataset = settings_for(Path()).dataset()
        from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
        from counter.storage.postgresql.store import PostgresqlStore

        self._database = PostgresqlDatabase(PostgresqlOptions(dsn))
        self._use(PostgresqlStore(self._database.options, self.clock), settings_for(Path()))

    @asynccontextmanager
    async def open(self, namespace: str) -> AsyncIterator[Namespace]:
        await self._database.open()
        try:
            await self._database.rows("DROP SCHEMA IF EXISTS {s} CASCADE")
            from counter.storage.postgresql.schema import apply_schema

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


def run(bench: Bench) -> Report:
    """Measure the rate on real names."""
    rate = asyncio.run(_real_names(bench, partial(_sqlite_desk, bench), _EVENTS_PER_S_TARGET))
    return Report(
        subject="rollups",
        title="Rollup",
        method=(
            "One pass of the rollup worker over the SQLite store, in windows of 10 s, with a clock"
            " moved by hand past their closing; what is counted is the whole pass, reading marks"
            " to dropping them. Afterwards every counter is read back, as rolled up and exactly."
            " The names are the name tokens of Python's standard library, in their own order, one"
            " event each."
        ),
        figures=(rate,),
    )


def over_postgresql(bench: Bench) -> Report:
    """Measure the rate over PostgreSQL, with the server on this machine."""
    with postgres(bench) as server:
        found = asyncio.run(
            _real_names(bench, partial(PostgresqlDesk, server.url), _EVENTS_PER_S_TARGET_POSTGRESQL)
        )
    return Report(
        subject="postgresql-rollups",
        title="Rollup over PostgreSQL",
        method=(
            "One pass of one rollup worker over PostgreSQL with Debian's settings on the same"
            " machine, in windows of 10 s, with a clock moved by hand past their closing; what is"
            " counted is the whole pass. Afterwards every counter is read back, as rolled up and"
            " exactly. CPU is the worker's alone."
        ),
        figures=(found,),
    )


def _sqlite_desk(bench: Bench) -> Desk:
    return Desk(bench.fresh_folder("data"))


async def _real_names(bench: Bench, new_desk: Callable[[], Desk], target: int) -> Figure:
    limit = 20_000 if bench.quick else _NAMES
    with bench.console.status("reading names"):
        names = read_names(limit)
    check(len(names) == limit, f"{len(names)} names were found, not {limit}")
    rounds: list[Rolled] = []
    for number in range(1, bench.rounds + 1):
        with bench.console.status(f"round {number} of {bench.rounds}"):
            desk = new_desk()
            async with desk.open(NAMESPACE) as namespace:
                rounds.append(await desk.round(namespace, names, _WINDOWS))
        bench.say(f"round {number}: {rounds[-1]}")
    half = len(names) // _WINDOWS
    pairs = len(set(names[:half])) + len(set(names[half:]))
    return figure(
        "events rolled up a second, real names",
        [each.per_s for each in rounds],
        "/s",
        at_least=target,
        note=(
            f"{len(names):,} events of {len(set(names)):,} counters, {pairs:,} dirty windows;"
            f" {median([x.events / x.cpu_s for x in rounds]):,.0f} a CPU second"
        ),
    )


def desk_on(data: Path, shape: Shape) -> Desk:
    """A desk over a past of *shape*."""
    desk = Desk(data)
    loaded = {name: shape.count(at * shape.step) for at, name in enumerate(shape.active_names())}
    desk.expect(loaded)
    return desk
