"""What the writing parts share: group commit, and time for what is written now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counter.ports import Clock
from counter.storage.cassandra.base import CassandraBase
from counter.storage.cassandra.gathering import Gatherer, write_together
from counter.storage.cassandra.options import CassandraOptions

#: The first is how long a write may take, in microseconds; the rest names a partition.
Lane = tuple[Any, ...]


class CassandraWrites(CassandraBase):
    """Writes of rows, those of one partition together."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._rows: Gatherer[Lane, Any, None] = Gatherer(self._write_lane)
        self._stamped_us = 0

    async def _write_lane(self, lane: Lane, statements: Sequence[Any]) -> Sequence[None]:
        return await write_together(self._connection, statements, lane[0])

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
