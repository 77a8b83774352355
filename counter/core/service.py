"""Implement the writes: add, clear, add many, add atomically. :class:`CountReader` reads.

An add is admitted by its token's age, its mark is made durable, its age is checked AGAIN, its event
is written, and it is acknowledged if the deadline that began at that second check has not passed. A
token too old for that is resolved instead. docs/architecture.md explains why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from types import NoneType
from typing import Final, TypeVar

from counter import limits
from counter.core.admission import Bounded, Load, WeightedSemaphore
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.namespaces import Namespaces
from counter.core.rate_limits import UNLIMITED, Allowance, BatchAllowance
from counter.core.read import CountReader
from counter.core.resolve import Resolver, conflict
from counter.core.results import REPLAYED, Add, Added, AddTally, Credential, Keyed
from counter.core.write import EventWriter
from counter.errors import (
    CounterError,
    NamespaceUnknownError,
    NotSupportedError,
    OverloadedError,
    RateLimitedError,
    SliceMissingError,
    TokenConflictError,
    TokenInFutureError,
    TokenMissingError,
    TokenTooOldError,
    UnavailableError,
)
from counter.folds import fingerprint
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
    Reservation,
    Span,
    Token,
    Written,
)
from counter.windows import window_of

#: Called with the outcome of an add, or with the error that leaves it without one.
Done = Callable[[Written | CounterError], None]
#: Writes the events of one namespace; returns an outcome, or an error, for each.
Write = Callable[[Namespace, Sequence[Event]], Awaitable[Sequence[Written | CounterError]]]

_log = logging.getLogger("counter.adds")
_Result = TypeVar("_Result")
_RESERVE_ATTEMPTS_MAX: Final = 3
#: Errors of a write of many adds that one of them alone may have caused.
_OF_ONE: Final = (SliceMissingError, NamespaceUnknownError, TokenInFutureError)


class CounterService:
    """The counter service over its ports. It is stateless: any number of instances may run.

    There are three kinds of add; the other methods prepare one of them:

    * single: :meth:`add`, :meth:`clear` and :meth:`delete` do everything that an add can need:
      they reserve the time of an arbitrary key, write, and resolve a late token;
    * many: :meth:`add_many` writes all adds that are on time in one call of the store, and does
      those that are late or have an arbitrary key by :meth:`add`. :meth:`add_events` is the same
      for adds that all have tokens. :meth:`add_soon` makes one write of the adds that arrive in
      one iteration of the event loop, from any number of requests;
    * atomic: :meth:`add_atomic` counts all of its items or none. :meth:`add_keyed` does many.

    Each ends in one outcome: the table in :mod:`counter.core.results`.
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
        self.reader = CountReader(store, cache, clock, guard)

    async def add(
        self,
        namespace: Namespace,
        counter: str,
        delta: int,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
    ) -> Added:
        """Count *delta* exactly once for the token, including retries and hedges.

        The caller's *allowance* is charged for a late token, and for an arbitrary key."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            [result] = await self._increment(namespace, [(counter, delta)])
            if isinstance(result, CounterError):
                raise result
            return result
        with self.tally.recording_failures():
            return await self._with_token(
                namespace,
                "add",
                counter,
                credential,
                allowance,
                lambda token: self._submit(
                    namespace,
                    Event(counter, token.generation_time_us, token.nonce, 0, delta),
                    allowance,
                ),
            )

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
        return await self._clear(namespace, "clear", counter, credential, allowance, self._submit)

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
        submit: Callable[[Namespace, Event, Allowance], Awaitable[Added]],
    ) -> Added:
        with self.tally.recording_failures():
            if namespace.settings.counter_type is CounterType.BEST_EFFORT:
                await self._cache.clear(namespace, counter)
                self.tally.count(namespace.name, "best_effort")
                return Added(counter, 0, self._clock.now_us(), None)
            return await self._with_token(
                namespace,
                operation,
                counter,
                credential,
                allowance,
                lambda token: submit(
                    namespace,
                    Event(counter, token.generation_time_us, token.nonce, 0, 0, clear=True),
                    allowance,
                ),
            )

    async def _delete(self, namespace: Namespace, event: Event, allowance: Allowance) -> Added:
        """Write the clear and the pending delete, request a recount, and unlist the name.

        The name is unlisted last. However late that happens, the worker finds the pending delete,
        and lists the counter again if a later event was counted.
        """
        counter, time_us = event.counter, event.event_time_us
        after = EventPage(Span(time_us + 1, limits.TIME_MAX_US), limit=1)
        cleared = await self._submit(namespace, event, allowance)
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
        for index, (counter, delta, token) in enumerate(adds):
            if isinstance(token, Token):
                time_us = token.generation_time_us
                if time_us > last_us:
                    early.append((time_us, index))
                elif not self._writer.is_late(namespace, time_us, now_us):
                    fresh.append(index)
                    events.append(Event(counter, time_us, token.nonce, 0, delta))
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
        items: Sequence[tuple[str, int]],
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
            return await self._with_token(
                namespace,
                operation,
                scope,
                credential,
                allowance,
                lambda token: self._submit_atomic(
                    namespace, _events_of_atomic(items, token), allowance
                ),
            )

    async def add_keyed(
        self, namespace: Namespace, lists: Sequence[Keyed], allowance: Allowance = UNLIMITED
    ) -> list[list[Added] | CounterError]:
        """Do an atomic add for each list; return an outcome for each.

        A long sequence is done in parts that take turns with those of other requests, because each
        atomic add costs a task. The caller holds the adds in :attr:`one_by_one` meanwhile.
        """
        if refusal := self._refused(allowance.reserve, len(lists)):
            return [refusal] * len(lists)
        outcomes: list[list[Added] | CounterError] = []
        longest = max((len(each.items) for each in lists), default=1)
        size = max(1, limits.KEYED_ADDS_AT_ONCE_MAX // 2 // longest)
        charged = BatchAllowance(allowance)
        for start in range(0, len(lists), size):
            part = lists[start : start + size]
            async with self._keyed.holding(sum(len(each.items) for each in part)):
                outcomes += await _at_once(
                    partial(
                        self.add_atomic,
                        *(namespace, items, key, charged),
                        operation="event",
                        scope=scope,
                    )
                    for scope, key, items in part
                )
        return outcomes

    async def issue_tokens(self, count: int) -> list[Token]:
        """Return *count* tokens in strictly increasing order of ``(generation_time, nonce)``.

        The order holds over restarts, too, as long as the clock does not step back. The nonce is
        the store's own 8 bytes and a sequence number.
        """
        # All later tokens would keep a time from the future.
        now_us = checked_now_us(self._clock, self._guard)
        block = await self._store.control.lease_tokens(count, now_us)
        return [
            Token(block.issuer + number.to_bytes(8, "big"), block.time_us)
            for number in range(block.first, block.first + count)
        ]

    async def recount(self, namespace: Namespace, counter: str, from_us: int, to_us: int) -> int:
        """Request a recount of every rolled-up window that meets ``[from, to)``; return how
        many."""
        self.require_events(namespace, "a recount")
        size_us = namespace.settings.rollup_window_us
        dropped_before_us = await self._store.control.dropped_before(namespace.dataset)
        span = Span(max(from_us - size_us + 1, dropped_before_us), to_us)
        [rows] = await self._store.rollups.rows(namespace, [counter], span)
        windows = [(counter, row.window_us) for row in rows]
        for start in range(0, len(windows), limits.BATCH_ITEMS_MAX):
            part = windows[start : start + limits.BATCH_ITEMS_MAX]
            await self.resolver.request_recounts(namespace, part, for_readers=False)
        return len(windows)

    @staticmethod
    def require_events(namespace: Namespace, what: str) -> None:
        """Raise NotSupportedError if the namespace keeps no events."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            raise NotSupportedError(
                f"{what} needs events; namespace {namespace.name!r} is BEST_EFFORT, which keeps"
                " none: use an EVENTUAL or ACCURATE namespace"
            )

    async def _with_token(
        self,
        namespace: Namespace,
        operation: str,
        target: str,
        credential: Credential,
        allowance: Allowance,
        submit: Callable[[Token], Awaitable[_Result]],
    ) -> _Result:
        """Submit with the credential's token; the first use of an arbitrary key reserves one."""
        if self._guard is not None:
            self._guard.check(namespace.dataset)
        if credential is None:
            raise _token_missing(namespace)
        if isinstance(credential, Token):
            return await submit(credential)
        allowance.reserve(1)
        nonce = nonce_of_key(namespace.id, operation, target, credential)
        ttl_us = namespace.settings.key_ttl_us
        # After a clock step ahead a key must not expire early, or its add would be counted again.
        kept_us = 0 if self._guard is None else self._guard.followed_us
        time_us: int | None = None
        for _ in range(_RESERVE_ATTEMPTS_MAX):
            now_us = checked_now_us(self._clock, self._guard, namespace.dataset)
            wanted = Reservation(now_us, now_us + ttl_us, kept_us, replaces_us=time_us)
            time_us = await self._store.decisions.reserve(namespace, nonce, wanted)
            try:
                return await submit(Token(nonce, time_us))
            except TokenTooOldError as error:
                # If the token with this time is void permanently, the key gets a new time.
                if error.applied is None:
                    raise
            # Only this time is replaced. If another request has replaced it, the new one stays: the
            # clock may have been set ahead meanwhile, so it only seems expired.
            kept_us = limits.TIME_MAX_US
        raise OverloadedError(
            "the reserved time of the key expired repeatedly; retry", retry_after_us=limits.SECOND
        )

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
        for (counter, delta), value in zip(changes, values, strict=True):
            if isinstance(value, CounterError):
                self.tally.record_failure(value)
                results.append(value)
            else:
                changed += 1
                results.append(Added(counter, delta, now_us, None))
        self.tally.count(namespace.name, "best_effort", changed)
        return results

    async def _submit(self, namespace: Namespace, event: Event, allowance: Allowance) -> Added:
        if not self._writer.is_late(namespace, event.event_time_us, self._clock.now_us()):
            [outcome] = await self._writer.write(namespace, (event,))
            if outcome is not Written.LATE:
                return self._added(namespace, event, outcome)
        [added] = await self._resolve(namespace, (event,), allowance)
        return added

    async def _submit_atomic(
        self, namespace: Namespace, events: Sequence[Event], allowance: Allowance
    ) -> list[Added]:
        time_us = events[0].event_time_us
        outcome: Written | UnavailableError = Written.LATE
        if not self._writer.is_late(namespace, time_us, self._clock.now_us()):
            outcome = await self._writer.write_atomic(namespace, events)
        if outcome is not Written.LATE:
            return [self._added(namespace, event, outcome) for event in events]
        return await self._resolve(namespace, events, allowance)

    def _added(
        self, namespace: Namespace, event: Event, outcome: Written | UnavailableError
    ) -> Added:
        """Return the result of an event that was written. Raises its error otherwise."""
        if isinstance(outcome, UnavailableError):
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
        self, namespace: Namespace, event: Event, outcome: Written | UnavailableError
    ) -> Added | CounterError | None:
        if outcome is Written.LATE:
            return None
        try:
            with self.tally.recording_failures():
                return self._added(namespace, event, outcome)
        except (TokenConflictError, UnavailableError) as error:
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
                return await _at_once(
                    partial(self.add, namespace, *each, allowance) for each in adds
                )
        except OverloadedError as error:
            self.tally.record_failure(error, len(adds))
            return [error] * len(adds)

    async def _resolve(
        self, namespace: Namespace, events: Sequence[Event], allowance: Allowance
    ) -> list[Added]:
        """Return the results if the late token was applied; otherwise raise its error."""
        allowance.resolve(1)
        self.late.take(len(events))
        try:
            async with self._resolving:
                outcome = await self.resolver.resolve(namespace, events)
            if not self._store.capabilities.embedded:
                # A resolution may take long, and the namespace may have been deleted meanwhile.
                self.namespaces.current(namespace, self._clock.boottime_us())
        finally:
            self.late.give_back(len(events))
        if outcome is Outcome.VOID:
            raise TokenTooOldError(
                "the token was not applied in time and never will be;"
                " if the add is still wanted, send it with a new token",
                applied=False,
            )
        self.tally["late_applied"] += len(events)
        return [Added(each.counter, each.delta, each.event_time_us, True) for each in events]


class _Gathered:
    """Adds of one namespace that are written together."""

    __slots__ = ("dones", "events", "namespace")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.events: list[Event] = []
        self.dones: list[Done] = []


class AddGatherer:
    """Gathers the adds that arrive in one iteration of the event loop, so that one task and one
    call write them. A task for each add would cost more than the add."""

    def __init__(self, write: Write, load: Load) -> None:
        self._write = write
        self._load = load
        #: The adds of this iteration, by the id() of their namespace: another version of its
        #: settings is another object.
        self._gathering: dict[int, _Gathered] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, namespace: Namespace, event: Event, done: Done) -> None:
        """Write *event* with the others of this iteration, then call *done*. Raises
        OverloadedError before any work."""
        key = id(namespace)
        gathered = self._gathering.get(key)
        self._load.admit(1, begins_turn=not self._gathering)
        if gathered is None:
            gathered = self._gathering[key] = _Gathered(namespace)
            task = asyncio.get_running_loop().create_task(self._flush(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        gathered.events.append(event)
        gathered.dones.append(done)

    async def _flush(self, key: int) -> None:
        gathered = self._gathering.pop(key)
        self._load.end_turn()
        try:
            outcomes = await self._write(gathered.namespace, gathered.events)
        except Exception as error:
            outcomes = [_unexpected(error)] * len(gathered.events)
        finally:
            self._load.finish(len(gathered.events))
        for done, outcome in zip(gathered.dones, outcomes, strict=True):
            try:
                done(outcome)
            except Exception:
                # An add whose caller fails must not block the others.
                _log.exception("the outcome of an add could not be reported")


async def _at_once(
    calls: Iterable[Callable[[], Awaitable[_Result]]],
) -> list[_Result | CounterError]:
    """Make all *calls* at once, each in its own task, and return an outcome for each: one failure
    does not affect others."""

    async def outcome(call: Callable[[], Awaitable[_Result]]) -> _Result | CounterError:
        try:
            return await call()
        except CounterError as error:
            return error

    return await asyncio.gather(*map(outcome, calls))


def adds_of(events: Sequence[Event]) -> list[Add]:
    """Return the adds that *events* came from, each with its token."""
    return [Add(e.counter, e.delta, Token(e.event_id, e.event_time_us)) for e in events]


def _events_of_atomic(items: Sequence[tuple[str, int]], token: Token) -> list[Event]:
    """Return the events of an atomic add.

    An item's key is its rank among those of the same counter, by their deltas, so the order of the
    items does not matter.
    """
    earlier: dict[str, int] = {}
    keys = [0] * len(items)
    for index in sorted(range(len(items)), key=items.__getitem__):
        counter = items[index][0]
        earlier[counter] = earlier.get(counter, 0) + 1
        keys[index] = earlier[counter]
    events = [
        Event(counter, token.generation_time_us, token.nonce, key, delta)
        for (counter, delta), key in zip(items, keys, strict=True)
    ]
    atom = fingerprint(events)
    return [event._replace(atom=atom) for event in events]


def _token_missing(namespace: Namespace) -> TokenMissingError:
    return TokenMissingError(
        f"namespace {namespace.name!r} is {namespace.settings.counter_type}: give an"
        " idempotency_token in the body or an Idempotency-Key header"
    )


def _unexpected(error: Exception) -> CounterError:
    """Return what to answer for an *error* that no code expects."""
    _log.error("a write of adds failed unexpectedly", exc_info=error)
    fault = CounterError("internal error; see the server log")
    fault.__cause__ = error
    return fault
