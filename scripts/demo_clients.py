"""The demo's clients: they send batches late, twice and out of order, and follow the responses."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count, cycle
from typing import Any, Final

import httpx

from counter.clock import to_rfc3339

ADD_PATH: Final = "/v1/namespaces/default/batch/add"
REQUEST_TIMEOUT_S: Final = 10.0
#: The minimum number of batches, so that faults happen even with few names.
BATCHES_MIN: Final = 200
#: Bound of waiting batches; while so many wait, no new ones are made.
WAITING_MAX: Final = 64
ACCEPT_LIMIT_S: Final = 5.0
HEDGE_S_MAX: Final = 0.02
LATE_S: Final = ACCEPT_LIMIT_S + 1.0
#: One of so many batches in the first part of the run is late on purpose: a client that follows the
#: protocol has to wait until it is resolved.
LATE_EVERY: Final = 250
LATE_UNTIL: Final = 0.6
_RETRY_AFTER_S: Final = 1.0
_JSON: Final = {"Content-Type": "application/json"}
_POLL_S: Final = 0.02

Result = dict[str, Any]
#: A result per item, or how long the client waits after a send whose outcome is unknown.
Reply = list[Result] | float


class DemoError(Exception):
    """The service's response contradicts the protocol."""


class State(IntEnum):
    """A client's knowledge of one add."""

    UNKNOWN = 0
    #: It counts by an earlier send.
    REPLAYED = 1
    #: It counts by this send, or is known to count from an earlier response.
    COUNTED = 2
    VOID = 3


@dataclass(slots=True)
class Faults:
    """The faults of one batch; None for no fault."""

    #: The network delays it: later batches arrive earlier.
    delay_s: float | None = None
    #: The client disconnects this long after sending, without the reply, and waits to retry.
    give_up_s: float | None = None
    retry_s: float = 0.0
    #: The same batch is sent on a second connection, this long after the first.
    hedge_s: float | None = None
    #: The same batch is sent again, this long after its response.
    duplicate_s: float | None = None


@dataclass(slots=True)
class Batch:
    """Adds that are sent together: each one's name and JSON, the same in every attempt."""

    names: Sequence[str]
    items: Sequence[str]
    faults: Faults
    #: The outcomes of all its adds before it is sent.
    known: State = State.UNKNOWN

    def pick(self, positions: Sequence[int], faults: Faults, known: State = State.UNKNOWN) -> Batch:
        """Return a batch of some of these adds, their tokens unchanged."""
        names = [self.names[position] for position in positions]
        items = [self.items[position] for position in positions]
        return Batch(names, items, faults, known)


def draw_faults(number: int, batches: int, *, hedge: bool) -> Faults:
    """Draw the faults of batch *number*: at least every fourth is hedged or duplicated, and all are
    hedged with *hedge*."""
    faults = Faults(retry_s=random.uniform(0.0, 0.5))
    if number % 4 == 0 or random.random() < 0.05:
        if random.random() < 0.5:
            faults.hedge_s = random.uniform(0.0, HEDGE_S_MAX)
        else:
            faults.duplicate_s = random.uniform(0.0, 3.0)
    if hedge:
        faults.hedge_s = random.uniform(0.0, HEDGE_S_MAX)
    if random.random() < 0.15:
        faults.delay_s = random.uniform(0.05, 3.0)
    if random.random() < 0.08:
        faults.give_up_s = random.uniform(0.0, 0.1)
    if number % LATE_EVERY == LATE_EVERY // 3 and number < LATE_UNTIL * batches:
        if random.random() < 0.5:
            # Never arrived in time: to be voided.
            faults.delay_s, faults.give_up_s = LATE_S, None
        else:
            # Arrived, but the response is lost: to be found.
            faults.give_up_s, faults.retry_s = 0.5, LATE_S
    return faults


class Outbox:
    """Gives the clients what to send next: what is due to be sent again, else a new batch.

    A token is made for each occurrence when its batch is made. While WAITING_MAX batches wait, or a
    tenth of all, nothing new is made.
    """

    def __init__(self, occurrences: Sequence[str], batch_items: int, *, hedge_all: bool) -> None:
        self._occurrences = occurrences
        self._hedge_all = hedge_all
        self._size = max(1, min(batch_items, len(occurrences) // BATCHES_MIN))
        self._starts = list(range(0, len(occurrences), self._size))
        random.shuffle(self._starts)
        self._new = self._batches()
        self._waiting: list[tuple[float, int, Batch]] = []
        self._ticket = count()
        self._in_hand = 0
        self.batches = len(self._starts)
        self.adds = len(occurrences)
        #: The time of the newest token.
        self.latest_us = 0

    def make(self, names: Sequence[str], faults: Faults) -> Batch:
        """Make a batch of adds with new tokens."""
        return Batch(names, [self._item(name) for name in names], faults)

    def push(self, batch: Batch, delay_s: float) -> None:
        """Hand the batch out, but not before *delay_s* have passed."""
        due_s = time.monotonic() + delay_s
        heapq.heappush(self._waiting, (due_s, next(self._ticket), batch))

    async def take(self) -> Batch | None:
        """The next batch; None when all are done. Each one taken must be released."""
        while True:
            due_in_s = self._waiting[0][0] - time.monotonic() if self._waiting else _POLL_S
            if self._waiting and due_in_s <= 0:
                self._in_hand += 1
                return heapq.heappop(self._waiting)[2]
            has_room = len(self._waiting) < max(1, min(WAITING_MAX, self.batches // 10))
            if has_room and (batch := next(self._new, None)) is not None:
                self.push(batch, batch.faults.delay_s or 0.0)
            elif not self._waiting and not self._in_hand:
                return None
            else:
                await asyncio.sleep(min(due_in_s, _POLL_S))

    def release(self) -> None:
        """Finish a batch; a rest of it must have been pushed again."""
        self._in_hand -= 1

    def _batches(self) -> Iterator[Batch]:
        for number, start in enumerate(self._starts):
            names = self._occurrences[start : start + self._size]
            yield self.make(names, draw_faults(number, self.batches, hedge=self._hedge_all))

    def _item(self, name: str) -> str:
        nonce, self.latest_us = uuid.uuid4().bytes, time.time_ns() // 1_000
        token = {"token": nonce.hex(), "generation_time": to_rfc3339(self.latest_us)}
        return json.dumps({"counter": name, "delta": 1, "idempotency_token": token})


@dataclass(slots=True)
class Tally:
    """The events by their names in the report, and how often the adds of each name were sent."""

    events: Counter[str] = field(default_factory=Counter)
    adds_done: int = 0
    contradictions: list[str] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    collapsed: Counter[str] = field(default_factory=Counter)


class Client:
    """One of several clients that empty the outbox, each with its own connections."""

    def __init__(
        self, urls: Sequence[str], outbox: Outbox, tally: Tally, progress: Callable[[], None]
    ) -> None:
        # A hedge goes to another process than the first attempt.
        self._urls = cycle(url + ADD_PATH for url in random.sample(urls, len(urls)))
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self._outbox = outbox
        self._tally = tally
        self._events = tally.events
        self._progress = progress

    async def run(self) -> None:
        """Send until nothing is left. Raises DemoError at a response that cannot be followed."""
        async with self._http:
            while (batch := await self._outbox.take()) is not None:
                await self._deal_with(batch)
                self._outbox.release()

    async def _deal_with(self, batch: Batch) -> None:
        faults = batch.faults
        if faults.give_up_s is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(faults.give_up_s):
                    await self._send(batch)
            self._events["client time-outs injected"] += 1
            faults.give_up_s = None
            self._outbox.push(batch, faults.retry_s)
            return
        sends = [self._send(batch)]
        if faults.hedge_s is not None:
            self._events["hedges sent"] += 1
            sends.append(self._send(batch, faults.hedge_s))
            faults.hedge_s = None
        replies = await asyncio.gather(*sends)
        busy_s = max((reply for reply in replies if isinstance(reply, float)), default=0.0)
        self._settle(batch, [reply for reply in replies if isinstance(reply, list)], busy_s)
        # A client with a busy service starts nothing else.
        await asyncio.sleep(busy_s)

    async def _send(self, batch: Batch, delay_s: float = 0.0) -> Reply:
        await asyncio.sleep(delay_s)
        self._events["batch requests sent"] += 1
        self._tally.sent.update(batch.names)
        body = '{"items":[' + ",".join(batch.items) + "]}"
        try:
            response = await self._http.post(next(self._urls), content=body, headers=_JSON)
        except httpx.ConnectError:
            self._events["connections refused"] += 1
            self._events["batch requests sent"] -= 1
            self._tally.sent.subtract(batch.names)
            return random.uniform(0.1, 0.3)
        except httpx.TransportError:
            self._events["replies lost to a kill"] += 1
            return random.uniform(0.1, 0.3)
        if response.status_code != httpx.codes.OK:
            self._events["batches refused for a while (503)"] += 1
            return retry_after(read_problem(response))
        results: list[Result] = response.json()["results"]
        if len(results) != len(batch.names):
            raise DemoError(f"{len(results)} results for {len(batch.names)} items")
        return results

    def _settle(self, batch: Batch, responses: Sequence[list[Result]], wait_s: float) -> None:
        """Process the results of each response, and push the rest."""
        states = [batch.known] * len(batch.names)
        for results in responses:
            for position, result in enumerate(results):
                wait_s = max(wait_s, self._judge(batch, position, result, states))
        if batch.known is State.UNKNOWN:
            self._follow_up(batch, states, wait_s)
        elif not responses:
            self._outbox.push(batch, wait_s)

    def _judge(self, batch: Batch, position: int, result: Result, states: list[State]) -> float:
        """Record one result in *states*, and return how long it asks to wait."""
        state = states[position]
        if "code" not in result:
            # None if the service cannot know: then it is the first, unless known otherwise.
            replayed = result["replayed"]
            if replayed or (replayed is None and state is State.COUNTED):
                self._tally.collapsed[result["counter"]] += 1
            states[position] = (state or State.REPLAYED) if replayed else State.COUNTED
            is_wrong = state is State.VOID or (replayed is False and state is State.COUNTED)
            is_wrong = is_wrong or result["counter"] != batch.names[position]
        elif result["applied"] is None and result["retry"] == "same_token":
            is_pending = result["code"] == "token_pending"
            what = "had to wait (token_pending)" if is_pending else "with an unknown outcome"
            self._events[f"adds {what}"] += 1
            return retry_after(result)
        elif result["applied"] is False and result["retry"] == "new_token":
            states[position] = State.VOID
            is_wrong = state in (State.REPLAYED, State.COUNTED)
        else:
            raise DemoError(f"{batch.items[position]} was answered with {result}")
        if is_wrong:
            self._tally.contradictions.append(
                f"{batch.items[position]}, known as {batch.known.name}: {result}"
            )
        return 0.0

    def _follow_up(self, batch: Batch, states: Sequence[State], wait_s: float) -> None:
        """Retry adds without a definite result, and voided ones under a new token."""
        unknown, void, counted = (
            [position for position, state in enumerate(states) if state in wanted]
            for wanted in ((State.UNKNOWN,), (State.VOID,), (State.REPLAYED, State.COUNTED))
        )
        self._tally.adds_done += len(counted)
        self._progress()
        left = Faults(duplicate_s=batch.faults.duplicate_s)
        if counted and left.duplicate_s is not None:
            self._events["duplicates sent"] += 1
            self._outbox.push(batch.pick(counted, Faults(), State.COUNTED), left.duplicate_s)
            left = Faults()
        if unknown:
            self._outbox.push(batch.pick(unknown, left), wait_s)
        if void:
            self._events["new tokens after a void"] += len(void)
            names = [batch.names[position] for position in void]
            self._outbox.push(self._outbox.make(names, Faults() if unknown else left), 0.0)
            # A definite result must stay true: the voided tokens are sent again.
            self._outbox.push(batch.pick(void, Faults(), State.VOID), _RETRY_AFTER_S)


def retry_after(problem: Result) -> float:
    """The seconds that a problem asks to wait before the same token is sent again."""
    return float(problem.get("retry_after", _RETRY_AFTER_S))


def read_problem(response: httpx.Response) -> Result:
    """Return the problem of a rejected request if it can be retried.

    Raises DemoError otherwise.
    """
    try:
        problem: Result = response.json()
    except ValueError:
        problem = {}
    if not response.is_server_error and problem.get("retry") != "same_token":
        raise DemoError(f"HTTP {response.status_code}: {response.text[:1_000]}")
    if "Retry-After" in response.headers:
        problem["retry_after"] = response.headers["Retry-After"]
    return problem
