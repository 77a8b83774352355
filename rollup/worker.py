"""The rollup worker: reads what is dirty and closed, has the roller fold it, writes it back.

It holds nothing that matters: kill it at any instant, and the next one does the batch again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from counter.errors import (
    NamespaceUnknownError,
    SliceMissingError,
    TokenConflictError,
    TokenPendingError,
    UnavailableError,
)
from counter.limits import MILLISECOND, SECOND, TIME_MAX_US
from counter.namespaces import Namespaces
from counter.ports import Cache, Clock, Store
from counter.reading import EMPTY_HEAD, read_partitions
from counter.resolution import Resolver
from counter.types import Fold, Mark, Namespace, WindowRow
from counter.windows import closed_through
from rollup.maintenance import Maintenance
from rollup.roller import Batch, Dirt, Plan, group, plan, update

_log = logging.getLogger("counter.rollup")
#: The events of a window are read once for so many of its counters.
_MARKS_PER_READ: Final = 5_000
_ATTEMPTS_MAX: Final = 5
_PAUSE_MIN_US: Final = 50 * MILLISECOND
_PAUSE_MAX_US: Final = SECOND


class RollupWorker:
    """Rolls up every shard of every namespace, windows in order."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        clock: Clock,
        namespaces: Namespaces,
        *,
        batch_counters: int = 1_000,
    ) -> None:
        self._store = store
        self._cache = cache
        self._namespaces = namespaces
        self._resolver = Resolver(store, clock)
        self._maintenance = Maintenance(store, clock, namespaces)
        self._batch_counters = batch_counters
        #: What keeps the rollup from working; None while it works.
        self.trouble: str | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Work until *stop* is set; finish the batch under way."""
        while not stop.is_set():
            try:
                await self.tick()
                self.trouble = None
            except (UnavailableError, TokenPendingError) as error:
                self.trouble = error.detail
                _log.warning("rollup waits for the store: %s", error.detail)
            except Exception:
                # Nothing but a stop may end the rollup: without it the slices run out too.
                self.trouble = "a pass failed in a way that it should not; see the log"
                _log.exception("a pass of the rollup failed in a way that it should not")
            try:
                await asyncio.wait_for(stop.wait(), self._pause_us() / SECOND)
            except TimeoutError:
                continue

    async def tick(self) -> int:
        """One pass over slices and shards; how many counters were written."""
        await self._maintenance.run_once()
        written = 0
        failed: list[Exception] = []
        for namespace in self._namespaces.all():
            try:
                for shard in range(namespace.settings.shards):
                    written += await self.roll_shard(namespace, shard)
            except NamespaceUnknownError:
                _log.info("namespace %s was deleted under the rollup", namespace.name)
            except Exception as error:
                # One namespace's trouble holds up no other.
                failed.append(error)
        if failed:
            raise failed[0]
        return written

    async def roll_shard(self, namespace: Namespace, shard: int) -> int:
        """Roll up all closed windows of one shard; how many counters were written.

        The order matters: clock, ``dropped_before``, watermark, marks, checkpoints, events.
        """
        now_us = await self._store.fence()
        dropped_before_us = await self._store.dropped_before(namespace.dataset)
        watermark_us = (await self._store.watermarks(namespace))[shard]
        closed_us = closed_through(namespace, now_us)
        written = 0
        while watermark_us < closed_us:
            through_us, did = await self._roll_some(
                namespace, shard, dropped_before_us, watermark_us, closed_us
            )
            written += did
            await self._store.advance(namespace, shard, through_us)
            await self._store.drop_marks(namespace, shard, through_us)
            watermark_us = through_us
        return written

    async def _roll_some(
        self,
        namespace: Namespace,
        shard: int,
        dropped_before_us: int,
        after_us: int,
        closed_us: int,
    ) -> tuple[int, int]:
        """Roll up as many whole windows as a bounded read shows, at least one.

        Returns the last instant that is done, and how many counters were written.
        """
        marks = await self._marks(namespace, shard, after_us, closed_us, None)
        size_us = namespace.settings.rollup_window_us
        through_us = closed_us
        if len(marks) == _MARKS_PER_READ:
            # The last window may not be whole: leave it for the next read, or go on within it.
            last_us = marks[-1].window_us
            whole = [mark for mark in marks if mark.window_us < last_us]
            through_us = (last_us if whole else last_us + size_us) - 1
            marks = whole or marks
        # A crash half-way does the batch again up to the same instant.
        batch_us = through_us
        if marks and len(marks) < _MARKS_PER_READ:
            batch_us = marks[-1].window_us + size_us - 1
        batch = Batch(batch_us, dropped_before_us, size_us)
        await self._settle_atomic(namespace, shard, after_us, through_us)
        written = await self._roll_marks(namespace, marks, batch)
        while marks and len(marks) == _MARKS_PER_READ:
            marks = await self._marks(namespace, shard, after_us, through_us, marks[-1])
            written += await self._roll_marks(namespace, marks, batch)
        return through_us, written

    async def _marks(
        self, namespace: Namespace, shard: int, after_us: int, through_us: int, start: Mark | None
    ) -> Sequence[Mark]:
        return await self._store.dirty(
            namespace,
            shard,
            after_us=after_us,
            through_us=through_us,
            start=start,
            limit=_MARKS_PER_READ,
        )

    async def _roll_marks(self, namespace: Namespace, marks: Sequence[Mark], batch: Batch) -> int:
        dirty = group(marks)
        for _ in range(_ATTEMPTS_MAX):
            try:
                return await self._roll_once(namespace, dirty, batch)
            except SliceMissingError:
                # A slice was dropped under the scan: start again from the partitions.
                dropped_us = await self._store.dropped_before(namespace.dataset)
                batch = Batch(batch.through_us, dropped_us, batch.window_size_us)
        raise UnavailableError("slices vanish again and again", retry_after_us=SECOND)

    async def _roll_once(
        self, namespace: Namespace, dirty: Mapping[str, Dirt], batch: Batch
    ) -> int:
        """Read all the counters' parts at once, write them a batch at a time."""
        names = list(dirty)
        heads = await self._store.heads(namespace, names)
        plans: list[Plan] = []
        for name, head in zip(names, heads, strict=True):
            each = plan(name, dirty[name], head or EMPTY_HEAD, batch)
            if each is not None:
                plans.append(each)
        plans, rows = await self._with_rows(namespace, plans, dirty, batch)
        wanted = [(each.counter, window_us) for each in plans for window_us in each.sums]
        folds = await self._store.sums(namespace, wanted) if wanted else ()
        sums: dict[str, dict[int, Fold]] = {}
        for (counter, window_us), fold in zip(wanted, folds, strict=True):
            sums.setdefault(counter, {})[window_us] = fold
        for start in range(0, len(plans), self._batch_counters):
            updates = [
                update(each, sums.get(each.counter, {}), rows.get(each.counter, ()), batch)
                for each in plans[start : start + self._batch_counters]
            ]
            await self._store.apply(namespace, updates, through_us=batch.through_us)
            await self._cache.put_many(
                namespace, [(each.counter, each.checkpoint) for each in updates]
            )
        return len(plans)

    async def _with_rows(
        self,
        namespace: Namespace,
        plans: Sequence[Plan],
        dirty: Mapping[str, Dirt],
        batch: Batch,
    ) -> tuple[list[Plan], dict[str, Sequence[WindowRow]]]:
        """The plans, those that need all their rows made anew from heads of the same moment."""
        whole = [each.counter for each in plans if each.whole]
        if not whole:
            return list(plans), {}
        # All of them: another worker may move the checkpoint on before the head is read again.
        partitions = await read_partitions(self._store, namespace, whole, through_us=TIME_MAX_US)
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

    async def _settle_atomic(
        self, namespace: Namespace, shard: int, after_us: int, through_us: int
    ) -> None:
        """Have every atomic add of the windows stand whole or not at all before they are summed.

        None of the items found included: the batch log may still land them.
        """
        marks = await self._store.dirty_atomic(
            namespace, shard, after_us=after_us, through_us=through_us
        )
        for mark in marks:
            found = await self._store.find(namespace, mark.events)
            decided = await self._store.decided(namespace, mark.events)
            if all(found) and decided is None:
                continue
            try:
                await self._resolver.resolve(namespace, mark.events, by_worker=True)
            except TokenConflictError as error:
                _log.warning("an atomic add lost to another use of its token: %s", error.detail)

    def _pause_us(self) -> int:
        windows = [each.settings.rollup_window_us for each in self._namespaces.all()]
        shortest_us = min(windows, default=_PAUSE_MAX_US)
        return max(_PAUSE_MIN_US, min(_PAUSE_MAX_US, shortest_us // 4))
