"""The retry logic of both clients, as generators without I/O.

A generator yields effects (:class:`Send`, :class:`Pause`, :class:`Do`), receives their results, and
returns the call's result; :func:`drive` and :func:`drive_async` execute the effects.

Retry libraries retry a function by its exception. They have no budget shared by calls, do not
replace a void token, and do not share one clock between threads and event loops.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from counter_client.calls import Call, Request, Response, tokens
from counter_client.errors import (
    CounterError,
    HoldSettledError,
    TokenConflictError,
    TokenTooOldError,
)
from counter_client.failures import UnexpectedAnswerError, UnreachableError
from counter_client.options import Options
from counter_client.tokens import Token

T = TypeVar("T")
Answer = Response | UnreachableError | UnexpectedAnswerError


class Send(NamedTuple):
    """Send *request*; the result is a Response, or an error."""

    request: Request
    timeout_s: float
    #: Attempts before it; it selects the base URL.
    number: int


class Pause(NamedTuple):
    """Wait; there is no result."""

    seconds: float


class Do(NamedTuple):
    """Call *work*, which may wait for a disk; the result is what it returns."""

    work: Callable[[], Any]


Effect = Send | Pause | Do
Steps = Generator[Effect, Any, T]


class ProcessLock:
    """A lock that is free in a forked child: a thread of the parent may hold it during the fork."""

    def __init__(self) -> None:
        self._locks: dict[int, Lock] = {}

    def here(self) -> Lock:
        """Return the lock of this process."""
        return self._locks.setdefault(os.getpid(), Lock())


@dataclass(slots=True)
class Budget:
    """A token bucket of retries, shared by all calls of a client and filled by time and calls.

    Without it, clients would multiply their load during an outage.
    """

    at_once: float
    per_s: float
    per_call: float
    left: float
    then_s: float
    lock: ProcessLock = field(default_factory=ProcessLock)

    @classmethod
    def of(cls, options: Options, now_s: float) -> Budget:
        at_once = options.retries_at_once
        return cls(at_once, options.retries_per_s, options.retries_per_call, at_once, now_s)

    def call(self) -> None:
        """Add a call's share to the bucket."""
        with self.lock.here():
            self.left = min(self.at_once, self.left + self.per_call)

    def reserve(self, now_s: float, wait_max_s: float) -> float | None:
        """Take one retry; return the seconds to wait for it, or None if that exceeds *wait_max_s*
        (then nothing is taken)."""
        with self.lock.here():
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
    """The options, the budget, the clock and the random source."""

    options: Options
    budget: Budget
    now_s: Callable[[], float]
    #: Returns a random number from 0 to its argument (full jitter).
    draw: Callable[[float], float] = lambda most: random.uniform(0.0, most)
    #: The clock of tokens.
    wall_us: Callable[[], int] = lambda: time.time_ns() // 1_000

    def pause_s(self, attempts: int, error: CounterError | None) -> float:
        """Return the seconds to wait after *attempts* attempts, at least what the service asks."""
        first_s, most_s = self.options.backoff_first_s, self.options.backoff_max_s
        jitter_s = self.draw(min(most_s, first_s * 2 ** min(attempts, 32)))
        asked_us = 0 if error is None else error.retry_after_us or 0
        return asked_us / 1e6 + jitter_s


def attempts(call: Call[T], policy: Policy) -> Steps[T]:
    """Repeat *call* until there is a definite answer or its deadline passes.

    A void token is replaced right before the next attempt. Raises the CounterError of a definite
    refusal, and of a void token if there is no time for another one; at the deadline
    UnknownOutcomeError if a token was sent, else the last attempt's error.
    """
    options, now_s = policy.options, policy.now_s
    end_s = now_s() + options.deadline_s
    policy.budget.call()
    number = 0
    unknown = sent = False
    first_us = policy.wall_us()
    answer: Answer | None
    while True:
        timeout_s = min(options.attempt_timeout_s, max(0.001, end_s - now_s()))
        if call.unfinished is not None:
            end_us = policy.wall_us() + int(timeout_s * 1e6)
            # What the program resolves was sent by another call.
            call.unfinished.check_honoured(end_us, sent=sent or number == 0)
        answer, is_void = None, False
        try:
            answer = yield Send(call.request, timeout_s, number)
            number += 1
            return call.result(response_of(answer))
        except CounterError as error:
            if isinstance(answer, Response):
                call = call.with_ttl(answer.ttl_s, first_us)
            arrived = may_have_arrived(error)
            sent = sent or arrived
            is_too_old = isinstance(error, TokenTooOldError) and not unknown
            if call.renewed is not None and (error.retry == "new_token" or is_too_old):
                # The old token can never count, and the program did not choose it.
                unknown, is_void = False, True
            elif error.retry != "same_token":
                if unknown and not decides(error):
                    # A refused retry says nothing about the attempt before it.
                    raise call.given_up(error, "the retry was refused") from error
                if isinstance(error, UnexpectedAnswerError):
                    # Only the service refuses: a proxy may answer after it passed the add on.
                    raise call.given_up(error, "the answer is not the service's") from error
                raise
            elif arrived:
                unknown = True
            pause_s = policy.pause_s(number, error)
            left_s = end_s - now_s() - pause_s
            budget_s = policy.budget.reserve(now_s(), left_s) if left_s > 0 else None
            if budget_s is None:
                if is_void:
                    raise
                why = _why(number, policy, left_s)
                raise call.given_up(error, why, sent=sent) from error
            yield Pause(max(pause_s, budget_s))
            if is_void and call.renewed is not None:
                # After the pause, which may be longer than the service accepts a token.
                timeout_s = min(options.attempt_timeout_s, max(0.001, end_s - now_s()))
                call = call.renewed((yield from fresh_tokens(1, timeout_s))[0])


def _why(number: int, policy: Policy, left_s: float) -> str:
    """Say why there is no retry after *number* attempts; *left_s* is the time after a pause."""
    made = f"no definite answer in {number} attempt{'' if number == 1 else 's'}"
    if left_s <= 0:
        return f"{made}, and the next would be past the deadline of {policy.options.deadline_s:g} s"
    return f"{made}, and the retries that all calls share are used up"


def decides(error: CounterError) -> bool:
    """Whether a refused retry says what became of the attempts before it."""
    return error.applied is False or isinstance(error, TokenConflictError | HoldSettledError)


def may_have_arrived(error: CounterError) -> bool:
    """Whether the attempt that ended with *error* may have reached the service."""
    return not isinstance(error, UnreachableError) or error.sent


def fresh_tokens(count: int, timeout_s: float) -> Steps[list[Token]]:
    """Return *count* new tokens with the service's time, because a wrong clock may have made the
    old ones void; with this machine's time if there is no answer."""
    made = [Token.new() for _ in range(count)]
    asked = tokens(count)
    with suppress(CounterError):
        found = asked.result(response_of((yield Send(asked.request, timeout_s, 0))))
        # A proxy may give the same answer to two clients: only the times are the service's.
        pairs = zip(made, found, strict=True)
        return [Token(own.nonce, theirs.generation_time_us) for own, theirs in pairs]
    return made


def response_of(answer: Answer) -> Response:
    """Return *answer* if it is a Response, else raise it."""
    if not isinstance(answer, Response):
        raise answer
    return answer


def drive(steps: Steps[T], do: Callable[[Effect], Any]) -> T:
    """Execute the effects of *steps* and return its result.

    An error of an effect, such as a closed client, is thrown into *steps*."""
    try:
        effect = next(steps)
        while True:
            try:
                done = do(effect)
            except CounterError as error:
                effect = steps.throw(error)
            else:
                effect = steps.send(done)
    except StopIteration as end:
        result: T = end.value
        return result


async def drive_async(steps: Steps[T], do: Callable[[Effect], Awaitable[Any]]) -> T:
    """The same as :func:`drive` in an event loop."""
    try:
        effect = next(steps)
        while True:
            try:
                done = await do(effect)
            except CounterError as error:
                effect = steps.throw(error)
            else:
                effect = steps.send(done)
    except StopIteration as end:
        result: T = end.value
        return result
