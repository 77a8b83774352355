"""The event log: one item an event, under its identity, in the table of its slice.

A conditional put finds what is there already, so an outcome is never in doubt: new, replayed or a
conflict. A void event is an item without a payload, which the put of the event cannot replace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from counter.errors import SliceMissingError, UnavailableError, invariant
from counter.folds import fold_events
from counter.ports import Counted
from counter.storage.dynamodb.driver import (
    Item,
    Key,
    NoTableError,
    Put,
    Refused,
    each_of,
    together,
)
from counter.storage.dynamodb.session import Session, spans_of
from counter.storage.dynamodb.tables import (
    LAST,
    event_from,
    event_item,
    event_key,
    event_place,
    events_partition,
)
from counter.types import Event, Fold, Namespace, Slice, Written
from counter.windows import window_of

_NEW: Final = "attribute_not_exists(pk)"
_ATTEMPTS_MAX: Final = 3
_ATTEMPT_BYTES: Final = 8

#: The table and the key of an event.
_Place = tuple[str, Key]


class DynamodbEvents:
    """:class:`counter.ports.EventStore`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._driver = session.driver

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        self._session.check_exists(namespace)
        places = await self._places(namespace, events)
        firsts: dict[_Place, int] = {}
        for at, place in enumerate(places):
            firsts.setdefault(place, at)
        found = await each_of(
            self._append(namespace, place, events[at]) for place, at in firsts.items()
        )
        outcomes = dict(zip(firsts, found, strict=True))
        answers: list[Written | UnavailableError] = []
        for at, (place, event) in enumerate(zip(places, events, strict=True)):
            outcome = outcomes[place]
            if firsts[place] != at and outcome in (Written.NEW, Written.REPLAYED):
                outcome = _compared(event, events[firsts[place]])
            answers.append(outcome)
        return answers

    async def _append(self, namespace: Namespace, place: _Place, event: Event) -> Written:
        attempt = os.urandom(_ATTEMPT_BYTES)
        put = _put(place, event, attempt)
        try:
            refused = await self._driver.write(put, namespace.dataset.write_timeout_us)
        except NoTableError as error:
            raise await self._session.missing(namespace.dataset, error) from error
        return _outcome(event, refused if isinstance(refused, Refused) else None, attempt)

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        self._session.check_exists(namespace)
        left = dict(zip(await self._places(namespace, events), events, strict=True))
        attempt = os.urandom(_ATTEMPT_BYTES)
        # Without an own ClientRequestToken: under the same one a second attempt would be answered
        # as the first, and could not tell that it is a replay.
        while left:
            puts = [_put(place, event, attempt) for place, event in left.items()]
            try:
                refused = await self._driver.transact(puts, namespace.dataset.write_timeout_us)
            except NoTableError as error:
                raise await self._session.missing(namespace.dataset, error) from error
            if refused is None:
                return Written.NEW
            stored = {
                place: _outcome(event, each, attempt)
                for (place, event), each in zip(left.items(), refused, strict=True)
                if each is not None
            }
            for outcome in (Written.CONFLICT, Written.LATE):
                if outcome in stored.values():
                    return outcome
            if Written.NEW in stored.values():
                return Written.NEW
            # A worker may have completed a part of it.
            left = {place: event for place, event in left.items() if place not in stored}
        return Written.REPLAYED

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        places = await self._places(namespace, events)
        keys: dict[str, list[Key]] = {}
        for table, key in places:
            keys.setdefault(table, []).append(key)
        found: dict[_Place, Item] = {}
        for table, some in keys.items():
            try:
                items = await self._driver.get_many(table, some)
            except NoTableError as error:
                raise await self._session.missing(namespace.dataset, error) from error
            found |= {(table, key): item for key, item in items.items()}
        return [event_from(found.get(place, {})) for place in places]

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        places = await self._places(namespace, events)
        await together(
            self._append(namespace, place, event)
            for place, event in zip(places, events, strict=True)
        )

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        places = await self._places(namespace, events)
        try:
            await together(
                self._driver.write(Put(table, {"pk": key[0], "sk": key[1]}))
                for table, key in places
            )
        except NoTableError as error:
            raise await self._session.missing(namespace.dataset, error) from error

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        for _, start_us in windows:
            await self._session.slice_of(namespace.dataset, start_us)
            await self._session.slice_of(namespace.dataset, start_us + size_us - 1)
        slices = self._session.state_of(namespace.dataset).slices
        found = await together(
            self._between(namespace, slices, counter, start_us, start_us + size_us)
            for counter, start_us in windows
        )
        return [fold_events(events) for events in found]

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], *, from_us: int, to_us: int
    ) -> Sequence[Mapping[int, Fold]]:
        state = await self._session.state_until(namespace.dataset, to_us)
        _require_kept(from_us, state.dropped_us)
        size_us = namespace.settings.rollup_window_us
        answer: list[Mapping[int, Fold]] = []
        for events in await together(
            self._between(namespace, state.slices, counter, from_us, to_us) for counter in counters
        ):
            windows: dict[int, list[Event]] = {}
            for event in events:
                windows.setdefault(window_of(event.event_time_us, size_us), []).append(event)
            answer.append({at: fold_events(some) for at, some in windows.items()})
        return answer

    async def tails(
        self,
        namespace: Namespace,
        after: Sequence[tuple[str, int]],
        *,
        until_us: int | None = None,
    ) -> Sequence[Fold]:
        state = await self._session.state_until(namespace.dataset, until_us)
        end_us = state.slices[-1].end_us if state.slices else 0
        if until_us is not None:
            end_us = min(end_us, until_us)
        for _, after_us in after:
            _require_kept(after_us + 1, state.dropped_us)
        found = await together(
            self._between(namespace, state.slices, counter, after_us + 1, end_us)
            for counter, after_us in after
        )
        return [fold_events(events) for events in found]

    async def scan(
        self,
        namespace: Namespace,
        counter: str,
        *,
        from_us: int,
        to_us: int,
        before: Event | None,
        limit: int,
    ) -> Sequence[Event]:
        dataset = namespace.dataset
        # No event is accepted from farther ahead than a slice.
        reach_us = self._session.clock.now_us() + dataset.slice_us + 2 * dataset.clock_skew_max_us
        state = await self._session.state_until(dataset, min(to_us, reach_us))
        for _ in range(_ATTEMPTS_MAX):
            events: list[Event] = []
            try:
                for each, low_us, high_us in reversed(spans_of(state.slices, from_us, to_us)):
                    if len(events) < limit:
                        events += await self._scan(
                            namespace, counter, each, low_us, high_us, before, limit - len(events)
                        )
            except NoTableError:
                # Dropped meanwhile: what is still there begins later.
                state = await self._session.reload(dataset)
            else:
                return events
        raise UnavailableError("slices vanish again and again", retry_after_us=100_000)

    async def _scan(
        self,
        namespace: Namespace,
        counter: str,
        each: Slice,
        low_us: int,
        high_us: int,
        before: Event | None,
        limit: int,
    ) -> list[Event]:
        """Return a slice's first *limit* events after *before*; void ones count as read."""
        first = event_place(high_us - 1)
        if before is not None:
            # The item key that follows: it has four bytes, and its bound fits them.
            place = event_key(namespace.id, each, before)[1]
            first = max(first, place + b"\x00")
        last = event_place(low_us) + LAST
        table = self._session.events(namespace.dataset, each.start_us)
        events: list[Event] = []
        while len(events) < limit and first <= last:
            pages = await together(
                self._driver.query(
                    table, events_partition(namespace.id, counter, bucket), first, last, limit=limit
                )
                for bucket in range(each.event_buckets)
            )
            # Nothing is missing up to the earliest end of a page that has more behind it.
            ends = [page[-1]["sk"] for page in pages if len(page) == limit]
            known = min(ends, default=last)
            items = sorted(
                (item for page in pages for item in page if item["sk"] <= known),
                key=lambda item: item["sk"],
            )
            events += [event for item in items if (event := event_from(item)) is not None]
            if not ends:
                break
            first = known + b"\x00"
        return events[:limit]

    async def _between(
        self, namespace: Namespace, slices: Sequence[Slice], counter: str, low_us: int, high_us: int
    ) -> list[Event]:
        """Return a counter's events of ``[low_us, high_us)`` in the order of its buckets."""
        try:
            found: list[list[Item]] = await together(
                self._driver.query(
                    self._session.events(namespace.dataset, each.start_us),
                    events_partition(namespace.id, counter, bucket),
                    event_place(high - 1),
                    event_place(low) + LAST,
                )
                for each, low, high in spans_of(slices, low_us, high_us)
                for bucket in range(each.event_buckets)
            )
        except NoTableError as error:
            raise await self._session.missing(namespace.dataset, error) from error
        events = (event_from(item) for items in found for item in items)
        return [event for event in events if event is not None]

    async def _places(self, namespace: Namespace, events: Sequence[Event]) -> list[_Place]:
        """Return the place of each event. Raises SliceMissingError."""
        places = []
        for event in events:
            each = await self._session.slice_of(namespace.dataset, event.event_time_us)
            table = self._session.events(namespace.dataset, each.start_us)
            places.append((table, event_key(namespace.id, each, event)))
        return places


def _put(place: _Place, event: Event, attempt: bytes) -> Put:
    table, key = place
    return Put(table, event_item(key, event, attempt), _NEW)


def _outcome(event: Event, refused: Refused | None, attempt: bytes) -> Written:
    """Return the outcome of a put. A proxy may have sent the *attempt* twice: what it finds then is
    its own."""
    if refused is None or (refused.item or {}).get("o") == attempt:
        return Written.NEW
    return _compared(event, event_from(refused.item or {}))


def _compared(event: Event, stored: Event | None) -> Written:
    """Return the outcome for *event* where *stored* is already; None if that is void."""
    if stored is None:
        return Written.LATE
    return Written.REPLAYED if stored.same_payload(event) else Written.CONFLICT


def _require_kept(from_us: int, dropped_us: int) -> None:
    if from_us < dropped_us:
        raise SliceMissingError(
            f"events from {from_us} µs on were asked for; those before {dropped_us} µs are dropped"
        )


invariant(len(LAST) <= 1_024, "a sort key of DynamoDB has at most 1,024 bytes")
