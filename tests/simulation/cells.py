"""What a replica holds: cells that merge one by one, the latest write first; and deletions.

Of two cells of one write timestamp a deletion wins, then one that expires, then the one that
expires later, then the greater bytes. A partition is what was written to it, deletions too; what is
visible is reckoned on reading. So merging two replicas' partitions, in whatever order, gives the
same. Compaction makes a deletion of an expired cell, and nothing of an expired row marker.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

Key = tuple[Any, ...]
#: Before any write timestamp.
NEVER: Final = -(2**63)
_BIGINT: Final = 2**64


class Cell(NamedTuple):
    """One cell. A deleted one has no value; *until_us* is when it expires, or was deleted."""

    stamp_us: int
    deleted: bool
    value: Any
    until_us: int | None = None
    ttl_us: int = 0

    def live(self, now_us: int) -> bool:
        """Whether it has a value."""
        return not self.deleted and (self.until_us is None or now_us < self.until_us)


class Deletion(NamedTuple):
    """Older data are gone; *at_us* is the time of the deletion by the node's clock."""

    stamp_us: int
    at_us: int


ALIVE: Final = Deletion(NEVER, 0)


class Row(NamedTuple):
    """A row's cells by column, its marker (of an insert), and its deletion. Never changed."""

    cells: dict[str, Cell]
    marker: Cell | None = None
    deleted: Deletion = ALIVE


class Range(NamedTuple):
    """The deletion of the rows with clustering keys from *low* to *high*."""

    low: Key
    high: Key
    deletion: Deletion

    def holds(self, key: Key) -> bool:
        """Whether the row of *key* is in it."""
        return self.low <= key[: len(self.low)] and key[: len(self.high)] <= self.high


@dataclass(slots=True)
class Partition:
    """A partition of one replica, or the result of a read."""

    rows: dict[Key, Row] = field(default_factory=dict)
    static: dict[str, Cell] = field(default_factory=dict)
    ranges: dict[Range, None] = field(default_factory=dict)
    deleted: Deletion = ALIVE

    def part(self, wanted: Callable[[Key], bool] | None) -> "Partition":
        """The result of a read of the rows that are *wanted*."""
        rows = self.rows
        if wanted is not None:
            rows = {key: row for key, row in rows.items() if wanted(key)}
        else:
            rows = dict(rows)
        return Partition(rows, dict(self.static), dict(self.ranges), self.deleted)

    def merge(self, other: "Partition") -> None:
        """Merge *other* into this."""
        self.deleted = max(self.deleted, other.deleted)
        self.ranges.update(other.ranges)
        for column, cell in other.static.items():
            self.static[column] = newer(self.static.get(column), cell)
        for key, row in other.rows.items():
            standing = self.rows.get(key)
            if standing is None:
                self.rows[key] = row
            elif standing is not row and standing != row:
                self.rows[key] = _merged(standing, row)

    def visible(self, now_us: int) -> Iterator[tuple[Key, dict[str, Any]]]:
        """The rows that there are, in no order, with the values of their cells."""
        for key, row in self.rows.items():
            values = self.values_of(key, row, now_us)
            if values is not None:
                yield key, values

    def values_of(self, key: Key, row: Row, now_us: int) -> dict[str, Any] | None:
        """The values of the cells of *row*; None if there is no such row."""
        gone_us = self._gone_us(key, row)
        values = {
            column: cell.value
            for column, cell in row.cells.items()
            # As Cell.live does: most of a read's time goes into this.
            if cell.stamp_us > gone_us
            and not cell.deleted
            and (cell.until_us is None or now_us < cell.until_us)
        }
        marker = row.marker
        if values or (marker is not None and marker.stamp_us > gone_us and marker.live(now_us)):
            return values
        return None

    def visible_static(self, now_us: int) -> dict[str, Any]:
        """The values of the static cells."""
        gone_us = self.deleted.stamp_us
        if not self.static:
            return {}
        return {
            column: cell.value
            for column, cell in self.static.items()
            if cell.stamp_us > gone_us and cell.live(now_us)
        }

    def restamped(self, stamp_us: int) -> "Partition":
        """Return this at another write timestamp, deletions just before it, as Paxos does."""

        def cell(each: Cell) -> Cell:
            return each._replace(stamp_us=stamp_us - each.deleted)

        def deletion(each: Deletion) -> Deletion:
            return each if each is ALIVE else Deletion(stamp_us - 1, each.at_us)

        rows = {
            key: Row(
                {column: cell(each) for column, each in row.cells.items()},
                row.marker and cell(row.marker),
                deletion(row.deleted),
            )
            for key, row in self.rows.items()
        }
        static = {column: cell(each) for column, each in self.static.items()}
        ranges = {each._replace(deletion=deletion(each.deletion)): None for each in self.ranges}
        return Partition(rows, static, ranges, deletion(self.deleted))

    def ties(self, other: "Partition") -> bool:
        """Whether a cell of *other* has the write timestamp of a deletion here."""
        for key, row in self.rows.items():
            theirs = other.rows.get(key)
            if theirs is None:
                continue
            for column, cell in theirs.cells.items():
                ours = row.cells.get(column)
                stamps = {row.deleted.stamp_us}
                if ours is not None and ours.deleted:
                    stamps.add(ours.stamp_us)
                if not cell.deleted and cell.stamp_us in stamps:
                    return True
        return False

    def expires(self, now_us: int) -> bool:
        """Whether a cell has run out, and no compaction has seen it since."""
        return any(
            not cell.deleted and not cell.live(now_us)
            for row in self.rows.values()
            for cell in row.cells.values()
        )

    def compact(self, now_us: int, grace_us: int) -> None:
        """Drop deleted cells, and the deletions that are older than *grace_us*."""
        before_us = now_us - grace_us
        for key, row in list(self.rows.items()):
            gone_us = self._gone_us(key, row)
            marker = row.marker
            if marker is not None and (marker.stamp_us <= gone_us or not marker.live(now_us)):
                marker = None
            deleted = row.deleted if row.deleted.at_us >= before_us else ALIVE
            kept = Row(_compacted(row.cells, gone_us, now_us, before_us), marker, deleted)
            if kept.cells or marker is not None or deleted is not ALIVE:
                self.rows[key] = kept
            else:
                del self.rows[key]
        self.static = _compacted(self.static, self.deleted.stamp_us, now_us, before_us)
        self.ranges = {each: None for each in self.ranges if each.deletion.at_us >= before_us}
        if self.deleted.at_us < before_us:
            self.deleted = ALIVE

    def _gone_us(self, key: Key, row: Row) -> int:
        """Writes to *row* up to this timestamp are deleted."""
        gone_us = max(self.deleted.stamp_us, row.deleted.stamp_us)
        if not self.ranges:
            return gone_us
        return max([gone_us, *(each.deletion.stamp_us for each in self.ranges if each.holds(key))])


def _compacted(
    cells: dict[str, Cell], gone_us: int, now_us: int, before_us: int
) -> dict[str, Cell]:
    """The cells that a compaction leaves of *cells*."""
    kept = {}
    for column, written in cells.items():
        cell = written
        if cell.until_us is not None and not cell.deleted and not cell.live(now_us):
            cell = Cell(cell.stamp_us, True, None, cell.until_us - cell.ttl_us)
        purged = cell.deleted and (cell.until_us or 0) < before_us
        if cell.stamp_us > gone_us and not purged:
            kept[column] = cell
    return kept


def together(found: Sequence[dict[Key, Partition] | None]) -> dict[Key, Partition]:
    """The data of several replicas, merged; theirs are not changed."""
    merged: dict[Key, Partition] = {}
    for part in found:
        for key, partition in (part or {}).items():
            if key in merged:
                merged[key].merge(partition)
            else:
                merged[key] = partition.part(None)
    return merged


def newer(standing: Cell | None, written: Cell) -> Cell:
    """Which of two cells wins."""
    if standing is None or standing == written:
        return written
    if standing.stamp_us != written.stamp_us:
        return standing if standing.stamp_us > written.stamp_us else written
    if standing.deleted != written.deleted:
        return standing if standing.deleted else written
    if standing.until_us != written.until_us:
        return max(standing, written, key=lambda cell: cell.until_us or 0)
    return standing if weight(standing.value) > weight(written.value) else written


def weight(value: Any) -> Any:
    """The order of Cassandra for two values: their bytes, unsigned."""
    if isinstance(value, int):
        return value % _BIGINT
    return value.encode() if isinstance(value, str) else (value or b"")


def _merged(one: Row, other: Row) -> Row:
    cells = dict(one.cells)
    for column, cell in other.cells.items():
        cells[column] = newer(cells.get(column), cell)
    marker = one.marker
    if other.marker is not None:
        marker = newer(marker, other.marker)
    return Row(cells, marker, max(one.deleted, other.deleted))
