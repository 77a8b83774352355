"""Which counter's events crowd a partition the most, as far as one worker counts them.

A worker counts the events of each window of its shards anyway: that is how often a counter is
written, at no cost to the writers. What it counts of a time bucket it adds up; what another worker
counted of it, or this one before it was started again, is not in there. So it may be too little,
for as long as a time bucket, and is never too much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from counter.crowds import CROWDS_KEPT_SLICES, EVENT_BYTES, Counted, Crowd
from counter.partitions import slice_start
from counter.planner import PARTITION_BYTES_MAX
from counter.types import Dataset, Namespace
from counter.windows import window_of

#: Counters that are added up at a time; of more, those with the fewest events are forgotten.
_COUNTERS_MAX: Final = 10_000


@dataclass(slots=True)
class _Course:
    """A counter's events of one time bucket, in the windows up to the one that starts last."""

    bucket_us: int
    window_us: int = -1
    events: int = 0


class CrowdTally:
    """The most crowded time bucket of each slice of each dataset, with events in partitions of
    *target_bytes* at most."""

    def __init__(self, target_bytes: int = PARTITION_BYTES_MAX) -> None:
        self._target_bytes = target_bytes
        self._courses: dict[tuple[int, str], _Course] = {}
        #: By dataset id and start of the slice.
        self._crowds: dict[int, dict[int, Crowd]] = {}

    def counting(self, namespace: Namespace) -> Counted | None:
        """What counts windows of *namespace*; None where nothing would come of it.

        A window is counted once; those of a counter come in order, all in all. One with fewer
        events than would fill half a partition, if all windows of its time bucket had as many, is
        not added up: of what a time bucket takes, less than half a partition is missed by that.
        """
        dataset = namespace.dataset
        if dataset.event_buckets_max <= dataset.event_buckets:
            return None
        window_us, bucket_us = namespace.settings.rollup_window_us, dataset.time_bucket_us
        windows = max(1, bucket_us // window_us)
        least = ceil(self._target_bytes / 2 / EVENT_BYTES / windows)
        busiest = self._crowds.setdefault(dataset.id, {})

        def counted(counter: str, start_us: int, events: int) -> None:
            if window_us > bucket_us:
                events = ceil(events * bucket_us / window_us)
            elif events >= least:
                events = self._added_up(
                    (namespace.id, counter), window_of(start_us, bucket_us), start_us, events
                )
            slice_us = slice_start(start_us, dataset.slice_us)
            size_bytes = events * EVENT_BYTES
            standing = busiest.get(slice_us)
            if standing is None or standing.size_bytes < size_bytes:
                busiest[slice_us] = Crowd(slice_us, bucket_us, size_bytes, namespace.name, counter)

        return counted

    def crowds(self, dataset: Dataset) -> Mapping[int, Crowd]:
        """The most crowded time bucket of each of the last slices, by the slice's start."""
        busiest = self._crowds.get(dataset.id, {})
        for slice_us in sorted(busiest)[:-CROWDS_KEPT_SLICES]:
            del busiest[slice_us]
        return dict(busiest)

    def _added_up(self, key: tuple[int, str], bucket_us: int, window_us: int, events: int) -> int:
        """All events of a counter's time bucket that were counted, with those of a window."""
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
        """Let go of half of the counters: those of the oldest time buckets, with the fewest
        events."""
        order = sorted(self._courses.items(), key=lambda each: (each[1].bucket_us, each[1].events))
        for key, _ in order[: len(order) // 2]:
            del self._courses[key]
