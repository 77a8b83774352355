"""Buffered adds, for threads and for event loops."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from os import getpid
from pathlib import Path
from typing import Any, Final, TypeVar

from counter.client.buffering import DELTA_MAX, DELTA_MIN, Bounds, Merging
from counter.client.calls import Calls
from counter.client.failures import BufferFullError, ClosedError
from counter.client.retrying import Answer, Effect, Pause, Policy, Send, drive, drive_async
from counter.client.spool import spool_path
from counter.client.tokens import check_delta
from counter.errors import CounterError, StoreUnavailableError

#: However short max_delay is, the disk is not asked more often during an outage.
_TICK_S: Final = 0.01
_LOG: Final = logging.getLogger(__name__)


class Buffer:
    """Merges adds by counter and sends them in batches, in a thread of its own.

    Each add is in exactly one item of one batch, and each item has one token for all its attempts:
    what ``flush`` returned for is counted exactly once, whatever failed on the way. In a
    BEST_EFFORT namespace nothing makes that so. Use it in a ``with`` block: its end sends what is
    left; so does the end of the program. Safe to share between threads.

    A forked process begins empty at its first add; what was in the buffer stays the parent's.

    While the service cannot be reached, adds go on merging, and are sent when it is back; when
    ``max_items`` counters wait, an add to one more waits too.
    """

    def __init__(
        self,
        calls: Calls,
        policy: Policy,
        send: Callable[[Send], Answer],
        bounds: Bounds,
        spool: str | Path | None,
    ) -> None:
        self._given = calls, policy, bounds, None if spool is None else spool_path(spool)
        self._policy = policy
        self._send = send
        #: Held while this process begins, by its id: a thread of the parent may hold another one.
        self._beginning: dict[int, threading.Lock] = {}
        self._begin()
        atexit.register(self._at_exit)

    def _begin(self) -> None:
        """Begin empty, in this process. Raises as :class:`counter.client.spool.Spool`."""
        merging = Merging(*self._given)
        merging.begin()
        self._merging = merging
        self._lock = threading.Lock()
        #: Something for the flusher to do; and something that others wait for.
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        #: One at a time moves adds into the backlog.
        self._taking = threading.Lock()
        self._hurry = False
        self._stop = False
        self._taken_s = 0.0
        self._thread = threading.Thread(target=self._run, name="counter-buffer", daemon=True)
        self._thread.start()
        # Last: until here other threads wait for it.
        self._pid = getpid()

    def _begin_in_child(self) -> None:
        """Begin again in a forked process. Raises ClosedError if the buffer was closed before."""
        with self._beginning.setdefault(getpid(), threading.Lock()):
            if getpid() == self._pid:
                return
            if self._merging.closed:
                raise ClosedError("the buffer is closed; make another one")
            self._begin()

    def _check_process(self) -> None:
        """Have the buffer begun in this process. Raises ClosedError if it was forked from one that
        had something in the buffer: this process cannot say what became of that."""
        if getpid() != self._pid:
            if self._merging.open or self._merging.held:
                self._merging.check_process()
            self._begin_in_child()

    def add(self, counter: str, delta: int = 1, timeout: float | None = None) -> None:
        """Add *delta*, any signed 64-bit integer, to what is sent next for *counter*.

        Waits while the buffer is full, up to *timeout* seconds, and raises BufferFullError then;
        ClosedError after the end; InvalidParameterError for what no counter takes.
        """
        if delta.__class__ is not int or not DELTA_MIN <= delta <= DELTA_MAX:
            check_delta(delta)
        if getpid() != self._pid:
            # Before the lock: a thread that is not in this process may hold it.
            self._begin_in_child()
        with self._lock:
            adds = self._merging.open
            if counter in adds:
                adds[counter] += delta
            else:
                self._first(counter, delta, timeout)

    def _first(self, counter: str, delta: int, timeout: float | None) -> None:
        """The first add to *counter* since the last time that all were taken."""
        merging = self._merging
        merging.check(counter)
        if merging.is_full:
            self._hurry = True
            self._work.notify()
            room = self._done.wait_for(
                lambda: not merging.is_full or merging.closed or merging.failure is not None,
                timeout,
            )
            if not room:
                raise BufferFullError(
                    f"{merging.bounds.max_items} counters wait to be sent, and none was sent within"
                    f" {timeout} s"
                )
            merging.check(counter)
        adds = merging.open
        adds[counter] = adds.get(counter, 0) + delta
        if len(adds) == 1 or merging.is_urgent:
            self._work.notify()

    def sync(self) -> None:
        """Have all adds so far on disk, where there is a spool: they survive this process."""
        self._check_process()
        self._take_in_peace()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until each add so far is counted.

        Raises UnsentError after *timeout* seconds (None: no bound), or where the service refuses
        all of them alike; RejectedError where it refused some for good.
        """
        self._check_process()
        merging = self._merging
        why = self._wait(timeout)
        # Not while a piece is made of what waits, which would be in neither of them.
        with self._taking, self._lock:
            merging.check_flushed(why)

    def _wait(self, timeout: float | None) -> str | None:
        """Wait until each add so far is counted; why it is not."""
        merging = self._merging
        refusals = merging.refusals
        try:
            target = self._take_in_peace()
        except StoreUnavailableError as error:
            return error.detail
        end_s = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._hurry = True
            self._work.notify()
            self._done.wait_for(
                lambda: (
                    merging.finished >= target
                    or merging.failure is not None
                    or merging.refusals > refusals
                ),
                _left_s(end_s),
            )
            return None if merging.finished >= target else "the buffer is not empty"

    def close(self, timeout: float | None = None) -> None:
        """Send what is left, within *timeout* seconds (the client's deadline if None), and end.

        Raises what :meth:`flush` does. With a spool, what is left is on disk. In a forked process
        that added nothing it does nothing: what is left is the parent's.
        """
        if self._merging.is_inherited:
            return
        atexit.unregister(self._at_exit)
        with self._lock:
            if self._merging.closed:
                return
            self._merging.closed = True
            self._done.notify_all()
        if timeout is None:
            timeout = self._policy.options.deadline_s
        try:
            why = self._wait(timeout)
        finally:
            with self._lock:
                self._stop = True
                self._work.notify()
            self._thread.join()
            self._merging.backlog.close()
        # Only now nothing is sent any more, and what is left is left.
        self._merging.note_end()
        self._merging.check_flushed(why)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _at_exit(self) -> None:
        """Send what is left in a buffer that nobody closed before the program ended."""
        try:
            self.close()
        except CounterError as error:
            _LOG.error("a buffer was left open until the program ended: %s", error)

    def _take_in_peace(self) -> int:
        """:meth:`_take`, in a thread of its own: an interrupt from the keyboard strikes the main
        thread wherever it is, and must not strike between taking adds and having them safe."""
        if threading.current_thread() is not threading.main_thread():
            return self._take()
        done: Future[int] = Future()

        def take() -> None:
            try:
                done.set_result(self._take())
            except BaseException as error:
                done.set_exception(error)

        try:
            threading.Thread(target=take, name="counter-take").start()
        except RuntimeError:
            # At the end of the program there are no new threads.
            take()
        return done.result()

    def _take(self) -> int:
        """Move the open adds into the backlog; where its ``finished`` will be when they ended."""
        merging = self._merging
        with self._taking:
            with self._lock:
                taken = merging.take()
            # Not under the lock: it may wait for a disk, and adds do not.
            merging.backlog.put(taken)
            with self._lock:
                merging.held = len(merging.backlog)
                return merging.backlog.begun

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                # Pieces of one backlog go out one after the other; what came meanwhile merges.
                if self._is_due():
                    self._take()
                self._deliver()
        except _StopError:
            pass
        except BaseException as error:
            with self._lock:
                self._merging.fail(error)
        finally:
            with self._lock:
                self._done.notify_all()

    def _is_due(self) -> bool:
        """Whether to take what is open: where none waits before it, or the disk is to have it."""
        merging, now_s = self._merging, time.monotonic()
        is_soon = now_s - self._taken_s < merging.bounds.max_delay
        if merging.held and (is_soon or not merging.durable):
            return False
        self._taken_s = now_s
        return True

    def _wait_for_work(self) -> bool:
        """Wait for adds, and then for more of them; False at the end."""
        merging = self._merging
        with self._lock:
            self._work.wait_for(lambda: merging.open or merging.held or self._stop, merging.look_s)
            if not merging.held:
                self._work.wait_for(
                    lambda: self._hurry or self._stop or merging.is_urgent,
                    merging.bounds.max_delay,
                )
            self._hurry = False
            return not self._stop

    def _deliver(self) -> None:
        """Send one piece until the end of each of its items is known."""
        merging = self._merging
        begin_s = self._policy.now_s()
        with self._taking:
            delivery = merging.deliver()
        if delivery is None:
            return
        drive(delivery.for_ever(self._policy), self._do)
        with self._taking:
            rejected = merging.finish(begin_s)
        with self._lock:
            merging.note_finished(rejected)
            self._done.notify_all()

    def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            if self._stop:
                raise _StopError
            return self._send(effect)
        if isinstance(effect, Pause):
            return self._pause(effect.seconds)
        with self._taking:
            return effect.work()

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, and meanwhile have what comes in on disk in its time."""
        merging = self._merging
        merging.note_trouble()
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            with self._lock:
                self._done.notify_all()
                if merging.durable:
                    left_s = min(left_s, max(_TICK_S, merging.bounds.max_delay))
                if self._work.wait_for(lambda: self._stop, left_s):
                    return
            if merging.durable and merging.open:
                self._take()


class _StopError(Exception):
    """The buffer was closed before all was sent."""


def _left_s(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - time.monotonic())


T = TypeVar("T")
#: However short max_delay is, the disk is not asked more often during an outage.


class AsyncBuffer:
    """What :class:`counter.client.Buffer` is for threads, in one event loop.

    Use it in an ``async with`` block: its beginning opens the spool and starts the task that sends,
    and its end sends what is left. It may be made before a fork, if the block begins after it.
    """

    def __init__(
        self,
        calls: Calls,
        policy: Policy,
        send: Callable[[Send], Awaitable[Answer]],
        bounds: Bounds,
        spool: str | Path | None,
    ) -> None:
        path = None if spool is None else spool_path(spool)
        self._merging = Merging(calls, policy, bounds, path)
        self._pid = getpid()
        self._policy = policy
        self._send = send
        self._taking = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._hurry = asyncio.Event()
        self._some = asyncio.Event()
        self._taken_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False

    def add_nowait(self, counter: str, delta: int = 1) -> None:
        """Add *delta* to what is sent next for *counter*.

        Raises BufferFullError where that needs room and there is none; ClosedError after the end;
        InvalidParameterError for what no counter takes.
        """
        if delta.__class__ is not int or not DELTA_MIN <= delta <= DELTA_MAX:
            check_delta(delta)
        merging = self._merging
        adds = merging.open
        if counter in adds and getpid() == self._pid:
            adds[counter] += delta
            return
        self._check_begun()
        merging.check(counter)
        if merging.is_full:
            self._hurry.set()
            raise BufferFullError(f"{merging.bounds.max_items} counters wait to be sent")
        adds[counter] = delta
        self._some.set()
        if merging.is_urgent:
            self._hurry.set()

    async def add(self, counter: str, delta: int = 1) -> None:
        """Add as :meth:`add_nowait` does, but wait while the buffer is full; bound that with
        ``asyncio.timeout``."""
        merging = self._merging

        def has_room() -> bool:
            return not merging.is_full or merging.closed or merging.failure is not None

        while True:
            with contextlib.suppress(BufferFullError):
                return self.add_nowait(counter, delta)
            async with self._changed:
                await self._changed.wait_for(has_room)

    async def sync(self) -> None:
        """Have all adds so far on disk, where there is a spool: they survive this process."""
        self._merging.check_process()
        await self._take()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until each add so far is counted; raises as :meth:`counter.client.Buffer.flush`."""
        merging = self._merging
        merging.check_process()
        self._check_begun()
        why = await self._wait(timeout)
        # Not while a piece is made of what waits, which would be in neither of them.
        async with self._taking:
            merging.check_flushed(why)

    async def _wait(self, timeout: float | None) -> str | None:
        """Wait until each add so far is counted; why it is not."""
        merging = self._merging
        refusals = merging.refusals
        try:
            target = await self._take()
        except StoreUnavailableError as error:
            return error.detail
        self._some.set()
        self._hurry.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(
                    lambda: (
                        merging.finished >= target
                        or merging.failure is not None
                        or merging.refusals > refusals
                    )
                )
        return None if merging.finished >= target else "the buffer is not empty"

    async def close(self, timeout: float | None = None) -> None:
        """Send what is left, within *timeout* seconds (the client's deadline if None), and end."""
        if self._merging.closed or self._merging.is_inherited:
            return None
        self._merging.closed = True
        if self._task is None:
            return self._merging.backlog.close()
        await self._tell()
        try:
            why = await self._wait(self._policy.options.deadline_s if timeout is None else timeout)
        finally:
            self._is_ending = True
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            async with self._taking:
                self._merging.backlog.close()
        # Only now nothing is sent any more, and what is left is left.
        self._merging.note_end()
        self._merging.check_flushed(why)
        return None

    async def __aenter__(self) -> AsyncBuffer:
        self._pid = getpid()
        await self._done(self._merging.begin)
        self._task = asyncio.create_task(self._run(), name="counter-buffer")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_begun(self) -> None:
        if self._task is None:
            raise ClosedError(
                "nothing sends yet: use the buffer in `async with client.buffer() as buffer:`"
            )

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _take(self) -> int:
        """Move the open adds into the backlog; where its ``finished`` will be when they ended."""
        merging = self._merging
        async with self._taking:
            # Inside: one that is cancelled before it has the lock must not have taken anything.
            taken = merging.take()
            await self._done(lambda: merging.backlog.put(taken))
            merging.held = len(merging.backlog)
            return merging.backlog.begun

    async def _disk(self, work: Callable[[], T]) -> T:
        """Do *work* on the backlog, one at a time."""
        async with self._taking:
            return await self._done(work)

    async def _done(self, work: Callable[[], T]) -> T:
        """Do *work*, in a thread where it may wait for a disk. Once begun it is ended, too: to be
        left half way would tear memory and disk apart."""
        if not self._merging.durable:
            return work()
        doing = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await asyncio.gather(doing, return_exceptions=True)
            raise

    async def _run(self) -> None:
        try:
            while True:
                await self._wait_for_work()
                if self._is_due():
                    await self._take()
                await self._deliver()
        except Exception as error:
            self._merging.fail(error)
        except asyncio.CancelledError:
            # By a program that cancels all tasks there are: nobody would send any more. What is
            # open stays so: a spool is to have it.
            if not self._is_ending:
                self._merging.failure = ClosedError("the task that sends was cancelled")
            raise
        finally:
            with contextlib.suppress(RuntimeError):
                await self._tell()

    def _is_due(self) -> bool:
        """Whether to take what is open: where none waits before it, or the disk is to have it."""
        merging, now_s = self._merging, self._policy.now_s()
        is_soon = now_s - self._taken_s < merging.bounds.max_delay
        if merging.held and (is_soon or not merging.durable):
            return False
        self._taken_s = now_s
        return True

    async def _wait_for_work(self) -> None:
        """Wait for adds, and then for more of them."""
        merging = self._merging
        if not merging.held:
            if not merging.open:
                self._some.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(merging.look_s):
                        await self._some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(merging.bounds.max_delay):
                    await self._hurry.wait()
        else:
            await asyncio.sleep(0)
        self._hurry.clear()

    async def _deliver(self) -> None:
        """Send one piece until the end of each of its items is known."""
        merging = self._merging
        begin_s = self._policy.now_s()
        delivery = await self._disk(merging.deliver)
        if delivery is None:
            return
        await drive_async(delivery.for_ever(self._policy), self._do)
        rejected = await self._disk(lambda: merging.finish(begin_s))
        merging.note_finished(rejected)
        await self._tell()

    async def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return await self._send(effect)
        if isinstance(effect, Pause):
            return await self._pause(effect.seconds)
        return await self._disk(effect.work)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, and meanwhile have what comes in on disk in its time."""
        merging = self._merging
        merging.note_trouble()
        await self._tell()
        end_s = self._policy.now_s() + seconds
        while (left_s := end_s - self._policy.now_s()) > 0:
            if merging.durable:
                left_s = min(left_s, max(_TICK_S, merging.bounds.max_delay))
            await asyncio.sleep(left_s)
            if merging.durable and merging.open:
                await self._take()
