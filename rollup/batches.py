"""Roll up one batch of a shard: read its counters in groups, fold and write them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from counter.background import in_turns
from counter.core.read import EMPTY_HEAD, read_heads_and_rows
from counter.errors import SliceMissingError, UnavailableError
from counter.limits import BATCH_ITEMS_MAX, SECOND, TIME_MAX_US
from counter.metrics import NUMBER_BOUNDS, Histogram
from counter.ports import Cache, Store
from counter.telemetry.tracing import Tracing
from counter.types import (
    Checkpoint,
    CounterUpdate,
    DirtyMark,
    Event,
    EventPage,
    Namespace,
    Pending,
    Span,
    WindowRow,
)
from rollup.limiter import Limiter
from rollup.partitions import Partitions
from rollup.roller import BatchTimes, Dirt, Plan, group, plan, update

_ATTEMPTS_MAX: Final = 5
#: Pages of events of one instant that are searched for the clear of a delete.
_PAGES_MAX: Final = 100
_Group = TypeVar("_Group")
_Result = TypeVar("_Result")
#: Checkpoints that are written to the cache.
_Entries = list[tuple[str, Checkpoint]]


async def in_groups(
    limiter: Limiter,
    groups: Sequence[_Group],
    work: Callable[[_Group], Awaitable[_Result]],
    then: Callable[[_Result], Awaitable[None]] | None = None,
    weigh: Callable[[_Group], int] = lambda _: 1,
) -> list[_Result]:
    """Do *work* for each of *groups*, with the concurrency of *limiter*; return the results.

    *then* handles a result outside of the limiter, because its time does not depend on the store's
    load. *weigh* returns how many times the usual work a group is. Returns, or raises the first
    failure, only when nothing is in flight any more; after a failure no further group is started.
    """
    results: list[_Result] = []
    failures: list[Exception] = []

    async def one(each: _Group) -> None:
        try:
            async with limiter.permit(weigh(each)):
                if failures:
                    return
                result = await work(each)
            if then is not None:
                await then(result)
            results.append(result)
        except Exception as error:
            failures.append(error)

    if len(groups) == 1:
        await one(groups[0])
    else:
        await asyncio.gather(*(one(each) for each in groups))
    if failures:
        raise failures[0]
    return results


@dataclass(eq=False)
class BatchRoller:
    """Turns marks into window rows and checkpoints."""

    store: Store
    cache: Cache
    limiter: Limiter
    partitions: Partitions
    batch_counters: int
    #: Where each batch is traced.
    tracing: Tracing = field(default_factory=Tracing)
    #: Counters written per batch, and windows that were recounted.
    sizes: Histogram = field(default_factory=lambda: Histogram(NUMBER_BOUNDS))
    recounts: int = 0

    async def roll(
        self, namespace: Namespace, marks: Sequence[DirtyMark], batch: BatchTimes
    ) -> int:
        """Roll up the counters of *marks*; return how many were written."""
        dirty: dict[str, Dirt] = {}
        async for some in in_turns(marks):
            group(dirty, some)
        if not dirty:
            return 0
        # A store in one file reads a window's events in one pass, for all counters at once.
        size = len(dirty) if self.store.capabilities.embedded else self.batch_counters
        items = iter(dirty.items())
        groups = [dict(islice(items, size)) for _ in range(0, len(dirty), size)]
        with self.tracing.part("rollup.batch", namespace=namespace.name, counters=len(dirty)):
            written = await in_groups(
                self.limiter,
                groups,
                lambda each: self._roll_group(namespace, each, batch),
                lambda entries: self._update_cache(namespace, entries),
                self._weight,
            )
        return sum(len(entries) for entries in written)

    async def roll_window(
        self,
        namespace: Namespace,
        shard: int,
        span: Span,
        dropped_before_us: int,
        may_continue: Callable[[], bool],
    ) -> tuple[int | None, int] | None:
        """Have the store roll up the first dirty window of *span*, if it can; return the window's
        last instant, None if it was left in the middle, and how many counters were written."""
        roll = self.store.capabilities.roll_window
        if roll is None:
            return None
        size_us = namespace.settings.rollup_window_us
        through_us, written = None, 0
        parts = roll(namespace, shard, span, dropped_before_us)
        async with aclosing(parts):
            async for window_us, counts, marks in parts:
                through_us = window_us + size_us - 1
                if counts:
                    self.sizes.observe(len(counts))
                    entries = [(name, Checkpoint(through_us, count)) for name, count in counts]
                    await self._update_cache(namespace, entries)
                batch = BatchTimes(through_us, dropped_before_us, size_us)
                written += len(counts) + await self.roll(namespace, marks, batch)
                if not may_continue():
                    return None, written
        return None if through_us is None else (through_us, written)

    def _weight(self, dirty: Mapping[str, Dirt]) -> int:
        """Return the relative work: in a backlog a counter has many windows to sum, normally it
        has one."""
        windows = sum(len(each.windows) + len(each.recounts) for each in dirty.values())
        return max(1, windows // self.batch_counters)

    async def _roll_group(
        self, namespace: Namespace, dirty: Mapping[str, Dirt], batch: BatchTimes
    ) -> _Entries:
        for _ in range(_ATTEMPTS_MAX):
            try:
                return await self._roll_once(namespace, dirty, batch)
            except SliceMissingError as error:
                # A slice was dropped during the scan: start again from the partitions.
                missing = error
                dropped_us = await self.store.control.dropped_before(namespace.dataset)
                batch = BatchTimes(batch.through_us, dropped_us, batch.window_size_us)
        raise UnavailableError(
            f"slices were dropped during each attempt: {missing.detail}", retry_after_us=SECOND
        )

    async def _roll_once(
        self, namespace: Namespace, dirty: Mapping[str, Dirt], batch: BatchTimes
    ) -> _Entries:
        """Read the counters' partitions concurrently, and write them a batch at a time."""
        names = list(dirty)
        handles = [each.handle for each in dirty.values()]
        heads = await self.store.rollups.heads(namespace, names, handles)
        plans: list[Plan] = []
        async for found in in_turns(list(zip(names, heads, strict=True))):
            for name, head in found:
                each = plan(name, dirty[name], head or EMPTY_HEAD, batch)
                if each is not None:
                    plans.append(each)
        plans, rows = await self._replan_with_rows(namespace, plans, dirty, batch)
        wanted = [
            (each.counter, window_us)
            for each in plans
            for window_us in each.sums
            if window_us not in dirty[each.counter].folds
        ]
        counted = self.partitions.counting(namespace)
        folds = iter(
            await self.store.events.sums(namespace, wanted, counted=counted) if wanted else ()
        )
        undone = await self._undone(namespace, plans, batch.dropped_before_us)
        self.recounts += sum(len(each.recounts) for each in plans)
        entries: _Entries = []
        for start in range(0, len(plans), self.batch_counters):
            updates: list[CounterUpdate] = []
            async for some in in_turns(plans[start : start + self.batch_counters]):
                for each in some:
                    known = dirty[each.counter].folds
                    sums = {at: known[at] if at in known else next(folds) for at in each.sums}
                    updates.append(
                        update(
                            each,
                            sums,
                            rows.get(each.counter, ()),
                            batch,
                            undone.get(each.counter, ()),
                        )
                    )
            await self.store.rollups.apply(namespace, updates, through_us=batch.through_us)
            self.sizes.observe(len(updates))
            entries += [(each.counter, each.checkpoint) for each in updates]
        return entries

    async def _undone(
        self, namespace: Namespace, plans: Sequence[Plan], dropped_before_us: int
    ) -> Mapping[str, Collection[Pending]]:
        """Return the deletes of each counter that a later event has followed, or a later delete, or
        that are cancelled, which have no clear any more.

        Processes remember which names are listed, so an event after a delete may not have listed
        the name again. Its window is dirty, so the worker sees it here.
        """
        undone: dict[str, Collection[Pending]] = {}
        for each in plans:
            deletes = sorted(pending for pending in each.head.pending if pending.is_delete)
            if deletes:
                at_us = deletes[-1].window_us
                scan = partial(self.store.events.scan, namespace, each.counter)
                is_over = bool(await scan(EventPage(Span(at_us + 1, TIME_MAX_US), limit=1)))
                if not is_over and at_us >= dropped_before_us:
                    is_over = not await _has_clear(scan, at_us)
                undone[each.counter] = deletes if is_over else deletes[:-1]
        return undone

    async def _update_cache(self, namespace: Namespace, entries: _Entries) -> None:
        async for some in in_turns(entries):
            await self.cache.put_many(namespace, some)

    async def _replan_with_rows(
        self,
        namespace: Namespace,
        plans: Sequence[Plan],
        dirty: Mapping[str, Dirt],
        batch: BatchTimes,
    ) -> tuple[list[Plan], dict[str, Sequence[WindowRow]]]:
        """Return the plans and the rows of those that fold all rows, planned again from heads that
        were read with the rows."""
        whole = [each.counter for each in plans if each.whole]
        if not whole:
            return list(plans), {}
        # Read all rows: another worker may move the checkpoint before the head is read again.
        partitions = await read_heads_and_rows(self.store, namespace, whole, through_us=TIME_MAX_US)
        known = {each.counter: each for each in plans}
        rows: dict[str, Sequence[WindowRow]] = {}
        for counter, (head, found) in zip(whole, partitions, strict=True):
            again = plan(counter, dirty[counter], head, batch)
            if again is None:
                del known[counter]
            else:
                known[counter] = again
                rows[counter] = found
        return list(known.values()), rows


async def _has_clear(scan: Callable[[EventPage], Awaitable[Sequence[Event]]], at_us: int) -> bool:
    """Return whether a counter, whose events *scan* reads, has a clear at instant *at_us*; True if
    it has more events at that instant than are read."""
    page = EventPage(Span(at_us, at_us + 1), BATCH_ITEMS_MAX)
    for _ in range(_PAGES_MAX):
        events = await scan(page)
        if any(event.clear for event in events):
            return True
        if len(events) < page.limit:
            return False
        page = page._replace(before=events[-1])
    return True
