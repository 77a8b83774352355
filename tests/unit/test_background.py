"""Work that repeats in the background."""

import asyncio
import logging

import pytest

from counter.background import every, pause
from counter.errors import StoreUnavailableError


async def test_work_is_repeated_until_it_is_stopped_and_no_failure_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of expected failures in a row one is logged, of unexpected ones each."""
    stop = asyncio.Event()
    away = StoreUnavailableError("it is away", retry_after_us=1)
    outcomes = [away, away, None, away, ValueError("odd"), ValueError("odd"), away]

    async def work() -> None:
        outcome = outcomes.pop(0)
        if not outcomes:
            stop.set()
        if outcome is not None:
            raise outcome

    with caplog.at_level(logging.WARNING):
        await every(0, work, stop, logging.getLogger("counter"), "reading")
    said = [each.getMessage() for each in caplog.records]
    expected = "reading failed: it is away"
    unexpected = "reading failed unexpectedly"
    assert said == [expected, expected, unexpected, unexpected]


async def test_a_pause_ends_when_it_is_stopped() -> None:
    stop = asyncio.Event()
    assert not await pause(stop, 0)
    waiting = asyncio.create_task(pause(stop, 3_600))
    await asyncio.sleep(0)
    stop.set()
    assert await waiting
