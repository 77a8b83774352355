"""Store the event log in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from counter.errors import SliceMissingError
from counter.ports import Counted
from counter.storage.memory.tables import Tables
from counter.types import Event, EventPage, Fold, Namespace, Span, Written
from counter.windows import fold_events, slice_of, window_of


class MemoryEvents:
    """:class:`counter.ports.EventStore`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def append(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Written]:
        partitions = self._tables.partitions(namespace, events)
        written = []
        for event, partition in zip(events, partitions, strict=True):
            written.append(_compare(event, partition.get(event)))
            partition.insert(event)
        return written

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        partitions = self._tables.partitions(namespace, events)
        pairs = list(zip(events, partitions, strict=True))
        outcomes = [_compare(event, partition.get(event)) for event, partition in pairs]
        if Written.CONFLICT in outcomes:
            return Written.CONFLICT
        for event, partition in pairs:
            partition.insert(event)
        return Written.NEW if Written.NEW in outcomes else Written.REPLAYED

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        partitions = self._tables.partitions(namespace, events)
        return [each.get(event) for event, each in zip(events, partitions, strict=True)]

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        state, folds = self._tables.state_of(namespace.dataset), []
        window_us = namespace.settings.rollup_window_us
        for counter, start_us in windows:
            slice_of(state.slices, start_us)
            slice_of(state.slices, start_us + window_us - 1)
            events = [*state.between(namespace.id, counter, start_us, start_us + window_us)]
            folds.append(fold_events(events))
            if events and counted is not None:
                counted(counter, start_us, len(events))
        return folds

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Mapping[int, Fold]]:
        state, size_us = (
            self._tables.state_of(namespace.dataset),
            namespace.settings.rollup_window_us,
        )
        if span.from_us < state.dropped_before_us:
            raise SliceMissingError(
                f"events from {span.from_us} µs on were asked for; those before"
                f" {state.dropped_before_us} µs are dropped"
            )
        answer = []
        for counter in counters:
            windows: dict[int, list[Event]] = {}
            for event in state.between(namespace.id, counter, *span):
                windows.setdefault(window_of(event.event_time_us, size_us), []).append(event)
            answer.append({start_us: fold_events(some) for start_us, some in windows.items()})
        return answer

    async def tails(
        self, namespace: Namespace, after: Sequence[tuple[str, int]], until_us: int | None = None
    ) -> Sequence[Fold]:
        state, folds = self._tables.state_of(namespace.dataset), []
        for counter, after_us in after:
            if after_us + 1 < state.dropped_before_us:
                raise SliceMissingError(
                    f"events later than {after_us} µs were asked for; those before"
                    f" {state.dropped_before_us} µs are dropped"
                )
            folds.append(fold_events(state.between(namespace.id, counter, after_us + 1)))
        return folds

    async def scan(self, namespace: Namespace, counter: str, page: EventPage) -> Sequence[Event]:
        state = self._tables.state_of(namespace.dataset)
        events = sorted(state.between(namespace.id, counter, *page.span), key=_latest_first)
        first = 0
        if page.before is not None:
            first = bisect_right(events, _latest_first(page.before), key=_latest_first)
        return events[first : first + page.limit]


def _compare(event: Event, stored: Event | None) -> Written:
    """Return the outcome of a write of *event* over *stored*."""
    if stored is None:
        return Written.NEW
    return Written.REPLAYED if stored.same_payload(event) else Written.CONFLICT


def _latest_first(event: Event) -> tuple[int, bytes, int]:
    return (-event.event_time_us, event.event_id, event.item_key)
