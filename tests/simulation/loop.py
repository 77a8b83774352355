"""An event loop whose time is virtual, and processes that crash and sleep in it.

Nothing waits: where no callback is ready, the time is that of the next timer. Each callback belongs
to the process that its context names. Those of a process run in their order; which process goes
first is drawn. A process that crashed runs nothing any more, not even what would clean up; one that
is paused runs it all later, while every clock goes on.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Final

from counter.limits import SECOND

#: The context of callbacks without a process.
NOWHERE: Final = Context()
_PROCESS: Final[ContextVar["Process | None"]] = ContextVar("process", default=None)
#: More than any clean-up awaits.
_CLOSES_MAX: Final = 10


class Handle:
    """A callback of a process: a faster handle than asyncio's."""

    __slots__ = ("args", "call", "context", "process", "when_s")

    def __init__(
        self, call: Callable[..., Any], args: Any, context: Context | None, when_s: float
    ) -> None:
        self.call: Callable[..., Any] | None = call
        self.args = args
        self.context = copy_context() if context is None else context
        self.process = self.context.get(_PROCESS)
        self.when_s = when_s

    def cancel(self) -> None:
        """Have nothing called."""
        self.call, self.args = None, ()

    def cancelled(self) -> bool:
        """Return whether nothing will be called."""
        return self.call is None

    def when(self) -> float:
        """Return the time of a timer, in seconds."""
        return self.when_s


def run_in(context: Context, call: Callable[..., Any], *args: Any) -> None:
    """Call in the process of *context*: at once, or when it is awake again, or never."""
    process = context.get(_PROCESS)
    if process is None or process.awake:
        context.run(call, *args)
    elif process.paused:
        process.held.append(Handle(call, args, context, 0.0))


class Process:
    """One process of the service: it can die, and it can fall asleep."""

    def __init__(self, loop: "SimulatedLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        #: Alive, and not paused.
        self.awake = True
        self.held: list[Handle] = []
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)
        self._loop = loop

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run *work* in this process."""
        return self._loop.create_task(work, context=self.context)

    def crash(self) -> None:
        """Stop at whatever await it is at."""
        self.alive = self.awake = False
        self.held.clear()

    def pause(self, us: int) -> None:
        """Sleep for *us*, unless asleep."""
        if self.alive and not self.paused:
            self.paused, self.awake = True, False
            self._loop.call_later(us / SECOND, self._resume, context=NOWHERE)

    def _resume(self) -> None:
        self.paused, self.awake = False, self.alive
        self._loop.take_back(self.held)
        self.held.clear()


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks in virtual time, from 0."""

    _stopping: bool

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._ready: deque[Handle] = deque()
        #: By time, and then in the order of their calls.
        self._scheduled: list[tuple[float, int, Handle]] = []
        self._numbers = count()
        self._now_s = 0.0
        #: Microseconds since the beginning.
        self.now_us = 0
        self.turns = 0
        #: Whether the run is over, and only being taken apart.
        self.ending = False
        self.failures: list[str] = []
        #: Held: a task of a process that crashed would else be collected at a time of its own.
        self._made: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._note_failure)

    #: Called for each future and task, so it is a function in C; it returns False.
    get_debug = staticmethod(bool)

    def time(self) -> float:
        return self._now_s

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        # Without a name each would get a number, which takes time.
        task = asyncio.Task(coro, loop=self, **{"name": "task"} | more)
        self._made.append(task)
        return task

    # Typed plainly: the base class's types follow each argument.

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = Handle(callback, args, context, 0.0)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = Handle(callback, args, context, when)
        heappush(self._scheduled, (when, next(self._numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def at(self, delay_us: int, call: Callable[..., Any], *args: Any) -> None:
        """Call outside of any process, *delay_us* from now."""
        when_s = self._now_s + delay_us / SECOND
        handle = Handle(call, args, NOWHERE, when_s)
        heappush(self._scheduled, (when_s, next(self._numbers), handle))

    def take_back(self, handles: list[Handle]) -> None:
        """Have *handles* run in the next turn."""
        self._ready.extend(handles)

    def _run_once(self) -> None:
        """Take turns until the loop is stopped: the one call runs them all."""
        scheduled, ready = self._scheduled, self._ready
        while True:
            if not ready:
                while scheduled and scheduled[0][2].call is None:
                    heappop(scheduled)
                if not scheduled:
                    raise RuntimeError("the simulation waits for nothing")
                self._now_s = max(self._now_s, scheduled[0][0])
                self.now_us = round(self._now_s * SECOND)
            now_s = self._now_s
            while scheduled and scheduled[0][0] <= now_s:
                ready.append(heappop(scheduled)[2])
            self.turns += 1
            handles = list(ready)
            ready.clear()
            self._run(handles if len(handles) == 1 else self._in_order(handles))
            if self._stopping:
                return

    def _run(self, handles: list[Handle]) -> None:
        for handle in handles:
            call, process = handle.call, handle.process
            if call is None:
                continue
            if process is None or process.awake:
                try:
                    handle.context.run(call, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"{call} failed", "exception": error})
            elif process.paused:
                # Called when the process is awake again.
                process.held.append(handle)

    def _in_order(self, handles: list[Handle]) -> list[Handle]:
        """*handles* with those of one process in their order, and a drawn one among processes."""
        by_process: dict[Process | None, list[Handle]] = {}
        for handle in handles:
            by_process.setdefault(handle.process, []).append(handle)
        if len(by_process) < 2:
            return handles
        groups = list(by_process.values())
        self._random.shuffle(groups)
        return [handle for group in groups for handle in group]

    def _note_failure(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lines = traceback.format_exception(error) if error is not None else []
        self.failures.append(f"{context.get('message')}: {''.join(lines[-3:])}")

    def _process_events(self, _: Any) -> None:
        """There are none from outside."""

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""

    def end(self) -> None:
        """Close every coroutine that is left, so that none is closed at some time of its own."""
        self.ending = True
        self._ready.clear()
        self._scheduled.clear()
        # Cleanup may ask for the running loop: without one, asyncio.gather opens a real one.
        self.call_soon(self._close_coroutines)
        self.stop()
        self.run_forever()
        self.close()

    def _close_coroutines(self) -> None:
        for task in self._made:
            if task.done():
                continue
            setattr(task, "_log_destroy_pending", False)  # noqa: B010
            # One that awaits while it cleans up is closed there again.
            for _ in range(_CLOSES_MAX):
                try:
                    task.get_coro().close()
                except (RuntimeError, StopIteration):
                    continue
                break
