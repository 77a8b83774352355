"""A counter's ``counts`` partition: checkpoint, settled fold, pending recounts, window rows.

One batch writes all of a counter, each part with a write timestamp that says how far it reaches:

* window rows and checkpoint of a batch up to T: T + 1 + r, with r random below 1,000 µs. What a
  later batch wrote stands, whenever an earlier one lands; of two that reach the same instant one
  stands as a whole. No window is so short that T + 1 + r could reach the next T.
* what is deleted because it was settled: T. It hides whatever batches before this one wrote, and
  nothing that this one or a later one writes.
* the settled fold: its own time, so that it only moves forward.
* a pending recount (p, w): w, in its writing and in its deletion, and a deletion wins. It is
  deleted once window w is closed, when none is left in it any more by anybody who does not look at
  the clock afterwards and leave another one. So it needs no clock, and no clock can keep it from
  being deleted.

Rows at or before ``settled`` do not count, wherever they come from: nobody is shown any.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from counter.errors import invariant
from counter.limits import ROLLUP_WINDOW_MIN_US
from counter.ports import Clock
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.codec import (
    pack_checkpoint,
    pack_row,
    unpack_checkpoint,
    unpack_row,
)
from counter.storage.cassandra.gathering import batch_of
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.packing import BIGINT, BLOB, TEXT, TINYINT, bound
from counter.types import Checkpoint, CounterUpdate, Head, Namespace, Pending, WindowRow

#: Kinds of rows, in the order in which they lie.
CHECKPOINT: Final = 0
PENDING: Final = 1
SETTLED: Final = 2
WINDOW: Final = 3

_INSERT: Final = (
    "INSERT INTO {keyspace}.counts (namespace, counter, kind, t, u, cell)"
    " VALUES (?, ?, ?, ?, ?, ?) USING TIMESTAMP ?"
)
_PACKERS: Final = (BIGINT, TEXT, TINYINT, BIGINT, BIGINT, BLOB, BIGINT)
_DELETE: Final = (
    "DELETE FROM {keyspace}.counts USING TIMESTAMP ?"
    " WHERE namespace = ? AND counter = ? AND kind = ? AND t = ? AND u = ?"
)
_DELETE_ROWS: Final = (
    "DELETE FROM {keyspace}.counts USING TIMESTAMP ?"
    f" WHERE namespace = ? AND counter = ? AND kind = {WINDOW} AND t <= ?"
)
#: Of one counter, which its own nodes can be asked for, and of many.
_HEADS: Final = tuple(
    f"SELECT counter, kind, t, u, cell FROM {{keyspace}}.counts WHERE namespace = ?"
    f" AND counter {of} AND kind < {WINDOW}"
    for of in ("= ?", "IN ?")
)
#: The settled fold and the rows after it in one read, so that they are of one moment.
_ROWS: Final = tuple(
    f"SELECT counter, kind, t, cell FROM {{keyspace}}.counts WHERE namespace = ? AND counter {of}"
    f" AND (kind, t) >= ({SETTLED}, 0) AND (kind, t) <= ({WINDOW}, ?)"
    for of in ("= ?", "IN ?")
)

#: Counters that one statement reads.
_READ_TOGETHER: Final = 64
#: Counters, and rows of theirs, that go out in one statement; each counter is written as one
#: nevertheless. Servers complain of more than ten partitions and of 5 KiB, and refuse 50; a single
#: partition may be of any size.
_WRITTEN_TOGETHER: Final = 10
_ROWS_TOGETHER: Final = 40
_RANDOM_US: Final = 1_000
_NOTHING: Final = Checkpoint(0, 0)
#: Calls whose random part is remembered.
_DRAWN_MAX: Final = 1_000

_T = TypeVar("_T")

invariant(_RANDOM_US < ROLLUP_WINDOW_MIN_US, "a batch's timestamps lie before the next batch's")


class CassandraCounts(CassandraBase):
    """The ``counts`` partitions of :class:`counter.ports.RollupStore`."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._drawn: OrderedDict[tuple[int, int, str], int] = OrderedDict()

    async def heads(self, namespace: Namespace, counters: Sequence[str]) -> Sequence[Head | None]:
        parts: dict[str, _Parts] = {}
        for counter, kind, t, u, cell in await self._read(namespace, _HEADS, counters):
            part = parts.get(counter)
            if part is None:
                part = parts[counter] = _Parts()
            if kind == PENDING:
                part.pending.append(Pending(t, u))
            elif kind == CHECKPOINT:
                part.checkpoint = unpack_checkpoint(cell)
            else:
                part.settled = unpack_checkpoint(cell)
        return [parts[each].head() if each in parts else None for each in counters]

    async def rows(
        self, namespace: Namespace, counters: Sequence[str], *, after_us: int, through_us: int
    ) -> Sequence[Sequence[WindowRow]]:
        found: dict[str, list[WindowRow]] = {counter: [] for counter in counters}
        settled: dict[str, int] = {}
        for counter, kind, t, cell in await self._read(namespace, _ROWS, counters, through_us):
            if kind == SETTLED:
                settled[counter] = unpack_checkpoint(cell).time_us
            elif t > max(after_us, settled.get(counter, 0)):
                found[counter].append(unpack_row(t, cell))
        return [found[counter] for counter in counters]

    async def _read(
        self, namespace: Namespace, cql: Sequence[str], counters: Sequence[str], *values: Any
    ) -> Iterator[Sequence[Any]]:
        """The rows of each of *counters*, those of one together and in order."""
        of_one, of_many = [await self._to_read(namespace.dataset, each) for each in cql]
        statements = [
            of_one.bind((namespace.id, some[0], *values))
            if len(some) == 1
            else of_many.bind((namespace.id, some, *values))
            for some in _chunks(dict.fromkeys(counters), _READ_TOGETHER)
        ]
        found = await self._connection.rows(statements)
        return (row for rows in found for row in rows or ())

    async def apply(
        self, namespace: Namespace, updates: Sequence[CounterUpdate], *, through_us: int
    ) -> None:
        if not updates:
            return
        stamp_us = through_us + 1 + self._draw(namespace.id, through_us, updates[0].counter)
        batches: list[list[Any]] = []
        counters = _WRITTEN_TOGETHER
        for update in updates:
            statements = await self._written(namespace, update, through_us, stamp_us)
            fits = batches and len(batches[-1]) + len(statements) <= _ROWS_TOGETHER
            if fits and counters < _WRITTEN_TOGETHER:
                batches[-1] += statements
                counters += 1
            else:
                batches.append(statements)
                counters = 1
        await self._connection.rows([batch_of(each) for each in batches])

    async def _written(
        self, namespace: Namespace, update: CounterUpdate, through_us: int, stamp_us: int
    ) -> list[Any]:
        """What writes one counter's update, of a batch up to *through_us*."""
        dataset, partition = namespace.dataset, (namespace.id, update.counter)
        insert = await self._to_write(dataset, _INSERT)
        checkpoint = pack_checkpoint(update.checkpoint)
        values = [(*partition, CHECKPOINT, 0, 0, checkpoint, stamp_us)]
        settled, settled_us = update.settled, 0
        if settled is not None:
            settled_us = settled.time_us
            values.append((*partition, SETTLED, 0, 0, pack_checkpoint(settled), settled_us))
        values += (
            (*partition, WINDOW, row.window_us, 0, pack_row(row), stamp_us)
            for row in update.rows
            if row.window_us > settled_us
        )
        statements = [bound(insert, _PACKERS, each) for each in values]
        if settled is not None:
            delete = await self._to_write(dataset, _DELETE_ROWS)
            statements.append(delete.bind((through_us, *partition, settled_us)))
        if update.pending_done:
            delete = await self._to_write(dataset, _DELETE)
            statements += (
                delete.bind((left_us, *partition, PENDING, recount_us, left_us))
                for recount_us, left_us in update.pending_done
            )
        return statements

    async def leave_pending(
        self, namespace: Namespace, recounts: Sequence[tuple[str, Pending]]
    ) -> None:
        insert = await self._to_write(namespace.dataset, _INSERT)
        await self._connection.rows(
            [
                insert.bind((namespace.id, counter, PENDING, recount_us, left_us, b"", left_us))
                for counter, (recount_us, left_us) in recounts
            ]
        )

    def _draw(self, namespace_id: int, through_us: int, first: str) -> int:
        """The random part of the timestamps of one call, whose *first* counter tells it from others
        up to the same instant. Done again, having seen more, it draws a higher one."""
        key = (namespace_id, through_us, first)
        before = self._drawn.pop(key, None)
        if before is None:
            drawn = random.randrange(_RANDOM_US // 2)
        else:
            drawn = min(before + random.randint(1, 9), _RANDOM_US - 1)
        self._drawn[key] = drawn
        while len(self._drawn) > _DRAWN_MAX:
            self._drawn.popitem(last=False)
        return drawn


class _Parts:
    """What was found of one counter, its window rows excepted."""

    __slots__ = ("checkpoint", "pending", "settled")

    def __init__(self) -> None:
        self.checkpoint = self.settled = _NOTHING
        self.pending: list[Pending] = []

    def head(self) -> Head:
        return Head(self.checkpoint, self.settled, tuple(self.pending))


def _chunks(all_of: Iterable[_T], size: int) -> Iterator[tuple[_T, ...]]:
    items = iter(all_of)
    while some := tuple(islice(items, size)):
        yield some
