"""Choose the number of event buckets of a dataset's next slice from the amount of writes.

Partitions are read and repaired as a whole, and should stay below 4 MiB. If a counter's partitions
would become larger, the next slice gets more event buckets. Existing slices keep theirs, because a
token must always map to the same partition. Counted and observed sizes are stored for all workers:
from the same slices and sizes all of them compute the same number, and if two create a slice at
once, the first one is valid for both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from typing import Final

from counter.capabilities import PartitionSize, PartitionSizeStore
from counter.errors import UnavailableError, invariant
from counter.limits import MINUTE, PARTITION_BYTES_MAX, SECOND, SIZES_KEPT_SLICES
from counter.ports import Clock, Counted, Store
from counter.quantities import format_bytes, spell_duration
from counter.types import Dataset, Namespace, Slice
from counter.windows import slice_start, window_of

_log = logging.getLogger("counter.partitions")

#: Uncompressed size of an event row of an atomic add in Cassandra; a row of a single add takes 46
#: bytes. Measured on 5.0.5 with 100,000 rows of each.
EVENT_BYTES: Final = 64
#: How many slices are considered, the current one included: a week of daily slices.
SLICES_REMEMBERED: Final = 8
#: How many slices before the current one must have been counted before the number is lowered.
SLICES_COUNTED: Final = 3
#: The number is lowered if the expected partition is at most this fraction of the bound. After
#: lowering by half it is raised again only when twice as much is written.
_LOWERED_BELOW: Final = 4
_OBSERVED_EVERY_US: Final = 10 * MINUTE

_UNREADABLE: Final = "partition sizes cannot be read"
_UNOBSERVED: Final = "nodes do not report partition sizes"

invariant(SLICES_REMEMBERED < SIZES_KEPT_SLICES, "sizes are kept for as long as they count")


@dataclass(slots=True)
class Outlook:
    """The state of a dataset's partitions, for the log and for metrics."""

    #: The event buckets of the current slice, and of the next slice to be created.
    buckets_now: int = 0
    buckets_next: int = 0
    #: The largest known partition of the current slice, and the largest expected one of the next
    #: slice.
    largest_bytes_now: int = 0
    largest_bytes_expected: int = 0
    #: Slices that this process created with more event buckets than the one before.
    raised: int = 0


def buckets_after(
    dataset: Dataset, current: int, size_bytes: int, target_bytes: int, *, may_lower: bool
) -> int:
    """Return the event buckets of the slice after one with *current*, if the busiest counter's
    time bucket takes *size_bytes*.

    Raised to the power of two that keeps a partition to *target_bytes*: that leaves room, and it
    changes rarely. Lowered by half at most. Always within the dataset's bounds.
    """
    least, most = dataset.event_buckets, max(dataset.event_buckets, dataset.event_buckets_max)
    current = min(most, max(least, current))
    if size_bytes > current * target_bytes:
        wanted = 1 << (ceil(size_bytes / target_bytes) - 1).bit_length()
        return min(most, max(current, wanted))
    if may_lower and size_bytes * _LOWERED_BELOW <= current * target_bytes:
        return max(least, current // 2)
    return current


class Partitions:
    """Counts events per partition, shares the sizes, and chooses event buckets."""

    def __init__(self, store: Store, clock: Clock, *, target_bytes: int | None = None) -> None:
        """Partitions should stay below *target_bytes*, by default PARTITION_BYTES_MAX."""
        self._control = store.control
        self._sizes = store.capabilities.partition_sizes
        self._clock = clock
        self._target_bytes = target_bytes or PARTITION_BYTES_MAX
        self._tally = PartitionSizeTally(self._target_bytes)
        #: The datasets whose number may be raised, by name.
        self.outlooks: dict[str, Outlook] = {}
        #: The sizes in bytes that were shared with other workers, by dataset and slice.
        self._recorded: dict[tuple[int, int], int] = {}
        self._observed_us: int | None = None
        #: How often sizes could not be read or shared.
        self.failures = 0
        #: The last logged forecast of each dataset, so that each is logged once.
        self._foretold: dict[str, tuple[int, bool]] = {}
        self._troubles: set[str] = set()

    def counting(self, namespace: Namespace) -> Counted | None:
        """Return the callback that counts the rows of windows of *namespace*; None if not
        needed."""
        is_asked = self._sizes is not None and _may_raise(namespace.dataset)
        return self._tally.counting(namespace) if is_asked else None

    async def check(self, datasets: Iterable[Dataset], *, is_first: bool) -> None:
        """Share the counted sizes with all workers, and compute the next event buckets.

        Every worker does so periodically; the one that *is_first* also asks the nodes and logs the
        forecast. Failures are logged, counted and retried the next time: no count depends on it.
        """
        chosen = [each for each in datasets if _may_raise(each)]
        if self._sizes is None or not chosen:
            return
        try:
            for dataset in chosen:
                await self._record(dataset, self._sizes)
            if is_first:
                await self._observe(chosen, self._sizes)
            for dataset in chosen:
                await self._reckon(dataset, self._sizes, logs=is_first)
        except Exception as error:
            self._failed(_UNREADABLE, error)
        else:
            self._mended(_UNREADABLE)

    async def next_buckets(self, dataset: Dataset, before: Slice | None) -> int:
        """Return the event buckets of a slice that is created now, after *before*."""
        if self._sizes is None or before is None or not _may_raise(dataset):
            return dataset.event_buckets
        try:
            sizes = await self._recent(dataset, self._sizes)
        except Exception as error:
            # The slice must be created in any case: without it every write fails.
            self._failed(_UNREADABLE, error)
            sizes = []
        number, _ = self._number(dataset, before.event_buckets, sizes)
        if number > before.event_buckets:
            self._outlook(dataset).raised += 1
        if number != before.event_buckets:
            _log.info(
                "dataset %s: the slice from %s on is made with %d event buckets instead of %d",
                *(dataset.name, _when(before.end_us), number, before.event_buckets),
            )
        return number

    async def _record(self, dataset: Dataset, store: PartitionSizeStore) -> None:
        """Share sizes that are larger than those shared before, of the slices that are considered.

        A worker that is far behind counts older slices. Their sizes would expire only after they
        are useless, and an expired one must not be written again: see the store's adapter.
        """
        sizes, oldest_us = self._tally.largest(dataset), self._oldest_us(dataset)
        for slice_us, size in sizes.items():
            if slice_us < oldest_us:
                continue
            if size.size_bytes > self._recorded.get((dataset.id, slice_us), 0):
                await store.record(dataset, size)
                self._recorded[(dataset.id, slice_us)] = size.size_bytes
        for key in [key for key in self._recorded if key[0] == dataset.id and key[1] not in sizes]:
            del self._recorded[key]

    async def _observe(self, datasets: Sequence[Dataset], store: PartitionSizeStore) -> None:
        """Ask the nodes for partition sizes, periodically."""
        now_us = self._clock.boottime_us()
        if self._observed_us is not None and now_us - self._observed_us < _OBSERVED_EVERY_US:
            return
        self._observed_us = now_us
        for dataset in datasets:
            try:
                observed = await store.observe(dataset)
            except UnavailableError as error:
                # The database user may lack the permission; counted sizes suffice.
                self._failed(_UNOBSERVED, error)
                return
            for size in observed:
                if size.start_us >= self._oldest_us(dataset):
                    await store.record(dataset, size)
        self._mended(_UNOBSERVED)

    async def _reckon(self, dataset: Dataset, store: PartitionSizeStore, *, logs: bool) -> None:
        slices = await self._control.slices(dataset)
        if not slices:
            return
        sizes = await self._recent(dataset, store)
        last, outlook = slices[-1], self._outlook(dataset)
        number, largest = self._number(dataset, last.event_buckets, sizes)
        now_us = self._clock.now_us()
        for each in slices:
            if each.start_us <= now_us < each.end_us:
                here = [size.size_bytes for size in sizes if size.start_us == each.start_us]
                outlook.buckets_now = each.event_buckets
                outlook.largest_bytes_now = ceil(max(here, default=0) / each.event_buckets)
        outlook.buckets_next = number
        outlook.largest_bytes_expected = ceil(largest.size_bytes / number) if largest else 0
        if logs:
            self._foretell(dataset, last, number, largest)

    async def _recent(self, dataset: Dataset, store: PartitionSizeStore) -> list[PartitionSize]:
        """Return the sizes of the last slices, converted to the time bucket of the next one.

        The conversion assumes even spread: later slices are counted exactly.
        """
        bucket_us, oldest_us = dataset.time_bucket_us, self._oldest_us(dataset)
        return [
            each._replace(
                bucket_us=bucket_us, size_bytes=ceil(each.size_bytes * bucket_us / each.bucket_us)
            )
            for each in await store.recorded(dataset)
            if each.start_us >= oldest_us
        ]

    def _oldest_us(self, dataset: Dataset) -> int:
        """Return the start of the oldest slice that is considered."""
        now_us = slice_start(self._clock.now_us(), dataset.slice_us)
        return now_us - (SLICES_REMEMBERED - 1) * dataset.slice_us

    def _number(
        self, dataset: Dataset, current: int, sizes: Sequence[PartitionSize]
    ) -> tuple[int, PartitionSize | None]:
        """Return the event buckets after *current*, and the largest of *sizes*."""
        largest = max(sizes, key=lambda each: each.size_bytes, default=None)
        now_us = slice_start(self._clock.now_us(), dataset.slice_us)
        counted = {each.start_us for each in sizes if not each.is_observed}
        before = (now_us - number * dataset.slice_us for number in range(1, SLICES_COUNTED + 1))
        number = buckets_after(
            dataset,
            current,
            largest.size_bytes if largest else 0,
            self._target_bytes,
            may_lower=counted.issuperset(before),
        )
        return number, largest

    def _foretell(
        self, dataset: Dataset, last: Slice, number: int, largest: PartitionSize | None
    ) -> None:
        """Log once if the next slice has more event buckets, or too few."""
        size_bytes = largest.size_bytes if largest else 0
        is_short = size_bytes > number * self._target_bytes
        if largest is None or not (number > last.event_buckets or is_short):
            self._foretold.pop(dataset.name, None)
            return
        if self._foretold.get(dataset.name) == (number, is_short):
            return
        self._foretold[dataset.name] = (number, is_short)
        whose = f"counter {largest.counter!r} of namespace {largest.namespace!r} fills"
        _log.warning(
            "dataset %s: %s partitions of %s (%s in a time bucket of %s), where %s are good: the"
            " next slice to be made, from %s on, has %d event buckets instead of %d",
            dataset.name,
            "according to the nodes there are" if largest.is_observed else whose,
            *(format_bytes(ceil(size_bytes / last.event_buckets)), format_bytes(size_bytes)),
            *(spell_duration(largest.bucket_us), format_bytes(self._target_bytes)),
            *(_when(last.end_us), number, last.event_buckets),
        )
        if is_short:
            _log.warning(
                "dataset %s: event_buckets_max is %d, and partitions of %s are still to be"
                " expected: make time_bucket shorter, or event_buckets_max larger",
                *(dataset.name, dataset.event_buckets_max, format_bytes(ceil(size_bytes / number))),
            )

    def _outlook(self, dataset: Dataset) -> Outlook:
        return self.outlooks.setdefault(dataset.name, Outlook())

    def _failed(self, what: str, error: Exception) -> None:
        """Count a failure, and log it once until it is resolved."""
        self.failures += 1
        if what not in self._troubles:
            self._troubles.add(what)
            text = "%s, and event_buckets stay as they are: %s"
            if isinstance(error, UnavailableError):
                _log.warning(text, what, error.detail)
            else:
                _log.error(text, what, repr(error), exc_info=error)

    def _mended(self, what: str) -> None:
        if what in self._troubles:
            self._troubles.remove(what)
            _log.info("resolved: %s", what)


def _may_raise(dataset: Dataset) -> bool:
    return dataset.event_buckets_max > dataset.event_buckets


def _when(time_us: int) -> str:
    return f"{datetime.fromtimestamp(time_us // SECOND, UTC):%Y-%m-%dT%H:%M:%SZ}"


#: Counters that are summed at a time; beyond it, those with the fewest events are dropped.
_COUNTERS_MAX: Final = 10_000


@dataclass(slots=True)
class _Course:
    """A counter's events of one time bucket, in the windows up to the one that starts last."""

    bucket_us: int
    window_us: int = -1
    events: int = 0


class PartitionSizeTally:
    """The largest time bucket of each slice of each dataset, with events in partitions of
    *target_bytes* at most."""

    def __init__(self, target_bytes: int = PARTITION_BYTES_MAX) -> None:
        self._target_bytes = target_bytes
        self._courses: dict[tuple[int, str], _Course] = {}
        #: By dataset id and start of the slice.
        self._largest: dict[int, dict[int, PartitionSize]] = {}

    def counting(self, namespace: Namespace) -> Counted | None:
        """Return the callback that counts windows of *namespace*; None if the result would be
        unused.

        Each window is counted once; those of a counter come mostly in order. Windows are skipped if
        their time bucket, with as many events in all windows, would fill less than half a
        partition: so the error per time bucket is less than half a partition.
        """
        dataset = namespace.dataset
        if dataset.event_buckets_max <= dataset.event_buckets:
            return None
        window_us, bucket_us = namespace.settings.rollup_window_us, dataset.time_bucket_us
        windows = max(1, bucket_us // window_us)
        least = ceil(self._target_bytes / 2 / EVENT_BYTES / windows)
        busiest = self._largest.setdefault(dataset.id, {})

        def counted(counter: str, start_us: int, events: int) -> None:
            if window_us > bucket_us:
                events = ceil(events * bucket_us / window_us)
            elif events >= least:
                events = self._added_up(
                    (namespace.id, counter), window_of(start_us, bucket_us), start_us, events
                )
            slice_us = slice_start(start_us, dataset.slice_us)
            size_bytes = events * EVENT_BYTES
            current = busiest.get(slice_us)
            if current is None or current.size_bytes < size_bytes:
                busiest[slice_us] = PartitionSize(
                    slice_us, bucket_us, size_bytes, namespace.name, counter
                )

        return counted

    def largest(self, dataset: Dataset) -> Mapping[int, PartitionSize]:
        """Return the largest time bucket of each of the last slices, by the slice's start."""
        busiest = self._largest.get(dataset.id, {})
        for slice_us in sorted(busiest)[:-SIZES_KEPT_SLICES]:
            del busiest[slice_us]
        return dict(busiest)

    def _added_up(self, key: tuple[int, str], bucket_us: int, window_us: int, events: int) -> int:
        """Return all counted events of a counter's time bucket, including those of a window."""
        course = self._courses.get(key)
        if course is None:
            if len(self._courses) >= _COUNTERS_MAX:
                self._forget()
            course = self._courses[key] = _Course(bucket_us)
        if bucket_us > course.bucket_us:
            course.bucket_us, course.events = bucket_us, 0
        if window_us > course.window_us:
            course.window_us = window_us
            course.events += events
        return course.events

    def _forget(self) -> None:
        """Drop half of the counters: those of the oldest time buckets, with the fewest events."""
        order = sorted(self._courses.items(), key=lambda each: (each[1].bucket_us, each[1].events))
        for key, _ in order[: len(order) // 2]:
            del self._courses[key]
