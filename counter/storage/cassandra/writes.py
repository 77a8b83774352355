"""What the writing parts share: group commit, and time for what is written now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

from counter.errors import SliceMissingError, StoreUnavailableError
from counter.ports import Clock
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.gathering import Batch, Gatherer, batch_of
from counter.storage.cassandra.options import CassandraOptions

#: How long a write may take, in microseconds, and its table; the rest names a partition.
Lane = tuple[Any, ...]
_Rows = Batch[Lane, Any, None]

#: Small batches of one turn share a statement: it costs this process, and the node that takes it,
#: far more than a row does. Servers complain of more than ten partitions and of 5 KiB.
_PARTITIONS_MAX: Final = 10
_ROWS_MAX: Final = 40
#: Failures that one partition may have brought upon all that shared its statement.
_OF_ONE: Final = (StoreUnavailableError, SliceMissingError)


class CassandraWrites(CassandraBase):
    """Writes of rows, those of one partition together."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._rows: Gatherer[Lane, Any, None] = Gatherer(self._write_batches)
        self._stamped_us = 0

    def queues(self) -> Mapping[str, int]:
        """Statements that wait because too many are under way, and rows behind others of their
        partition."""
        return {**super().queues(), "store_rows": self._rows.waiting}

    async def _write(self, rows: Sequence[tuple[Lane, Any]]) -> None:
        """Write bound statements, each in its lane. Raises the first error."""
        for result in await self._rows.put(rows):
            if result is not None:
                raise result

    def _write_batches(self, batches: Sequence[_Rows]) -> None:
        tables: dict[Lane, list[_Rows]] = {}
        for batch in batches:
            timeout_us, table = batch.key[:2]
            # Whoever leaves a mark and a name waits for both. A slice's table may be gone.
            of_slice = table if isinstance(table, int) else None
            tables.setdefault((timeout_us, of_slice), []).append(batch)
        for sharing in chain.from_iterable(map(_shared, tables.values())):
            self._send_rows(sharing)

    def _send_rows(self, sharing: Sequence[_Rows]) -> None:
        """Write *sharing* by one statement. They are not one write: each partition is."""
        statements = [statement for batch in sharing for statement in batch.items]
        statement = statements[0] if len(statements) == 1 else batch_of(statements)
        timeout_us, table = sharing[0].key[:2]
        if isinstance(table, int):
            # Events, of a slice.
            self.tally.commit_rows.observe(len(statements))
        done = partial(self._rows_sent, sharing, time.perf_counter())
        self._connection.stream.send(statement, timeout_us, done)

    def _rows_sent(
        self, sharing: Sequence[_Rows], began_s: float, error: BaseException | None
    ) -> None:
        if isinstance(sharing[0].key[1], int):
            self.tally.commit_seconds.observe(time.perf_counter() - began_s)
        if isinstance(error, _OF_ONE) and len(sharing) > 1:
            # One partition's replicas may be too few, or its table gone: each has its own try.
            for batch in sharing:
                self._send_rows([batch])
            return
        for batch in sharing:
            batch.end(error)

    def _stamp(self) -> int:
        """A write timestamp for what is true from now on: later than any that was given before.

        Of a deletion and a write of one instant the deletion would win, whichever came first.
        """
        self._stamped_us = max(self._clock.now_us(), self._stamped_us + 1)
        return self._stamped_us


def _shared(batches: Sequence[_Rows]) -> Iterator[list[_Rows]]:
    """*batches* by the statements that they share."""
    sharing: list[_Rows] = []
    rows = 0
    for batch in batches:
        if sharing and (len(sharing) == _PARTITIONS_MAX or rows + len(batch.items) > _ROWS_MAX):
            yield sharing
            sharing, rows = [], 0
        sharing.append(batch)
        rows += len(batch.items)
    if sharing:
        yield sharing
