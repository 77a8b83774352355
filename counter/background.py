"""Work in the background: it repeats until a process ends, and leaves turns to the requests. And
the interpreter's settings for a process that has both."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from logging import Logger
from typing import Any, Final, TypeVar

from counter.errors import CounterError

#: About a millisecond of work on counters.
TURN_ITEMS: Final = 100
#: How long a thread may hold the interpreter while another one waits. With the default of 5 ms the
#: thread of a store would wait so long for a busy event loop, several times a commit.
_SWITCH_INTERVAL_S: Final = 0.0005
#: New objects between garbage collections; a request makes hardly any cycles.
_GC_THRESHOLD: Final = 50_000
_T = TypeVar("_T")


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while modules are imported, and exclude their objects from later
    collections: they live as long as the process. Collection takes a tenth of an import's time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_interpreter() -> None:
    """Prepare the interpreter for a process that serves, or rolls up, until it is stopped."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory of a process that serves or rolls up: uvloop's, if it is
    installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def in_turns(items: Sequence[_T]) -> AsyncIterator[Sequence[_T]]:
    """Yield *items* in parts, at most TURN_ITEMS each; the event loop, which may serve requests,
    has a turn after each part."""
    for start in range(0, len(items), TURN_ITEMS):
        yield items[start : start + TURN_ITEMS]
        await asyncio.sleep(0)


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Wait *seconds*, or until *stop* is set. Return whether it is set."""
    # Not wait_for: before Python 3.12 it starts a task.
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
    return stop.is_set()


def retrieve(task: asyncio.Task[Any]) -> None:
    """Mark the failure of a shared *task* as seen: if all its callers were cancelled, asyncio would
    log it with a trace."""
    if not task.cancelled():
        task.exception()


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

    Errors do not stop the loop. Unexpected errors are always logged; of consecutive expected
    errors, the first. *what* names the work in the log.
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
