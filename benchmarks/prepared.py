"""Data directories with a past: many counters, many old events, loaded by SQL in seconds.

What is loaded is what a long run would have left: events in their slices, the window rows and
checkpoints of their rollup, and for every counter a settled fold of events that were dropped.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from api.app import create_app
from benchmarks.harness import Bench, check
from counter.config.settings import Settings
from counter.limits import DAY, SECOND
from counter.storage.sqlite.schema import events_table
from counter.storage.sqlite.settings import SqliteSettings
from counter.types import CounterType, Namespace, Slice

NAMESPACE: Final = "old"
BASE: Final = f"/v1/namespaces/{NAMESPACE}"
#: The count of events that were dropped with their slices.
SETTLED: Final = 7
BURST: Final = 5
_EVENT_STEP_US: Final = 997


@dataclass(frozen=True, slots=True)
class Shape:
    """How much there is."""

    active: int
    idle: int
    #: Old events of every active counter; a multiple of BURST.
    active_events: int
    #: So many of the idle counters have BURST old events each.
    idle_with_events: int
    #: Whether active counters stand evenly among the idle ones, or all before them.
    scattered: bool = True

    @property
    def counters(self) -> int:
        return self.active + self.idle

    @property
    def events(self) -> int:
        return self.active * self.active_events + self.idle_with_events * BURST

    @property
    def step(self) -> int:
        """Return the distance between two active counters."""
        return self.counters // self.active if self.scattered else 1

    def active_names(self) -> list[str]:
        """The names of the active counters."""
        return [name_of(position * self.step) for position in range(self.active)]

    def count(self, position: int) -> int:
        """The loaded count of the counter at *position*."""
        place, rest = divmod(position, self.step)
        if rest == 0 and place < self.active:
            return SETTLED + self.active_events
        passed = min(place + 1, self.active)
        return SETTLED + (BURST if position - passed < self.idle_with_events else 0)


def name_of(position: int) -> str:
    """The name of the counter at *position*."""
    return f"c{position:07}"


def many_events(quick: bool) -> Shape:
    """A million idle counters and ten million old events: half of them of the active counters."""
    if quick:
        return Shape(200, 20_000, 500, 20_000)
    return Shape(10_000, 1_000_000, 500, 1_000_000)


def prepare(bench: Bench, shape: Shape) -> Path:
    """A data directory of *shape* that is the caller's own; made once a run, then copied."""
    made = bench.prepared.get(shape)
    if made is None:
        made = bench.prepared[shape] = bench.fresh_folder("prepared")
        with bench.console.status(f"{shape.counters:,} counters, {shape.events:,} old events"):
            asyncio.run(_make(made, shape))
        size_mib = (made / "counter.db").stat().st_size / 2**20
        bench.say(
            f"prepared {shape.counters:,} counters with {shape.events:,} old events,"
            f" {size_mib:,.0f} MiB"
        )
    own = bench.fresh_folder("data")
    shutil.copytree(made, own)
    return own


def settings_for(data: Path) -> Settings:
    """As ``counter serve`` would have them without flags."""
    return SqliteSettings(data=data)


async def _make(data: Path, shape: Shape) -> None:
    settings = settings_for(data)
    application = create_app(settings)
    async with application.running(rollup=False):
        eventual = replace(settings.default_namespace(), counter_type=CounterType.EVENTUAL)
        namespace = await application.service.namespaces.create(NAMESPACE, eventual)
        slices = await application.store.control.slices(namespace.dataset)
    await asyncio.to_thread(_load, data / "counter.db", namespace, slices, shape)


def _load(path: Path, namespace: Namespace, slices: Sequence[Slice], shape: Shape) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for pragma in ("journal_mode = DELETE", "synchronous = OFF", "cache_size = -262144"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("BEGIN")
        _load_counters(connection, namespace, slices[0].start_us, shape)
        _plan_bursts(connection, namespace, slices, shape)
        loaded = sum(_load_events(connection, namespace, each) for each in slices)
        check(loaded == shape.events, f"{loaded} events were loaded, not {shape.events}")
        connection.execute(
            "INSERT INTO windows SELECT counter, start, 0, events FROM bursts"
            " ORDER BY counter, start"
        )
        connection.execute(
            "UPDATE namespaces SET created_at = ? WHERE id = ?",
            (slices[0].start_us - DAY, namespace.id),
        )
        # The settled fold is of dropped events.
        connection.execute(
            "UPDATE datasets SET dropped_before = ? WHERE id = ?",
            (slices[0].start_us, namespace.dataset.id),
        )
        connection.execute("DROP TABLE bursts")
        connection.execute("DROP TABLE numbers")
        connection.execute("COMMIT")
    finally:
        connection.close()


def _load_counters(
    connection: sqlite3.Connection, namespace: Namespace, first_us: int, shape: Shape
) -> None:
    connection.execute("CREATE TEMP TABLE numbers (n INTEGER PRIMARY KEY)")
    connection.execute(
        "INSERT INTO numbers WITH RECURSIVE r (n) AS (VALUES (0) UNION ALL SELECT n + 1 FROM r"
        " WHERE n + 1 < ?) SELECT n FROM r",
        (shape.counters,),
    )
    rows = (
        (1 + at, namespace.id, name_of(at), first_us - 1, shape.count(at), first_us - 1, SETTLED)
        for at in range(shape.counters)
    )
    connection.executemany("INSERT INTO counters VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def _plan_bursts(
    connection: sqlite3.Connection, namespace: Namespace, slices: Sequence[Slice], shape: Shape
) -> None:
    """A row for every (counter, window) with events: evenly over the time since the first slice
    began, each counter at a time of its own."""
    size_us = namespace.settings.rollup_window_us
    begin_us = slices[0].start_us
    windows = (namespace.created_at_us - 60 * SECOND - begin_us) // size_us
    connection.execute(
        "CREATE TEMP TABLE bursts (counter INTEGER, start INTEGER, events INTEGER,"
        " PRIMARY KEY (start, counter)) WITHOUT ROWID"
    )
    # The events of a counter beyond its settled fold, in bursts of one window each.
    connection.execute(
        "INSERT INTO bursts SELECT c.id, ? + ? * (b.n * span + c.id * 7919 % span) AS at, ?"
        " FROM (SELECT id, (checkpoint - settled) / ? AS bursts,"
        "  max(1, ? / max(1, (checkpoint - settled) / ?)) AS span"
        "  FROM counters WHERE namespace = ? AND checkpoint > settled) c"
        " CROSS JOIN numbers b ON b.n < c.bursts ORDER BY at, c.id",
        (begin_us, size_us, BURST, BURST, windows, BURST, namespace.id),
    )
    connection.execute(
        "UPDATE counters SET checkpoint_at = l.last + ? FROM (SELECT counter, max(start) AS last"
        " FROM bursts GROUP BY counter) l WHERE counters.id = l.counter",
        (size_us - 1,),
    )


def _load_events(connection: sqlite3.Connection, namespace: Namespace, each: Slice) -> int:
    """In the order of the table's key: every page is written once."""
    table = events_table(namespace.dataset.id, each.start_us)
    cursor = connection.execute(
        f"INSERT INTO {table} SELECT b.counter, b.start + n.n * ?, randomblob(16), 0, 1, NULL, NULL"  # noqa: S608
        " FROM (SELECT DISTINCT start FROM bursts WHERE start >= ? AND start < ?) s"
        " CROSS JOIN numbers n ON n.n < ? CROSS JOIN bursts b ON b.start = s.start"
        " WHERE n.n < b.events",
        (_EVENT_STEP_US, each.start_us, each.end_us, BURST),
    )
    return cursor.rowcount
