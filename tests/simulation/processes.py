"""Processes over a simulated cluster whose messages take no time and whose replicas may be deaf."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from counter.storage.cassandra.options import Placement
from counter.testing.cases import DATASET, FIRST_SLICE, NOW, SETTINGS, SLICE, SLICES_END, slice_at
from counter.testing.clock import FakeClock
from counter.types import Namespace, PayloadCheck
from tests.simulation.cluster import Cluster
from tests.simulation.store import SimulatedStore, have_schema, options_for
from tests.simulation.weather import CENTERS, Weather


class Processes:
    """Makes them; each has a store of its own, and all have the same clock."""

    def __init__(
        self, centers: Sequence[int] = (0, 0, 0), placement: Placement | None = None
    ) -> None:
        self.clock = FakeClock(NOW)
        weather = Weather(Random(1), delay_us=0)
        self.cluster = Cluster(self._at, self.clock.now_us, weather, centers)
        self._options = options_for(DATASET, placement=placement)

    def _at(self, _: int, call: Any, *args: Any) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    async def another(self, center: int = 0) -> SimulatedStore:
        """One more, in a data center, with the slices of the contracts' setting."""
        await have_schema(self.cluster, self._options)
        options = replace(self._options, local_datacenter=CENTERS[center])
        made = SimulatedStore(options, self.clock, self.cluster)
        await made.open()
        (dataset,) = await made.control.datasets()
        for start_us in range(FIRST_SLICE, SLICES_END, SLICE):
            await made.control.make_slices(dataset, slice_at(start_us))
        return made

    @contextmanager
    def heard_by(self, *numbers: int) -> Iterator[None]:
        """Within the block, only the replicas of these *numbers* accept writes."""
        with ExitStack() as stack:
            for node in self.cluster.nodes:
                if node.number not in numbers:
                    stack.enter_context(patch.object(node, "apply", lambda _: None))
            yield


async def plain_namespace(store: SimulatedStore) -> Namespace:
    """One that writes events without a compare-and-set."""
    settings = replace(SETTINGS, payload_check=PayloadCheck.OFF)
    namespace = await store.control.create_namespace("tests", settings, NOW)
    assert namespace is not None
    return namespace
