"""Slices that differ in their event buckets, and workers that raise them, in the simulation."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest

from counter.limits import SECOND
from counter.types import Dataset, Slice
from rollup.partitions import Partitions
from tests.simulation.run import run_seed
from tests.simulation.shrink import report, shrink

#: Three long ones, in which slices that were raised come to hold events, and two short ones.
SEEDS = (4, 82, 114, 20, 22)


@contextmanager
def raised_often(made: set[int]) -> Iterator[None]:
    """Have two events fill a partition, every worker look every second, and *made* be told."""
    really = Partitions.next_buckets

    async def told(self: Partitions, dataset: Dataset, before: Slice | None) -> int:
        number = await really(self, dataset, before)
        made.add(number)
        return number

    with (
        patch("tests.simulation.world.Dataset", partial(Dataset, event_buckets_max=8)),
        patch("rollup.partitions.PARTITION_BYTES_MAX", 128),
        patch("rollup.worker._PARTITIONS_EVERY_US", SECOND),
        patch.object(Partitions, "next_buckets", told),
    ):
        yield


def test_nothing_promised_is_broken_where_partitions_are_raised() -> None:
    made: set[int] = set()
    with raised_often(made):
        for seed in SEEDS:
            result = run_seed(seed)
            if result.problems:
                pytest.fail(report(shrink(result)), pytrace=False)
    assert len(made) > 2
