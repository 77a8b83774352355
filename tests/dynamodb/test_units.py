"""The units of docs/how-to/choose-a-store.md are what Amazon's local engine reports of the adapter.

Reads are bounds: a query's last unit is rarely full, and the page counts it in full.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from counter.core.clock_guard import ClockGuard
from counter.core.service import CounterService
from counter.limits import DAY, HOUR, LEASE_READ_EVERY_US, SECOND
from counter.security.keys import KeyRing
from counter.storage.dynamodb.control import DynamodbControl
from counter.storage.dynamodb.driver import DynamodbOptions
from counter.storage.dynamodb.store import DynamodbStore
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing import cases
from counter.testing.cases import NOW, WINDOW, nonce
from counter.testing.clock import FakeClock
from counter.types import CounterType, Namespace, PayloadCheck, Token
from rollup.leases import Leases
from rollup.worker import RollupWorker
from tests.support.dynamodb import ClockedStore, FreshStore

DATASET = replace(
    cases.DATASET,
    retention_us=DAY,
    slice_us=12 * HOUR,
    write_timeout_us=2 * SECOND,
    clock_skew_max_us=1_500_000,
)
SETTINGS = replace(
    cases.SETTINGS,
    counter_type=CounterType.EVENTUAL,
    payload_check=PayloadCheck.OFF,
    accept_limit_us=5 * SECOND,
    key_ttl_us=HOUR,
    shards=4,
)
#: Until all windows of now are closed, and one more.
CLOSING = 30 * SECOND
#: The share of the reads that the page computes that must be consumed.
LEAST = 0.8
#: Bytes of an item without the counter's name: names of attributes, keys and values.
SIZES = {"event": 55, "m": 61, "cq": 32, "cr": 40, "n": 29}
WATERMARK_BYTES = 34
PAGE_BYTES = 4_096
READS = ("Query", "GetItem", "BatchGetItem")


@dataclass
class Units:
    """Units of one kind of call since the last look."""

    writes: float = 0
    reads: float = 0


class Meter:
    """Sums the units that the responses of the stores' calls report."""

    def __init__(self, *stores: DynamodbStore) -> None:
        self._units = Units()
        for each in stores:
            hooks = each.driver._client.meta.events
            hooks.register("provide-client-params.dynamodb.*", self._ask)
            hooks.register("after-call.dynamodb.*", self._note)

    def _ask(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        if "ReturnConsumedCapacity" in model.input_shape.members:
            params["ReturnConsumedCapacity"] = "TOTAL"

    def _note(self, parsed: Mapping[str, Any], model: Any, **_: Any) -> None:
        consumed = parsed.get("ConsumedCapacity", ())
        if parsed.get("Error", {}).get("Code") == "ConditionalCheckFailedException":
            # It consumes the units of the write, and the response does not report them.
            self._units.writes += 1
        for each in [consumed] if isinstance(consumed, Mapping) else consumed:
            units = each["CapacityUnits"]
            if model.name not in READS:
                self._units.writes += units
            elif model.name == "Query":
                # The engine reports 0 for one that finds nothing; DynamoDB takes a unit.
                self._units.reads += max(units, 1.0)
            else:
                self._units.reads += units

    def taken(self) -> Units:
        """The units since the last call."""
        units, self._units = self._units, Units()
        return units


class Process:
    """An API process that rolls up too, with a cache of its own."""

    def __init__(self, store: DynamodbStore, clock: FakeClock) -> None:
        cache = MemoryCache(clock)
        self.guard = ClockGuard(store.control, clock)
        self.api = CounterService(store, cache, clock, self.guard)
        self.worker = RollupWorker(store, cache, clock, self.api.namespaces, guard=self.guard)

    async def begin(self) -> None:
        await self.guard.measure()
        await self.api.namespaces.refresh()


class Site:
    """Two processes over a namespace, which know its slices, and have passed its first windows."""

    def __init__(self, store: DynamodbStore, other: DynamodbStore, clock: FakeClock) -> None:
        self.store, self.other, self.clock = store, other, clock
        self.meter = Meter(store, other)
        self.processes = [Process(store, clock), Process(other, clock)]
        self._numbers = iter(range(1, 10**6))

    async def begin(self, **settings: Any) -> Namespace:
        for each in self.processes:
            await each.begin()
        await self.processes[0].worker.maintenance.run_once()
        api = self.processes[0].api
        self.namespace = await api.namespaces.create("n", replace(SETTINGS, **settings))
        await self.processes[1].begin()
        await self.other.control.slices(self.namespace.dataset)
        await self.rolled_up()
        return self.namespace

    def token(self) -> Token:
        return Token(nonce(next(self._numbers)), self.clock.now_us())

    async def refreshed(self) -> None:
        """Let each process read the namespaces and the clock, as it does all the time."""
        for each in self.processes:
            await each.begin()

    async def rolled_up(self) -> Units:
        """Close the windows, and roll them up; return the units without polling."""
        await self.refreshed()
        await self.processes[0].worker.tick()
        self.meter.taken()
        await self.processes[0].worker.tick()
        polled = self.meter.taken()
        self.clock.advance(CLOSING - self.clock.now_us() % WINDOW)
        await self.refreshed()
        self.meter.taken()
        await self.processes[0].worker.tick()
        taken = self.meter.taken()
        return Units(taken.writes - polled.writes, taken.reads - polled.reads)


@pytest.fixture
async def site(dynamodb: DynamodbOptions) -> AsyncIterator[Site]:
    clock = FakeClock(NOW)
    store, other = FreshStore(dynamodb, clock, [DATASET]), ClockedStore(dynamodb, clock)
    await store.open()
    await other.open()
    yield Site(store, other, clock)
    await other.close()
    await store.close()


def names(number: int) -> list[str]:
    return [f"video-{each:09d}" for each in range(number)]


def in_rollup(counters: int, events: int, shards: int = SETTINGS.shards) -> Units:
    """The units of a pass over all shards if each *counter* has adds, at most."""
    busy, name_bytes = min(counters, shards), len(names(1)[0])
    event, mark = ((SIZES[kind] + name_bytes) / PAGE_BYTES for kind in ("event", "m"))
    heads_and_events = counters * (1 + DATASET.event_buckets) + events * event
    marks_twice = 2 * busy + 2 * counters * mark
    # Of a shard with marks: `dropped_before`, atomic marks twice more, the watermarks.
    others = 2 * shards + 4 * busy
    # The deletion of the mark, the head and the row; each shard's watermark.
    return Units(3 * counters + shards, heads_and_events + marks_twice + others)


def agree(measured: float, most: float) -> None:
    assert LEAST * most <= measured <= most


@pytest.mark.parametrize(("counters", "adds_each"), [(40, 2), (12, 50)])
async def test_adds_and_their_rollup(site: Site, counters: int, adds_each: int) -> None:
    """Two processes share the adds of each counter: each leaves its mark, and lists the names."""
    await site.begin()
    site.meter.taken()
    for name in names(counters):
        for number in range(adds_each):
            api = site.processes[number % 2].api
            await api.add(site.namespace, name, 1, site.token())
    events, marks, listed = counters * adds_each, 2 * counters, 2 * counters
    assert site.meter.taken() == Units(events + marks + listed, 0)
    rolled, expected = await site.rolled_up(), in_rollup(counters, events)
    assert rolled.writes == expected.writes
    agree(rolled.reads, expected.reads)


async def test_atomic_adds_and_their_rollup(site: Site) -> None:
    """Twice an add for each item, and a mark in each shard; the rollup looks whether all exist."""
    await site.begin(shards=1)
    some = iter(names(20))
    site.meter.taken()
    for _ in range(10):
        items = [(next(some), 1), (next(some), 1)]
        await site.processes[0].api.add_atomic(site.namespace, items, site.token())
    transacted, atomic_marks, marks, listed = 2 * 20, 10, 20, 20
    assert site.meter.taken() == Units(transacted + atomic_marks + marks + listed, 0)
    rolled, expected = await site.rolled_up(), in_rollup(20, 20, shards=1)
    assert rolled.writes == expected.writes + atomic_marks
    agree(rolled.reads, expected.reads + 10 * (2 + 1))


async def test_gets(site: Site) -> None:
    """A cached count consumes nothing, another two units, an accurate one the tail too."""
    await site.begin()
    found = names(10)
    for name in found:
        await site.processes[0].api.add(site.namespace, name, 1, site.token())
    site.meter.taken()
    reader = site.processes[1].api.reader
    for name in found:
        await reader.read_one(site.namespace, name, None)
    assert site.meter.taken() == Units(0, 10 * 2)
    for name in found:
        await reader.read_one(site.namespace, name, None)
    assert site.meter.taken() == Units(0, 0)
    for name in found:
        assert (await reader.read_one(site.namespace, name, 0)).count == 1
    agree(site.meter.taken().reads, 10 * (2 + DATASET.event_buckets))


async def test_rows_of_a_dropped_slice(site: Site) -> None:
    """Each is deleted by the first rollup of its counter after that."""
    await site.begin()
    windows, worker = 6, site.processes[0].worker
    for _ in range(windows):
        await site.processes[0].api.add(site.namespace, "c", 1, site.token())
        await site.rolled_up()
    while not await site.store.control.dropped_before(DATASET):
        site.clock.advance(DATASET.slice_us)
        await site.refreshed()
        await worker.tick()
    while worker.maintenance.tally["dropped"] < 2:
        await worker.tick()
    await site.processes[0].api.add(site.namespace, "c", 1, site.token())
    rolled = await site.rolled_up()
    expected = in_rollup(1, 1)
    assert rolled.writes == expected.writes + windows
    # Heads and the ends of reading are read twice, and two queries end in a part of a unit.
    assert rolled.reads - expected.reads <= 6


async def test_polling(site: Site) -> None:
    """In two seconds of an idle process that maintains the slices."""
    await site.begin()
    site.processes.pop()
    process, clock = site.processes[0], site.clock
    leases = Leases(site.store.leases, clock, "worker", guard=process.guard)
    keys = KeyRing(site.store.keys, clock)
    await leases.update()
    site.meter.taken()
    await DynamodbControl.read_clock(site.store.control)
    for _ in range(2):
        await process.api.namespaces.refresh()
        await keys.refresh()
        await process.worker.maintenance.run_once()
    looks = 2 * SECOND // LEASE_READ_EVERY_US
    for _ in range(looks):
        await leases.update()
    # Each second namespaces, keys and a quarter of a unit of the clock; datasets, slices twice and
    # `dropped_before` in the process that maintains the slices.
    assert site.meter.taken() == Units(looks, looks + 2 * 2.25 + 2 * 4)


async def test_sizes_of_items(site: Site) -> None:
    """By DynamoDB's rule: the names of attributes and their values."""
    await site.begin()
    (name,) = names(1)
    for number in (1, -1_000_000):
        await site.processes[0].api.add(site.namespace, name, number, site.token())
    found = {kind: size async for kind, size in sizes(site)}
    await site.rolled_up()
    found |= {kind: size async for kind, size in sizes(site)}
    expected = {kind: size + len(name) for kind, size in SIZES.items()} | {"w": WATERMARK_BYTES}
    assert {kind: found[kind] for kind in expected} == pytest.approx(expected, abs=4)


async def sizes(site: Site) -> AsyncIterator[tuple[str, int]]:
    """The size of each item by its kind."""
    for table in await site.store.driver.tables():
        answer = await site.store.driver._client.scan(TableName=table)
        for item in answer["Items"]:
            kind, place = (item[each]["B"][:1].decode("latin-1") for each in ("pk", "sk"))
            if ".events." in table:
                kind = "event"
            elif kind == "c":
                kind += place
            yield kind, sum(len(each) + size_of(value) for each, value in item.items())


def size_of(value: Mapping[str, Any]) -> int:
    ((kind, content),) = value.items()
    if kind == "N":
        return (len(content) + 1) // 2 + 1
    return 1 if kind == "BOOL" else len(content)
