"""How many events of one counter fall into one time bucket, as a worker counts them."""

from dataclasses import replace
from math import ceil
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from counter.limits import MINUTE, SECOND
from counter.ports import Counted
from counter.types import Era, Namespace
from rollup.partitions import EVENT_BYTES, PartitionSizeTally
from tests.rollup.world import DATASET, SETTINGS
from tests.support.times import START_US

SLICE = DATASET.slice_us
BUCKET = 10 * SECOND
WINDOWS = BUCKET // SECOND
#: Half a partition, cut into the windows of a time bucket, is one event each.
TARGET = 2 * EVENT_BYTES * WINDOWS
#: The beginning of a slice and of a time bucket.
T0 = START_US - START_US % SLICE

dataset = replace(DATASET, time_bucket_us=BUCKET, event_buckets_max=8)
namespace = Namespace(7, "n", SETTINGS, (Era(0, SECOND),), dataset, T0, 1)


def counting(tally: PartitionSizeTally, of: Namespace = namespace) -> Counted:
    counted = tally.counting(of)
    assert counted is not None
    return counted


def sizes(tally: PartitionSizeTally) -> dict[int, int]:
    """The events of the largest time bucket, by slice, counted from T0's."""
    found = tally.largest(dataset)
    return {(at - T0) // SLICE: each.size_bytes // EVENT_BYTES for at, each in found.items()}


def test_windows_of_a_time_bucket_add_up() -> None:
    """For each counter; the next time bucket starts from zero, and the largest is kept."""
    tally = PartitionSizeTally(TARGET)
    counted = counting(tally)
    for number, events in enumerate((10, 20, 30)):
        counted("hot", T0 + number * SECOND, events)
        counted("warm", T0 + number * SECOND, 19)
    assert sizes(tally) == {0: 60}
    for number in range(3):
        counted("warm", T0 + BUCKET + number * SECOND, 25)
    assert sizes(tally) == {0: 75}
    assert tally.largest(dataset)[T0].counter == "warm"
    counted("hot", T0 + SLICE, 5)
    assert sizes(tally) == {0: 75, 1: 5}


def test_a_window_that_is_summed_again_is_counted_once() -> None:
    """A pass that failed is done again, whole or in parts."""
    tally = PartitionSizeTally(TARGET)
    counted = counting(tally)
    for number in (0, 1, 0, 1, 2, 2):
        counted("hot", T0 + number * SECOND, 10)
    assert sizes(tally) == {0: 30}


def test_counters_of_one_name_are_distinguished() -> None:
    """Each namespace has its own."""
    tally = PartitionSizeTally(TARGET)
    for number, each in enumerate((namespace, replace(namespace, id=8, name="other"))):
        counting(tally, each)("hot", T0, 10 + number)
    assert sizes(tally) == {0: 11}
    assert tally.largest(dataset)[T0].namespace == "other"


def test_a_window_longer_than_a_time_bucket_is_cut_evenly() -> None:
    tally = PartitionSizeTally(TARGET)
    long = replace(namespace, settings=replace(SETTINGS, rollup_window_us=5 * MINUTE))
    counting(tally, long)("hot", T0, 901)
    assert sizes(tally) == {0: 31}


@given(st.lists(st.integers(0, 8), min_size=WINDOWS, max_size=WINDOWS), st.integers(1, 4))
def test_less_than_half_a_partition_is_missed(windows: list[int], scale: int) -> None:
    """Windows that hold too little to matter are not added up; no event is counted twice."""
    target = TARGET * scale
    tally = PartitionSizeTally(target)
    counted = counting(tally)
    for number, events in enumerate(windows):
        if events:
            counted("c", T0 + number * SECOND, events)
    found = sizes(tally).get(0, 0)
    assert found <= sum(windows)
    assert found * EVENT_BYTES > sum(windows) * EVENT_BYTES - ceil(target / 2)


def test_the_busiest_counters_are_remembered() -> None:
    """However many there are."""
    tally = PartitionSizeTally(TARGET)
    counted = counting(tally)
    with patch("rollup.partitions._COUNTERS_MAX", 100):
        for number in range(1_000):
            counted(f"c{number}", T0, 1)
            counted("hot", T0 + number % WINDOWS * SECOND, 2)
        for window in range(WINDOWS):
            counted("late", T0 + window * SECOND, 100)
    assert tally.largest(dataset)[T0].counter == "late"
    assert sizes(tally) == {0: 100 * WINDOWS}
    assert len(tally._courses) <= 100


def test_nothing_is_counted_if_the_number_cannot_be_raised() -> None:
    for most in (1, 4):
        fixed = replace(dataset, event_buckets=4, event_buckets_max=most)
        assert PartitionSizeTally().counting(replace(namespace, dataset=fixed)) is None


def test_old_slices_are_forgotten() -> None:
    tally = PartitionSizeTally(TARGET)
    counted = counting(tally)
    for number in range(100):
        counted("c", T0 + number * SLICE, 1)
    assert list(sizes(tally)) == list(range(88, 100))
