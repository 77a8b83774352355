"""The guard of this process's clock: how far it is from the store's, and whether that is too far.

Windows close by the clock, so a process whose clock is more than ``clock_skew_max`` from the
store's could acknowledge an add in a window that was counted already. It refuses to write instead.
Over a store in this process, which has no clock of its own, the wall clock is compared with the
boot clock, and with the times that are stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from counter.background import every
from counter.durations import format_duration
from counter.errors import ClockSkewError, CounterError
from counter.limits import (
    CLOCK_DRIFT_PER_S_US,
    CLOCK_HOLD_US,
    CLOCK_STEP_MAX_US,
    MILLISECOND,
    SECOND,
)
from counter.ports import Clock, Store
from counter.types import ClockReading, Dataset

_log = logging.getLogger("counter.clock")
_READINGS: Final = 3
_EVERY_S: Final = 2.0
_TIMEOUT_S: Final = 5.0
#: So many measurements in a row may fail before the last good one is taken for too old.
_FAILURES_MAX: Final = 15
#: Measurements that differ by less than this do not contradict each other.
_NOISE_US: Final = MILLISECOND
_PAIRS_MAX: Final = 3


class _Pair(NamedTuple):
    """The wall clock and the other one: it was read *width_us* before the same again."""

    width_us: int
    wall_us: int
    boottime_us: int


class _Measured(NamedTuple):
    """The store's clock was ahead by *offset_us*, give or take *error_us*, at *at*. No other clock
    can be told without error: 0 is that of a store which goes by this process's own."""

    offset_us: int
    error_us: int
    at: _Pair


class ClockSource(Protocol):
    """What of :class:`counter.ports.Store` a clock is compared with."""

    async def datasets(self) -> Sequence[Dataset]:
        """As there."""
        ...

    async def read_clock(self) -> ClockReading:
        """As there."""
        ...


class ClockGuard:
    """Compares the wall clock with the store's now and then, and knows in between.

    In between it watches the wall clock against the clock that nobody can step: whatever the one
    moves more than the other since the last measurement has changed the offset. What it cannot know
    counts against the clock: half the round trip of the measurement, what both may have drifted
    since, and the time between two readings here.
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
        """How far the store's clock is ahead of this one now; 0 before it was measured."""
        return 0 if self._measured is None else self._known(self._measured)[0]

    @property
    def bound_us(self) -> int:
        """The narrowest bound of a dataset; 0 before it is known."""
        return self._bound_us or 0

    @property
    def trouble(self) -> str | None:
        """Why the dataset with the narrowest bound takes no writes here; None while it does."""
        return self._trouble(self._bound_us)

    @property
    def wait_us(self) -> int:
        """How long until writes may be taken again, as far as that is known."""
        return SECOND

    @property
    def followed_us(self) -> int:
        """How far this clock was set ahead while the process ran, and was followed: whether it was
        right before or is right now, nothing here can know."""
        return 0

    def is_sure(self, dataset: Dataset) -> bool:
        """Whether this clock is known to be within the bound of *dataset*."""
        return self._trouble(dataset.clock_skew_max_us) is None

    def check(self, dataset: Dataset) -> None:
        """Raise ClockSkewError unless this clock is known to be within the bound of *dataset*."""
        self._refuse(self._trouble(dataset.clock_skew_max_us))

    def check_all(self) -> None:
        """Raise ClockSkewError unless this clock is within the bound of every dataset."""
        self._refuse(self.trouble)

    async def measure(self) -> None:
        """Compare the clocks. Failures are counted and logged, not raised.

        One comparison runs at a time: the result of the newest one is what stays.
        """
        async with self._measuring:
            await self._compare()
            self._tell()

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
                _log.warning("the store's clock cannot be read: %s", error or "it took too long")
        except Exception:
            # Nothing may end the guard: what it said last would stand for ever.
            self._failures += 1
            _log.exception("the store's clock was read in a way that should not fail")
        else:
            self._failures = 0
            best, after = min(readings, key=lambda each: each.error_us), self._surest_pair()
            error_us = best.error_us
            if error_us:
                # Set meanwhile, this clock was compared before it or after: nobody knows.
                error_us += abs(_walked(before, after)) + before.width_us + after.width_us
            self._take(_Measured(best.offset_us, error_us, after))

    async def run(self, stop: asyncio.Event) -> None:
        """Measure every few seconds until *stop* is set."""
        await every(_EVERY_S, self.measure, stop, _log, "comparing the clocks")

    def _pair(self) -> _Pair:
        """Both clocks now."""
        before_us = self._clock.boottime_us()
        wall_us = self._clock.now_us()
        return _Pair(self._clock.boottime_us() - before_us, wall_us, before_us)

    def _surest_pair(self) -> _Pair:
        """Both clocks with as little between them as a busy machine lets have."""
        return min(self._pair() for _ in range(_PAIRS_MAX))

    def _known(self, measured: _Measured) -> tuple[int, int]:
        """The offset now, and how far from it the true one may be."""
        if measured.error_us == 0:
            return measured.offset_us, 0
        now = self._pair()
        age_us = now.boottime_us - measured.at.boottime_us
        doubt_us = measured.error_us + now.width_us + age_us * CLOCK_DRIFT_PER_S_US // SECOND
        return measured.offset_us - _walked(measured.at, now), doubt_us

    def _take(self, new: _Measured) -> None:
        """Hold the surer of what is known and *new*; *new* where the two cannot both be true.

        A store that answers slowly tells its time badly: what was measured in a better moment
        stays the better guess, while it ages slowly.
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
                f"the store's clock can only be told to {_text(doubt_us)}, and"
                f" clock_skew_max is {format_duration(bound_us)}: the network, or the store, is too"
                " slow for that bound"
            )
        return (
            f"this server's clock is {_text(abs(offset_us))}"
            f" {'behind' if offset_us > 0 else 'ahead of'} the store's, give or take"
            f" {_text(doubt_us)}, and clock_skew_max is {format_duration(bound_us)}:"
            " set it right (NTP), and restart the process if it was ahead"
        )

    def _refuse(self, trouble: str | None) -> None:
        if trouble is not None:
            raise ClockSkewError(f"{trouble}; nothing is written here", retry_after_us=self.wait_us)

    def _tell(self) -> None:
        """Say it once when the clock goes wrong, and once when it is right again."""
        trouble = self.trouble
        if trouble is not None and not self._was_wrong:
            _log.error("writes are refused: %s", trouble)
        if trouble is None and self._was_wrong:
            _log.warning("writes are taken again: this clock is within its bound of the store's")
        self._was_wrong = trouble is not None


class StepGuard(ClockGuard):
    """The guard over a store that has no clock of its own: the boot clock is what is left.

    What this process decides follows from readings of the wall clock that :meth:`check` let pass,
    and none of them is later than the boot clock allows. So a wall clock that jumps ahead and back
    leaves no trace: nothing is written meanwhile, and the readings in between are forgotten. One
    that stays ahead for CLOCK_HOLD_US is followed: it may have been wrong before, or a virtual
    machine stood still. One that is behind what was decided, or behind what is stored at the start,
    has to catch up first.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        super().__init__(store, clock)
        self._bound_us = CLOCK_STEP_MAX_US
        #: Both clocks when they agreed last, and the latest reading that was let pass.
        self._agreed = self._read()
        self._trusted_us = 0
        #: Something was decided by this time: no earlier one is taken for true.
        self._floor_us = 0
        #: How far the wall clock is ahead, and since when by the boot clock, while it is held.
        self._step: tuple[int, int] | None = None
        self._followed_us = 0
        #: The latest time that is stored where it is ahead, 0 where it is not; None before a look.
        self._stored_us: int | None = None

    @property
    def offset_us(self) -> int:
        """How far what this process goes by is ahead of the wall clock."""
        now = self._look()[0]
        return self._behind(now) if self._step is None else -self._step[0]

    @property
    def wait_us(self) -> int:
        """How long until the wall clock has caught up, or is followed."""
        now = self._look()[0]
        if self._step is None:
            return max(SECOND, self._behind(now))
        return max(SECOND, CLOCK_HOLD_US - (now.boottime_us - self._step[1]))

    @property
    def followed_us(self) -> int:
        return self._followed_us

    async def _compare(self) -> None:
        """Compare the wall clock with the latest time that is stored."""
        try:
            reading = await self._store.read_clock()
        except CounterError as error:
            self._failures += 1
            if self._failures == 1:
                _log.warning("the latest time that is stored cannot be read: %s", error)
        else:
            self._failures = 0
            self._stored_us = self._clock.wall_us() + reading.offset_us if reading.offset_us else 0

    def _read(self) -> _Pair:
        before_us = self._clock.boottime_us()
        wall_us = self._clock.wall_us()
        return _Pair(self._clock.boottime_us() - before_us, wall_us, before_us)

    def _behind(self, now: _Pair) -> int:
        """How far the wall clock is behind what was decided or is stored; 0 for what is no step."""
        behind_us = max(self._floor_us, self._stored_us or 0) - now.wall_us
        return behind_us if behind_us > CLOCK_STEP_MAX_US else 0

    def _look(self) -> tuple[_Pair, bool]:
        """Both clocks now, and whether every reading so far that is not forgotten was right."""
        latest_us = self._clock.now_us()
        now = self._read()
        if abs(_walked(self._agreed, now)) > CLOCK_STEP_MAX_US:
            # Perhaps the process was only stopped between its readings.
            now = min(self._read() for _ in range(_PAIRS_MAX))
        ahead_us = _walked(self._agreed, now)
        if ahead_us > CLOCK_STEP_MAX_US + now.width_us:
            self._hold(ahead_us, now)
            return now, self._step is None
        self._step, due_us = None, now.wall_us - ahead_us
        if ahead_us < -CLOCK_STEP_MAX_US:
            self._floor_us = max(self._floor_us, self._trusted_us, due_us)
        self._agreed = now
        if latest_us > max(now.wall_us, self._floor_us) + CLOCK_STEP_MAX_US:
            # Read while the wall clock was ahead. Nothing was decided by it, nor must be.
            self._clock.forget_after(max(self._trusted_us, due_us))
            return now, False
        self._trusted_us = max(self._trusted_us, latest_us)
        return now, True

    def _hold(self, ahead_us: int, now: _Pair) -> None:
        """Note a step ahead; follow it when it has lasted."""
        if self._step is None or abs(ahead_us - self._step[0]) > CLOCK_STEP_MAX_US:
            self._step = (ahead_us, now.boottime_us)
        elif now.boottime_us - self._step[1] >= CLOCK_HOLD_US:
            self._step, self._agreed = None, now
            self._followed_us += ahead_us
            _log.warning(
                "this machine's clock was set %s ahead and stayed so for %s: it is followed. Until"
                " a restart, slices are kept for as much longer than retention",
                *(_text(ahead_us), format_duration(CLOCK_HOLD_US)),
            )

    def _trouble(self, bound_us: int | None) -> str | None:
        if self._stored_us is None:
            return "this machine's clock was not compared with what is stored yet"
        now, is_right = self._look()
        if self._step is not None:
            left_us = CLOCK_HOLD_US - (now.boottime_us - self._step[1])
            return (
                f"this machine's clock was set {_text(self._step[0])} ahead while the service ran:"
                " set it right (NTP) if it is wrong now; if it was wrong before, it is followed in"
                f" {left_us // SECOND} s"
            )
        if behind_us := self._behind(now):
            return (
                f"this machine's clock is {_text(behind_us)} behind the times that it told before:"
                " set it right (NTP) if it is wrong now; if it was wrong before, writes are taken"
                " again when time has caught up"
            )
        return None if is_right else "this machine's clock was ahead for a moment"


def guard_of(store: Store, clock: Clock) -> ClockGuard:
    """The guard that a process over *store* needs."""
    return StepGuard(store, clock) if store.transactional else ClockGuard(store, clock)


def checked_now_us(clock: Clock, guard: ClockGuard | None, dataset: Dataset | None = None) -> int:
    """Return the time of *clock*, which *guard* knows to be right at this very reading.

    All that writes a time into the store, or decides by one what is written, reads the clock here.
    The clock is read first: one that is set between the two is noticed. Raises ClockSkewError
    unless the clock is within the bound of *dataset*; of every dataset if none is given.
    """
    now_us = clock.now_us()
    if guard is not None and dataset is not None:
        guard.check(dataset)
    elif guard is not None:
        guard.check_all()
    return now_us


def _walked(since: _Pair, now: _Pair) -> int:
    """How much farther the wall clock went than the other one."""
    return (now.wall_us - since.wall_us) - (now.boottime_us - since.boottime_us)


def _text(us: int) -> str:
    return f"{us / SECOND:.3f} s" if us >= SECOND else f"{us / MILLISECOND:g} ms"
