"""Batches in flight and the backlog of a buffer.

Every item is sent under its own token until its outcome is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from counter_client.answers import Added
from counter_client.calls import BATCH_ITEMS_MAX, BODY_BYTES_MAX, Call, Calls, Response, item_text
from counter_client.errors import (
    BodyTooLargeError,
    CounterError,
    InvalidBodyError,
    TokenTooOldError,
)
from counter_client.failures import (
    ClosedError,
    Rejected,
    UnexpectedAnswerError,
    Unfinished,
    UnknownOutcomeError,
    UnreachableError,
)
from counter_client.retrying import (
    Answer,
    Do,
    Pause,
    Policy,
    Send,
    Steps,
    decides,
    fresh_tokens,
    may_have_arrived,
    response_of,
)
from counter_client.tokens import (
    INT64_MAX,
    INT64_MIN,
    NO_BOUNDS,
    NONCE_BYTES,
    Bounds,
    Items,
    Token,
    checked_items,
)

#: Bytes of a body that are left for its items.
_ITEMS_BYTES_MAX: Final = BODY_BYTES_MAX - 64
_FOR_EVER_S: Final = float("inf")
#: Errors that are not from a counter service, whatever they say of a retry.
_NO_REFUSALS: Final = (UnexpectedAnswerError, UnreachableError)
#: Longest pause of a delivery without a deadline, whatever Retry-After says.
_PAUSE_MAX_S: Final = 3_600.0


@dataclass(slots=True, eq=False)
class Item:
    """One add of a batch. Its token changes only after the service declared it void."""

    counter: str
    delta: int
    token: Token
    #: Its row in a spool.
    row: int = 0
    #: Whether an attempt under this token is in flight, or may have been counted.
    sent: bool = False
    #: Whether an attempt under this token that has ended may have been counted.
    maybe_counted: bool = False
    #: The service's answer or the final error; None while it is not known.
    result: Added | CounterError | None = None
    trouble: CounterError | None = None
    bounds: Bounds = NO_BOUNDS

    @property
    def is_void(self) -> bool:
        """Whether the service declared the token void, and the item has no other one yet."""
        trouble = self.trouble
        return self.result is None and trouble is not None and trouble.retry == "new_token"

    def text(self) -> str:
        return item_text(self.counter, self.delta, self.token, self.bounds)


Renewed = Sequence[tuple[Item, Token]]


class Delivery:
    """Send *items* until the outcome of each is known.

    *renew* makes new tokens durable before their first use.
    """

    def __init__(
        self, calls: Calls, items: Sequence[Item], renew: Callable[[Renewed], None] | None = None
    ) -> None:
        self.items = items
        #: The error of the latest request; None if it succeeded.
        self.trouble: CounterError | None = None
        self._calls = calls
        self._renew = renew
        self._most = BATCH_ITEMS_MAX
        #: How long the service honours a token, if it said so; the shortest.
        self._ttl_s: int | None = None

    @classmethod
    def of_items(cls, calls: Calls, items: Items) -> Delivery:
        """Make a batch under new tokens. Raises InvalidParameterError."""
        found = checked_items(items, BATCH_ITEMS_MAX)
        return cls(calls, [Item(x.counter, x.delta, Token.new(), bounds=x.bounds) for x in found])

    def until_deadline(self, policy: Policy) -> Steps[list[Added | CounterError]]:
        """Return each item's result at the deadline. Raises what rejects the whole batch."""
        policy.budget.call()
        try:
            yield from self._attempts(policy, policy.now_s() + policy.options.deadline_s)
        except ClosedError as error:
            self.trouble = error
        is_open = any(each.maybe_counted or each.result is not None for each in self.items)
        if self.trouble is not None and self.trouble.retry == "never" and not is_open:
            raise self.trouble
        return [self._outcome(each) for each in self.items]

    def for_ever(self, policy: Policy) -> Steps[None]:
        """Return when each outcome is known. ``trouble`` has the current error."""
        yield from self._attempts(policy, _FOR_EVER_S)

    def _outcome(self, item: Item) -> Added | CounterError:
        if item.result is not None:
            return item.result
        trouble = item.trouble
        if trouble is not None and trouble.retry != "same_token" and not item.maybe_counted:
            return trouble
        return self._unknown_outcome(item)

    def _unknown_outcome(self, item: Item) -> UnknownOutcomeError:
        unknown = UnknownOutcomeError(
            f"it is not known whether the add to {item.counter!r} is counted",
            self._unfinished(item),
            sent=item.maybe_counted,
        )
        unknown.__cause__ = item.trouble or self.trouble
        return unknown

    def _unfinished(self, item: Item) -> Unfinished:
        found = self._calls.unfinished(item.counter, item.delta, item.token, item.bounds)
        return found if self._ttl_s is None else found.with_ttl(self._ttl_s, 0)

    def _is_over(self, item: Item, end_us: int) -> bool:
        """Whether the token of *item* may not be honoured until *end_us*."""
        until_us = None if self._ttl_s is None else self._unfinished(item).until_us
        return until_us is not None and until_us < end_us

    def _give_up(self, items: Sequence[Item], end_us: int) -> None:
        """End those of *items* that may be counted, and whose tokens may not be honoured until
        *end_us*."""
        if self._ttl_s is None:
            return
        for each in items:
            if not each.maybe_counted:
                continue
            try:
                self._unfinished(each).check_honoured(end_us)
            except UnknownOutcomeError as error:
                error.__cause__ = each.trouble or self.trouble
                each.result = error

    def _attempts(self, policy: Policy, end_s: float) -> Steps[None]:
        for_ever = end_s == _FOR_EVER_S
        number = failures = renewals = 0
        while left := [each for each in self.items if each.result is None]:
            timeout_s = min(policy.options.attempt_timeout_s, max(0.001, end_s - policy.now_s()))
            # After the pause, which may be longer than the service accepts a token.
            yield from self._renew_void(left[: self._most], timeout_s, policy.wall_us())
            timeout_s = min(timeout_s, max(0.001, end_s - policy.now_s()))
            self._give_up(left, policy.wall_us() + int(timeout_s * 1e6))
            left = [each for each in left if each.result is None]
            if not left:
                break
            chunk, texts = self._cut(left)
            adds = [(each.counter, each.delta, each.token) for each in chunk]
            call = self._calls.batch(adds, texts)
            for each in chunk:
                each.sent = True
            try:
                answer = yield Send(call.request, timeout_s, number)
            except ClosedError:
                # Nothing was sent.
                for each in chunk:
                    each.sent = each.maybe_counted
                raise
            number += 1
            if isinstance(answer, Response) and answer.ttl_s is not None:
                ttl_s = answer.ttl_s if self._ttl_s is None else self._ttl_s
                self._ttl_s = min(answer.ttl_s, ttl_s)
            error = self._read(chunk, answer, call)
            for each in chunk:
                each.sent = each.maybe_counted
            failures = 0 if error is None or error.retry == "new_token" else failures + 1
            renewals = renewals + 1 if any(each.is_void for each in chunk) else 0
            if not failures and not renewals:
                continue
            is_refused = error is not None and error is self.trouble and error.retry == "never"
            if is_refused and not for_ever:
                return
            # New tokens may be void too, if the service gives none and the local clock is slow.
            pause_s = policy.pause_s(failures or renewals, error)
            if for_ever:
                pause_s = min(pause_s, _PAUSE_MAX_S)
            else:
                left_s = end_s - policy.now_s() - pause_s
                budget_s = policy.budget.reserve(policy.now_s(), left_s) if left_s > 0 else None
                if budget_s is None:
                    return
                pause_s = max(pause_s, budget_s)
            yield Pause(pause_s)

    def _cut(self, left: list[Item]) -> tuple[list[Item], list[str]]:
        """Return as many of *left* as fit into one body, and their texts."""
        texts: list[str] = []
        free = _ITEMS_BYTES_MAX
        for each in left[: self._most]:
            text = each.text()
            free -= (len(text) if text.isascii() else len(text.encode())) + 1
            if free < 0 and texts:
                break
            texts.append(text)
        return left[: len(texts)], texts

    def _read(
        self, chunk: list[Item], answer: Answer, call: Call[list[Added | CounterError]]
    ) -> CounterError | None:
        """Record each result of *chunk*; return the error that requires a pause, or None."""
        try:
            results = call.result(response_of(answer))
        except CounterError as error:
            if _is_too_much(error) and len(chunk) > 1:
                # The service has lower limits than the defaults.
                self._most = len(chunk) // 2
                return None
            self.trouble = error
            is_refusal = error.retry == "never" and not isinstance(error, _NO_REFUSALS)
            for each in chunk:
                if is_refusal:
                    each.trouble = error
                elif may_have_arrived(error):
                    each.maybe_counted = True
            return error
        self.trouble = None
        waiting: list[CounterError] = []
        for each, result in zip(chunk, results, strict=True):
            if isinstance(result, Added):
                each.result = result
                continue
            each.trouble = result
            if isinstance(result, TokenTooOldError) and not each.maybe_counted:
                # A new token cannot count it twice.
                result.retry = "new_token"
            if result.retry == "never":
                is_open = each.maybe_counted and not decides(result)
                each.result = self._unknown_outcome(each) if is_open else result
            else:
                each.maybe_counted = result.retry == "same_token"
                waiting.append(result)
        return min(waiting, key=lambda error: error.retry_after_us or 0, default=None)

    def _renew_void(self, items: Sequence[Item], timeout_s: float, now_us: int) -> Steps[None]:
        """Renew the tokens of *items* that are void, and those that are not counted and may not be
        honoured until the end of an attempt."""
        end_us = now_us + int(timeout_s * 1e6)
        void = [
            each
            for each in items
            if each.is_void or (not each.maybe_counted and self._is_over(each, end_us))
        ]
        if not void:
            return
        renewed = list(zip(void, (yield from fresh_tokens(len(void), timeout_s)), strict=True))
        if self._renew is not None:
            yield Do(partial(self._renew, renewed))
        for each, token in renewed:
            each.token, each.trouble, each.maybe_counted = token, None, False


def _is_too_much(error: CounterError) -> bool:
    return isinstance(error, BodyTooLargeError) or (
        isinstance(error, InvalidBodyError) and error.fields.get("field") == "items"
    )


PIECE_ITEMS_MAX: Final = BATCH_ITEMS_MAX


class Backlog:
    """Pending adds in memory; each is in one total or in one piece.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}
        self._piece: list[Item] = []
        self._piece_totals = 0
        #: How far the service's clock was ahead of this machine's when tokens were void.
        self._ahead_us = 0
        #: Totals ever added, and those of them that have ended: both only grow. The oldest are sent
        #: first, so the first N totals have ended once ``finished`` is N.
        self.begun = 0
        self.finished = 0

    def __len__(self) -> int:
        """Return the number of pending counters and items."""
        return len(self._totals) + len(self._piece)

    def put(self, adds: dict[str, int]) -> None:
        """Merge *adds*; the backlog takes ownership of the dictionary."""
        before = len(self._totals)
        if before:
            totals = self._totals
            for counter, delta in adds.items():
                totals[counter] = totals.get(counter, 0) + delta
        else:
            self._totals = adds
        self.begun += len(self._totals) - before

    def seal(self) -> list[Item]:
        """Return the piece in flight, or a new one of the oldest totals, each under its own token.
        Empty if nothing is pending."""
        if self._piece:
            return self._piece
        names = list(islice(self._totals, PIECE_ITEMS_MAX))
        parts = [(name, part) for name in names for part in _parts(self._totals[name])]
        time_us = _now_us() + self._ahead_us
        nonces = os.urandom(NONCE_BYTES * len(parts))
        piece = [
            Item(name, delta, Token(nonces[16 * at : 16 * at + 16], time_us), row=at + 1)
            for at, (name, delta) in enumerate(parts)
        ]
        self._save_sealed(names, piece)
        if len(names) == len(self._totals):
            # Faster than one by one in the usual case.
            self._totals = {}
        else:
            for name in names:
                del self._totals[name]
        self._piece, self._piece_totals = piece, len(names)
        return piece

    def _save_sealed(self, names: list[str], piece: list[Item]) -> None:
        """Save that *piece* replaces the totals of *names*. If this raises, nothing changed."""

    def renew(self, renewed: Renewed) -> None:
        """Record new tokens before their use. They carry the service's time: a machine with a slow
        clock would otherwise make only void tokens."""
        self._ahead_us = renewed[0][1].generation_time_us - _now_us()

    def finish(self) -> list[Rejected]:
        """End the piece, whose outcomes are all known; return its rejected items."""
        rejected = self.refused()
        self._save_finished()
        self.finished += self._piece_totals
        self._piece, self._piece_totals = [], 0
        return rejected

    def _save_finished(self) -> None:
        """Save that the piece has ended. If this raises, the piece is kept."""

    def refused(self) -> list[Rejected]:
        """Return the rejected items of the piece."""
        return [
            Rejected(each.counter, each.delta, each.result)
            for each in self._piece
            if isinstance(each.result, CounterError)
        ]

    def unfinished(self) -> Sequence[Item]:
        """Return the items that may be counted, but whose outcome is not known."""
        return [each for each in self._piece if each.sent and each.result is None]

    def unsent(self) -> Mapping[str, int]:
        """Return the pending totals that are not counted, by counter."""
        found = dict(self._totals)
        for each in self._piece:
            if each.result is None and not each.sent:
                found[each.counter] = found.get(each.counter, 0) + each.delta
        return found

    def close(self) -> None:
        """Release the storage."""


def _now_us() -> int:
    return time.time_ns() // 1_000


def _parts(total: int) -> Iterator[int]:
    """Split *total* into signed 64-bit integers."""
    while not INT64_MIN <= total <= INT64_MAX:
        part = INT64_MAX if total > 0 else INT64_MIN
        yield part
        total -= part
    yield total
