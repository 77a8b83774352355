"""Work that repeats in the background."""

import asyncio
import logging

import pytest

from api.server.protocol import cut_slow_clients
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


async def test_a_failure_does_not_end_the_checks_of_slow_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: after one unexpected error no slow client was ever disconnected again."""
    stop = asyncio.Event()

    class Odd:
        checks = 0

        def check(self, now_s: float) -> None:
            self.checks += 1
            if self.checks > 1:
                stop.set()
            raise ValueError("odd")

    async with asyncio.timeout(30):
        await cut_slow_clients({Odd()}, 1, stop)
    assert caplog.text.count("checking for slow clients failed unexpectedly") == 2


async def test_a_pause_ends_when_it_is_stopped() -> None:
    stop = asyncio.Event()
    assert not await pause(stop, 0)
    waiting = asyncio.create_task(pause(stop, 3_600))
    await asyncio.sleep(0)
    stop.set()
    assert await waiting
