"""Partition sizes, in a store that spreads events over partitions."""

from counter.capabilities import PartitionSize, PartitionSizeStore
from counter.ports import Store
from counter.testing.cases import (
    DATASET,
    NOW,
    SLICE,
    T0,
    WINDOW,
    StoreCases,
    add,
    clear,
    nonces_per_bucket,
    write,
)
from counter.types import Event, Namespace

BUCKET = DATASET.time_bucket_us


def sizes_of(store: Store) -> PartitionSizeStore:
    sizes = store.capabilities.partition_sizes
    assert sizes is not None
    return sizes


class PartitionSizeCases(StoreCases):
    """Rows are counted where they are summed, and the largest of what was counted stays."""

    async def test_a_sum_counts_the_rows_of_each_window(
        self, store: Store, namespace: Namespace
    ) -> None:
        """In all its partitions, in whatever way they are summed, a clear's included."""
        crowded, *others = nonces_per_bucket()
        events = [Event("many", NOW + n, crowded, 0, 5) for n in range(60)]
        events += [Event("many", NOW, each, 0, 5) for each in others]
        events += [add("few", NOW), add("few", NOW + WINDOW), clear("few", NOW + WINDOW, 2)]
        await write(store, namespace, *events)
        counted: list[tuple[str, int, int]] = []
        asked = [("few", NOW + WINDOW), ("never", NOW), ("many", NOW), ("few", NOW)]
        await store.events.sums(namespace, asked, counted=lambda *each: counted.append(each))
        many = 60 + len(others)
        assert counted == [("few", NOW + WINDOW, 2), ("many", NOW, many), ("few", NOW, 1)]

    async def test_of_each_slice_the_largest_size_stays(
        self, store: Store, namespace: Namespace
    ) -> None:
        """In whatever order they are recorded; one that was observed is kept, too."""
        sizes, dataset = sizes_of(store), namespace.dataset
        largest = PartitionSize(T0, BUCKET, 7_000_000_000, "n", "hot")
        earlier = PartitionSize(T0 - SLICE, BUCKET, 5, "n", "é")
        observed = PartitionSize(T0, BUCKET, 3_000)
        for each in (
            largest._replace(size_bytes=6_999_999_999, counter="warm"),
            largest,
            largest._replace(size_bytes=1, counter="cold"),
            observed,
            observed._replace(size_bytes=2_000),
            earlier,
        ):
            await sizes.record(dataset, each)
        found = await sizes.recorded(dataset)
        assert list(found) == [earlier, *sorted((largest, observed), key=lambda c: c.is_observed)]

    async def test_nothing_is_observed_of_what_was_just_written(
        self, store: Store, namespace: Namespace
    ) -> None:
        """It is not on disk; and of a small partition nodes tell no more than that it is small."""
        await write(store, namespace, add())
        assert list(await sizes_of(store).observe(namespace.dataset)) == []
