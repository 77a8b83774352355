"""The event log on Cassandra: writing, finding and voiding; folds and scans are beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from counter.errors import SliceMissingError, UnavailableError
from counter.prompt import Told
from counter.storage.cassandra.failures import within
from counter.storage.cassandra.folds import EventFolds
from counter.storage.cassandra.rows import (
    DELETE,
    INSERT,
    SELECT,
    SELECT_ITEMS,
    Place,
    event_of,
    form_of,
    insert_of,
    key_of,
    place_of,
)
from counter.storage.cassandra.scans import EventScans
from counter.storage.cassandra.spans import PARTITIONS_MAX
from counter.storage.cassandra.strict import StrictWrites
from counter.storage.cassandra.writes import Lane
from counter.types import Event, Namespace, PayloadCheck, Written


class CassandraEvents(StrictWrites, EventFolds, EventScans):
    """:class:`counter.ports.EventStore`, its marks excepted; not transactional.

    Where payloads are checked strictly, events that are appended go in by compare-and-set. Items
    of atomic adds never do: a compare-and-set cannot span partitions. The two do not meet, for
    their item keys differ.
    """

    transactional = False

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        self._must_stand(namespace)
        places = await self._places(namespace, events)
        if namespace.settings.payload_check is PayloadCheck.STRICT:
            inserted = await self._insert_new(namespace, places, events)
            return [_told(outcome) for outcome in inserted]
        if len(events) == 1:
            row = await self._row_of(namespace, places[0], events[0])
            return [_told(result) for result in await self._rows.put((row,))]
        firsts = {(event.counter, *event[1:4]): at for at, event in reversed([*enumerate(events)])}
        alone = list(firsts.values())
        results = await self._rows.put(
            [await self._row_of(namespace, places[at], events[at]) for at in alone]
        )
        outcomes = dict(zip(alone, map(_told, results), strict=True))
        answers: list[Written | UnavailableError] = []
        for event in events:
            first = firsts[(event.counter, *event[1:4])]
            outcome = outcomes[first]
            if outcome is Written.UNTOLD and not event.same_payload(events[first]):
                outcome = Written.CONFLICT
            answers.append(outcome)
        return answers

    def append_soon(self, namespace: Namespace, event: Event, told: Told) -> bool:
        """See :class:`counter.prompt.PromptStore`."""
        dataset = namespace.dataset
        each = self._slice_at_hand(dataset, event.event_time_us)
        if (
            each is None
            or namespace.id in self._gone
            or namespace.settings.payload_check is PayloadCheck.STRICT
        ):
            return False
        insert = self._write_at_hand(dataset, INSERT[form_of(event)], each.start_us)
        if insert is None:
            return False
        place = place_of(each, namespace.id, event)
        lane = (dataset.write_timeout_us, *place)
        self._rows.begin(lane, insert_of(insert, place, event), _Sink(told))
        return True

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        self._must_stand(namespace)
        places = await self._places(namespace, events)
        outcome = Written.UNTOLD
        if namespace.settings.payload_check is PayloadCheck.STRICT:
            found = await self._found(namespace, places, events)
            outcome = _compared(events, found)
            if outcome is Written.CONFLICT:
                return outcome
        # Not a logged batch: to write its batch log takes two other nodes, and one may be silent.
        # What lands in part is completed or voided by the mark that was left before.
        await self._write(
            [
                await self._row_of(namespace, place, event)
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
                insert = await self._insert_of(namespace, place, event)
                plain.append(((None, *place), insert))
        inserted = await self._insert_new(
            namespace, [places[at] for at in strict], [events[at] for at in strict]
        )
        for outcome in inserted:
            if isinstance(outcome, BaseException):
                raise outcome
        await self._write(plain)

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        places = await self._places(namespace, events)
        await asyncio.gather(
            *(
                self._void_one(namespace, place, event)
                for place, event in zip(places, events, strict=True)
            )
        )

    async def _void_one(self, namespace: Namespace, place: Place, event: Event) -> None:
        if _is_strict(namespace, event):
            # Given up in the middle it is no harm: whoever asks about the token does it again.
            async with within(namespace.dataset.write_timeout_us):
                await self._void_strictly(namespace.dataset, place, event)
            return
        delete = await self._to_write(namespace.dataset, DELETE, place.start_us)
        stamp_us = max(self._stamp(), event.event_time_us + 1)
        await self._connection.one(delete.bind((stamp_us, *key_of(place, event))))

    async def _places(self, namespace: Namespace, events: Sequence[Event]) -> list[Place]:
        """Where each event lies. Raises SliceMissingError."""
        dataset, places = namespace.dataset, []
        for event in events:
            each = await self._slice_of(dataset, event.event_time_us)
            places.append(place_of(each, namespace.id, event))
        return places

    async def _row_of(
        self, namespace: Namespace, place: Place, event: Event
    ) -> tuple[Lane, object]:
        """The plain insert of *event*, in its partition's lane."""
        lane = (namespace.dataset.write_timeout_us, *place)
        return lane, await self._insert_of(namespace, place, event)

    async def _insert_of(self, namespace: Namespace, place: Place, event: Event) -> object:
        """The plain insert of *event*, at its own time."""
        insert = await self._to_write(namespace.dataset, INSERT[form_of(event)], place.start_us)
        return insert_of(insert, place, event)

    async def _found(
        self, namespace: Namespace, places: Sequence[Place], events: Sequence[Event]
    ) -> list[Event | None]:
        """The stored event of each identity.

        Events that a compare-and-set writes are read at SERIAL: one under way must not be missed.
        Of the others, items of one token share a statement.
        """
        dataset, pairs = namespace.dataset, list(zip(places, events, strict=True))
        strict = [pair for pair in pairs if _is_strict(namespace, pair[1])]
        selects = []
        for place, event in strict:
            select = await self._to_settle(dataset, SELECT, place.start_us)
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
            select = await self._to_read(dataset, SELECT_ITEMS, start_us)
            reads.append(select.bind((namespace.id, counters, *key)))
        try:
            settled = await self._connection.settled(selects) if selects else []
            read = await self._connection.rows(reads)
        except SliceMissingError:
            await self._reload_slices(dataset)
            raise
        found: dict[tuple[Any, ...], Event | None] = {}
        for (_, event), rows in zip(strict, settled, strict=True):
            found[event[:4]] = event_of(event.counter, event[1:4], *rows[0]) if rows else None
        for (token, _), rows in zip(asked, read, strict=True):
            for counter, item_key, *cells in rows or ():
                identity = (*token[-2:], item_key)
                found[(counter, *identity)] = event_of(counter, identity, *cells)
        return [found.get(event[:4]) for event in events]


class _Sink:
    """Tells what became of one event."""

    __slots__ = ("_told",)

    def __init__(self, told: Told) -> None:
        self._told = told

    def settle(self, _index: int, result: BaseException | None) -> None:
        self._told(Written.UNTOLD if result is None else result)


def _is_strict(namespace: Namespace, event: Event) -> bool:
    """Whether *event* is written by compare-and-set."""
    return event.item_key == 0 and namespace.settings.payload_check is PayloadCheck.STRICT


def _told(outcome: Written | BaseException | None) -> Written | UnavailableError:
    """An outcome of one event; raises what is no fault of the store."""
    if outcome is None:
        return Written.UNTOLD
    if isinstance(outcome, BaseException) and not isinstance(outcome, UnavailableError):
        raise outcome
    return outcome


def _compared(events: Sequence[Event], found: Sequence[Event | None]) -> Written:
    """What a write of all the *events* is over what was found of them.

    Never NEW: what nobody found, two sends at once may both have looked for.
    """
    pairs = list(zip(events, found, strict=True))
    if any(stored is not None and not stored.same_payload(event) for event, stored in pairs):
        return Written.CONFLICT
    return Written.REPLAYED if all(stored for _, stored in pairs) else Written.UNTOLD
