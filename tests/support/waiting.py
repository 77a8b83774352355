"""Waiting for another process: the one place in which a test polls, with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeVar, overload

T = TypeVar("T")

#: Below the time-out of a test (pyproject.toml), which does not say what was waited for.
_HANG_SECONDS = 200.0
_STEP_SECONDS = 0.02
_STEP_SECONDS_MAX = 1.0
#: A probe of a cluster takes CPU on each node: probes get a fifth of the time, so that they do not
#: slow down what they wait for.
_STEP_PER_PROBE = 4


@overload
async def eventually(probe: Callable[[], Awaitable[T | None]], what: str) -> T: ...
@overload
async def eventually(probe: Callable[[], T | None], what: str) -> T: ...
async def eventually(probe: Callable[[], Any], what: str) -> Any:
    """The first result of *probe*, awaited if need be, that is neither None nor False.

    Fails naming *what* when minutes have passed: a bound on a hang, never a claim about speed.
    """
    deadline = time.monotonic() + _HANG_SECONDS
    while True:
        began = time.monotonic()
        result = probe()
        if isawaitable(result):
            result = await result
        if result is not None and result is not False:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {_HANG_SECONDS} s")
        step = _STEP_PER_PROBE * (time.monotonic() - began)
        await asyncio.sleep(min(max(step, _STEP_SECONDS), _STEP_SECONDS_MAX))
