"""Loads at a steady rate: the latency of a saturated server says how many wait, and little else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.harness import Bench, BenchError, Load

_TRIES: Final = 3


def at_pace(
    bench: Bench, what: str, rate: float, measure: Callable[[], Load], *, off_by: float = 0.1
) -> Load:
    """What *measure* saw once its rate was within *off_by* of *rate*: at another one it measured
    another load. Tried again where something else held the machine up; then raises BenchError. In
    a quick run any rate will do."""
    for _ in range(_TRIES):
        paced = measure()
        if bench.quick or abs(paced.per_s / rate - 1) <= off_by:
            return paced
        bench.say(f"{what}: {paced.per_s:,.0f}/s where {rate:,.0f}/s were to be; once more")
    raise BenchError(f"{what}: {rate:,.0f}/s are not reached: the machine is too slow, or too busy")
