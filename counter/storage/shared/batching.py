"""Group commit: while one batch of a key is under way, the next one gathers.

A store's round trip or transaction costs nearly the same for one item as for a hundred. So items
of one key that are put in one turn of the event loop leave together, and items that are put while a
batch is under way leave when it has ended. An item that comes alone waits for no other, and a slow
store makes larger batches, and more of them only up to a bound.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

from counter.errors import OverloadedError, invariant
from counter.limits import SECOND

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")

#: Items that one caller put, and the future of their outcomes.
_Put = tuple[Sequence[T], asyncio.Future[Any]]


class _Uninterrupted(asyncio.Future[Any]):
    """A future whose task gets its CancelledError when the future is done, and not before."""

    def cancel(self, msg: Any | None = None) -> bool:
        return False


class _Queue(Generic[K, T]):
    """What waits under one key, and the number of its batches that are under way."""

    __slots__ = ("is_ready", "items", "key", "overdue", "puts", "under_way")

    def __init__(self, key: K) -> None:
        self.key = key
        self.puts: list[_Put[T]] = []
        #: The number of items in *puts*.
        self.items = 0
        self.under_way = 0
        #: Batches in flight longer than patience_s; they do not block the next one.
        self.overdue = 0
        #: Whether it is ready for a commit.
        self.is_ready = False

    def take(self, items_max: int) -> list[_Put[T]]:
        """Remove whole puts from the front, with at most *items_max* items if it is not one put."""
        puts = self.puts
        if self.items <= items_max:
            self.puts, self.items = [], 0
            return puts
        taken = items = 0
        for put, _ in puts:
            if taken and items + len(put) > items_max:
                break
            taken += 1
            items += len(put)
        self.puts, self.items = puts[taken:], self.items - items
        return puts[:taken]


class Batch(Generic[K, T, R]):
    """Items of one key that are committed together. It must be ended once, in the event loop."""

    __slots__ = ("_ended", "_puts", "is_overdue", "items", "key", "queue", "timer")

    def __init__(
        self, queue: _Queue[K, T], puts: list[_Put[T]], ended: Callable[[Batch[K, T, R]], None]
    ) -> None:
        self._puts = puts
        self._ended = ended
        self.queue = queue
        self.is_overdue = False
        self.timer: asyncio.TimerHandle | None = None
        self.key = queue.key
        self.items = [item for items, _ in puts for item in items]

    @property
    def parts(self) -> list[Sequence[T]]:
        """The items, as they were put."""
        return [items for items, _ in self._puts]

    def end(self, outcomes: Sequence[R]) -> None:
        """Give each item its own outcome, and let the next batch of the key leave."""
        invariant(len(outcomes) == len(self.items), "a batch has one outcome for each item")
        start = 0
        for items, future in self._puts:
            end = start + len(items)
            # It is done if its caller was cancelled or was answered early.
            if not future.done():
                future.set_result(outcomes[start:end])
            start = end
        self._ended(self)

    def end_all(self, outcome: R) -> None:
        """Give all items the same outcome, and let the next batch of the key leave."""
        self.end([outcome] * len(self.items))

    def answer_all(self, outcome: R) -> None:
        """Give all items the same outcome early: the batch stays under way until it is ended."""
        _answer(self._puts, outcome)


def _answer(puts: Iterable[_Put[T]], outcome: Any) -> None:
    for items, future in puts:
        if not future.done():
            future.set_result([outcome] * len(items))


class Batcher(Generic[K, T, R]):
    """Hand the items of each key to *commit*, in batches and in the order in which they were put.

    *commit* gets the batches that leave in one turn of the event loop, begins to commit them and
    returns; each is ended later. It must not raise. Of each key *at_once* batches may be under way;
    the second and further ones leave only if *items_max* items wait, or if those before them have
    taken longer than *patience_s* each: a batch that stalls holds back no other. A batch has at
    most *items_max* items, or one put if that has more. *waiting_max* items of a key may wait to
    leave.

    A cancelled caller leaves its items behind: they are committed with the others. Unless
    *interrupts*, it gets its CancelledError only when its batch has ended.
    """

    def __init__(
        self,
        commit: Callable[[Sequence[Batch[K, T, R]]], None],
        *,
        name: str,
        items_max: int,
        waiting_max: int,
        at_once: int = 1,
        patience_s: float = math.inf,
        interrupts: bool = True,
    ) -> None:
        """*name* identifies the resource in error messages."""
        self._commit = commit
        self._name: Final = name
        self._items_max: Final = items_max
        self._waiting_max: Final = waiting_max
        self._at_once: Final = at_once
        self._patience_s: Final = patience_s
        self._future: Final[type[asyncio.Future[Any]]] = (
            asyncio.Future if interrupts else _Uninterrupted
        )
        #: Those that have items that wait or are under way.
        self._queues: dict[K, _Queue[K, T]] = {}
        self._ready: list[_Queue[K, T]] = []
        self._is_closed = False
        self._idle = asyncio.Event()

    @property
    def waiting(self) -> int:
        """The number of items that wait to leave."""
        return sum(queue.items for queue in self._queues.values())

    def is_under_way(self, key: K) -> bool:
        """Return whether a batch of *key* is under way."""
        queue = self._queues.get(key)
        return queue is not None and queue.under_way > 0

    def put(self, key: K, items: Sequence[T]) -> asyncio.Future[Sequence[R]]:
        """Have one or more *items* committed in one batch; await an outcome for each.

        Raises OverloadedError, before any work, if too many items wait or after :meth:`close`.
        """
        invariant(len(items) > 0, "a put has items")
        queue = self._queues.get(key)
        self._require_room(queue, len(items))
        if queue is None:
            queue = self._queues[key] = _Queue(key)
        future = self._future(loop=asyncio.get_running_loop())
        queue.puts.append((items, future))
        queue.items += len(items)
        self._update_ready(queue)
        return future

    async def put_all(self, items: Sequence[tuple[K, T]]) -> list[R]:
        """Have any number of *items* committed, each under its key, in batches of at most
        *items_max*; return an outcome for each.

        Raises OverloadedError, before any work, as :meth:`put` does.
        """
        if len(items) == 1:
            # A single add: half of the time of the general way.
            [(key, item)] = items
            return list(await self.put(key, (item,)))
        places: dict[K, list[int]] = {}
        for place, (key, _) in enumerate(items):
            places.setdefault(key, []).append(place)
        for key, mine in places.items():
            self._require_room(self._queues.get(key), len(mine))
        parts: list[tuple[list[int], asyncio.Future[Sequence[R]]]] = []
        for key, mine in places.items():
            for at in range(0, len(mine), self._items_max):
                part = mine[at : at + self._items_max]
                parts.append((part, self.put(key, [items[place][1] for place in part])))
        outcomes: dict[int, R] = {}
        for part, future in parts:
            outcomes |= zip(part, await future, strict=True)
        return [outcomes[place] for place in range(len(items))]

    def answer_waiting(self, key: K, outcome: R) -> None:
        """Give all items of *key* that wait *outcome*: they do not leave."""
        queue = self._queues.get(key)
        if queue is not None:
            puts, queue.puts, queue.items = queue.puts, [], 0
            _answer(puts, outcome)

    def commit_ready(self) -> None:
        """Commit the ready queues now, not at the end of this turn of the event loop."""
        ready, self._ready = self._ready, []
        batches: list[Batch[K, T, R]] = []
        for queue in ready:
            queue.is_ready = False
            while self._may_commit(queue):
                batches.append(self._next(queue))
            self._update_ready(queue)
        if batches:
            self._commit(batches)

    def _next(self, queue: _Queue[K, T]) -> Batch[K, T, R]:
        batch: Batch[K, T, R] = Batch(queue, queue.take(self._items_max), self._ended)
        queue.under_way += 1
        if self._patience_s < math.inf:
            loop = asyncio.get_running_loop()
            batch.timer = loop.call_later(self._patience_s, self._overdue, batch)
        return batch

    async def close(self) -> None:
        """Reject new items, and wait until all others have ended."""
        self._is_closed = True
        while self._queues:
            self._idle.clear()
            await self._idle.wait()

    def _require_room(self, queue: _Queue[K, T] | None, items: int) -> None:
        if self._is_closed:
            raise OverloadedError(f"{self._name} is closing", retry_after_us=SECOND)
        waiting = 0 if queue is None else queue.items
        if waiting + items > self._waiting_max:
            raise OverloadedError(
                f"{waiting} calls wait for {self._name}; at most {self._waiting_max} may",
                retry_after_us=SECOND,
            )

    def _may_commit(self, queue: _Queue[K, T]) -> bool:
        if queue.under_way >= self._at_once:
            return False
        return queue.items >= (1 if queue.under_way == queue.overdue else self._items_max)

    def _update_ready(self, queue: _Queue[K, T]) -> None:
        """Make *queue* ready if a batch of it may be committed, and forget it if it is idle."""
        if queue.is_ready:
            return
        if self._may_commit(queue):
            queue.is_ready = True
            if not self._ready:
                # What is put until then is committed together.
                asyncio.get_running_loop().call_soon(self.commit_ready)
            self._ready.append(queue)
        elif not (queue.under_way or queue.items):
            del self._queues[queue.key]
            self._idle.set()

    def _overdue(self, batch: Batch[K, T, R]) -> None:
        batch.is_overdue = True
        batch.queue.overdue += 1
        self._update_ready(batch.queue)

    def _ended(self, batch: Batch[K, T, R]) -> None:
        queue = batch.queue
        queue.under_way -= 1
        queue.overdue -= batch.is_overdue
        if batch.timer is not None:
            batch.timer.cancel()
        self._update_ready(queue)
