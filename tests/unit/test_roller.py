"""The roller: the reads and writes of a counter, by its marks and its partition."""

from counter.types import Checkpoint, DirtyMark, Fold, Head, Pending, WindowRow
from rollup.roller import BatchTimes, Dirt, group, plan, update

SIZE = 10
#: Windows 0 to 9 are rolled up by a batch through 99; 100 is the next one.
BATCH = BatchTimes(through_us=99, dropped_before_us=0, window_size_us=SIZE)
NOTHING = Checkpoint(-1, 0)


def head(*pending: Pending, count: int = 0, settled: Checkpoint = NOTHING) -> Head:
    """A counter that is rolled up through window 80."""
    return Head(Checkpoint(89, count), settled, pending)


def test_marks_of_recounts_are_distinguished_from_marks_of_adds() -> None:
    found: dict[str, Dirt] = {}
    group(found, [DirtyMark(90, "c"), DirtyMark(90, "c", 20)])
    group(found, [DirtyMark(90, "d", 30)])
    assert found == {"c": Dirt([90], [20]), "d": Dirt([], [30])}


def test_a_pending_recount_is_done_whether_a_mark_asks_for_it_or_not() -> None:
    made = plan("c", Dirt(), head(Pending(20, 90)), BATCH)
    assert made is not None
    assert made.sums == (20,)
    done = update(made, {20: Fold(False, 7)}, [WindowRow(20, False, 3)], BATCH)
    assert (done.rows, done.checkpoint) == ((WindowRow(20, False, 7),), Checkpoint(99, 7))


def test_a_counter_that_another_worker_rolled_up_is_left_alone() -> None:
    assert plan("c", Dirt(), Head(Checkpoint(99, 7), NOTHING, ()), BATCH) is None


def test_a_window_that_may_be_open_is_not_recounted() -> None:
    made = plan("c", Dirt(), head(Pending(20, 90), Pending(100, 90)), BATCH)
    assert made is not None
    assert made.sums == (20,)


def test_a_pending_recount_stays_until_the_window_that_it_was_left_in_is_passed() -> None:
    """A worker that slept may still write its old sums: until the next recount readers recount."""
    passed, open_one = Pending(20, 90), Pending(20, 100)
    made = plan("c", Dirt(), head(passed, open_one), BATCH)
    assert made is not None
    done = update(made, {20: Fold(False, 7)}, [], BATCH)
    assert done.pending_done == (passed,)


def test_nothing_is_counted_again_that_is_being_settled() -> None:
    """Its events are gone, so the existing rows are folded, whatever the batch counts."""
    drops = BatchTimes(through_us=99, dropped_before_us=50, window_size_us=SIZE)
    made = plan("c", Dirt([], [10, 40, 50]), head(Pending(20, 90), Pending(60, 90)), drops)
    assert made is not None
    assert made.settles
    assert made.sums == (50, 60)
    rows = [WindowRow(10, False, 5), WindowRow(40, False, 1), WindowRow(50, False, 7)]
    done = update(made, {50: Fold(False, 70), 60: Fold(False, 0)}, rows, drops)
    assert (done.settled, done.checkpoint) == (Checkpoint(49, 6), Checkpoint(99, 76))
