"""Buffered adds for threads and for event loops."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from counter_client.calls import Calls
from counter_client.delivery import Backlog, Delivery
from counter_client.errors import CounterError, InvalidParameterError, StoreUnavailableError
from counter_client.failures import (
    BufferFullError,
    ClosedError,
    Rejected,
    RejectedError,
    UnsentError,
)
from counter_client.options import Flush, call_hook, check_number
from counter_client.retrying import (
    Answer,
    Effect,
    Pause,
    Policy,
    ProcessLock,
    Send,
    drive,
    drive_async,
)
from counter_client.spool import ADOPT_EVERY_S, Spool, spool_path
from counter_client.tokens import INT64_MAX, INT64_MIN, check_delta, checked_name

if TYPE_CHECKING:
    from multiprocessing.util import Finalize

#: Least seconds between writes to the spool during an outage.
_TICK_S: Final = 0.01
_LOG: Final = logging.getLogger(__name__)
#: Rejected items kept until the next flush; further ones are only counted.
_REJECTED_MAX: Final = 10_000
_DELAY_MAX_S: Final = 3_600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How long adds may be pending, in seconds, and how many counters."""

    max_delay: float
    max_items: int

    def __post_init__(self) -> None:
        check_number("max_delay", self.max_delay, _DELAY_MAX_S)
        if type(self.max_items) is not int or self.max_items < 1:
            raise InvalidParameterError(
                f"max_items is {self.max_items!r}; it must be an integer, 1 or more"
            )


class Merging:
    """The open adds of a buffer, its backlog, and its failures.

    An add is in ``open`` first; ``take`` moves all open adds to the backlog, which sends each in
    exactly one piece. The buffer does the locking.
    """

    def __init__(self, calls: Calls, policy: Policy, bounds: Limits, spool: Path | None) -> None:
        self.open: dict[str, int] = {}
        self.bounds = bounds
        self.backlog: Backlog | Spool = Backlog()
        self.durable = spool is not None
        #: How long to wait for adds before the backlog is checked again.
        self.adopt_every_s = None if spool is None else ADOPT_EVERY_S
        #: Counters and items in the backlog, or being moved there.
        self.held = 0
        self.closed = False
        #: Whether sending has ended, because of the end of the buffer or of an error.
        self.ended = False
        #: The error that ended the sending, and the adds that were open then.
        self.failure: BaseException | None = None
        self.stranded: dict[str, int] = {}
        #: How often the service permanently rejected a whole piece.
        self.refusals = 0
        self.delivery: Delivery | None = None
        self.rejected: list[Rejected] = []
        #: The backlog's ``finished``, set after the rejected items are noted; a flush waits for it.
        self.finished = 0
        self._calls = calls
        self._policy = policy
        self._spool = spool
        self._pid = os.getpid()

    def begin(self) -> None:
        """Open the spool in the sending process. Raises as :class:`Spool`."""
        self._pid = os.getpid()
        if self._spool is not None:
            self.backlog = Spool(self._spool, self._calls.namespace)
            self.held = len(self.backlog)

    def check(self, counter: str) -> None:
        """Validate a counter's first add. Raises CounterError."""
        self.check_process()
        if self.closed:
            raise ClosedError("the buffer is closed; make another one")
        if self.failure is not None:
            raise ClosedError(f"the buffer cannot go on: {self.failure}") from self.failure
        checked_name(counter)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a fork of the buffer's process. The adds and the spool belong to the
        parent: sent from here too, they would count twice."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise ClosedError in a fork of the buffer's process."""
        if self.is_inherited:
            raise ClosedError(
                "the adds in the buffer belong to the process that this one was forked from"
            )

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another counter."""
        return len(self.open) + self.held >= self.bounds.max_items

    @property
    def is_urgent(self) -> bool:
        """Whether the open adds must be sent before ``max_delay``."""
        return (len(self.open) + self.held) * 2 >= self.bounds.max_items

    def drain(self) -> dict[str, int]:
        """Remove and return all open adds, including stranded ones that only a spool can save."""
        taken, self.open = self.open, {}
        stranded, self.stranded = self.stranded, {}
        for counter, delta in stranded.items():
            taken[counter] = taken.get(counter, 0) + delta
        self.held += len(taken)
        return taken

    def deliver(self) -> Delivery | None:
        """Return the delivery of the next piece, or None. May wait for a disk."""
        piece = self.backlog.seal()
        if not piece:
            return None
        self.delivery = Delivery(self._calls, piece, self.backlog.renew)
        return self.delivery

    def finish(self, begin_s: float) -> list[Rejected]:
        """Finish the piece and return its rejected items. May wait for a disk."""
        items = 0 if self.delivery is None else len(self.delivery.items)
        rejected = self.backlog.finish()
        self.delivery = None
        flush = Flush(items, self._policy.now_s() - begin_s, len(rejected), None)
        call_hook(self._policy.options.on_flush, flush)
        return rejected

    def record_trouble(self) -> None:
        """Record that an attempt at the piece failed, or some of its items did."""
        delivery = self.delivery
        if delivery is None or delivery.trouble is None:
            return
        if delivery.trouble.retry == "never":
            self.refusals += 1
        flush = Flush(len(delivery.items), 0.0, 0, delivery.trouble)
        call_hook(self._policy.options.on_flush, flush)

    def fail(self, error: BaseException) -> None:
        """Record that sending ended with *error*; further adds raise ClosedError."""
        self.failure = error
        self.stranded, self.open = self.open, {}

    def record_finished(self, rejected: list[Rejected]) -> None:
        """Record that a piece ended; keep its *rejected* items for the next flush or close."""
        self.rejected += rejected[: _REJECTED_MAX - len(self.rejected)]
        self.held = len(self.backlog)
        self.finished = self.backlog.finished

    def record_end(self) -> None:
        """Record the rejected items of the last piece, after sending has stopped."""
        self.rejected += self.backlog.refused()

    def pop_rejected(self) -> tuple[Rejected, ...]:
        """Return the items rejected since the last call."""
        rejected, self.rejected = tuple(self.rejected), []
        return rejected

    def check_flushed(self, why: str | None) -> None:
        """Raise UnsentError if *why* is given and adds are left; RejectedError if items were
        rejected."""
        is_left = bool(len(self.backlog) or self.open or self.stranded)
        if why is not None and (is_left or self.failure is not None):
            raise self._unsent(why)
        if rejected := self.pop_rejected():
            raise RejectedError(rejected)

    def _unsent(self, why: str) -> UnsentError:
        trouble = None if self.delivery is None else self.delivery.trouble
        open_adds = dict(self.backlog.unsent())
        for counter, delta in (*self.stranded.items(), *self.open.items()):
            open_adds[counter] = open_adds.get(counter, 0) + delta
        items = self.backlog.unfinished()
        for each in items:
            # The program may resolve it.
            each.maybe_counted = True
        unfinished = tuple(self._calls.unfinished(x.counter, x.delta, x.token) for x in items)
        cause = self.failure or trouble
        reason = "" if cause is None else f": {cause}"
        error = UnsentError(
            f"{why}: {len(unfinished)} items were sent and have no answer yet,"
            f" {len(open_adds)} counters are not counted{reason}",
            unfinished,
            open_adds,
            self.pop_rejected(),
        )
        error.__cause__ = cause
        return error


class Buffer:
    """Merge adds by counter and send them in batches from a background thread.

    Each add is in one item of one batch, and each item keeps one token for all its attempts: adds
    before a successful ``flush`` are counted exactly once (except in a BEST_EFFORT namespace). Use
    it in a ``with`` block: its end, or the end of the program, sends the rest. Thread-safe.

    A forked process starts with an empty buffer at its first add; the parent keeps its adds.

    While the service is unreachable, adds are merged, and sent when it is back. When ``max_items``
    counters are pending, an add to another counter waits.
    """

    def __init__(
        self,
        calls: Calls,
        policy: Policy,
        send: Callable[[Send], Answer],
        bounds: Limits,
        spool: str | Path | None,
    ) -> None:
        self._given = calls, policy, bounds, None if spool is None else spool_path(spool)
        self._policy = policy
        self._send = send
        self._beginning = ProcessLock()
        self._begin()
        atexit.register(self._at_exit)

    def _begin(self) -> None:
        """Start empty in this process. Raises as :class:`counter_client.spool.Spool`."""
        merging = Merging(*self._given)
        merging.begin()
        self._merging = merging
        self._lock = threading.Lock()
        #: Wakes the flusher; and wakes those that wait for it.
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        #: Held to move adds into the backlog.
        self._taking = threading.Lock()
        self._hurry = False
        self._stop = False
        self._taken_s = 0.0
        self._thread = threading.Thread(target=self._run, name="counter-buffer", daemon=True)
        self._thread.start()
        self._close_with_multiprocessing()
        # Last: until it is set, other threads wait.
        self._pid = getpid()

    def _begin_in_child(self) -> None:
        """Start again in a forked process. Raises ClosedError if the buffer was closed before."""
        with self._beginning.here():
            if getpid() == self._pid:
                return
            if self._merging.closed:
                raise ClosedError("the buffer is closed; make another one")
            self._begin()

    def _check_process(self) -> None:
        """Start the buffer in this process if it was forked.

        Raises ClosedError if the parent had adds in the buffer: their outcome is not known here."""
        if getpid() != self._pid:
            if self._merging.open or self._merging.held:
                self._merging.check_process()
            self._begin_in_child()

    def add(self, counter: str, delta: int = 1, timeout: float | None = None) -> None:
        """Add *delta*, a signed 64-bit integer, to the pending total of *counter*.

        Waits while the buffer is full; raises BufferFullError after *timeout* seconds, ClosedError
        after the end, and InvalidParameterError for an invalid argument.
        """
        if delta.__class__ is not int or not INT64_MIN <= delta <= INT64_MAX:
            check_delta(delta)
        if getpid() != self._pid:
            # Before the lock: a thread of the parent may have held it during the fork.
            self._begin_in_child()
        with self._lock:
            adds = self._merging.open
            if counter in adds:
                adds[counter] += delta
            else:
                self._first(counter, delta, timeout)

    def _first(self, counter: str, delta: int, timeout: float | None) -> None:
        """Make the first add to *counter* since the open adds were taken."""
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
        """Write all adds so far to the spool, if there is one: they survive this process."""
        self._check_process()
        self._move_uninterrupted()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until each add so far is counted.

        Raises UnsentError after *timeout* seconds (None: no bound) or if the service rejects whole
        batches; RejectedError if it rejected some items permanently.
        """
        self._check_process()
        merging = self._merging
        why = self._wait(timeout)
        # Not while a piece is being made: its adds would be missing from both places.
        with self._taking, self._lock:
            merging.check_flushed(why)

    def _wait(self, timeout: float | None) -> str | None:
        """Wait until each add so far is counted; return why it is not, or None."""
        merging = self._merging
        refusals = merging.refusals
        try:
            target = self._move_uninterrupted()
        except StoreUnavailableError as error:
            return error.detail
        end_s = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._hurry = True
            self._work.notify()
            self._done.wait_for(
                lambda: merging.finished >= target or merging.ended or merging.refusals > refusals,
                _left_s(end_s),
            )
            return None if merging.finished >= target else "the buffer is not empty"

    def close(self, timeout: float | None = None) -> None:
        """Send the rest within *timeout* seconds (the client's deadline if None), and close.

        Raises as :meth:`flush`. A spool keeps what could not be sent. In a forked process that
        added nothing this does nothing: the adds belong to the parent.
        """
        if getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        if self._finalizer is not None:
            self._finalizer.cancel()
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
        # Sending has stopped, so the leftovers are final.
        self._merging.record_end()
        self._merging.check_flushed(why)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_with_multiprocessing(self) -> None:
        """In a child of multiprocessing, close the buffer when the child ends: it ends without the
        callbacks of atexit."""
        self._finalizer: Finalize | None = None
        if "multiprocessing.util" not in sys.modules:
            return
        from multiprocessing import parent_process
        from multiprocessing.util import Finalize, register_after_fork

        def finalize(buffer: Buffer) -> None:
            if parent_process() is not None:
                buffer._finalizer = Finalize(None, buffer._at_exit, exitpriority=0)

        finalize(self)
        # A child that imports this program before it begins drops all finalizers then.
        register_after_fork(self, finalize)

    def _at_exit(self) -> None:
        """Close a buffer that was still open when the program ended."""
        try:
            self.close()
        except CounterError as error:
            _LOG.error("a buffer was left open until the program ended: %s", error)

    def _move_uninterrupted(self) -> int:
        """Run :meth:`_move_to_backlog` outside the main thread, where a KeyboardInterrupt could
        strike between removing adds and saving them."""
        if threading.current_thread() is not threading.main_thread():
            return self._move_to_backlog()
        done: Future[int] = Future()

        def move() -> None:
            try:
                done.set_result(self._move_to_backlog())
            except BaseException as error:
                done.set_exception(error)

        try:
            threading.Thread(target=move, name="counter-move").start()
        except RuntimeError:
            # No new threads can start when the program ends.
            move()
        return done.result()

    def _move_to_backlog(self) -> int:
        """Move the open adds into the backlog; return the value of ``finished`` when they end."""
        merging = self._merging
        with self._taking:
            with self._lock:
                taken = merging.drain()
            # Outside the lock: this may wait for a disk, and adds must not.
            merging.backlog.put(taken)
            with self._lock:
                merging.held = len(merging.backlog)
                return merging.backlog.begun

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                # Pieces are sent one at a time; adds made meanwhile are merged.
                if self._is_due():
                    self._move_to_backlog()
                self._deliver()
        except _StopError:
            pass
        except BaseException as error:
            with self._lock:
                self._merging.fail(error)
        finally:
            with self._lock:
                self._merging.ended = True
                self._done.notify_all()

    def _is_due(self) -> bool:
        """Whether to take the open adds: the backlog is empty, or they are due on disk."""
        merging, now_s = self._merging, time.monotonic()
        is_soon = now_s - self._taken_s < merging.bounds.max_delay
        if merging.held and (is_soon or not merging.durable):
            return False
        self._taken_s = now_s
        return True

    def _wait_for_work(self) -> bool:
        """Wait for adds, and then for more of them; return False at the end."""
        merging = self._merging
        with self._lock:
            self._work.wait_for(
                lambda: merging.open or merging.held or self._stop, merging.adopt_every_s
            )
            if not merging.held:
                self._work.wait_for(
                    lambda: self._hurry or self._stop or merging.is_urgent,
                    merging.bounds.max_delay,
                )
            self._hurry = False
            return not self._stop

    def _deliver(self) -> None:
        """Send one piece until the outcome of each of its items is known."""
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
            merging.record_finished(rejected)
            self._done.notify_all()

    def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            if self._stop:
                raise _StopError("the buffer is closed")
            return self._send(effect)
        if isinstance(effect, Pause):
            return self._pause(effect.seconds)
        with self._taking:
            return effect.work()

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; meanwhile write new adds to the spool when due."""
        merging = self._merging
        merging.record_trouble()
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            with self._lock:
                self._done.notify_all()
                if merging.durable:
                    left_s = min(left_s, max(_TICK_S, merging.bounds.max_delay))
                if self._work.wait_for(lambda: self._stop, left_s):
                    return
            if merging.durable and merging.open:
                self._move_to_backlog()


class _StopError(ClosedError):
    """The buffer was closed before everything was sent."""


def _left_s(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - time.monotonic())


T = TypeVar("T")


class AsyncBuffer:
    """The same as :class:`counter_client.Buffer`, for one event loop.

    Use it in an ``async with`` block: its start opens the spool and starts the sending task, its
    end sends the rest. It may be created before a fork if the block starts after it.
    """

    def __init__(
        self,
        calls: Calls,
        policy: Policy,
        send: Callable[[Send], Awaitable[Answer]],
        bounds: Limits,
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
        """Add *delta* to the pending total of *counter*.

        Raises BufferFullError if the buffer is full, ClosedError after the end, and
        InvalidParameterError for an invalid argument.
        """
        if delta.__class__ is not int or not INT64_MIN <= delta <= INT64_MAX:
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
        """Add as :meth:`add_nowait`, but wait while the buffer is full; use ``asyncio.timeout`` to
        bound the wait."""
        merging = self._merging

        def has_room() -> bool:
            return not merging.is_full or merging.closed or merging.failure is not None

        while True:
            with contextlib.suppress(BufferFullError):
                return self.add_nowait(counter, delta)
            async with self._changed:
                await self._changed.wait_for(has_room)

    async def sync(self) -> None:
        """Write all adds so far to the spool, if there is one: they survive this process."""
        self._merging.check_process()
        await self._move_to_backlog()

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until each add so far is counted. Raises as :meth:`counter_client.Buffer.flush`."""
        merging = self._merging
        merging.check_process()
        self._check_begun()
        why = await self._wait(timeout)
        # Not while a piece is being made: its adds would be missing from both places.
        async with self._taking:
            merging.check_flushed(why)

    async def _wait(self, timeout: float | None) -> str | None:
        """Wait until each add so far is counted; return why it is not, or None."""
        merging = self._merging
        refusals = merging.refusals
        try:
            target = await self._move_to_backlog()
        except StoreUnavailableError as error:
            return error.detail
        self._some.set()
        self._hurry.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(
                    lambda: (
                        merging.finished >= target or merging.ended or merging.refusals > refusals
                    )
                )
        return None if merging.finished >= target else "the buffer is not empty"

    async def close(self, timeout: float | None = None) -> None:
        """Send the rest within *timeout* seconds (the client's deadline if None), and close."""
        if self._merging.closed or self._merging.is_inherited:
            return None
        self._merging.closed = True
        if self._task is None:
            return self._merging.backlog.close()
        await self._notify()
        try:
            why = await self._wait(self._policy.options.deadline_s if timeout is None else timeout)
        finally:
            self._is_ending = True
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            async with self._taking:
                self._merging.backlog.close()
        # Sending has stopped, so the leftovers are final.
        self._merging.record_end()
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
                "the buffer is not started: use it in `async with client.buffer() as buffer:`"
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _move_to_backlog(self) -> int:
        """Move the open adds into the backlog; return the value of ``finished`` when they end."""
        merging = self._merging
        async with self._taking:
            # Under the lock: a task cancelled while it waits for it must not have taken adds.
            taken = merging.drain()
            await self._done(lambda: merging.backlog.put(taken))
            merging.held = len(merging.backlog)
            return merging.backlog.begun

    async def _disk(self, work: Callable[[], T]) -> T:
        """Do *work* on the backlog, one call at a time."""
        async with self._taking:
            return await self._done(work)

    async def _done(self, work: Callable[[], T]) -> T:
        """Do *work*, in a thread if it may wait for a disk.

        It runs to its end even if cancelled; otherwise memory and disk would differ."""
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
                    await self._move_to_backlog()
                await self._deliver()
        except Exception as error:
            self._merging.fail(error)
        except asyncio.CancelledError:
            # The program cancelled the sending task. The open adds stay: a spool may still save
            # them.
            if not self._is_ending:
                self._merging.failure = ClosedError("the sending task was cancelled")
            raise
        finally:
            self._merging.ended = True
            with contextlib.suppress(RuntimeError):
                await self._notify()

    def _is_due(self) -> bool:
        """Whether to take the open adds: the backlog is empty, or they are due on disk."""
        merging, now_s = self._merging, self._policy.now_s()
        is_soon = now_s - self._taken_s < merging.bounds.max_delay
        if merging.held and (is_soon or not merging.durable):
            return False
        self._taken_s = now_s
        return True

    async def _wait_for_work(self) -> None:
        """Wait for adds, and then for more of them, up to ``max_delay``."""
        merging = self._merging
        if not merging.held:
            if not merging.open:
                self._some.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(merging.adopt_every_s):
                        await self._some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(merging.bounds.max_delay):
                    await self._hurry.wait()
        else:
            await asyncio.sleep(0)
        self._hurry.clear()

    async def _deliver(self) -> None:
        """Send one piece until the outcome of each of its items is known."""
        merging = self._merging
        begin_s = self._policy.now_s()
        delivery = await self._disk(merging.deliver)
        if delivery is None:
            return
        await drive_async(delivery.for_ever(self._policy), self._do)
        rejected = await self._disk(lambda: merging.finish(begin_s))
        merging.record_finished(rejected)
        await self._notify()

    async def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return await self._send(effect)
        if isinstance(effect, Pause):
            return await self._pause(effect.seconds)
        return await self._disk(effect.work)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; meanwhile write new adds to the spool when due."""
        merging = self._merging
        merging.record_trouble()
        await self._notify()
        end_s = self._policy.now_s() + seconds
        while (left_s := end_s - self._policy.now_s()) > 0:
            if merging.durable:
                left_s = min(left_s, max(_TICK_S, merging.bounds.max_delay))
            await asyncio.sleep(left_s)
            if merging.durable and merging.open:
                await self._move_to_backlog()
