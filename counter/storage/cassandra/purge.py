"""Deleting what nobody can ask for any more: the data of namespaces that were deleted.

Events go with their slices; decisions and keys carry a time to live. The rest is deleted here, a
little at a time, with a write timestamp that nothing exceeds: what a process that has not heard of
it writes later stays hidden. All of it can be done again from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from counter.limits import HOUR
from counter.ports import Clock
from counter.storage.cassandra.base import FOR_EVER, CassandraBase
from counter.storage.cassandra.documents import dataset_id_in, is_deleted
from counter.storage.cassandra.ground import NO_OP
from counter.storage.cassandra.options import CassandraOptions
from counter.types import Dataset, Namespace
from counter.windows import window_of

#: Partitions that one call deletes, at most.
_PARTITIONS_MAX: Final = 1_000
#: A deletion that was begun so long ago, of a namespace that stands, was given up.
_GIVEN_UP_US: Final = HOUR

_DEPART: Final = "INSERT INTO {control}.departed (id, document) VALUES (?, ?) USING TIMESTAMP ?"
_DEPARTED: Final = "SELECT id, document FROM {control}.departed"
FORGET: Final = "DELETE FROM {control}.departed USING TIMESTAMP ? WHERE id = ?"
_ROW: Final = "SELECT id, version, document, op FROM {control}.namespaces WHERE name = ?"
_REMOVE: Final = "DELETE FROM {control}.namespaces WHERE name = ? IF id = ? AND version = ?"

_WATERMARKS: Final = "SELECT through FROM {keyspace}.watermarks WHERE namespace = ?"
_NO_WATERMARKS: Final = "DELETE FROM {keyspace}.watermarks USING TIMESTAMP ? WHERE namespace = ?"
_NAMES: Final = "SELECT counter FROM {keyspace}.names WHERE namespace = ? AND bucket = ? LIMIT ?"
_NO_NAMES_THROUGH: Final = (
    "DELETE FROM {keyspace}.names USING TIMESTAMP ?"
    " WHERE namespace = ? AND bucket = ? AND counter <= ?"
)
_NO_NAMES: Final = (
    "DELETE FROM {keyspace}.names USING TIMESTAMP ? WHERE namespace = ? AND bucket = ?"
)
_NO_COUNTS: Final = (
    "DELETE FROM {keyspace}.counts USING TIMESTAMP ? WHERE namespace = ? AND counter = ?"
)
_NO_MARKS: Final = tuple(
    f"DELETE FROM {{keyspace}}.{table} USING TIMESTAMP ?"
    " WHERE namespace = ? AND shard = ? AND window_start = ?"
    for table in ("dirty", "atomic_marks")
)


class CassandraPurge(CassandraBase):
    """The purging of :class:`counter.ports.ControlPlane`."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        #: The shard whose names, and the window whose marks, come next; by namespace id.
        self._next_shard: dict[int, int] = {}
        self._next_window: dict[int, int] = {}

    async def purge(self, now_us: int) -> bool:
        for number, text in await self._control.read(_DEPARTED):
            departed: dict[str, Any] = json.loads(text)
            row = await self._control.settled(_ROW, departed["name"])
            dataset = await self._dataset_in(text)
            if row is not None and row[0] == number:
                if not is_deleted(row[2]):
                    # Its deletion is under way, or was given up.
                    if now_us - departed["at_us"] >= _GIVEN_UP_US:
                        await self._control.write(FORGET, departed["at_us"], number)
                    continue
                if self._settles_in(number, dataset) > 0:
                    continue
                await self._remove_row(departed["name"], number, row[1])
            if not await self._purged(number, departed, dataset):
                return True
            await self._control.write(FORGET, FOR_EVER, number)
            self._next_shard.pop(number, None)
            self._next_window.pop(number, None)
            return True
        return False

    async def _remove_row(self, name: str, number: int, version: int) -> None:
        """Remove the row of a deleted namespace that has settled: its name is free."""
        await self._control.compare(
            _REMOVE, (name, number, version), seen_by=(_ROW, (name,)), mine=NO_OP, at=3
        )

    async def _dataset_in(self, text: str) -> Dataset:
        """The dataset that a document names."""
        number = dataset_id_in(text)
        if number not in self._shelves:
            await self._load_datasets()
        return self._shelves[number].dataset

    async def _note_departure(self, namespace: Namespace) -> None:
        """Have *namespace* purged, should it be gone by then. It is written before it goes."""
        statement = await self._to_read(namespace.dataset, _WATERMARKS)
        rows = await self._connection.one(statement.bind((namespace.id,)))
        now_us = self._clock.now_us()
        settings = namespace.settings
        departed = {
            "name": namespace.name,
            "dataset": namespace.dataset.id,
            "at_us": now_us,
            "shards": settings.shards,
            "window_us": settings.rollup_window_us,
            # Marks lie between the watermarks and the latest instant that a token could name.
            "from_us": min((through_us for (through_us,) in rows), default=now_us),
            "to_us": now_us + namespace.dataset.slice_us,
        }
        await self._control.write(_DEPART, namespace.id, json.dumps(departed), now_us)

    async def _take_watermarks_away(self, dataset: Dataset, number: int) -> None:
        """A namespace without watermarks is one that is deleted."""
        await self._delete(dataset, _NO_WATERMARKS, [(number,)])

    async def _purged(self, number: int, departed: dict[str, Any], dataset: Dataset) -> bool:
        """Delete the next part; whether nothing is left."""
        await self._take_watermarks_away(dataset, number)
        if not await self._purged_names(number, departed["shards"], dataset):
            return False
        window_us, shards = departed["window_us"], departed["shards"]
        first_us = self._next_window.get(number, window_of(departed["from_us"], window_us))
        last_us = first_us + window_us * (_PARTITIONS_MAX // shards)
        keys = [
            (number, shard, start_us)
            for start_us in range(first_us, min(last_us, departed["to_us"]) + 1, window_us)
            for shard in range(shards)
        ]
        for cql in _NO_MARKS:
            await self._delete(dataset, cql, keys)
        self._next_window[number] = last_us + window_us
        return bool(last_us >= departed["to_us"])

    async def _purged_names(self, number: int, shards: int, dataset: Dataset) -> bool:
        """Delete the counts of the next counters, and then their names."""
        statement = await self._to_read(dataset, _NAMES)
        left = _PARTITIONS_MAX
        for shard in range(self._next_shard.get(number, 0), shards):
            rows = await self._connection.one(statement.bind((number, shard, left)))
            await self._delete(dataset, _NO_COUNTS, [(number, name) for (name,) in rows])
            if len(rows) == left:
                await self._delete(dataset, _NO_NAMES_THROUGH, [(number, shard, rows[-1][0])])
                return False
            await self._delete(dataset, _NO_NAMES, [(number, shard)])
            self._next_shard[number] = shard + 1
            left -= len(rows)
        return True

    async def _delete(self, dataset: Dataset, cql: str, keys: Sequence[tuple[Any, ...]]) -> None:
        """Run a deletion for each of *keys*, for ever."""
        statement = await self._to_write(dataset, cql)
        await self._connection.rows([statement.bind((FOR_EVER, *key)) for key in keys])
