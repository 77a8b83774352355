"""What the writing parts share: group commit, and time for what is written now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counter.limits import SECOND
from counter.ports import Clock
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.gathering import Batch, Gatherer, batch_of
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.stream import Stream

#: The first is how long a write may take, in microseconds; the rest names a partition.
Lane = tuple[Any, ...]


class CassandraWrites(CassandraBase):
    """Writes of rows, those of one partition together."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._stream = Stream(self._begin)
        self._rows: Gatherer[Lane, Any, None] = Gatherer(self._write_batch)
        self._stamped_us = 0

    def _begin(self, statement: Any, timeout_us: int | None) -> Any:
        """Begin to send *statement*: its end is the stream's business."""
        timeout_s = (timeout_us or self._options.read_timeout_us) / SECOND
        return self._connection._execute(timeout_s, statement, None)

    def _write_batch(self, batch: Batch[Lane, Any, None]) -> None:
        statements = batch.items
        statement = statements[0] if len(statements) == 1 else batch_of(statements)
        self._stream.send(statement, batch.key[0], batch.end)

    async def _write(self, rows: Sequence[tuple[Lane, Any]]) -> None:
        """Write bound statements, each in its lane. Raises the first error."""
        for result in await self._rows.put(rows):
            if result is not None:
                raise result

    def _stamp(self) -> int:
        """A write timestamp for what is true from now on: later than any that was given before.

        Of a deletion and a write of one instant the deletion would win, whichever came first.
        """
        self._stamped_us = max(self._clock.now_us(), self._stamped_us + 1)
        return self._stamped_us
