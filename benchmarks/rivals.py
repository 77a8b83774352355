"""Other ways to count in Cassandra, behind the same API: what the benchmarks compare adds with.

Each does one statement an add, alone, once the token was checked. None leaves marks or names or
asks the guard, so each has less to do than the service.
"""

from __future__ import annotations

from typing import Any, Final

from counter.core.coalescing import Done as Told
from counter.core.results import Added
from counter.core.service import CounterService
from counter.errors import CounterError
from counter.storage.cassandra.connection import Done
from counter.storage.cassandra.store import CassandraStore
from counter.storage.cassandra.tables import INSERT_NEW, cells_of, form_of, key_of, place_of
from counter.types import Event, Namespace, Slice, Written

NATIVE_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS bench_default.native"
    " (namespace bigint, counter text, n counter, PRIMARY KEY ((namespace, counter)))"
)
_INCREMENT: Final = "UPDATE {keyspace}.native SET n = n + ? WHERE namespace = ? AND counter = ?"


class RivalStore(CassandraStore):
    """The store, and the two statements."""

    async def insert_if_not_exists(self, namespace: Namespace, event: Event) -> None:
        """Insert the event by a compare-and-set of its own. Exact about retries, and a round of
        Paxos an add."""
        dataset = namespace.dataset
        each = await self._slice_of(dataset, event.event_time_us)
        insert = await self._to_compare(dataset, INSERT_NEW[form_of(event)], each.start_us)
        await self._connection.one(_insert_of(insert, each, namespace, event))

    async def increment(self, namespace: Namespace, event: Event) -> None:
        """Add to a native counter column. A retry counts twice: the column knows no tokens."""
        # Prepared as what compares is: the driver never sends it a second time.
        update = await self._to_compare(namespace.dataset, _INCREMENT)
        await self._connection.one(update.bind((event.delta, namespace.id, event.counter)))

    def insert_soon(self, namespace: Namespace, event: Event, done: Done) -> bool:
        """The same without a task; False where the statement is not prepared yet."""
        dataset = namespace.dataset
        each = self._slice_at_hand(dataset, event.event_time_us)
        if each is None:
            return False
        insert = self._write_at_hand(dataset, INSERT_NEW[form_of(event)], each.start_us)
        if insert is None:
            return False
        self._connection.stream.send(_insert_of(insert, each, namespace, event), None, done)
        return True

    def increment_soon(self, namespace: Namespace, event: Event, done: Done) -> bool:
        """The same without a task; False where the statement is not prepared yet."""
        update = self._write_at_hand(namespace.dataset, _INCREMENT)
        if update is None:
            return False
        bound = update.bind((event.delta, namespace.id, event.counter))
        self._connection.stream.send(bound, None, done)
        return True


def _insert_of(insert: Any, each: Slice, namespace: Namespace, event: Event) -> Any:
    place = place_of(each, namespace.id, event)
    return insert.bind((*key_of(place, event), *cells_of(event)))


class _RivalService(CounterService):
    """The service up to the point where an event is on time."""

    _store: RivalStore

    async def _submit(self, namespace: Namespace, event: Event) -> Added:
        if self._writer.is_late(namespace, event.event_time_us, self._clock.now_us()):
            return await super()._submit(namespace, event)
        await self._count(namespace, event)
        self.tally["original"] += 1
        return Added(event.counter, event.delta, event.event_time_us, False)

    def add_soon(self, namespace: Namespace, event: Event, done: Told) -> bool:
        """Straight from the connection to the statement, as the service does it."""
        if self._writer.is_late(namespace, event.event_time_us, self._clock.now_us()):
            return False

        def ended(error: BaseException | None) -> None:
            if error is not None:
                done(error if isinstance(error, CounterError) else CounterError(str(error)))
                return
            self.tally["original"] += 1
            done(Written.NEW)

        return self._count_soon(namespace, event, ended)

    async def _count(self, namespace: Namespace, event: Event) -> None:
        raise NotImplementedError

    def _count_soon(self, namespace: Namespace, event: Event, done: Done) -> bool:
        raise NotImplementedError


class LwtService(_RivalService):
    """One lightweight transaction an add."""

    async def _count(self, namespace: Namespace, event: Event) -> None:
        await self._store.insert_if_not_exists(namespace, event)

    def _count_soon(self, namespace: Namespace, event: Event, done: Done) -> bool:
        return self._store.insert_soon(namespace, event, done)


class NativeService(_RivalService):
    """One update of a native counter column an add."""

    async def _count(self, namespace: Namespace, event: Event) -> None:
        await self._store.increment(namespace, event)

    def _count_soon(self, namespace: Namespace, event: Event, done: Done) -> bool:
        return self._store.increment_soon(namespace, event, done)
