"""Find the counters with the most adds in the last seconds.

Adds do no extra work for this. A store that keeps events in time order counts them. In other stores
each counter's events are separate; there the marks list the counters that changed since the last
rollup, and the latest events of a bounded number of these are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from counter.limits import SECOND
from counter.ports import Store
from counter.types import EventPage, Namespace, Span
from counter.windows import window_of

#: Counters that are read if the store cannot count: each takes a read or two.
LOOKED_AT_MAX: Final = 1_000
#: Events that the store counts at most; if there are more, a shorter time is covered.
EVENTS_MAX: Final = 200_000
#: Events that are read of each counter in the first pass, and of all counters in the second.
_FEW: Final = 100
_MANY: Final = 100_000
_READS_AT_ONCE: Final = 16


class Busy(NamedTuple):
    """A counter, the number of its events, and the time in which they came."""

    counter: str
    events: int
    span_us: int

    @property
    def per_s(self) -> float:
        """Return its events per second."""
        return self.events * SECOND / self.span_us


@dataclass(frozen=True, slots=True)
class Busiest:
    """The busiest counters of ``[from_us, to_us)``, busiest first."""

    from_us: int
    to_us: int
    counters: tuple[Busy, ...]
    #: Whether every changed counter was examined.
    is_whole: bool


async def busiest(
    store: Store, namespace: Namespace, now_us: int, *, span_us: int, limit: int
) -> Busiest:
    """Return the *limit* busiest counters of the last *span_us*, and the time actually covered."""
    # A token may be slightly ahead of this clock, and its add was made before now all the same.
    from_us, until_us = now_us - span_us, now_us + 1 + namespace.settings.future_limit_us
    count = store.capabilities.busiest
    if count is not None:
        since_us, found = await count(namespace, Span(from_us, until_us), limit, EVENTS_MAX)
        since_us = min(since_us, now_us - 1)
        passed_us = now_us - since_us
        counters = tuple(Busy(name, events, passed_us) for name, events in found)
        return Busiest(since_us, now_us, counters, is_whole=True)
    # Windows that are rolled up have no marks.
    since_us = max(from_us, 1 + max(await store.rollups.watermarks(namespace)))
    now_us = max(since_us + 1, now_us)
    span = Span(since_us, until_us)
    recent = _RecentCounts(store, namespace, span, now_us)
    names, is_whole = await _changed(store, namespace, span)
    few = await recent.rates(names, _FEW)
    first = sorted(few, key=lambda each: -each.per_s)[: 2 * limit]
    # A second pass reads more events, because a few events of a burst look like a high rate.
    many = await recent.rates([each.counter for each in first], _MANY // max(1, len(first)))
    many.sort(key=lambda each: (-each.per_s, each.counter))
    return Busiest(since_us, now_us, tuple(many[:limit]), is_whole)


async def _changed(store: Store, namespace: Namespace, span: Span) -> tuple[list[str], bool]:
    """Return counters with marks in *span*, an equal number per shard, and whether these are
    all."""
    shards = namespace.settings.shards
    share = max(1, LOOKED_AT_MAX // shards)
    windows = Span(window_of(span.from_us, namespace.settings.rollup_window_us), span.to_us)
    turn = asyncio.Semaphore(_READS_AT_ONCE)

    async def of_shard(shard: int) -> Sequence[str]:
        async with turn:
            marks, _ = await store.rollups.dirty(namespace, shard, windows, share + 1)
        # A mark that requests a recount does not mean that the counter changed.
        names = [mark.counter for mark in marks[:share] if not mark.recount_us]
        return names + [""] * (len(marks) > share)

    found = [
        each for names in await asyncio.gather(*map(of_shard, range(shards))) for each in names
    ]
    return [each for each in dict.fromkeys(found) if each], "" not in found


class _RecentCounts:
    """Read the latest events of counters, for their rates."""

    def __init__(self, store: Store, namespace: Namespace, span: Span, now_us: int) -> None:
        self._store = store
        self._namespace = namespace
        self._span = span
        self._now_us = now_us
        self._turn = asyncio.Semaphore(_READS_AT_ONCE)

    async def rates(self, names: Sequence[str], events_max: int) -> list[Busy]:
        """Return the rate of each of *names* that has events, from its latest *events_max*
        events."""
        found = await asyncio.gather(*(self._one(name, events_max) for name in names))
        return [each for each in found if each.events]

    async def _one(self, name: str, events_max: int) -> Busy:
        async with self._turn:
            page = EventPage(self._span, events_max)
            events = await self._store.events.scan(self._namespace, name, page)
        is_cut = len(events) == events_max
        begin_us = events[-1].event_time_us if is_cut else self._span.from_us
        end_us = max(self._now_us, events[0].event_time_us) if events else self._now_us
        return Busy(name, len(events), max(1, end_us - begin_us))
