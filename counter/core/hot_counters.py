"""Which counters are added to the most just now: what a store knows of the last seconds.

No add pays for this. A store that keeps events in the order of their time counts them; of another
one, where a counter's events lie by themselves, the marks tell which counters changed since they
were rolled up, and a bounded number of these is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from counter.limits import SECOND
from counter.ports import Store
from counter.types import Namespace
from counter.windows import window_of

#: Counters that are looked at where the store cannot count: each takes a read or two.
LOOKED_AT_MAX: Final = 1_000
#: Events that are counted where it can; where more came, those of a shorter time are.
EVENTS_MAX: Final = 200_000
#: Events that are read of each counter to find the busy ones, and of all that are found.
_FEW: Final = 100
_MANY: Final = 100_000
_READS_AT_ONCE: Final = 16


class Busy(NamedTuple):
    """A counter, and how many of its events there were in how long."""

    counter: str
    events: int
    span_us: int

    @property
    def per_s(self) -> float:
        """Its events a second."""
        return self.events * SECOND / self.span_us


@dataclass(frozen=True, slots=True)
class Busiest:
    """The busiest counters of ``[from_us, to_us)``, busiest first."""

    from_us: int
    to_us: int
    counters: tuple[Busy, ...]
    #: Whether all counters that changed in the time were looked at.
    is_whole: bool


@runtime_checkable
class BusyStore(Protocol):
    """A store that counts the events of a time, whosever they are."""

    async def busiest(
        self, namespace: Namespace, *, from_us: int, to_us: int, limit: int, events_max: int
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        """How many events each of the *limit* busiest counters has in ``[from_us, to_us)``, and
        since when that is: later than *from_us* where more than *events_max* came since then."""
        ...


async def busiest(
    store: Store, namespace: Namespace, now_us: int, *, span_us: int, limit: int
) -> Busiest:
    """The *limit* busiest counters of the last *span_us*, or of a shorter time, which is told."""
    from_us = now_us - span_us
    if isinstance(store, BusyStore):
        since_us, found = await store.busiest(
            namespace, from_us=from_us, to_us=now_us, limit=limit, events_max=EVENTS_MAX
        )
        passed_us = max(1, now_us - since_us)
        counters = tuple(Busy(name, events, passed_us) for name, events in found)
        return Busiest(since_us, now_us, counters, is_whole=True)
    # What is rolled up leaves no marks.
    since_us = max(from_us, 1 + max(await store.watermarks(namespace)))
    look = _Look(store, namespace, since_us, max(since_us + 1, now_us))
    names, is_whole = await _changed(store, namespace, since_us, look.to_us)
    few = await look.at(names, _FEW)
    first = sorted(few, key=lambda each: -each.per_s)[: 2 * limit]
    # Of the last few alone, a burst looks like a rate.
    many = await look.at([each.counter for each in first], _MANY // max(1, len(first)))
    many.sort(key=lambda each: (-each.per_s, each.counter))
    return Busiest(since_us, look.to_us, tuple(many[:limit]), is_whole)


async def _changed(
    store: Store, namespace: Namespace, from_us: int, to_us: int
) -> tuple[list[str], bool]:
    """Counters with marks of a time, as many of each shard, and whether these are all."""
    shards = namespace.settings.shards
    share = max(1, LOOKED_AT_MAX // shards)
    after_us = window_of(from_us, namespace.settings.rollup_window_us) - 1
    turn = asyncio.Semaphore(_READS_AT_ONCE)

    async def of_shard(shard: int) -> Sequence[str]:
        async with turn:
            marks = await store.dirty(
                namespace,
                shard,
                after_us=after_us,
                through_us=to_us,
                start=None,
                limit=share + 1,
            )
        # One that is to be counted anew did not change.
        names = [mark.counter for mark in marks[:share] if not mark.recount_us]
        return names + [""] * (len(marks) > share)

    found = [
        each for names in await asyncio.gather(*map(of_shard, range(shards))) for each in names
    ]
    return [each for each in dict.fromkeys(found) if each], "" not in found


class _Look:
    """Reads the latest events of counters."""

    def __init__(self, store: Store, namespace: Namespace, from_us: int, to_us: int) -> None:
        self._store = store
        self._namespace = namespace
        self._from_us = from_us
        self.to_us = to_us
        self._turn = asyncio.Semaphore(_READS_AT_ONCE)

    async def at(self, names: Sequence[str], events_max: int) -> list[Busy]:
        """How often each of *names* that has events was added to, by its latest *events_max*."""
        found = await asyncio.gather(*(self._one(name, events_max) for name in names))
        return [each for each in found if each.events]

    async def _one(self, name: str, events_max: int) -> Busy:
        async with self._turn:
            events = await self._store.scan(
                self._namespace,
                name,
                from_us=self._from_us,
                to_us=self.to_us,
                before=None,
                limit=events_max,
            )
        is_cut = len(events) == events_max
        begin_us = events[-1].event_time_us if is_cut else self._from_us
        return Busy(name, len(events), max(1, self.to_us - begin_us))
