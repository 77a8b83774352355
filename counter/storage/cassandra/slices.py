"""Slices of time: tables, rows in the control keyspace, sizes of partitions; and the purge.
The rows of a dataset's slices and its ``dropped_before`` are in one partition, so that one
compare-and-set covers both: no row appears after ``dropped_before`` has passed its end. Tables
cannot be part of that. So a table is created before its row: a row without a table would make
requests fail, and a table without a row is harmless. And a table is dropped before its row: a row
that ``dropped_before`` has passed is not a slice, and records unfinished work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from counter.capabilities import PartitionSize
from counter.errors import CounterError, StoreUnavailableError, invariant
from counter.limits import HOUR, MINUTE, SECOND, SIZES_KEPT_SLICES
from counter.storage.cassandra.control_keyspace import (
    OP,
    dataset_id_in,
    is_deleted,
    slice_from,
    slice_text,
)
from counter.storage.cassandra.session import FOR_EVER, CassandraSession, KeyspaceState
from counter.storage.cassandra.tables import create_table, events_of, events_table
from counter.types import Dataset, Namespace, Slice
from counter.windows import window_of

_ROW: Final = "SELECT document, op FROM {control}.slices WHERE dataset = ? AND start = ?"
_MAKE: Final = (
    "UPDATE {control}.slices SET document = ?, op = ? WHERE dataset = ? AND start = ?"
    " IF document = null AND dropped_before < ?"
)
_CHANGE: Final = (
    "UPDATE {control}.slices SET document = ?, op = ? WHERE dataset = ? AND start = ?"
    " IF document = ?"
)
_FORGET: Final = "DELETE FROM {control}.slices WHERE dataset = ? AND start = ? IF EXISTS"
_DROPPED: Final = "SELECT DISTINCT dataset, dropped_before FROM {control}.slices WHERE dataset = ?"
_DROP: Final = (
    "UPDATE {control}.slices SET dropped_before = ? WHERE dataset = ? IF dropped_before < ?"
)
_STARTS: Final = "SELECT start, document FROM {control}.slices WHERE dataset = ?"
_ATTEMPTS_MAX: Final = 5
#: How long after it read the slices a process creates a table. If it were longer than retention,
#: another process could have made the slice and dropped it; while the table is there again, empty,
#: one that paused as long would sum its windows.
_MAKING_US: Final = MINUTE


class CassandraSlices:
    """The slices of :class:`counter.ports.ControlPlane`."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        return list((await self._session.reload_slices(dataset)).slices)

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        clock = self._session.clock
        began_us = clock.boottime_us()
        state = await self._session.reload_slices(dataset)
        known = {each.start_us for each in state.slices}
        for each in slices:
            if each.start_us not in known and each.end_us > state.dropped_before_us:
                if clock.boottime_us() - began_us > _MAKING_US:
                    raise StoreUnavailableError(
                        f"making slices of dataset {dataset.name!r} took too long"
                    )
                await self._make_slice(state, each)
        await state.reload()

    async def _make_slice(self, state: KeyspaceState, each: Slice) -> None:
        dataset = state.dataset
        table = events_table(each.start_us)
        await self._session.connection.ddl(create_table(state.keyspace, table, events_of(dataset)))
        key = (dataset.id, each.start_us)
        applied, row = await self._session.control.compare(
            _MAKE, (slice_text(each), OP, *key, each.end_us), seen_by=(_ROW, key)
        )
        if not applied and row is None:
            dropped_us = await self._session.dropped_before(dataset)
            if dropped_us < each.end_us:
                raise StoreUnavailableError(
                    f"dataset {dataset.name!r} is made by half: run `counter schema apply`"
                )
            # Dropped by another process meanwhile, maybe before this one created the table again.
            await self.drop_table(state, each.start_us)

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        key = (dataset.id, start_us)
        for _ in range(_ATTEMPTS_MAX):
            row = await self._session.control.settled(_ROW, *key)
            if row is None or row[0] is None:
                return
            stored = slice_from(start_us, row[0])
            if stored.retired_at_us is not None:
                return
            text = slice_text(replace(stored, retired_at_us=now_us))
            applied, _ = await self._session.control.compare(
                _CHANGE, (text, OP, *key, row[0]), seen_by=(_ROW, key)
            )
            if applied:
                await self._session.reload_slices(dataset)
                return
        raise StoreUnavailableError(f"slice {start_us} of {dataset.name!r} changes all the time")

    async def drop_slice(self, dataset: Dataset, start_us: int) -> bool:
        state = await self._session.reload_slices(dataset)
        if start_us >= state.dropped_before_us:
            earliest = bool(state.slices) and state.slices[0].start_us == start_us
            invariant(earliest, f"slices drop in order; {start_us} is not the earliest")
            end_us = state.slices[0].end_us
            # It only moves forward: another process may have moved it as far, or farther.
            await self._session.control.compare(
                _DROP,
                (end_us, dataset.id, end_us),
                seen_by=(_DROPPED, (dataset.id,)),
                mine=end_us,
            )
            state = await self._session.reload_slices(dataset)
        # In any case, because the process that moved it may have crashed afterwards.
        await self._sweep(state)
        return True

    async def _sweep(self, state: KeyspaceState) -> None:
        """Drop every table that ``dropped_before`` has passed, and then its row.

        Tables without a row are found, too: a process may create one again while another drops it,
        and crash.
        """
        number, size_us = state.dataset.id, state.dataset.slice_us
        passed = {
            start_us: True
            for start_us, text in await self._session.control.read(_STARTS, number)
            if start_us is not None and slice_from(start_us, text).end_us <= state.dropped_before_us
        }
        cql = (
            f"SELECT table_name FROM system_schema.tables WHERE keyspace_name = '{state.keyspace}'"
        )
        for (name,) in await self._session.connection.simple(cql):
            kind, _, start = name.partition("_")
            if kind == "events" and int(start) + size_us <= state.dropped_before_us:
                passed.setdefault(int(start), False)
        for start_us, has_row in sorted(passed.items()):
            await self.drop_table(state, start_us)
            if has_row:
                key = (number, start_us)
                await self._session.control.compare(_FORGET, key, seen_by=(_ROW, key))

    async def drop_table(self, state: KeyspaceState, start_us: int) -> None:
        table = events_table(start_us)
        await self._session.connection.ddl(f"DROP TABLE IF EXISTS {state.keyspace}.{table}")


#: Partitions that one call deletes, at most.
_PARTITIONS_MAX: Final = 1_000
#: A compare-and-set of a namespace lands within this time, or never: an unfinished deletion counts
#: as abandoned, and the row of a deleted namespace may be removed.
_LANDS_WITHIN_US: Final = HOUR

_DEPART: Final = "INSERT INTO {control}.departed (id, document) VALUES (?, ?) USING TIMESTAMP ?"
_DEPARTED: Final = "SELECT id, document FROM {control}.departed"
FORGET: Final = "DELETE FROM {control}.departed USING TIMESTAMP ? WHERE id = ?"
_PURGED_ROW: Final = "SELECT id, version, document, op FROM {control}.namespaces WHERE name = ?"
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


class CassandraPurge:
    """The purging of :class:`counter.ports.ControlPlane`."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        #: The shard whose names, and the window whose marks, come next; by namespace id.
        self._next_shard: dict[int, int] = {}
        self._next_window: dict[int, int] = {}
        #: Ids of namespaces of which only the row is left.
        self._purged: set[int] = set()

    async def purge(self, now_us: int) -> bool:
        for number, text in await self._session.control.read(_DEPARTED):
            departed: dict[str, Any] = json.loads(text)
            may_land = now_us - departed["at_us"] < _LANDS_WITHIN_US
            if may_land and number in self._purged:
                continue
            row = await self._session.control.settled(_PURGED_ROW, departed["name"])
            dataset = await self.dataset_in(text)
            if row is None or row[0] != number:
                # Its name is another one's. Its own creation may still land.
                if may_land:
                    continue
            elif not is_deleted(row[2]):
                # Its deletion is under way, or was given up.
                if not may_land:
                    await self._session.control.write(FORGET, departed["at_us"], number)
                continue
            elif self._session.settles_in(number, dataset) > 0:
                continue
            if number not in self._purged:
                if await self._purge_some(number, departed, dataset):
                    self._purged.add(number)
                return True
            if row is not None and row[0] == number:
                if self._session.gone_for(number) < _LANDS_WITHIN_US:
                    continue
                await self._session.control.compare(
                    _REMOVE,
                    (departed["name"], number, row[1]),
                    seen_by=(_PURGED_ROW, (departed["name"],)),
                )
            await self._session.control.write(FORGET, FOR_EVER, number)
            self._next_shard.pop(number, None)
            self._next_window.pop(number, None)
            self._purged.discard(number)
            return True
        return False

    async def dataset_in(self, text: str) -> Dataset:
        """The dataset that a document names."""
        number = dataset_id_in(text)
        if number not in self._session.states:
            await self._session.load_datasets()
        return self._session.states[number].dataset

    async def note_departure(self, namespace: Namespace) -> None:
        """Have *namespace* purged, should it be gone by then. It is written before it goes."""
        statement = await self._session.to_read(namespace.dataset, _WATERMARKS)
        rows = await self._session.connection.one(statement.bind((namespace.id,)))
        now_us = self._session.clock.now_us()
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
        await self._session.control.write(_DEPART, namespace.id, json.dumps(departed), now_us)

    async def take_watermarks_away(self, dataset: Dataset, number: int) -> None:
        """A namespace without watermarks is one that is deleted."""
        await self._delete(dataset, _NO_WATERMARKS, [(number,)])

    async def _purge_some(self, number: int, departed: dict[str, Any], dataset: Dataset) -> bool:
        """Delete the next part; whether nothing is left."""
        await self.take_watermarks_away(dataset, number)
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
        statement = await self._session.to_read(dataset, _NAMES)
        left = _PARTITIONS_MAX
        for shard in range(self._next_shard.get(number, 0), shards):
            rows = await self._session.connection.one(statement.bind((number, shard, left)))
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
        statement = await self._session.to_write(dataset, cql)
        await self._session.connection.rows([statement.bind((FOR_EVER, *key)) for key in keys])


#: An UPDATE writes no row marker. The marker of an INSERT has no tombstone when it expires, so a
#: second INSERT with the same timestamp would make a row whose only cell is null.
_RECORD: Final = (
    "UPDATE {control}.crowds USING TTL ? AND TIMESTAMP ? SET document = ?"
    " WHERE dataset = ? AND start = ? AND observed = ?"
)
_RECORDED: Final = "SELECT start, document FROM {control}.crowds WHERE dataset = ?"
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


class CassandraPartitionSizes:
    """:class:`counter.capabilities.PartitionSizeStore`."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        self._nodes_asked = 0

    async def record(self, dataset: Dataset, size: PartitionSize) -> None:
        document = json.dumps(
            {
                "bucket_us": size.bucket_us,
                "size_bytes": size.size_bytes,
                "namespace": size.namespace,
                "counter": size.counter,
            }
        )
        ttl_s = SIZES_KEPT_SLICES * dataset.slice_us // SECOND
        await self._session.control.write(
            _RECORD,
            *(ttl_s, size.size_bytes, document),
            *(dataset.id, size.start_us, int(size.is_observed)),
        )

    async def recorded(self, dataset: Dataset) -> Sequence[PartitionSize]:
        rows = await self._session.control.read(_RECORDED, dataset.id)
        # Releases that wrote sizes by INSERT have left rows whose document is null.
        return [
            PartitionSize(start_us, **json.loads(text))
            for start_us, text in rows
            if text is not None
        ]

    async def observe(self, dataset: Dataset) -> Sequence[PartitionSize]:
        state = self._session.state_of(dataset)
        sizes = await self._largest_partitions(state.keyspace)
        return [
            PartitionSize(each.start_us, each.time_bucket_us, each.event_buckets * size_bytes)
            for each in state.slices
            if (size_bytes := sizes.get(events_table(each.start_us), 0))
        ]

    async def _largest_partitions(self, keyspace: str) -> Mapping[str, int]:
        """At least how large the largest partition of each table is, in bytes, by some nodes.

        Raises the first failure if no node answers: the user may lack the permission.
        """
        nodes = self._session.connection.near_nodes()
        first = self._nodes_asked % len(nodes) if nodes else 0
        self._nodes_asked += _NODES_AT_ONCE
        asked = (nodes[first:] + nodes[:first])[:_NODES_AT_ONCE]
        answers = await asyncio.gather(
            *(self._session.connection.ask(node, _SIZES.format(keyspace)) for node in asked),
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
