"""Whether another add could be answered in time, by what is ahead of it and how fast that goes.

By Little's law a queue's length is its throughput times the wait in it, so an add waits about as
long as the adds ahead of it take at the rate at which adds end. Where that is longer than an add
may wait, it is refused at the door, before any work: an answer that comes too late costs as much as
one in time, and nobody wants it.

The rate is measured as BBR measures a link (Cardwell et al., "BBR: Congestion-Based Congestion
Control", ACM Queue 14/5, 2016): a higher one is believed at once, a lower one only while the queue
is long, for where little comes little ends.
"""

from __future__ import annotations

import asyncio
from typing import Final

from counter import limits
from counter.errors import OverloadedError
from counter.ports import Clock

#: Time with adds under way that one measurement of the rate takes.
_SAMPLE_US: Final = 50 * limits.MILLISECOND
#: Until something is known, as many may come as may ever wait.
_RATE_UNKNOWN: Final = limits.PENDING_WRITES_MAX / limits.WRITE_WAIT_MAX_US
#: Of a lower rate so much is believed at a time: one sample may have met a slow disk.
_SHARE: Final = 0.5
#: Adds that end between two looks at the clock, where each ends on its own.
_ENDS_PER_LOOK: Final = 16
#: A refusal is worded anew so often: those in between say the same.
_WORDED_FOR_US: Final = 100 * limits.MILLISECOND


class Load:
    """The adds under way in this process, and how long one more would wait.

    Used by the event loop's thread alone. Per add it costs additions of integers; the clock is read
    once for those of a turn of the event loop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: How long an add may be expected to wait; a setting, and set before the first one comes.
        self.wait_max_us = limits.WRITE_WAIT_MAX_US
        #: Adds that were taken in and are not answered yet.
        self.ahead = 0
        #: With fewer ahead of it, an add is answered in time.
        self.room = limits.PENDING_WRITES_MAX
        #: How long the last turn of the event loop in which adds came took: so long a request may
        #: have lain unread.
        self.lag_us = 0
        #: Requests that were refused, since the process began.
        self.refused = 0
        #: Adds that end in a microsecond.
        self._rate = _RATE_UNKNOWN
        self._best = 0.0
        self._is_measured = False
        self._ended = 0
        self._look_at = _ENDS_PER_LOOK
        # Of the measurement under way: the time with adds under way, and what had ended before it.
        self._busy_us = 0
        self._busy_since_us = 0
        self._idle_since_us = clock.boottime_us()
        self._ended_before = 0
        # When an add was last seen to have ended, and how many had.
        self._moved_us = 0
        self._seen = 0
        self._turn_since_us: int | None = None
        self._refusal: OverloadedError | None = None
        self._worded_us = 0

    @property
    def wait_us(self) -> int:
        """How long an add that comes now is expected to wait."""
        if not self.ahead and self._is_forgotten(self._clock.boottime_us()):
            return 0
        return self.lag_us + int(self.ahead / self._rate)

    @property
    def rate_per_s(self) -> float:
        """Adds that this process can end in a second, as far as is known."""
        return self._rate * limits.SECOND

    def refuses(self, within_us: int | None = None) -> OverloadedError | None:
        """Why a write is not even looked at now; None where it is answered in time: within the
        bound, and *within_us*, which its sender waits."""
        if within_us is not None and within_us >= self.wait_max_us:
            # It waits longer than anybody may.
            within_us = None
        if self.ahead < self.room and within_us is None:
            return None
        return self._refuses(within_us)

    def check(self, within_us: int | None = None) -> None:
        """Raise what :meth:`refuses` says."""
        if self._turn_since_us is None:
            self.turn_began()
            asyncio.get_running_loop().call_soon(self.turn_over)
        refusal = self.refuses(within_us)
        if refusal is not None:
            # One that is raised again and again would grow by its tracebacks.
            raise OverloadedError(refusal.detail, retry_after_us=refusal.retry_after_us)

    def admit(self, adds: int) -> None:
        """Count *adds* as under way, to :meth:`leave` when they are done.

        Raises OverloadedError, before any work, where more are than may ever be.
        """
        ahead = self.ahead
        if ahead + adds > limits.PENDING_WRITES_MAX:
            raise OverloadedError(
                f"{ahead} adds wait for a commit; at most {limits.PENDING_WRITES_MAX} may",
                retry_after_us=limits.SECOND,
            )
        if not ahead:
            self._begin(self._clock.boottime_us())
        self.ahead = ahead + adds

    def _is_forgotten(self, now_us: int) -> bool:
        """Whether, where nothing is under way, it is too long ago that anything was."""
        return now_us - self._idle_since_us > self.wait_max_us

    def _begin(self, now_us: int) -> None:
        """The first add after none was under way. What was measured long ago, of a process that was
        held up perhaps, says nothing of now."""
        if self._is_forgotten(now_us):
            self.lag_us, self._busy_us, self._ended_before = 0, 0, self._ended
            # A lower rate was that of a moment; the highest ever seen is what it can do.
            self._rate = self._best if self._is_measured else _RATE_UNKNOWN
            self._set_room()
        self._busy_since_us = self._moved_us = now_us

    def leave(self, adds: int) -> None:
        """Count *adds* as done."""
        self.ahead -= adds
        self._ended += adds
        if self._ended >= self._look_at or not self.ahead:
            now_us = self._clock.boottime_us()
            self._measure(now_us)
            if not self.ahead:
                self._idle_since_us = now_us

    def turn_began(self, now_us: int | None = None) -> None:
        """Adds come in this turn of the event loop: its first one is here."""
        if now_us is None:
            now_us = self._clock.boottime_us()
        if self._turn_since_us is None:
            self._turn_since_us = now_us
        self._look(now_us)

    def turn_over(self) -> None:
        """The turn is over: what came in it has been read."""
        if self._turn_since_us is not None:
            self.lag_us = self._clock.boottime_us() - self._turn_since_us
            self._turn_since_us = None
            self._set_room()

    def _measure(self, now_us: int) -> None:
        """Adds have ended: see how many, in how much time in which any were under way."""
        self._look_at = self._ended + _ENDS_PER_LOOK
        self._moved_us, self._seen = now_us, self._ended
        self._busy_us += now_us - self._busy_since_us
        self._busy_since_us = now_us
        if self._busy_us < _SAMPLE_US:
            return
        rate = (self._ended - self._ended_before) / self._busy_us
        self._busy_us, self._ended_before = 0, self._ended
        is_queue = self.ahead > rate * self.wait_max_us / 2
        if rate > self._rate or (is_queue and not self._is_measured):
            self._rate, self._is_measured = rate, True
            self._best = max(self._best, rate)
        elif is_queue:
            self._rate += (rate - self._rate) * _SHARE
        else:
            return
        self._set_room()

    def _look(self, now_us: int) -> None:
        """See whether anything moves: where nothing ends, nothing is measured either."""
        if self._seen != self._ended or not self.ahead:
            self._seen, self._moved_us = self._ended, now_us
        elif now_us - self._moved_us > self.wait_max_us:
            # It stands still, and who comes now would wait as long as those who wait already.
            self._rate = limits.TRICKLE_WRITES / self.wait_max_us
            self._set_room()

    def _set_room(self) -> None:
        room = int(self._rate * (self.wait_max_us - self.lag_us))
        # Always so many, or nothing would ever be measured again.
        self.room = min(max(room, limits.TRICKLE_WRITES), limits.PENDING_WRITES_MAX)

    def _refuses(self, within_us: int | None) -> OverloadedError | None:
        """A closer look, where much is ahead or the sender is in a hurry."""
        now_us = self._clock.boottime_us()
        self._look(now_us)
        hurried = within_us is not None and self.ahead > 0 and self.wait_us > within_us
        if not hurried and self.ahead < self.room:
            return None
        self.refused += 1
        if within_us is not None and hurried:
            # It says another bound: no other sender is told that.
            return self._worded(within_us)
        if self._refusal is None or now_us - self._worded_us > _WORDED_FOR_US:
            self._worded_us = now_us
            self._refusal = self._worded(self.wait_max_us)
        return self._refusal

    def _worded(self, bound_us: int) -> OverloadedError:
        return OverloadedError(
            f"an add would wait {self.wait_us / limits.SECOND:.3f} s behind"
            f" {self.ahead} others; it may wait {bound_us / limits.SECOND:g} s."
            " Nothing was done: send the same again later, or to another process",
            retry_after_us=max(limits.SECOND, self.wait_us),
        )


class Shares:
    """How much each of many holders may have of something at once."""

    def __init__(self, most: int) -> None:
        """*most* is for each holder; 0 for any number."""
        self.most = most
        self._held: dict[str, int] = {}

    def take(self, holder: str) -> bool:
        """Count one more for *holder*; return False, counting nothing, if it has its share."""
        held = self._held.get(holder, 0)
        if self.most and held >= self.most:
            return False
        self._held[holder] = held + 1
        return True

    def give_back(self, holder: str) -> None:
        """Count one less for *holder*."""
        held = self._held.get(holder, 0)
        if held > 1:
            self._held[holder] = held - 1
        else:
            self._held.pop(holder, None)


class Bounded:
    """So much of something may be held at once, in all requests together."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self.most = most
        #: How much is held.
        self.held = 0

    def take(self, amount: int) -> None:
        """Hold *amount* more, to be given back. Raises OverloadedError where that is too much."""
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
