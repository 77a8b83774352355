"""How an event gets in: guard and mark, age check, event, deadline, in this order and no other."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final

from counter import limits
from counter.core.admission import Load
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.namespaces import Namespaces
from counter.errors import CounterError, TokenInFutureError, UnavailableError, WriteTimeoutError
from counter.ports import Cache, Clock, PromptCache, PromptStore, Store, Told
from counter.types import AtomicMark, Event, Guarded, Mark, Namespace, PayloadCheck, Written
from counter.windows import accept_limit_at, window_of

_log = logging.getLogger("counter.writing")


class EventWriter:
    """Writes events that are on time. What is late it leaves alone, and says so."""

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
        self._prompt_store = store if isinstance(store, PromptStore) else None
        self._prompt_cache = cache if isinstance(cache, PromptCache) else None
        #: The clocks as they were read in this turn of the event loop, by dataset.
        self._moments: dict[int, tuple[int, int]] = {}

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

    async def write(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        """Write each event on its own; LATE where it was past its age at the second check, and an
        error where the store failed for it alone. Raises OverloadedError before any work."""
        self._load.admit(len(events))
        try:
            return await self.write_admitted(namespace, events)
        finally:
            self._load.leave(len(events))

    async def write_admitted(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        """What :meth:`write` does of events that are counted as under way already."""
        if self._store.transactional:
            # What is late is seen by the writer; by a clock that was set, nothing is.
            self._now_us(namespace)
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
        namespace = self._namespaces.current(namespace, began_us)
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
        self.check_deadline(namespace, began_us)
        for index, outcome in zip(fresh, written, strict=True):
            seen = _is_replay(outcome, told[index])
            outcomes[index] = Written.REPLAYED if seen else outcome
        return outcomes

    async def write_one(self, namespace: Namespace, event: Event) -> Written | UnavailableError:
        """What :meth:`write` does of one event."""
        future: asyncio.Future[Written | BaseException] = asyncio.get_running_loop().create_future()

        def told(outcome: Written | BaseException) -> None:
            if not future.done():
                future.set_result(outcome)

        if self.write_soon(namespace, event, told):
            outcome = await future
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome is not Written.LATE and outcome is not Written.CONFLICT:
                return outcome
        return (await self.write(namespace, (event,)))[0]

    def write_soon(self, namespace: Namespace, event: Event, told: Told) -> bool:
        """Begin what :meth:`write` does of one event, without a task; *told* is called once, and
        may be before this returns. LATE and CONFLICT are not judged yet: ``write`` does that.

        False, and nothing is done, where ``write`` must do all of it.
        """
        store, cache = self._prompt_store, self._prompt_cache
        settings = namespace.settings
        if store is None or cache is None or settings.payload_check is PayloadCheck.STRICT:
            return False
        try:
            _, now_us = self.moment(namespace)
            if self.is_late(namespace, event.event_time_us, now_us):
                return False
            self._load.admit(1)
        except CounterError:
            return False
        mark = Mark(window_of(event.event_time_us, settings.rollup_window_us), event.counter)
        one = _One(self, self._load, store, namespace, event, told)
        if not self._marked.knows(namespace.id, mark):
            one.waits_for += 1
            if not store.mark_soon(namespace, mark, partial(one.marked, mark)):
                self._load.leave(1)
                return False
        if settings.payload_check is PayloadCheck.GUARD:
            cache.guard_soon(namespace, event, one.guarded)
        else:
            one.guarded(Guarded.UNTOLD)
        return True

    def current(self, namespace: Namespace, began_us: int) -> Namespace:
        """See :meth:`counter.core.namespaces.Namespaces.current`."""
        return self._namespaces.current(namespace, began_us)

    def remember(self, namespace: Namespace, mark: Mark) -> None:
        """Know from now on that *mark* is durable."""
        self._marked.remember(namespace.id, (mark,))

    def moment(self, namespace: Namespace) -> tuple[int, int]:
        """The deadline's clock, and then the wall clock, known to be right at this reading.

        Events of one turn of the loop share a reading: what passes until an event is written counts
        against its deadline. Raises ClockSkewError.
        """
        dataset_id = namespace.dataset.id
        moment = self._moments.get(dataset_id)
        if moment is None:
            # The deadline's clock first: a pause between the two must count against it.
            began_us = self._clock.boottime_us()
            moment = (began_us, self._now_us(namespace))
            if not self._moments:
                self._load.turn_began(began_us)
                asyncio.get_running_loop().call_soon(self._end_turn)
            self._moments[dataset_id] = moment
        return moment

    def _end_turn(self) -> None:
        self._moments.clear()
        self._load.turn_over()

    async def write_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        """Write all the events of one token or none."""
        self._load.admit(len(events))
        try:
            if self._store.transactional:
                self._now_us(namespace)
                return await self._store.append_atomic(namespace, events)
            told = await self._told(namespace, events)
            if Guarded.OTHER in told:
                return Written.CONFLICT
            time_us = events[0].event_time_us
            window_us = window_of(time_us, namespace.settings.rollup_window_us)
            await self._store.mark_atomic(namespace, AtomicMark(window_us, tuple(events)))
            await self._leave_marks(namespace, self._unmarked(namespace, events))
            began_us = self._clock.boottime_us()
            namespace = self._namespaces.current(namespace, began_us)
            if self.is_late(namespace, time_us, self._now_us(namespace)):
                return Written.LATE
            outcome = await self._store.append_atomic(namespace, events)
            self.check_deadline(namespace, began_us)
            seen = any(_is_replay(outcome, each) for each in told)
            return Written.REPLAYED if seen else outcome
        finally:
            self._load.leave(len(events))

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
        return checked_now_us(self._clock, self._guard, namespace.dataset)

    def check_deadline(self, namespace: Namespace, began_us: int) -> None:
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


class _One:
    """One event on its way: guard and mark, age check, event, deadline, each begun where the one
    before ended."""

    __slots__ = (
        "_began_us",
        "_event",
        "_failed",
        "_guard",
        "_load",
        "_namespace",
        "_store",
        "_told",
        "_writer",
        "waits_for",
    )

    def __init__(
        self,
        writer: EventWriter,
        load: Load,
        store: PromptStore,
        namespace: Namespace,
        event: Event,
        told: Told,
    ) -> None:
        self._writer = writer
        self._load = load
        self._store = store
        self._namespace = namespace
        self._event = event
        self._told = told
        self._failed: BaseException | None = None
        #: What must be there before the event is written: the guard's answer, and the mark.
        self.waits_for = 1

    def marked(self, mark: Mark, error: BaseException | None) -> None:
        """Go on, where *mark* is durable."""
        if error is None:
            self._writer.remember(self._namespace, mark)
        else:
            self._failed = error
        self._go_on()

    def guarded(self, guard: Guarded) -> None:
        """Go on with what the guard has seen."""
        self._guard = guard
        self._go_on()

    def _go_on(self) -> None:
        self.waits_for -= 1
        if self.waits_for:
            return
        if self._failed is not None:
            self._end(self._failed)
        elif self._guard is Guarded.OTHER:
            self._end(Written.CONFLICT)
        else:
            self._write()

    def _write(self) -> None:
        """Write the event if it is still on time: what was seen before need not have been
        written."""
        namespace, event, writer = self._namespace, self._event, self._writer
        try:
            self._began_us, now_us = writer.moment(namespace)
            namespace = writer.current(namespace, self._began_us)
            late = writer.is_late(namespace, event.event_time_us, now_us)
            if late or not self._store.append_soon(namespace, event, self.written):
                self._end(Written.LATE)
        except Exception as error:
            self._end(error)

    def written(self, outcome: Written | BaseException) -> None:
        """Acknowledge the event if it came to stand in time."""
        try:
            self._writer.check_deadline(self._namespace, self._began_us)
        except CounterError as error:
            outcome = error
        if not isinstance(outcome, BaseException) and _is_replay(outcome, self._guard):
            outcome = Written.REPLAYED
        self._end(outcome)

    def _end(self, outcome: Written | BaseException) -> None:
        self._load.leave(1)
        try:
            self._told(outcome)
        except Exception:
            # Others are told after this one.
            _log.exception("the end of an add could not be told")


def _is_replay(outcome: Written | UnavailableError, told: Guarded) -> bool:
    """A token that was seen before is a replay, where the store cannot tell. Seen is not written:
    the event was written all the same."""
    return outcome is Written.UNTOLD and told is Guarded.SAME


_REMEMBERED_MAX: Final = 100_000


class MarkMemory:
    """Marks whose write was acknowledged to this process. Bounded; forgetting is safe."""

    def __init__(self) -> None:
        # Unlike a dict, it forgets its oldest in constant time.
        self._known: OrderedDict[tuple[int, Mark], None] = OrderedDict()

    def knows(self, namespace_id: int, mark: Mark) -> bool:
        """Whether *mark* is known to be durable."""
        return (namespace_id, mark) in self._known

    def unknown(self, namespace_id: int, marks: Sequence[Mark]) -> list[Mark]:
        """Those of *marks* that are not known to be durable, each once."""
        return [m for m in dict.fromkeys(marks) if (namespace_id, m) not in self._known]

    def remember(self, namespace_id: int, marks: Sequence[Mark]) -> None:
        """Note that *marks* are durable; the ones noted first are forgotten first."""
        for mark in marks:
            self._known[(namespace_id, mark)] = None
        while len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)
