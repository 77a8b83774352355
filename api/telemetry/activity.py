"""Adds a second of each namespace over the last minutes, sampled in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from counter.limits import SECOND
from counter.metrics import OTHER_NAMESPACES
from counter.ports import Clock

#: Fifteen minutes.
STEP_US: Final = 5 * SECOND
STEPS_MAX: Final = 180


class Sample(NamedTuple):
    """The adds of each namespace that were counted since the process began, at an instant."""

    time_us: int
    adds: Mapping[str, int]


class Activity:
    """The latest samples of a process's adds. All of them together take less than a megabyte,
    because *adds* names a bounded number of namespaces."""

    def __init__(self, adds: Callable[[], Awaitable[Mapping[str, int]]], clock: Clock) -> None:
        self._adds = adds
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=STEPS_MAX + 1)

    async def sample(self) -> None:
        """Take a sample; to be called every :data:`STEP_US`."""
        adds = dict(await self._adds())
        self._samples.append(Sample(self._clock.now_us(), adds))

    def rates(self, sees: Callable[[str], bool]) -> list[tuple[int, float]]:
        """Return the end of each step and the adds a second in it, of the namespaces that the
        caller *sees*."""
        return [
            (after.time_us, sum(_rate(before, after, each) for each in after.adds if sees(each)))
            for before, after in pairwise(self._samples)
        ]

    def latest(self, namespace: str) -> float | None:
        """Return the adds a second of a namespace in the last step; None if they are not known,
        because its adds are counted with those of others."""
        if len(self._samples) < 2:
            return None
        before, after = self._samples[-2], self._samples[-1]
        if namespace not in after.adds and after.adds.get(OTHER_NAMESPACES, 0):
            return None
        return _rate(before, after, namespace)


def _rate(before: Sample, after: Sample, namespace: str) -> float:
    passed_us = after.time_us - before.time_us
    adds = after.adds.get(namespace, 0) - before.adds.get(namespace, 0)
    return max(0, adds) * SECOND / passed_us if passed_us > 0 else 0.0
