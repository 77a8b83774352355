"""Waiting for another process: the one place where a test polls, and it has a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_STEP_SECONDS = 0.02


async def eventually(
    probe: Callable[[], Awaitable[T | None]], what: str, *, seconds: float = 30.0
) -> T:
    """The first result of *probe* that is neither None nor False.

    Fails naming *what* when *seconds* have passed: a bound on a hang, never a claim about speed.
    """
    deadline = time.monotonic() + seconds
    while True:
        result = await probe()
        if result is not None and result is not False:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        await asyncio.sleep(_STEP_SECONDS)
