"""Buffered adds for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from os import getpid
from pathlib import Path
from typing import Any, Final, TypeVar

from counter.client.buffering import DELTA_MAX, DELTA_MIN, Bounds, Merging
from counter.client.calls import Calls
from counter.client.failures import BufferFullError, ClosedError
from counter.client.given import check_delta
from counter.client.retrying import Answer, Effect, Pause, Policy, Send, drive_async
from counter.client.spool import spool_path
from counter.errors import StoreUnavailableError

T = TypeVar("T")
#: However short max_delay is, the disk is not asked more often during an outage.
_TICK_S: Final = 0.01


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
