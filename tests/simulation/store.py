"""The Cassandra adapter over a simulated cluster."""

from counter.ports import Clock
from counter.storage.cassandra import CassandraOptions, CassandraStore
from counter.storage.cassandra.ground import ControlKeyspace
from counter.storage.cassandra.schema import apply
from counter.storage.cassandra.sequences import Sequences
from counter.types import Dataset, Placement
from tests.simulation.cluster import Cluster
from tests.simulation.connection import SimulatedConnection


def options_for(*datasets: Dataset) -> CassandraOptions:
    """Options that name *datasets*."""
    return CassandraOptions(
        contact_points=[("simulated", 9042)], datasets=[(each, Placement()) for each in datasets]
    )


async def have_schema(cluster: Cluster, options: CassandraOptions) -> None:
    """Apply the schema as ``counter schema apply`` does."""
    connection = SimulatedConnection(options, cluster)
    await connection.open()
    await apply(connection, options)
    await connection.close()


class SimulatedStore(CassandraStore):
    """The store as it is, connected to the simulated cluster."""

    def __init__(self, options: CassandraOptions, clock: Clock, cluster: Cluster) -> None:
        super().__init__(options, clock)
        self._connection = SimulatedConnection(options, cluster)
        self._control = ControlKeyspace(self._connection, options.keyspace)
        self._sequences = Sequences(self._control)
