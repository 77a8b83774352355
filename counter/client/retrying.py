"""When to try again: one story for both clients, told without waiting and without a network.

A story is a generator. It yields what is to be done (:class:`Send`, :class:`Pause`), is sent what
came of it, and returns the result; :func:`drive` and :func:`drive_async` do what it asks.

No library does this: what is there retries a function by its exception, and knows neither a budget
that calls share, nor a new token where the service says that the old one is void, nor one clock for
threads and event loops.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from counter.client.calls import Call, Reply, Request, tokens
from counter.client.failures import UnexpectedAnswerError, UnreachableError
from counter.client.options import Options
from counter.client.tokens import Token
from counter.errors import CounterError, TokenConflictError, TokenTooOldError

T = TypeVar("T")
Answer = Reply | UnreachableError | UnexpectedAnswerError


class Send(NamedTuple):
    """Send *request*; the answer is a Reply, or the error in its place."""

    request: Request
    timeout_s: float
    #: How many were sent before it: another one goes to another base URL.
    number: int


class Pause(NamedTuple):
    """Wait; there is no answer."""

    seconds: float


class Do(NamedTuple):
    """Call something that may wait for a disk; the answer is what it returns."""

    work: Callable[[], Any]


Effect = Send | Pause | Do
Story = Generator[Effect, Any, T]


@dataclass(slots=True)
class Budget:
    """Retries that all calls of a client share: a bucket that time and calls fill.

    Without it, an outage is answered with many times the usual load.
    """

    at_once: float
    per_s: float
    per_call: float
    left: float
    then_s: float
    lock: Lock
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def of(cls, options: Options, now_s: float) -> Budget:
        at_once = options.retries_at_once
        return cls(at_once, options.retries_per_s, options.retries_per_call, at_once, now_s, Lock())

    def call(self) -> None:
        """One more call, which gives a part of a retry."""
        if self.pid != os.getpid():
            # Forked while another thread held the lock, perhaps, which is not in this process.
            self.lock, self.pid = Lock(), os.getpid()
        with self.lock:
            self.left = min(self.at_once, self.left + self.per_call)

    def take(self, now_s: float, wait_max_s: float) -> float | None:
        """Take one retry: the seconds until it may be made, or None where it takes longer than
        *wait_max_s* (and nothing is taken)."""
        with self.lock:
            self.left = min(self.at_once, self.left + max(0.0, now_s - self.then_s) * self.per_s)
            self.then_s = now_s
            if self.left >= 1:
                self.left -= 1
                return 0.0
            if self.per_s == 0 or (1 - self.left) / self.per_s > wait_max_s:
                return None
            wait_s = (1 - self.left) / self.per_s
            self.left -= 1
            return wait_s


@dataclass(frozen=True, slots=True)
class Policy:
    """The options, the budget, and where time and chance come from."""

    options: Options
    budget: Budget
    now_s: Callable[[], float]
    #: A number from 0 to its argument: full jitter.
    draw: Callable[[float], float] = lambda most: random.uniform(0.0, most)

    def pause_s(self, attempts: int, error: CounterError | None) -> float:
        """How long to wait after *attempts* attempts, and not less than the service asks for."""
        first_s, most_s = self.options.backoff_first_s, self.options.backoff_max_s
        jitter_s = self.draw(min(most_s, first_s * 2 ** min(attempts, 32)))
        asked_us = 0 if error is None else error.retry_after_us or 0
        return asked_us / 1e6 + jitter_s


def attempts(call: Call[T], policy: Policy) -> Story[T]:
    """Make *call* until there is a definite answer, or its deadline has come.

    Raises the CounterError of a definite refusal; at the deadline UnknownOutcomeError where a token
    was sent, else the last attempt's error.
    """
    options, now_s = policy.options, policy.now_s
    end_s = now_s() + options.deadline_s
    policy.budget.call()
    number = 0
    unknown = sent = False
    while True:
        left_s = max(0.001, end_s - now_s())
        try:
            answer = yield Send(call.request, min(options.attempt_timeout_s, left_s), number)
            number += 1
            return call.result(reply_of(answer))
        except CounterError as error:
            arrived = may_have_arrived(error)
            sent = sent or arrived
            if error.retry == "new_token" and call.renewed is not None:
                # The old token never counts, and was not the program's choice.
                unknown = False
                left_s = max(0.001, end_s - now_s())
                timeout_s = min(options.attempt_timeout_s, left_s)
                call = call.renewed((yield from fresh_tokens(1, timeout_s))[0])
            elif error.retry != "same_token":
                if unknown and not isinstance(error, TokenConflictError | TokenTooOldError):
                    # What refuses the retry says nothing of the attempt before it.
                    raise call.given_up(error, "the retry was refused") from error
                raise
            elif arrived:
                unknown = True
            pause_s = policy.pause_s(number, error)
            left_s = end_s - now_s() - pause_s
            budget_s = policy.budget.take(now_s(), left_s) if left_s > 0 else None
            if budget_s is None:
                why = _why(number, policy, left_s)
                raise call.given_up(error, why, sent=sent) from error
            yield Pause(max(pause_s, budget_s))


def _why(number: int, policy: Policy, left_s: float) -> str:
    """Why no attempt follows the *number* that were made; *left_s* is what a pause would leave."""
    made = f"no definite answer in {number} attempt{'' if number == 1 else 's'}"
    if left_s <= 0:
        return f"{made}, and the next would be past the deadline of {policy.options.deadline_s:g} s"
    return f"{made}, and the retries that all calls share are used up"


def may_have_arrived(error: CounterError) -> bool:
    """Whether the attempt that ended with *error* may have reached the service."""
    return not isinstance(error, UnreachableError) or error.sent


def fresh_tokens(count: int, timeout_s: float) -> Story[list[Token]]:
    """*count* tokens in place of old ones: with the service's time, for a wrong clock may be what
    made those old; with this machine's where there is no answer."""
    asked = tokens(count)
    found: list[Token] = []
    with suppress(CounterError):
        found = asked.result(reply_of((yield Send(asked.request, timeout_s, 0))))
    # Another number of them is no answer of the service's.
    return found if len(found) == count else [Token.new() for _ in range(count)]


def reply_of(answer: Answer) -> Reply:
    """*answer*, raised if there was none."""
    if not isinstance(answer, Reply):
        raise answer
    return answer


def drive(story: Story[T], do: Callable[[Effect], Any]) -> T:
    """Do what *story* asks; its result. What cannot be done, because the client was closed
    meanwhile, the story is told: it knows what was sent before."""
    try:
        effect = next(story)
        while True:
            try:
                done = do(effect)
            except CounterError as error:
                effect = story.throw(error)
            else:
                effect = story.send(done)
    except StopIteration as end:
        result: T = end.value
        return result


async def drive_async(story: Story[T], do: Callable[[Effect], Awaitable[Any]]) -> T:
    """The same in an event loop."""
    try:
        effect = next(story)
        while True:
            try:
                done = await do(effect)
            except CounterError as error:
                effect = story.throw(error)
            else:
                effect = story.send(done)
    except StopIteration as end:
        result: T = end.value
        return result
