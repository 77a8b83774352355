"""Implement the writes: add, clear, add many, add atomically. :class:`CountReader` reads.

An add is admitted by its token's age, its mark is made durable, its age is checked AGAIN, its event
is written, and it is acknowledged within a deadline; a token too old for that is resolved instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import NoneType
from typing import Final, TypeVar

from counter import limits
from counter.core.adds import adds_of, event_of, events_of_atomic, has_terms
from counter.core.admission import Bounded, Load, WeightedSemaphore
from counter.core.clock_guard import ClockGuard
from counter.core.gather import AddGatherer, Done, at_once
from counter.core.holds import Held, Holds, Wanted, ended_error, longest_of_hold
from counter.core.key_times import Key, KeyTimes
from counter.core.namespaces import Namespaces, require_bounds
from counter.core.rate_limits import UNLIMITED, Allowance, BatchAllowance
from counter.core.read import CountReader
from counter.core.resolve import Resolver, conflict
from counter.core.results import REPLAYED, Add, Added, Cancelled, Credential, Items, Keyed
from counter.core.write import EventWriter
from counter.errors import (
    CounterError,
    NamespaceUnknownError,
    NotSupportedError,
    OverloadedError,
    RateLimitedError,
    SliceMissingError,
    TokenCancelledError,
    TokenInFutureError,
    TokenMissingError,
    TokenTooOldError,
    UnavailableError,
)
from counter.holds import HoldId, events_of_hold, held_name, is_held, is_hold, request_of
from counter.metrics import AddTally
from counter.ports import Cache, Clock, Store
from counter.tokens import nonce_of_key
from counter.types import (
    DELETED,
    CounterType,
    Event,
    EventPage,
    Namespace,
    Outcome,
    PayloadCheck,
    Pending,
    Span,
    Token,
    Written,
)
from counter.windows import window_of

_Result = TypeVar("_Result")
#: :meth:`CounterService.add_atomic` or :meth:`CounterService.cancel_atomic`.
_KeyedCall = Callable[..., Awaitable[_Result]]
#: Writes or resolves the events of one token; the last argument says that its key is cancelled.
_Submit = Callable[[Namespace, Sequence[Event], Allowance, bool], Awaitable[list[Added]]]
_RESERVE_ATTEMPTS_MAX: Final = 3
#: Errors of a write of many adds that one of them alone may have caused.
_OF_ONE: Final = (SliceMissingError, NamespaceUnknownError, TokenInFutureError)


class CounterService:
    """The counter service over its ports. It is stateless: any number of instances may run.

    There are three kinds of add, which end as :mod:`counter.core.results` says; the other methods
    prepare one of them:

    * single: :meth:`add`, :meth:`clear` and :meth:`delete` do everything that an add can need:
      they reserve the time of an arbitrary key, write, and resolve a late token;
    * many: :meth:`add_many` writes all adds that are on time in one call of the store, and does
      those that are late or have an arbitrary key by :meth:`add`. :meth:`add_events` is the same
      for adds that all have tokens. :meth:`add_soon` makes one write of the adds that arrive in
      one iteration of the event loop, from any number of requests;
    * atomic: :meth:`add_atomic` counts all of its items or none. :meth:`add_keyed` does many.
    """

    def __init__(
        self, store: Store, cache: Cache, clock: Clock, guard: ClockGuard | None = None
    ) -> None:
        self._store = store
        self._cache = cache
        self._clock = clock
        self._guard = guard
        #: Adds in flight; it decides whether another one can be answered in time.
        self.load = Load(clock)
        self.namespaces = Namespaces(store, clock, guard)
        self._writer = EventWriter(store, clock, cache, guard, self.load, self.namespaces)
        self.tally = AddTally()
        #: Tokens that were cancelled, retries included, by whether they were counted before.
        self.cancels = {True: 0, False: 0}
        #: CloudEvents of types without a rule.
        self.events_ignored = 0
        self._resolving = asyncio.Semaphore(limits.RESOLUTIONS_AT_ONCE_MAX)
        self.late = Bounded("late tokens are being resolved", limits.RESOLUTIONS_MAX)
        self._gatherer = AddGatherer(self._write_gathered, self.load)
        # Its own load: if the cache stalls, the adds of other counters must not look slow.
        self._best_effort_gatherer = AddGatherer(self._increment_gathered, Load(clock))
        #: Adds that one batched write cannot do: those under way have tasks, others wait.
        self.one_by_one = Bounded("adds of batches are under way", limits.PENDING_WRITES_MAX)
        self._keyed = WeightedSemaphore(limits.KEYED_ADDS_AT_ONCE_MAX)
        self.resolver = Resolver(store, clock, guard, self.namespaces)
        self._key_times = KeyTimes(store, clock, guard)
        self.issue_tokens = self._key_times.issue_tokens
        self.reader = CountReader(store, cache, clock, guard)
        self.holds = Holds(store, clock, guard, self.reader)

    async def add(
        self,
        namespace: Namespace,
        counter: str,
        delta: int,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
        terms: bytes | None = None,
    ) -> Added:
        """Count *delta* exactly once for the token, including retries and hedges. Raises
        BoundReachedError if it is refused by the bounds in *terms*, or by the namespace's.

        The caller's *allowance* is charged for a late token, and for an arbitrary key."""
        with self.tally.recording_failures():
            self._check_bounded(namespace, terms is not None)
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            [result] = await self._increment(namespace, [(counter, delta)])
            if isinstance(result, CounterError):
                raise result
            return result
        with self.tally.recording_failures():
            [added] = await self._with_token(
                *(namespace, "add", counter, credential, allowance),
                lambda token: [event_of(counter, token, delta, terms)],
            )
            return added

    def add_soon(self, namespace: Namespace, event: Event, done: Done) -> bool:
        """Count *event* with the others that arrive in this iteration of the event loop, then call
        *done*. For a best-effort counter the event comes from :meth:`best_effort_event`.

        After the outcome LATE or CONFLICT, which is preliminary, the caller must call :meth:`add`
        with the same token. Returns False, and does nothing, if it must call :meth:`add` at once.
        """
        gatherer = self._gatherer
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            gatherer = self._best_effort_gatherer
        elif not self._may_share_a_write(namespace, event):
            return False
        try:
            gatherer.add(namespace, event, done)
        except OverloadedError as error:
            self.tally.record_failure(error)
            done(error)
        return True

    def _may_share_a_write(self, namespace: Namespace, event: Event) -> bool:
        if event.atom and not self._store.capabilities.bounds:
            return False
        strict = namespace.settings.payload_check is PayloadCheck.STRICT
        if strict and self._store.separate_writes is not None:
            # Compare-and-sets of one counter contend, so they would delay the adds of others.
            return False
        first_us, last_us = self._writer.on_time_range(namespace, self._clock.now_us())
        return first_us <= event.event_time_us <= last_us

    def best_effort_event(self, counter: str, delta: int) -> Event:
        """Return an add to a best-effort counter, which has no token, for :meth:`add_soon`."""
        return Event(counter, self._clock.now_us(), b"", 0, delta)

    async def clear(
        self,
        namespace: Namespace,
        counter: str,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
    ) -> Added:
        """Set the counter to 0 as of the token's time: every earlier event is erased."""
        return await self._clear(namespace, "clear", counter, credential, allowance)

    async def delete(
        self,
        namespace: Namespace,
        counter: str,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
    ) -> Added:
        """Clear the counter, and take its name off the list until it has a later event."""
        return await self._clear(namespace, "delete", counter, credential, allowance, self._delete)

    async def _clear(
        self,
        namespace: Namespace,
        operation: str,
        counter: str,
        credential: Credential,
        allowance: Allowance,
        submit: _Submit | None = None,
    ) -> Added:
        with self.tally.recording_failures():
            if namespace.settings.counter_type is CounterType.BEST_EFFORT:
                await self._cache.clear(namespace, counter)
                self.tally.count(namespace.name, "best_effort")
                return Added(counter, 0, self._clock.now_us(), None)
            [cleared] = await self._with_token(
                *(namespace, operation, counter, credential, allowance),
                lambda token: [event_of(counter, token, None)],
                submit,
            )
            return cleared

    async def cancel(
        self,
        namespace: Namespace,
        operation: str,
        counter: str,
        delta: int | None,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
        terms: bytes | None = None,
    ) -> Cancelled:
        """Cancel an add of *delta* with *terms*, or a clear or delete if *delta* is None: its token
        counts nothing from now on, and never will. An arbitrary key is one of the *operation*."""
        self._check_bounded(namespace, terms is not None)
        return await self._cancel(
            *(namespace, operation, counter, credential, allowance),
            lambda token: [event_of(counter, token, delta, terms)],
        )

    async def cancel_many(
        self, namespace: Namespace, adds: Sequence[Add], allowance: Allowance = UNLIMITED
    ) -> list[Cancelled | CounterError]:
        """Cancel each of *adds* separately; return an outcome for each. Raises RateLimitedError and
        OverloadedError before any work."""
        self.require_events(namespace, "a cancel")
        allowance.resolve(len(adds))
        charged = BatchAllowance(allowance, len(adds))
        with self.one_by_one.holding(len(adds)):
            return await at_once(
                partial(self.cancel, namespace, "add", *each[:3], charged, each.terms)
                for each in adds
            )

    async def cancel_keyed(
        self, namespace: Namespace, lists: Sequence[Keyed], allowance: Allowance = UNLIMITED
    ) -> list[Cancelled | CounterError]:
        """Cancel what :meth:`add_keyed` did for each list; return an outcome for each. The caller
        holds the adds in :attr:`one_by_one` meanwhile."""
        allowance.reserve(len(lists))
        return await self._each_keyed(
            self.cancel_atomic, namespace, lists, BatchAllowance(allowance)
        )

    async def cancel_atomic(
        self,
        namespace: Namespace,
        items: Items,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
        *,
        operation: str = "atomic",
        scope: str = "",
    ) -> Cancelled:
        """Cancel an atomic add as a whole; the arguments are those of :meth:`add_atomic`."""
        self._check_bounded(namespace, has_terms(items))
        return await self._cancel(
            *(namespace, operation, scope, credential, allowance),
            partial(events_of_atomic, items),
            len(items),
        )

    async def _delete(
        self,
        namespace: Namespace,
        events: Sequence[Event],
        allowance: Allowance,
        is_cancelled: bool = False,
    ) -> list[Added]:
        """Write the clear and the pending delete, request a recount, and unlist the name.

        The name is unlisted last. However late that happens, the worker finds the pending delete,
        and lists the counter again if a later event was counted.
        """
        counter, time_us = events[0].counter, events[0].event_time_us
        after = EventPage(Span(time_us + 1, limits.TIME_MAX_US), limit=1)
        cleared = await self._submit(namespace, events, allowance, is_cancelled)
        later = await self._store.events.scan(namespace, counter, after)
        if not later:
            delete = Pending(DELETED, time_us)
            await self._store.recounts.write_pending(namespace, [(counter, delete)])
        window_us = window_of(time_us, namespace.settings.rollup_window_us)
        await self.resolver.request_recounts(namespace, [(counter, window_us)], for_readers=False)
        if not later and self._store.separate_writes is not None:
            await self._store.separate_writes.unlist(namespace, counter, time_us)
        return cleared

    async def add_many(
        self, namespace: Namespace, adds: Sequence[Add], allowance: Allowance = UNLIMITED
    ) -> list[Added | CounterError]:
        """Do each add separately, with one commit for those on time; return an outcome for each."""
        bounded = sum(each.terms is not None for each in adds)
        try:
            self._check_bounded(namespace, bounded > 0)
        except NotSupportedError as fault:
            self.tally.record_failure(fault, bounded)
            plain = [each for each in adds if each.terms is None]
            others = iter(await self.add_many(namespace, plain, allowance))
            return [fault if each.terms else next(others) for each in adds]
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            return await self._increment(namespace, [(each.counter, each.delta) for each in adds])
        if self._guard is not None:
            self._guard.check(namespace.dataset)
        results: list[Added | CounterError | None] = [None] * len(adds)
        fresh: list[int] = []
        events: list[Event] = []
        early: list[tuple[int, int]] = []
        now_us = self._clock.now_us()
        _, last_us = self._writer.on_time_range(namespace, now_us)
        for index, (counter, delta, token, terms) in enumerate(adds):
            if isinstance(token, Token):
                time_us = token.generation_time_us
                if time_us > last_us:
                    early.append((time_us, index))
                elif not self._writer.is_late(namespace, time_us, now_us):
                    fresh.append(index)
                    events.append(Event(counter, time_us, token.nonce, 0, delta, False, terms))
        if early:
            # One refusal serves all: when the latest of them may be sent, all may.
            error = self._writer.future_error(namespace, max(early)[0], now_us, len(early))
            self.tally.record_failure(error, len(early))
            for _, index in early:
                results[index] = error
        for index, answer in zip(fresh, await self._write_each(namespace, events), strict=True):
            results[index] = answer
        return await self._finish(namespace, results, adds, allowance)

    async def add_events(
        self, namespace: Namespace, events: Sequence[Event], allowance: Allowance = UNLIMITED
    ) -> list[Added | CounterError]:
        """Do :meth:`add_many` for adds that all have tokens; at least one."""
        if not self._store.capabilities.bounds and any(event[6] for event in events):
            return await self.add_many(namespace, adds_of(events), allowance)
        times = [event[1] for event in events]
        first_us, last_us = self._writer.on_time_range(namespace, self._clock.now_us())
        on_time = first_us <= min(times) and max(times) <= last_us
        if on_time and namespace.settings.counter_type is not CounterType.BEST_EFFORT:
            if self._guard is not None:
                self._guard.check(namespace.dataset)
            answers = await self._write_each(namespace, events)
            if None not in answers:
                # The usual case: one write handled all of them.
                return [each for each in answers if each is not None]
            return await self._finish(namespace, answers, adds_of(events), allowance)
        return await self.add_many(namespace, adds_of(events), allowance)

    async def add_atomic(
        self,
        namespace: Namespace,
        items: Items,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
        *,
        operation: str = "atomic",
        scope: str = "",
    ) -> list[Added]:
        """Count all the items under one token, or none of them. An arbitrary key is one of the
        *operation* and *scope*."""
        with self.tally.recording_failures(len(items)):
            self.require_events(namespace, "an atomic add")
            self._check_bounded(namespace, has_terms(items))
            return await self._with_token(
                *(namespace, operation, scope, credential, allowance),
                partial(events_of_atomic, items),
            )

    async def hold(
        self,
        namespace: Namespace,
        counter: str,
        wanted: Wanted,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
    ) -> Held:
        """Reserve an amount, once for the token. Raises BoundReachedError, and the error of its end
        if it has ended."""
        self.holds.check(namespace, wanted)
        holds: list[HoldId] = []

        def events_of(token: Token) -> list[Event]:
            holds.append(HoldId(counter, token))
            return events_of_hold(holds[-1], *wanted)

        of = (namespace, "hold", counter, credential, allowance)
        with self.tally.recording_failures():
            added = await self._with_token(*of, events_of)
        return await self.holds.begun(namespace, holds[-1], added[0].replayed)

    async def cancel_hold(
        self,
        namespace: Namespace,
        counter: str,
        wanted: Wanted,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
    ) -> Cancelled:
        """Cancel the token of a hold: it is released, or never is one. Raises the error of its end
        if it was settled or has expired."""
        self.holds.check(namespace, wanted)
        return await self._cancel(
            *(namespace, "hold", counter, credential, allowance),
            lambda token: events_of_hold(HoldId(counter, token), *wanted),
        )

    async def add_keyed(
        self, namespace: Namespace, lists: Sequence[Keyed], allowance: Allowance = UNLIMITED
    ) -> list[list[Added] | CounterError]:
        """Do an atomic add for each list; return an outcome for each. The caller holds the adds in
        :attr:`one_by_one` meanwhile."""
        if refusal := self._refused(allowance.reserve, len(lists)):
            return [refusal] * len(lists)
        return await self._each_keyed(self.add_atomic, namespace, lists, BatchAllowance(allowance))

    async def _each_keyed(
        self,
        one: _KeyedCall[_Result],
        namespace: Namespace,
        lists: Sequence[Keyed],
        charged: Allowance,
    ) -> list[_Result | CounterError]:
        """Call *one* for each list; return an outcome for each.

        A long sequence is done in parts that take turns with those of other requests, because each
        atomic add costs a task.
        """
        outcomes: list[_Result | CounterError] = []
        longest = max((len(each.items) for each in lists), default=1)
        size = max(1, limits.KEYED_ADDS_AT_ONCE_MAX // 2 // longest)
        for start in range(0, len(lists), size):
            part = lists[start : start + size]
            async with self._keyed.holding(sum(len(each.items) for each in part)):
                outcomes += await at_once(
                    partial(one, namespace, items, key, charged, operation="event", scope=scope)
                    for scope, key, items in part
                )
        return outcomes

    async def recount(self, namespace: Namespace, counter: str, from_us: int, to_us: int) -> int:
        """Request a recount of every rolled-up window that meets ``[from, to)``, also of what is
        held; return how many the counter has."""
        self.require_events(namespace, "a recount")
        size_us = namespace.settings.rollup_window_us
        dropped_before_us = await self._store.control.dropped_before(namespace.dataset)
        span = Span(max(from_us - size_us + 1, dropped_before_us), to_us)
        ways = () if self._store.capabilities.holds is None else (1, -1)
        names = [counter, *(held_name(counter, way) for way in ways)]
        rows = await self._store.rollups.rows(namespace, names, span)
        found = zip(names, rows, strict=True)
        windows = [(name, row.window_us) for name, of in found for row in of]
        for start in range(0, len(windows), limits.BATCH_ITEMS_MAX):
            part = windows[start : start + limits.BATCH_ITEMS_MAX]
            await self.resolver.request_recounts(namespace, part, for_readers=False)
        return len(rows[0])

    @staticmethod
    def require_events(namespace: Namespace, what: str) -> None:
        """Raise NotSupportedError if the namespace keeps no events."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            raise NotSupportedError(
                f"{what} needs events; namespace {namespace.name!r} is BEST_EFFORT, which keeps"
                " none: use an EVENTUAL or ACCURATE namespace"
            )

    def _check_bounded(self, namespace: Namespace, is_bounded: bool) -> None:
        """Raise NotSupportedError if an add is bounded, and bounds cannot be kept here."""
        if is_bounded:
            self.require_events(namespace, "a bound")
            require_bounds(self._store)

    async def _with_token(
        self,
        namespace: Namespace,
        operation: str,
        target: str,
        credential: Credential,
        allowance: Allowance,
        events_of: Callable[[Token], Sequence[Event]],
        submit: _Submit | None = None,
    ) -> list[Added]:
        """Submit the events of the credential's token; the first use of an arbitrary key reserves
        one."""
        submit = submit or self._submit
        if self._guard is not None:
            self._guard.check(namespace.dataset)
        if isinstance(credential, Token):
            return await submit(namespace, events_of(credential), allowance, False)
        key = _key_of(namespace, operation, target, credential)
        allowance.reserve(1)
        void_us: int | None = None
        for _ in range(_RESERVE_ATTEMPTS_MAX):
            void_us, is_cancelled = await self._key_times.reserve(namespace, key, void_us)
            events = events_of(Token(key.nonce, void_us))
            try:
                return await submit(namespace, events, allowance, is_cancelled)
            except TokenTooOldError as error:
                # If the token with this time is void permanently, the key gets a new time.
                if error.applied is None:
                    raise
        raise _expired_repeatedly()

    async def _cancel(
        self,
        namespace: Namespace,
        operation: str,
        target: str,
        credential: Credential,
        allowance: Allowance,
        events_of: Callable[[Token], Sequence[Event]],
        size: int = 1,
    ) -> Cancelled:
        """Cancel the token of the credential, which has *size* events. An arbitrary key is
        cancelled first, so that it gets no other time, with which a retry would count."""
        self.require_events(namespace, "a cancel")
        if self._guard is not None:
            self._guard.check(namespace.dataset)
        key = Key(b"", 0)
        if isinstance(credential, Token):
            # Raises TokenInFutureError; that it may be late makes no difference.
            time_us, now_us = credential.generation_time_us, self._clock.now_us()
            self._writer.is_late(namespace, time_us, now_us)
        else:
            key = _key_of(namespace, operation, target, credential)
            allowance.reserve(1)
        # All that may refuse the request comes before the key is changed.
        async with self._resolution(allowance, size):
            if isinstance(credential, Token):
                events = events_of(credential)
            else:
                events = await self._cancelled_key(namespace, key, events_of)
            outcome = await self._settle(namespace, events, cancels=True)
        if outcome is Outcome.VOID:
            error = TokenTooOldError(
                "the token is older than the namespace: it was not applied and never will be, and"
                " it cannot be recorded as cancelled; do not send it again",
                applied=False,
            )
            error.retry = "never"
            raise error
        if outcome is Outcome.APPLIED:
            if is_hold(events):
                raise ended_error(await self.holds.get(namespace, request_of(events)[0]))
            # A cancel with another payload was given up meanwhile.
            raise UnavailableError("the cancel has to begin again", retry_after_us=1)
        self.cancels[outcome.was_counted] += 1
        return Cancelled(events[0].event_time_us, outcome.was_counted)

    async def _cancelled_key(
        self, namespace: Namespace, key: Key, events_of: Callable[[Token], Sequence[Event]]
    ) -> Sequence[Event]:
        """Cancel an arbitrary key; return the events of its token."""
        for _ in range(_RESERVE_ATTEMPTS_MAX):
            time_us, is_cancelled = await self._key_times.reserve(namespace, key)
            events = events_of(Token(key.nonce, time_us))
            # Before the key is changed: another payload must not cancel it.
            await self.resolver.check_payload(namespace, events)
            if await self._key_times.cancel(namespace, key, time_us, is_cancelled=is_cancelled):
                return events
        raise _expired_repeatedly()

    async def _write_gathered(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | CounterError]:
        try:
            if self._guard is not None and self._store.separate_writes is not None:
                # Without transactions the writer checks the clock only after the mark.
                self._guard.check(namespace.dataset)
            outcomes = await self._writer.write_admitted(namespace, events)
        except _OF_ONE:
            # Nothing is written, and one event may be the cause. LATE sends each to add().
            return [Written.LATE] * len(events)
        except CounterError as error:
            self.tally.record_failure(error, len(events))
            return [error] * len(events)
        self.tally.record(namespace.name, outcomes)
        return outcomes

    async def _increment_gathered(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | CounterError]:
        results = await self._increment(namespace, [(each.counter, each.delta) for each in events])
        return [each if isinstance(each, CounterError) else Written.UNVERIFIED for each in results]

    async def _increment(
        self, namespace: Namespace, changes: Sequence[tuple[str, int]]
    ) -> list[Added | CounterError]:
        """Add each delta to its best-effort counter; return an outcome for each."""
        try:
            values = await self._cache.increment_many(namespace, changes)
        except CounterError as error:
            self.tally.record_failure(error, len(changes))
            raise
        now_us = self._clock.now_us()
        changed = 0
        results: list[Added | CounterError] = []
        for change, value in zip(changes, values, strict=True):
            if isinstance(value, CounterError):
                self.tally.record_failure(value)
                results.append(value)
            else:
                changed += 1
                results.append(Added(*change, now_us, None))
        self.tally.count(namespace.name, "best_effort", changed)
        return results

    async def _submit(
        self,
        namespace: Namespace,
        events: Sequence[Event],
        allowance: Allowance,
        is_cancelled: bool = False,
    ) -> list[Added]:
        """Write the events of one token, or resolve it if it is late. Of an arbitrary key that
        *is_cancelled* nothing is written: its cancel may be under way."""
        outcome: Written | CounterError = Written.LATE
        late = self._writer.is_late(namespace, events[0].event_time_us, self._clock.now_us())
        if not late and not is_cancelled:
            if events[0].item_key:
                outcome = await self._writer.write_atomic(namespace, events)
            else:
                [outcome] = await self._writer.write(namespace, events)
        if outcome is not Written.LATE:
            return [self._added(namespace, e, outcome) for e in events if not is_held(e.counter)]
        return await self._resolve(namespace, events, allowance, is_cancelled)

    def _added(self, namespace: Namespace, event: Event, outcome: Written | CounterError) -> Added:
        """Return the result of an event that was written. Raises its error otherwise."""
        if isinstance(outcome, CounterError):
            raise outcome
        if outcome is Written.CONFLICT:
            raise conflict(event)
        self.tally.record(namespace.name, (outcome,))
        return Added(event[0], event[4], event[1], REPLAYED[outcome])

    async def _write_each(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> list[Added | CounterError | None]:
        """Return an outcome for each event; None for a late one."""
        if not events:
            return []
        try:
            outcomes = await self._writer.write(namespace, events)
        except CounterError as error:
            self.tally.record_failure(error, len(events))
            return [error] * len(events)
        if outcomes.count(Written.NEW) == len(events):
            self.tally.record(namespace.name, outcomes)
            # Built without the constructor, which takes twice the time.
            new = tuple.__new__
            return [new(Added, (event[0], event[4], event[1], False)) for event in events]
        return [
            self._result(namespace, event, outcome)
            for event, outcome in zip(events, outcomes, strict=True)
        ]

    def _result(
        self, namespace: Namespace, event: Event, outcome: Written | CounterError
    ) -> Added | CounterError | None:
        if outcome is Written.LATE:
            return None
        try:
            with self.tally.recording_failures():
                return self._added(namespace, event, outcome)
        except CounterError as error:
            return error

    async def _finish(
        self,
        namespace: Namespace,
        results: Sequence[Added | CounterError | None],
        adds: Sequence[Add],
        allowance: Allowance,
    ) -> list[Added | CounterError]:
        """Complete *results* with the outcomes of late adds and of adds without a token.

        Late tokens and arbitrary keys are charged here, before their tasks start: a batch gets all
        of them or none, and one refusal serves all. So does the one of adds without a credential.
        """
        left = [each for each, result in zip(adds, results, strict=True) if result is None]
        late = sum(isinstance(each.credential, Token) for each in left)
        keys = sum(isinstance(each.credential, str) for each in left)
        missing = _token_missing(namespace)
        self.tally.record_failure(missing, len(left) - late - keys)
        refusals = {
            Token: self._refused(allowance.resolve, late),
            str: self._refused(allowance.reserve, keys),
            NoneType: missing,
        }
        admitted = [each for each in left if refusals.get(type(each.credential)) is None]
        others: Iterator[Added | CounterError] = iter(())
        if admitted:
            charged = BatchAllowance(allowance, 0 if refusals[Token] else late)
            others = iter(await self._add_one_by_one(namespace, admitted, charged))
        return [
            result or refusals.get(type(each.credential)) or next(others)
            for each, result in zip(adds, results, strict=True)
        ]

    def _refused(self, charge: Callable[[int], None], count: int) -> RateLimitedError | None:
        """Charge the current request for *count* adds, or return the error if the limit is
        reached."""
        try:
            if count:
                charge(count)
        except RateLimitedError as error:
            self.tally.record_failure(error, count)
            return error
        return None

    async def _add_one_by_one(
        self, namespace: Namespace, adds: Sequence[Add], allowance: Allowance
    ) -> list[Added | CounterError]:
        try:
            with self.one_by_one.holding(len(adds)):
                return await at_once(
                    partial(self.add, namespace, *each[:3], allowance, each.terms) for each in adds
                )
        except OverloadedError as error:
            self.tally.record_failure(error, len(adds))
            return [error] * len(adds)

    async def _resolve(
        self,
        namespace: Namespace,
        events: Sequence[Event],
        allowance: Allowance,
        is_cancelled: bool,
    ) -> list[Added]:
        """Return the results if the late token was applied; otherwise raise its error."""
        async with self._resolution(allowance, len(events)):
            outcome = await self._settle(namespace, events)
        if outcome.is_cancelled or (is_cancelled and outcome is Outcome.VOID):
            raise TokenCancelledError(
                "the token was cancelled: it does not count and never will;"
                " if the add is wanted after all, send it as a new one"
            )
        if outcome is Outcome.VOID:
            raise TokenTooOldError(
                "the token was not applied in time and never will be;"
                " if the add is still wanted, send it with a new token",
                applied=False,
            )
        self.tally["late_applied"] += len(events)
        return [Added(each.counter, each.delta, each.event_time_us, True) for each in events]

    @asynccontextmanager
    async def _resolution(self, allowance: Allowance, size: int) -> AsyncIterator[None]:
        """Charge for a resolution of *size* events and wait for its turn; hold it within the block.

        Raises RateLimitedError and OverloadedError."""
        allowance.resolve(1)
        with self.late.holding(size):
            async with self._resolving:
                yield

    async def _settle(
        self, namespace: Namespace, events: Sequence[Event], *, cancels: bool = False
    ) -> Outcome:
        """Return the outcome of a late token, or cancel a token."""
        outcome = await self.resolver.resolve(namespace, events, cancels=cancels)
        if not self._store.capabilities.embedded:
            # A resolution may take long, and the namespace may have been deleted meanwhile.
            self.namespaces.current(namespace, self._clock.boottime_us())
        return outcome


def _key_of(namespace: Namespace, operation: str, target: str, credential: str | None) -> Key:
    """Return an arbitrary key. One of a hold is remembered for as long as the hold may live, or a
    retry would begin another one. Raises TokenMissingError."""
    if credential is None:
        raise _token_missing(namespace)
    least_us = longest_of_hold(namespace) if operation == "hold" else 0
    nonce = nonce_of_key(namespace.id, operation, target, credential)
    return Key(nonce, max(least_us, namespace.settings.key_ttl_us))


def _expired_repeatedly() -> OverloadedError:
    detail = "the reserved time of the key expired repeatedly; retry"
    return OverloadedError(detail, retry_after_us=limits.SECOND)


def _token_missing(namespace: Namespace) -> TokenMissingError:
    return TokenMissingError(
        f"namespace {namespace.name!r} is {namespace.settings.counter_type}: give an"
        " idempotency_token in the body or an Idempotency-Key header"
    )
