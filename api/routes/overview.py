"""The routes over all namespaces that a caller sees: an overview for a first page, and a search.

A survey reads the rolled-up counts of a namespace's counters, for the largest and the latest of
them. All callers share it, and the more counters it read, the later it is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
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
    RateOfAdds,
    SearchAnswer,
)
from api.http.routing import CallOf, route
from api.routes.insight import InsightRoutes
from api.routes.paging import page_of, parts_of, unknown_page
from api.routes.reports import LongReads
from api.telemetry.activity import Activity
from counter import limits
from counter.core.service import CounterService
from counter.limits import MILLISECOND, SECOND
from counter.ports import Store
from counter.types import CounterType, Namespace, Scope

#: How old a survey may be: so much, and so much more for each counter.
_AGE_US: Final = 2 * SECOND
_AGE_PER_COUNTER_US: Final = 3 * MILLISECOND
#: Counters in each list.
_SHOWN: Final = 10
#: A search reads the names of a namespace in parts, and each counts as so many names at least.
_PART_NAMES_MIN: Final = 100


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


@dataclass(slots=True)
class OverviewRoutes:
    """Handlers of ``overview`` and ``search``."""

    service: CounterService
    store: Store
    insight: InsightRoutes
    activity: Activity
    long_reads: LongReads
    surveys: dict[int, _Survey] = field(default_factory=dict)
    surveying: asyncio.Lock = field(default_factory=asyncio.Lock)

    @route("GET", "/v1/overview", Scope.READ, tag="insight")
    async def get_overview(
        self, call: CallOf, query: Annotated[NoQuery, Query()]
    ) -> OverviewAnswer:
        """What the caller's namespaces do, and their largest and latest counters."""
        seen = list(self._seen(call))
        async with self.surveying:
            await self._survey(seen)
        surveys = [self.surveys.get(each.id) for each in seen]
        known = [each for each in surveys if each is not None]
        largest = nlargest(_SHOWN, (x for each in known for x in each.largest), key=_by_count)
        latest = nlargest(_SHOWN, (x for each in known for x in each.latest), key=_by_change)
        shown = seen[: limits.OVERVIEW_NAMESPACES_MAX]
        rollups = await self.insight.shards(shown)
        return OverviewAnswer(
            as_of=self.insight.clock.now_us(),
            complete=all(each is not None and each.is_whole for each in surveys),
            namespaces=[
                NamespaceOverview(
                    namespace=each.name,
                    counters=None if survey is None else survey.number,
                    counters_complete=survey is not None and survey.is_whole,
                    adds_per_s=self.activity.latest(each.name),
                    lag_seconds=max(x.lag_seconds for x in shards),
                    overdue_seconds=max(x.overdue_seconds for x in shards),
                    shards=len(shards),
                    unowned=sum(x.owner is None for x in shards),
                )
                for each, survey, shards in zip(shown, surveys, rollups, strict=False)
            ],
            largest=sorted(await self._read(largest), key=lambda each: -each.count),
            latest=await self._read(latest),
            adds=[
                RateOfAdds(time=time_us, adds_per_s=per_s)
                for time_us, per_s in self.activity.rates(call.sees)
            ],
        )

    def _seen(self, call: Call) -> Iterator[Namespace]:
        """Yield the namespaces that the caller sees and that keep events, by name."""
        for each in self.service.namespaces.all():
            if each.settings.counter_type is not CounterType.BEST_EFFORT and call.sees(each.name):
                yield each

    async def _survey(self, namespaces: Iterable[Namespace]) -> None:
        """Repeat the surveys that are old, the oldest first, until as many counters were read as
        one request may read."""
        now_us, left = self.insight.clock.now_us(), limits.COUNTERS_TOGETHER_MAX
        living = {each.id for each in self.service.namespaces.all()}
        self.surveys = {key: each for key, each in self.surveys.items() if key in living}
        never = _Survey(0, 0, is_whole=False)
        for each in sorted(namespaces, key=lambda each: self.surveys.get(each.id, never).at_us):
            if left > 0 and self.surveys.get(each.id, never).is_old(now_us):
                async with self.long_reads.reading(each.id):
                    found = await self._survey_of(each, now_us)
                self.surveys[each.id] = found
                left -= found.number

    async def _survey_of(self, namespace: Namespace, now_us: int) -> _Survey:
        number, largest, latest = 0, list[_Counter](), list[_Counter]()
        async for names in self.service.reader.names(namespace, "", limits.BATCH_ITEMS_MAX):
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
            names = self.service.reader.names(
                each, "", limits.BATCH_ITEMS_MAX, after=after if each.name == first else None
            )
            async for part in self._in_turns(each, names):
                searched += max(len(part), _PART_NAMES_MIN)
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
            async with self.long_reads.reading(namespace.id):
                part = await anext(parts, None)
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
