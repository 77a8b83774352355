"""The Cassandra store, put together from its parts."""

from __future__ import annotations

from typing import Final

from counter.errors import StartupError, UnavailableError
from counter.limits import MILLISECOND
from counter.ports import Clock
from counter.storage.cassandra.control import CassandraControl
from counter.storage.cassandra.counts import CassandraCounts
from counter.storage.cassandra.decisions import CassandraDecisions
from counter.storage.cassandra.events import CassandraEvents
from counter.storage.cassandra.leases import CassandraLeases
from counter.storage.cassandra.marks import CassandraMarks
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.schema import check_version
from counter.types import ClockReading

#: No namespace has this id.
_NOBODY: Final = 0
_PING: Final = (
    "INSERT INTO {keyspace}.names (namespace, bucket, counter) VALUES (?, 0, 'ping')"
    " USING TTL 60 AND TIMESTAMP ?"
)
#: A clock is read so often at a time, unless the error is as small as this before.
_CLOCK_READINGS_MAX: Final = 3
_CLOCK_ERROR_US: Final = 2 * MILLISECOND


class CassandraStore(
    CassandraEvents,
    CassandraMarks,
    CassandraCounts,
    CassandraDecisions,
    CassandraControl,
    CassandraLeases,
):
    """:class:`counter.ports.Store` over a cluster, without transactions. Any number of processes
    share it."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._clocks_read = 0

    async def open(self) -> None:
        await self._connection.open()
        try:
            await check_version(self._connection, self._control)
            await self._load_datasets()
            self._must_have_datasets()
        except UnavailableError as error:
            await self._connection.close()
            raise StartupError(f"Cassandra cannot be used: {error.detail}") from error
        except BaseException:
            await self._connection.close()
            raise

    async def close(self) -> None:
        await self._connection.close()

    async def ping(self) -> None:
        """Write a row that expires to each dataset, as its events are written."""
        shelves = list(self._shelves.values())
        now_us = self._clock.now_us()
        statements = [await self._to_write(shelf.dataset, _PING) for shelf in shelves]
        await self._connection.rows([each.bind((_NOBODY, now_us)) for each in statements])

    async def read_clock(self) -> ClockReading:
        """The clock of one node, and of another one the next time. It counts milliseconds, so what
        it says is half a millisecond behind, give or take as much."""
        self._clocks_read += 1
        readings: list[ClockReading] = []
        while len(readings) < _CLOCK_READINGS_MAX:
            before_us, node_us, after_us = await self._connection.clock_of_a_node(
                self._clocks_read, self._clock.now_us
            )
            offset_us = node_us + MILLISECOND // 2 - (before_us + after_us) // 2
            error_us = (after_us - before_us + MILLISECOND) // 2 + 1
            readings.append(ClockReading(offset_us, error_us))
            if error_us <= _CLOCK_ERROR_US:
                break
        return min(readings, key=lambda each: each.error_us)

    def _must_have_datasets(self) -> None:
        """Raise StartupError where a dataset of the settings is not in the schema."""
        standing = {shelf.dataset.name for shelf in self._shelves.values()}
        for dataset, _ in self._options.datasets:
            if dataset.name not in standing:
                raise StartupError(
                    f"keyspace {self._options.keyspace!r} has no dataset {dataset.name!r}:"
                    " run `counter schema apply`"
                )
