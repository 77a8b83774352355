"""Other ways to count in Cassandra, behind the same API: what the benchmarks compare adds with.

Each does one statement an add, alone, once the token was checked. None leaves marks or names or
asks the guard, so each has less to do than the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from counter.core.results import Added
from counter.core.service import CounterService
from counter.errors import CounterError
from counter.storage.cassandra.store import CassandraStore
from counter.storage.cassandra.tables import INSERT_NEW, cells_of, form_of, key_of, place_of
from counter.types import Event, Namespace, Written

NATIVE_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS bench_default.native"
    " (namespace bigint, counter text, n counter, PRIMARY KEY ((namespace, counter)))"
)
_INCREMENT: Final = "UPDATE {keyspace}.native SET n = n + ? WHERE namespace = ? AND counter = ?"


class RivalStore(CassandraStore):
    """The store, and the two statements; of each event None, or the error."""

    async def insert_if_not_exists(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Any]:
        """Insert each event by a compare-and-set of its own. Exact about retries, and a round of
        Paxos an add."""
        dataset, inserts = namespace.dataset, []
        for event in events:
            each = await self.session.slice_of(dataset, event.event_time_us)
            insert = await self.session.to_compare(
                dataset, INSERT_NEW[form_of(event)], each.start_us
            )
            place = place_of(each, namespace.id, event)
            inserts.append(insert.bind((*key_of(place, event), *cells_of(event))))
        return await self.session.connection.run(inserts)

    async def increment(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Any]:
        """Add to a native counter column. A retry counts twice: the column knows no tokens."""
        # Prepared as what compares is: the driver never sends it a second time.
        update = await self.session.to_compare(namespace.dataset, _INCREMENT)
        return await self.session.connection.run(
            [update.bind((event.delta, namespace.id, event.counter)) for event in events]
        )


class _RivalService(CounterService):
    """The service up to the point where an event is on time."""

    _store: RivalStore

    async def _submit(self, namespace: Namespace, event: Event) -> Added:
        if self._writer.is_late(namespace, event.event_time_us, self._clock.now_us()):
            return await super()._submit(namespace, event)
        [outcome] = await self._write_turn(namespace, (event,))
        if isinstance(outcome, CounterError):
            raise outcome
        return Added(event.counter, event.delta, event.event_time_us, False)

    async def _write_turn(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | CounterError]:
        """Count the adds of a turn together, as the service does it."""
        outcomes: list[Written | CounterError] = []
        for result in await self._count(namespace, events):
            if isinstance(result, CounterError):
                outcomes.append(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                self.tally["original"] += 1
                outcomes.append(Written.NEW)
        return outcomes

    async def _count(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Any]:
        raise NotImplementedError


class LwtService(_RivalService):
    """One lightweight transaction an add."""

    async def _count(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Any]:
        return await self._store.insert_if_not_exists(namespace, events)


class NativeService(_RivalService):
    """One update of a native counter column an add."""

    async def _count(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Any]:
        return await self._store.increment(namespace, events)
