"""Send requests to one server of a cache: from the event loop to a thread, once for each batch.

Requests of one turn of the event loop share a round trip; later ones leave with the next batch. A
server that fails is left alone for a while: no request waits for a time-out that was just seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from counter import limits
from counter.errors import OverloadedError
from counter.metrics import Calls
from counter.ports import Clock
from counter.storage.shared.batching import Batch, Batcher
from counter.storage.shared.bridge import Worker

#: How long a server that failed is not asked again.
RETRY_AFTER_US: Final = limits.SECOND
#: A batch leaves with this many, or with one request's whole part if that is more.
_BATCH_ITEMS: Final = 1_000
_WAITING_MAX: Final = 50_000
#: A batch may take several round trips and one look-up of a name, which no time-out of a socket
#: bounds: after this many time-outs, callers stop waiting for its thread.
_TIMEOUTS_PER_BATCH: Final = 10
_OVERDUE: Final = "it does not answer at all"

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class NotConnectedError(Exception):
    """No connection could be made: nothing was sent."""


class BatchRefusedError(Exception):
    """The server cannot do some of a batch now, and did not. ``answers`` has an answer for each
    item, None for those that it refused."""

    def __init__(self, reason: str, answers: Sequence[Any]) -> None:
        super().__init__(reason)
        self.answers = answers


class Unreachable:
    """Takes the place of a missing answer. ``sent``: the request may have been processed."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        self.reason = reason
        self.sent = sent


class CacheConnection(Protocol):
    """A blocking connection, which connects when it is used. It belongs to one thread at a time."""

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        ...


_Connection = TypeVar("_Connection", bound=CacheConnection)


class CacheServer(Generic[_Connection]):
    """Whether one server is asked at all. *name* is what messages call it."""

    def __init__(
        self,
        name: str,
        connection: Callable[[], _Connection],
        timeout_s: float,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.connection = connection
        self.timeout_s = timeout_s
        #: Why it is left alone; None while it answers.
        self.trouble: str | None = None
        self._clock = clock
        self._changed = changed
        self._retry_at_us = 0

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


#: A batch, what ends the wait for it, and when it was sent.
_Sent = tuple[Batch[None, _Item, _Answer | Unreachable], asyncio.TimerHandle, float]


class RequestQueue(Generic[_Item, _Answer]):
    """Requests of one kind to one server, one batch at a time, over a connection of their own."""

    def __init__(
        self,
        server: CacheServer[_Connection],
        work: Callable[[_Connection, Sequence[_Item]], Sequence[_Answer]],
        calls: Calls | None = None,
    ) -> None:
        """*calls* counts batches, and requests that were not answered."""
        self._calls = calls or Calls()
        self._server = server
        connection = server.connection()
        self._work = partial(work, connection)
        self._connection: CacheConnection = connection
        self._batcher: Batcher[None, _Item, _Answer | Unreachable] = Batcher(
            self._send,
            name=server.name,
            items_max=_BATCH_ITEMS,
            waiting_max=_WAITING_MAX,
        )
        self._worker = Worker(server.name.partition(" ")[0], self._run, self._arrived)
        #: Why no request is sent any more; None while requests are sent.
        self._shut: str | None = None

    async def ask(
        self, items: Sequence[_Item], *, insist: bool = False
    ) -> Sequence[_Answer | Unreachable]:
        """Return an answer for each item. *insist* also asks a server that is left alone."""
        server = self._server
        answers: Sequence[_Answer | Unreachable]
        if self._shut is not None:
            answers = [self._unreachable(self._shut, sent=False)] * len(items)
        elif not insist and not server.may_be_asked():
            answers = [Unreachable(server.trouble or server.name, sent=False)] * len(items)
        else:
            self._worker.start()
            try:
                answers = await self._batcher.put(None, items)
            except OverloadedError as error:
                answers = [Unreachable(error.detail, sent=False)] * len(items)
        if isinstance(answers[0], Unreachable):
            self._calls.errors += 1
        return answers

    @property
    def waiting(self) -> int:
        """The number of items that wait for the batch that is out."""
        return self._batcher.waiting

    @property
    def is_out(self) -> bool:
        """Whether a request waits now until a batch is back."""
        return self._batcher.is_under_way(None)

    async def close(self) -> None:
        """Wait for the batch that is out, and close the connection."""
        self._shut = "the cache is closed"
        self._batcher.answer_waiting(None, self._unreachable(self._shut, sent=False))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                await self._batcher.close()
        self._connection.close()
        self._worker.stop()

    @property
    def _limit_s(self) -> float:
        return _TIMEOUTS_PER_BATCH * self._server.timeout_s

    def _send(self, batches: Sequence[Batch[None, _Item, _Answer | Unreachable]]) -> None:
        for batch in batches:
            watch = asyncio.get_running_loop().call_later(self._limit_s, self._overdue, batch)
            self._worker.send((batch, watch, time.perf_counter()))

    def _run(self, sent: _Sent[_Item, _Answer]) -> Sequence[_Answer]:
        """Do the work of a batch. Runs on the thread."""
        return self._work(sent[0].items)

    def _arrived(
        self, sent: _Sent[_Item, _Answer], result: Sequence[_Answer] | BaseException
    ) -> None:
        """Give a batch its answers. If the server failed, requests that wait do not leave."""
        batch, watch, began_s = sent
        watch.cancel()
        self._calls.ended(time.perf_counter() - began_s)
        if self._shut == _OVERDUE:
            self._shut = None
        if isinstance(result, BatchRefusedError):
            self._connection.close()
            refused = self._unreachable(str(result), sent=False)
            self._fail(refused)
            batch.end([refused if each is None else each for each in result.answers])
        elif isinstance(result, BaseException):
            failure = self._failure(result)
            self._fail(failure)
            batch.end_all(failure)
        else:
            self._server.answered()
            batch.end(result)
        # Before the callers of this batch go on, so that the server does not wait for them.
        self._batcher.commit_ready()

    def _failure(self, error: BaseException) -> Unreachable:
        """Return why there is no answer. A cache failure must not fail the process."""
        if isinstance(error, NotConnectedError):
            return self._unreachable(str(error), sent=False)
        self._connection.close()
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._server.timeout_s:g} s"
        else:
            reason = f"{type(error).__name__} {error}".rstrip()
        return self._unreachable(reason, sent=True)

    def _overdue(self, batch: Batch[None, _Item, _Answer | Unreachable]) -> None:
        """Wait no longer for a thread that does not come back; until it does, send nothing."""
        self._shut = self._shut or _OVERDUE
        failure = self._unreachable(_OVERDUE, sent=True)
        self._fail(failure)
        batch.answer_all(failure)

    def _fail(self, failure: Unreachable) -> None:
        self._server.failed(failure.reason)
        self._batcher.answer_waiting(None, Unreachable(failure.reason, sent=False))

    def _unreachable(self, reason: str, *, sent: bool) -> Unreachable:
        return Unreachable(f"{self._server.name}: {reason}", sent=sent)
