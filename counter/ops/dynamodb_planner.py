"""Compute the units of DynamoDB that a load takes, by what causes them, and which limit breaks
first.

A write unit pays for a write of up to 1 KiB, two for one in a transaction; a read unit for a
consistent read of up to 4 KiB, where a query counts the sum of its items, and one that finds
nothing a unit. Prices differ by region, so they are the caller's. tests/dynamodb/test_planned.py
compares the figures with what Amazon's local engine reports of the adapter. Pure functions, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final

from counter import limits
from counter.config.namespace_rules import EVENT_BUCKETS_MAX
from counter.durations import format_duration
from counter.ops.cluster_planner import (
    MEASURED,
    PROCESSES_MIN,
    PartSum,
    Rates,
    Step,
    check_shares,
    check_storage,
    fewer_rollups,
)
from counter.ops.planner import RATE_MAX_PER_S, hold_number
from counter.quantities import NUMBER_MAX, format_bytes, format_number, format_share
from counter.types import Dataset, NamespaceSettings
from counter.windows import closing_lag

_WRITE_BYTES: Final = 1_024
_READ_BYTES: Final = 4_096
#: In a transaction each write counts twice.
_TRANSACTED: Final = 2
#: Bytes of an item without the counter's name: names of attributes, keys and values.
EVENT_BYTES: Final = 55
MARK_BYTES: Final = 61
HEAD_BYTES: Final = 32
ROW_BYTES: Final = 40
NAME_BYTES: Final = 29
WATERMARK_BYTES: Final = 34
#: What DynamoDB adds to each item that it stores.
_STORED_BYTES: Final = 100
_ATOMIC_MARK_BYTES: Final = 150
_ATOMIC_ITEM_BYTES: Final = 20
#: What a process remembers: counters whose names it has listed, and marks that it has written.
_NAMES_KNOWN: Final = 200_000
_MARKS_KNOWN: Final = 100_000
#: A shard's pass asks for marks of both kinds; if it has some, it also reads `dropped_before`, and
#: the atomic marks twice.
_SHARD_READS: Final = 2
_BUSY_READS: Final = 3
#: What a counter's rows cost to settle when a slice is dropped, besides their size: heads and ends
#: of reading are read twice, and two queries end in a part of a unit.
_SETTLING_READS: Final = 6
#: A process reads namespaces and API keys every second, the clock every two (half a unit), and
#: writes its lease and reads all of them twice a second.
_LEASES_PER_S: Final = Fraction(limits.SECOND, limits.LEASE_LOOK_US)
_POLLS_PER_S: Final = 2 + Fraction(1, 4) + _LEASES_PER_S
#: One worker reads datasets, slices twice, and `dropped_before` every second.
_MAINTENANCE_PER_S: Final = 4

#: DynamoDB's own: units a second of a partition, of a new table on demand, of an account's table.
_PARTITION_WRITES: Final = 1_000
_PARTITION_READS: Final = 3_000
_NEW_WRITES: Final = 4_000
_TABLE_UNITS: Final = 40_000
_DAY_S: Final = 86_400
_MONTH_DAYS: Final = 30
_PROCESSES_MAX: Final = 10_000
#: What uses the tables of events; everything else uses the dataset's own table.
_OF_EVENTS: Final = ("events", "atomic adds", "rollups: events", "accurate gets: tails")
_MERGE: Final = "merge adds in clients (client.buffer())"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamodbNeed:
    """The load, as one namespace that represents all.

    ``dirty`` is the most counters with adds in one window, None for as many as there can be;
    ``gets_per_s`` are of cached counts, ``uncached_per_s`` and ``accurate_per_s`` read DynamoDB;
    ``hottest_per_s`` are adds of the busiest counter, None if all are alike; ``processes`` is None
    for as many as the adds and gets take. Prices are of a million units, and a GB for a month.
    """

    adds_per_s: Fraction
    counters: int
    dataset: Dataset
    settings: NamespaceSettings
    dirty: int | None = None
    hottest_per_s: Fraction | None = None
    gets_per_s: Fraction = Fraction(0)
    uncached_per_s: Fraction = Fraction(0)
    accurate_per_s: Fraction = Fraction(0)
    atomic_adds_per_s: Fraction = Fraction(0)
    atomic_items: int = 2
    name_bytes: int = 16
    processes: int | None = None
    load: Fraction = Fraction(7, 10)
    write_price: Fraction | None = None
    read_price: Fraction | None = None
    storage_price: Fraction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamodbPlan:
    """Units a second by cause, storage, the limit that breaks first, and the arithmetic. Plain
    values, which survive JSON."""

    api_processes: int
    write_units_per_s: float
    read_units_per_s: float
    write_units: Mapping[str, float]
    read_units: Mapping[str, float]
    #: Write units that each process takes once: it lists the name of each counter that it adds to.
    write_units_at_start: int
    stored_bytes: int
    #: The share of each of DynamoDB's limits that is used; above 1 it throttles.
    limits_used: Mapping[str, float]
    price_of_a_month: float | None
    warnings: tuple[str, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """What happens in a second: counted events, the first marks of counters in a window, counters
    that are rolled up, shards that are passed, and those of them with marks."""

    events: Fraction
    marks: Fraction
    rollups: Fraction
    shards: Fraction
    busy: Fraction
    #: Names that no process remembers any more, written again.
    names: Fraction


class _Units:
    """Units of one kind a second, by cause, and the steps of their computation."""

    def __init__(self, part: str) -> None:
        self.steps: list[Step] = []
        self.by_cause: dict[str, Fraction] = {}
        self._part = part

    def add(self, cause: str, *terms: tuple[Fraction, Fraction | int]) -> None:
        """Add a cause: the sum of a rate and its units, for each of *terms* that is not 0."""
        some = [(rate, each) for rate, each in terms if rate]
        if not some:
            return
        units = sum((rate * each for rate, each in some), Fraction(0))
        shown = " + ".join(f"{format_number(rate)}/s * {format_number(n)}" for rate, n in some)
        self.by_cause[cause] = units
        self.steps.append(Step(cause, shown, f"{format_number(units)}/s", self._part))

    @property
    def per_s(self) -> Fraction:
        return sum(self.by_cause.values(), Fraction(0))

    @property
    def of_events(self) -> Fraction:
        """The units a second of tables of events."""
        return sum((self.by_cause.get(each, Fraction(0)) for each in _OF_EVENTS), Fraction(0))

    def closed(self) -> tuple[Step, ...]:
        """Return all steps, with the sums."""
        day = self.per_s * _DAY_S
        return (
            *self.steps,
            Step(
                "a day", f"{format_number(self.per_s)}/s * 86,400 s", format_number(day), self._part
            ),
            Step(
                "a month",
                f"{format_number(day)} * 30",
                format_number(day * _MONTH_DAYS),
                self._part,
            ),
            Step("in all", "", f"{format_number(self.per_s)}/s", self._part),
        )


@dataclass(frozen=True, slots=True)
class _Limit:
    """One of DynamoDB's limits, what uses it, and what to change."""

    what: str
    used: Fraction
    most: int
    fix: str

    @property
    def share(self) -> Fraction:
        return self.used / self.most


def plan_dynamodb(need: DynamodbNeed, rates: Rates = MEASURED) -> DynamodbPlan:
    """Compute the units that *need* takes. Raises PlanError past a bound."""
    _check(need)
    api = PartSum("API processes", need.load, PROCESSES_MIN)
    api.add("adds", need.adds_per_s + need.atomic_adds_per_s, rates.api_adds.per_s)
    gets_per_s = need.gets_per_s + need.uncached_per_s + need.accurate_per_s
    api.add("gets", gets_per_s, rates.api_gets.per_s)
    processes = api.whole()
    if need.processes is not None:
        processes = need.processes
        api.show("given", "", f"{processes:,}")
    names = need.counters * _units(NAME_BYTES + need.name_bytes)
    names_step = Step("names", "one of each counter", f"{names:,}", "Write units of a new process")
    work, work_steps = _work(need, processes)
    writes, reads = _writes(need, work, processes), _reads(need, work, processes)
    stored, stored_steps = _stored(need, work)
    found = _limits(need, work, writes, reads)
    price, price_steps = _price(need, writes, reads, stored)
    return DynamodbPlan(
        api_processes=processes,
        write_units_per_s=float(writes.per_s),
        read_units_per_s=float(reads.per_s),
        write_units={cause: float(each) for cause, each in writes.by_cause.items()},
        read_units={cause: float(each) for cause, each in reads.by_cause.items()},
        write_units_at_start=names,
        stored_bytes=ceil(stored),
        limits_used={each.what: float(each.share) for each in found},
        price_of_a_month=None if price is None else float(price),
        warnings=tuple(_warnings(need, work, writes, found)),
        steps=(
            *(
                *api.steps,
                *work_steps,
                *writes.closed(),
                names_step,
                *reads.closed(),
                *stored_steps,
            ),
            *(*_limit_steps(found), *price_steps),
        ),
    )


def _work(need: DynamodbNeed, processes: int) -> tuple[_Work, tuple[Step, ...]]:
    """Return what happens in a second, at most, and the steps."""
    window_us = need.settings.rollup_window_us
    window_s = Fraction(window_us, limits.SECOND)
    events = need.adds_per_s + need.atomic_adds_per_s * need.atomic_items
    dirty = min(events * window_s, Fraction(_dirty(need)))
    first = min(events * window_s, dirty * processes)
    here = min(events * window_s / processes, dirty)
    # Of those that are not the first in a process, some are of counters that it has forgotten.
    again = (events * window_s - first) * _forgotten(_MARKS_KNOWN, here)
    marks = (first + again) / window_s
    work = _Work(
        events,
        marks,
        dirty / window_s,
        need.settings.shards / window_s,
        min(dirty, Fraction(need.settings.shards)) / window_s,
        marks * _forgotten(_NAMES_KNOWN, Fraction(need.counters)),
    )
    each, window = f"{format_number(events)}/s", format_duration(window_us)
    dirty_shown = f"min({each} * {window}, {_dirty(need):,} counters)"
    part = "A window"
    return work, (
        Step("counters with adds", dirty_shown, format_number(dirty), part),
        Step(
            "marks, each process its own",
            f"min({each} * {window}, {format_number(dirty)} * {processes:,})"
            + (f" + {format_number(again)} forgotten" if again else ""),
            format_number(first + again),
            part,
        ),
        Step("length", "", window, part),
    )


def _forgotten(known: int, used: Fraction) -> Fraction:
    """Return the share of *used* that are forgotten, evenly, by a process that remembers *known*;
    the oldest goes first."""
    return 1 - known / used if used > known else Fraction(0)


def _dirty(need: DynamodbNeed) -> int:
    return need.counters if need.dirty is None else min(need.dirty, need.counters)


def _units(size_bytes: int, of_bytes: int = _WRITE_BYTES) -> int:
    return max(1, ceil(Fraction(size_bytes, of_bytes)))


def _watermarks(need: DynamodbNeed) -> int:
    """Return the units of a read of all watermarks."""
    return _units(need.settings.shards * WATERMARK_BYTES, _READ_BYTES)


def _writes(need: DynamodbNeed, work: _Work, processes: int) -> _Units:
    """Return the write units by cause."""
    name, items = need.name_bytes, need.atomic_items
    event, mark = _units(EVENT_BYTES + name), _units(MARK_BYTES + name)
    atomic_mark = _units(_ATOMIC_MARK_BYTES + items * (_ATOMIC_ITEM_BYTES + name))
    head, row = _units(HEAD_BYTES + name), _units(ROW_BYTES + name)
    shards = min(items, need.settings.shards)
    units = _Units("Write units")
    units.add("events", (need.adds_per_s, event))
    units.add("atomic adds", (need.atomic_adds_per_s, _TRANSACTED * items * event))
    units.add("marks of atomic adds", (need.atomic_adds_per_s, shards * atomic_mark))
    units.add("their deletion", (need.atomic_adds_per_s, shards * atomic_mark))
    units.add("marks", (work.marks, mark))
    units.add("deletion of marks", (work.rollups, mark))
    units.add("rollups: head and row", (work.rollups, head + row))
    units.add("deletion of rows", (work.rollups, row))
    units.add("names, again", (work.names, _units(NAME_BYTES + name)))
    units.add("watermarks", (work.shards, 1))
    units.add("leases", (Fraction(processes), _LEASES_PER_S))
    return units


def _reads(need: DynamodbNeed, work: _Work, processes: int) -> _Units:
    """Return the read units by cause, at most: a query counts its size, and a unit for its end."""
    dataset, name = need.dataset, need.name_bytes
    event = Fraction(EVENT_BYTES + name, _READ_BYTES)
    mark = Fraction(MARK_BYTES + name, _READ_BYTES)
    row = Fraction(ROW_BYTES + name, _READ_BYTES)
    watermarks = _watermarks(need)
    # A read of the tail reaches to the latest event that may be acknowledged by now.
    lag_us = need.settings.rollup_window_us + need.settings.accept_limit_us + closing_lag(dataset)
    slices = 1 + Fraction(limits.FUTURE_LIMIT_MAX_US + lag_us, dataset.slice_us)
    tail = work.events / need.counters * Fraction(lag_us, limits.SECOND)
    slice_s = Fraction(dataset.slice_us, limits.SECOND)
    settled = min(Fraction(_dirty(need)), work.events * slice_s) / slice_s
    kept = Fraction(dataset.retention_us, dataset.slice_us) + 2
    units = _Units("Read units")
    units.add("rollups: heads", (work.rollups, 1))
    units.add("rollups: events", (work.rollups, dataset.event_buckets), (work.events, event))
    units.add("rollups: marks, twice", (work.busy, 2), (work.rollups, 2 * mark))
    units.add("rollups: shards", (work.shards, _SHARD_READS), (work.busy, _BUSY_READS + watermarks))
    units.add("rollups: atomic adds", (need.atomic_adds_per_s, need.atomic_items + 1))
    units.add("dropped slices: rows", (settled, _SETTLING_READS), (work.rollups, kept * row))
    units.add("gets, not cached", (need.uncached_per_s, watermarks + 1))
    units.add("accurate gets: counts", (need.accurate_per_s, watermarks + 1))
    tails = dataset.event_buckets * slices + tail * event
    units.add("accurate gets: tails", (need.accurate_per_s, tails))
    units.add("polling", (Fraction(processes), _POLLS_PER_S), (Fraction(1), _MAINTENANCE_PER_S))
    return units


def _stored(need: DynamodbNeed, work: _Work) -> tuple[Fraction, tuple[Step, ...]]:
    """Return the bytes that are stored once retention is over for the first time, and the steps."""
    dataset, name = need.dataset, need.name_bytes + _STORED_BYTES
    kept_s = Fraction(dataset.retention_us + dataset.slice_us, limits.SECOND)
    kept = f"({format_duration(dataset.retention_us)} + {format_duration(dataset.slice_us)})"
    steps, total = [], Fraction(0)
    for what, per_s, each in (
        ("events", work.events, EVENT_BYTES + name),
        ("window rows", work.rollups, ROW_BYTES + name),
    ):
        size = per_s * kept_s * each
        total += size
        arithmetic = f"{format_number(per_s)}/s * {kept} * {each} B"
        steps.append(Step(what, arithmetic, format_bytes(size), "Storage"))
    for what, each in (("heads", HEAD_BYTES + name), ("names", NAME_BYTES + name)):
        size = Fraction(need.counters * each)
        total += size
        arithmetic = f"{need.counters:,} * {each} B"
        steps.append(Step(what, arithmetic, format_bytes(size), "Storage"))
    return total, (*steps, Step("in all", "", format_bytes(total), "Storage"))


def _limits(need: DynamodbNeed, work: _Work, writes: _Units, reads: _Units) -> tuple[_Limit, ...]:
    """Return how much of DynamoDB's limits is used."""
    shards, buckets = need.settings.shards, need.dataset.event_buckets
    hottest = work.events / need.counters if need.hottest_per_s is None else need.hottest_per_s
    buckets_least = ceil(hottest / _PARTITION_WRITES)
    readers = need.uncached_per_s + need.accurate_per_s + work.busy
    raised = f"have AWS raise the account's quota, or {_MERGE}"
    spread = (
        f"set event_buckets to at least {buckets_least:,}"
        if buckets_least <= EVENT_BUCKETS_MAX
        else "give the counter several names"
    )
    return (
        _Limit(
            "an event bucket of the busiest counter",
            *(hottest / buckets, _PARTITION_WRITES),
            f"{spread}, or {_MERGE}",
        ),
        _Limit(
            "marks of a shard, and their deletion",
            *((work.marks + work.rollups) / shards, _PARTITION_WRITES),
            f"create the namespace with more shards, lengthen rollup_window, or {_MERGE}",
        ),
        _Limit(
            "reads of a namespace's watermarks",
            *(readers * _watermarks(need), _PARTITION_READS),
            "let the cache answer more gets (max_staleness), or divide the counters among"
            " namespaces",
        ),
        _Limit(
            "writes of a new table of events, on demand",
            *(writes.of_events, _NEW_WRITES),
            f"set dynamodb_write_units, warm each table before its slice begins, or {_MERGE}",
        ),
        _Limit("writes of a table of events", writes.of_events, _TABLE_UNITS, raised),
        _Limit(
            "writes of the dataset's table", writes.per_s - writes.of_events, _TABLE_UNITS, raised
        ),
        _Limit("reads of a table of events", reads.of_events, _TABLE_UNITS, raised),
        _Limit("reads of the dataset's table", reads.per_s - reads.of_events, _TABLE_UNITS, raised),
    )


def _price(
    need: DynamodbNeed, writes: _Units, reads: _Units, stored: Fraction
) -> tuple[Fraction | None, tuple[Step, ...]]:
    """Return the price of a month of what the caller gave prices for, and the steps."""
    total, steps = None, []
    month_s = _DAY_S * _MONTH_DAYS
    for what, price, amount, unit in (
        ("write units", need.write_price, writes.per_s * month_s / 10**6, "million"),
        ("read units", need.read_price, reads.per_s * month_s / 10**6, "million"),
        ("storage", need.storage_price, stored / 10**9, "GB"),
    ):
        if price is not None:
            total = (total or Fraction(0)) + amount * price
            arithmetic = f"{format_number(amount)} {unit} * {format_number(price)}"
            steps.append(
                Step(what, arithmetic, f"{float(amount * price):,.2f}", "Price of a month")
            )
    if total is not None:
        steps.append(Step("in all", "", f"{float(total):,.2f}", "Price of a month"))
    return total, tuple(steps)


def _limit_steps(found: Sequence[_Limit]) -> Iterator[Step]:
    for each in found:
        shown = f"{format_number(each.used)}/s of {each.most:,}/s"
        yield Step(each.what, shown, format_share(each.share), "Limits")
    first = max(found, key=lambda each: each.share)
    times = f"at {format_number(1 / first.share)} times the load" if first.share else "none"
    yield Step("breaks first", first.what, times, "Limits")


def _warnings(
    need: DynamodbNeed, work: _Work, writes: _Units, found: Sequence[_Limit]
) -> Iterator[str]:
    """Yield the limits that the load breaks, and what makes most of the units, each with a fix."""
    for each in found:
        if each.share > 1:
            yield (
                f"{each.what}: {format_number(each.used)} units a second, and DynamoDB allows"
                f" {each.most:,}; {each.fix}"
            )
    if writes.per_s > 2 * work.events > 0:
        shorter = fewer_rollups(work.events, _dirty(need), need.settings)
        yield (
            f"an event takes {format_number(writes.per_s / work.events)} write units, because"
            f" {format_number(work.rollups)} counters a second are rolled up for"
            f" {format_number(work.events)} events: {shorter}; or {_MERGE}"
        )
    if need.hottest_per_s is None:
        yield "all counters are taken to be alike: give the busiest one's adds with --hottest"


def _check(need: DynamodbNeed) -> None:
    for name in ("adds", "gets", "uncached", "accurate", "atomic_adds", "hottest"):
        per_s = getattr(need, f"{name}_per_s")
        hold_number(name, per_s or Fraction(0), 0, RATE_MAX_PER_S, "/s")
    hold_number("counters", need.counters, 1, NUMBER_MAX)
    hold_number("dirty", _dirty(need), 1, NUMBER_MAX)
    hold_number("atomic_items", need.atomic_items, 1, limits.ATOMIC_ITEMS_MAX)
    hold_number("name_size", need.name_bytes, 1, 4 * limits.COUNTER_NAME_CHARS_MAX, " B")
    processes = 1 if need.processes is None else need.processes
    hold_number("processes", processes, 1, _PROCESSES_MAX)
    check_storage(need.dataset, need.settings)
    check_shares(need.load)
