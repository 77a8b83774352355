"""The routes that show how the service does: its rollup by shards, what is busy, and outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from api.http.answer_models import BusiestAnswer, OutcomesAnswer, ShardsAnswer
from api.http.answers import json_reply
from api.http.call import Reply
from api.http.routing import NAMESPACE, CallOf, Doc, Route, busy
from api.routes.reports import limit_of
from counter.clock import to_rfc3339
from counter.core.hot_counters import Busiest, busiest
from counter.core.service import CounterService
from counter.durations import parse_duration
from counter.errors import InvalidParameterError
from counter.limits import MINUTE, SECOND
from counter.ports import Clock, Store
from counter.types import Namespace, Scope
from counter.windows import closed_through
from rollup.leases import owners_of, slot_of

_BUSIEST_DEFAULT: Final = 10
_BUSIEST_MAX: Final = 100


class InsightRoutes:
    """Handlers of ``shards``, ``busiest`` and ``outcomes``."""

    def __init__(
        self,
        service: CounterService,
        store: Store,
        clock: Clock,
        tally: Callable[[], Mapping[str, int]],
        owner: Callable[[], str | None],
    ) -> None:
        """*tally* gives adds by outcome; *owner* who rolls up where the store has one process
        only."""
        self._service = service
        self._store = store
        self._clock = clock
        self._tally = tally
        self._owner = owner
        #: The latest look at what is busy: of a namespace, over a span, when.
        self._busy: tuple[tuple[int, int], int, Busiest] | None = None
        self._looking = asyncio.Lock()

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route(
                *("GET", f"{NAMESPACE}/shards", self.shards, Scope.READ),
                Doc(
                    "listShards",
                    "How far the rollup of each shard has come, and who does it",
                    *("insight", ShardsAnswer),
                ),
            ),
            Route(
                *("GET", f"{NAMESPACE}/busiest", self.busiest, Scope.READ),
                Doc(
                    *("listBusiest", "The counters that are added to the most just now"),
                    *("insight", BusiestAnswer),
                    reads=(busy,),
                ),
            ),
            Route(
                *("GET", "/v1/outcomes", self.outcomes, Scope.READ),
                Doc(
                    *("getOutcomes", "Adds and clears by what became of them", "insight"),
                    OutcomesAnswer,
                ),
            ),
        ]

    async def shards(self, call: CallOf) -> Reply:
        """How far the rollup of each of a namespace's shards has come, and who does it."""
        call.query()
        namespace = self._service.namespaces.get(call.namespace)
        self._service.require_events(namespace, "the rollup")
        watermarks = await self._store.watermarks(namespace)
        alone = self._owner() if self._store.transactional else None
        owners = {} if self._store.transactional else owners_of(await self._store.workers())
        now_us = self._clock.now_us()
        closed_us = closed_through(namespace, now_us)
        shards = [
            {
                "shard": shard,
                "watermark": to_rfc3339(watermark_us),
                "lag_seconds": (now_us - watermark_us) / SECOND,
                "overdue_seconds": max(0, closed_us - watermark_us) / SECOND,
                "owner": alone or owners.get(slot_of(namespace.id, shard)),
            }
            for shard, watermark_us in enumerate(watermarks)
        ]
        return json_reply(
            {"namespace": namespace.name, "as_of": to_rfc3339(now_us), "shards": shards}
        )

    async def busiest(self, call: CallOf) -> Reply:
        """The counters that are added to the most just now."""
        namespace = self._service.namespaces.get(call.namespace)
        self._service.require_events(namespace, "what is busy")
        query = call.query("limit", "span")
        limit = limit_of(query, _BUSIEST_DEFAULT, _BUSIEST_MAX)
        found = await self._look(namespace, _span(query))
        counters = found.counters[:limit]
        names = [each.counter for each in counters]
        counts = await self._service.reader.read(namespace, names, None) if names else []
        return json_reply(
            {
                "namespace": namespace.name,
                "since": to_rfc3339(found.from_us),
                "as_of": to_rfc3339(found.to_us),
                "complete": found.is_whole,
                "counters": [
                    {"counter": each.counter, "adds_per_s": each.per_s, "count": count.count}
                    for each, count in zip(counters, counts, strict=True)
                ],
            }
        )

    async def _look(self, namespace: Namespace, span_us: int) -> Busiest:
        """One look at a time, and what it found for all who ask within a second."""
        async with self._looking:
            key, now_us = (namespace.id, span_us), self._clock.now_us()
            if self._busy is not None and self._busy[0] == key and now_us - self._busy[1] < SECOND:
                return self._busy[2]
            found = await busiest(
                self._store, namespace, now_us, span_us=span_us, limit=_BUSIEST_MAX
            )
            self._busy = (key, now_us, found)
            return found

    async def outcomes(self, call: CallOf) -> Reply:
        """Adds and clears by what became of them, since the processes on this port began."""
        call.query()
        if call.caller is not None:
            call.caller.require_all_namespaces()
        now_us = self._clock.now_us()
        return json_reply({"as_of": to_rfc3339(now_us), "outcomes": dict(self._tally())})


def _span(query: Mapping[str, str]) -> int:
    """How long a time to look at. Raises InvalidParameterError."""
    text = query.get("span", "10s")
    try:
        span_us = parse_duration(text)
        if not SECOND <= span_us <= MINUTE:
            raise ValueError("it must be from 1s to 1m")
    except ValueError as error:
        raise InvalidParameterError(f"span is {text[:40]!r}: {error}", field="span") from error
    return span_us
