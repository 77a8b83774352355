"""The store of a cluster: Apache Cassandra, through cassandra-driver.

It has no transactions: marks, events, decisions and counts are separate writes, and one that timed
out may land later. The core's protocol allows for that. ``tables.py`` describes each table.
"""

from __future__ import annotations

from counter.errors import StartupError

try:
    import cassandra.cluster  # noqa: F401
except ImportError as error:
    raise StartupError(
        f"the Cassandra driver is missing ({error}):"
        " install it with pip install '.[cassandra]' in its checkout"
    ) from error

from counter.storage.cassandra.options import CassandraOptions, options_of
from counter.storage.cassandra.store import CassandraStore, KeysAlone

__all__ = ["CassandraOptions", "CassandraStore", "KeysAlone", "options_of"]
