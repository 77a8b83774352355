"""Write events: guard, mark, age check, event, deadline, always in this order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from counter import limits
from counter.core.adds import bound_reached
from counter.core.admission import Load
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.namespaces import Namespaces
from counter.errors import (
    CounterError,
    TokenInFutureError,
    UnavailableError,
    WriteTimeoutError,
)
from counter.ports import Cache, Clock, SeparateWrites, Store
from counter.types import AtomicMark, Event, Guarded, Mark, Namespace, PayloadCheck, Written
from counter.windows import accept_limit_at, window_of


class EventWriter:
    """Write events that are not late; late ones are reported and not written."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        cache: Cache,
        guard: ClockGuard | None,
        load: Load,
        namespaces: Namespaces,
    ) -> None:
        self._store = store
        self._namespaces = namespaces
        self._clock = clock
        self._cache = cache
        self._guard = guard
        self._marked = MarkMemory()
        self._load = load

    def is_late(self, namespace: Namespace, time_us: int, now_us: int) -> bool:
        """Return whether a token of *time_us* is past its accept limit. Raises TokenInFutureError
        if it is too far ahead."""
        eras = namespace.eras
        limit_us = eras[0][1] if len(eras) == 1 else accept_limit_at(namespace, time_us)
        if time_us < now_us - limit_us:
            return True
        if time_us - now_us > namespace.settings.future_limit_us:
            raise self.future_error(namespace, time_us, now_us)
        return False

    @staticmethod
    def future_error(
        namespace: Namespace, time_us: int, now_us: int, tokens: int = 1
    ) -> TokenInFutureError:
        """Return the error for *tokens* that are too far ahead, the latest of them of *time_us*."""
        ahead_us, limit_us = time_us - now_us, namespace.settings.future_limit_us
        which = "generation_time" if tokens == 1 else "the latest generation_time of the batch"
        return TokenInFutureError(
            f"{which} is {ahead_us / limits.SECOND:.3f} s ahead of this server's clock;"
            f" at most {limit_us / limits.SECOND:g} s are allowed",
            retry_after_us=ahead_us - limit_us,
        )

    def on_time_range(self, namespace: Namespace, now_us: int) -> tuple[int, int]:
        """Return the range of token times that no era treats as late."""
        eras = namespace.eras
        shortest_us = eras[0][1] if len(eras) == 1 else min(era.accept_limit_us for era in eras)
        return now_us - shortest_us, now_us + namespace.settings.future_limit_us

    async def write(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | CounterError]:
        """Write each event on its own; LATE if it was past its age at the second check, and an
        error if it was refused, or if the store failed for it alone. Raises OverloadedError before
        any work."""
        self._load.admit(len(events))
        try:
            return await self.write_admitted(namespace, events)
        finally:
            self._load.finish(len(events))

    async def write_atomic(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Written | CounterError:
        """Write all the events of one token or none. Raises OverloadedError before any work."""
        self._load.admit(len(events))
        try:
            return (await self.write_admitted(namespace, events, atomic=True))[0]
        finally:
            self._load.finish(len(events))

    async def write_admitted(
        self, namespace: Namespace, events: Sequence[Event], *, atomic: bool = False
    ) -> Sequence[Written | CounterError]:
        """Do what :meth:`write` does, for events that are admitted already.

        This is the one place that has the safety order: guard, mark, age check again, event,
        deadline. If *atomic*, the events share one token, and one outcome.
        """
        append = self._append_atomic if atomic else self._store.events.append
        separate = self._store.separate_writes
        if separate is None:
            # The store does all of this in one transaction, except detecting a clock that was set.
            if self._guard is not None:
                self._guard.check(namespace.dataset)
            outcomes = await append(namespace, events)
            if Written.BOUND_REACHED not in outcomes:
                return outcomes
            return await self._with_refusals(namespace, events, outcomes, atomic)
        guarded = await self._guarded(namespace, events, atomic)
        results: list[Written | CounterError] = [Written.CONFLICT] * len(events)
        wanted = [at for at, seen in enumerate(guarded) if seen is not Guarded.OTHER]
        unmarked = await self._mark(separate, namespace, [events[at] for at in wanted], atomic)
        # The deadline's clock first, so that a pause between the two counts against it.
        began_us = self._clock.boottime_us()
        namespace = self._namespaces.current(namespace, began_us)
        now_us = self._now_us(namespace)
        fresh: list[int] = []
        for at, error in zip(wanted, unmarked, strict=True):
            if error is not None:
                results[at] = error
            elif self.is_late(namespace, events[at].event_time_us, now_us):
                results[at] = Written.LATE
            else:
                fresh.append(at)
        if not fresh:
            return results
        written = await append(namespace, [events[at] for at in fresh])
        self._check_deadline(namespace, began_us)
        for at, outcome in zip(fresh, written, strict=True):
            # If the store does not report it, a token that the guard knows is a replay. Its event
            # was written anyway, because the guard does not prove that it exists.
            seen = outcome is Written.UNVERIFIED and guarded[at] is Guarded.SAME
            results[at] = Written.REPLAYED if seen else outcome
        return results

    async def _with_refusals(
        self,
        namespace: Namespace,
        events: Sequence[Event],
        outcomes: Sequence[Written | UnavailableError],
        atomic: bool,
    ) -> Sequence[Written | CounterError]:
        """Return *outcomes* with the reason of each refusal, or why it is not known, in its place;
        LATE for one that is gone, because it was cancelled meanwhile."""
        reached = Written.BOUND_REACHED
        refused = [event for event, out in zip(events, outcomes, strict=True) if out is reached]
        try:
            found = await self._store.events.find(namespace, refused)
        except UnavailableError as error:
            return [error if out is reached else out for out in outcomes]
        if atomic:
            return [bound_reached(found) or Written.LATE] * len(events)
        why = iter([bound_reached((each,)) or Written.LATE for each in found])
        return [next(why) if out is reached else out for out in outcomes]

    async def _append_atomic(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written]:
        return [await self._store.events.append_atomic(namespace, events)] * len(events)

    async def _guarded(
        self, namespace: Namespace, events: Sequence[Event], atomic: bool
    ) -> Sequence[Guarded]:
        """Return the guard's result for each event's token, if the store itself does not report it.

        After an eviction the guard may have the later of two payloads. So a suspected conflict is
        looked up: a stored event does not conflict with itself.
        """
        if namespace.settings.payload_check is not PayloadCheck.GUARD:
            return [Guarded.UNVERIFIED] * len(events)
        guarded = list(await self._cache.guard(namespace, events))
        others = [at for at, each in enumerate(guarded) if each is Guarded.OTHER]
        if others:
            found = await self._store.events.find(namespace, [events[at] for at in others])
            for at, stored in zip(others, found, strict=True):
                if stored is not None and stored.same_payload(events[at]):
                    guarded[at] = Guarded.SAME
        if atomic:
            for strongest in (Guarded.OTHER, Guarded.SAME):
                if strongest in guarded:
                    return [strongest] * len(events)
        return guarded

    async def _mark(
        self, separate: SeparateWrites, namespace: Namespace, events: Sequence[Event], atomic: bool
    ) -> Sequence[UnavailableError | None]:
        """Make the marks of *events* durable and remember them; return an error for each event
        whose mark may not be durable."""
        size_us = namespace.settings.rollup_window_us
        if atomic and events:
            window_us = window_of(events[0].event_time_us, size_us)
            await separate.mark_atomic(namespace, AtomicMark(window_us, tuple(events)))
        marks = [Mark(window_of(event.event_time_us, size_us), event.counter) for event in events]
        unknown = self._marked.unknown(namespace.id, marks)
        if not unknown:
            return [None] * len(events)
        failed = await separate.mark(namespace, unknown)
        self._marked.remember(namespace.id, [mark for mark in unknown if mark not in failed])
        if atomic and failed:
            return [next(iter(failed.values()))] * len(events)
        return [failed.get(mark) for mark in marks]

    def _now_us(self, namespace: Namespace) -> int:
        """Return a checked clock reading, because the clock may have been set since the request
        arrived. Raises ClockSkewError."""
        return checked_now_us(self._clock, self._guard, namespace.dataset)

    def _check_deadline(self, namespace: Namespace, began_us: int) -> None:
        """Refuse to acknowledge a write that may have landed in a closed window.

        A timer alone is not enough, because the timers of a suspended process are late.
        """
        timeout_us = namespace.dataset.write_timeout_us
        if self._clock.boottime_us() - began_us > timeout_us:
            raise WriteTimeoutError(
                f"the store took longer than {timeout_us / limits.SECOND:g} s;"
                " ask again with the same token",
                retry_after_us=limits.SECOND,
            )


_REMEMBERED_MAX: Final = 100_000


class MarkMemory:
    """Marks that this process knows to be durable. Bounded; forgetting is safe."""

    def __init__(self) -> None:
        # Unlike a dict, it removes its oldest entry in constant time.
        self._known: OrderedDict[tuple[int, Mark], None] = OrderedDict()

    def unknown(self, namespace_id: int, marks: Sequence[Mark]) -> list[Mark]:
        """Return those of *marks* that are not known to be durable, each once."""
        return [m for m in dict.fromkeys(marks) if (namespace_id, m) not in self._known]

    def remember(self, namespace_id: int, marks: Sequence[Mark]) -> None:
        """Record that *marks* are durable; the oldest records are removed first."""
        for mark in marks:
            self._known[(namespace_id, mark)] = None
        while len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
