"""Single events of namespaces that check payloads strictly: by compare-and-set alone.

What a compare-and-set writes bears the time of its ballot, not the event's, and one that was given
up can still be completed by the next one in its partition. So what stands under an identity is
changed by compare-and-set too, or it might come back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cassandra.query import BatchStatement, BatchType

from counter.errors import StoreUnavailableError, WriteTimeoutError, invariant
from counter.ports import Clock
from counter.storage.cassandra.gathering import Batch, Gatherer
from counter.storage.cassandra.options import CassandraOptions
from counter.storage.cassandra.rows import (
    INSERT_NEW,
    ROW_IS,
    Place,
    cells_of,
    form_of,
    key_of,
    shown,
)
from counter.storage.cassandra.writes import CassandraWrites, Lane
from counter.types import Dataset, Event, Namespace, Written

#: Rows that one compare-and-set inserts; if one of them stands it is done again without it.
_ROWS_MAX: Final = 32
_ATTEMPTS_MAX: Final = 5
#: Where several processes contend for a partition, each pauses at random, up to so long.
_PAUSE_S: Final = 0.02
#: Failures of a compare-and-set that contention may be the cause of.
_WORTH_ANOTHER: Final = (WriteTimeoutError, StoreUnavailableError)

#: An event, and the bound statement that inserts it.
_Insert = tuple[Event, Any]

#: The nulls are tombstones: they hide what was written plainly, before the check became strict.
_VOID_NEW: Final = (
    "INSERT INTO {keyspace}.{table} (namespace, counter, time_bucket, event_bucket, event_time,"
    " event_id, item, delta, clear, atom) VALUES (?, ?, ?, ?, ?, ?, ?, null, null, null)"
    " IF NOT EXISTS"
)
_VOID_STANDING: Final = (
    "UPDATE {keyspace}.{table} SET delta = null, clear = null, atom = null"
    f" WHERE {ROW_IS} IF EXISTS"
)
_DELETE_CELLS: Final = (
    f"DELETE delta, clear, atom FROM {{keyspace}}.{{table}} USING TIMESTAMP ? WHERE {ROW_IS}"
)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What became of an insert, and the event that stands after it; None where it is void."""

    outcome: Written
    event: Event | None

    def to(self, other: Event) -> Written:
        """The outcome for another send under the same identity."""
        if self.event is None:
            return Written.LATE
        return Written.REPLAYED if self.event.same_payload(other) else Written.CONFLICT


class StrictWrites(CassandraWrites):
    """Inserts that tell new from replayed from conflict, and voids that they respect."""

    def __init__(self, options: CassandraOptions, clock: Clock) -> None:
        super().__init__(options, clock)
        self._conditional: Gatherer[Lane, _Insert, Written] = Gatherer(
            self._begin_inserts, rows_max=_ROWS_MAX, at_once=1
        )
        self._inserting: set[asyncio.Task[None]] = set()

    async def _insert_new(
        self, namespace: Namespace, places: Sequence[Place], events: Sequence[Event]
    ) -> list[Written | BaseException | None]:
        """Insert each event unless its identity stands; an error in the place of its outcome."""
        dataset, items = namespace.dataset, []
        for place, event in zip(places, events, strict=True):
            insert = await self._to_compare(dataset, INSERT_NEW[form_of(event)], place.start_us)
            statement = insert.bind((*key_of(place, event), *cells_of(event)))
            items.append(((dataset.write_timeout_us, *place), (event, statement)))
        return await self._conditional.put(items)

    def _begin_inserts(self, batches: Sequence[Batch[Lane, _Insert, Written]]) -> None:
        for batch in batches:
            task = asyncio.create_task(self._insert(batch))
            self._inserting.add(task)
            task.add_done_callback(self._inserting.discard)

    async def _insert(self, batch: Batch[Lane, _Insert, Written]) -> None:
        try:
            results = await self._insert_lane(batch.key[0], batch.items)
        except Exception as error:
            batch.end(error)
        else:
            batch.succeed(results)

    async def _insert_lane(
        self, timeout_us: int, items: Sequence[_Insert]
    ) -> Sequence[Written | BaseException]:
        """Insert the events of one partition; of those of one identity the first."""
        firsts: dict[tuple[Any, ...], int] = {}
        for index, (event, _) in enumerate(items):
            firsts.setdefault(event[1:4], index)
        found = await self._insert_each(
            timeout_us, {identity: items[index] for identity, index in firsts.items()}
        )
        results: list[Written | BaseException] = []
        for index, (event, _) in enumerate(items):
            standing = found[event[1:4]]
            if isinstance(standing, Exception):
                results.append(standing)
            elif firsts[event[1:4]] == index:
                results.append(standing.outcome)
            else:
                results.append(standing.to(event))
        return results

    async def _insert_each(
        self, timeout_us: int, left: dict[tuple[Any, ...], tuple[Event, Any]]
    ) -> dict[tuple[Any, ...], _Standing | Exception]:
        """Insert all at once; where some stand, take note of them and do it again without them.

        One that timed out may have been applied. Done again it shows what stands: the same
        payload may then be its own, and whether it is cannot be told.
        """
        until_us = self._clock.boottime_us() + timeout_us
        found: dict[tuple[Any, ...], _Standing | Exception] = {}
        failures = 0
        while left:
            statement = _all_of([statement for _, statement in left.values()])
            (result,) = await self._connection.run((statement,), timeout_us)
            if isinstance(result, Exception):
                failures += 1
                again = isinstance(result, _WORTH_ANOTHER) and failures < _ATTEMPTS_MAX
                if again and self._clock.boottime_us() < until_us:
                    await asyncio.sleep(random.uniform(0, failures * _PAUSE_S))
                    continue
                return found | dict.fromkeys(left, result)
            if result[0][0]:
                return found | {
                    identity: _Standing(Written.NEW, event) for identity, (event, _) in left.items()
                }
            for row in result:
                identity, event = shown(row)
                standing = _Standing(Written.NEW, event)
                outcome = standing.to(left.pop(identity)[0])
                if failures and outcome is Written.REPLAYED:
                    outcome = Written.UNTOLD
                found[identity] = _Standing(outcome, event)
            invariant(bool(result), "a compare-and-set is refused by a row that stands")
        return found

    async def _void_strictly(self, dataset: Dataset, place: Place, event: Event) -> None:
        """Put a void row in the event's place, and hide what was or will be written plainly."""
        key = key_of(place, event)
        new = await self._to_compare(dataset, _VOID_NEW, place.start_us)
        standing = await self._to_compare(dataset, _VOID_STANDING, place.start_us)
        error: Exception | None = None
        for _ in range(_ATTEMPTS_MAX):
            (result,) = await self._connection.run((new.bind(key),))
            if not isinstance(result, Exception) and not result[0][0]:
                if shown(result[0])[1] is None:
                    break
                (result,) = await self._connection.run((standing.bind(key),))
            if not isinstance(result, Exception):
                break
            # Whether it was done is seen by doing it again.
            error = result
            if not isinstance(result, _WORTH_ANOTHER):
                raise error
            await asyncio.sleep(random.uniform(0, _PAUSE_S))
        else:
            invariant(error is not None, "a void that was not refused has failed")
            raise error or RuntimeError
        delete = await self._to_write(dataset, _DELETE_CELLS, place.start_us)
        stamp_us = max(self._stamp(), event.event_time_us + 1)
        await self._connection.one(delete.bind((stamp_us, *key)))


def _all_of(statements: Sequence[Any]) -> Any:
    """Compare-and-set *statements* of one partition as one: applied all or none."""
    if len(statements) == 1:
        return statements[0]
    first = statements[0]
    batch = BatchStatement(
        BatchType.UNLOGGED,
        consistency_level=first.consistency_level,
        serial_consistency_level=first.serial_consistency_level,
    )
    for statement in statements:
        batch.add(statement)
    return batch
