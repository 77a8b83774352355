"""What `counter plan dynamodb` computes is what Amazon's local engine reports of the adapter."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest

from counter.core.clock_guard import ClockGuard
from counter.core.service import CounterService
from counter.limits import DAY, HOUR, SECOND
from counter.ops import dynamodb_planner as planner
from counter.ops.dynamodb_planner import DynamodbNeed, DynamodbPlan, plan_dynamodb
from counter.security.keys import KeyRing
from counter.storage.dynamodb import DynamodbOptions, DynamodbStore
from counter.storage.dynamodb.control import DynamodbControl
from counter.storage.memory import MemoryCache
from counter.types import CounterType, Namespace, PayloadCheck, Token
from rollup.leases import Leases
from rollup.worker import RollupWorker
from tests.contracts import cases
from tests.contracts.cases import NOW, WINDOW, nonce
from tests.support.clock import FakeClock
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
#: Reads are planned at most: a query's last unit is rarely full. So much of them must be there.
LEAST = 0.8
READS = ("Query", "GetItem", "BatchGetItem")


@dataclass
class Units:
    """Units of one kind of call since the last look."""

    writes: float = 0
    reads: float = 0


class Meter:
    """Sums the units that the answers of the stores' calls report."""

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
            # It takes what the write would have taken, and the answer does not say so.
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
        """What was consumed since the last call."""
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
        """Close the windows, and roll them up; return what a pass took but for its polling."""
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


def planned(site: Site, counters: int, **changed: int) -> DynamodbPlan:
    """The plan of a load that lasts one window; *changed* are what happens in it."""
    window_s = Fraction(WINDOW, SECOND)
    need = DynamodbNeed(
        adds_per_s=Fraction(0),
        counters=counters,
        dataset=site.namespace.dataset,
        settings=site.namespace.settings,
        name_bytes=len(names(1)[0]),
        processes=len(site.processes),
    )
    rates: dict[str, Any] = {f"{name}_per_s": n / window_s for name, n in changed.items()}
    return plan_dynamodb(replace(need, **rates))


def in_window(units: Mapping[str, float], *causes: str) -> float:
    """The units of *causes* in a window."""
    return sum(units.get(cause, 0) for cause in causes) * WINDOW / SECOND


def agree(measured: float, most: float) -> None:
    assert LEAST * most <= measured <= most


@pytest.mark.parametrize(("counters", "adds_each"), [(40, 2), (12, 50)])
async def test_adds_and_their_rollup_take_what_is_planned(
    site: Site, counters: int, adds_each: int
) -> None:
    """Two processes share the adds of each counter: each leaves its mark, and lists the names."""
    await site.begin()
    plan = planned(site, counters, adds=counters * adds_each)
    site.meter.taken()
    for name in names(counters):
        for number in range(adds_each):
            api = site.processes[number % 2].api
            await api.add(site.namespace, name, 1, site.token())
    added = site.meter.taken()
    listed = len(site.processes) * plan.write_units_at_start
    assert added == Units(in_window(plan.write_units, "events", "marks") + listed, 0)
    rolled = await site.rolled_up()
    causes = ("deletion of marks", "rollups: head and row", "watermarks")
    assert rolled.writes == pytest.approx(in_window(plan.write_units, *causes))
    reads = [each for each in plan.read_units if each.startswith("rollups: ")]
    agree(rolled.reads, in_window(plan.read_units, *reads))


async def test_atomic_adds_take_what_is_planned(site: Site) -> None:
    """Twice an add for each item, and a mark in each shard; the rollup looks whether all exist."""
    await site.begin(shards=1)
    plan = planned(site, 20, atomic_adds=10)
    some = iter(names(20))
    site.meter.taken()
    for _ in range(10):
        items = [(next(some), 1), (next(some), 1)]
        await site.processes[0].api.add_atomic(site.namespace, items, site.token())
    added = in_window(plan.write_units, "atomic adds", "marks of atomic adds", "marks")
    assert site.meter.taken().writes == added + plan.write_units_at_start
    rolled = await site.rolled_up()
    causes = ("their deletion", "deletion of marks", "rollups: head and row", "watermarks")
    assert rolled.writes == pytest.approx(in_window(plan.write_units, *causes))
    reads = [each for each in plan.read_units if each.startswith("rollups: ")]
    agree(rolled.reads, in_window(plan.read_units, *reads))


async def test_gets_take_what_is_planned(site: Site) -> None:
    """Those that the cache answers take nothing, others two units, accurate ones the tail too."""
    await site.begin()
    found = names(10)
    plan = planned(site, 10, adds=10, uncached=10, accurate=10)
    for name in found:
        await site.processes[0].api.add(site.namespace, name, 1, site.token())
    site.meter.taken()
    reader = site.processes[1].api.reader
    for name in found:
        await reader.read_one(site.namespace, name, None)
    assert site.meter.taken() == Units(0, in_window(plan.read_units, "gets, not cached"))
    for name in found:
        await reader.read_one(site.namespace, name, None)
    assert site.meter.taken() == Units(0, 0)
    for name in found:
        assert (await reader.read_one(site.namespace, name, 0)).count == 1
    accurate = ("accurate gets: counts", "accurate gets: tails")
    agree(site.meter.taken().reads, in_window(plan.read_units, *accurate))


async def test_rows_of_a_dropped_slice_take_what_is_planned(site: Site) -> None:
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
    plan = planned(site, 1, adds=1)
    causes = ("deletion of marks", "rollups: head and row", "watermarks")
    each = in_window(plan.write_units, "deletion of rows")
    assert rolled.writes == pytest.approx(in_window(plan.write_units, *causes) + windows * each)
    reads = [each for each in plan.read_units if each.startswith("rollups: ")]
    settling = rolled.reads - in_window(plan.read_units, *reads)
    assert settling <= planner._SETTLING_READS


async def test_polling_takes_what_is_planned(site: Site) -> None:
    """In two seconds of an idle process that maintains the slices."""
    await site.begin()
    site.processes.pop()
    plan = planned(site, 1)
    process, clock = site.processes[0], site.clock
    leases = Leases(site.store.leases, clock, "worker", guard=process.guard)
    keys = KeyRing(site.store.keys, clock)
    await leases.turn()
    site.meter.taken()
    await DynamodbControl.read_clock(site.store.control)
    for _ in range(2):
        await process.api.namespaces.refresh()
        await keys.refresh()
        await process.worker.maintenance.run_once()
    for _ in range(4):
        await leases.turn()
    taken = site.meter.taken()
    assert taken == Units(2 * plan.write_units["leases"], 2 * plan.read_units["polling"])


async def test_items_have_the_planned_sizes(site: Site) -> None:
    """By DynamoDB's rule: the names of attributes and their values."""
    await site.begin()
    (name,) = names(1)
    for number in (1, -1_000_000):
        await site.processes[0].api.add(site.namespace, name, number, site.token())
    found = {kind: size async for kind, size in sizes(site)}
    await site.rolled_up()
    found |= {kind: size async for kind, size in sizes(site)}
    expected = {
        "event": planner.EVENT_BYTES + len(name),
        "m": planner.MARK_BYTES + len(name),
        "cq": planner.HEAD_BYTES + len(name),
        "cr": planner.ROW_BYTES + len(name),
        "n": planner.NAME_BYTES + len(name),
        "w": planner.WATERMARK_BYTES,
    }
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
