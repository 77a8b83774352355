"""Ways to a test's Cassandra: options for a keyspace of its own, a connection, an open store."""

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from counter.clock import SystemClock
from counter.limits import HOUR, MINUTE, SECOND
from counter.ports import Clock
from counter.storage.cassandra import CassandraOptions, CassandraStore
from counter.storage.cassandra.connection import Connection
from counter.storage.cassandra.schema import apply
from counter.types import Dataset, Placement
from scripts.cluster_nodes import Cluster

DATASET: Final = Dataset(
    id=1,
    name="default",
    retention_us=HOUR,
    slice_us=10 * MINUTE,
    time_bucket_us=2 * MINUTE,
    event_buckets=4,
    write_timeout_us=SECOND,
    clock_skew_max_us=0,
)


def options_for(cluster: Cluster, *, replicas: int = 1, keyspace: str = "") -> CassandraOptions:
    """How to reach *cluster*, and a keyspace that nobody else uses."""
    port = cluster.shape.cassandra_port
    return CassandraOptions(
        contact_points=[(host, port) for host in cluster.contact_points],
        keyspace=keyspace or f"t_{uuid.uuid4().hex[:12]}",
        datasets=[(DATASET, Placement((("", replicas),)))],
    )


def at(options: CassandraOptions, *addresses: tuple[str, int]) -> CassandraOptions:
    """The same by other addresses."""
    return replace(options, contact_points=addresses)


@asynccontextmanager
async def connected(options: CassandraOptions) -> AsyncIterator[Connection]:
    """An open connection."""
    connection = Connection(options)
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


async def have_schema(options: CassandraOptions) -> Sequence[str]:
    """Apply the schema; what it told."""
    async with connected(options) as connection:
        return await apply(connection, options)


@asynccontextmanager
async def opened(
    options: CassandraOptions, clock: Clock | None = None
) -> AsyncIterator[CassandraStore]:
    """An open store."""
    store = CassandraStore(options, clock or SystemClock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()
