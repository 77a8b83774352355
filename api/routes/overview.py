"""The routes over all namespaces that a caller sees: an overview for a first page, and a search.

A survey reads the rolled-up counts of a namespace's counters, for the largest and the latest of
them. All callers share it, and the more counters it read, the later it is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Annotated, Final, NamedTuple

from fastapi import Query

from api.http.call import Call
from api.http.models import NoQuery, SearchQuery
from api.http.response_models import (
    FoundCounter,
    NamespaceOverview,
    OverviewAnswer,
    OverviewCounter,
    OverviewTotals,
    RateOfAdds,
    SearchAnswer,
)
from api.http.routing import CallOf, route
from api.routes.insight import InsightRoutes
from api.routes.paging import CounterLists, page_of, parts_of, unknown_page
from api.routes.reports import LongReads
from api.telemetry.activity import Activity
from counter import limits
from counter.api_keys import Scope
from counter.core.service import CounterService
from counter.errors import NamespaceUnknownError
from counter.limits import MILLISECOND, SECOND
from counter.ports import Store
from counter.types import CounterType, Namespace
from counter.windows import closed_through

#: How old a survey may be: so much, and so much more for each counter.
_AGE_US: Final = 2 * SECOND
_AGE_PER_COUNTER_US: Final = 3 * MILLISECOND
#: Counters in each list.
_SHOWN: Final = 10
#: What a look at a namespace costs beside its names, in names.
_NAMESPACE_COSTS: Final = 100
#: Overdue by less is usual.
_USUAL_US: Final = 5 * SECOND
_READS_AT_ONCE: Final = 16


class _Counter(NamedTuple):
    """A counter as it is rolled up; *changed_us* is after its last change."""

    namespace: Namespace
    name: str
    count: int  # type: ignore[assignment]  # no caller uses tuple.count()
    changed_us: int


@dataclass(frozen=True, slots=True)
class _Survey:
    """What was found of a namespace's counters at *at_us*; nothing but the number if there are too
    many."""

    at_us: int
    number: int
    is_whole: bool
    largest: Iterable[_Counter] = ()
    latest: Iterable[_Counter] = ()

    def is_old(self, now_us: int) -> bool:
        return now_us - self.at_us > _AGE_US + self.number * _AGE_PER_COUNTER_US


@dataclass(frozen=True, slots=True)
class _Rollup:
    """The rollup of a namespace at *at_us*."""

    at_us: int
    lag_us: int
    overdue_us: int
    shards: int
    unowned: int

    @property
    def badness(self) -> tuple[int, int]:
        """Return how much is wrong with it; less than five seconds overdue is usual."""
        return self.overdue_us if self.overdue_us > _USUAL_US else 0, self.unowned


@dataclass(slots=True)
class OverviewRoutes:
    """Handlers of ``overview`` and ``search``."""

    service: CounterService
    store: Store
    insight: InsightRoutes
    activity: Activity
    long_reads: LongReads
    surveys: dict[int, _Survey] = field(default_factory=dict)
    rollups: dict[int, _Rollup] = field(default_factory=dict)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def lists(self) -> CounterLists:
        """All counters of a namespace, in parts."""
        return CounterLists(self.service.reader, self.store)

    @route("GET", "/v1/overview", Scope.READ, tag="insight")
    async def get_overview(
        self, call: CallOf, query: Annotated[NoQuery, Query()]
    ) -> OverviewAnswer:
        """What the caller's namespaces do, and their largest and latest counters."""
        async with self.looking:
            seen = list(self._seen(call))
            self._forget_deleted()
            await self._look_at_rollups(seen)
            # Of one that is deleted meanwhile there is no rollup.
            seen = [each for each in seen if each.id in self.rollups]
            call.charge_requests(await self._survey(seen) // limits.PAGE_ITEMS_MAX)
        known = [self.surveys[each.id] for each in seen if each.id in self.surveys]
        largest = nlargest(_SHOWN, (x for each in known for x in each.largest), key=_by_count)
        latest = nlargest(_SHOWN, (x for each in known for x in each.latest), key=_by_change)
        # Sorting keeps the order of names.
        worst = sorted(seen, key=lambda each: self.rollups[each.id].badness, reverse=True)
        return OverviewAnswer(
            as_of=self.insight.clock.now_us(),
            totals=OverviewTotals(
                namespaces=len(seen),
                counters=sum(each.number for each in known),
                complete=len(known) == len(seen) and all(each.is_whole for each in known),
                overdue_seconds=max((self.rollups[x.id].overdue_us for x in seen), default=0)
                / SECOND,
            ),
            namespaces=[
                self._overview_of(each) for each in worst[: limits.OVERVIEW_NAMESPACES_MAX]
            ],
            largest=sorted(await self._read(largest), key=lambda each: -each.count),
            latest=await self._read(latest),
            adds=[
                RateOfAdds(time=time_us, adds_per_s=per_s)
                for time_us, per_s in self.activity.rates(call.sees)
            ],
        )

    def _overview_of(self, namespace: Namespace) -> NamespaceOverview:
        survey, rollup = self.surveys.get(namespace.id), self.rollups[namespace.id]
        return NamespaceOverview(
            namespace=namespace.name,
            counters=None if survey is None else survey.number,
            counters_complete=survey is not None and survey.is_whole,
            adds_per_s=self.activity.latest(namespace.name),
            lag_seconds=rollup.lag_us / SECOND,
            overdue_seconds=rollup.overdue_us / SECOND,
            shards=rollup.shards,
            unowned=rollup.unowned,
        )

    def _seen(self, call: Call) -> Iterator[Namespace]:
        """Yield the namespaces that the caller sees and that keep events, by name."""
        for each in self.service.namespaces.all():
            if each.settings.counter_type is not CounterType.BEST_EFFORT and call.sees(each.name):
                yield each

    def _forget_deleted(self) -> None:
        living = {each.id for each in self.service.namespaces.all()}
        for found in (self.surveys, self.rollups):
            for key in found.keys() - living:
                del found[key]

    async def _look_at_rollups(self, namespaces: Sequence[Namespace]) -> None:
        """Repeat what is old, later and later the more namespaces there are."""
        clock = self.insight.clock
        oldest_us = clock.now_us() - _AGE_US - len(namespaces) * _AGE_PER_COUNTER_US
        old = [
            each
            for each in namespaces
            if each.id not in self.rollups or self.rollups[each.id].at_us < oldest_us
        ]
        if not old:
            return
        owner_of = await self.insight.owners()
        for start in range(0, len(old), _READS_AT_ONCE):
            some = old[start : start + _READS_AT_ONCE]
            reads = map(self.store.rollups.watermarks, some)
            for each, read in zip(
                some, await asyncio.gather(*reads, return_exceptions=True), strict=True
            ):
                if isinstance(read, NamespaceUnknownError):
                    self.rollups.pop(each.id, None)
                    continue
                if isinstance(read, BaseException):
                    raise read
                now_us = clock.now_us()
                self.rollups[each.id] = _Rollup(
                    now_us,
                    now_us - min(read),
                    max(0, closed_through(each, now_us) - min(read)),
                    len(read),
                    sum(owner_of(each, shard) is None for shard in range(len(read))),
                )

    async def _survey(self, namespaces: Iterable[Namespace]) -> int:
        """Repeat the surveys that are old, the oldest first, until as many counters were read as
        one request may read; return how many were."""
        now_us, read = self.insight.clock.now_us(), 0
        never = _Survey(0, 0, is_whole=False)
        for each in sorted(namespaces, key=lambda each: self.surveys.get(each.id, never).at_us):
            if read >= limits.COUNTERS_TOGETHER_MAX:
                break
            if self.surveys.get(each.id, never).is_old(now_us):
                async with self.long_reads.reading(each.id):
                    found = self.surveys[each.id] = await self._survey_of(each, now_us)
                read += found.number + _NAMESPACE_COSTS
        return read

    async def _survey_of(self, namespace: Namespace, now_us: int) -> _Survey:
        number, largest, latest = 0, list[_Counter](), list[_Counter]()
        async for names in self.lists.names(namespace, ""):
            number += len(names)
            if number > limits.COUNTERS_TOGETHER_MAX:
                return _Survey(now_us, limits.COUNTERS_TOGETHER_MAX, is_whole=False)
            heads = await self.store.rollups.heads(namespace, names)
            found = [
                _Counter(namespace, name, head.checkpoint.count, head.checkpoint.time_us)
                # One that is not rolled up yet is new.
                if head is not None
                else _Counter(namespace, name, 0, now_us)
                for name, head in zip(names, heads, strict=True)
            ]
            largest = nlargest(_SHOWN, [*largest, *found], key=_by_count)
            latest = nlargest(_SHOWN, [*latest, *found], key=_by_change)
        return _Survey(now_us, number, is_whole=True, largest=largest, latest=latest)

    async def _read(self, found: Sequence[_Counter]) -> list[OverviewCounter]:
        """Return *found* with their counts, as their namespaces read them."""
        counts: dict[tuple[int, str], int] = {}
        for each in {each.namespace.id: each.namespace for each in found}.values():
            names = [x.name for x in found if x.namespace.id == each.id]
            # Of one that is deleted meanwhile none is shown.
            with suppress(NamespaceUnknownError):
                read = await self.service.reader.read(each, names, None)
                counts |= {(each.id, x.counter): x.count for x in read}
        return [
            OverviewCounter(
                namespace=each.namespace.name,
                counter=each.name,
                count=counts[each.namespace.id, each.name],
                changed_at=each.changed_us,
            )
            for each in found
            if (each.namespace.id, each.name) in counts
        ]

    @route("GET", "/v1/search", Scope.READ, tag="insight")
    async def search_counters(
        self, call: CallOf, query: Annotated[SearchQuery, Query()]
    ) -> SearchAnswer:
        """Counters whose names contain a text, of all namespaces that the caller sees."""
        text, searched, found = query.q.casefold(), 0, list[FoundCounter]()
        first, after = ("", None) if query.page is None else parts_of(query.page, 2)
        if not isinstance(first, str):
            raise unknown_page(query.page or "")
        for each in self._seen(call):
            if each.name < first:
                continue
            if searched >= limits.SEARCH_NAMES_MAX:
                return _found(call, found, searched, page_of([each.name, ""]))
            searched += _NAMESPACE_COSTS
            names = self.lists.names(each, "", after=after if each.name == first else None)
            async for part in self._in_turns(each, names):
                searched += len(part)
                for name in part:
                    if text in name.casefold():
                        found.append(FoundCounter(namespace=each.name, counter=name))
                        if len(found) == query.limit:
                            return _found(call, found, searched, page_of([each.name, name]))
                if searched >= limits.SEARCH_NAMES_MAX:
                    return _found(call, found, searched, page_of([each.name, part[-1]]))
        return _found(call, found, searched, None)

    async def _in_turns(
        self, namespace: Namespace, parts: AsyncIterator[Sequence[str]]
    ) -> AsyncIterator[Sequence[str]]:
        """Yield *parts*, each read in the namespace's turn."""
        while True:
            try:
                async with self.long_reads.reading(namespace.id):
                    part = await anext(parts, None)
            except NamespaceUnknownError:
                # Deleted meanwhile.
                return
            if part is None:
                return
            yield part


def _by_count(each: _Counter) -> tuple[int, str]:
    return each.count, each.name


def _by_change(each: _Counter) -> tuple[int, str]:
    return each.changed_us, each.name


def _found(call: Call, found: list[FoundCounter], searched: int, page: str | None) -> SearchAnswer:
    """Return the answer, and charge the caller for as many names as pages of a list have."""
    call.charge_requests(searched // limits.PAGE_ITEMS_MAX)
    return SearchAnswer(found=found, next_page=page)
