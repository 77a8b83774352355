"""The demo's clients: they send, time out, hedge and retry, and follow the answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from scripts.demo_batches import ACCEPT_LIMIT_S, Batch, Feed, Known, Outbox, Plan

ADD_PATH: Final = "/v1/namespaces/default/batch/add"
REQUEST_TIMEOUT_S: Final = 10.0
RETRY_AFTER_S: Final = 1.0
SERVER_ERROR: Final = 500

#: The state of one add: unknown; counted by an earlier send; counted by this one; void.
UNKNOWN, REPLAYED, FRESH, VOID = 0, 1, 2, 3
AT_FIRST: Final = {Known.NOTHING: UNKNOWN, Known.APPLIED: FRESH, Known.VOID: VOID}

Answer = dict[str, Any]
#: An answer per item, or how long to wait after a send whose outcome is unknown.
Reply = list[Answer] | float


class DemoError(Exception):
    """The service's answer contradicts the protocol."""


@dataclass(slots=True)
class Tally:
    """Totals of requests and adds, and how often each name's adds were sent."""

    requests: int = 0
    duplicates: int = 0
    hedges: int = 0
    timeouts: int = 0
    lost: int = 0
    refused: int = 0
    unavailable: int = 0
    adds_done: int = 0
    adds_pending: int = 0
    adds_untold: int = 0
    adds_late: int = 0
    adds_voided: int = 0
    contradictions: int = 0
    first_contradiction: str = ""
    sent: Counter[str] = field(default_factory=Counter)
    collapsed: Counter[str] = field(default_factory=Counter)

    def contradict(self, text: str) -> None:
        """Record an answer that contradicts an earlier one."""
        self.contradictions += 1
        self.first_contradiction = self.first_contradiction or text


class Client:
    """One of several clients that empty the outbox, each with its own connections."""

    def __init__(
        self,
        urls: Sequence[str],
        feed: Feed,
        outbox: Outbox,
        tally: Tally,
        progress: Callable[[int], None],
    ) -> None:
        self._urls = [url + ADD_PATH for url in urls]
        self._http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False)
        self._feed = feed
        self._outbox = outbox
        self._tally = tally
        self._progress = progress
        self._jitter = random.Random()

    async def run(self) -> None:
        """Send until nothing is left. Raises DemoError at an answer that cannot be followed."""
        async with self._http:
            while (batch := await self._outbox.take()) is not None:
                await self._deal_with(batch)
                self._outbox.release()

    async def _deal_with(self, batch: Batch) -> None:
        plan = batch.plan
        if plan.give_up_s is not None:
            await self._give_up(batch, plan.give_up_s)
            batch.plan = replace(plan, give_up_s=None)
            self._outbox.push(batch, plan.retry_s)
            return
        replies = [self._send(batch)]
        if plan.hedge_s is not None:
            self._tally.hedges += 1
            batch.plan = replace(plan, hedge_s=None)
            replies.append(self._send(batch, plan.hedge_s))
        age_s = time.monotonic() - batch.made_s
        busy_s = self._settle(batch, await asyncio.gather(*replies), age_s)
        # A client that has to wait starts nothing else meanwhile.
        await asyncio.sleep(busy_s)

    async def _give_up(self, batch: Batch, after_s: float) -> None:
        """Send, and disconnect after a time without reading the reply."""
        try:
            async with (
                asyncio.timeout(after_s),
                self._http.stream("POST", self._url(batch), **_body(batch)),
            ):
                pass
        except TimeoutError:
            pass
        except httpx.TransportError as error:
            self._note_failure(batch, error)
            return
        self._note_sent(batch)
        self._tally.timeouts += 1

    def _url(self, batch: Batch) -> str:
        """Where the next send of *batch* goes: never twice in a row to the same of several."""
        return self._urls[batch.take_turn() % len(self._urls)]

    async def _send(self, batch: Batch, delay_s: float = 0.0) -> Reply:
        await asyncio.sleep(delay_s)
        try:
            response = await self._http.post(self._url(batch), **_body(batch))
        except httpx.TransportError as error:
            self._note_failure(batch, error)
            # Here, so that a client starts nothing new while the service is down.
            await asyncio.sleep(self._jitter.uniform(0.1, 0.3))
            return 0.0
        self._note_sent(batch)
        if response.status_code != httpx.codes.OK:
            self._tally.unavailable += 1
            return retry_after(read_problem(response))
        results: list[Answer] = response.json()["results"]
        if len(results) != len(batch.names):
            raise DemoError(f"{len(results)} results for {len(batch.names)} items")
        return results

    def _note_sent(self, batch: Batch) -> None:
        self._tally.requests += 1
        self._tally.sent.update(batch.names)

    def _note_failure(self, batch: Batch, error: httpx.TransportError) -> None:
        if isinstance(error, httpx.ConnectError):
            self._tally.refused += 1
        else:
            self._note_sent(batch)
            self._tally.lost += 1

    def _settle(self, batch: Batch, replies: Sequence[Reply], age_s: float) -> float:
        """Process the answers, push what is left, and return how long the service is busy."""
        states = bytearray([AT_FIRST[batch.known]]) * len(batch.names)
        busy_s = max((reply for reply in replies if isinstance(reply, float)), default=0.0)
        pending_s = 0.0
        answered = [reply for reply in replies if isinstance(reply, list)]
        for reply in answered:
            for position, answer in enumerate(reply):
                wait_s = self._take_in(batch, position, answer, states)
                if answer.get("code") == "token_pending":
                    pending_s = max(pending_s, wait_s)
                else:
                    busy_s = max(busy_s, wait_s)
        wait_s = max(busy_s, pending_s)
        if answered and age_s > ACCEPT_LIMIT_S:
            self._tally.adds_late += len(states) - states.count(UNKNOWN)
        if batch.known is Known.NOTHING:
            self._follow_up(batch, states, wait_s)
        elif not answered:
            self._outbox.push(batch, wait_s)
        return busy_s if UNKNOWN in states else 0.0

    def _take_in(self, batch: Batch, position: int, answer: Answer, states: bytearray) -> float:
        """Record one answer in *states*, and return how long it asks to wait."""
        state = states[position]
        if "code" not in answer:
            # None if the service does not report it: then it is the first, unless known otherwise.
            replayed = answer["replayed"]
            if replayed or (replayed is None and state == FRESH):
                self._tally.collapsed[answer["counter"]] += 1
            states[position] = (state or REPLAYED) if replayed else FRESH
            is_wrong = state == VOID or (replayed is False and state == FRESH)
            is_wrong = is_wrong or answer["counter"] != batch.names[position]
        elif answer["applied"] is None and answer["retry"] == "same_token":
            is_pending = answer["code"] == "token_pending"
            self._tally.adds_pending += is_pending
            self._tally.adds_untold += not is_pending
            return retry_after(answer)
        elif answer["applied"] is False and answer["retry"] == "new_token":
            states[position] = VOID
            is_wrong = state in (REPLAYED, FRESH)
        else:
            raise DemoError(f"{batch.items[position]} was answered with {answer}")
        if is_wrong:
            self._tally.contradict(f"{batch.items[position]} ({batch.known.value}): {answer}")
        return 0.0

    def _follow_up(self, batch: Batch, states: bytearray, wait_s: float) -> None:
        """Retry adds without a definite answer, and voided ones under a new token."""
        applied = [position for position, state in enumerate(states) if state in (REPLAYED, FRESH)]
        self._tally.adds_done += len(applied)
        self._progress(len(applied))
        left = Plan(duplicate_s=batch.plan.duplicate_s)
        if applied and left.duplicate_s is not None:
            self._tally.duplicates += 1
            self._outbox.push(batch.pick(applied, Plan(), Known.APPLIED), left.duplicate_s)
            left = Plan()
        if len(applied) == len(states):
            return
        if unknown := [position for position, state in enumerate(states) if state == UNKNOWN]:
            self._outbox.push(batch.pick(unknown, left), wait_s)
        if void := [position for position, state in enumerate(states) if state == VOID]:
            self._tally.adds_voided += len(void)
            names = [batch.names[position] for position in void]
            self._outbox.push(self._feed.make(names, Plan() if unknown else left, batch.turn), 0.0)
            # A definite answer must stay true: the voided tokens are sent again.
            self._outbox.push(batch.pick(void, Plan(), Known.VOID), RETRY_AFTER_S)


def _body(batch: Batch) -> dict[str, Any]:
    body = '{"items":[' + ",".join(batch.items) + "]}"
    return {"content": body.encode(), "headers": {"Content-Type": "application/json"}}


def retry_after(problem: Answer) -> float:
    """The seconds that a problem asks to wait before the same token is sent again."""
    return float(problem.get("retry_after", RETRY_AFTER_S))


def read_problem(response: httpx.Response) -> Answer:
    """Return the problem of a rejected request if it can be retried.

    Raises DemoError otherwise.
    """
    try:
        problem: Answer = response.json()
    except ValueError:
        problem = {}
    if response.status_code < SERVER_ERROR and problem.get("retry") != "same_token":
        raise DemoError(f"HTTP {response.status_code}: {response.text[:1_000]}")
    if "Retry-After" in response.headers:
        problem["retry_after"] = response.headers["Retry-After"]
    return problem
