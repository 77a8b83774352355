"""Check whether this process can do its work, for /readyz and /metrics."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Final

from counter.background import every
from counter.core.clock_guard import ClockGuard
from counter.errors import ClockSkewError, CounterError, StoreUnavailableError, UnavailableError
from counter.limits import SECOND
from counter.ports import Cache, Clock, Store
from counter.security.keys import KeyRing
from counter.telemetry.incidents import Incident, Incidents, ping_error
from rollup.worker import RollupWorker

_log = logging.getLogger("counter.health")
_CHECK_EVERY_S: Final = 5.0
_LEAVING: Final = "this process is shutting down: send requests elsewhere"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check. ``failure`` is why requests should go elsewhere.

    A cache failure is not a reason: all processes would become unready at once, and only
    best-effort counters need the cache."""

    store: CounterError | None = None
    clock: str | None = None
    rollup: str | None = None
    cache: str | None = None
    keys: str | None = None
    is_leaving: bool = False
    clock_wait_us: int = SECOND
    #: What is wrong, and since when.
    incidents: tuple[Incident, ...] = ()

    @property
    def failure(self) -> CounterError | None:
        """Return the problem for /readyz, or None if the process is ready."""
        failure = self._failure()
        if failure is not None:
            failure.fields["troubles"] = self.incidents_json
        return failure

    @property
    def incidents_json(self) -> list[dict[str, Any]]:
        """Return the incidents as JSON values."""
        return [each.as_fields() for each in self.incidents]

    def _failure(self) -> CounterError | None:
        if self.is_leaving:
            return UnavailableError(_LEAVING)
        if self.store is not None:
            return self.store
        if self.clock is not None:
            return ClockSkewError(self.clock, retry_after_us=self.clock_wait_us)
        if self.rollup is not None:
            return UnavailableError(f"the rollup does not work: {self.rollup}")
        if self.keys is not None:
            return StoreUnavailableError(self.keys, retry_after_us=SECOND)
        return None


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
    latest: Report = field(default=Report(), init=False)
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
        clock = None if self.guard is None else self.guard.trouble
        rollup = self.worker.trouble if self.rolls_up else None
        found = {
            "process": _LEAVING if self.is_leaving else None,
            "store": None if store is None else store.detail,
            "clock": clock,
            "rollup": rollup,
            "cache": cache,
            "keys": self.keys.trouble,
        }
        incidents = self._incidents.record(found)
        keys, leaving = self.keys.trouble, self.is_leaving
        wait_us = SECOND if self.guard is None else self.guard.wait_us
        self.latest = Report(store, clock, rollup, cache, keys, leaving, wait_us, incidents)
        return self.latest

    async def _ask(self) -> tuple[CounterError | None, str | None]:
        store, cache = await asyncio.gather(
            ping_error(self.store.ping, "the store"), ping_error(self.cache.ping, "the cache")
        )
        return store, self.cache.trouble if cache is None else cache.detail
