"""The Cassandra adapter over a simulated cluster."""

from collections.abc import Mapping
from random import Random
from unittest.mock import patch

from counter.limits import MILLISECOND
from counter.ports import Clock
from counter.storage.cassandra import event_reads
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.schema import apply
from counter.storage.cassandra.store import CassandraStore
from counter.types import ClockReading, Dataset
from tests.simulation.cluster import Cluster
from tests.simulation.connection import SimulatedConnection
from tests.simulation.observed import Recorder
from tests.simulation.plan import Config
from tests.simulation.weather import CENTERS

#: The simulated servers of a run, and what records their writes.
Servers = Cluster
recorder = Recorder
#: The bounds of pages and batches.
_PAGES = (
    "counter.storage.cassandra.rollups._WINDOWS_MAX",
    "counter.storage.cassandra.rollups._READ_TOGETHER",
    "counter.storage.cassandra.rollups._WRITTEN_TOGETHER",
    "counter.storage.cassandra.rollups._ROWS_TOGETHER",
    "counter.storage.cassandra.rollups._DROPPED_AT_ONCE",
    "counter.storage.cassandra.event_reads.PARTITIONS_MAX",
    "counter.storage.cassandra.event_reads.ROWS_MAX",
    "counter.storage.cassandra.event_reads.WINDOW_ROWS_MAX",
    "counter.storage.cassandra.events.PARTITIONS_MAX",
    "counter.storage.cassandra.events._ROWS_MAX",
    "counter.storage.cassandra.session._BATCH_ROWS_MAX",
    "counter.storage.cassandra.session._PARTITIONS_MAX",
    "counter.storage.cassandra.session._ROWS_MAX",
    "counter.storage.cassandra.connection._GROUP",
)


def options_for(*datasets: Dataset, placement: Placement | None = None) -> CassandraOptions:
    """Options that name *datasets*."""
    return CassandraOptions(
        contact_points=[("simulated", 9042)],
        datasets=[(each, placement or Placement()) for each in datasets],
    )


def options_of(config: Config, dataset: Dataset) -> CassandraOptions:
    """Return the options of a run."""
    placement = Placement()
    if config.levels:
        # Processes that are all in one data center may be at LOCAL_QUORUM.
        placement = Placement((("", 1),), *config.levels, "" if any(config.homes) else CENTERS[0])
    return options_for(dataset, placement=placement)


def patches_of(config: Config) -> Mapping[str, object]:
    """Return, by name, what replaces bounds and random numbers of the adapter in a run."""
    seed, here = config.seed, "counter.storage.cassandra"
    found: dict[str, object] = {
        f"{here}.connection.random": Random(f"pauses {seed}"),
        f"{here}.rollups.random": Random(f"stamps {seed}"),
        f"{here}.control_keyspace.random": Random(f"turns {seed}"),
        f"{here}.events.random": Random(f"strict {seed}"),
        # The work of every process in every second would be most of the run.
        f"{here}.rollups._LEFT_BEHIND": 3,
    }
    if config.page:
        few = event_reads._FEW.replace(f"LIMIT {event_reads.ROWS_MAX}", f"LIMIT {config.page}")
        found |= {**dict.fromkeys(_PAGES, config.page), f"{here}.event_reads._FEW": few}
    return found


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
