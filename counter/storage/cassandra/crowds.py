"""How crowded partitions get, in Cassandra: what workers counted, and what nodes tell.

Of two writes to a cell the one with the later timestamp wins. A crowd is written with its size as
timestamp: in whatever order crowds are written, the largest one wins, and none is read first. When
a crowd has expired, its tombstone has the same timestamp, and hides a crowd of the same size that
is written again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Final

from counter.crowds import CROWDS_KEPT_SLICES, Crowd
from counter.errors import CounterError
from counter.limits import SECOND
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.tables import events_table
from counter.types import Dataset

#: An UPDATE writes no row marker. The marker of an INSERT has no tombstone when it expires, so a
#: second INSERT with the same timestamp would make a row whose only cell is null.
_LEAVE: Final = (
    "UPDATE {control}.crowds USING TTL ? AND TIMESTAMP ? SET document = ?"
    " WHERE dataset = ? AND start = ? AND observed = ?"
)
_CROWDS: Final = "SELECT start, document FROM {control}.crowds WHERE dataset = ?"
#: A table that each node makes up of itself when it is asked. To filter it costs nothing more.
_SIZES: Final = (
    "SELECT table_name, mebibytes FROM system_views.max_partition_size"
    " WHERE keyspace_name = '{}' ALLOW FILTERING"
)
_MEBIBYTE: Final = 1024 * 1024
#: A node rounds sizes up to a step of its histogram, each of which is so much more than the one
#: before, and then to whole mebibytes.
_STEP: Final = 1.2
#: Nodes that are asked at a time; others the next time. A partition is on several of them.
_NODES_AT_ONCE: Final = 3


class CassandraCrowds(CassandraBase):
    """:class:`counter.crowds.PartitionedStore`."""

    _nodes_asked = 0

    async def leave_crowd(self, dataset: Dataset, crowd: Crowd) -> None:
        document = json.dumps(
            {
                "bucket_us": crowd.bucket_us,
                "size_bytes": crowd.size_bytes,
                "namespace": crowd.namespace,
                "counter": crowd.counter,
            }
        )
        ttl_s = CROWDS_KEPT_SLICES * dataset.slice_us // SECOND
        await self._control.write(
            _LEAVE,
            *(ttl_s, crowd.size_bytes, document),
            *(dataset.id, crowd.start_us, int(crowd.is_observed)),
        )

    async def crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        rows = await self._control.read(_CROWDS, dataset.id)
        # Releases that wrote crowds by INSERT have left rows whose document is null.
        return [Crowd(start_us, **json.loads(text)) for start_us, text in rows if text is not None]

    async def observe_crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        shelf = self._shelf(dataset)
        sizes = await self._largest_partitions(shelf.keyspace)
        return [
            Crowd(each.start_us, each.time_bucket_us, each.event_buckets * size_bytes)
            for each in shelf.slices
            if (size_bytes := sizes.get(events_table(each.start_us), 0))
        ]

    async def _largest_partitions(self, keyspace: str) -> Mapping[str, int]:
        """At least how large the largest partition of each table is, in bytes, by some nodes.

        Raises the first failure where no node tells: a user may lack the right to ask.
        """
        nodes = self._connection.near_nodes()
        first = self._nodes_asked % len(nodes) if nodes else 0
        self._nodes_asked += _NODES_AT_ONCE
        asked = (nodes[first:] + nodes[:first])[:_NODES_AT_ONCE]
        answers = await asyncio.gather(
            *(self._connection.ask(node, _SIZES.format(keyspace)) for node in asked),
            return_exceptions=True,
        )
        failures = [each for each in answers if isinstance(each, BaseException)]
        for failure in failures:
            if not isinstance(failure, CounterError) or len(failures) == len(answers):
                raise failure
        sizes: dict[str, int] = {}
        for rows in answers:
            if not isinstance(rows, BaseException):
                for table, mebibytes in rows:
                    size_bytes = int(max(0, mebibytes - 1) * _MEBIBYTE / _STEP)
                    sizes[table] = max(sizes.get(table, 0), size_bytes)
        return sizes
