"""Values packed into cells of Cassandra are read back, and the right one is greater."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counter import limits
from counter.errors import InvariantError
from counter.storage.cassandra.rollups import (
    pack_checkpoint,
    pack_items,
    pack_row,
    unpack_checkpoint,
    unpack_items,
    unpack_row,
)
from counter.types import Checkpoint, Event, WindowRow

counts = st.integers() | st.integers(-(2**200), 2**200)
times = st.integers(0, limits.TIME_MAX_US)
#: Names have no lone surrogates: they came as UTF-8.
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)
items = st.lists(
    st.tuples(
        names, st.integers(1, 100), st.integers(limits.INT64_MIN, limits.INT64_MAX), st.booleans()
    ),
    min_size=1,
    max_size=limits.ATOMIC_ITEMS_MAX,
)


@given(times, counts)
@example(0, 0)
@example(limits.TIME_MAX_US, -(2**63))
@example(1, 2**63)
@example(1, -129)
@example(1, 255)
def test_a_checkpoint_comes_back(time_us: int, count: int) -> None:
    """Counts of any size and sign."""
    checkpoint = Checkpoint(time_us, count)
    assert unpack_checkpoint(pack_checkpoint(checkpoint)) == checkpoint


@given(times, times, counts, counts)
@example(255, 256, 0, 0)
@example(1, 2, 2**100, -(2**100))
def test_the_later_checkpoint_is_greater(one: int, two: int, first: int, second: int) -> None:
    """At equal write timestamps the greater bytes win, whatever the counts."""
    cells = {
        one: pack_checkpoint(Checkpoint(one, first)),
        two: pack_checkpoint(Checkpoint(two, second)),
    }
    assert max(cells.values()) == cells[max(one, two)]


@given(times, st.booleans(), counts)
@example(0, True, -1)
def test_a_window_row_comes_back(window_us: int, cleared: bool, total: int) -> None:
    row = WindowRow(window_us, cleared, total)
    assert unpack_row(window_us, pack_row(row)) == row


@given(items, times, st.binary(min_size=16, max_size=16), st.none() | st.binary(min_size=16))
@example([("😀" * 256, 100, limits.INT64_MIN, True)] * 100, 0, bytes(16), None)
def test_the_items_of_an_atomic_add_come_back(
    parts: list[tuple[str, int, int, bool]], time_us: int, event_id: bytes, atom: bytes | None
) -> None:
    """The cell has the differences among them; the common part is given again."""
    events = [
        Event(counter, time_us, event_id, item_key, delta, clear, atom)
        for counter, item_key, delta, clear in parts
    ]
    assert unpack_items(pack_items(events), time_us, event_id, atom) == tuple(events)


def test_items_of_a_later_version_are_refused() -> None:
    """A worker that is older than the process that left the mark says so, and does not sum."""
    cell = pack_items([Event("c", 1, b"i", 1, 1)])
    with pytest.raises(InvariantError, match="version 2"):
        unpack_items(b"\x02" + cell[1:], 1, b"i", None)
