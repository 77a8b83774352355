"""Group commit, partition by partition.

A write to a partition costs the same whether it carries one row or a hundred. So while one batch of
a partition is on its way the next one gathers, and rows that come in one turn of the event loop
travel together. A stream of rows to one partition pays for few round trips; a row that comes alone
waits for nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Generic, TypeVar

from cassandra.query import BatchStatement, BatchType

#: Rows of one batch; bounds what one slow statement holds up.
ROWS_MAX: Final = 100

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")
_R = TypeVar("_R")


class _Call(Generic[_R]):
    """One caller's items, which may be of many keys."""

    __slots__ = ("future", "left", "results")

    def __init__(self, size: int) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.results: list[_R | BaseException | None] = [None] * size
        self.left = size

    def settle(self, index: int, result: _R | BaseException | None) -> None:
        self.results[index] = result
        self.left -= 1
        if self.left == 0 and not self.future.done():
            self.future.set_result(None)


class Batch(Generic[_K, _T, _R]):
    """Items of one key that are committed together; to be ended once, one way or the other."""

    __slots__ = ("_ended", "_lane", "_places", "items", "key")

    def __init__(
        self,
        key: _K,
        lane: _Lane[_K, _T, _R],
        rows: Sequence[tuple[_T, _Call[_R], int]],
        ended: Callable[[_Lane[_K, _T, _R]], None],
    ) -> None:
        self.key = key
        self.items = [item for item, _, _ in rows]
        self._places = [(call, index) for _, call, index in rows]
        self._lane = lane
        self._ended = ended

    def succeed(self, results: Sequence[_R | BaseException]) -> None:
        """Give each item its own result."""
        for (call, index), result in zip(self._places, results, strict=True):
            call.settle(index, result)
        self._ended(self._lane)

    def end(self, result: _R | BaseException | None) -> None:
        """Give all items the same result: None, or what became of them."""
        for call, index in self._places:
            call.settle(index, result)
        self._ended(self._lane)


class _Lane(Generic[_K, _T, _R]):
    """What waits under one key, and how many batches of it are on their way."""

    __slots__ = ("is_ready", "key", "running", "waiting")

    def __init__(self, key: _K) -> None:
        self.key = key
        self.waiting: deque[tuple[_T, _Call[_R], int]] = deque()
        self.running = 0
        self.is_ready = False


class Gatherer(Generic[_K, _T, _R]):
    """Hands the items of each key to *commit*, some of them at a time.

    *commit* begins to commit the batches of one turn of the loop, and ends each when it is done; it
    must not raise. Of each key, *at_once* batches may be on their way: a further one only where a
    full one waits.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Batch[_K, _T, _R]]], None],
        *,
        rows_max: int = ROWS_MAX,
        at_once: int = 4,
    ) -> None:
        self._commit = commit
        self._rows_max = rows_max
        self._at_once = at_once
        self._lanes: dict[_K, _Lane[_K, _T, _R]] = {}
        self._ready: list[_Lane[_K, _T, _R]] = []

    @property
    def waiting(self) -> int:
        """How many items wait for a batch of their key before them."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    async def put(self, items: Sequence[tuple[_K, _T]]) -> list[_R | BaseException | None]:
        """Have *items* committed, each under its key; a result or an error for each."""
        if not items:
            return []
        call: _Call[_R] = _Call(len(items))
        for index, (key, item) in enumerate(items):
            self._add(key, item, call, index)
        await call.future
        return call.results

    def _add(self, key: _K, item: _T, call: _Call[_R], index: int) -> None:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key)
        lane.waiting.append((item, call, index))
        if not lane.is_ready and self._may_go(lane):
            self._make_ready(lane)

    def _may_go(self, lane: _Lane[_K, _T, _R]) -> bool:
        """Whether what waits in *lane* need wait no longer."""
        if lane.running == 0:
            return bool(lane.waiting)
        return lane.running < self._at_once and len(lane.waiting) >= self._rows_max

    def _make_ready(self, lane: _Lane[_K, _T, _R]) -> None:
        lane.is_ready = True
        if not self._ready:
            # When this turn of the loop is over: what comes until then goes along.
            asyncio.get_running_loop().call_soon(self._go)
        self._ready.append(lane)

    def _go(self) -> None:
        ready, self._ready = self._ready, []
        batches: list[Batch[_K, _T, _R]] = []
        for lane in ready:
            lane.is_ready = False
            while self._may_go(lane):
                lane.running += 1
                size = min(len(lane.waiting), self._rows_max)
                rows = [lane.waiting.popleft() for _ in range(size)]
                batches.append(Batch(lane.key, lane, rows, self._ended))
        self._commit(batches)

    def _ended(self, lane: _Lane[_K, _T, _R]) -> None:
        lane.running -= 1
        if lane.running == 0 and not lane.waiting:
            del self._lanes[lane.key]
        elif not lane.is_ready and self._may_go(lane):
            self._make_ready(lane)


def batch_of(statements: Sequence[Any]) -> BatchStatement:
    """Return bound *statements* as one that is idempotent, at the consistency of the first.

    Those of one partition are done all or none; those of several are not.
    """
    batch = BatchStatement(BatchType.UNLOGGED, consistency_level=statements[0].consistency_level)
    batch.is_idempotent = True
    for statement in statements:
        batch.add(statement)
    return batch
