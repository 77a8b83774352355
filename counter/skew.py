"""The guard of this process's clock: how far it is from the store's, and whether that is too far.

Windows close by the clock, so a process whose clock is more than ``clock_skew_max`` from the
store's could acknowledge an add in a window that was counted already. It refuses to write instead.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

from counter.durations import format_duration
from counter.errors import ClockSkewError, CounterError
from counter.limits import CLOCK_DRIFT_PER_S_US, MILLISECOND, SECOND
from counter.ports import Clock, Store
from counter.types import Dataset

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


class ClockGuard:
    """Compares the wall clock with the store's now and then, and knows in between.

    In between it watches the wall clock against the clock that nobody can step: whatever the one
    moves more than the other since the last measurement has changed the offset. What it cannot know
    counts against the clock: half the round trip of the measurement, what both may have drifted
    since, and the time between two readings here.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
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
        """Compare the clocks. Failures are counted and told, not raised."""
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
        self._tell()

    async def run(self, stop: asyncio.Event) -> None:
        """Measure every few seconds until *stop* is set."""
        while not stop.is_set():
            await self.measure()
            try:
                await asyncio.wait_for(stop.wait(), _EVERY_S)
            except TimeoutError:
                continue

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
            raise ClockSkewError(f"{trouble}; nothing is written here", retry_after_us=SECOND)

    def _tell(self) -> None:
        """Say it once when the clock goes wrong, and once when it is right again."""
        trouble = self.trouble
        if trouble is not None and not self._was_wrong:
            _log.error("writes are refused: %s", trouble)
        if trouble is None and self._was_wrong:
            _log.warning("writes are taken again: this clock is within its bound of the store's")
        self._was_wrong = trouble is not None


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
