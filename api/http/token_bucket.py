"""Limit the rate of a key or a namespace within one process, with token buckets."""

from __future__ import annotations

import math
from typing import Final

from counter.errors import RateLimitedError
from counter.limits import SECOND

#: The burst that is allowed after a pause: the rate times this many seconds, and at least one.
BURST_S: Final = 1.0


class TokenBucket:
    """A bucket that fills at *rate* per second and holds :data:`BURST_S` worth of it.

    It implements the generic cell rate algorithm (ITU-T I.371): it stores the instant at which the
    bucket is full again, so that no level has to be refilled. A batch is accepted whole while the
    bucket is not empty, and later requests wait for the overdraft; otherwise a batch larger than
    the bucket could never be sent.
    """

    __slots__ = ("_each_s", "_full_at_s", "_most_s", "_whose", "burst_s", "name", "rate")

    def __init__(self, name: str, rate: float, whose: str = "a client") -> None:
        #: The name of the limit in the RateLimit header fields.
        self.name = name
        self.rate = rate
        self._whose = whose
        #: The time to fill an empty bucket.
        self.burst_s = max(BURST_S, 1 / rate)
        self._each_s = 1 / rate
        #: An empty bucket is full again after burst_s; a longer time means that it is overdrawn.
        self._most_s = self.burst_s - self._each_s + 1e-9
        self._full_at_s = 0.0

    def take(self, amount: float, now_s: float, *, overdraws: bool = False) -> bool:
        """Take *amount* at *now_s* of a monotonic clock; return False if the bucket is empty,
        unless the request *overdraws* it because a part of it was accepted."""
        full_at_s = self._full_at_s
        if full_at_s < now_s:
            full_at_s = now_s
        elif full_at_s - now_s > self._most_s and not overdraws:
            return False
        self._full_at_s = full_at_s + amount * self._each_s
        return True

    def give_back(self, amount: float) -> None:
        """Undo a :meth:`take` of *amount* at the same instant."""
        self._full_at_s -= amount * self._each_s

    def is_full(self, now_s: float) -> bool:
        """Return whether the bucket is full at *now_s*."""
        return self._full_at_s <= now_s

    def wait_s(self, now_s: float) -> float:
        """Return the time until the next unit is available; 0 if one is available now."""
        return max(0.0, self._full_at_s - now_s - self.burst_s + 1 / self.rate)

    def refusal(self, now_s: float) -> RateLimitedError:
        """Return the error for a request over the limit."""
        wait_s = self.wait_s(now_s)
        return RateLimitedError(
            f"{self._whose} may have {self.rate:g} {self.name} a second of this process;"
            f" send the same again in {math.ceil(wait_s * 1_000) / 1_000:,g} s",
            retry_after_us=max(1, int(wait_s * SECOND)),
            limit=self.name,
            rate=self.rate,
        )
