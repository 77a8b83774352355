"""Settle atomic adds before their windows are summed: each must exist whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from counter.core.resolve import Resolver
from counter.errors import (
    SliceMissingError,
    StoreUnavailableError,
    TokenConflictError,
    TokenPendingError,
)
from counter.limits import MINUTE
from counter.ports import Clock, SeparateWrites, Store
from counter.types import AtomicMark, Namespace, Sight, Span
from rollup.batches import in_groups
from rollup.limiter import Limiter

_log = logging.getLogger("counter.rollup")
#: Items that one turn of the limiter looks up, or the items of one add. With more, a turn would
#: exceed the limiter's target even on a healthy store, and the limit would fall to one group at a
#: time.
_EVENTS_PER_GROUP: Final = 40
#: How long a result is reused. Each shard of an atomic add has the same mark, so one look-up serves
#: all shards in this process. A complete add stays complete unless it was being voided at that
#: moment, and then the resolver leaves recounts in later windows.
_KNOWN_FOR_US: Final = MINUTE

#: A namespace's id, a window, and the identity of an atomic add and of its mark.
_Key = tuple[int, int, int, bytes, bytes]
_Settled = asyncio.Future[TokenPendingError | None]


class AtomicSettler:
    """Completes atomic adds that a crash or a time-out left half done."""

    def __init__(
        self,
        store: Store,
        separate: SeparateWrites,
        resolver: Resolver,
        limiter: Limiter,
        clock: Clock,
    ) -> None:
        self._store = store
        self._separate = separate
        self._resolver = resolver
        self._limiter = limiter
        self._clock = clock
        #: Adds that are being settled, or were recently, with the start of the work; earliest
        #: first.
        self._known: dict[_Key, tuple[int, _Settled]] = {}

    async def settle(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> tuple[int, int]:
        """Settle the atomic adds of the windows in ``(after_us, through_us]``.

        Returns the last instant up to which all are settled, and the number of marks. An add that
        may still be in flight delays its window and later ones, but not earlier ones. Raises
        TokenPendingError if no window can proceed.
        """
        span = Span.after(after_us, through_us)
        marks = _without_twins(await self._separate.dirty_atomic(namespace, shard, span))
        pending: list[tuple[int, TokenPendingError]] = []

        async def settle(group: Sequence[AtomicMark]) -> Sequence[tuple[AtomicMark, _Settled]]:
            return await self._settle_once(namespace, group)

        async def wait(known: Sequence[tuple[AtomicMark, _Settled]]) -> None:
            for mark, settled in known:
                await asyncio.wait((settled,))
                if settled.cancelled():
                    raise StoreUnavailableError("another shard failed to settle an atomic add")
                if (error := settled.result()) is not None:
                    pending.append((mark.window_us, error))

        await in_groups(self._limiter, list(_groups(marks)), settle, wait)
        if not pending:
            return through_us, len(marks)
        window_us, error = min(pending, key=lambda each: each[0])
        if window_us - 1 <= after_us:
            raise error
        return window_us - 1, len(marks)

    async def _settle_once(
        self, namespace: Namespace, marks: Sequence[AtomicMark]
    ) -> Sequence[tuple[AtomicMark, _Settled]]:
        """Settle those of *marks* that no other shard has settled or is settling; return the
        result of each."""
        now_us = self._clock.boottime_us()
        for key, (began_us, settled) in list(self._known.items()):
            if not settled.done():
                continue
            if now_us - began_us < _KNOWN_FOR_US:
                break
            del self._known[key]
        ours: dict[_Key, AtomicMark] = {}
        for mark in marks:
            if (key := _key_of(namespace, mark)) not in self._known:
                ours[key] = mark
                self._known[key] = (now_us, asyncio.get_running_loop().create_future())
        waited = [(mark, self._known[_key_of(namespace, mark)][1]) for mark in marks]
        try:
            errors = dict(await self._settle_group(namespace, list(ours.values())))
        except BaseException:
            # Callers that wait for these results settle the adds themselves.
            for key in ours:
                self._known.pop(key)[1].cancel()
            raise
        for key, mark in ours.items():
            settled = self._known[key][1]
            settled.set_result(errors.get(mark.window_us))
            if mark.window_us in errors:
                del self._known[key]
        return waited

    async def _settle_group(
        self, namespace: Namespace, marks: Sequence[AtomicMark]
    ) -> list[tuple[int, TokenPendingError]]:
        """Return the windows in which an add may still be in flight."""
        try:
            return await self._resolve_incomplete(namespace, marks)
        except SliceMissingError:
            # Past retention: its window is settled, and its events are gone.
            dropped_us = await self._store.control.dropped_before(namespace.dataset)
            kept = [mark for mark in marks if mark.events[0].event_time_us >= dropped_us]
            if len(kept) == len(marks):
                raise
            _log.info("%d atomic adds lie in a dropped slice", len(marks) - len(kept))
            return await self._settle_group(namespace, kept)

    async def _resolve_incomplete(
        self, namespace: Namespace, marks: Sequence[AtomicMark]
    ) -> list[tuple[int, TokenPendingError]]:
        """Resolve each add that is incomplete, or that has a decision.

        This includes adds without any item: a write of them may still be applied.
        """
        if not marks:
            return []
        events = [event for mark in marks for event in mark.events]
        found = iter(await self._store.events.find(namespace, events))
        decided = await asyncio.gather(
            *(self._store.decisions.decided(namespace, mark.events) for mark in marks)
        )
        pending = []
        for mark, decision in zip(marks, decided, strict=True):
            exists = [next(found) is not None for _ in mark.events]
            if all(exists) and decision is None:
                continue
            try:
                # Another worker may have passed this mark just before the decision was made, and
                # this one may die half way: so a mark of the decision is left first.
                await self._resolver.resolve(
                    namespace,
                    mark.events,
                    by_worker=True,
                    is_decided=decision is not None,
                    sight=mark.sight if decision is not None else Sight.NOTHING,
                )
            except TokenPendingError as error:
                pending.append((mark.window_us, error))
            except TokenConflictError as error:
                _log.warning("an atomic add lost to another use of its token: %s", error.detail)
        return pending


def _without_twins(marks: Sequence[AtomicMark]) -> list[AtomicMark]:
    """Return of the marks of an add in a window the one that says most."""
    most: dict[AtomicMark, AtomicMark] = {}
    for mark in sorted(marks, key=attrgetter("window_us", "sight")):
        most[mark._replace(sight=Sight.NOTHING)] = mark
    return list(most.values())


def _groups(marks: Sequence[AtomicMark]) -> Iterator[list[AtomicMark]]:
    """Split *marks* in order into groups of about the same number of events."""
    group: list[AtomicMark] = []
    events = 0
    for mark in marks:
        if group and events + len(mark.events) > _EVENTS_PER_GROUP:
            yield group
            group, events = [], 0
        group.append(mark)
        events += len(mark.events)
    if group:
        yield group


def _key_of(namespace: Namespace, mark: AtomicMark) -> _Key:
    first = mark.events[0]
    return (namespace.id, mark.window_us, first.event_time_us, first.event_id, mark.stored_atom)
