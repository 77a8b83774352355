"""The demo's batches: their adds, their faults, and when they are sent."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Final

from counter.clock import to_rfc3339
from counter.tokens import TokenGenerator

#: The minimum number of batches, so that faults happen even with few names.
BATCHES_MIN: Final = 200
#: Bound of waiting batches; past it no new ones are made.
WAITING_MAX: Final = 64
ACCEPT_LIMIT_S: Final = 5.0
HEDGE_S_MAX: Final = 0.02
LATE_S: Final = ACCEPT_LIMIT_S + 1.0
#: One of so many batches in the first part of the run is late on purpose: a client that follows the
#: protocol has to wait until it is resolved.
LATE_EVERY: Final = 250
LATE_UNTIL: Final = 0.6


class Known(Enum):
    """What a client knows of a batch's tokens before it sends them."""

    NOTHING = "nothing"
    APPLIED = "applied"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults of one batch; None for no fault."""

    #: The network delays it: later batches arrive earlier.
    delay_s: float | None = None
    #: The client disconnects this long after sending, without the reply, and waits to retry.
    give_up_s: float | None = None
    retry_s: float = 0.0
    #: The same batch is sent on a second connection, this long after the first.
    hedge_s: float | None = None
    #: The same batch is sent again, this long after it was answered.
    duplicate_s: float | None = None


@dataclass(slots=True)
class Batch:
    """Adds that are sent together: each one's name and JSON, the same in every attempt."""

    names: Sequence[str]
    items: Sequence[str]
    made_s: float
    plan: Plan
    known: Known = Known.NOTHING
    #: The number of the next send: each one goes to another process than the one before.
    turn: int = 0

    def pick(self, positions: Sequence[int], plan: Plan, known: Known = Known.NOTHING) -> Batch:
        """A batch of some of these adds, their tokens unchanged."""
        names = [self.names[position] for position in positions]
        items = [self.items[position] for position in positions]
        return Batch(names, items, self.made_s, plan, known, self.turn)

    def take_turn(self) -> int:
        """The number of a send that begins now."""
        self.turn += 1
        return self.turn - 1


def draw_plan(seed: int, number: int, batches: int, *, hedge: bool = False) -> Plan:
    """The faults of batch *number*: the same for the same seed, whatever the timing.

    Every fourth batch at least is hedged or duplicated; all are hedged with *hedge*.
    """
    rng = random.Random(seed * 1_000_003 + number)
    hedge_s = duplicate_s = delay_s = give_up_s = None
    retry_s = rng.uniform(0.0, 0.5)
    if number % 4 == 0 or rng.random() < 0.05:
        if rng.random() < 0.5:
            hedge_s = rng.uniform(0.0, HEDGE_S_MAX)
        else:
            duplicate_s = rng.uniform(0.0, 3.0)
    if rng.random() < 0.15:
        delay_s = rng.uniform(0.05, 3.0)
    if rng.random() < 0.08:
        give_up_s = rng.uniform(0.0, 0.1)
    if number % LATE_EVERY == LATE_EVERY // 3 and number < LATE_UNTIL * batches:
        if rng.random() < 0.5:
            delay_s, give_up_s = LATE_S, None  # never arrived in time: to be voided
        else:
            give_up_s, retry_s = 0.5, LATE_S  # arrived, but the answer is lost: to be found
    if hedge and hedge_s is None:
        hedge_s = rng.uniform(0.0, HEDGE_S_MAX)
    return Plan(delay_s, give_up_s, retry_s, hedge_s, duplicate_s)


class Feed:
    """New batches, a token made for each occurrence the moment its batch is made."""

    def __init__(
        self, occurrences: Sequence[str], seed: int, batch_items: int, *, hedge_all: bool = False
    ) -> None:
        self._occurrences = occurrences
        self._seed = seed
        self._hedge_all = hedge_all
        self._size = max(1, min(batch_items, len(occurrences) // BATCHES_MIN))
        self._starts = list(range(0, len(occurrences), self._size))
        random.Random(seed).shuffle(self._starts)
        self._next_token = TokenGenerator().next
        self._prefixes: dict[str, str] = {}
        self.latest_us = 0

    @property
    def batches(self) -> int:
        return len(self._starts)

    @property
    def adds(self) -> int:
        return len(self._occurrences)

    def __iter__(self) -> Iterator[Batch]:
        for number, start in enumerate(self._starts):
            names = self._occurrences[start : start + self._size]
            plan = draw_plan(self._seed, number, self.batches, hedge=self._hedge_all)
            yield self.make(names, plan, number)

    def make(self, names: Sequence[str], plan: Plan, turn: int) -> Batch:
        """Make a batch of adds with new tokens."""
        made_s = time.monotonic()
        return Batch(names, [self._item(name) for name in names], made_s, plan, turn=turn)

    def _item(self, name: str) -> str:
        prefix = self._prefixes.get(name)
        if prefix is None:
            prefix = f'{{"counter":{json.dumps(name)},"delta":1,"idempotency_token":{{"token":"'
            self._prefixes[name] = prefix
        nonce, self.latest_us = self._next_token()
        return f'{prefix}{nonce.hex()}","generation_time":"{to_rfc3339(self.latest_us)}"}}}}'


class Outbox:
    """Gives the clients what to send next: what is due to be sent again, else a new batch.

    Bounded: while WAITING_MAX batches wait, or a tenth of all, nothing new is made.
    """

    def __init__(self, feed: Feed) -> None:
        self._new = iter(feed)
        self._waiting_max = max(1, min(WAITING_MAX, feed.batches // 10))
        self._is_dry = False
        self._waiting: list[tuple[float, int, Batch]] = []
        self._ticket = count()
        self._in_hand = 0

    def push(self, batch: Batch, delay_s: float) -> None:
        """Hand the batch out again, but not before *delay_s* have passed."""
        due_s = time.monotonic() + delay_s
        heapq.heappush(self._waiting, (due_s, next(self._ticket), batch))

    async def take(self) -> Batch | None:
        """The next batch; None when all are done. Each one taken must be released."""
        while True:
            due_in_s = self._waiting[0][0] - time.monotonic() if self._waiting else 0.02
            if self._waiting and due_in_s <= 0:
                self._in_hand += 1
                return heapq.heappop(self._waiting)[2]
            if not self._is_dry and len(self._waiting) < self._waiting_max:
                self._make_one()
            elif not self._waiting and not self._in_hand:
                return None
            else:
                await asyncio.sleep(min(due_in_s, 0.02))

    def release(self) -> None:
        """Finish a batch; a rest of it must have been pushed again."""
        self._in_hand -= 1

    def _make_one(self) -> None:
        batch = next(self._new, None)
        if batch is None:
            self._is_dry = True
        else:
            self.push(batch, batch.plan.delay_s or 0.0)
