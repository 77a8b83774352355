"""Work that repeats in the background until a process ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from logging import Logger

from counter.errors import CounterError


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Wait *seconds*, or until *stop* is set. Return whether it is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()


async def first_of(*events: asyncio.Event, seconds: float | None = None) -> None:
    """Wait until one of *events* is set, or *seconds* are over."""
    waiting = [asyncio.create_task(each.wait()) for each in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


async def every(
    seconds: float,
    work: Callable[[], object],
    stop: asyncio.Event,
    log: Logger,
    what: str,
) -> None:
    """Call *work*, a function or a coroutine function, until *stop* is set, with a pause of
    *seconds* after each call.

    No failure ends it: each is logged as one of *what*, and of expected ones in a row the first.
    """
    failing = False
    while not stop.is_set():
        try:
            done = work()
            if isinstance(done, Awaitable):
                await done
            failing = False
        except CounterError as error:
            if not failing:
                log.warning("%s failed: %s", what, error.detail)
            failing = True
        except Exception:
            log.exception("%s failed unexpectedly", what)
        await pause(stop, seconds)
