"""Run jobs on a thread that owns one SQLite connection, in batches from the event loop.

While one batch runs the next one gathers, so a burst of calls costs one thread crossing, one
transaction and one wake-up, whatever its size. All calls of a batch share one future.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from counter.errors import OverloadedError, UnavailableError
from counter.metrics import Calls

#: Runs one batch of jobs on the lane's thread; returns a result, or an exception, for each of them.
Execute = Callable[[Sequence[Any]], Sequence[Any]]


class _Shared(asyncio.Future[None]):
    """A future that many tasks wait for: cancelling one of them must not cancel it for the rest.

    The cancelled task gets its CancelledError when the batch is done, so that the outcome of its
    write is always known.
    """

    def cancel(self, msg: Any | None = None) -> bool:
        return False


class _Batch:
    __slots__ = ("future", "jobs", "results")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.jobs: list[Any] = []
        self.results: Sequence[Any] = ()
        self.future = _Shared(loop=loop)


class Lane:
    """Gathers jobs on the event loop and runs them, a batch at a time, on its own thread."""

    def __init__(
        self, name: str, execute: Execute, *, jobs_max: int, calls: Calls | None = None
    ) -> None:
        """*calls* counts the batches, and the jobs of them that the store failed."""
        self._execute = execute
        self._calls = calls or Calls()
        self._jobs_max = jobs_max
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._gathering: _Batch | None = None
        self._flight: _Batch | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, job: Any) -> Any:
        """Return the result of *job* when its batch is done.

        Raises what the job raised, and OverloadedError, before any work, if too many jobs wait.
        """
        batch = self._gathering
        if batch is None:
            if self._closed:
                raise OverloadedError("the store is closing", retry_after_us=1_000_000)
            batch = self._gathering = _Batch(self._loop)
            if self._flight is None:
                self._flight = batch
                self._loop.call_soon(self._depart)
        index = len(batch.jobs)
        if index >= self._jobs_max:
            raise OverloadedError(
                f"{index} calls wait for the store; at most {self._jobs_max} may",
                retry_after_us=1_000_000,
            )
        batch.jobs.append(job)
        await batch.future
        result = batch.results[index]
        if isinstance(result, BaseException):
            raise result
        return result

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for the running batch to end."""
        return 0 if self._gathering is None else len(self._gathering.jobs)

    @property
    def is_busy(self) -> bool:
        """Whether a batch is running: new jobs wait for it."""
        return self._flight is not None

    async def close(self) -> None:
        """Run the accepted jobs, then stop the thread."""
        self._closed = True
        while self._flight is not None:
            await self._flight.future
            await asyncio.sleep(0)
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _depart(self) -> None:
        batch, self._gathering = self._gathering, None
        self._flight = batch
        if batch is not None:
            self._queue.put(batch)

    def _land(self, batch: _Batch) -> None:
        self._depart()
        batch.future.set_result(None)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            began_s = time.perf_counter()
            try:
                batch.results = self._execute(batch.jobs)
            except BaseException as error:
                batch.results = [error] * len(batch.jobs)
            failed = sum(isinstance(each, UnavailableError) for each in batch.results)
            self._calls.ended(time.perf_counter() - began_s, failed)
            self._loop.call_soon_threadsafe(self._land, batch)
