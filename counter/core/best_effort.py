"""Adds to best-effort counters, without a task that waits for each."""

from __future__ import annotations

import logging
from collections.abc import Callable

from counter.core.results import Added, count_failure
from counter.errors import CounterError
from counter.ports import Cache, Clock, PromptCounters
from counter.types import Namespace

#: Told what to answer to an add.
Answered = Callable[[Added | CounterError], None]

_log = logging.getLogger("counter.best_effort")


class BestEffort:
    """Begins adds where the cache can, and has whoever sent them called back."""

    def __init__(self, cache: Cache, clock: Clock, tally: dict[str, int]) -> None:
        """What becomes of adds is counted in *tally*."""
        self._clock = clock
        self._tally = tally
        self._counters = cache if isinstance(cache, PromptCounters) else None

    def add_soon(self, namespace: Namespace, counter: str, delta: int, answered: Answered) -> bool:
        """Add *delta*, then call *answered*, which may be before this returns. False, and nothing
        is done, where :meth:`counter.core.service.CounterService.add` must do it."""
        if self._counters is None:
            return False

        def told(value: int | CounterError) -> None:
            try:
                if isinstance(value, CounterError):
                    count_failure(self._tally, value)
                    answered(value)
                else:
                    self._tally["best_effort"] += 1
                    answered(Added(counter, delta, self._clock.now_us(), None))
            except Exception:
                # One that cannot be told must not keep the others waiting.
                _log.exception("the outcome of an add could not be told")

        self._counters.increment_soon(namespace, counter, delta, told)
        return True
