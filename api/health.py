"""Whether this process can do its work now: what /readyz and /metrics tell."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from counter.errors import (
    ClockSkewError,
    CounterError,
    StoreUnavailableError,
    UnavailableError,
)
from counter.limits import SECOND
from counter.ports import Cache, Store
from counter.skew import ClockGuard
from rollup.worker import RollupWorker

_PING_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. ``failure`` is why requests should go elsewhere; the cache's trouble is no
    reason for that: every process would be out at once, and only best-effort counters need it."""

    store: CounterError | None = None
    clock: str | None = None
    rollup: str | None = None
    cache: str | None = None

    @property
    def failure(self) -> CounterError | None:
        """The problem that /readyz answers; None where the process is of use."""
        if self.store is not None:
            return self.store
        if self.clock is not None:
            return ClockSkewError(self.clock, retry_after_us=SECOND)
        if self.rollup is not None:
            return UnavailableError(f"the rollup does not work: {self.rollup}")
        return None


class Health:
    """Looks at all that this process depends on."""

    def __init__(
        self, store: Store, cache: Cache, worker: RollupWorker, guard: ClockGuard | None
    ) -> None:
        self._store = store
        self._cache = cache
        self._worker = worker
        self._guard = guard
        #: Whether the worker runs in this process: else its trouble is none of ours.
        self.rolls_up = True
        self.latest = Report()

    async def look(self) -> Report:
        """Ask the store and the cache, each for a bounded time."""
        store, cache = await asyncio.gather(self._ask_store(), self._ask_cache())
        self.latest = Report(
            store=store,
            clock=None if self._guard is None else self._guard.trouble,
            rollup=self._worker.trouble if self.rolls_up else None,
            cache=cache,
        )
        return self.latest

    async def _ask_store(self) -> CounterError | None:
        try:
            async with asyncio.timeout(_PING_S):
                await self._store.ping()
        except CounterError as error:
            return error
        except TimeoutError:
            return StoreUnavailableError(
                f"the store did not answer within {_PING_S:g} s", retry_after_us=SECOND
            )
        return None

    async def _ask_cache(self) -> str | None:
        try:
            async with asyncio.timeout(_PING_S):
                await self._cache.ping()
        except CounterError as error:
            return error.detail
        except TimeoutError:
            return f"the cache did not answer within {_PING_S:g} s"
        return self._cache.trouble
