"""Group commit, one partition at a time.

A write to a partition costs the same whether it carries one row or a hundred. So while one batch of
a partition is on its way the next one gathers, and rows that come in one turn of the event loop
travel together. A stream of rows to one partition pays for few round trips; a row that comes alone
waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from itertools import repeat
from typing import Any, Final, Generic, TypeVar

from cassandra.query import BatchStatement, BatchType

from counter.storage.cassandra.connection import Connection

#: Rows of one batch; bounds what one slow statement holds up.
ROWS_MAX: Final = 100

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")
_R = TypeVar("_R")


class _Call(Generic[_R]):
    """One caller's rows, which may lie in many partitions."""

    __slots__ = ("future", "left", "results")

    def __init__(self, size: int) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.results: list[_R | Exception | None] = [None] * size
        self.left = size

    def settle(self, index: int, result: _R | Exception | None) -> None:
        self.results[index] = result
        self.left -= 1
        if self.left == 0 and not self.future.done():
            self.future.set_result(None)


class _Lane(Generic[_T, _R]):
    """What waits for one partition, and how many batches of it are on their way."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[_T, _Call[_R], int]] = deque()
        self.running = 0


class Gatherer(Generic[_K, _T, _R]):
    """Hands the items of each key to *commit*, some of them at a time.

    *commit* gives a result for each item, or raises what became of all of them. Of each key,
    *at_once* batches may be on their way: a second one only where a full one waits.
    """

    def __init__(
        self,
        commit: Callable[[_K, Sequence[_T]], Awaitable[Sequence[_R]]],
        *,
        rows_max: int = ROWS_MAX,
        at_once: int = 4,
    ) -> None:
        self._commit = commit
        self._rows_max = rows_max
        self._at_once = at_once
        self._lanes: dict[_K, _Lane[_T, _R]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, items: Sequence[tuple[_K, _T]]) -> list[_R | Exception | None]:
        """Have *items* committed, each under its key; a result or an error for each."""
        if not items:
            return []
        call: _Call[_R] = _Call(len(items))
        for index, (key, item) in enumerate(items):
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = _Lane()
            lane.waiting.append((item, call, index))
            full = len(lane.waiting) > self._rows_max * lane.running
            if full and lane.running < self._at_once:
                lane.running += 1
                # It begins when this turn of the loop is over: what comes until then goes along.
                task = asyncio.create_task(self._drain(key, lane))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        await call.future
        return call.results

    async def _drain(self, key: _K, lane: _Lane[_T, _R]) -> None:
        """Commit what waits until nothing does."""
        waiting = lane.waiting
        while waiting:
            rows = [waiting.popleft() for _ in range(min(len(waiting), self._rows_max))]
            results: Sequence[_R | Exception]
            try:
                results = await self._commit(key, [item for item, _, _ in rows])
            except Exception as error:
                results = list(repeat(error, len(rows)))
            for (_, call, index), result in zip(rows, results, strict=True):
                call.settle(index, result)
        lane.running -= 1
        if lane.running == 0:
            del self._lanes[key]


async def write_together(
    connection: Connection, statements: Sequence[Any], timeout_us: int | None
) -> Sequence[None]:
    """Run bound *statements* of one partition as one: all of them are done, or it raises."""
    statement = statements[0] if len(statements) == 1 else batch_of(statements)
    await connection.rows((statement,), timeout_us)
    return [None] * len(statements)


def batch_of(statements: Sequence[Any], *, logged: bool = False) -> BatchStatement:
    """Bound *statements* as one that is idempotent, at the consistency of the first.

    Those of one partition are done all or none. Where they are of several, only a *logged* batch
    is; it is dearer.
    """
    batch = BatchStatement(
        BatchType.LOGGED if logged else BatchType.UNLOGGED,
        consistency_level=statements[0].consistency_level,
    )
    batch.is_idempotent = True
    for statement in statements:
        batch.add(statement)
    return batch
