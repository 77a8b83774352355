"""Other ways to count in Cassandra, behind the same API: what the benchmarks compare adds with.

Each does one statement an add, alone, once the token was checked. None leaves marks or names or
asks the guard, so each has less to do than the service.
"""

from __future__ import annotations

from typing import Final

from counter.outcomes import Added
from counter.service import CounterService
from counter.storage.cassandra.rows import INSERT_NEW, cells_of, form_of, key_of, place_of
from counter.storage.cassandra.store import CassandraStore
from counter.types import Event, Namespace

NATIVE_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS bench_default.native"
    " (namespace bigint, counter text, n counter, PRIMARY KEY ((namespace, counter)))"
)
_INCREMENT: Final = "UPDATE {keyspace}.native SET n = n + ? WHERE namespace = ? AND counter = ?"


class RivalStore(CassandraStore):
    """The store, and the two statements."""

    async def insert_if_not_exists(self, namespace: Namespace, event: Event) -> bool:
        """Insert the event by a compare-and-set of its own; whether it is new. Exact about
        retries, and a round of Paxos an add."""
        dataset = namespace.dataset
        each = await self._slice_of(dataset, event.event_time_us)
        place = place_of(each, namespace.id, event)
        insert = await self._to_compare(dataset, INSERT_NEW[form_of(event)], place.start_us)
        rows = await self._connection.one(insert.bind((*key_of(place, event), *cells_of(event))))
        return bool(rows[0][0])

    async def increment(self, namespace: Namespace, event: Event) -> None:
        """Add to a native counter column. A retry counts twice: the column knows no tokens."""
        # Prepared as what compares is: the driver never sends it a second time.
        update = await self._to_compare(namespace.dataset, _INCREMENT)
        await self._connection.one(update.bind((event.delta, namespace.id, event.counter)))


class _RivalService(CounterService):
    """The service up to the point where an event is on time."""

    async def _submit(self, namespace: Namespace, event: Event) -> Added:
        if self._writer.is_late(namespace, event.event_time_us, self._clock.now_us()):
            return await super()._submit(namespace, event)
        if not isinstance(self._store, RivalStore):
            raise TypeError(f"{type(self._store)} is no RivalStore")
        await self._count(self._store, namespace, event)
        self.tally["original"] += 1
        return Added(event.counter, event.delta, event.event_time_us, False)

    async def _count(self, store: RivalStore, namespace: Namespace, event: Event) -> None:
        raise NotImplementedError


class LwtService(_RivalService):
    """One lightweight transaction an add."""

    async def _count(self, store: RivalStore, namespace: Namespace, event: Event) -> None:
        await store.insert_if_not_exists(namespace, event)


class NativeService(_RivalService):
    """One update of a native counter column an add."""

    async def _count(self, store: RivalStore, namespace: Namespace, event: Event) -> None:
        await store.increment(namespace, event)
