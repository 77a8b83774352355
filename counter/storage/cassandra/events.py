"""The event log in Cassandra: write, find and void events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cassandra.query import BatchStatement, BatchType

from counter.errors import (
    SliceMissingError,
    StoreUnavailableError,
    UnavailableError,
    WriteTimeoutError,
    invariant,
)
from counter.limits import PENDING_WRITES_MAX
from counter.storage.cassandra.driver import within
from counter.storage.cassandra.event_reads import PARTITIONS_MAX, EventFolds, EventScans
from counter.storage.cassandra.session import CassandraSession, Lane
from counter.storage.cassandra.tables import (
    DELETE,
    INSERT,
    INSERT_NEW,
    ROW_IS,
    SELECT,
    SELECT_ITEMS,
    Place,
    cells_of,
    event_of,
    form_of,
    insert_of,
    key_of,
    place_of,
    shown,
)
from counter.storage.shared.batching import Batch, Batcher
from counter.types import Dataset, Event, Namespace, PayloadCheck, Written

#: Rows that one compare-and-set inserts; if one of them exists, it is retried without that row.
_ROWS_MAX: Final = 32
_ATTEMPTS_MAX: Final = 5
#: The maximum of the random pause of processes that contend for a partition.
_PAUSE_S: Final = 0.02
#: Failures of a compare-and-set that contention may cause.
_WORTH_ANOTHER: Final = (WriteTimeoutError, StoreUnavailableError)

#: An event, and the bound statement that inserts it.
_Insert = tuple[Event, Any]

#: The nulls are tombstones: they hide plain writes from before the check became strict.
_VOID_NEW: Final = (
    "INSERT INTO {keyspace}.{table} (namespace, counter, time_bucket, event_bucket, event_time,"
    " event_id, item, delta, clear, atom) VALUES (?, ?, ?, ?, ?, ?, ?, null, null, null)"
    " IF NOT EXISTS"
)
_VOID_STORED: Final = (
    "UPDATE {keyspace}.{table} SET delta = null, clear = null, atom = null"
    f" WHERE {ROW_IS} IF EXISTS"
)
_DELETE_CELLS: Final = (
    f"DELETE delta, clear, atom FROM {{keyspace}}.{{table}} USING TIMESTAMP ? WHERE {ROW_IS}"
)


@dataclass(frozen=True, slots=True)
class _Stored:
    """The outcome of an insert, and the event that exists after it; None if it is void."""

    outcome: Written
    event: Event | None

    def to(self, other: Event) -> Written:
        """Return the outcome for another attempt with the same identity."""
        if self.event is None:
            return Written.LATE
        return Written.REPLAYED if self.event.same_payload(other) else Written.CONFLICT


class StrictWrites:
    """Inserts that distinguish new, replayed and conflict, and voids that they respect."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        self._conditional: Batcher[Lane, _Insert, Written | BaseException] = Batcher(
            self._begin_inserts,
            name="Cassandra",
            items_max=_ROWS_MAX,
            waiting_max=PENDING_WRITES_MAX,
        )
        self._inserting: set[asyncio.Task[None]] = set()

    async def insert_new(
        self, namespace: Namespace, places: Sequence[Place], events: Sequence[Event]
    ) -> list[Written | BaseException]:
        """Insert each event unless its identity exists; return an outcome or error for each."""
        dataset, items = namespace.dataset, []
        for place, event in zip(places, events, strict=True):
            insert = await self._session.to_compare(
                dataset, INSERT_NEW[form_of(event)], place.start_us
            )
            statement = insert.bind((*key_of(place, event), *cells_of(event)))
            items.append(((dataset.write_timeout_us, *place), (event, statement)))
        return await self._conditional.put_all(items)

    def _begin_inserts(
        self, batches: Sequence[Batch[Lane, _Insert, Written | BaseException]]
    ) -> None:
        for batch in batches:
            task = asyncio.create_task(self._insert(batch))
            self._inserting.add(task)
            task.add_done_callback(self._inserting.discard)

    async def _insert(self, batch: Batch[Lane, _Insert, Written | BaseException]) -> None:
        try:
            results = await self._insert_lane(batch.key[0], batch.items)
        except Exception as error:
            batch.end_all(error)
        else:
            batch.end(results)

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
            stored = found[event[1:4]]
            if isinstance(stored, Exception):
                results.append(stored)
            elif firsts[event[1:4]] == index:
                results.append(stored.outcome)
            else:
                results.append(stored.to(event))
        return results

    async def _insert_each(
        self, timeout_us: int, left: dict[tuple[Any, ...], tuple[Event, Any]]
    ) -> dict[tuple[Any, ...], _Stored | Exception]:
        """Insert all at once; if some exist, record them and retry without them.

        An attempt that timed out may have been applied. The retry shows what exists: the same
        payload may be its own, so whether it is a replay is unknown.
        """
        until_us = self._session.clock.boottime_us() + timeout_us
        found: dict[tuple[Any, ...], _Stored | Exception] = {}
        failures = 0
        while left:
            statement = _all_of([statement for _, statement in left.values()])
            (result,) = await self._session.connection.run((statement,), timeout_us)
            if isinstance(result, Exception):
                failures += 1
                again = isinstance(result, _WORTH_ANOTHER) and failures < _ATTEMPTS_MAX
                if again and self._session.clock.boottime_us() < until_us:
                    await asyncio.sleep(random.uniform(0, failures * _PAUSE_S))
                    continue
                return found | dict.fromkeys(left, result)
            if result[0][0]:
                return found | {
                    identity: _Stored(Written.NEW, event) for identity, (event, _) in left.items()
                }
            for row in result:
                identity, event = shown(row)
                stored = _Stored(Written.NEW, event)
                outcome = stored.to(left.pop(identity)[0])
                if failures and outcome is Written.REPLAYED:
                    outcome = Written.UNVERIFIED
                found[identity] = _Stored(outcome, event)
            invariant(bool(result), "a compare-and-set is refused by a row that exists")
        return found

    async def void(self, dataset: Dataset, place: Place, event: Event) -> None:
        """Insert a void row in the event's place, and hide earlier and later plain writes."""
        key = key_of(place, event)
        new = await self._session.to_compare(dataset, _VOID_NEW, place.start_us)
        stored_void = await self._session.to_compare(dataset, _VOID_STORED, place.start_us)
        error: Exception | None = None
        for _ in range(_ATTEMPTS_MAX):
            (result,) = await self._session.connection.run((new.bind(key),))
            if not isinstance(result, Exception) and not result[0][0]:
                if shown(result[0])[1] is None:
                    break
                (result,) = await self._session.connection.run((stored_void.bind(key),))
            if not isinstance(result, Exception):
                break
            # The retry shows whether it was done.
            error = result
            if not isinstance(result, _WORTH_ANOTHER):
                raise error
            await asyncio.sleep(random.uniform(0, _PAUSE_S))
        else:
            invariant(error is not None, "a void that was not refused has failed")
            raise error or RuntimeError
        delete = await self._session.to_write(dataset, _DELETE_CELLS, place.start_us)
        stamp_us = max(self._session.stamp(), event.event_time_us + 1)
        await self._session.connection.one(delete.bind((stamp_us, *key)))


def _all_of(statements: Sequence[Any]) -> Any:
    """Run *statements* of one partition as one compare-and-set: all are applied or none."""
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


class CassandraEvents:
    """:class:`counter.ports.EventStore`.

    With a strict payload check, events are appended by compare-and-set, except items of atomic
    adds, because a compare-and-set cannot span partitions. The two never collide, because their
    item keys differ. What a compare-and-set may have written is voided by one, with any check.
    """

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        self._strict = StrictWrites(session)
        folds = EventFolds(session)
        self.sums, self.window_folds, self.tails = folds.sums, folds.window_folds, folds.tails
        self.scan = EventScans(session).scan

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        self._session.check_exists(namespace)
        places = await self._places(namespace, events)
        if namespace.settings.payload_check is PayloadCheck.STRICT:
            inserted = await self._strict.insert_new(namespace, places, events)
            return [_outcome_of(outcome) for outcome in inserted]
        firsts: dict[tuple[Any, ...], int] = {}
        for at, event in enumerate(events):
            firsts.setdefault(event[:4], at)
        alone = list(firsts.values())
        timeout_us = namespace.dataset.write_timeout_us
        results = await self._session.rows.put_all(
            [await self._row_of(namespace, timeout_us, places[at], events[at]) for at in alone]
        )
        outcomes = [_outcome_of(result) for result in results]
        if len(alone) == len(events):
            return outcomes
        found = dict(zip(firsts, outcomes, strict=True))
        answers: list[Written | UnavailableError] = []
        for event in events:
            outcome = found[event[:4]]
            if outcome is Written.UNVERIFIED and not event.same_payload(events[firsts[event[:4]]]):
                outcome = Written.CONFLICT
            answers.append(outcome)
        return answers

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        self._session.check_exists(namespace)
        places = await self._places(namespace, events)
        outcome = Written.UNVERIFIED
        if namespace.settings.payload_check is PayloadCheck.STRICT:
            found = await self._found(namespace, places, events)
            outcome = _compared(events, found)
            if outcome is Written.CONFLICT:
                return outcome
        # Not a logged batch: its batch log needs two other nodes, and one may be silent. The mark
        # from before ensures that a partly written add is completed or voided.
        timeout_us = namespace.dataset.write_timeout_us
        await self._session.write(
            [
                await self._row_of(namespace, timeout_us, place, event)
                for place, event in zip(places, events, strict=True)
            ]
        )
        return outcome

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        return await self._found(namespace, await self._places(namespace, events), events)

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        places = await self._places(namespace, events)
        plain: list[tuple[Lane, object]] = []
        strict: list[int] = []
        for at, (place, event) in enumerate(zip(places, events, strict=True)):
            if _is_strict(namespace, event):
                strict.append(at)
            else:
                plain.append(await self._row_of(namespace, None, place, event))
        inserted = await self._strict.insert_new(
            namespace, [places[at] for at in strict], [events[at] for at in strict]
        )
        for outcome in inserted:
            if isinstance(outcome, BaseException):
                raise outcome
        await self._session.write(plain)

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        places = await self._places(namespace, events)
        await asyncio.gather(
            *(
                self._void_one(namespace, place, event)
                for place, event in zip(places, events, strict=True)
            )
        )

    async def _void_one(self, namespace: Namespace, place: Place, event: Event) -> None:
        # A compare-and-set may land at any time, with a timestamp of then, and only another one
        # stops it. Whatever the check is now, it may have been strict when the event was sent.
        if event.item_key == 0:
            # An interruption does no harm: the next resolution of the token repeats it.
            async with within(namespace.dataset.write_timeout_us):
                await self._strict.void(namespace.dataset, place, event)
            return
        delete = await self._session.to_write(namespace.dataset, DELETE, place.start_us)
        stamp_us = max(self._session.stamp(), event.event_time_us + 1)
        await self._session.connection.one(delete.bind((stamp_us, *key_of(place, event))))

    async def _places(self, namespace: Namespace, events: Sequence[Event]) -> list[Place]:
        """Return the partition of each event. Raises SliceMissingError."""
        dataset, places = namespace.dataset, []
        for event in events:
            each = await self._session.slice_of(dataset, event.event_time_us)
            places.append(place_of(each, namespace.id, event))
        return places

    async def _row_of(
        self, namespace: Namespace, timeout_us: int | None, place: Place, event: Event
    ) -> tuple[Lane, object]:
        """Return the plain insert of *event*, at its own time, and its lane."""
        insert = await self._session.to_write(
            namespace.dataset, INSERT[form_of(event)], place.start_us
        )
        return (timeout_us, *place), insert_of(insert, place, event)

    async def _found(
        self, namespace: Namespace, places: Sequence[Place], events: Sequence[Event]
    ) -> list[Event | None]:
        """Return the stored event of each identity.

        Events that a compare-and-set writes are read at SERIAL, so that none in progress is missed.
        Others are read at the write consistency: a worker counts an atomic add whose items are all
        there, so each data center must have them then. The items of one token share a statement.
        """
        dataset, pairs = namespace.dataset, list(zip(places, events, strict=True))
        strict = [pair for pair in pairs if _is_strict(namespace, pair[1])]
        selects = []
        for place, event in strict:
            select = await self._session.to_settle(dataset, SELECT, place.start_us)
            selects.append(select.bind(key_of(place, event)))
        tokens: dict[tuple[Any, ...], dict[str, None]] = {}
        for place, event in pairs:
            if not _is_strict(namespace, event):
                start_us, _, _, *buckets = place
                token = (start_us, *buckets, event.event_time_us, event.event_id)
                tokens.setdefault(token, {})[event.counter] = None
        asked = [
            (token, tuple(counters)[at : at + PARTITIONS_MAX])
            for token, counters in tokens.items()
            for at in range(0, len(counters), PARTITIONS_MAX)
        ]
        reads = []
        for (start_us, *key), counters in asked:
            select = await self._session.to_find(dataset, SELECT_ITEMS, start_us)
            reads.append(select.bind((namespace.id, counters, *key)))
        try:
            settled = await self._session.connection.settled(selects) if selects else []
            read = await self._session.connection.rows(reads)
        except SliceMissingError:
            await self._session.reload_slices(dataset)
            raise
        found: dict[tuple[Any, ...], Event | None] = {}
        for (_, event), rows in zip(strict, settled, strict=True):
            found[event[:4]] = event_of(event.counter, event[1:4], *rows[0]) if rows else None
        for (token, _), rows in zip(asked, read, strict=True):
            for counter, item_key, *cells in rows or ():
                identity = (*token[-2:], item_key)
                found[(counter, *identity)] = event_of(counter, identity, *cells)
        return [found.get(event[:4]) for event in events]


def _is_strict(namespace: Namespace, event: Event) -> bool:
    """Return whether *event* is written by compare-and-set."""
    return event.item_key == 0 and namespace.settings.payload_check is PayloadCheck.STRICT


def _outcome_of(outcome: Written | BaseException | None) -> Written | UnavailableError:
    """Return the outcome of one event; raises errors that are not the store's."""
    if outcome is None:
        return Written.UNVERIFIED
    if isinstance(outcome, BaseException) and not isinstance(outcome, UnavailableError):
        raise outcome
    return outcome


def _compared(events: Sequence[Event], found: Sequence[Event | None]) -> Written:
    """Return the outcome of writing all *events*, given what was *found* of them.

    Never NEW: two concurrent attempts may both have found nothing.
    """
    pairs = list(zip(events, found, strict=True))
    if any(stored is not None and not stored.same_payload(event) for event, stored in pairs):
        return Written.CONFLICT
    return Written.REPLAYED if all(stored for _, stored in pairs) else Written.UNVERIFIED
