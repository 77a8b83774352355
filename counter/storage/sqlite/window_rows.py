"""Store window rows so that a rollup changes few pages, and a read of one counter reads few.

The rows of the latest windows are in order of time, in ``recent_windows``, so a rollup writes them
to the end of the table. Older rows are in order of counters, in ``windows``. There each counter
comes to have pages of its own, so a rollup that wrote its rows there would change a page for each
counter. Therefore the rows of a counter are moved together, those of a group of windows at a time,
as in a log-structured merge tree (O'Neil et al., 1996, doi:10.1007/s002360050048). If a row is in
both tables, the one in ``recent_windows`` is valid.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from counter.limits import INT64_MAX
from counter.storage.sqlite.schema import one_json, to_cell, to_json
from counter.types import CounterUpdate, Namespace, Span, WindowRow
from counter.windows import window_of

#: The windows of a group.
_GROUP_WINDOWS: Final = 64
#: Rows that are moved in one transaction, to keep it short.
_MOVED_MAX: Final = 1_024
#: The starts of a namespace's windows in recent_windows that are in a span, and the next one.
_STARTS: Final = (
    "WITH RECURSIVE starts(at) AS (SELECT min(start) FROM recent_windows"
    " WHERE namespace = :namespace AND start >= :from_us UNION ALL SELECT (SELECT min(start)"
    " FROM recent_windows WHERE namespace = :namespace AND start > starts.at)"
    " FROM starts WHERE starts.at < :to_us)"
)
_AT_STARTS: Final = (
    " starts CROSS JOIN recent_windows r"
    " ON starts.at < :to_us AND r.namespace = :namespace AND r.start = starts.at"
)
#: The counters and rows of an update, except settled rows and those of a batch that is older than
#: the checkpoint.
_UPDATED: Final = (
    " FROM json_each(:rows) j CROSS JOIN counters c ON c.id = j.value ->> 0"
    " WHERE c.checkpoint_at <= j.value ->> 4 AND j.value ->> 1 > coalesce(c.settled_at, 0)"
)
_REPLACE: Final = "DO UPDATE SET cleared = excluded.cleared, total = excluded.total"


@dataclass(frozen=True, slots=True)
class RowsToWrite:
    """The rows of an update as JSON: those of the current group of windows, and earlier ones."""

    #: How many there are of the current group.
    recent_rows: int
    recent: str
    earlier: str

    @classmethod
    def of(cls, updates: Iterable[tuple[int, CounterUpdate]], group_us: int) -> RowsToWrite:
        """Return the rows of *updates*, which have the counters' ids; the group begins at
        *group_us*."""
        recent: list[tuple[int | str, ...]] = []
        earlier: list[tuple[int | str, ...]] = []
        for counter_id, each in updates:
            for start_us, cleared, total in each.rows:
                row = (counter_id, start_us, int(cleared), to_cell(total), each.checkpoint.time_us)
                (recent if start_us >= group_us else earlier).append(row)
        return cls(len(recent), to_json(recent), to_json(earlier))


def group_of(namespace: Namespace, through_us: int) -> int:
    """Return where the group of windows that contains *through_us* begins."""
    return window_of(through_us, namespace.settings.rollup_window_us * _GROUP_WINDOWS)


def write_rows(connection: sqlite3.Connection, namespace_id: int, rows: RowsToWrite) -> None:
    """Write *rows*, each in its table."""
    values = {"namespace": namespace_id, "rows": rows.recent}
    connection.execute(
        "INSERT INTO recent_windows SELECT :namespace, j.value ->> 1, c.id, j.value ->> 2,"
        f" j.value ->> 3{_UPDATED} ON CONFLICT (namespace, start, counter) {_REPLACE}",
        values,
    )
    # A backlog or a recount has such rows.
    if rows.earlier != "[]":
        values = {"namespace": namespace_id, "rows": rows.earlier}
        connection.execute(
            "INSERT INTO windows SELECT c.id, j.value ->> 1, j.value ->> 2, j.value ->> 3"
            f"{_UPDATED} ON CONFLICT (counter, start) {_REPLACE}",
            values,
        )
        connection.execute(
            "DELETE FROM recent_windows WHERE (namespace, start, counter) IN"
            f" (SELECT :namespace, j.value ->> 1, c.id{_UPDATED})",
            values,
        )


def read_rows(
    connection: sqlite3.Connection, namespace_id: int, counters: Sequence[str], span: Span
) -> list[list[WindowRow]]:
    """Return the rows of each counter in a span of starts, in order."""
    # One statement, so that no row is moved in between; the recent rows come last.
    sql = (
        f"{_STARTS} SELECT json_group_array(json_array(k, start, cleared, total)) FROM ("
        " SELECT j.key AS k, w.start, w.cleared, w.total FROM json_each(:names) j"
        " CROSS JOIN counters c ON c.namespace = :namespace AND c.name = j.value"
        " CROSS JOIN windows w ON w.counter = c.id AND w.start >= :from_us AND w.start < :to_us"
        " UNION ALL SELECT j.key, r.start, r.cleared, r.total FROM json_each(:names) j"
        " CROSS JOIN counters c ON c.namespace = :namespace AND c.name = j.value"
        f" CROSS JOIN{_AT_STARTS} AND r.counter = c.id)"
    )
    values = {"namespace": namespace_id, "names": to_json(counters), **span._asdict()}
    found: list[dict[int, WindowRow]] = [{} for _ in counters]
    for index, start_us, cleared, total in one_json(connection, sql, values):
        found[index][start_us] = WindowRow(start_us, bool(cleared), int(total))
    return [[each[start_us] for start_us in sorted(each)] for each in found]


def starts_of(
    connection: sqlite3.Connection, namespace_id: int, counter_id: int, span: Span
) -> Iterator[int]:
    """Yield the starts in *span* of the windows of which a counter has rows, latest first."""
    sql = (
        f"{_STARTS} SELECT start FROM windows"
        " WHERE counter = :counter AND start >= :from_us AND start < :to_us"
        f" UNION SELECT r.start FROM{_AT_STARTS} AND r.counter = :counter ORDER BY start DESC"
    )
    values = {"namespace": namespace_id, "counter": counter_id, **span._asdict()}
    for (start_us,) in connection.execute(sql, values):
        yield start_us


def delete_settled_rows(
    connection: sqlite3.Connection, namespace_id: int, settled: str, through_us: int
) -> None:
    """Delete the rows that the settled folds of some counters include. *settled* is JSON of their
    ids, each first in a list; no fold is later than *through_us*."""
    counters = " json_each(:settled) j CROSS JOIN counters c ON c.id = j.value ->> 0"
    values = {"namespace": namespace_id, "settled": settled, "from_us": 0, "to_us": through_us + 1}
    connection.execute(
        f"DELETE FROM windows WHERE (counter, start) IN (SELECT w.counter, w.start FROM{counters}"
        " CROSS JOIN windows w ON w.counter = c.id AND w.start <= c.settled_at)",
        values,
    )
    connection.execute(
        f"DELETE FROM recent_windows WHERE (namespace, start, counter) IN ({_STARTS}"
        f" SELECT r.namespace, r.start, r.counter FROM{counters} CROSS JOIN{_AT_STARTS}"
        " AND r.counter = c.id AND r.start <= c.settled_at)",
        values,
    )


def has_passed_rows(connection: sqlite3.Connection, namespace_id: int, group_us: int) -> bool:
    """Return whether rows of windows before *group_us* are still in order of time."""
    sql = "SELECT 1 FROM recent_windows WHERE namespace = ? AND start < ? LIMIT 1"
    return connection.execute(sql, (namespace_id, group_us)).fetchone() is not None


def move_rows(
    connection: sqlite3.Connection, namespace_id: int, group_us: int, counters: int
) -> tuple[int, int]:
    """Move the rows of some counters in the windows before *group_us*: of the first *counters* of
    the window in which these have the lowest ids, or of fewer, if that were many rows.

    Return how many rows were moved, and *counters* for the next call."""
    values = {"namespace": namespace_id, "from_us": 0, "to_us": group_us}
    some = f"{_AT_STARTS} AND r.counter <= :last"
    while True:
        values["others"] = counters - 1
        (last_id,) = connection.execute(
            f"{_STARTS} SELECT min((SELECT counter FROM recent_windows WHERE namespace = :namespace"
            " AND start = starts.at ORDER BY counter LIMIT 1 OFFSET :others))"
            " FROM starts WHERE starts.at < :to_us",
            values,
        ).fetchone()
        values["last"] = INT64_MAX if last_id is None else last_id
        (rows,) = connection.execute(f"{_STARTS} SELECT count(*) FROM{some}", values).fetchone()
        if rows <= _MOVED_MAX or counters == 1:
            break
        counters //= 2
    connection.execute(
        f"INSERT INTO windows {_STARTS} SELECT r.counter, r.start, r.cleared, r.total FROM{some}"
        f" ORDER BY r.counter, r.start ON CONFLICT (counter, start) {_REPLACE}",
        values,
    )
    connection.execute(
        f"DELETE FROM recent_windows WHERE (namespace, start, counter) IN ({_STARTS}"
        f" SELECT r.namespace, r.start, r.counter FROM{some})",
        values,
    )
    return rows, min(2 * counters, _MOVED_MAX) if rows < _MOVED_MAX // 4 else counters
