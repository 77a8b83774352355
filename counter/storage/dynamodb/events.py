"""The event log: one item an event, under its identity, in the table of its slice.

A conditional put finds what is there already, so an outcome is never in doubt: new, replayed or a
conflict. A void event is an item without a payload, which the put of the event cannot replace.
"""

from __future__ import annotations

import os
from asyncio import gather
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, cast

from counter.errors import UnavailableError
from counter.limits import TIME_MAX_US
from counter.ports import Counted
from counter.storage.dynamodb.driver import (
    HIGH,
    NEW,
    Item,
    NoTableError,
    Place,
    Refused,
    Write,
    each_of,
    put,
    some_at_once,
)
from counter.storage.dynamodb.layout import (
    event_from,
    event_item,
    event_key,
    event_place,
    events_partition,
    identity_place,
    is_event,
)
from counter.storage.dynamodb.session import DynamodbSession
from counter.types import Event, EventPage, Fold, Namespace, Slice, Span, Written
from counter.windows import fold_events, window_of

_ATTEMPTS_MAX: Final = 3
_ATTEMPT_BYTES: Final = 8
#: Counters whose events are read at once for one request.
_READ_AT_ONCE: Final = 16
#: A slice, and the part of it from an instant to another.
_Span = tuple[Slice, int, int]


class DynamodbEvents:
    """:class:`counter.ports.EventStore`."""

    def __init__(self, session: DynamodbSession) -> None:
        self._session = session
        self._driver = session.driver

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        self._session.check_exists(namespace)
        places = await self._places(namespace, events)
        firsts: dict[Place, int] = {}
        for at, place in enumerate(places):
            firsts.setdefault(place, at)
        found = await each_of(
            self._append(namespace, place, events[at]) for place, at in firsts.items()
        )
        outcomes = dict(zip(firsts, found, strict=True))
        answers: list[Written | UnavailableError] = []
        for at, place in enumerate(places):
            outcome, first = outcomes[place], firsts[place]
            if first != at and outcome in (Written.NEW, Written.REPLAYED):
                outcome = _compared(events[at], events[first])
            elif first != at and outcome is Written.CONFLICT:
                # The stored one may be as this one.
                [outcome] = await each_of([self._append(namespace, place, events[at])])
            answers.append(outcome)
        return answers

    async def _append(self, namespace: Namespace, place: Place, event: Event) -> Written:
        attempt = os.urandom(_ATTEMPT_BYTES)
        write = _put(place, event, attempt)
        async with self._session.while_kept(namespace.dataset, event.event_time_us):
            answer = await self._driver.write(write, namespace.dataset.write_timeout_us)
        return _outcome(event, answer, attempt) if isinstance(answer, Refused) else Written.NEW

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        self._session.check_exists(namespace)
        left = dict(zip(await self._places(namespace, events), events, strict=True))
        attempt, timeout_us = os.urandom(_ATTEMPT_BYTES), namespace.dataset.write_timeout_us
        # Without an own ClientRequestToken: under the same one a second attempt would be answered
        # as the first, and could not tell that it is a replay.
        while left:
            puts = [_put(place, event, attempt) for place, event in left.items()]
            async with self._session.while_kept(namespace.dataset, events[0].event_time_us):
                refused = await self._driver.transact(puts, timeout_us)
            if refused is None:
                return Written.NEW
            stored = {
                place: _outcome(event, each, attempt)
                for (place, event), each in zip(left.items(), refused, strict=True)
                if each is not None
            }
            for outcome in (Written.CONFLICT, Written.LATE, Written.NEW):
                if outcome in stored.values():
                    return outcome
            # A worker may have completed a part of it.
            left = {place: event for place, event in left.items() if place not in stored}
        return Written.REPLAYED

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        places = await self._places(namespace, events)
        async with self._session.while_kept(namespace.dataset, _earliest(events)):
            found = await self._driver.get_many(places)
        items = [found.get(place, {}) for place in places]
        return [event_from(item) if is_event(item) else None for item in items]

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        places = await self._places(namespace, events)
        pairs = zip(places, events, strict=True)
        await gather(*(self._append(namespace, place, event) for place, event in pairs))

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        places = await self._places(namespace, events)
        puts = (put(table, {"pk": key[0], "sk": key[1]}) for table, key in places)
        async with self._session.while_kept(namespace.dataset, _earliest(events)):
            await gather(*(self._driver.write(each) for each in puts))

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        spans = [(counter, start_us, start_us + size_us) for counter, start_us in windows]
        ends = (end_us for _, low_us, high_us in spans for end_us in (low_us, high_us - 1))
        await self._session.slices_of(namespace.dataset, list(ends))
        return [fold_events(events) for events in await self._between(namespace, spans)]

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Mapping[int, Fold]]:
        state = await self._session.state_until(namespace.dataset, span.to_us)
        state.check_kept(span.from_us)
        size_us = namespace.settings.rollup_window_us
        answer: list[Mapping[int, Fold]] = []
        for events in await self._between(namespace, [(each, *span) for each in counters]):
            windows: dict[int, list[Event]] = {}
            for event in events:
                windows.setdefault(window_of(event.event_time_us, size_us), []).append(event)
            answer.append({at: fold_events(some) for at, some in windows.items()})
        return answer

    async def tails(
        self, namespace: Namespace, after: Sequence[tuple[str, int]], until_us: int | None = None
    ) -> Sequence[Fold]:
        state = await self._session.state_until(namespace.dataset, until_us)
        end_us = state.slices[-1].end_us if state.slices else 0
        for _, after_us in after:
            state.check_kept(after_us + 1)
        end_us = end_us if until_us is None else min(end_us, until_us)
        spans = [(counter, after_us + 1, end_us) for counter, after_us in after]
        return [fold_events(events) for events in await self._between(namespace, spans)]

    async def scan(self, namespace: Namespace, counter: str, page: EventPage) -> Sequence[Event]:
        (from_us, to_us), limit, before = page
        dataset = namespace.dataset
        # No event is accepted from farther ahead than a slice.
        reach_us = self._session.clock.now_us() + dataset.slice_us + 2 * dataset.clock_skew_max_us
        state = await self._session.state_until(dataset, min(to_us, reach_us))
        for _ in range(_ATTEMPTS_MAX):
            spans = _spans(state.slices, from_us, to_us)
            try:
                return await self._scan(namespace, counter, spans, before, limit)
            except NoTableError:
                # Dropped meanwhile: what is still there begins later.
                state = await self._session.reload_slices(dataset)
        raise UnavailableError("slices were dropped during each attempt", retry_after_us=100_000)

    async def _scan(
        self,
        namespace: Namespace,
        counter: str,
        spans: Sequence[_Span],
        before: Event | None,
        limit: int,
    ) -> Sequence[Event]:
        items: list[Item] = []
        for each, low_us, high_us in reversed(spans):
            first = event_place(high_us - 1)
            if before is not None:
                first = max(first, identity_place(before) + b"\x00")
            last, left = event_place(low_us) + HIGH, limit - len(items)
            found = await self._items(namespace, counter, each, first, last, left)
            items += sorted(found, key=lambda item: cast(bytes, item["sk"]))[:left]
            if len(items) == limit:
                break
        return [event_from(item) for item in items]

    async def _between(
        self, namespace: Namespace, spans: Sequence[tuple[str, int, int]]
    ) -> list[list[Event]]:
        """Return the events of each (counter, from, to), in the order of its buckets."""
        if not spans:
            return []
        slices = self._session.state_of(namespace.dataset).slices
        async with self._session.while_kept(namespace.dataset, min(each[1] for each in spans)):
            reads = (self._events(namespace, slices, *span) for span in spans)
            return await some_at_once(reads, _READ_AT_ONCE)

    async def _events(
        self, namespace: Namespace, slices: Sequence[Slice], counter: str, low_us: int, high_us: int
    ) -> list[Event]:
        found = await gather(
            *(
                self._items(
                    namespace, counter, each, event_place(high - 1), event_place(low) + HIGH
                )
                for each, low, high in _spans(slices, low_us, high_us)
            )
        )
        return [event_from(item) for items in found for item in items]

    async def _items(
        self,
        namespace: Namespace,
        counter: str,
        each: Slice,
        first: bytes,
        last: bytes,
        limit: int | None = None,
    ) -> list[Item]:
        """Return the events of a part of a slice: of each bucket the first *limit*."""
        table = self._session.events(namespace.dataset, each.start_us)
        partitions = (
            events_partition(namespace, counter, bucket) for bucket in range(each.event_buckets)
        )
        query = partial(self._driver.query, limit=limit, keep=is_event)
        found = await gather(*(query(table, partition, first, last) for partition in partitions))
        return [item for items in found for item in items]

    async def _places(self, namespace: Namespace, events: Sequence[Event]) -> list[Place]:
        """Return the place of each event. Raises SliceMissingError."""
        places = []
        for event in events:
            each = await self._session.slice_of(namespace.dataset, event.event_time_us)
            table = self._session.events(namespace.dataset, each.start_us)
            places.append((table, event_key(namespace, each, event)))
        return places


def _spans(slices: Sequence[Slice], low_us: int, high_us: int) -> list[_Span]:
    """Return the parts of ``[low_us, high_us)`` by slice, earliest first."""
    parts = ((each, max(low_us, each.start_us), min(high_us, each.end_us)) for each in slices)
    return [part for part in parts if part[1] < part[2]]


def _earliest(events: Sequence[Event]) -> int:
    return min((event.event_time_us for event in events), default=TIME_MAX_US)


def _put(place: Place, event: Event, attempt: bytes) -> Write:
    return put(place[0], event_item(place[1], event, attempt), NEW)


def _outcome(event: Event, refused: Refused, attempt: bytes) -> Written:
    """Return the outcome of a put. A proxy may have sent the *attempt* twice: what it finds then is
    its own."""
    if refused.item.get("o") == attempt:
        return Written.NEW
    return _compared(event, event_from(refused.item)) if is_event(refused.item) else Written.LATE


def _compared(event: Event, stored: Event) -> Written:
    return Written.REPLAYED if stored.same_payload(event) else Written.CONFLICT
