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
from counter.core.results import (
    REPLAYED,
    TALLIED,
    TALLIES,
    Add,
    Added,
    Credential,
    Keyed,
    count_failure,
    counts_failures,
)
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
    Namespace,
    Outcome,
    PayloadCheck,
    Pending,
    Token,
    Written,
)
from counter.windows import window_of

#: Called with the outcome of an add, or with the error that leaves it without one.
Done = Callable[[Written | CounterError], None]
#: Writes the events of one namespace; returns an outcome, or an error, for each.
Write = Callable[[Namespace, Sequence[Event]], Awaitable[Sequence[Written | CounterError]]]

_log = logging.getLogger("counter.turns")
_Answer = TypeVar("_Answer")
_RERESERVE_ATTEMPTS_MAX: Final = 3
#: Refusals of a list of adds that a single one of them may have caused.
_OF_ONE: Final = (SliceMissingError, NamespaceUnknownError, TokenInFutureError)


class CounterService:
    """The counter service over its ports. It is stateless: any number of instances may run."""

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
        #: Adds and clears by outcome, since the process began.
        self.tally = dict.fromkeys(TALLIES, 0)
        #: CloudEvents of types without a rule.
        self.events_ignored = 0
        self._resolving = asyncio.Semaphore(limits.RESOLUTIONS_AT_ONCE_MAX)
        self.late = Bounded("late tokens are being resolved", limits.RESOLUTIONS_MAX)
        self._turns = Turns(self._write_turn, self.load)
        # Their own load: if the cache stalls, the adds of other counters must not look slow.
        self._turns_of_changes = Turns(self._change_turn, Load(clock))
        #: Adds that one batched write cannot do: those under way have tasks, others wait.
        self.one_by_one = Bounded("adds of batches are under way", limits.PENDING_WRITES_MAX)
        self._keyed = WeightedSemaphore(limits.KEYED_ADDS_AT_ONCE_MAX)
        self.resolver = Resolver(store, clock, guard, self.namespaces)
        self.reader = CountReader(store, cache, clock, guard)

    @counts_failures
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
            [value] = await self._change(namespace, [(counter, delta)])
            if isinstance(value, CounterError):
                raise value
            return Added(counter, delta, self._clock.now_us(), None)
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
        """Count *event* together with the others of this turn of the event loop, then call *done*.
        One of a best-effort counter is made by :meth:`change`.

        The outcomes LATE and CONFLICT are preliminary: :meth:`add` decides them. Returns False, and
        does nothing, if :meth:`add` must do the whole add.
        """
        turns = self._turns
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            turns = self._turns_of_changes
        elif not self._may_share_a_write(namespace, event):
            return False
        try:
            turns.add(namespace, event, done)
        except OverloadedError as error:
            count_failure(self.tally, error)
            done(error)
        return True

    def _may_share_a_write(self, namespace: Namespace, event: Event) -> bool:
        strict = namespace.settings.payload_check is PayloadCheck.STRICT
        if strict and not self._store.capabilities.transactional:
            # Compare-and-sets of one counter contend: no other add waits for them.
            return False
        first_us, last_us = self._writer.surely_on_time(namespace, self._clock.now_us())
        return first_us <= event.event_time_us <= last_us

    def change(self, counter: str, delta: int) -> Event:
        """Return an add to a best-effort counter, which has no token, for :meth:`add_soon`."""
        return Event(counter, self._clock.now_us(), b"", 0, delta)

    @counts_failures
    async def clear(
        self,
        namespace: Namespace,
        counter: str,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
    ) -> Added:
        """Set the counter to 0 as of the token's time: every earlier event is erased."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            await self._cache.clear(namespace, counter)
            self.tally["best_effort"] += 1
            return Added(counter, 0, self._clock.now_us(), None)
        return await self._with_token(
            namespace,
            "clear",
            counter,
            credential,
            allowance,
            lambda token: self._submit(
                namespace,
                Event(counter, token.generation_time_us, token.nonce, 0, 0, clear=True),
                allowance,
            ),
        )

    @counts_failures
    async def delete(
        self,
        namespace: Namespace,
        counter: str,
        credential: Credential,
        allowance: Allowance = UNLIMITED,
    ) -> Added:
        """Clear the counter, and take its name off the list until it has a later event."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            return await self.clear(namespace, counter, credential, allowance)
        return await self._with_token(
            namespace,
            "delete",
            counter,
            credential,
            allowance,
            lambda token: self._delete(
                namespace,
                Event(counter, token.generation_time_us, token.nonce, 0, 0, clear=True),
                allowance,
            ),
        )

    async def _delete(self, namespace: Namespace, event: Event, allowance: Allowance) -> Added:
        """Write the clear, leave the delete, have a worker look at the counter, and take the name
        off the list.

        The name goes last: however late that is done, the worker sees the delete, and lists the
        counter again if an event followed that a process counted meanwhile.
        """
        counter, time_us = event.counter, event.event_time_us
        cleared = await self._submit(namespace, event, allowance)
        later = await self._store.events.scan(
            namespace,
            counter,
            from_us=time_us + 1,
            to_us=limits.TIME_MAX_US,
            before=None,
            limit=1,
        )
        if not later:
            delete = Pending(DELETED, time_us)
            await self._store.rollups.leave_pending(namespace, [(counter, delete)])
        window_us = window_of(time_us, namespace.settings.rollup_window_us)
        await self.resolver.leave_recounts(namespace, [(counter, window_us)], for_readers=False)
        if not later:
            await self._store.rollups.unlist(namespace, counter, time_us)
        return cleared

    async def add_many(
        self, namespace: Namespace, adds: Sequence[Add], allowance: Allowance = UNLIMITED
    ) -> list[Added | CounterError]:
        """Do each add separately, with one commit for those on time; return an outcome for each."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            values = await self._change(namespace, [(each.counter, each.delta) for each in adds])
            self._count_failures(values)
            now_us = self._clock.now_us()
            return [
                value if isinstance(value, CounterError) else Added(counter, delta, now_us, None)
                for (counter, delta, _), value in zip(adds, values, strict=True)
            ]
        if self._guard is not None:
            self._guard.check(namespace.dataset)
        results: list[Added | CounterError | None] = [None] * len(adds)
        fresh: list[int] = []
        events: list[Event] = []
        early: list[tuple[int, int]] = []
        now_us = self._clock.now_us()
        _, last_us = self._writer.surely_on_time(namespace, now_us)
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
            error = self._writer.in_future(namespace, max(early)[0], now_us, len(early))
            count_failure(self.tally, error, len(early))
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
        first_us, last_us = self._writer.surely_on_time(namespace, self._clock.now_us())
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

    @counts_failures
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
        [rows] = await self._store.rollups.rows(
            namespace,
            [counter],
            after_us=max(from_us - size_us, dropped_before_us - 1),
            through_us=to_us - 1,
        )
        windows = [(counter, row.window_us) for row in rows]
        for start in range(0, len(windows), limits.BATCH_ITEMS_MAX):
            part = windows[start : start + limits.BATCH_ITEMS_MAX]
            await self.resolver.leave_recounts(namespace, part, for_readers=False)
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
        submit: Callable[[Token], Awaitable[_Answer]],
    ) -> _Answer:
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
        now_us = checked_now_us(self._clock, self._guard, namespace.dataset)
        # After a clock step ahead a key must not expire early, or its add would be counted again.
        kept_us = 0 if self._guard is None else self._guard.followed_us
        time_us = await self._store.decisions.reserve(
            namespace, nonce, now_us, now_us + ttl_us, kept_us
        )
        for _ in range(_RERESERVE_ATTEMPTS_MAX):
            try:
                return await submit(Token(nonce, time_us))
            except TokenTooOldError as error:
                if error.applied is None:
                    raise
                # The token with the old time is void permanently: the key gets a new time.
                now_us = checked_now_us(self._clock, self._guard, namespace.dataset)
                time_us = await self._store.decisions.rereserve(
                    namespace, nonce, time_us, now_us, now_us + ttl_us
                )
        raise OverloadedError(
            "the reserved time of the key expired repeatedly; retry", retry_after_us=limits.SECOND
        )

    async def _write_turn(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | CounterError]:
        try:
            if self._guard is not None and not self._store.capabilities.transactional:
                # Without transactions the writer checks it only after the mark.
                self._guard.check(namespace.dataset)
            outcomes = await self._writer.write_admitted(namespace, events)
        except _OF_ONE:
            # Nothing is written; one event may be the cause, so each is tried separately.
            return [Written.LATE] * len(events)
        except CounterError as error:
            count_failure(self.tally, error, len(events))
            return [error] * len(events)
        for outcome in REPLAYED:
            self.tally[TALLIED[outcome]] += outcomes.count(outcome)
        self._count_failures(outcomes)
        return outcomes

    async def _change_turn(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | CounterError]:
        values = await self._change(namespace, [(each.counter, each.delta) for each in events])
        self._count_failures(values)
        return [each if isinstance(each, CounterError) else Written.UNVERIFIED for each in values]

    async def _change(
        self, namespace: Namespace, changes: Sequence[tuple[str, int]]
    ) -> Sequence[int | CounterError]:
        """Add each delta to its best-effort counter; return each value after it, or its error."""
        values = await self._cache.increment_many(namespace, changes)
        self.tally["best_effort"] += sum(not isinstance(each, CounterError) for each in values)
        return values

    def _count_failures(self, outcomes: Sequence[object]) -> None:
        for each in outcomes:
            if isinstance(each, CounterError):
                count_failure(self.tally, each)

    async def _submit(self, namespace: Namespace, event: Event, allowance: Allowance) -> Added:
        if not self._writer.is_late(namespace, event.event_time_us, self._clock.now_us()):
            [outcome] = await self._writer.write(namespace, (event,))
            if outcome is not Written.LATE:
                return self._added(event, outcome)
        await self._resolve(namespace, (event,), allowance)
        return Added(event.counter, event.delta, event.event_time_us, True)

    async def _submit_atomic(
        self, namespace: Namespace, events: Sequence[Event], allowance: Allowance
    ) -> list[Added]:
        time_us = events[0].event_time_us
        outcome: Written | UnavailableError = Written.LATE
        if not self._writer.is_late(namespace, time_us, self._clock.now_us()):
            outcome = await self._writer.write_atomic(namespace, events)
        if outcome is Written.CONFLICT:
            self.tally["conflict"] += len(events)
            raise conflict(events[0])
        if outcome is not Written.LATE:
            return [self._added(event, outcome) for event in events]
        await self._resolve(namespace, events, allowance)
        return [Added(event.counter, event.delta, time_us, True) for event in events]

    def _added(self, event: Event, outcome: Written | UnavailableError) -> Added:
        """Return the answer to an event that was written. Raises its error otherwise."""
        if isinstance(outcome, UnavailableError):
            raise outcome
        self.tally[TALLIED[outcome]] += 1
        if outcome is Written.CONFLICT:
            raise conflict(event)
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
            count_failure(self.tally, error, len(events))
            return [error] * len(events)
        if outcomes.count(Written.NEW) == len(events):
            self.tally["original"] += len(events)
            # Built without the constructor, which takes twice the time.
            new = tuple.__new__
            return [new(Added, (event[0], event[4], event[1], False)) for event in events]
        return [
            self._answer(event, outcome) for event, outcome in zip(events, outcomes, strict=True)
        ]

    def _answer(
        self, event: Event, outcome: Written | UnavailableError
    ) -> Added | CounterError | None:
        if outcome is Written.LATE:
            return None
        try:
            return self._added(event, outcome)
        except (TokenConflictError, UnavailableError) as error:
            count_failure(self.tally, error)
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
        count_failure(self.tally, missing, len(left) - late - keys)
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
            count_failure(self.tally, error, count)
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
            count_failure(self.tally, error, len(adds))
            return [error] * len(adds)

    async def _resolve(
        self, namespace: Namespace, events: Sequence[Event], allowance: Allowance
    ) -> None:
        """Return if the token was applied; otherwise raise its error."""
        allowance.resolve(1)
        self.late.take(len(events))
        try:
            async with self._resolving:
                outcome = await self.resolver.resolve(namespace, events)
            if not self._store.capabilities.embedded:
                # A resolution may take long, and the namespace may have been deleted meanwhile.
                self.namespaces.current(namespace, self._clock.boottime_us())
        except TokenConflictError:
            self.tally["conflict"] += len(events)
            raise
        finally:
            self.late.give_back(len(events))
        void = outcome is Outcome.VOID
        self.tally["voided" if void else "late_applied"] += len(events)
        if void:
            raise TokenTooOldError(
                "the token was not applied in time and never will be;"
                " if the add is still wanted, send it with a new token",
                applied=False,
            )


class _Turn:
    __slots__ = ("dones", "events", "namespace")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.events: list[Event] = []
        self.dones: list[Done] = []


class Turns:
    """Gathers the adds of one turn of the event loop, so that one task and one call write them.

    A task for each add would cost more than the add.
    """

    def __init__(self, write: Write, load: Load) -> None:
        self._write = write
        self._load = load
        #: The turns that still gather, one for each namespace and version of its settings.
        self._gathering: dict[int, _Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, namespace: Namespace, event: Event, done: Done) -> None:
        """Write *event* with the others of its turn, then call *done*. Raises OverloadedError
        before any work."""
        key = id(namespace)
        turn = self._gathering.get(key)
        self._load.admit(1, begins_turn=not self._gathering)
        if turn is None:
            turn = self._gathering[key] = _Turn(namespace)
            task = asyncio.get_running_loop().create_task(self._flush(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        turn.events.append(event)
        turn.dones.append(done)

    async def _flush(self, key: int) -> None:
        turn = self._gathering.pop(key)
        self._load.turn_over()
        try:
            outcomes = await self._write(turn.namespace, turn.events)
        except Exception as error:
            outcomes = [_unexpected(error)] * len(turn.events)
        finally:
            self._load.finish(len(turn.events))
        for done, outcome in zip(turn.dones, outcomes, strict=True):
            try:
                done(outcome)
            except Exception:
                # An add that cannot be answered must not block the others.
                _log.exception("the outcome of an add could not be reported")


async def _at_once(
    calls: Iterable[Callable[[], Awaitable[_Answer]]],
) -> list[_Answer | CounterError]:
    """Make all *calls* at once, each in its own task, and return an outcome for each: one failure
    does not affect others."""

    async def outcome(call: Callable[[], Awaitable[_Answer]]) -> _Answer | CounterError:
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
