"""Store partition sizes in memory."""

from __future__ import annotations

from collections.abc import Sequence

from counter.partition_sizes import CROWDS_KEPT_SLICES, Crowd
from counter.storage.memory.tables import Part
from counter.types import Dataset


class MemoryCrowds(Part):
    """:class:`counter.partition_sizes.PartitionedStore`, without nodes that report sizes."""

    async def leave_crowd(self, dataset: Dataset, crowd: Crowd) -> None:
        shelf = self._shelf(dataset)
        until_us = self._clock.now_us() + CROWDS_KEPT_SLICES * dataset.slice_us
        key = (crowd.start_us, crowd.is_observed)
        standing = shelf.crowds.get(key)
        if standing is None or standing[0].size_bytes < crowd.size_bytes:
            shelf.crowds[key] = (crowd, until_us)

    async def crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        now_us, shelf = self._clock.now_us(), self._shelf(dataset)
        kept = {key: each for key, each in sorted(shelf.crowds.items()) if now_us < each[1]}
        shelf.crowds = kept
        return [crowd for crowd, _ in kept.values()]

    async def observe_crowds(self, dataset: Dataset) -> Sequence[Crowd]:
        return []
