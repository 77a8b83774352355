"""The way to one memcached and back: from the event loop to a thread, once per batch.

What comes while one batch is out waits and leaves with the next, so requests of one turn of the
event loop share a round trip, and a slow server makes larger batches, not more of them. A server
that fails is left alone for a while: nobody waits for a time-out that was just seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Final, Generic, TypeVar

from counter import limits
from counter.ports import Clock
from counter.storage.memcached.connection import Connection, NotConnectedError
from counter.telemetry.metrics import Calls

#: How long a server that failed is not asked again.
RETRY_AFTER_US: Final = limits.SECOND
#: A batch leaves with this many, or with one request's whole part if that is more.
_BATCH_ITEMS: Final = 1_000
_WAITING_MAX: Final = 50_000
#: A batch may take several round trips and one look-up of a name, which no time-out of a socket
#: bounds: past so many time-outs nobody waits for its thread any longer.
_TIMEOUTS_PER_BATCH: Final = 10
_OVERDUE: Final = "it does not answer at all"

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")
#: The requests of a batch: each one's items, and the future of its answers.
_Batch = list[tuple[Sequence[Any], asyncio.Future[Any]]]


class Unreachable:
    """Stands for an answer that did not come. ``sent``: what was asked may have been done."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        self.reason = reason
        self.sent = sent


class Server:
    """Whether one memcached is asked at all."""

    def __init__(
        self, host: str, port: int, timeout_s: float, clock: Clock, changed: Callable[[], None]
    ) -> None:
        self.name = f"{host}:{port}"
        self.timeout_s = timeout_s
        #: Why it is left alone; None while it answers.
        self.trouble: str | None = None
        self._address = (host, port)
        self._clock = clock
        self._changed = changed
        self._retry_at_us = 0

    def connection(self) -> Connection:
        return Connection(*self._address, self.timeout_s)

    def may_be_asked(self) -> bool:
        """True while it answers, and once in RETRY_AFTER_US while it does not."""
        if self.trouble is None:
            return True
        now_us = self._clock.boottime_us()
        if now_us < self._retry_at_us:
            return False
        self._retry_at_us = now_us + RETRY_AFTER_US
        return True

    def failed(self, reason: str) -> None:
        self._retry_at_us = self._clock.boottime_us() + RETRY_AFTER_US
        self._set_trouble(reason)

    def answered(self) -> None:
        self._set_trouble(None)

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._changed()


class Lane(Generic[_Item, _Answer]):
    """Requests of one kind to one server, one batch at a time, over a connection of their own."""

    def __init__(
        self,
        server: Server,
        threads: Executor,
        work: Callable[[Connection, Sequence[_Item]], Sequence[_Answer]],
        calls: Calls | None = None,
    ) -> None:
        """*calls* counts batches, and requests that were not answered."""
        self._calls = calls or Calls()
        self._server = server
        self._threads = threads
        self._work = work
        self._connection = server.connection()
        self._waiting: _Batch = []
        self._waiting_items = 0
        self._out: asyncio.Future[Sequence[_Answer] | Unreachable] | None = None
        self._leaving = False
        #: Why nothing is sent any more; None while it is.
        self._shut: str | None = None

    async def ask(
        self, items: Sequence[_Item], *, insist: bool = False
    ) -> Sequence[_Answer] | Unreachable:
        """An answer for each item, or why there is none. *insist* asks a server that is left
        alone, too."""
        server = self._server
        if self._shut is not None:
            return self._failure(self._shut)
        if not insist and not server.may_be_asked():
            self._calls.errors += 1
            return Unreachable(server.trouble or server.name, sent=False)
        if self._waiting_items + len(items) > _WAITING_MAX:
            return self._failure(f"{self._waiting_items} requests wait already")
        answer: asyncio.Future[Sequence[_Answer] | Unreachable]
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((items, answer))
        self._waiting_items += len(items)
        if self._out is None and not self._leaving:
            self._leaving = True
            asyncio.get_running_loop().call_soon(self._leave)
        return await answer

    def _failure(self, reason: str) -> Unreachable:
        """What a request is answered that is not sent."""
        self._calls.errors += 1
        return self._unreachable(reason, sent=False)

    @property
    def waiting(self) -> int:
        """How many items wait for the batch that is out."""
        return self._waiting_items

    @property
    def is_out(self) -> bool:
        """Whether what is asked now waits until a batch is back."""
        return self._out is not None

    async def close(self) -> None:
        """Finish the batch that is out, and let go of the connection."""
        self._shut = "the cache is closed"
        self._tell_waiting(self._unreachable(self._shut, sent=False))
        if self._out is not None:
            await asyncio.wait([self._out], timeout=self._limit_s)
        self._connection.close()

    @property
    def _limit_s(self) -> float:
        return _TIMEOUTS_PER_BATCH * self._server.timeout_s

    def _leave(self) -> None:
        """Send what waits; once the batch is back, send what came meanwhile."""
        self._leaving = False
        batch, items = self._next_batch()
        if not batch:
            return
        loop = asyncio.get_running_loop()
        watch = loop.call_later(self._limit_s, self._overdue, batch)
        began_s = time.perf_counter()
        out = self._out = loop.run_in_executor(self._threads, self._run, items)

        def arrived(done: asyncio.Future[Sequence[_Answer] | Unreachable]) -> None:
            watch.cancel()
            self._out = None
            self._calls.ended(time.perf_counter() - began_s)
            self._take(batch, done.result())
            self._leave()

        out.add_done_callback(arrived)

    def _next_batch(self) -> tuple[_Batch, list[_Item]]:
        items: list[_Item] = []
        taken = 0
        for part, _ in self._waiting:
            if items and len(items) + len(part) > _BATCH_ITEMS:
                break
            items += part
            taken += 1
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        self._waiting_items -= len(items)
        return batch, items

    def _run(self, items: Sequence[_Item]) -> Sequence[_Answer] | Unreachable:
        """Runs on a thread. Whatever goes wrong in a cache is no reason to fail more than it."""
        try:
            return self._work(self._connection, items)
        except NotConnectedError as error:
            return self._unreachable(str(error), sent=False)
        except TimeoutError:
            self._connection.close()
            return self._unreachable(f"no answer within {self._server.timeout_s:g} s", sent=True)
        except Exception as error:
            self._connection.close()
            return self._unreachable(f"{type(error).__name__} {error}".rstrip(), sent=True)

    def _take(self, batch: _Batch, result: Sequence[_Answer] | Unreachable) -> None:
        """Hand out what came back. Those who wait for a server that failed wait in vain."""
        if self._shut == _OVERDUE:
            self._shut = None
        if isinstance(result, Unreachable):
            self._server.failed(result.reason)
            self._tell_all(batch, result)
            self._tell_waiting(Unreachable(result.reason, sent=False))
            return
        self._server.answered()
        start = 0
        for part, answer in batch:
            end = start + len(part)
            if not answer.done():
                answer.set_result(result[start:end])
            start = end

    def _overdue(self, batch: _Batch) -> None:
        """Wait no longer for a thread that does not come back; until it does, nothing is sent."""
        self._shut = self._shut or _OVERDUE
        result = self._unreachable(_OVERDUE, sent=True)
        self._server.failed(result.reason)
        self._tell_all(batch, result)
        self._tell_waiting(Unreachable(result.reason, sent=False))

    def _tell_waiting(self, answer: Unreachable) -> None:
        waiting, self._waiting, self._waiting_items = self._waiting, [], 0
        self._tell_all(waiting, answer)

    def _tell_all(self, batch: _Batch, answer: Unreachable) -> None:
        self._calls.errors += len(batch)
        for _, future in batch:
            if not future.done():
                future.set_result(answer)

    def _unreachable(self, reason: str, *, sent: bool) -> Unreachable:
        return Unreachable(f"memcached at {self._server.name}: {reason}", sent=sent)
