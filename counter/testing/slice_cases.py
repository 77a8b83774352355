"""The control plane's contract: slices of time, and the sizes of their partitions."""

import pytest

from counter.capabilities import PartitionSize, PartitionSizeStore
from counter.errors import SliceMissingError
from counter.limits import MINUTE
from counter.ports import Store
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SLICE,
    SLICES_END,
    T0,
    WINDOW,
    StoreCases,
    add,
    clear,
    nonces_per_bucket,
    slice_at,
    total,
    write,
)
from counter.types import Event, Namespace, Slice


class SliceCases(StoreCases):
    """Slices are made ahead, retired, dropped from the earliest; what is dropped stays dropped."""

    async def test_slices_are_listed_earliest_first(
        self, store: Store, namespace: Namespace
    ) -> None:
        """With the partitioning that each was made with."""
        other = Slice(SLICES_END + SLICE, SLICES_END + 2 * SLICE, MINUTE, 32)
        await store.control.make_slices(namespace.dataset, other)
        await store.control.make_slices(namespace.dataset, slice_at(SLICES_END))
        starts = range(FIRST_SLICE, SLICES_END + SLICE, SLICE)
        expected = [slice_at(start_us) for start_us in starts] + [other]
        assert list(await store.control.slices(namespace.dataset)) == expected

    async def test_a_new_slice_takes_events(self, store: Store, namespace: Namespace) -> None:
        """From its first instant to its last, in its own partitioning."""
        await store.control.make_slices(
            namespace.dataset, Slice(SLICES_END, SLICES_END + SLICE, SLICE, event_buckets=1)
        )
        events = [add(at=SLICES_END, number=n) for n in range(9)]
        events.append(add(at=SLICES_END + SLICE - 1))
        await write(store, namespace, *events)
        assert await total(store, namespace) == 10

    async def test_making_a_slice_again_changes_nothing(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Neither its events nor its partitioning."""
        before = list(await store.control.slices(namespace.dataset))
        await write(store, namespace, add())
        await store.control.make_slices(namespace.dataset, Slice(T0, T0 + SLICE, MINUTE, 99))
        assert list(await store.control.slices(namespace.dataset)) == before
        assert await total(store, namespace) == 1

    async def test_the_first_retirement_is_noted(self, store: Store, namespace: Namespace) -> None:
        """Of the slice, which goes on holding its events."""
        await write(store, namespace, add(at=T0 - SLICE))
        start_us = T0 - SLICE
        for now_us in (NOW, NOW + 1):
            await store.control.retire_slice(namespace.dataset, start_us, now_us)
        slices = await store.control.slices(namespace.dataset)
        retired = {each.start_us: each.retired_at_us for each in slices if each.retired_at_us}
        assert retired == {start_us: NOW}
        assert await total(store, namespace) == 1

    async def test_a_dropped_slice_is_an_error(self, store: Store, namespace: Namespace) -> None:
        """Its events are gone, and who asks for one of them learns that it may have been."""
        kept, dropped = add(at=FIRST_SLICE + SLICE), add(at=T0 - 2 * SLICE - 5 * MINUTE)
        await write(store, namespace, kept, dropped)
        assert await store.control.dropped_before(namespace.dataset) == 0
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        assert await store.control.dropped_before(namespace.dataset) == FIRST_SLICE + SLICE
        for event in (dropped, add("never", FIRST_SLICE)):
            with pytest.raises(SliceMissingError):
                await store.events.find(namespace, [event])
            with pytest.raises(SliceMissingError):
                await store.events.sums(namespace, [("c", FIRST_SLICE)])
        assert list(await store.events.find(namespace, [kept])) == [kept]
        assert await total(store, namespace) == 1

    async def test_a_dropped_slice_is_not_made_again(
        self, store: Store, namespace: Namespace
    ) -> None:
        """An empty table would answer that nothing was ever there."""
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        await store.control.make_slices(namespace.dataset, slice_at(FIRST_SLICE))
        starts = [each.start_us for each in await store.control.slices(namespace.dataset)]
        assert starts[0] == FIRST_SLICE + SLICE
        with pytest.raises(SliceMissingError):
            await store.events.find(namespace, [add(at=FIRST_SLICE)])

    async def test_slices_drop_one_after_the_other(
        self, store: Store, namespace: Namespace
    ) -> None:
        """The bound follows each."""
        for n in range(1, 4):
            (first, *_) = await store.control.slices(namespace.dataset)
            await store.control.drop_slice(namespace.dataset, first.start_us)
            assert await store.control.dropped_before(namespace.dataset) == FIRST_SLICE + n * SLICE
        assert len(await store.control.slices(namespace.dataset)) == 2

    async def test_dropping_a_slice_again_changes_nothing(
        self, store: Store, namespace: Namespace
    ) -> None:
        """Two workers may maintain the slices at once: the next slice and the bound are kept."""
        event = add(at=FIRST_SLICE + SLICE)
        await write(store, namespace, event)
        for _ in range(2):
            await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        assert await store.control.dropped_before(namespace.dataset) == FIRST_SLICE + SLICE
        assert list(await store.events.find(namespace, [event])) == [event]
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE + SLICE)
        await store.control.drop_slice(namespace.dataset, FIRST_SLICE)
        assert await store.control.dropped_before(namespace.dataset) == FIRST_SLICE + 2 * SLICE


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
