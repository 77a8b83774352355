"""Atomic adds, before their windows are summed: each must stand whole or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from counter.errors import SliceMissingError, TokenConflictError, TokenPendingError
from counter.ports import Store
from counter.resolution import Resolver
from counter.types import AtomicMark, Namespace
from rollup.batches import in_groups
from rollup.limiter import Limiter

_log = logging.getLogger("counter.rollup")
_MARKS_PER_GROUP: Final = 20


class AtomicSettler:
    """Finishes what a crash, or a write that was given up, left half done."""

    def __init__(self, store: Store, resolver: Resolver, limiter: Limiter) -> None:
        self._store = store
        self._resolver = resolver
        self._limiter = limiter

    async def settle(
        self, namespace: Namespace, shard: int, *, after_us: int, through_us: int
    ) -> tuple[int, int]:
        """Settle the atomic adds of the windows in ``(after_us, through_us]``.

        Returns the last instant up to which all are settled, and how many marks there were: one
        that may still be in flight holds up its window and what comes later, and nothing before it.
        Raises TokenPendingError where nothing can go on.
        """
        marks = await self._store.dirty_atomic(
            namespace, shard, after_us=after_us, through_us=through_us
        )
        groups = [
            marks[start : start + _MARKS_PER_GROUP]
            for start in range(0, len(marks), _MARKS_PER_GROUP)
        ]
        pending: list[tuple[int, TokenPendingError]] = []

        async def settle(group: Sequence[AtomicMark]) -> None:
            pending.extend(await self._settle_group(namespace, group))

        await in_groups(self._limiter, groups, settle)
        if not pending:
            return through_us, len(marks)
        window_us, error = min(pending, key=lambda each: each[0])
        if window_us - 1 <= after_us:
            raise error
        return window_us - 1, len(marks)

    async def _settle_group(
        self, namespace: Namespace, marks: Sequence[AtomicMark]
    ) -> list[tuple[int, TokenPendingError]]:
        """The windows in which one may still be in flight."""
        try:
            return await self._resolve_halves(namespace, marks)
        except SliceMissingError:
            # Past retention: its window is settled, and nobody can ask for the events any more.
            dropped_us = await self._store.dropped_before(namespace.dataset)
            kept = [mark for mark in marks if mark.events[0].event_time_us >= dropped_us]
            if len(kept) == len(marks):
                raise
            _log.info("%d atomic adds lie in a dropped slice", len(marks) - len(kept))
            return await self._settle_group(namespace, kept)

    async def _resolve_halves(
        self, namespace: Namespace, marks: Sequence[AtomicMark]
    ) -> list[tuple[int, TokenPendingError]]:
        """Resolve each that is not found whole, or about which something was decided.

        None of the items found included: the batch log may still land them.
        """
        if not marks:
            return []
        events = [event for mark in marks for event in mark.events]
        found = iter(await self._store.find(namespace, events))
        decided = await asyncio.gather(
            *(self._store.decided(namespace, mark.events) for mark in marks)
        )
        pending = []
        for mark, decision in zip(marks, decided, strict=True):
            stands = [next(found) is not None for _ in mark.events]
            if all(stands) and decision is None:
                continue
            try:
                await self._resolver.resolve(namespace, mark.events, by_worker=True)
            except TokenPendingError as error:
                pending.append((mark.window_us, error))
            except TokenConflictError as error:
                _log.warning("an atomic add lost to another use of its token: %s", error.detail)
        return pending
