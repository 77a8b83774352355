"""The Cassandra adapter over a simulated cluster."""

from unittest.mock import patch

from counter.limits import MILLISECOND
from counter.ports import Clock
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.schema import apply
from counter.storage.cassandra.store import CassandraStore
from counter.types import ClockReading, Dataset
from tests.simulation.cluster import Cluster
from tests.simulation.connection import SimulatedConnection

#: The simulated servers of a run.
Servers = Cluster


def options_for(*datasets: Dataset, placement: Placement | None = None) -> CassandraOptions:
    """Options that name *datasets*."""
    return CassandraOptions(
        contact_points=[("simulated", 9042)],
        datasets=[(each, placement or Placement()) for each in datasets],
    )


async def have_schema(cluster: Cluster, options: CassandraOptions, *_: Dataset) -> None:
    """Apply the schema as ``counter schema apply`` does."""
    connection = SimulatedConnection(options, cluster)
    await connection.open()
    await apply(connection, options)
    await connection.close()


class SimulatedStore(CassandraStore):
    """The store as it is, connected to the simulated cluster."""

    def __init__(self, options: CassandraOptions, clock: Clock, cluster: Cluster) -> None:
        # Whatever takes hold of the connection takes hold of this one.
        self.simulated = SimulatedConnection(options, cluster)
        with patch(
            "counter.storage.cassandra.session.CassandraConnection", lambda _: self.simulated
        ):
            super().__init__(options, clock)
        self.control.read_clock = self.read_clock

    async def read_clock(self) -> ClockReading:
        """The clock of the node that is the farthest off, as the adapter computes it."""
        before_us = self.session.clock.now_us()
        nodes_us = await self.simulated.node_clocks()
        after_us = self.session.clock.now_us()
        middle_us = (before_us + after_us) // 2 - MILLISECOND // 2
        offset_us = max((node_us - middle_us for node_us in nodes_us), key=abs)
        return ClockReading(offset_us, (after_us - before_us + MILLISECOND) // 2 + 1)
