"""Threads of which one runs at a time, and a drawn one goes on: at any line of the files named, and
wherever it would wait for a lock, a queue or another thread."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from tests.simulation.loop import SimulatedLoop

#: Steps after which a run is taken for one that never ends.
STEPS_MAX = 1_000_000


class Turns:
    """The thread that runs now. The thread that made this is the main one: it gives the turns."""

    def __init__(self, draw: Random, files: tuple[str, ...], share: float) -> None:
        """A turn ends at a line of *files* with the probability *share*."""
        self.draw = draw
        self.threads: list[Thread] = []
        #: The thread that runs; None is the main one.
        self.current: Thread | None = None
        self.back = threading.Semaphore(0)
        self.steps = 0
        self.preempted = 0
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Callable[..., Any], Any]] = []
        self._files, self._share = files, share

    def runnable(self) -> list["Thread"]:
        return [each for each in self.threads if each.may_run()]

    def step(self) -> None:
        """Let a drawn thread run to the end of its turn."""
        self.steps += 1
        ready = self.runnable()
        if not ready or self.steps > STEPS_MAX:
            raise RuntimeError(f"no thread can go on, after {self.steps} steps")
        self.current = self.draw.choice(ready)
        self.current.go.release()
        self.back.acquire()
        self.current = None

    def wait_until(self, may_go: Callable[[], bool], until_s: float = inf) -> None:
        """Give other threads their turns until *may_go* is true, or until a time."""
        if self.current is None:
            while not may_go():
                self.step()
        elif not may_go():
            self.current.end_turn(may_go, until_s)

    def time(self) -> float:
        return self.now_s

    @property
    def now_us(self) -> int:
        return round(self.now_s * 1e6)

    def at(self, delay_us: int, call: Callable[..., Any], *args: Any) -> None:
        """Call from the main thread, *delay_us* from now."""
        heappush(self._timers, (self.now_s + delay_us / 1e6, self.steps, call, args))

    def run(self) -> None:
        """Give turns until all threads have ended. Time passes when no thread can go on."""
        while any(each.is_alive() for each in self.threads):
            if self.runnable():
                self.step()
                continue
            ends = [each.until_s for each in self.threads if each.is_alive()]
            self.now_s = min(*ends, inf, self._timers[0][0] if self._timers else inf)
            if self.now_s == inf:
                names = [each.name for each in self.threads if each.is_alive()]
                raise RuntimeError(f"{names} wait for ever")
            while self._timers and self._timers[0][0] <= self.now_s:
                _, _, call, args = heappop(self._timers)
                call(*args)

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        """A trace function for the threads and for the main one."""
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "line" and self.draw.random() < self._share:
            self.preempted += 1
            if self.current is not None:
                self.current.end_turn(lambda: True)
            else:
                for _ in range(self.draw.choice((1, 1, 3, 30))):
                    if self.runnable():
                        self.step()
        return self.trace

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Let the main thread be interrupted, too."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


class Thread:
    """As ``threading.Thread``."""

    turns: Turns

    def __init__(self, *, target: Any, args: Any = (), name: str = "", daemon: bool = True) -> None:
        self.go = threading.Semaphore(0)
        self.name = name
        self.until_s = inf
        self._may_go: Callable[[], bool] = lambda: True
        self._alive = False
        self._call = target, args
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._alive = True
        self.turns.threads.append(self)
        self._thread.start()

    def may_run(self) -> bool:
        return self._alive and (self._may_go() or self.until_s <= self.turns.now_s)

    def is_alive(self) -> bool:
        return self._alive

    def join(self) -> None:
        self.turns.wait_until(lambda: not self._alive)

    def end_turn(self, may_go: Callable[[], bool], until_s: float = inf) -> None:
        """Let other threads run; return in a later turn, when *may_go* is true or at *until_s*."""
        self._may_go, self.until_s = may_go, until_s
        self.turns.back.release()
        self.go.acquire()

    def _run(self) -> None:
        self.go.acquire()
        target, args = self._call
        sys.settrace(self.turns.trace)
        try:
            target(*args)
        finally:
            sys.settrace(None)
            self._alive = False
            self.turns.back.release()


class Lock:
    """As ``threading.Lock``."""

    def __init__(self) -> None:
        self.held = False

    def __enter__(self) -> None:
        Thread.turns.wait_until(lambda: not self.held)
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False


class Condition:
    """As ``threading.Condition``."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: list[list[bool]] = []

    def wait_for(self, is_true: Callable[[], Any], timeout: float | None = None) -> Any:
        turns = Thread.turns
        end_s = inf if timeout is None else turns.now_s + timeout
        while not (found := is_true()) and turns.now_s < end_s:
            woken: list[bool] = []
            self._waiting.append(woken)
            self._lock.held = False
            turns.wait_until(lambda woken=woken: bool(woken), end_s)  # type: ignore[misc]
            self._waiting = [each for each in self._waiting if each is not woken]
            self._lock.__enter__()
        return found

    def notify(self) -> None:
        if self._waiting:
            self._waiting.pop(0).append(True)

    def notify_all(self) -> None:
        while self._waiting:
            self.notify()


class Queue:
    """As ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        Thread.turns.wait_until(lambda: bool(self._items))
        return self._items.popleft()


class Loop(SimulatedLoop):
    """The main thread's loop: between its own turns, threads have theirs."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns.draw)
        self._turns = turns

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> Any:
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def _run_once(self) -> None:
        turns, ready, scheduled = self._turns, self._ready, self._scheduled
        if turns.runnable() and (not ready or turns.draw.random() < 0.5):
            turns.step()
            return
        if not ready:
            if not scheduled:
                raise RuntimeError("every thread and every task waits")
            self._now_s = max(self._now_s, scheduled[0][0])
            self.now_us = round(self._now_s * 1e6)
        while scheduled and scheduled[0][0] <= self._now_s:
            ready.append(heappop(scheduled)[2])
        self._run([ready.popleft()])
