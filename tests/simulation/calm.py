"""The simulated cluster in fair weather, on any loop: for tests that bring their own trouble."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from counter.testing.clock import FakeClock
from counter.types import ClockReading, Dataset
from tests.simulation.cluster import Cluster
from tests.simulation.store import SimulatedStore, have_schema, options_for
from tests.simulation.weather import Weather


class CalmStore(SimulatedStore):
    """A store that finds its schema applied."""

    def __init__(self, dataset: Dataset, clock: FakeClock, cluster: Cluster) -> None:
        super().__init__(options_for(dataset), clock, cluster)
        self._dataset, self._cluster = dataset, cluster

    async def open(self) -> None:
        await have_schema(self._cluster, options_for(self._dataset))
        await super().open()

    async def read_clock(self) -> ClockReading:
        """The cluster's clock is the process's own."""
        return ClockReading(0, 0)


def stores_of(dataset: Dataset, clock: FakeClock) -> Callable[[], CalmStore]:
    """A factory of stores over the same three replicas, which lose nothing."""

    def at(_: int, call: Any, *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    cluster = Cluster(at, clock.now_us, Weather(Random(1), delay_us=0))
    return lambda: CalmStore(dataset, clock, cluster)
