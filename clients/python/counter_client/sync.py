"""The client for threads, and its hedging transport."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from counter_client import answers
from counter_client.addresses import checked_urls
from counter_client.buffer import Buffer, Limits
from counter_client.calls import (
    ENDED,
    PAGE_ITEMS_MAX,
    Call,
    Calls,
    Held,
    Request,
    Settings,
    namespaces,
    tokens,
)
from counter_client.delivery import Delivery
from counter_client.errors import CounterError, TokenTooOldError
from counter_client.failures import (
    ClosedError,
    Unfinished,
    UnknownOutcomeError,
    UnreachableError,
    unfinished_of,
)
from counter_client.options import Options
from counter_client.retrying import (
    Answer,
    Budget,
    Effect,
    Pause,
    Policy,
    ProcessLock,
    Send,
    attempts,
    drive,
)
from counter_client.tokens import Bounds, Credential, Items, Moment, Token
from counter_client.transport import AsyncTransport, LiveStream, LiveUpdate, SyncTransport

T = TypeVar("T")


class HedgingTransport:
    """Send requests on a private event loop, so that the losing hedge can be cancelled."""

    def __init__(self, make: Callable[[], AsyncTransport]) -> None:
        self._make = make
        self._starting = ProcessLock()
        #: Event loops inherited by a fork: neither used nor closed here.
        self._inherited: list[object] = []
        self._start()

    def _start(self) -> None:
        #: Held to submit work to the loop and to close it.
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="counter-hedges", daemon=True
        )
        self._thread.start()
        made = asyncio.run_coroutine_threadsafe(self._make_transport(), self._loop)
        self._transport = made.result()
        # Last: until it is set, other threads wait.
        self._pid = os.getpid()

    async def _make_transport(self) -> AsyncTransport:
        return self._make()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run *work* in the loop; return its result. Raises CancelledError if the loop closes."""
        with self._lock:
            if self._transport.closed:
                work.close()
                self._transport.check_open()
            doing = asyncio.run_coroutine_threadsafe(work, self._loop)
        return doing.result()

    async def _end(self) -> None:
        """Cancel all tasks of the loop and close the transport."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._transport.close()

    def check_open(self) -> None:
        """Raise ClosedError if the client is closed."""
        self._transport.check_open()

    def send(self, send: Send) -> Answer:
        """Send one attempt, hedged, and return its answer."""
        try:
            return self._run(self._here().send(send))
        except CancelledError as error:
            ended = UnreachableError("the client was closed before there was an answer")
            ended.__cause__ = error
            return ended

    def lines(self, request: Request, number: int) -> Iterator[str]:
        """As of :class:`SyncTransport`."""
        lines = self._here().lines(request, number)

        async def following() -> str | None:
            return await anext(lines, None)

        try:
            while (line := self._run(following())) is not None:
                yield line
        except CancelledError:
            self.check_open()
        finally:
            with suppress(ClosedError, CancelledError):
                self._run(lines.aclose())

    def _here(self) -> AsyncTransport:
        """Return the transport of this process. Raises ClosedError."""
        self.check_open()
        if os.getpid() != self._pid:
            # A forked child does not have the loop's thread.
            with self._starting.here():
                if os.getpid() != self._pid:
                    self._inherited += (self._loop, self._transport)
                    self._start()
        return self._transport

    def close(self) -> None:
        """Close the connections and the loop."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._transport.closed:
                return
            self._transport.closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Hold(Held):
    """An open hold of a :class:`CounterClient`, which leaving its ``with`` statement releases.

    ``id``, ``counter``, ``amount`` and ``expires_at`` are those of the hold; ``began`` has the
    ``count`` and what is ``held`` right after it began.
    """

    def __init__(self, client: CounterClient, began: answers.HoldCount) -> None:
        super().__init__(began)
        self._client = client

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self.is_open:
            return
        try:
            # It may have been ended by its id.
            with suppress(*ENDED):
                self.release()
        except CounterError as failed:
            if error is None:
                raise
            error.add_note(self.note(failed))

    def settle(self, amount: int) -> answers.HoldCount:
        """Count *amount* and end the hold; see :meth:`CounterClient.settle_hold`.

        If it raises UnknownOutcomeError, leaving the block does not release the hold, so that the
        program can settle it again.
        """
        with self.settling():
            return self._client.settle_hold(self.id, amount)

    def release(self) -> answers.HoldCount:
        """Give everything back; see :meth:`CounterClient.release_hold`."""
        with self.releasing():
            return self._client.release_hold(self.id)

    def extend(self, expires_in: str) -> answers.HoldState:
        """Let the hold expire later; see :meth:`CounterClient.extend_hold`."""
        found = self._client.extend_hold(self.id, expires_in)
        self.expires_at = found.expires_at
        return found


class CounterClient:
    """Count in one *namespace* of the service at *url* (or at the first of several that answers).

    Thread-safe, and usable after a fork. Each add sends one token with all its attempts, so it
    counts once; pass ``token=`` to finish an add in another call or process. In a BEST_EFFORT
    namespace no retry is safe (``Added.retry_safe`` is False).

    Every call raises CounterError: the service's error classes for a definite refusal,
    UnknownOutcomeError (with the token) for an add with an unknown outcome at the deadline,
    UnreachableError for a read without an answer.
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
        """Close the connections."""
        self._transport.close()

    def add(
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
        return self._call(self._calls.add(counter, delta, token, Bounds(at_least, at_most)))

    def add_and_get(
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
        return self._call(self._calls.add_and_get(counter, delta, token, bounds))

    def clear(self, counter: str, *, token: Credential | None = None) -> answers.Cleared:
        """Set the counter to 0 as of the token's time.

        Adds with a time up to then are erased even if they arrive later. Raises as :meth:`add`
        does.
        """
        return self._call(self._calls.clear(counter, token))

    def delete(self, counter: str, *, token: Credential | None = None) -> answers.Cleared:
        """Clear the counter, and take its name off the list until a later add.

        Tokens keep their answers, and later adds count from 0. Raises as :meth:`add` does.
        """
        return self._call(self._calls.delete(counter, token))

    def get(self, counter: str, *, max_staleness: str | None = None) -> answers.Count:
        """Return the count and the instant it is exact as of; an unknown counter reads 0.

        *max_staleness* bounds the age of that instant, a duration such as ``5s``: ``0s`` is
        accurate, and None means the namespace's setting.
        """
        return self._call(self._calls.get(counter, max_staleness))

    def between(
        self, counter: str, start: Moment, end: Moment | None = None, *, tz: str | None = None
    ) -> answers.Change:
        """Return how much the count changed from *start* to *end*, by default now, exactly.

        Both are ends of windows of the namespace, or ``"today"``, the beginning of the day in the
        time zone *tz* (``Europe/Berlin``; UTC if None).
        """
        return self._call(self._calls.between(counter, start, end, tz))

    def get_many(
        self, counters: Iterable[str], *, max_staleness: str | None = None
    ) -> list[answers.Count]:
        """Return the counts of up to 1,000 counters, in order. *max_staleness*: see :meth:`get`."""
        return self._call(self._calls.batch_get(counters, max_staleness))

    def batch(self, items: Items) -> list[answers.Added | CounterError]:
        """Add to up to 1,000 counters, each under its own token; return the results in order.

        An item is a counter, its delta and, if the add is bounded, :class:`counter_client.Bounds`.
        A rejected item's result is its error; one with an unknown outcome at the deadline is an
        UnknownOutcomeError. Items do not affect each other.
        """
        delivery = Delivery.of_items(self._calls, items)
        return drive(delivery.until_deadline(self._policy), self._do)

    def atomic(self, items: Items, *, token: Credential | None = None) -> list[answers.Added]:
        """Make up to 100 adds under one token: either all are counted or none, also if a bound of
        one of them is reached. Items are those of :meth:`batch`. Raises as :meth:`add` does."""
        return self._call(self._calls.atomic(items, token))

    def resolve(self, unfinished: Unfinished | UnknownOutcomeError | str) -> answers.Resolved:
        """Find out whether an add is counted, given an UnknownOutcomeError, its ``unfinished``, or
        ``str()`` of that.

        Sends the same request again. If the token is young, this counts the add if it was not
        counted yet; otherwise it looks the add up. A key is known only for the namespace's
        ``key_ttl``: resolved later, it counts again.
        """
        try:
            return self._call(self._calls.resolve(unfinished_of(unfinished)))
        except TokenTooOldError as error:
            if error.applied is False:
                return answers.Resolved(applied=False, detail=error.detail)
            raise

    def cancel(
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
        return self._call(self._calls.cancel(counter, delta, operation, token, bounds))

    def hold(
        self,
        counter: str,
        amount: int,
        *,
        expires_in: str,
        at_least: int | None = None,
        at_most: int | None = None,
        token: Credential | None = None,
    ) -> Hold:
        """Reserve *amount* of the counter for *expires_in*, a duration such as ``15m``: bounded
        adds and other holds leave room for it until it is settled, released, or expires.

        The hold is open when this returns: use it in a ``with`` statement.
        Settle it in the block with what the work cost. Leaving the block releases it otherwise,
        also with an exception; what cannot be released expires by itself.

        *token* makes a retry in another process the same hold. Raises BoundReachedError if there is
        no room, the error of its end if the token's hold has ended, and as :meth:`add` does.
        """
        bounds = Bounds(at_least, at_most)
        call = self._calls.hold(counter, amount, expires_in, token, bounds)
        return Hold(self, self._call(call))

    def settle_hold(self, hold: str, amount: int) -> answers.HoldCount:
        """Count *amount*, which has the sign of the hold or is 0, and end the hold with this id.

        Raises HoldSettledError if it was settled with another amount, HoldReleasedError or
        HoldExpiredError if it has ended so, and UnknownOutcomeError, whose ``unfinished``
        :meth:`resolve` takes.
        """
        return self._call(self._calls.settle(hold, amount))

    def release_hold(self, hold: str) -> answers.HoldCount:
        """Give back all that the hold with this id reserves. Raises as :meth:`settle_hold` does."""
        return self._call(self._calls.release(hold))

    def extend_hold(self, hold: str, expires_in: str) -> answers.HoldState:
        """Let the hold with this id expire *expires_in* from now, or when no hold may live longer;
        never earlier. Raises the error of its end if it has ended."""
        return self._call(self._calls.extend(hold, expires_in))

    def get_hold(self, hold: str) -> answers.HoldState:
        """Return the hold with this id, open or with its end."""
        return self._call(self._calls.get_hold(hold))

    def holds(self, counter: str) -> Iterator[answers.HoldState]:
        """Yield the open holds of the counter, those that expire first, read page by page."""
        page = None
        while True:
            found, page = self._call(self._calls.holds(counter, page))
            yield from found
            if page is None:
                return

    def cancel_hold(
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
        return self._call(self._calls.cancel_hold(counter, amount, expires_in, token, bounds))

    def cancel_atomic(self, items: Items, *, token: Credential) -> answers.Cancelled:
        """Cancel an atomic add as a whole. Raises as :meth:`cancel` does."""
        return self._call(self._calls.cancel_atomic(items, token))

    def cancel_unfinished(
        self, unfinished: Unfinished | UnknownOutcomeError | str
    ) -> answers.Cancelled:
        """Cancel what :meth:`resolve` would send again. Raises as :meth:`cancel` does."""
        return self._call(self._calls.cancel_unfinished(unfinished_of(unfinished)))

    def tokens(self, count: int = 1) -> list[Token]:
        """Return 1 to 1,000 tokens with the service's time, for a machine whose clock is wrong."""
        return self._call(tokens(count))

    def counters(self, prefix: str | None = None) -> Iterator[str]:
        """Yield the names of all counters, in code point order, read page by page."""
        page = None
        while True:
            names, page = self._call(self._calls.counters(prefix, page))
            yield from names
            if page is None:
                return

    def counts(
        self,
        prefix: str | None = None,
        *,
        largest_first: bool = False,
        max_staleness: str | None = None,
        limit: int | None = None,
    ) -> Iterator[answers.Count]:
        """Yield counters with their counts, in code point order or the largest first; at most
        *limit*, read page by page.

        Without *max_staleness* they are read as the namespace reads; ``as_of`` says what each is
        exact as of. A list by count needs a *prefix* that at most 10,000 counters have.
        """
        page, left = None, limit
        while left is None or left > 0:
            items = PAGE_ITEMS_MAX if left is None else min(PAGE_ITEMS_MAX, left)
            call = self._calls.counts(prefix, page, largest_first, max_staleness, items)
            found, page = self._call(call)
            yield from found
            if page is None:
                return
            left = None if left is None else left - len(found)

    def sum(self, prefix: str | None = None, *, max_staleness: str | None = None) -> answers.Sum:
        """Return the sum of all counters with *prefix*, at most 10,000. *max_staleness*: see
        :meth:`get`."""
        return self._call(self._calls.sum(prefix, max_staleness))

    def busiest(self, limit: int = 10, *, span: str = "10s") -> answers.Busiest:
        """Return the *limit* counters (1 to 100) with the most adds in the last *span*, at most
        ``1m``; docs/http.md describes how exact that is."""
        return self._call(self._calls.busiest(limit, span))

    def events(
        self,
        counter: str,
        start: Moment | None = None,
        end: Moment | None = None,
        *,
        limit: int | None = None,
    ) -> Iterator[answers.Event]:
        """Yield at most *limit* events of ``[start, end)``, latest first, read page by page."""
        page, left = None, limit
        while left is None or left > 0:
            items = PAGE_ITEMS_MAX if left is None else min(PAGE_ITEMS_MAX, left)
            found, page = self._call(self._calls.events(counter, start, end, page, items))
            yield from found
            if page is None:
                return
            left = None if left is None else left - len(found)

    def history(
        self,
        counter: str,
        start: Moment | None = None,
        end: Moment | None = None,
        step: str | None = None,
        *,
        tz: str | None = None,
    ) -> Iterator[answers.Point]:
        """Yield the count at the end of each *step* of ``[start, end)``: a duration such as ``1m``,
        or ``day``, ``week`` or ``month`` in the time zone *tz*."""
        yield from self._call(self._calls.history(counter, start, end, step, tz))

    def live(self, counter: str) -> Iterator[LiveUpdate]:
        """Yield the count, again whenever it changes, and every few seconds with a new ``as_of``.

        Reconnects if a connection ends. Yields the CounterError of a temporary failure in place of
        a count. Raises a permanent one, and the last one if the stream is silent for
        ``deadline_s``.
        """
        stream = LiveStream(self._calls.live(counter), self._policy)
        while True:
            ended: CounterError | None = None
            try:
                for line in self._transport.lines(stream.request, stream.number):
                    if (update := stream.line(line)) is not None:
                        yield update
            except CounterError as error:
                ended = error
            time.sleep(stream.pause_s(ended))

    def recount(self, counter: str) -> int:
        """Make the next rollup recount the counter's stored past from its events; return the number
        of windows."""
        return self._call(self._calls.recount(counter))

    def namespaces(self) -> list[Settings]:
        """Return the namespaces that the caller may see, with their settings."""
        return self._call(namespaces())

    def namespace(self) -> Settings:
        """Return the settings of this client's namespace, by name, as the service writes them."""
        return self._call(self._calls.settings())

    def create_namespace(self, **settings: Any) -> Settings:
        """Create this client's namespace; ``counter_type="EVENTUAL"`` is the least it needs.

        Raises PreconditionFailedError if it exists. The answer has ``warnings`` only if there are
        any.
        """
        return self._call(self._calls.create_namespace(settings))

    def change_namespace(self, etag: str | None = None, /, **settings: Any) -> Settings:
        """Change the given *settings* of this client's namespace. Raises PreconditionFailedError if
        *etag* is given, that of settings that were read, and they have changed since."""
        return self._call(self._calls.change_namespace(settings, etag))

    def delete_namespace(self) -> None:
        """Delete this client's namespace permanently, with its counters, events and tokens."""
        self._call(self._calls.delete_namespace())

    def buffer(
        self,
        *,
        max_delay: float = 0.1,
        max_items: int = 100_000,
        spool: str | Path | None = None,
    ) -> Buffer:
        """Return a buffer that merges adds by counter and sends them every *max_delay* seconds.

        It holds up to *max_items* pending counters. *spool* is a directory that keeps them when
        this process ends; other processes may share it.
        """
        self._transport.check_open()
        limits = Limits(max_delay, max_items)
        return Buffer(self._calls, self._policy, self._transport.send, limits, spool)

    def _call(self, call: Call[T]) -> T:
        return drive(attempts(call, self._policy), self._do)

    def _do(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return self._transport.send(effect)
        if isinstance(effect, Pause):
            return time.sleep(effect.seconds)
        return effect.work()
