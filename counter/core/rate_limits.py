"""Token buckets: how much one key, or one namespace, may have of one process in a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Protocol

from counter.errors import RateLimitedError
from counter.limits import SECOND

#: How much may come at once after a pause: what this many seconds allow, and at least one.
BURST_S: Final = 1.0


class TokenBucket:
    """A bucket that fills at *rate* a second, holding what :data:`BURST_S` bring.

    It is the generic cell rate algorithm (ITU-T I.371): instead of a level that has to be topped
    up, the instant at which the bucket is full again. A batch is taken whole while anything is
    left, and those after it wait for what it overdrew: else a batch larger than the bucket could
    never be sent.
    """

    __slots__ = ("_each_s", "_full_at_s", "_most_s", "_whose", "burst_s", "name", "rate")

    def __init__(self, name: str, rate: float, whose: str = "a client") -> None:
        #: What is limited, as the RateLimit fields name it.
        self.name = name
        self.rate = rate
        self._whose = whose
        #: How long it takes to fill.
        self.burst_s = max(BURST_S, 1 / rate)
        self._each_s = 1 / rate
        #: An empty bucket is full again after burst_s; more than that is overdrawn.
        self._most_s = self.burst_s - self._each_s + 1e-9
        self._full_at_s = 0.0

    def take(self, amount: float, now_s: float) -> bool:
        """Whether *amount* may be had at *now_s*, of a clock that never steps back."""
        full_at_s = self._full_at_s
        if full_at_s < now_s:
            full_at_s = now_s
        elif full_at_s - now_s > self._most_s:
            return False
        self._full_at_s = full_at_s + amount * self._each_s
        return True

    def give_back(self, amount: float) -> None:
        """Undo a :meth:`take` of *amount* at this same instant."""
        self._full_at_s -= amount * self._each_s

    def is_full(self, now_s: float) -> bool:
        """Whether it holds at *now_s* what a new one would."""
        return self._full_at_s <= now_s

    def wait_s(self, now_s: float) -> float:
        """How long until one may be had; 0 where it may be had now."""
        return max(0.0, self._full_at_s - now_s - self.burst_s + 1 / self.rate)

    def refusal(self, now_s: float) -> RateLimitedError:
        """What to tell who may not have more."""
        wait_s = self.wait_s(now_s)
        return RateLimitedError(
            f"{self._whose} may have {self.rate:g} {self.name} a second of this process;"
            f" send the same again in {wait_s:.3g} s",
            retry_after_us=max(1, int(wait_s * SECOND)),
            limit=self.name,
            rate=self.rate,
        )


class Allowance(Protocol):
    """What the request under way may still cause that costs more than its bytes tell."""

    def reserve(self) -> None:
        """Take one reservation of an arbitrary Idempotency-Key. Raises RateLimitedError."""
        ...

    def resolve(self) -> None:
        """Take one resolution of a late token. Raises RateLimitedError."""
        ...


#: Of the request that the running task answers. In the context and not an argument: the two places
#: that ask are deep within the service, and every method on the way would have to hand it on.
ALLOWANCE: Final[ContextVar[Allowance | None]] = ContextVar("allowance", default=None)


class _ResolutionsPaid:
    """An allowance whose resolutions were taken already."""

    def __init__(self, held: Allowance) -> None:
        self.reserve = held.reserve

    def resolve(self) -> None:
        """Take nothing."""


@contextmanager
def resolutions_paid() -> Iterator[None]:
    """Let tasks that begin within resolve late tokens that were charged for already."""
    held = ALLOWANCE.get()
    if held is None:
        yield
        return
    paid = _ResolutionsPaid(held)
    before = ALLOWANCE.set(paid)
    try:
        yield
    finally:
        # A coroutine that is closed while it waits may end in another context.
        if ALLOWANCE.get() is paid:
            ALLOWANCE.reset(before)


def reserve() -> None:
    """Take one reservation of the request under way. Raises RateLimitedError."""
    held = ALLOWANCE.get()
    if held is not None:
        held.reserve()


def resolve() -> None:
    """Take one resolution of the request under way. Raises RateLimitedError."""
    held = ALLOWANCE.get()
    if held is not None:
        held.resolve()
