"""How many nodes a cluster has: for what is reckoned by node."""

from __future__ import annotations

from counter.storage.cassandra.connection import Connection
from counter.storage.cassandra.options import CassandraOptions


async def count_nodes(options: CassandraOptions) -> int:
    """The nodes of all data centers, up or not. Raises StartupError and UnavailableError."""
    connection = Connection(options)
    await connection.open()
    try:
        return sum(connection.nodes_by_datacenter().values())
    finally:
        await connection.close()
