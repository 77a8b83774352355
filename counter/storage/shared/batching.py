"""Group commit: while one batch of a key is under way, the next one gathers.

A store's round trip or transaction costs nearly the same for one item as for a hundred. So items
of one key that are put in one turn of the event loop leave together, and items that are put while a
batch is under way leave when it has ended. An item that comes alone waits for no other, and a slow
store makes larger batches, and more of them only up to a bound.

At half of the peak load batches would be small, and a small batch costs nearly as much as a large
one. So after a batch the next one may linger for a few milliseconds, as with ``linger.ms`` of
Apache Kafka and ``commit_delay`` of PostgreSQL: only while items arrive fast enough to share it,
and only until it has one item of each recent caller.
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

#: Items that one caller put, the future of their outcomes, and their weight.
_Put = tuple[Sequence[T], asyncio.Future[Any], int]
#: How long a batch may linger in a store that commits in groups.
LINGER_S: Final = 0.004
#: The weight that makes a batch cheap enough: it leaves without lingering.
_ENOUGH: Final = 24
#: A batch lingers only if at least this weight is expected to arrive in that time.
_WORTH_WAITING: Final = 12
#: Items that are worth a commit of their own while another one is under way.
_FURTHER_AT: Final = 16
#: How much longer a batch may take that others of its key would wait for in the store.
_SERIAL_PATIENCE: Final = 10
#: The time that the rate of items is averaged over.
_RATE_OVER_S: Final = 0.01


class _Uninterrupted(asyncio.Future[Any]):
    """A future whose task gets its CancelledError when the future is done, and not before."""

    def cancel(self, msg: Any | None = None) -> bool:
        return False


class _Queue(Generic[K, T]):
    """What waits under one key, and the number of its batches that are under way."""

    __slots__ = (
        *("callers", "enough", "further_at", "is_ready", "items", "key", "left_s", "lingers"),
        *("overdue", "patience", "pending", "puts", "rate_per_s", "under_way", "weight"),
    )

    def __init__(self, key: K, enough: float, further_at: int, patience: int = 1) -> None:
        self.key = key
        self.patience = patience
        #: The weight that leaves without lingering, and the number of items that leave while a
        #: batch is under way.
        self.enough = enough
        self.further_at = further_at
        self.puts: list[_Put[T]] = []
        #: The number of items in *puts*, and their weight.
        self.items = 0
        self.weight = 0
        self.under_way = 0
        #: Batches in flight longer than patience_s; they do not block the next one.
        self.overdue = 0
        #: Whether it is ready for a commit.
        self.is_ready = False
        #: The weight that waits or is under way, and its recent maximum.
        self.pending = 0
        self.callers = 0
        #: When the last batch left, and the average weight that arrives per second.
        self.left_s: float | None = None
        self.rate_per_s = 0.0
        #: Ends the lingering of the next batch.
        self.lingers: asyncio.TimerHandle | None = None

    def put(self, put: _Put[T]) -> None:
        """Have *put* wait."""
        items, _, weight = put
        self.puts.append(put)
        self.items += len(items)
        self.weight += weight
        self.pending += weight
        self.callers = max(self.callers, self.pending)

    def left(self, weight: int, now_s: float) -> None:
        """Update the arrival rate when a batch leaves, and end its lingering."""
        if self.left_s is not None:
            passed_s = now_s - self.left_s
            self.rate_per_s += (weight - self.rate_per_s * passed_s) / (passed_s + _RATE_OVER_S)
        self.left_s = now_s
        if self.lingers is not None:
            self.lingers.cancel()
            self.lingers = None

    def take(self, items_max: int) -> list[_Put[T]]:
        """Remove whole puts from the front, with at most *items_max* items if it is not one put."""
        puts = self.puts
        if self.items <= items_max:
            self.puts, self.items, self.weight = [], 0, 0
            return puts
        taken = items = 0
        for put, _, weight in puts:
            if taken and items + len(put) > items_max:
                break
            taken += 1
            items += len(put)
            self.weight -= weight
        self.puts, self.items = puts[taken:], self.items - items
        return puts[:taken]


class Batch(Generic[K, T, R]):
    """Items of one key that are committed together. It must be ended once, in the event loop."""

    __slots__ = ("_ended", "_puts", "is_overdue", "items", "key", "queue", "timer", "weight")

    def __init__(
        self, queue: _Queue[K, T], puts: list[_Put[T]], ended: Callable[[Batch[K, T, R]], None]
    ) -> None:
        self._puts = puts
        self._ended = ended
        self.queue = queue
        self.is_overdue = False
        self.timer: asyncio.TimerHandle | None = None
        self.key = queue.key
        self.items = [item for items, _, _ in puts for item in items]
        self.weight = sum(weight for _, _, weight in puts)

    @property
    def parts(self) -> list[Sequence[T]]:
        """The items, as they were put."""
        return [items for items, _, _ in self._puts]

    def end(self, outcomes: Sequence[R]) -> None:
        """Give each item its own outcome, and let the next batch of the key leave."""
        invariant(len(outcomes) == len(self.items), "a batch has one outcome for each item")
        start = 0
        for items, future, _ in self._puts:
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
    for items, future, _ in puts:
        if not future.done():
            future.set_result([outcome] * len(items))


class Batcher(Generic[K, T, R]):
    """Hand the items of each key to *commit*, in batches and in the order in which they were put.

    *commit* gets the batches that leave in one turn of the event loop, begins to commit them and
    returns; each is ended later. It must not raise. Of each key *at_once* batches may be under way;
    the second and further ones leave only if *items_max* items wait (or ``_FURTHER_AT``, if batches
    linger), or if those before them have taken longer than *patience_s* each: a batch that stalls
    holds back no other. A batch has at most *items_max* items, or one put if that has more.
    *waiting_max* items of a key may wait to leave. After a batch the next one lingers for at most
    *linger_s*, if that is not 0.

    Batches of a key that :meth:`is_serial`, which the store does one after the other, leave one by
    one, and linger until there is an item of each recent caller: what a batch costs is then shared
    by more items. A batch that stalls holds back the others of such a key for ten times
    *patience_s*.

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
        linger_s: float = 0.0,
        interrupts: bool = True,
    ) -> None:
        """*name* identifies the resource in error messages."""
        self._commit = commit
        self._name: Final = name
        self._items_max: Final = items_max
        self._waiting_max: Final = waiting_max
        self._at_once: Final = at_once
        self._patience_s: Final = patience_s
        self._linger_s: Final = linger_s
        self._future: Final[type[asyncio.Future[Any]]] = (
            asyncio.Future if interrupts else _Uninterrupted
        )
        #: Those that have items that wait or are under way.
        self._queues: dict[K, _Queue[K, T]] = {}
        self._ready: list[_Queue[K, T]] = []
        self._is_closed = False
        self._idle = asyncio.Event()

    def is_serial(self, key: K) -> bool:
        """Return whether batches of *key* wait for each other in the store; for subclasses."""
        return False

    @property
    def waiting(self) -> int:
        """The number of items that wait to leave."""
        return sum(queue.items for queue in self._queues.values())

    def is_under_way(self, key: K) -> bool:
        """Return whether a batch of *key* is under way."""
        queue = self._queues.get(key)
        return queue is not None and queue.under_way > 0

    def put(
        self, key: K, items: Sequence[T], weight: int | None = None
    ) -> asyncio.Future[Sequence[R]]:
        """Have one or more *items* committed in one batch; await an outcome for each. *weight* is
        how many callers wait for them, by default their number.

        Raises OverloadedError, before any work, if too many items wait or after :meth:`close`.
        """
        invariant(len(items) > 0, "a put has items")
        queue = self._queues.get(key)
        self._require_room(queue, len(items))
        if queue is None:
            queue = self._queues[key] = self._new_queue(key)
        future = self._future(loop=asyncio.get_running_loop())
        queue.put((items, future, len(items) if weight is None else weight))
        self._update_ready(queue)
        return future

    def _new_queue(self, key: K) -> _Queue[K, T]:
        if self.is_serial(key):
            return _Queue(key, math.inf, self._items_max, _SERIAL_PATIENCE)
        lingers = bool(self._linger_s)
        return _Queue(
            key, _ENOUGH, min(_FURTHER_AT, self._items_max) if lingers else self._items_max
        )

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
            queue.pending -= queue.weight
            _answer(queue.take(queue.items), outcome)

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
        loop = asyncio.get_running_loop()
        if self._linger_s:
            queue.left(batch.weight, loop.time())
        if self._patience_s < math.inf:
            batch.timer = loop.call_later(self._patience_s * queue.patience, self._overdue, batch)
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
        is_small = queue.items < self._items_max and queue.weight < min(queue.enough, queue.callers)
        if queue.lingers is not None and is_small:
            return False
        return queue.items >= (1 if queue.under_way == queue.overdue else queue.further_at)

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
        elif not (queue.under_way or queue.items or queue.lingers):
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
        queue.pending -= batch.weight
        if batch.timer is not None:
            batch.timer.cancel()
        is_worth_it = queue.rate_per_s * self._linger_s >= _WORTH_WAITING
        if is_worth_it and queue.weight < queue.enough and queue.under_way == 0:
            loop = asyncio.get_running_loop()
            queue.lingers = loop.call_later(self._linger_s, self._lingered, queue)
        self._update_ready(queue)

    def _lingered(self, queue: _Queue[K, T]) -> None:
        queue.lingers = None
        # Do not wait again for callers that sent nothing in this time.
        queue.callers = queue.pending
        self._update_ready(queue)
