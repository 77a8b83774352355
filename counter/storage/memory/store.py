"""Compose the in-memory store from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from counter import limits
from counter.ports import Clock
from counter.storage.memory.control import MemoryControl
from counter.storage.memory.decisions import MemoryDecisions
from counter.storage.memory.events import MemoryEvents
from counter.storage.memory.keys import MemoryKeys
from counter.storage.memory.leases import MemoryLeases
from counter.storage.memory.partition_sizes import MemoryCrowds
from counter.storage.memory.rollups import MemoryRollups
from counter.types import ClockReading, Dataset

DEFAULT_DATASET: Final = Dataset(
    id=1,
    name="default",
    retention_us=7 * limits.DAY,
    slice_us=limits.DAY,
    time_bucket_us=6 * limits.HOUR,
    event_buckets=4,
    write_timeout_us=limits.SECOND,
    clock_skew_max_us=0,
)


class MemoryStore(
    MemoryEvents,
    MemoryRollups,
    MemoryDecisions,
    MemoryControl,
    MemoryCrowds,
    MemoryLeases,
    MemoryKeys,
):
    """:class:`counter.ports.Store` in memory, without transactions.

    Each call takes effect at once and whole. As with a real store, anything may happen between two
    calls.
    """

    def __init__(self, clock: Clock, datasets: Sequence[Dataset] = (DEFAULT_DATASET,)) -> None:
        super().__init__(clock, datasets)
        MemoryLeases.__init__(self, clock)
        MemoryKeys.__init__(self)

    async def open(self) -> None:
        """Do nothing: there is no connection."""

    async def close(self) -> None:
        """Do nothing: data can still be read."""

    async def ping(self) -> None:
        """Do nothing: a write always succeeds."""

    async def read_clock(self) -> ClockReading:
        """Return no offset: the store's clock is the process's own."""
        return ClockReading(0, 0)
