"""An accurate read asks for the partitions that an event may lie in by now, and for few others."""

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from counter.config.namespace_rules import check_settings
from counter.config.settings import Settings
from counter.core.clock_guard import ClockGuard
from counter.core.service import CounterService
from counter.errors import InvalidBodyError, TokenInFutureError
from counter.limits import DAY, FUTURE_LIMIT_MAX_US, MILLISECOND, SECOND
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.clock import FakeClock
from counter.types import ClockReading, Slice, Token
from tests.simulation.cluster import Cluster
from tests.simulation.store import SimulatedStore, have_schema, options_for
from tests.simulation.weather import Weather
from tests.support.times import START_US

COUNTERS = [f"c{n}" for n in range(100)]
#: The defaults of a cluster: slices of a day, partitions of an hour, 500 ms of skew.
CONFIGURED = Settings(store="cassandra")
USUAL = CONFIGURED.default_namespace()
OPTIONS = options_for(*CONFIGURED.datasets())
SLICE_US = CONFIGURED.slice
#: As far off as a clock may be: an error of a millisecond is subtracted.
OFF_US = CONFIGURED.clock_skew_max - MILLISECOND


class Process(SimulatedStore):
    """One process of the service: its store, and how many partitions each sum asked for."""

    service: CounterService

    def __init__(self, cluster: Cluster, true: FakeClock, offset_us: int) -> None:
        super().__init__(OPTIONS, FakeClock(true.now_us() + offset_us), cluster)
        self._offset_us = offset_us
        self.asked: list[int] = []
        execute = self.simulated._execute

        def noted(timeout_us: int | None, statement: Any, *more: Any, **named: Any) -> Any:
            prepared = getattr(statement, "prepared_statement", None)
            if prepared is not None and "PER PARTITION LIMIT 50" in prepared.query_string:
                _, counters, times, buckets, *_ = statement.values
                self.asked.append(len(counters) * len(times) * len(buckets))
            return execute(timeout_us, statement, *more, **named)

        self.simulated._execute = noted  # type: ignore[method-assign]

    async def begin(self) -> None:
        """Start the service."""
        await self.open()
        clock = self.session.clock
        guard = ClockGuard(self.control, clock)
        await guard.measure()
        self.service = CounterService(self, MemoryCache(clock), clock, guard)
        await self.service.namespaces.refresh()

    async def read_clock(self) -> ClockReading:
        return ClockReading(-self._offset_us, MILLISECOND)

    def now_us(self) -> int:
        return self.session.clock.now_us()

    async def count(self, name: str = "c") -> int:
        """An accurate read."""
        namespace = self.service.namespaces.get("one")
        (found,) = await self.service.reader.read(namespace, [name], 0)
        return found.count


class World:
    """Processes over one cluster."""

    def __init__(self) -> None:
        self.true = FakeClock(START_US)
        self._cluster = Cluster(self._at, self.true.now_us, Weather(Random(1), delay_us=0))

    def _at(self, _: int, call: Any, *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    async def process(self, offset_us: int = 0) -> Process:
        """A process with a clock *offset_us* ahead of the true one."""
        await have_schema(self._cluster, OPTIONS)
        made = Process(self._cluster, self.true, offset_us)
        await made.begin()
        return made

    async def begin(self, offset_us: int = 0, future_limit_us: int = 5 * SECOND) -> Process:
        """A process, its namespace, and slices as maintenance makes them: two ahead."""
        made = await self.process(offset_us)
        (dataset,) = await made.control.datasets()
        first_us = START_US - START_US % SLICE_US - SLICE_US
        for start_us in range(first_us, first_us + 4 * SLICE_US, SLICE_US):
            parts = (dataset.time_bucket_us, dataset.event_buckets)
            await made.control.make_slices(dataset, Slice(start_us, start_us + SLICE_US, *parts))
        settings = replace(USUAL, future_limit_us=future_limit_us)
        await made.service.namespaces.create("one", settings)
        return made


@pytest.fixture
def world() -> World:
    return World()


def token(time_us: int) -> Token:
    return Token(b"n" * 16, time_us)


async def test_an_accurate_read_asks_for_the_partitions_of_now_and_not_for_days_to_come(
    world: World,
) -> None:
    """Those of this hour and the last one; without a sure clock, all of them."""
    one, lost = await world.begin(), await world.process(-SECOND)
    namespace = one.service.namespaces.get("one")
    for process in (one, lost):
        await process.service.reader.read(namespace, COUNTERS, 0)
    assert (sum(one.asked), len(one.asked)) == (2 * len(COUNTERS), 4)
    assert sum(lost.asked) == 61 * len(COUNTERS)


@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not yet heard"])
async def test_a_slow_reader_sees_adds_of_a_fast_clock(world: World, heard: bool) -> None:
    """Also if the reader does not know yet that the namespace allows so much."""
    fast = await world.begin(OFF_US, FUTURE_LIMIT_MAX_US if heard else 5 * SECOND)
    slow = await world.process(-OFF_US)
    namespace = fast.service.namespaces.get("one")
    wide = replace(namespace.settings, future_limit_us=FUTURE_LIMIT_MAX_US)
    if not heard:
        namespace = await fast.service.namespaces.update(namespace, wide)
    latest_us = fast.now_us() + FUTURE_LIMIT_MAX_US
    await fast.service.add(namespace, "c", 7, token(latest_us))
    with pytest.raises(TokenInFutureError):
        await fast.service.add(namespace, "c", 1, token(latest_us + 1))
    assert [await each.count() for each in (fast, slow)] == [7, 7]
    narrow = await fast.service.namespaces.update(
        namespace, replace(wide, future_limit_us=5 * SECOND)
    )
    assert (await fast.service.reader.read(narrow, ["c"], 0))[0].count == 7


@pytest.mark.parametrize("days", [-9, -1, 1])
async def test_a_reader_with_a_wrong_clock_sees_every_add(world: World, days: int) -> None:
    """It takes no writes; its reads hold every add that was acknowledged before they began."""
    right, wrong = await world.begin(), await world.process(days * DAY)
    await right.service.add(right.service.namespaces.get("one"), "c", 7, token(right.now_us()))
    assert await wrong.count() == 7


def test_no_namespace_allows_more_than_reads_look_for() -> None:
    settings = replace(USUAL, future_limit_us=FUTURE_LIMIT_MAX_US + 1)
    with pytest.raises(InvalidBodyError, match=r"future_limit is .* to 10m"):
        check_settings(settings, CONFIGURED.dataset())
