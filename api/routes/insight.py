"""The routes that show how the service does: its rollup by shards, what is busy, and outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

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
from api.routes.hot_counters import Busiest, busiest
from api.telemetry.exposition import ApiExposition
from api.telemetry.health import ApiHealth
from counter.api_keys import Scope
from counter.core.service import CounterService
from counter.limits import BUSIEST_MAX, SECOND
from counter.ports import Clock, Store
from counter.types import Namespace
from counter.windows import closed_through
from rollup.leases import owners_of, slot_of, worker_id


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
