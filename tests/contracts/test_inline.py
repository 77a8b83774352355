"""Reads on the event loop itself: right while they are fast, given up when they are not."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from counter.limits import MILLISECOND
from counter.storage.sqlite.database import InlineReader
from counter.testing.cases import NOW
from counter.testing.clock import FakeClock

ASK = "SELECT 1 WHERE ?"


class Disk:
    """A connection with a planned duration of ``slowly()``."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.create_function("slowly", 0, self._wait)
        self.takes_us = 0
        self._clock = clock

    def _wait(self) -> int:
        self._clock.advance(self.takes_us)
        return 1


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def disk(clock: FakeClock, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "some.db", clock)
    with closing(disk.connection):
        yield disk


@pytest.fixture
def reader(disk: Disk, clock: FakeClock) -> InlineReader:
    return InlineReader(disk.connection, clock)


def test_a_fast_read_is_answered(reader: InlineReader) -> None:
    """With its row, or with none."""
    assert reader.row(ASK, (1,)) == [(1,)]
    assert reader.row(ASK, (0,)) == []


def test_after_a_slow_read_others_read_for_a_while(
    reader: InlineReader, disk: Disk, clock: FakeClock
) -> None:
    """For twenty times as long as it took: the loop never waits for a larger part of the time."""
    disk.takes_us = 5 * MILLISECOND
    assert reader.row("SELECT slowly()", ()) == [(1,)]
    assert reader.row(ASK, (1,)) == [(1,)]
    disk.takes_us = 6 * MILLISECOND
    assert reader.row("SELECT slowly()", ()) == [(1,)]
    clock.advance(120 * MILLISECOND - 1)
    assert reader.row(ASK, (1,)) is None
    clock.advance(1)
    assert reader.row(ASK, (1,)) == [(1,)]


def test_a_failure_is_left_to_others(reader: InlineReader, clock: FakeClock) -> None:
    """They meet it again and say what it is; a lock is not waited for."""
    assert reader.row("SELECT nothing FROM nowhere", ()) is None
    assert reader.row(ASK, (1,)) is None
    clock.advance(100 * MILLISECOND)
    assert reader.row(ASK, (1,)) == [(1,)]
