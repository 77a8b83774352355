"""Virtual time for pauses and waits: hours pass at once, the same in each run."""

from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from counter.config.store_kinds import store_names
from tests.simulation.loop import SimulatedLoop

T = TypeVar("T")


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """The result of *work*, run by itself from the time 0 on."""
    loop = SimulatedLoop(Random(0))
    try:
        return loop.run_until_complete(work)
    finally:
        loop.end()


@asynccontextmanager
async def _whatever_it_takes(_: int) -> AsyncIterator[None]:
    yield


@contextmanager
def no_deadline_by_the_wall() -> Iterator[None]:
    """Measure statements by the fake clock alone: the machine may be busy."""
    with ExitStack() as patches:
        for store in {"cassandra", "postgresql"}.intersection(store_names()):
            for module in ("events", "decisions"):
                name = f"counter.storage.{store}.{module}.within"
                patches.enter_context(patch(name, _whatever_it_takes))
        yield
