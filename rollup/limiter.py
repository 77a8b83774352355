"""Limit concurrency by the store's latency (back-pressure).

Additive increase, multiplicative decrease, like TCP's congestion avoidance (RFC 5681, section 3.1:
one more per round trip, half after a loss, at most one cut per round trip); driven by request
latency in place of packet loss as in Netflix's concurrency-limits (AIMDLimit).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from counter.errors import SliceMissingError, UnavailableError
from counter.limits import MILLISECOND
from counter.ports import Clock

LATENCY_TARGET_US: Final = 200 * MILLISECOND
_LIMIT_FIRST: Final = 4


class Limiter:
    """Admits as many groups as the store can handle, from 1 to *limit_max*."""

    def __init__(self, clock: Clock, *, limit_max: int, target_us: int = LATENCY_TARGET_US) -> None:
        self._clock = clock
        self._limit_max = limit_max
        self._target_us = target_us
        self._limit = float(min(_LIMIT_FIRST, limit_max))
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._cut_at_us = 0
        #: How often the limit was halved.
        self.cuts = 0

    @property
    def limit(self) -> int:
        """The current limit of concurrent groups."""
        return int(self._limit)

    @asynccontextmanager
    async def permit(self, weight: int = 1) -> AsyncIterator[None]:
        """Wait for room, run the body, and adjust the limit by its duration or failure.

        Work of *weight* times the usual amount may take that many times as long.
        """
        await self._enter()
        busy = 2 * self._inside >= self._limit
        began_us = self._clock.boottime_us()
        try:
            yield
        except SliceMissingError:
            # A dropped slice does not mean that the store is overloaded.
            raise
        except UnavailableError:
            self._cut(began_us)
            raise
        else:
            if self._clock.boottime_us() - began_us > weight * self._target_us:
                self._cut(began_us)
            elif busy:
                # The limit grows only if it was reached, because otherwise it was not tested.
                self._limit = min(float(self._limit_max), self._limit + 1 / self._limit)
        finally:
            self._inside -= 1
            self._wake()

    def _cut(self, began_us: int) -> None:
        """Halve the limit; only once for all groups that began under it, because they slowed
        each other."""
        if began_us >= self._cut_at_us:
            self._limit = max(1.0, self._limit / 2)
            self._cut_at_us = self._clock.boottime_us()
            self.cuts += 1

    async def _enter(self) -> None:
        if self._inside < self.limit and not self._waiting:
            self._inside += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                # It was cancelled just as it was admitted: the next one takes its place.
                self._inside -= 1
                self._wake()
            elif place in self._waiting:
                self._waiting.remove(place)
            raise

    def _wake(self) -> None:
        while self._waiting and self._inside < self.limit:
            place = self._waiting.popleft()
            if not place.done():
                self._inside += 1
                place.set_result(None)
