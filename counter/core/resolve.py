"""Decide late tokens and cancel tokens: every retry gets the same answer, on any server.

docs/architecture.md explains the steps and their order. After a crash between any two steps, the
next retry continues; for atomic adds the rollup worker does, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from counter.core.adds import bound_reached
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.namespaces import Namespaces
from counter.errors import TokenConflictError, TokenPendingError, TokenTooOldError
from counter.ports import Clock, SeparateWrites, Store
from counter.types import (
    OTHER_PAYLOAD,
    AtomicMark,
    Decision,
    Event,
    EventPage,
    Mark,
    Namespace,
    Outcome,
    Pending,
    Sight,
    Span,
)
from counter.windows import closes_at, closing_limit_at, deciding_time, fingerprint, window_of

_Decide = Callable[[Namespace, Sequence[Event], Decision], Awaitable[Decision]]


def is_before(namespace: Namespace, time_us: int) -> bool:
    """Return whether a token's time is so early that the namespace never had an event of it."""
    earliest_us = namespace.created_at_us - namespace.eras[0].accept_limit_us
    return time_us < earliest_us - 2 * namespace.dataset.clock_skew_max_us


class Resolver:
    """Decides permanently what became of a token that is too old to be written, or cancels one."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        guard: ClockGuard | None = None,
        namespaces: Namespaces | None = None,
    ) -> None:
        """If *namespaces* is None, the caller has checked that its directory copy is fresh."""
        self._store = store
        self._clock = clock
        self._guard = guard
        self._namespaces = namespaces

    async def resolve(
        self,
        namespace: Namespace,
        events: Sequence[Event],
        *,
        cancels: bool = False,
        by_worker: bool = False,
        is_decided: bool = False,
        sight: Sight = Sight.NOTHING,
    ) -> Outcome:
        """Return the decision about the token of *events* (all of one token).

        With *cancels* the token is cancelled, whatever became of it; VOID then means that it is
        too old to be recorded as cancelled, and never counts. With *by_worker*, which settles
        atomic adds, retention is not checked: a client would get TokenTooOldError with ``applied:
        None``. *is_decided* says that a decision is known to exist, and *sight* what no worker can
        have missed that has passed the atomic mark.

        Raises TokenConflictError, TokenPendingError while an admitted write may be in flight,
        BoundReachedError for a refused add, TokenTooOldError with ``applied: None`` past retention,
        ClockSkewError.
        """
        # Read the clock BEFORE the look-up. If it were read later, a window could close in between,
        # and a write that landed meanwhile would be voided.
        now_us = self._now_us(namespace)
        if self._namespaces is not None and not self._store.capabilities.embedded:
            # After the clock, so that a pause between the two counts against the copy.
            namespace = self._namespaces.current(namespace, self._clock.boottime_us())
        time_us = events[0].event_time_us
        if is_before(namespace, time_us):
            return Outcome.VOID
        if not by_worker:
            window_us = namespace.settings.rollup_window_us
            accept_limit_us = closing_limit_at(namespace, time_us)
            margin_us = deciding_time(namespace.dataset, window_us, accept_limit_us)
            self._check_retention(namespace, time_us, now_us, margin_us)
        found = await self._find(namespace, events)
        if cancels and not any(found):
            await self._check_use(namespace, events)
        separate = self._store.separate_writes
        # Without transactions an attempt that was admitted could be acknowledged after its cancel.
        if not (separate is None if cancels else all(found)):
            await self._check_closed(namespace, events, now_us, cancels=cancels)
        if separate is None and any(found) and not cancels:
            return _applied(found)
        decide = self._store.decisions.cancel if cancels else self._store.decisions.decide
        decide_once = partial(self._decide, decide, namespace, events, _proposed(found, cancels))
        if separate is None or not events[0].item_key:
            outcome = (await decide_once()).outcome
            if separate is None and outcome is Outcome.APPLIED and not cancels:
                # It was written meanwhile. If it is gone again, it was cancelled since.
                found = await self._find(namespace, events)
                outcome = _applied(found) if any(found) else (await decide_once()).outcome
        else:
            outcome = await self._decide_marked(
                *(separate, namespace, events, decide_once), is_decided=is_decided, sight=sight
            )
        if separate is not None:
            await self._carry_out(separate, namespace, events, outcome)
        if not by_worker:
            window_us = namespace.settings.rollup_window_us
            margin_us = window_us + 2 * namespace.dataset.clock_skew_max_us
            self._check_retention(namespace, time_us, self._clock.now_us(), margin_us)
        return outcome

    async def check_payload(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Raise TokenConflictError if the token of *events* is known with another payload."""
        found = await self._find(namespace, events)
        decision = await self._store.decisions.decided(namespace, events)
        known = (fingerprint(events), *((OTHER_PAYLOAD,) if all(found) else ()))
        if decision is not None and decision.fingerprint not in known:
            raise conflict(events[0])

    async def _find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        """Return the stored events. Raises TokenConflictError."""
        found = await self._store.events.find(namespace, events)
        for event, stored in zip(events, found, strict=True):
            if stored is not None and not stored.same_payload(event):
                raise conflict(event)
        return found

    async def _check_use(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Raise TokenConflictError if the token was used by an atomic add, and *events* are a
        single one; or the other way round. These have no event in common."""
        first = events[0]
        if first.item_key:
            singles = {each.counter: each._replace(item_key=0) for each in events}
            others = await self._store.events.find(namespace, list(singles.values()))
            is_used, how = any(others), "a single add, a clear or a delete: cancel that"
        else:
            time_us = first.event_time_us
            page = EventPage(Span(time_us, time_us + 1), limit=1, before=first)
            items = await self._store.events.scan(namespace, first.counter, page)
            is_used = any(each.event_id == first.event_id for each in items)
            how = "an atomic add, a CloudEvent or a hold: cancel that as a whole, by atomic/cancel,"
            how += ' events/cancel, or as the operation "hold"; the settle of a hold is corrected'
            how += " with an add"
        if is_used:
            raise TokenConflictError(f"the token is that of {how}")

    @staticmethod
    async def _decide(
        decide: _Decide, namespace: Namespace, events: Sequence[Event], outcome: Outcome
    ) -> Decision:
        proposed = Decision(outcome, fingerprint(events))
        decided = await decide(namespace, events, proposed)
        if decided.fingerprint != proposed.fingerprint:
            raise conflict(events[0])
        return decided

    async def _decide_marked(
        self,
        separate: SeparateWrites,
        namespace: Namespace,
        events: Sequence[Event],
        decide_once: Callable[[], Awaitable[Decision]],
        *,
        is_decided: bool,
        sight: Sight,
    ) -> Outcome:
        """Decide about an atomic add so that a worker can finish it if this process crashes.

        The worker must find the mark and the decision. So the mark is written before the decision,
        in an open window, and the decision must be durable while that window is open. If there was
        a decision before, a second mark then says that all this is so, by its *sight*: who finds it
        leaves no further mark, unless the token was cancelled since. It may land late, so it cannot
        stand for the first one.
        """
        if sight is not Sight.NOTHING:
            decision = await decide_once()
            # Not the decision that was looked up: a cancel may have replaced that one.
            if decision.sight is sight:
                return decision.outcome
        now_us = self._now_us(namespace)
        while True:
            marked_us = window_of(now_us, namespace.settings.rollup_window_us)
            mark = AtomicMark(marked_us, tuple(events))
            await separate.mark_atomic(namespace, mark)
            decision = await decide_once()
            now_us = self._now_us(namespace)
            if _is_surely_open(namespace, marked_us, now_us):
                break
        if is_decided:
            await separate.mark_atomic(namespace, mark._replace(sight=decision.sight))
        return decision.outcome

    async def _carry_out(
        self,
        separate: SeparateWrites,
        namespace: Namespace,
        events: Sequence[Event],
        outcome: Outcome,
    ) -> None:
        if outcome is Outcome.APPLIED:
            await separate.rewrite(namespace, events)
        else:
            await separate.void(namespace, events)
        recount_us = window_of(events[0].event_time_us, namespace.settings.rollup_window_us)
        counters = list(dict.fromkeys(event.counter for event in events))
        await self.request_recounts(
            namespace, [(each, recount_us) for each in counters], for_readers=True
        )

    async def request_recounts(
        self, namespace: Namespace, windows: Sequence[tuple[str, int]], *, for_readers: bool
    ) -> None:
        """Request a recount of windows of counters from the worker. With *for_readers*, readers
        also recount them until it is done.

        All marks must be durable while their window is open, or a worker may have passed it
        already. Raises ClockSkewError if the clock cannot be trusted.
        """
        size_us = namespace.settings.rollup_window_us
        now_us = self._now_us(namespace)
        while True:
            marked_us = window_of(now_us, size_us)
            if for_readers:
                pending = [(counter, Pending(each_us, marked_us)) for counter, each_us in windows]
                await self._store.recounts.write_pending(namespace, pending)
            marks = [Mark(marked_us, counter, each_us) for counter, each_us in windows]
            await self._store.recounts.write_marks(namespace, marks)
            now_us = self._now_us(namespace)
            if _is_surely_open(namespace, marked_us, now_us):
                return

    def _now_us(self, namespace: Namespace) -> int:
        """Return the time of a checked clock. Raises ClockSkewError."""
        return checked_now_us(self._clock, self._guard, namespace.dataset)

    async def _check_closed(
        self, namespace: Namespace, events: Sequence[Event], now_us: int, *, cancels: bool
    ) -> None:
        """Raise TokenPendingError if the window may be open, unless the token is cancelled."""
        closes_us = closes_at(namespace, events[0].event_time_us)
        if now_us >= closes_us:
            return
        decision = await self._store.decisions.decided(namespace, events)
        if decision is None or not decision.outcome.is_cancelled:
            what = "the token's window is open" if cancels else "the token is past its accept limit"
            raise TokenPendingError(
                f"{what}, and a write of it that was admitted in time may still be in flight;"
                " ask again with the same token",
                retry_after_us=closes_us - now_us,
            )

    def _check_retention(
        self, namespace: Namespace, time_us: int, now_us: int, margin_us: int
    ) -> None:
        retention_us = namespace.dataset.retention_us
        if time_us < now_us - retention_us + margin_us:
            raise TokenTooOldError(
                f"the token is {(now_us - time_us) // 1_000_000} s old; outcomes of tokens are"
                f" known for {(retention_us - margin_us) // 1_000_000} s",
                applied=None,
            )


def _applied(found: Sequence[Event | None]) -> Outcome:
    """Return APPLIED. Raises BoundReachedError if what was found is a refusal."""
    if error := bound_reached(found):
        raise error
    return Outcome.APPLIED


def _proposed(found: Sequence[Event | None], cancels: bool) -> Outcome:
    """Return the outcome to propose for a token of which *found* was found."""
    if cancels:
        return Outcome.cancelled(was_counted=any(found))
    return Outcome.APPLIED if any(found) else Outcome.VOID


def _is_surely_open(namespace: Namespace, window_us: int, now_us: int) -> bool:
    """Return whether no worker can have passed the window by now, whatever its clock shows, and
    whatever its accept limit is: the caller's copy of the namespace may be old."""
    end_us = window_us + namespace.settings.rollup_window_us
    return now_us <= end_us + namespace.dataset.write_timeout_us


def conflict(event: Event) -> TokenConflictError:
    """Return the error for an event whose token was used with another payload."""
    return TokenConflictError(
        f"the token was first used with another payload on counter {event.counter!r};"
        " the first payload remains in effect"
    )
