"""The routes that show how the service does: its rollup by shards, what is busy, and outcomes.

Adds do no extra work for what is busy. A store that keeps events in time order counts them. In
other stores each counter's events are separate; there the marks list the counters that changed
since the last rollup, and the latest events of a bounded number of these are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

from fastapi import Query

from api.http.models import BusiestQuery, NoQuery
from api.http.response_models import (
    BusiestAnswer,
    BusyCounter,
    Outcomes,
    OutcomesAnswer,
    ShardAnswer,
    ShardsAnswer,
)
from api.http.routing import NAMESPACE, CallOf, InNamespace, route
from api.telemetry.exposition import ApiExposition
from api.telemetry.health import ApiHealth
from counter.api_keys import Scope
from counter.core.service import CounterService
from counter.limits import BUSIEST_MAX, SECOND
from counter.ports import Clock, Store
from counter.types import EventPage, Namespace, Span
from counter.windows import closed_through, window_of
from rollup.leases import owners_of, slot_of, worker_id

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


@dataclass(slots=True)
class InsightRoutes:
    """Handlers of ``shards``, ``busiest`` and ``outcomes``."""

    service: CounterService
    store: Store
    clock: Clock
    health: ApiHealth
    exposition: ApiExposition
    name: str = field(default_factory=worker_id)
    #: How many looks at what is busy have begun; and the latest of each namespace and span that
    #: requests still wait for, with its number.
    looks: int = 0
    busy: dict[tuple[int, int], tuple[int, Busiest]] = field(default_factory=dict)
    waiting: int = 0
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @route("GET", f"{NAMESPACE}/shards", Scope.READ, tag="insight", shows="the rollup")
    async def list_shards(
        self, call: CallOf, namespace: InNamespace, query: Annotated[NoQuery, Query()]
    ) -> ShardsAnswer:
        """How far the rollup of each shard has come, and who does it."""
        watermarks = await self.store.rollups.watermarks(namespace)
        owner_of = await self.owners()
        now_us = self.clock.now_us()
        closed_us = closed_through(namespace, now_us)
        shards = [
            ShardAnswer(
                shard=shard,
                watermark=watermark_us,
                lag_seconds=(now_us - watermark_us) / SECOND,
                overdue_seconds=max(0, closed_us - watermark_us) / SECOND,
                owner=owner_of(namespace, shard),
            )
            for shard, watermark_us in enumerate(watermarks)
        ]
        return ShardsAnswer(namespace=namespace.name, as_of=now_us, shards=shards)

    async def owners(self) -> Callable[[Namespace, int], str | None]:
        """Return a function that returns the worker of a namespace's shard."""
        if self.store.capabilities.embedded:
            alone = self.name if self.health.rolls_up else None
            return lambda namespace, shard: alone
        owners = owners_of(await self.store.leases.workers())
        return lambda namespace, shard: owners.get(slot_of(namespace.id, shard))

    @route("GET", f"{NAMESPACE}/busiest", Scope.READ, tag="insight", shows="what is busy")
    async def list_busiest(
        self, call: CallOf, namespace: InNamespace, query: Annotated[BusiestQuery, Query()]
    ) -> BusiestAnswer:
        """The counters that are added to the most just now."""
        found = await self._shared_ranking(namespace, query.span)
        counters = found.counters[: query.limit]
        names = [each.counter for each in counters]
        counts = await self.service.reader.read(namespace, names, None) if names else []
        return BusiestAnswer(
            namespace=namespace.name,
            since=found.from_us,
            as_of=found.to_us,
            complete=found.is_whole,
            counters=[
                BusyCounter(counter=each.counter, adds_per_s=each.per_s, count=count.count)
                for each, count in zip(counters, counts, strict=True)
            ],
        )

    async def _shared_ranking(self, namespace: Namespace, span_us: int) -> Busiest:
        """Return what a look found that began after the call.

        There is one look at a time, and all calls that waited for it share the next one. So a
        caller sees its own adds, and many consoles cost no more than one look after the other."""
        earlier, key = self.looks, (namespace.id, span_us)
        self.waiting += 1
        try:
            async with self.looking:
                number, found = self.busy.get(key, (0, None))
                if found is None or number <= earlier:
                    self.looks += 1
                    number, now_us = self.looks, self.clock.now_us()
                    found = await busiest(
                        self.store, namespace, now_us, span_us=span_us, limit=BUSIEST_MAX
                    )
                    self.busy[key] = number, found
                return found
        finally:
            self.waiting -= 1
            if not self.waiting:
                self.busy.clear()

    @route("GET", "/v1/outcomes", Scope.READ, tag="insight")
    async def get_outcomes(
        self, call: CallOf, query: Annotated[NoQuery, Query()]
    ) -> OutcomesAnswer:
        """Adds and clears by what became of them.

        They are those since the processes on this port began."""
        if call.caller is not None:
            call.caller.require_all_namespaces()
        adds = await self.exposition.totals("counter_adds", "outcome", self.service.tally)
        outcomes = Outcomes(**adds)
        return OutcomesAnswer(as_of=self.clock.now_us(), outcomes=outcomes)
