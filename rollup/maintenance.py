"""Create slices ahead, retire and drop old ones, end expired holds, and delete data that is out of
use."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.holds import expire
from counter.errors import NamespaceUnknownError
from counter.limits import MINUTE, PAST_SLICES_PER_STEP, SLICES_AHEAD
from counter.ports import Clock, Store
from counter.types import CounterType, Dataset, Slice
from counter.windows import closing_lag, slice_start
from rollup.partitions import Partitions

_log = logging.getLogger("counter.maintenance")


class Maintenance:
    """Periodic maintenance, done by any one process."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        partitions: Partitions | None = None,
        guard: ClockGuard | None = None,
    ) -> None:
        self._store = store
        self._partitions = partitions or Partitions(store, clock)
        self._clock = clock
        self._guard = guard
        self._purged_at_us = 0
        #: Slices as last read, by dataset, and how many were created and dropped here.
        self.slices: dict[str, Sequence[Slice]] = {}
        self.tally = dict.fromkeys(("made", "dropped"), 0)
        #: Expired holds that were found and ended here.
        self.holds_expired = 0

    async def run_once(self) -> None:
        """Maintain every dataset; cheap if nothing is to be done.

        Raises ClockSkewError: with a wrong clock a slice could be created too far ahead, or dropped
        too early, permanently.
        """
        datasets = await self._store.control.datasets()
        # Create slices of all datasets first: writes fail without them, and drops can wait.
        for dataset in datasets:
            await self.make_slices(dataset)
        checked_now_us(self._clock, self._guard)
        # After that, because their ends need slices; and no slice with an open hold is dropped.
        expired, failure = await expire(self._store, self._clock)
        self.holds_expired += expired
        for dataset in datasets:
            await self._drop_slices(dataset)
        now_us = checked_now_us(self._clock, self._guard)
        followed_us = 0 if self._guard is None else self._guard.followed_us
        is_due = now_us - self._purged_at_us >= MINUTE
        if is_due and not await self._store.control.purge(now_us - followed_us):
            self._purged_at_us = now_us
        if failure is not None:
            raise failure

    async def make_slices(self, dataset: Dataset, *, past_max: int = PAST_SLICES_PER_STEP) -> None:
        """Create the slices that adds need, up to SLICES_AHEAD ahead of now, and at most *past_max*
        missing ones of the past, earliest first: each may cost a table.

        Past slices contain only closed windows, so nothing can be written there any more; a token
        of such a time cannot be resolved before its slice exists. Slices past retention are left
        out, because the outcome of their tokens is unknown anyway. None is created before the first
        one that ever existed: at the first start, the slice before the current one.
        """
        now_us = checked_now_us(self._clock, self._guard, dataset)
        size_us = dataset.slice_us
        slices = await self._store.control.slices(dataset)
        dropped_us = await self._store.control.dropped_before(dataset)
        this_us = slice_start(now_us, size_us)
        # No accept limit is longer than a slice: every window before this start is closed.
        open_us = slice_start(now_us - size_us - closing_lag(dataset), size_us)
        first_us = dropped_us or (slices[0].start_us if slices else this_us - size_us)
        from_us = max(first_us, slice_start(now_us - dataset.retention_us, size_us))
        span = (from_us, this_us + (SLICES_AHEAD + 1) * size_us)
        # Several processes that make such long slices could create overlapping ones.
        whole_before_us = open_us if self._store.capabilities.embedded else 0
        missing = list(_missing(slices, span, size_us, whole_before_us))
        past = [each for each in missing if each[1] <= open_us]
        last = slices[-1] if slices else None
        made: list[Slice] = []
        for start_us, end_us in missing[len(past) :]:
            event_buckets = await self._partitions.next_buckets(dataset, last)
            last = Slice(start_us, end_us, dataset.time_bucket_us, event_buckets)
            made.append(last)
        parts = (dataset.time_bucket_us, dataset.event_buckets)
        made += [Slice(start_us, end_us, *parts) for start_us, end_us in past[:past_max]]
        if made:
            await self._store.control.make_slices(dataset, *made)
            self.tally["made"] += len(made)
            _log.info(
                "made %d slices of dataset %s: from %d to %d",
                *(len(made), dataset.name),
                *(min(each.start_us for each in made), max(each.end_us for each in made)),
            )

    async def _drop_slices(self, dataset: Dataset) -> None:
        """Retire slices that every watermark has passed; drop those past retention and every
        recount.

        ``dropped_before`` moves forward first, then the table is dropped. Watermarks are read only
        if a slice may be due, because there may be many of them.
        """
        watermark_us, grace_us = None, 0
        is_earliest = True
        slices = self.slices[dataset.name] = await self._store.control.slices(dataset)
        for each in slices:
            followed_us = 0 if self._guard is None else self._guard.followed_us
            due_us = each.end_us + followed_us
            if each.retired_at_us is not None:
                due_us += dataset.retention_us
            now_us = checked_now_us(self._clock, self._guard, dataset)
            if now_us >= due_us and watermark_us is None:
                watermark_us, grace_us = await self._watermark(dataset, now_us)
            if each.retired_at_us is not None:
                due_us = max(due_us, each.retired_at_us + grace_us + followed_us)
            is_due = watermark_us is not None and watermark_us >= due_us
            if each.retired_at_us is None:
                if is_due:
                    # Read the clock after the watermarks: they had passed the end by then.
                    now_us = checked_now_us(self._clock, self._guard, dataset)
                    await self._store.control.retire_slice(dataset, each.start_us, now_us)
                return
            is_earliest = is_earliest and is_due
            if is_earliest:
                is_earliest = await self._store.control.drop_slice(dataset, each.start_us)
            if is_earliest:
                self.tally["dropped"] += 1
                _log.info("dropped slice %d of dataset %s", each.start_us, dataset.name)

    async def _watermark(self, dataset: Dataset, now_us: int) -> tuple[int, int]:
        """Return the earliest watermark of all the shards, and how long a recount may be under way.

        The namespaces are read from the store, after the clock: a copy of the directory may lack
        one whose events are not counted yet.
        """
        earliest_us, window_us = now_us, 0
        for namespace in await self._store.control.namespaces():
            settings = namespace.settings
            if namespace.dataset.id != dataset.id:
                continue
            if settings.counter_type is CounterType.BEST_EFFORT:
                continue
            window_us = max(window_us, settings.rollup_window_us)
            try:
                earliest_us = min([earliest_us, *await self._store.rollups.watermarks(namespace)])
            except NamespaceUnknownError:
                # Deleted meanwhile: it delays nothing.
                continue
        return earliest_us, window_us + dataset.clock_skew_max_us


def _missing(
    slices: Sequence[Slice], span: tuple[int, int], size_us: int, whole_before_us: int
) -> Iterator[tuple[int, int]]:
    """Return start and end of each slice of *span* that is missing in the sorted *slices*.

    No event can be written before *whole_before_us* any more: a gap there needs one slice only.
    """
    at_us, to_us = span
    for start_us, end_us in [*((each.start_us, each.end_us) for each in slices), (to_us, to_us)]:
        hole_end_us = min(start_us, to_us)
        while at_us < hole_end_us:
            whole = at_us < whole_before_us
            until_us = min(hole_end_us, whole_before_us) if whole else at_us + size_us
            yield at_us, until_us
            at_us = until_us
        at_us = max(at_us, end_us)
