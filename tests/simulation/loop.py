"""An event loop whose time is virtual, and processes that crash and sleep in it.

Nothing waits: where no callback is ready, the time is that of the next timer. Each callback belongs
to the process that its context names. Those of a process run in their order; which process goes
first is drawn. A process that crashed runs nothing any more, not even what would clean up; one that
is paused runs it all later, while every clock goes on.
"""

import asyncio
import heapq
import traceback
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, Final

from counter.limits import SECOND

#: What callbacks that belong to no process run in.
NOWHERE: Final = Context()
_PROCESS: Final[ContextVar["Process | None"]] = ContextVar("process", default=None)


class Process:
    """One process of the service: it can die, and it can fall asleep."""

    def __init__(self, loop: "SimulatedLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.held: list[events.Handle] = []
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)
        self._loop = loop

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run *work* in this process."""
        return self._loop.create_task(work, context=self.context)

    def crash(self) -> None:
        """Stop at whatever await it is at."""
        self.alive = False
        self.held.clear()

    def pause(self, us: int) -> None:
        """Sleep for *us*, unless asleep."""
        if self.alive and not self.paused:
            self.paused = True
            self._loop.call_later(us / SECOND, self._resume, context=NOWHERE)

    def _resume(self) -> None:
        self.paused = False
        self._loop.take_back(self.held)
        self.held.clear()


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs callbacks in virtual time, from 0."""

    _ready: Any
    _scheduled: Any

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._now_s = 0.0
        self.turns = 0
        #: Whether the run is over, and only being taken apart.
        self.ending = False
        self.failures: list[str] = []
        #: Held: a task of a process that crashed would else be collected at a time of its own.
        self._made: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._now_s

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **more)
        self._made.append(task)
        return task

    @property
    def now_us(self) -> int:
        """Microseconds since the beginning."""
        return round(self._now_s * SECOND)

    def at(self, delay_us: int, call: Callable[..., Any], *args: Any) -> None:
        """Call outside of any process, *delay_us* from now."""
        self.call_later(delay_us / SECOND, call, *args, context=NOWHERE)

    def take_back(self, handles: list[events.Handle]) -> None:
        """Have *handles* run in the next turn."""
        self._ready.extend(handles)

    def _run_once(self) -> None:
        scheduled, ready = self._scheduled, self._ready
        if not ready:
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if not scheduled:
                raise RuntimeError("the simulation waits for nothing")
            self._now_s = max(self._now_s, scheduled[0].when())
        while scheduled and scheduled[0]._when <= self._now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        self.turns += 1
        if len(ready) == 1:
            # As most turns are.
            self._run(ready.popleft())
            return
        handles = list(ready)
        ready.clear()
        for handle in self._in_order(handles):
            self._run(handle)

    def _run(self, handle: events.Handle) -> None:
        if handle._cancelled:
            return
        process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
        if process is None or (process.alive and not process.paused):
            handle._run()
        elif process.paused:
            process.held.append(handle)

    def _in_order(self, handles: list[events.Handle]) -> list[events.Handle]:
        """*handles* with those of one process in their order, and a drawn one among processes."""
        if len(handles) < 2:
            return handles
        by_process: dict[Process | None, list[events.Handle]] = {}
        for handle in handles:
            process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
            by_process.setdefault(process, []).append(handle)
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
        """Nobody sleeps who would have to be woken."""

    def end(self) -> None:
        """Close every coroutine that is left, so that none is closed at some time of its own."""
        self.ending = True
        self._ready.clear()
        self._scheduled.clear()
        # What cleans up may ask for the running loop: without one, asyncio.gather opens a real one.
        self.call_soon(self._close_coroutines)
        self.stop()
        self.run_forever()
        self.close()

    def _close_coroutines(self) -> None:
        for task in self._made:
            if task.done():
                continue
            setattr(task, "_log_destroy_pending", False)  # noqa: B010
            try:
                task.get_coro().close()
            except (RuntimeError, StopIteration):
                continue
