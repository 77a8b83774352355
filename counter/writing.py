"""How an event gets in: guard and mark, age check, event, deadline, in this order and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from counter import limits
from counter.errors import (
    OverloadedError,
    TokenInFutureError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.marks import MarkMemory
from counter.ports import Cache, Clock, Store
from counter.skew import ClockGuard
from counter.types import AtomicMark, Event, Guarded, Mark, Namespace, PayloadCheck, Written
from counter.windows import accept_limit_at, window_of


class EventWriter:
    """Writes events that are on time. What is late it leaves alone, and says so."""

    def __init__(
        self, store: Store, clock: Clock, cache: Cache, guard: ClockGuard | None = None
    ) -> None:
        self._store = store
        self._clock = clock
        self._cache = cache
        self._guard = guard
        self._marked = MarkMemory()
        self._waiting = 0

    def is_late(self, namespace: Namespace, time_us: int, now_us: int) -> bool:
        """Whether a token of *time_us* is past its accept limit. Raises TokenInFutureError."""
        eras = namespace.eras
        limit_us = eras[0][1] if len(eras) == 1 else accept_limit_at(namespace, time_us)
        if time_us < now_us - limit_us:
            return True
        ahead_us = time_us - now_us
        if ahead_us > namespace.settings.future_limit_us:
            raise TokenInFutureError(
                f"generation_time is {ahead_us / limits.SECOND:.3f} s ahead of this server's clock;"
                f" at most {namespace.settings.future_limit_us / limits.SECOND:g} s are allowed",
                retry_after_us=ahead_us - namespace.settings.future_limit_us,
            )
        return False

    def surely_on_time(self, namespace: Namespace, now_us: int) -> tuple[int, int]:
        """The first and last instant of tokens that need no closer look by :meth:`is_late`."""
        eras = namespace.eras
        shortest_us = eras[0][1] if len(eras) == 1 else min(era.accept_limit_us for era in eras)
        return now_us - shortest_us, now_us + namespace.settings.future_limit_us

    def admit(self, events: int) -> None:
        """Take room for *events* in the queue, to be left again when they are done.

        Raises OverloadedError before any work.
        """
        if self._waiting + events > limits.PENDING_WRITES_MAX:
            raise OverloadedError(
                f"{self._waiting} adds wait for a commit; at most {limits.PENDING_WRITES_MAX} may",
                retry_after_us=limits.SECOND,
            )
        self._waiting += events

    def leave(self, events: int) -> None:
        """Give back the room of *events*."""
        self._waiting -= events

    async def write(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        """Write each event on its own; LATE where it was past its age at the second check, and an
        error where the store failed for it alone."""
        self.admit(len(events))
        try:
            if self._store.transactional:
                return await self._store.append(namespace, events)
            marks = self._unmarked(namespace, events)
            if namespace.settings.payload_check is PayloadCheck.GUARD and marks:
                told, _ = await asyncio.gather(
                    self._told(namespace, events), self._leave_marks(namespace, marks)
                )
            else:
                told = await self._told(namespace, events)
                await self._leave_marks(namespace, marks)
            # The deadline's clock first: a pause between the two must count against it.
            began_us = self._clock.boottime_us()
            now_us = self._now_us(namespace)
            outcomes: list[Written | UnavailableError] = [Written.LATE] * len(events)
            fresh: list[int] = []
            for index, event in enumerate(events):
                if self.is_late(namespace, event.event_time_us, now_us):
                    continue
                if told[index] is Guarded.OTHER:
                    outcomes[index] = Written.CONFLICT
                else:
                    fresh.append(index)
            if not fresh:
                return outcomes
            written = await self._store.append(namespace, [events[index] for index in fresh])
            self._check_deadline(namespace, began_us)
            for index, outcome in zip(fresh, written, strict=True):
                seen = _is_replay(outcome, told[index])
                outcomes[index] = Written.REPLAYED if seen else outcome
            return outcomes
        finally:
            self.leave(len(events))

    async def write_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        """Write all the events of one token or none."""
        self.admit(len(events))
        try:
            if self._store.transactional:
                return await self._store.append_atomic(namespace, events)
            told = await self._told(namespace, events)
            if Guarded.OTHER in told:
                return Written.CONFLICT
            time_us = events[0].event_time_us
            window_us = window_of(time_us, namespace.settings.rollup_window_us)
            await self._store.mark_atomic(namespace, AtomicMark(window_us, tuple(events)))
            await self._leave_marks(namespace, self._unmarked(namespace, events))
            began_us = self._clock.boottime_us()
            if self.is_late(namespace, time_us, self._now_us(namespace)):
                return Written.LATE
            outcome = await self._store.append_atomic(namespace, events)
            self._check_deadline(namespace, began_us)
            seen = any(_is_replay(outcome, each) for each in told)
            return Written.REPLAYED if seen else outcome
        finally:
            self.leave(len(events))

    async def _told(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Guarded]:
        """What the guard says of each event's token: only where the store itself would not tell.

        A guard that was emptied may have noted the later of two payloads. So what it calls another
        one is looked up: an event that stands is no conflict with itself.
        """
        if namespace.settings.payload_check is not PayloadCheck.GUARD:
            return [Guarded.UNTOLD] * len(events)
        told = list(await self._cache.guard(namespace, events))
        others = [index for index, each in enumerate(told) if each is Guarded.OTHER]
        if others:
            found = await self._store.find(namespace, [events[index] for index in others])
            for index, stored in zip(others, found, strict=True):
                if stored is not None and stored.same_payload(events[index]):
                    told[index] = Guarded.SAME
        return told

    def _unmarked(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Mark]:
        """The events' marks that are not known to be durable."""
        size_us = namespace.settings.rollup_window_us
        return self._marked.unknown(
            namespace.id,
            [Mark(window_of(event.event_time_us, size_us), event.counter) for event in events],
        )

    async def _leave_marks(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        """Make *marks* durable, and remember that they are."""
        if marks:
            await self._store.mark(namespace, marks)
            self._marked.remember(namespace.id, marks)

    def _now_us(self, namespace: Namespace) -> int:
        """The clock, known to be right at this reading: it may have been set since the request
        came. Raises ClockSkewError."""
        now_us = self._clock.now_us()
        if self._guard is not None:
            self._guard.check(namespace.dataset)
        return now_us

    def _check_deadline(self, namespace: Namespace, began_us: int) -> None:
        """Refuse to acknowledge a write that may have landed in a closed window.

        A timer alone is not enough: a suspended process wakes with its timers late.
        """
        timeout_us = namespace.dataset.write_timeout_us
        if self._clock.boottime_us() - began_us > timeout_us:
            raise WriteTimeoutError(
                f"the store took longer than {timeout_us / limits.SECOND:g} s;"
                " ask again with the same token",
                retry_after_us=limits.SECOND,
            )


def _is_replay(outcome: Written | UnavailableError, told: Guarded) -> bool:
    """A token that was seen before is a replay, where the store cannot tell. Seen is not written:
    the event was written all the same."""
    return outcome is Written.UNTOLD and told is Guarded.SAME
