"""Rows of windows are read as they were written, whichever table they are in."""

import sqlite3
from contextlib import closing
from itertools import product
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from counter.limits import SECOND
from counter.storage.sqlite.schema import create_schema, to_json
from counter.storage.sqlite.window_rows import (
    RowsToWrite,
    delete_settled_rows,
    has_passed_rows,
    move_rows,
    read_rows,
    starts_of,
    write_rows,
)
from counter.types import Checkpoint, CounterUpdate, Span, WindowRow

WINDOWS, GROUP, COUNTERS = 12, 3, 5
NAMES = [f"c{number}" for number in range(COUNTERS)]
#: Two namespaces have the same names; their counters are not the same.
IDS = {key: number for number, key in enumerate(product((0, 1), NAMES), 1)}
spaces, names, windows = st.integers(0, 1), st.sampled_from(NAMES), st.integers(0, WINDOWS - 1)
totals = st.integers(-(2**70), 2**70)
acts = st.one_of(
    # Roll up to the end of a window: some counters, some windows of each.
    st.tuples(
        st.just("roll"),
        spaces,
        windows,
        st.dictionaries(names, st.dictionaries(windows, st.tuples(st.booleans(), totals))),
    ),
    st.tuples(st.just("settle"), spaces, windows, st.sets(names)),
    st.tuples(st.just("move"), spaces, windows, st.none()),
)


class Rows:
    """The tables, beside what they are to hold."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.expected: dict[tuple[int, str], dict[int, WindowRow]] = {key: {} for key in IDS}
        self.through = dict.fromkeys(IDS, 0)
        self.settled = dict.fromkeys(IDS, 0)
        for (space, name), number in IDS.items():
            sql = "INSERT INTO counters (id, namespace, name) VALUES (?, ?, ?)"
            connection.execute(sql, (number, space, name))

    def head(self, key: tuple[int, str], column: str, window: int) -> None:
        """Write a time of the counter's head."""
        sql = f"UPDATE counters SET {column}_at = ?, {column} = 0 WHERE id = ?"
        self.connection.execute(sql, (window * SECOND, IDS[key]))

    def roll(
        self, space: int, through: int, changes: dict[str, dict[int, tuple[bool, int]]]
    ) -> None:
        """Write rows; those of a batch that is older than the checkpoint have no effect."""
        updates: list[tuple[int, CounterUpdate]] = []
        for name, some in changes.items():
            key = (space, name)
            rows = [WindowRow(at * SECOND, *row) for at, row in some.items() if at <= through]
            checkpoint = Checkpoint(through * SECOND, 0)
            updates.append((IDS[key], CounterUpdate(name, tuple(rows), checkpoint, None, ())))
            if through >= self.through[key]:
                self.through[key] = through
                self.head(key, "checkpoint", through)
                after_us = self.settled[key] * SECOND
                self.expected[key] |= {x.window_us: x for x in rows if x.window_us > after_us}
        group_us = through // GROUP * GROUP * SECOND
        write_rows(self.connection, space, RowsToWrite.of(updates, group_us))

    def settle(self, space: int, through: int, some: set[str]) -> None:
        """Delete the rows up to a window, of counters that are rolled up so far."""
        keys = [(space, name) for name in some if self.through[space, name] >= through]
        for key in keys:
            self.settled[key] = max(through, self.settled[key])
            self.head(key, "settled", self.settled[key])
            rows, after_us = self.expected[key], self.settled[key] * SECOND
            self.expected[key] = {at: row for at, row in rows.items() if at > after_us}
        settled = to_json((IDS[key], self.settled[key] * SECOND, 0) for key in keys)
        through_us = max((self.settled[key] for key in keys), default=0) * SECOND
        delete_settled_rows(self.connection, space, settled, through_us)

    def move(self, space: int, before: int, _: None) -> None:
        """Move all rows before a window, a part at a time."""
        counters = 4
        while has_passed_rows(self.connection, space, before * SECOND):
            moved, counters = move_rows(self.connection, space, before * SECOND, counters)
            assert moved > 0
        assert move_rows(self.connection, space, before * SECOND, counters)[0] == 0

    def check(self, span: Span) -> None:
        """Both ways to read them find what is expected."""
        for space in (0, 1):
            found = read_rows(self.connection, space, [*NAMES, "never"], span)
            expected = [
                [
                    row
                    for at, row in sorted(self.expected[space, name].items())
                    if at in range(*span)
                ]
                for name in NAMES
            ]
            assert found == [*expected, []]
            for name, rows in zip(NAMES, expected, strict=True):
                starts = starts_of(self.connection, space, IDS[space, name], span)
                assert list(starts) == [row.window_us for row in reversed(rows)]


@example(
    acts=[("roll", 0, 3, {"c0": {3: (False, 1)}}), ("settle", 0, 3, {"c0"})], bounds=(1, WINDOWS)
)
@given(acts=st.lists(acts, max_size=12), bounds=st.tuples(windows, windows))
def test_rows_are_read_as_they_were_written(
    acts: list[tuple[str, int, int, object]], bounds: tuple[int, int]
) -> None:
    """After rollups in any order, recounts, settling and moves."""
    place = "counter.storage.sqlite.window_rows._MOVED_MAX"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection, patch(place, 4):
        create_schema(connection)
        rows = Rows(connection)
        for name, *arguments in acts:
            getattr(rows, name)(*arguments)
            rows.check(Span(0, (WINDOWS + 1) * SECOND))
        rows.check(Span(min(bounds) * SECOND, max(bounds) * SECOND))
