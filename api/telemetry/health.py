"""Check whether this process can do its work, for /readyz and /metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from counter.background import every
from counter.core.clock_guard import ClockGuard
from counter.errors import ClockSkewError, CounterError, StoreUnavailableError, UnavailableError
from counter.limits import SECOND
from counter.ports import Cache, Clock, Store
from counter.security.keys import KeyRing
from counter.telemetry.incidents import Incidents, ping_error
from rollup.worker import RollupWorker

_log = logging.getLogger("counter.health")
_CHECK_EVERY_S: Final = 5.0
_LEAVING: Final = "this process is shutting down: send requests elsewhere"


class Report(NamedTuple):
    """The result of a check. ``failure`` is why requests should go elsewhere.

    A cache failure is not a reason: all processes would become unready at once, and only
    best-effort counters need the cache."""

    #: What is wrong with each part; None if it works.
    parts: Mapping[str, str | None]
    failure: CounterError | None
    #: What is wrong and since when, as JSON values.
    incidents: list[dict[str, str | None]]


_UNKNOWN: Final = Report({"store": None, "cache": None, "keys": None}, None, [])


@dataclass(eq=False)
class ApiHealth:
    """Check everything that this process depends on."""

    store: Store
    cache: Cache
    worker: RollupWorker
    guard: ClockGuard | None
    clock: Clock
    keys: KeyRing
    #: Whether the worker runs in this process; if not, its trouble is ignored.
    rolls_up: bool = True
    #: Whether the process is shutting down.
    is_leaving: bool = False
    latest: Report = field(default=_UNKNOWN, init=False)
    _asking: asyncio.Task[tuple[CounterError | None, str | None]] | None = None

    def __post_init__(self) -> None:
        self._incidents = Incidents(self.clock)

    async def keep_checking(self, stop: asyncio.Event) -> None:
        """Check every few seconds until *stop* is set."""
        await every(_CHECK_EVERY_S, self.check, stop, _log, "checking the dependencies")

    async def check(self) -> Report:
        """Check the store and the cache, each for a bounded time.

        Concurrent callers share one check: a flood of health checks must not become one of
        writes."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        store, cache = await asyncio.shield(self._asking)
        parts = {
            "process": _LEAVING if self.is_leaving else None,
            "store": None if store is None else store.detail,
            "clock": None if self.guard is None else self.guard.trouble,
            "rollup": self.worker.trouble if self.rolls_up else None,
            "cache": cache,
            "keys": self.keys.trouble,
        }
        incidents = [each.as_fields() for each in self._incidents.record(parts)]
        failure = self._failure(parts, store)
        if failure is not None:
            failure.fields["troubles"] = incidents
        self.latest = Report(parts, failure, incidents)
        return self.latest

    def _failure(
        self, parts: Mapping[str, str | None], store: CounterError | None
    ) -> CounterError | None:
        """Return the problem for /readyz, or None if the process is ready."""
        if self.is_leaving:
            return UnavailableError(_LEAVING)
        if store is not None:
            return store
        if (clock := parts["clock"]) is not None:
            wait_us = SECOND if self.guard is None else self.guard.wait_us
            return ClockSkewError(clock, retry_after_us=wait_us)
        if (rollup := parts["rollup"]) is not None:
            return UnavailableError(f"the rollup does not work: {rollup}")
        if (keys := parts["keys"]) is not None:
            return StoreUnavailableError(keys, retry_after_us=SECOND)
        return None

    async def _ask(self) -> tuple[CounterError | None, str | None]:
        store, cache = await asyncio.gather(
            ping_error(self.store.ping, "the store"), ping_error(self.cache.ping, "the cache")
        )
        return store, self.cache.trouble if cache is None else cache.detail
