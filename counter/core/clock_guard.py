"""Compare this process's clock with the store's, and refuse to write if it is too far off.

Windows close by the clock, so a process whose clock is more than ``clock_skew_max`` from the
store's could acknowledge an add in a window that was counted already. It refuses to write instead.
A store in this process has no clock of its own; then the wall clock is compared with the boot clock
and with the times that are stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from counter.clock import StoreClock
from counter.errors import ClockSkewError, CounterError, StoreUnavailableError
from counter.limits import (
    CLOCK_DRIFT_PER_S_US,
    CLOCK_HOLD_US,
    CLOCK_STEP_MAX_US,
    MILLISECOND,
    SECOND,
    STORE_CLOCK_STEP_MAX_US,
)
from counter.ports import Clock, Store
from counter.types import ClockReading, Dataset

_log = logging.getLogger("counter.clock")
_READINGS: Final = 3
_TIMEOUT_S: Final = 5.0
#: After this many failed measurements in a row the last good one is considered too old.
_FAILURES_MAX: Final = 15
#: Measurements that differ by less than this agree.
_NOISE_US: Final = MILLISECOND
_PAIRS_MAX: Final = 3
_UNREAD: Final = "the store's clock was not read yet"


class _Pair(NamedTuple):
    """The wall clock and the boot clock; reading both took *width_us*."""

    width_us: int
    wall_us: int
    boottime_us: int


class _Measured(NamedTuple):
    """A measurement *at* an instant: the store's clock was ahead by *offset_us*, plus or minus
    *error_us*, and *behind_us* behind what it had decided by. An error of 0 means that the store
    uses this process's clock."""

    offset_us: int
    error_us: int
    at: _Pair
    behind_us: int


class ClockSource(Protocol):
    """The part of :class:`counter.ports.ControlPlane` that clocks are compared with."""

    async def datasets(self) -> Sequence[Dataset]:
        """As :meth:`counter.ports.ControlPlane.datasets`."""
        ...

    async def read_clock(self) -> ClockReading:
        """As :meth:`counter.ports.ControlPlane.read_clock`."""
        ...


class ClockGuard:
    """Compares the wall clock with the store's periodically, and estimates the offset in between.

    Between measurements it compares the wall clock with the boot clock, which cannot be set: any
    difference in their progress changes the offset. Uncertainty counts against the clock: half the
    round trip of the measurement, the possible drift of both clocks since, and the time between two
    readings here.
    """

    def __init__(self, store: ClockSource, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._measuring = asyncio.Lock()
        self._measured: _Measured | None = None
        self._bound_us: int | None = None
        self._failures = 0
        self._was_wrong = False

    @property
    def offset_us(self) -> int:
        """How far the store's clock is ahead of this one now; 0 before the first measurement."""
        return 0 if self._measured is None else self._known(self._measured)[0]

    @property
    def bound_us(self) -> int:
        """The narrowest bound of a dataset; 0 before it is known."""
        return self._bound_us or 0

    @property
    def trouble(self) -> str | None:
        """Why the dataset with the narrowest bound rejects writes here; None while it accepts
        them."""
        return self._trouble(self._bound_us)

    @property
    def wait_us(self) -> int:
        """The estimated time until writes are accepted again."""
        return SECOND

    @property
    def followed_us(self) -> int:
        """How far this clock was set ahead, in steps that were accepted, while the process ran.

        It is unknown whether the clock was right before or after a step.
        """
        return 0

    def is_sure(self, dataset: Dataset) -> bool:
        """Return whether this clock is known to be within the bound of *dataset*."""
        return self._trouble(dataset.clock_skew_max_us) is None

    def check(self, dataset: Dataset) -> None:
        """Raise ClockSkewError unless this clock is known to be within the bound of *dataset*."""
        self._refuse(self._trouble(dataset.clock_skew_max_us))

    def check_all(self) -> None:
        """Raise ClockSkewError unless this clock is within the bound of every dataset."""
        self._refuse(self.trouble)

    async def measure(self) -> None:
        """Compare the clocks. Failures are counted and logged, not raised.

        One comparison runs at a time: the result of the newest one is kept.
        """
        async with self._measuring:
            await self._compare()
            self._log_change()

    async def _compare(self) -> None:
        """Compare the wall clock with the store's."""
        try:
            before = self._surest_pair()
            async with asyncio.timeout(_TIMEOUT_S):
                if self._bound_us is None:
                    datasets = await self._store.datasets()
                    self._bound_us = min(each.clock_skew_max_us for each in datasets)
                readings = [await self._store.read_clock() for _ in range(_READINGS)]
        except (CounterError, TimeoutError) as error:
            self._failures += 1
            if self._failures == 1:
                _log.warning(
                    "the store's clock cannot be read: %s", str(error) or "it took too long"
                )
        except Exception:
            # The guard must keep running: otherwise its last result would be used without end.
            self._failures += 1
            _log.exception("reading the store's clock failed unexpectedly")
        else:
            self._failures = 0
            best, after = min(readings, key=lambda each: each.error_us), self._surest_pair()
            error_us = best.error_us
            if error_us:
                # If the clock was set meanwhile, it is unknown whether that was before or after the
                # comparison.
                error_us += abs(_walked(before, after)) + before.width_us + after.width_us
            self._adopt(_Measured(best.offset_us, error_us, after, best.behind_us))

    def _pair(self) -> _Pair:
        """Read both clocks now."""
        before_us = self._clock.boottime_us()
        wall_us = self._clock.now_us()
        return _Pair(self._clock.boottime_us() - before_us, wall_us, before_us)

    def _surest_pair(self) -> _Pair:
        """Read both clocks several times and return the pair with the least time between the
        readings."""
        return min(self._pair() for _ in range(_PAIRS_MAX))

    def _known(self, measured: _Measured) -> tuple[int, int]:
        """Return the current offset, and the largest possible error of it."""
        if measured.error_us == 0:
            return measured.offset_us, 0
        now = self._pair()
        age_us = now.boottime_us - measured.at.boottime_us
        doubt_us = measured.error_us + now.width_us + age_us * CLOCK_DRIFT_PER_S_US // SECOND
        return measured.offset_us - _walked(measured.at, now), doubt_us

    def _adopt(self, new: _Measured) -> None:
        """Keep the more precise of the current measurement and *new*; keep *new* if they
        contradict.

        A slow answer of the store gives an imprecise time, so an earlier precise measurement stays
        the better estimate, while its uncertainty grows slowly.
        """
        if self._measured is not None:
            offset_us, doubt_us = self._known(self._measured)
            apart_us = abs(new.offset_us - offset_us)
            agree = apart_us <= new.error_us + doubt_us + _NOISE_US
            if agree and doubt_us < new.error_us:
                return
        self._measured = new

    def _trouble(self, bound_us: int | None) -> str | None:
        measured = self._measured
        if measured is None or bound_us is None:
            return "this server's clock was not compared with the store's yet"
        if self._failures >= _FAILURES_MAX:
            return f"the store's clock could not be read {self._failures} times in a row"
        offset_us, doubt_us = self._known(measured)
        if abs(offset_us) + doubt_us <= bound_us:
            return None
        if abs(offset_us) <= doubt_us:
            return (
                f"the store's clock is only known to within {_text(doubt_us)}, and"
                f" clock_skew_max is {_text(bound_us)}: the network, or the store, is too"
                " slow for that bound"
            )
        return (
            f"this server's clock is {_text(abs(offset_us))}"
            f" {'behind' if offset_us > 0 else 'ahead of'} the store's, give or take"
            f" {_text(doubt_us)}, and clock_skew_max is {_text(bound_us)}:"
            " set it right (NTP), and restart the process if it was ahead"
        )

    def _refuse(self, trouble: str | None) -> None:
        if trouble is not None:
            raise ClockSkewError(f"{trouble}; nothing is written here", retry_after_us=self.wait_us)

    def _log_change(self) -> None:
        """Log once when the clock goes wrong, and once when it is right again."""
        trouble = self.trouble
        if trouble is not None and not self._was_wrong:
            _log.error("writes are refused: %s", trouble)
        if trouble is None and self._was_wrong:
            _log.warning("writes are taken again: this clock is within its bound of the store's")
        self._was_wrong = trouble is not None


class StepGuard(ClockGuard):
    """The guard for a store without a clock of its own: it compares with the boot clock.

    Decisions use only readings of the wall clock that :meth:`check` accepted, and none of them is
    later than the boot clock allows. So a wall clock that jumps ahead and back has no effect:
    nothing is written meanwhile, and the readings in between are forgotten. If it stays ahead for
    CLOCK_HOLD_US, the new time is accepted: the clock may have been wrong before, or a virtual
    machine was paused. If it is behind the times that were used, or behind the times that were
    stored at startup, writes wait until it has caught up.
    """

    #: Whose wall clock it is, and how far it may step without notice.
    _whose = "this machine's clock"
    _step_max_us = CLOCK_STEP_MAX_US

    def __init__(self, store: ClockSource, clock: Clock) -> None:
        super().__init__(store, clock)
        self._bound_us = self._step_max_us
        #: Both clocks when they last agreed, and the latest accepted reading.
        self._agreed = self._pair()
        self._trusted_us = 0
        #: Decisions have used this time: earlier readings are rejected.
        self._floor_us = 0
        #: How far the wall clock is ahead, and since when by the boot clock, while the step is on
        #: hold.
        self._step: tuple[int, int] | None = None
        self._followed_us = 0
        #: The latest stored time if it is ahead, 0 if it is not; None before the first comparison.
        self._stored_us: int | None = None

    @property
    def offset_us(self) -> int:
        """How far the time that this process uses is ahead of the wall clock."""
        now = self._read_clocks()[0]
        return self._behind(now) if self._step is None else -self._step[0]

    @property
    def wait_us(self) -> int:
        """The time until the wall clock has caught up, or its step is accepted."""
        now = self._read_clocks()[0]
        if self._step is None:
            return max(SECOND, self._behind(now))
        return max(SECOND, CLOCK_HOLD_US - (now.boottime_us - self._step[1]))

    @property
    def followed_us(self) -> int:
        return self._followed_us

    async def _compare(self) -> None:
        """Compare the wall clock with the latest stored time."""
        try:
            reading = await self._store.read_clock()
        except CounterError as error:
            self._failures += 1
            if self._failures == 1:
                _log.warning("the latest time that is stored cannot be read: %s", error)
        else:
            self._failures = 0
            self._stored_us = self._clock.wall_us() + reading.offset_us if reading.offset_us else 0

    def _pair(self) -> _Pair:
        before_us = self._clock.boottime_us()
        wall_us = self._clock.wall_us()
        return _Pair(self._clock.boottime_us() - before_us, wall_us, before_us)

    def _behind(self, now: _Pair) -> int:
        """Return how far the wall clock is behind times used or stored; 0 for less than a step."""
        behind_us = max(self._floor_us, self._stored_us or 0) - now.wall_us
        return behind_us if behind_us > self._step_max_us else 0

    def _read_clocks(self) -> tuple[_Pair, bool]:
        """Return both clocks now, and whether every reading that is not forgotten was right."""
        latest_us = self._clock.now_us()
        now = self._pair()
        if abs(_walked(self._agreed, now)) > self._step_max_us:
            # The process may have been paused between its two readings.
            now = self._surest_pair()
        ahead_us = _walked(self._agreed, now)
        if ahead_us > self._step_max_us + now.width_us:
            self._hold(ahead_us, now)
            return now, self._step is None
        self._step, due_us = None, now.wall_us - ahead_us
        if ahead_us < -self._step_max_us:
            self._floor_us = max(self._floor_us, self._trusted_us, due_us)
        self._agreed = now
        if latest_us > max(now.wall_us, self._floor_us) + self._step_max_us:
            # This was read while the wall clock was ahead. No decision used it, and none may.
            self._clock.forget_after(max(self._trusted_us, due_us))
            return now, False
        self._trusted_us = max(self._trusted_us, latest_us)
        return now, True

    def _hold(self, ahead_us: int, now: _Pair) -> None:
        """Record a step ahead; accept it when it has lasted long enough."""
        if self._step is None or abs(ahead_us - self._step[0]) > self._step_max_us:
            self._step = (ahead_us, now.boottime_us)
        elif now.boottime_us - self._step[1] >= CLOCK_HOLD_US:
            self._step, self._agreed = None, now
            self._followed_us += ahead_us
            _log.warning(
                "%s was set %s ahead and stayed so for %s: it is followed. Until"
                " a restart, slices are kept for as much longer than retention",
                *(self._whose, _text(ahead_us), _text(CLOCK_HOLD_US)),
            )

    def _trouble(self, bound_us: int | None) -> str | None:
        if self._stored_us is None:
            return f"{self._whose} was not compared with what is stored yet"
        now, is_right = self._read_clocks()
        if self._step is not None:
            left_us = CLOCK_HOLD_US - (now.boottime_us - self._step[1])
            return (
                f"{self._whose} was set {_text(self._step[0])} ahead while the service ran:"
                " set it right (NTP) if it is wrong now; if it was wrong before, it is followed in"
                f" {left_us // SECOND} s"
            )
        if behind_us := self._behind(now):
            return (
                f"{self._whose} is {_text(behind_us)} behind the times that it showed"
                " before: set it right (NTP) if it is wrong now; if it was wrong before, writes are"
                " taken again when time has caught up"
            )
        return None if is_right else f"{self._whose} was ahead for a moment"


class StoreClockGuard(StepGuard):
    """The guard of a clock that follows the store's: it sets it by each measurement.

    The store decides by its own clock, so a small error here has no effect. But what the store has
    decided by a clock far ahead would stay: so a step is held here before it is followed.
    """

    _whose = "the store's clock"
    _step_max_us = STORE_CLOCK_STEP_MAX_US

    def __init__(self, store: ClockSource, clock: StoreClock) -> None:
        super().__init__(store, clock)
        self._store_clock = clock

    async def measure(self) -> None:
        """Compare the clocks. Raises StoreUnavailableError until the store's clock was read once:
        before that no time is right, not even that of a read."""
        await super().measure()
        if self._measured is None:
            raise StoreUnavailableError(_UNREAD, retry_after_us=SECOND)

    async def _compare(self) -> None:
        await ClockGuard._compare(self)

    def _adopt(self, new: _Measured) -> None:
        is_first = self._measured is None
        super()._adopt(new)
        if self._measured is new:
            self._store_clock.follow(new.offset_us)
            self._measured = new._replace(offset_us=0, at=self._surest_pair())
        now = self._pair()
        self._stored_us = now.wall_us + new.behind_us if new.behind_us else 0
        if is_first:
            # What the machine's own clock showed before means nothing.
            self._agreed, self._step, self._trusted_us, self._floor_us = now, None, 0, 0

    def _trouble(self, bound_us: int | None) -> str | None:
        if self._measured is None:
            return _UNREAD
        if self._failures >= _FAILURES_MAX:
            return f"the store's clock could not be read {self._failures} times in a row"
        return super()._trouble(bound_us)


def guard_of(store: Store, clock: Clock) -> ClockGuard:
    """Return the guard that a process with *store* needs."""
    if store.capabilities.embedded:
        return StepGuard(store.control, clock)
    if isinstance(clock, StoreClock):
        return StoreClockGuard(store.control, clock)
    return ClockGuard(store.control, clock)


def checked_now_us(clock: Clock, guard: ClockGuard | None, dataset: Dataset | None = None) -> int:
    """Return the time of *clock* after *guard* has checked it.

    All code that writes a time into the store, or decides by one what is written, reads the clock
    here. The clock is read before the check, so that a step between the two is detected. Raises
    ClockSkewError unless the clock is within the bound of *dataset*; of every dataset if none is
    given.
    """
    now_us = clock.now_us()
    if guard is not None and dataset is not None:
        guard.check(dataset)
    elif guard is not None:
        guard.check_all()
    return now_us


def _walked(since: _Pair, now: _Pair) -> int:
    """Return how much farther the wall clock moved than the boot clock."""
    return (now.wall_us - since.wall_us) - (now.boottime_us - since.boottime_us)


def _text(us: int) -> str:
    return f"{us / SECOND:.3f} s" if us >= SECOND else f"{us / MILLISECOND:g} ms"
