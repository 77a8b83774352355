"""Virtual time for pauses and waits: hours pass at once, the same in each run."""

from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar

from tests.simulation.loop import SimulatedLoop

T = TypeVar("T")


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """The result of *work*, run by itself from the time 0 on."""
    loop = SimulatedLoop(Random(0))
    try:
        return loop.run_until_complete(work)
    finally:
        loop.end()
