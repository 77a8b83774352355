"""Back-pressure: how many groups of counters are under way at once follows how the store answers.

Additive increase, multiplicative decrease, as TCP's congestion avoidance does it (RFC 5681, section
3.1: one more a round trip, half after a loss, at most one cut a round trip); on request latency in
place of packet loss as in Netflix's concurrency-limits (AIMDLimit).
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
    """Lets in as many as the store bears, from 1 to *limit_max*."""

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
        """How many may be inside now."""
        return int(self._limit)

    @asynccontextmanager
    async def turn(self, weight: int = 1) -> AsyncIterator[None]:
        """Wait for room, do the work inside, and learn from how long it took or how it failed.

        Work of *weight* times the usual amount may take as many times as long.
        """
        await self._enter()
        busy = 2 * self._inside >= self._limit
        began_us = self._clock.boottime_us()
        try:
            yield
        except SliceMissingError:
            # A slice that is gone says nothing of how much the store bears.
            raise
        except UnavailableError:
            self._cut(began_us)
            raise
        else:
            if self._clock.boottime_us() - began_us > weight * self._target_us:
                self._cut(began_us)
            elif busy:
                # Only a limit that is reached was tested.
                self._limit = min(float(self._limit_max), self._limit + 1 / self._limit)
        finally:
            self._inside -= 1
            self._wake()

    def _cut(self, began_us: int) -> None:
        """Halve the limit; once for all that began under it, for they suffered together."""
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
                # It was let in at the same moment: the next one goes in its place.
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
