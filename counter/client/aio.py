"""The client for event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from counter.client import answers
from counter.client.async_buffer import AsyncBuffer
from counter.client.buffering import Bounds
from counter.client.calls import Call, Calls, Items, tokens
from counter.client.delivery import Delivery
from counter.client.failures import Unfinished
from counter.client.options import Options
from counter.client.retrying import Budget, Effect, Pause, Policy, Send, attempts, drive_async
from counter.client.tokens import Credential, Token
from counter.client.transport import AsyncTransport
from counter.errors import CounterError, TokenTooOldError

T = TypeVar("T")


class AsyncCounterClient:
    """What :class:`counter.client.CounterClient` is for threads, in one event loop: the same calls,
    the same answers, the same errors. A call that is cancelled may have been counted: give it a
    token of your own where that matters.
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
        self._transport = AsyncTransport(urls, api_key, self._options, budget)

    async def __aenter__(self) -> AsyncCounterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections."""
        await self._transport.close()

    async def add(
        self, counter: str, delta: int = 1, *, token: Credential | None = None
    ) -> answers.Added:
        """Add *delta*, any signed 64-bit integer, once for the token."""
        return await self._call(self._calls.add(counter, delta, token))

    async def add_and_get(
        self, counter: str, delta: int = 1, *, token: Credential | None = None
    ) -> answers.AddedCount:
        """The same, and the count with the add in it."""
        return await self._call(self._calls.add_and_get(counter, delta, token))

    async def clear(self, counter: str, *, token: Credential | None = None) -> answers.Cleared:
        """Set the counter to 0 as of the token's time."""
        return await self._call(self._calls.clear(counter, token))

    async def get(self, counter: str, *, max_staleness: str | None = None) -> answers.Count:
        """The count; *max_staleness* is a duration such as ``5s``, and ``0s`` is accurate."""
        return await self._call(self._calls.get(counter, max_staleness))

    async def get_many(
        self, counters: Sequence[str], *, max_staleness: str | None = None
    ) -> list[answers.Count]:
        """The counts of up to 1,000 counters, in order."""
        return await self._call(self._calls.batch_get(counters, max_staleness))

    async def batch(self, items: Items) -> list[answers.Added | CounterError]:
        """Add to up to 1,000 counters, a token each; what became of each, in order.

        An item that is refused is its error; one whose end is not known at the deadline is an
        UnknownOutcomeError, and spoils no other.
        """
        delivery = Delivery.of_items(self._calls, items)
        return await drive_async(delivery.until_deadline(self._policy), self._do)

    async def atomic(self, items: Items, *, token: Credential | None = None) -> list[answers.Added]:
        """Up to 100 adds under one token: all of them are counted, or none."""
        return await self._call(self._calls.atomic(items, token))

    async def resolve(self, unfinished: Unfinished | str) -> answers.Resolved:
        """Finish what an UnknownOutcomeError left (``error.unfinished``, or ``str()`` of it).

        The very same is sent again. While the token is young it is counted by that, at the latest;
        an old one is found out about.
        """
        if isinstance(unfinished, str):
            unfinished = Unfinished.parse(unfinished)
        try:
            return await self._call(self._calls.resolve(unfinished))
        except TokenTooOldError as error:
            if error.applied is False:
                return answers.Resolved(applied=False, detail=error.detail)
            raise

    async def tokens(self, count: int = 1) -> list[Token]:
        """1 to 1,000 tokens with the service's time, for a machine whose clock is wrong."""
        return await self._call(tokens(count))

    async def counters(self, prefix: str | None = None) -> AsyncIterator[str]:
        """The names of all counters, in code point order, read page by page."""
        page = None
        while True:
            names, page = await self._call(self._calls.counters(prefix, page))
            for each in names:
                yield each
            if page is None:
                return

    async def events(
        self, counter: str, start: datetime | None = None, end: datetime | None = None
    ) -> AsyncIterator[answers.Event]:
        """The events of ``[start, end)``, latest first, read page by page."""
        page = None
        while True:
            found, page = await self._call(self._calls.events(counter, start, end, page))
            for each in found:
                yield each
            if page is None:
                return

    async def history(
        self,
        counter: str,
        start: datetime | None = None,
        end: datetime | None = None,
        step: str | None = None,
    ) -> AsyncIterator[answers.Point]:
        """The count at the end of each *step*, a duration such as ``1m``, of ``[start, end)``."""
        for each in await self._call(self._calls.history(counter, start, end, step)):
            yield each

    def buffer(
        self,
        *,
        max_delay: float = 0.1,
        max_items: int = 100_000,
        spool: str | Path | None = None,
    ) -> AsyncBuffer:
        """A buffer that merges the adds of one counter, and sends every *max_delay* seconds.

        It holds up to *max_items* counters that wait; *spool* is a file to keep them in, so that
        they survive the end of this process.
        """
        bounds = Bounds(max_delay, max_items)
        return AsyncBuffer(self._calls, self._policy, self._transport.send, bounds, spool)

    async def _call(self, call: Call[T]) -> T:
        return await drive_async(attempts(call, self._policy), self._do)

    async def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return await self._transport.send(effect)
        if isinstance(effect, Pause):
            return await asyncio.sleep(effect.seconds)
        return effect.work()
