"""The asyncio client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from counter_client import answers
from counter_client.addresses import checked_urls
from counter_client.buffer import AsyncBuffer, Limits
from counter_client.calls import (
    ENDED,
    PAGE_ITEMS_MAX,
    Call,
    Calls,
    Held,
    Settings,
    namespaces,
    tokens,
)
from counter_client.delivery import Delivery
from counter_client.errors import CounterError, TokenTooOldError
from counter_client.failures import Unfinished, UnknownOutcomeError, unfinished_of
from counter_client.options import Options
from counter_client.retrying import Budget, Effect, Pause, Policy, Send, attempts, drive_async
from counter_client.tokens import Bounds, Credential, Items, Moment, Token
from counter_client.transport import AsyncTransport, LiveStream, LiveUpdate

T = TypeVar("T")


class _Background:
    """Calls that go on if the task that asked for them is cancelled."""

    def __init__(self, wait_s: float) -> None:
        #: How long such a call delays the error of a hold's block.
        self.wait_s = wait_s
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run *work* in a task of its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait for all calls."""
        while self._tasks:
            await asyncio.wait(self._tasks)


class AsyncHold(Held):
    """An open hold of an :class:`AsyncCounterClient`; see :class:`counter_client.Hold`.

    A settle or a release goes on if its task is cancelled; closing the client waits for it.
    """

    def __init__(
        self, client: AsyncCounterClient, began: answers.HoldCount, background: _Background
    ) -> None:
        super().__init__(began)
        self._client = client
        self._background = background
        #: The latest settle or release.
        self._ending: asyncio.Task[answers.HoldCount] | None = None

    async def settle(self, amount: int) -> answers.HoldCount:
        """Count *amount* and end the hold; see :meth:`AsyncCounterClient.settle_hold`.

        If it raises UnknownOutcomeError, or is cancelled, leaving the block does not release the
        hold.
        """
        with self.settling():
            return await self._end(self._client.settle_hold(self.id, amount))

    async def release(self) -> answers.HoldCount:
        """Give everything back; see :meth:`AsyncCounterClient.release_hold`."""
        with self.releasing():
            return await self._end(self._client.release_hold(self.id))

    async def extend(self, expires_in: str) -> answers.HoldState:
        """Let the hold expire later; see :meth:`AsyncCounterClient.extend_hold`."""
        found = await self._client.extend_hold(self.id, expires_in)
        self.expires_at = found.expires_at
        return found

    async def leave(self, error: BaseException | None) -> None:
        """Release the hold if it is open, after *error* in its block: then wait for that as long as
        for one attempt, and let it go on."""
        if error is None:
            if self.is_open:
                # It may have been ended by its id.
                with suppress(*ENDED):
                    await self.release()
            return
        if self.is_open:
            self._ending = self._background.start(self._client.release_hold(self.id))
        if self._ending is None:
            return
        done, _ = await asyncio.wait({self._ending}, timeout=self._background.wait_s)
        for each in done:
            failed = None if each.cancelled() else each.exception()
            if isinstance(failed, CounterError) and not isinstance(failed, ENDED):
                error.add_note(self.note(failed))

    async def _end(self, call: Coroutine[Any, Any, answers.HoldCount]) -> answers.HoldCount:
        self._ending = self._background.start(call)
        return await asyncio.shield(self._ending)


class AsyncHolding:
    """What :meth:`AsyncCounterClient.hold` returns, for ``async with`` or ``await``."""

    def __init__(
        self,
        client: AsyncCounterClient,
        call: Callable[[], Coroutine[Any, Any, answers.HoldCount]],
        background: _Background,
    ) -> None:
        self._client = client
        self._call = call
        self._background = background
        self._hold: AsyncHold | None = None

    def __await__(self) -> Generator[Any, None, AsyncHold]:
        return self._begin().__await__()

    async def __aenter__(self) -> AsyncHold:
        self._hold = await self._begin()
        return self._hold

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._hold is not None:
            await self._hold.leave(error)

    async def _begin(self) -> AsyncHold:
        beginning = self._background.start(self._call())
        try:
            return AsyncHold(self._client, await asyncio.shield(beginning), self._background)
        except asyncio.CancelledError:
            self._background.start(self._take_back(beginning))
            raise

    async def _take_back(self, beginning: asyncio.Task[answers.HoldCount]) -> None:
        """Release what was begun for a task that is cancelled."""
        # What did not begin is not held, and what cannot be released expires by itself.
        with suppress(CounterError):
            await self._client.release_hold((await beginning).id)


class AsyncCounterClient:
    """The same as :class:`counter_client.CounterClient`, for one event loop.

    A cancelled add may have been counted: pass your own token if that matters.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        namespace: str = "default",
        *,
        api_key: str | None = None,
        options: Options | None = None,
    ) -> None:
        urls = checked_urls(url)
        self._options = options or Options()
        self._calls = Calls(namespace)
        budget = Budget.of(self._options, time.monotonic())
        self._policy = Policy(self._options, budget, time.monotonic)
        self._transport = AsyncTransport(urls, api_key, self._options, budget)
        self._background = _Background(self._options.attempt_timeout_s)

    async def __aenter__(self) -> AsyncCounterClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, after the ends of holds that go on."""
        try:
            await self._background.finish()
        finally:
            await self._transport.close()

    async def add(
        self,
        counter: str,
        delta: int = 1,
        *,
        at_least: int | None = None,
        at_most: int | None = None,
        token: Credential | None = None,
    ) -> answers.Added:
        """Add *delta*, a signed 64-bit integer, once per *token* (a new one if None).

        Raises BoundReachedError, now and for every retry, if the add would take the count below
        *at_least* or above *at_most*, or past a bound of the namespace; TokenConflictError if the
        token was used with another payload, other bounds included; and UnknownOutcomeError if it is
        not known at the deadline whether the add is counted.
        """
        return await self._call(self._calls.add(counter, delta, token, Bounds(at_least, at_most)))

    async def add_and_get(
        self,
        counter: str,
        delta: int = 1,
        *,
        at_least: int | None = None,
        at_most: int | None = None,
        token: Credential | None = None,
    ) -> answers.AddedCount:
        """Add as :meth:`add` does; return the count including the add, exact as of ``as_of``."""
        bounds = Bounds(at_least, at_most)
        return await self._call(self._calls.add_and_get(counter, delta, token, bounds))

    async def clear(self, counter: str, *, token: Credential | None = None) -> answers.Cleared:
        """Set the counter to 0 as of the token's time.

        Adds with a time up to then are erased even if they arrive later. Raises as :meth:`add`
        does.
        """
        return await self._call(self._calls.clear(counter, token))

    async def delete(self, counter: str, *, token: Credential | None = None) -> answers.Cleared:
        """Clear the counter, and take its name off the list until a later add.

        Tokens keep their answers, and later adds count from 0. Raises as :meth:`add` does.
        """
        return await self._call(self._calls.delete(counter, token))

    async def get(self, counter: str, *, max_staleness: str | None = None) -> answers.Count:
        """Return the count and the instant it is exact as of; an unknown counter reads 0.

        *max_staleness* bounds the age of that instant, a duration such as ``5s``: ``0s`` is
        accurate, and None means the namespace's setting.
        """
        return await self._call(self._calls.get(counter, max_staleness))

    async def between(
        self, counter: str, start: Moment, end: Moment | None = None, *, tz: str | None = None
    ) -> answers.Change:
        """Return how much the count changed from *start* to *end*, by default now, exactly.

        Both are ends of windows of the namespace, or ``"today"``, the beginning of the day in the
        time zone *tz* (``Europe/Berlin``; UTC if None).
        """
        return await self._call(self._calls.between(counter, start, end, tz))

    async def get_many(
        self, counters: Iterable[str], *, max_staleness: str | None = None
    ) -> list[answers.Count]:
        """Return the counts of up to 1,000 counters, in order. *max_staleness*: see :meth:`get`."""
        return await self._call(self._calls.batch_get(counters, max_staleness))

    async def batch(self, items: Items) -> list[answers.Added | CounterError]:
        """Add to up to 1,000 counters, each under its own token; return the results in order.

        An item is a counter, its delta and, if the add is bounded, :class:`counter_client.Bounds`.
        A rejected item's result is its error; one with an unknown outcome at the deadline is an
        UnknownOutcomeError. Items do not affect each other.
        """
        delivery = Delivery.of_items(self._calls, items)
        return await drive_async(delivery.until_deadline(self._policy), self._do)

    async def atomic(self, items: Items, *, token: Credential | None = None) -> list[answers.Added]:
        """Make up to 100 adds under one token: either all are counted or none, also if a bound of
        one of them is reached. Items are those of :meth:`batch`. Raises as :meth:`add` does."""
        return await self._call(self._calls.atomic(items, token))

    async def resolve(self, unfinished: Unfinished | UnknownOutcomeError | str) -> answers.Resolved:
        """Find out whether an add is counted, given an UnknownOutcomeError, its ``unfinished``, or
        ``str()`` of that.

        Sends the same request again. If the token is young, this counts the add if it was not
        counted yet; otherwise it looks the add up. A key is known only for the namespace's
        ``key_ttl``: resolved later, it counts again.
        """
        try:
            return await self._call(self._calls.resolve(unfinished_of(unfinished)))
        except TokenTooOldError as error:
            if error.applied is False:
                return answers.Resolved(applied=False, detail=error.detail)
            raise

    async def cancel(
        self,
        counter: str,
        delta: int = 1,
        *,
        operation: Literal["add", "clear", "delete"] = "add",
        at_least: int | None = None,
        at_most: int | None = None,
        token: Credential,
    ) -> answers.Cancelled:
        """Cancel an add of *delta* with its bounds, a clear or a delete under *token*: it counts
        nothing from now on, whether it was counted, is in flight or never arrives.

        A retry returns the same. Waits while the service reports that the token is pending. Raises
        TokenConflictError if the token was used with another payload, and UnknownOutcomeError if
        it is not known at the deadline whether the token is cancelled.
        """
        bounds = Bounds(at_least, at_most)
        return await self._call(self._calls.cancel(counter, delta, operation, token, bounds))

    def hold(
        self,
        counter: str,
        amount: int,
        *,
        expires_in: str,
        at_least: int | None = None,
        at_most: int | None = None,
        token: Credential | None = None,
    ) -> AsyncHolding:
        """Reserve *amount* of the counter for *expires_in*, a duration such as ``15m``: bounded
        adds and other holds leave room for it until it is settled, released, or expires.

        Use it in an ``async with`` statement, or ``await`` it.
        Settle it in the block with what the work cost. Leaving the block releases it otherwise,
        also with an exception; what cannot be released expires by itself.

        *token* makes a retry in another process the same hold. Raises BoundReachedError if there is
        no room, the error of its end if the token's hold has ended, and as :meth:`add` does.
        """
        bounds = Bounds(at_least, at_most)
        call = self._calls.hold(counter, amount, expires_in, token, bounds)
        return AsyncHolding(self, partial(self._call, call), self._background)

    async def settle_hold(self, hold: str, amount: int) -> answers.HoldCount:
        """Count *amount*, which has the sign of the hold or is 0, and end the hold with this id.

        Raises HoldSettledError if it was settled with another amount, HoldReleasedError or
        HoldExpiredError if it has ended so, and UnknownOutcomeError, whose ``unfinished``
        :meth:`resolve` takes.
        """
        return await self._call(self._calls.settle(hold, amount))

    async def release_hold(self, hold: str) -> answers.HoldCount:
        """Give back all that the hold with this id reserves. Raises as :meth:`settle_hold` does."""
        return await self._call(self._calls.release(hold))

    async def extend_hold(self, hold: str, expires_in: str) -> answers.HoldState:
        """Let the hold with this id expire *expires_in* from now, or when no hold may live longer;
        never earlier. Raises the error of its end if it has ended."""
        return await self._call(self._calls.extend(hold, expires_in))

    async def get_hold(self, hold: str) -> answers.HoldState:
        """Return the hold with this id, open or with its end."""
        return await self._call(self._calls.get_hold(hold))

    async def holds(self, counter: str) -> AsyncIterator[answers.HoldState]:
        """Yield the open holds of the counter, those that expire first, read page by page."""
        page = None
        while True:
            found, page = await self._call(self._calls.holds(counter, page))
            for each in found:
                yield each
            if page is None:
                return

    async def cancel_hold(
        self,
        counter: str,
        amount: int,
        *,
        expires_in: str,
        at_least: int | None = None,
        at_most: int | None = None,
        token: Credential,
    ) -> answers.Cancelled:
        """Cancel a hold by its token and arguments: it is released, or there never is one. Raises
        HoldSettledError or HoldExpiredError if it has ended so, and as :meth:`cancel` does."""
        bounds = Bounds(at_least, at_most)
        return await self._call(self._calls.cancel_hold(counter, amount, expires_in, token, bounds))

    async def cancel_atomic(self, items: Items, *, token: Credential) -> answers.Cancelled:
        """Cancel an atomic add as a whole. Raises as :meth:`cancel` does."""
        return await self._call(self._calls.cancel_atomic(items, token))

    async def cancel_unfinished(
        self, unfinished: Unfinished | UnknownOutcomeError | str
    ) -> answers.Cancelled:
        """Cancel what :meth:`resolve` would send again. Raises as :meth:`cancel` does."""
        return await self._call(self._calls.cancel_unfinished(unfinished_of(unfinished)))

    async def tokens(self, count: int = 1) -> list[Token]:
        """Return 1 to 1,000 tokens with the service's time, for a machine whose clock is wrong."""
        return await self._call(tokens(count))

    async def counters(self, prefix: str | None = None) -> AsyncIterator[str]:
        """Yield the names of all counters, in code point order, read page by page."""
        page = None
        while True:
            names, page = await self._call(self._calls.counters(prefix, page))
            for each in names:
                yield each
            if page is None:
                return

    async def counts(
        self,
        prefix: str | None = None,
        *,
        largest_first: bool = False,
        max_staleness: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[answers.Count]:
        """Yield counters with their counts, in code point order or the largest first; at most
        *limit*, read page by page.

        Without *max_staleness* they are read as the namespace reads; ``as_of`` says what each is
        exact as of. A list by count needs a *prefix* that at most 10,000 counters have.
        """
        page, left = None, limit
        while left is None or left > 0:
            items = PAGE_ITEMS_MAX if left is None else min(PAGE_ITEMS_MAX, left)
            call = self._calls.counts(prefix, page, largest_first, max_staleness, items)
            found, page = await self._call(call)
            for each in found:
                yield each
            if page is None:
                return
            left = None if left is None else left - len(found)

    async def sum(
        self, prefix: str | None = None, *, max_staleness: str | None = None
    ) -> answers.Sum:
        """Return the sum of all counters with *prefix*, at most 10,000. *max_staleness*: see
        :meth:`get`."""
        return await self._call(self._calls.sum(prefix, max_staleness))

    async def busiest(self, limit: int = 10, *, span: str = "10s") -> answers.Busiest:
        """Return the *limit* counters (1 to 100) with the most adds in the last *span*, at most
        ``1m``; docs/http.md describes how exact that is."""
        return await self._call(self._calls.busiest(limit, span))

    async def events(
        self,
        counter: str,
        start: Moment | None = None,
        end: Moment | None = None,
        *,
        limit: int | None = None,
    ) -> AsyncIterator[answers.Event]:
        """Yield at most *limit* events of ``[start, end)``, latest first, read page by page."""
        page, left = None, limit
        while left is None or left > 0:
            items = PAGE_ITEMS_MAX if left is None else min(PAGE_ITEMS_MAX, left)
            found, page = await self._call(self._calls.events(counter, start, end, page, items))
            for each in found:
                yield each
            if page is None:
                return
            left = None if left is None else left - len(found)

    async def history(
        self,
        counter: str,
        start: Moment | None = None,
        end: Moment | None = None,
        step: str | None = None,
        *,
        tz: str | None = None,
    ) -> AsyncIterator[answers.Point]:
        """Yield the count at the end of each *step* of ``[start, end)``: a duration such as ``1m``,
        or ``day``, ``week`` or ``month`` in the time zone *tz*."""
        for each in await self._call(self._calls.history(counter, start, end, step, tz)):
            yield each

    async def live(self, counter: str) -> AsyncGenerator[LiveUpdate]:
        """Yield the count, again whenever it changes, and every few seconds with a new ``as_of``.

        Reconnects if a connection ends. Yields the CounterError of a temporary failure in place of
        a count. Raises a permanent one, and the last one if the stream is silent for
        ``deadline_s``.
        """
        stream = LiveStream(self._calls.live(counter), self._policy)
        while True:
            ended: CounterError | None = None
            try:
                async with aclosing(self._transport.lines(stream.request, stream.number)) as lines:
                    async for line in lines:
                        if (update := stream.line(line)) is not None:
                            yield update
            except CounterError as error:
                ended = error
            await asyncio.sleep(stream.pause_s(ended))

    async def recount(self, counter: str) -> int:
        """Make the next rollup recount the counter's stored past from its events; return the number
        of windows."""
        return await self._call(self._calls.recount(counter))

    async def namespaces(self) -> list[Settings]:
        """Return the namespaces that the caller may see, with their settings."""
        return await self._call(namespaces())

    async def namespace(self) -> Settings:
        """Return the settings of this client's namespace, by name, as the service writes them."""
        return await self._call(self._calls.settings())

    async def create_namespace(self, **settings: Any) -> Settings:
        """Create this client's namespace; ``counter_type="EVENTUAL"`` is the least it needs.

        Raises PreconditionFailedError if it exists. The answer has ``warnings`` only if there are
        any.
        """
        return await self._call(self._calls.create_namespace(settings))

    async def change_namespace(self, etag: str | None = None, /, **settings: Any) -> Settings:
        """Change the given *settings* of this client's namespace. Raises PreconditionFailedError if
        *etag* is given, that of settings that were read, and they have changed since."""
        return await self._call(self._calls.change_namespace(settings, etag))

    async def delete_namespace(self) -> None:
        """Delete this client's namespace permanently, with its counters, events and tokens."""
        await self._call(self._calls.delete_namespace())

    def buffer(
        self,
        *,
        max_delay: float = 0.1,
        max_items: int = 100_000,
        spool: str | Path | None = None,
    ) -> AsyncBuffer:
        """Return a buffer that merges adds by counter and sends them every *max_delay* seconds.

        It holds up to *max_items* pending counters. *spool* is a directory that keeps them when
        this process ends; other processes may share it.
        """
        self._transport.check_open()
        limits = Limits(max_delay, max_items)
        return AsyncBuffer(self._calls, self._policy, self._transport.send, limits, spool)

    async def _call(self, call: Call[T]) -> T:
        return await drive_async(attempts(call, self._policy), self._do)

    async def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return await self._transport.send(effect)
        if isinstance(effect, Pause):
            return await asyncio.sleep(effect.seconds)
        return effect.work()
