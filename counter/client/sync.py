"""The client for threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from counter.client import answers
from counter.client.buffer import Buffer
from counter.client.buffering import Bounds
from counter.client.calls import Call, Calls, Items, tokens
from counter.client.delivery import Delivery
from counter.client.failures import Unfinished
from counter.client.options import Options
from counter.client.retrying import Budget, Effect, Pause, Policy, Send, attempts, drive
from counter.client.tokens import Credential, Token
from counter.client.transport import AsyncTransport, HedgingTransport, SyncTransport
from counter.errors import CounterError, TokenTooOldError

T = TypeVar("T")


class CounterClient:
    """Counts in one *namespace* of the service at *url* (or at the first of several that answers).

    Safe to share between threads, and usable after a fork. Each call that adds carries one token
    for all its attempts, so it counts once however often it is sent; ``token=`` gives one of the
    program's own, to finish a story in another call or another process. In a BEST_EFFORT namespace
    nothing makes a retry safe (``Added.retry_safe`` is False there).

    Every call raises a CounterError: the service's own kinds for a definite refusal,
    UnknownOutcomeError (with the token) for an add whose end is not known at the deadline,
    UnreachableError for a read that got no answer.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        namespace: str = "default",
        *,
        api_key: str | None = None,
        options: Options | None = None,
    ) -> None:
        urls = [url] if isinstance(url, str) else list(url)
        self._options = options or Options()
        self._calls = Calls(namespace)
        budget = Budget.of(self._options, time.monotonic())
        self._policy = Policy(self._options, budget, time.monotonic)
        self._transport: SyncTransport | HedgingTransport
        if self._options.hedge_after_s is None:
            self._transport = SyncTransport(urls, api_key, self._options)
        else:
            self._transport = HedgingTransport(
                lambda: AsyncTransport(urls, api_key, self._options, budget)
            )

    def __enter__(self) -> CounterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._transport.close()

    def add(
        self, counter: str, delta: int = 1, *, token: Credential | None = None
    ) -> answers.Added:
        """Add *delta*, any signed 64-bit integer, once for the token."""
        return self._call(self._calls.add(counter, delta, token))

    def add_and_get(
        self, counter: str, delta: int = 1, *, token: Credential | None = None
    ) -> answers.AddedCount:
        """The same, and the count with the add in it."""
        return self._call(self._calls.add_and_get(counter, delta, token))

    def clear(self, counter: str, *, token: Credential | None = None) -> answers.Cleared:
        """Set the counter to 0 as of the token's time."""
        return self._call(self._calls.clear(counter, token))

    def get(self, counter: str, *, max_staleness: str | None = None) -> answers.Count:
        """The count; *max_staleness* is a duration such as ``5s``, and ``0s`` is accurate."""
        return self._call(self._calls.get(counter, max_staleness))

    def get_many(
        self, counters: Sequence[str], *, max_staleness: str | None = None
    ) -> list[answers.Count]:
        """The counts of up to 1,000 counters, in order."""
        return self._call(self._calls.batch_get(counters, max_staleness))

    def batch(self, items: Items) -> list[answers.Added | CounterError]:
        """Add to up to 1,000 counters, a token each; what became of each, in order.

        An item that is refused is its error; one whose end is not known at the deadline is an
        UnknownOutcomeError, and spoils no other.
        """
        delivery = Delivery.of_items(self._calls, items)
        return drive(delivery.until_deadline(self._policy), self._do)

    def atomic(self, items: Items, *, token: Credential | None = None) -> list[answers.Added]:
        """Up to 100 adds under one token: all of them are counted, or none."""
        return self._call(self._calls.atomic(items, token))

    def resolve(self, unfinished: Unfinished | str) -> answers.Resolved:
        """Finish what an UnknownOutcomeError left (``error.unfinished``, or ``str()`` of it).

        The very same is sent again. While the token is young it is counted by that, at the latest;
        an old one is found out about.
        """
        if isinstance(unfinished, str):
            unfinished = Unfinished.parse(unfinished)
        try:
            return self._call(self._calls.resolve(unfinished))
        except TokenTooOldError as error:
            if error.applied is False:
                return answers.Resolved(applied=False, detail=error.detail)
            raise

    def tokens(self, count: int = 1) -> list[Token]:
        """1 to 1,000 tokens with the service's time, for a machine whose clock is wrong."""
        return self._call(tokens(count))

    def counters(self, prefix: str | None = None) -> Iterator[str]:
        """The names of all counters, in code point order, read page by page."""
        page = None
        while True:
            names, page = self._call(self._calls.counters(prefix, page))
            yield from names
            if page is None:
                return

    def events(
        self, counter: str, start: datetime | None = None, end: datetime | None = None
    ) -> Iterator[answers.Event]:
        """The events of ``[start, end)``, latest first, read page by page."""
        page = None
        while True:
            found, page = self._call(self._calls.events(counter, start, end, page))
            yield from found
            if page is None:
                return

    def history(
        self,
        counter: str,
        start: datetime | None = None,
        end: datetime | None = None,
        step: str | None = None,
    ) -> Iterator[answers.Point]:
        """The count at the end of each *step*, a duration such as ``1m``, of ``[start, end)``."""
        yield from self._call(self._calls.history(counter, start, end, step))

    def buffer(
        self,
        *,
        max_delay: float = 0.1,
        max_items: int = 100_000,
        spool: str | Path | None = None,
    ) -> Buffer:
        """A buffer that merges the adds of one counter, and sends every *max_delay* seconds.

        It holds up to *max_items* counters that wait; *spool* is a file to keep them in, so that
        they survive the end of this process. Make it after a fork, not before.
        """
        bounds = Bounds(max_delay, max_items)
        return Buffer(self._calls, self._policy, self._transport.send, bounds, spool)

    def _call(self, call: Call[T]) -> T:
        return drive(attempts(call, self._policy), self._do)

    def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return self._transport.send(effect)
        if isinstance(effect, Pause):
            return time.sleep(effect.seconds)
        return effect.work()
