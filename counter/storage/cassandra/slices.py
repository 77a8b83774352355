"""Slices of time in Cassandra: a table each, and a row each in the control keyspace.

The rows of a dataset's slices and its ``dropped_before`` lie in one partition, so that one
compare-and-set decides over both: no row appears once ``dropped_before`` has passed its end. Tables
cannot take part in that. So a table is there before its row is: a row without a table would make
requests fail, a table without a row harms nobody. And a table goes before its row does: a row that
``dropped_before`` has passed is no slice any more, and tells who comes next what is left to do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from counter.errors import StoreUnavailableError, invariant
from counter.storage.cassandra.base import CassandraBase, Shelf
from counter.storage.cassandra.documents import slice_from, slice_text
from counter.storage.cassandra.ground import NO_OP
from counter.storage.cassandra.tables import create_table, events_of, events_table
from counter.types import Dataset, Slice

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


class CassandraSlices(CassandraBase):
    """The slices of :class:`counter.ports.ControlPlane`."""

    async def slices(self, dataset: Dataset) -> Sequence[Slice]:
        return list((await self._reload_slices(dataset)).slices)

    async def make_slices(self, dataset: Dataset, *slices: Slice) -> None:
        shelf = await self._reload_slices(dataset)
        known = {each.start_us for each in shelf.slices}
        for each in slices:
            if each.start_us not in known and each.end_us > shelf.dropped_before_us:
                await self._make_slice(shelf, each)
        await shelf.reload()

    async def _make_slice(self, shelf: Shelf, each: Slice) -> None:
        dataset = shelf.dataset
        table = events_table(each.start_us)
        await self._connection.ddl(create_table(shelf.keyspace, table, events_of(dataset)))
        op = os.urandom(16)
        key = (dataset.id, each.start_us)
        applied, row = await self._control.compare(
            _MAKE,
            (slice_text(each), op, *key, each.end_us),
            seen_by=(_ROW, key),
            mine=op,
            at=1,
        )
        if not applied and row is None:
            dropped_us = await self.dropped_before(dataset)
            if dropped_us < each.end_us:
                raise StoreUnavailableError(
                    f"dataset {dataset.name!r} is made by half: run `counter schema apply`"
                )
            # Dropped by another process meanwhile, its table perhaps before this one made it anew.
            await self._drop_table(shelf, each.start_us)

    async def retire_slice(self, dataset: Dataset, start_us: int, now_us: int) -> None:
        key = (dataset.id, start_us)
        for _ in range(_ATTEMPTS_MAX):
            row = await self._control.settled(_ROW, *key)
            if row is None or row[0] is None:
                return
            standing = slice_from(start_us, row[0])
            if standing.retired_at_us is not None:
                return
            op = os.urandom(16)
            text = slice_text(replace(standing, retired_at_us=now_us))
            values = (text, op, *key, row[0])
            applied, _ = await self._control.compare(
                _CHANGE, values, seen_by=(_ROW, key), mine=op, at=1
            )
            if applied:
                await self._reload_slices(dataset)
                return
        raise StoreUnavailableError(f"slice {start_us} of {dataset.name!r} changes all the time")

    async def drop_slice(self, dataset: Dataset, start_us: int) -> None:
        shelf = await self._reload_slices(dataset)
        if start_us >= shelf.dropped_before_us:
            earliest = bool(shelf.slices) and shelf.slices[0].start_us == start_us
            invariant(earliest, f"slices drop in order; {start_us} is not the earliest")
            end_us = shelf.slices[0].end_us
            # It only moves forward: whoever moved it this far, or farther, has done this.
            await self._control.compare(
                _DROP,
                (end_us, dataset.id, end_us),
                seen_by=(_DROPPED, (dataset.id,)),
                mine=end_us,
                at=1,
            )
            shelf = await self._reload_slices(dataset)
        # In any case: whoever moved it may not have come any further.
        await self._sweep(shelf)

    async def _sweep(self, shelf: Shelf) -> None:
        """Drop every table that ``dropped_before`` has passed, and then its row.

        Tables without a row are found too: of a process that made one anew while another dropped
        it, and came no further.
        """
        number, size_us = shelf.dataset.id, shelf.dataset.slice_us
        passed = {
            start_us: True
            for start_us, text in await self._control.read(_STARTS, number)
            if start_us is not None and slice_from(start_us, text).end_us <= shelf.dropped_before_us
        }
        cql = (
            f"SELECT table_name FROM system_schema.tables WHERE keyspace_name = '{shelf.keyspace}'"
        )
        for (name,) in await self._connection.simple(cql):
            kind, _, start = name.partition("_")
            if kind == "events" and int(start) + size_us <= shelf.dropped_before_us:
                passed.setdefault(int(start), False)
        for start_us, has_row in sorted(passed.items()):
            await self._drop_table(shelf, start_us)
            if has_row:
                key = (number, start_us)
                await self._control.compare(_FORGET, key, seen_by=(_ROW, key), mine=NO_OP, at=1)

    async def _drop_table(self, shelf: Shelf, start_us: int) -> None:
        table = events_table(start_us)
        await self._connection.ddl(f"DROP TABLE IF EXISTS {shelf.keyspace}.{table}")
