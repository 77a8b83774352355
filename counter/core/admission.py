"""Admission control: estimate the queueing delay and reject adds that would exceed the bound.

By Little's law a queue's length is its throughput times the wait in it, so the wait of an add is
the number of adds ahead of it divided by the rate at which adds finish. If that is longer than an
add may wait, the add is rejected before any work, because a late answer costs as much as one in
time and is useless to the client.

The rate is an average of measurements. As when BBR measures a link (Cardwell et al., "BBR:
Congestion-Based Congestion Control", ACM Queue 14/5, 2016), a lower one is accepted only while the
queue is long, because with few adds few can finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from counter import limits
from counter.errors import OverloadedError
from counter.ports import Clock

#: Time with adds in flight that one measurement of the rate takes.
_SAMPLE_US: Final = 50 * limits.MILLISECOND
#: The initial rate: it admits as many adds as may ever wait.
_RATE_UNKNOWN: Final = limits.PENDING_WRITES_MAX / limits.WRITE_WAIT_MAX_US
#: Adds that finish between two clock readings when each finishes separately.
_ENDS_PER_READING: Final = 16
#: How long the text of a refusal is reused before its figures are updated.
_REFUSAL_REUSED_US: Final = 100 * limits.MILLISECOND


class Load:
    """The adds in flight in this process, and the estimated wait of one more.

    Used by the event loop's thread only. Per add it costs integer additions; the clock is read once
    for all adds of a turn of the event loop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: The longest expected wait of an add; a setting, set before the first add.
        self.wait_max_us = limits.WRITE_WAIT_MAX_US
        #: Adds that were admitted and are not answered yet.
        self.ahead = 0
        #: If fewer adds than this are ahead of it, an add is answered in time.
        self.room = limits.PENDING_WRITES_MAX
        #: Duration of the last event loop turn with adds: a request may have waited this long to be
        #: read.
        self.lag_us = 0
        #: Requests that were rejected, since the process began.
        self.refused = 0
        #: Adds that finish per microsecond.
        self._rate = _RATE_UNKNOWN
        self._best = 0.0
        self._is_measured = False
        self._ended = 0
        self._measure_at = _ENDS_PER_READING
        # The current measurement: the time with adds in flight, and the adds finished before it.
        self._busy_us = 0
        self._busy_since_us = 0
        self._idle_since_us = clock.boottime_us()
        self._ended_before = 0
        # When an add was last seen to have finished, and how many had.
        self._progress_us = 0
        self._ended_then = 0
        self._turn_since_us: int | None = None
        self._refusal: OverloadedError | None = None
        self._refusal_made_us = 0

    @property
    def wait_us(self) -> int:
        """The expected wait of an add that arrives now."""
        if not self.ahead and self._is_outdated(self._clock.boottime_us()):
            return 0
        return self.lag_us + int(self.ahead / self._rate)

    @property
    def rate_per_s(self) -> float:
        """The estimated number of adds that this process can finish per second."""
        return self._rate * limits.SECOND

    def refusal(self, within_us: int | None = None) -> OverloadedError | None:
        """Return the error for a write that must be rejected now; None if it is expected to be
        answered within the bound and within *within_us*, the time that its sender waits."""
        if within_us is not None and within_us >= self.wait_max_us:
            # The sender waits longer than the bound, so the bound decides.
            within_us = None
        if self.ahead < self.room and within_us is None:
            return None
        return self._checked_refusal(within_us)

    def check(self, within_us: int | None = None) -> None:
        """Raise the error that :meth:`refusal` returns."""
        if self._turn_since_us is None:
            self.begin_turn()
            asyncio.get_running_loop().call_soon(self.end_turn)
        refusal = self.refusal(within_us)
        if refusal is not None:
            # Raise a new instance: one that is raised repeatedly would accumulate tracebacks.
            raise OverloadedError(refusal.detail, retry_after_us=refusal.retry_after_us)

    def admit(self, adds: int, *, begins_turn: bool = False) -> None:
        """Count *adds* as in flight until :meth:`finish`; note if they are the first ones of this
        turn of the event loop, as :meth:`begin_turn` does.

        Raises OverloadedError, before any work, if more are in flight than PENDING_WRITES_MAX.
        """
        ahead = self.ahead
        if ahead + adds > limits.PENDING_WRITES_MAX:
            raise OverloadedError(
                f"{ahead} adds wait for a commit; at most {limits.PENDING_WRITES_MAX} may",
                retry_after_us=limits.SECOND,
            )
        if begins_turn or not ahead:
            now_us = self._clock.boottime_us()
            if not ahead:
                self._begin(now_us)
            if begins_turn:
                self.begin_turn(now_us)
        self.ahead = ahead + adds

    def _is_outdated(self, now_us: int) -> bool:
        """Return whether nothing has been in flight for longer than a measurement is valid."""
        return now_us - self._idle_since_us > self.wait_max_us

    def _begin(self, now_us: int) -> None:
        """Start counting busy time at the first add after an idle period.

        Old measurements are discarded, because the process may have been paused when they were
        taken.
        """
        if self._is_outdated(now_us):
            self.lag_us, self._busy_us, self._ended_before = 0, 0, self._ended
            # A lower rate was temporary; the highest measured rate is the process's capacity.
            self._rate = self._best if self._is_measured else _RATE_UNKNOWN
            self._set_room()
        self._busy_since_us = self._progress_us = now_us

    def finish(self, adds: int) -> None:
        """Count *adds* as finished."""
        self.ahead -= adds
        self._ended += adds
        if self._ended >= self._measure_at or not self.ahead:
            now_us = self._clock.boottime_us()
            self._measure(now_us)
            if not self.ahead:
                self._idle_since_us = now_us

    def begin_turn(self, now_us: int | None = None) -> None:
        """Note that adds arrive in this turn of the event loop; called at the first one."""
        if now_us is None:
            now_us = self._clock.boottime_us()
        if self._turn_since_us is None:
            self._turn_since_us = now_us
        self._detect_standstill(now_us)

    def end_turn(self) -> None:
        """Note the end of the turn: everything that arrived in it has been read."""
        if self._turn_since_us is not None:
            self.lag_us = self._clock.boottime_us() - self._turn_since_us
            self._turn_since_us = None
            self._set_room()

    def _measure(self, now_us: int) -> None:
        """Measure the rate: the adds that finished in the time with any in flight."""
        self._measure_at = self._ended + _ENDS_PER_READING
        self._progress_us, self._ended_then = now_us, self._ended
        self._busy_us += now_us - self._busy_since_us
        self._busy_since_us = now_us
        if self._busy_us < _SAMPLE_US:
            return
        rate = (self._ended - self._ended_before) / self._busy_us
        if self._is_measured:
            # The mean over about the time that an add may wait: a process that gets the processor
            # or the disk in bursts does in a short sample several times what it can keep up.
            rate = self._rate + (rate - self._rate) * self._busy_us / (
                self._busy_us + self.wait_max_us
            )
        self._busy_us, self._ended_before = 0, self._ended
        is_queue = self.ahead > rate * self.wait_max_us / 2
        if rate > self._rate or is_queue:
            self._rate, self._is_measured = rate, True
            self._best = max(self._best, rate)
            self._set_room()

    def _detect_standstill(self, now_us: int) -> None:
        """Detect a standstill: if no add finishes, :meth:`_measure` is never called."""
        if self._ended_then != self._ended or not self.ahead:
            self._ended_then, self._progress_us = self._ended, now_us
        elif now_us - self._progress_us > self.wait_max_us:
            # Nothing finishes; new adds would wait as long as those that wait already.
            self._rate = limits.TRICKLE_WRITES / self.wait_max_us
            self._set_room()

    def _set_room(self) -> None:
        room = int(self._rate * (self.wait_max_us - self.lag_us))
        # Always admit a few, because without adds the rate is never measured again.
        self.room = min(max(room, limits.TRICKLE_WRITES), limits.PENDING_WRITES_MAX)

    def _checked_refusal(self, within_us: int | None) -> OverloadedError | None:
        """Do the full check of :meth:`refusal`, when many adds are ahead or the sender's
        time-out is short."""
        now_us = self._clock.boottime_us()
        self._detect_standstill(now_us)
        hurried = within_us is not None and self.ahead > 0 and self.wait_us > within_us
        if not hurried and self.ahead < self.room:
            return None
        self.refused += 1
        if within_us is not None and hurried:
            # This refusal names the sender's own time-out, so it is not reused for other senders.
            return self._error(within_us)
        if self._refusal is None or now_us - self._refusal_made_us > _REFUSAL_REUSED_US:
            self._refusal_made_us = now_us
            self._refusal = self._error(self.wait_max_us)
        return self._refusal

    def _error(self, bound_us: int) -> OverloadedError:
        return OverloadedError(
            f"an add would wait {self.wait_us / limits.SECOND:.3f} s behind"
            f" {self.ahead} others; it may wait {bound_us / limits.SECOND:g} s."
            " Nothing was done: send the same again later, or to another process",
            retry_after_us=max(limits.SECOND, self.wait_us),
        )


class Bounded:
    """Limits how much of something all requests together may hold at once."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self.most = most
        #: The amount that is held now.
        self.held = 0

    def take(self, amount: int) -> None:
        """Hold *amount* more until :meth:`give_back`. Raises OverloadedError if that exceeds the
        limit."""
        if self.held + amount > self.most:
            raise OverloadedError(
                f"{self.held} {self._what} already, and {amount} more come; at most {self.most}"
                " may at once: send the same again later, or to another process",
                retry_after_us=limits.SECOND,
            )
        self.held += amount

    def give_back(self, amount: int) -> None:
        """Hold *amount* less."""
        self.held -= amount

    @contextmanager
    def holding(self, amount: int) -> Iterator[None]:
        """Hold *amount* more within the block. Raises OverloadedError, as :meth:`take`."""
        self.take(amount)
        try:
            yield
        finally:
            self.give_back(amount)


class WeightedSemaphore:
    """Let in work up to a total weight; the rest waits, first come, first served."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0
        self._next = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def holding(self, weight: int) -> AsyncIterator[None]:
        """Wait until *weight* more fits, and hold it within the block. Work that is heavier than
        the total runs alone."""
        async with self._next:
            while self._held and self._held + weight > self._most:
                self._freed.clear()
                await self._freed.wait()
            self._held += weight
        try:
            yield
        finally:
            self._held -= weight
            self._freed.set()
