"""Execute the statements of the event log: set-based, one step each."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from counter.storage.sqlite.base import begin, bulk, chunks, insert
from counter.storage.sqlite.schema import one_json, to_fold, to_json
from counter.types import Event, Fold, Written

Row = tuple[int, int, bytes, int, int, int | None, bytes | None]
#: Further counters of one table that are considered if a time span covers two tables.
_BUSY_BESIDES: Final = 10_000
_NO_FOLD: Final = Fold(False, 0)
_PLAIN_COLUMNS: Final = " (counter, event_time, event_id, item, delta)"
_COUNTERS_OF: Final = (
    " FROM json_each(?) j CROSS JOIN counters c ON c.namespace = ? AND c.name = j.value"
)


def counter_ids(
    connection: sqlite3.Connection, namespace_id: int, names: Sequence[str]
) -> dict[str, int]:
    """Return ids of the counters of *names* that exist."""
    sql = f"SELECT json_group_array(json_array(c.name, c.id)) {_COUNTERS_OF}"
    return dict(one_json(connection, sql, (to_json(names), namespace_id)))


def make_counters(connection: sqlite3.Connection, namespace_id: int, names: Sequence[str]) -> None:
    """Create the counters of *names* that do not exist."""
    connection.execute(
        "INSERT OR IGNORE INTO counters (namespace, name) SELECT ?, value FROM json_each(?)",
        (namespace_id, to_json(names)),
    )


def insert_rows(connection: sqlite3.Connection, table: str, rows: Sequence[Row]) -> list[Written]:
    """Insert *rows*; a chunk with an existing row is rolled back, and its rows are looked up."""
    outcomes: list[Written] = []
    # Plain adds omit the last two columns: each bound cell costs time.
    plain = not any(row[5] or row[6] for row in rows)
    into = f"INSERT INTO {table}" + (_PLAIN_COLUMNS if plain else "")
    for chunk in chunks(rows):
        try:
            insert(connection, into, [row[:5] for row in chunk] if plain else chunk)
            outcomes += [Written.NEW] * len(chunk)
        except sqlite3.IntegrityError:
            outcomes += _insert_unless_there(connection, table, chunk)
    return outcomes


def _insert_unless_there(
    connection: sqlite3.Connection, table: str, rows: Sequence[Row]
) -> list[Written]:
    begin(connection)
    keys = [(index, *row[:4]) for index, row in enumerate(rows)]
    standing: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for index, delta, clear, atom in select_rows(connection, table, keys):
        stored_atom = bytes.fromhex(atom) if atom else None
        standing[rows[index][:4]] = (delta, clear, stored_atom)
    outcomes: list[Written] = []
    new: list[Row] = []
    for row in rows:
        there = standing.get(row[:4])
        if there is None:
            standing[row[:4]] = row[4:]
            new.append(row)
            outcomes.append(Written.NEW)
        else:
            outcomes.append(Written.REPLAYED if there == row[4:] else Written.CONFLICT)
    bulk(connection, f"INSERT INTO {table}", new)
    return outcomes


def select_rows(
    connection: sqlite3.Connection, table: str, keys: Sequence[tuple[Any, ...]]
) -> list[tuple[int, int, int | None, str | None]]:
    """Return (index, delta, clear, atom in hex) of the rows of *keys* (index, counter, time, id,
    item)."""
    found: list[tuple[int, int, int | None, str | None]] = []
    for start in range(0, len(keys), 256):
        part = keys[start : start + 256]
        values = ",".join(["(?,?,?,?,?)"] * len(part))
        sql = (
            f"WITH k (i, counter, event_time, event_id, item) AS (VALUES {values})"
            " SELECT json_group_array(json_array(k.i, e.delta, e.clear, hex(e.atom)))"
            f" FROM k CROSS JOIN {table} e USING (counter, event_time, event_id, item)"
        )
        found += one_json(connection, sql, [cell for key in part for cell in key])
    return found


def has_atomic(connection: sqlite3.Connection, table: str, namespace_id: int, event: Event) -> bool:
    """Return whether items of any atomic add have the token of *event*, in whatever counters."""
    found = connection.execute(
        f"SELECT 1 FROM {table} e CROSS JOIN counters c ON c.id = e.counter"
        " WHERE e.event_time = ? AND e.event_id = ? AND e.item > 0 AND c.namespace = ? LIMIT 1",
        (event.event_time_us, event.event_id, namespace_id),
    ).fetchone()
    return found is not None


def fold_rows_of(
    connection: sqlite3.Connection,
    table: str,
    ids: Mapping[str, int],
    first_us: int,
    last_us: int,
) -> dict[str, Fold]:
    """Return the folds of the counters *ids* over ``[first, last]``, in one pass over its
    events."""
    sql = (
        "SELECT json_group_array(json_array(counter, clears, high, low)) FROM ("
        " SELECT counter, count(clear) AS clears, sum(delta >> 32) AS high,"
        f" sum(delta & 4294967295) AS low FROM {table} WHERE event_time BETWEEN ? AND ?"
        " AND counter IN (SELECT value FROM json_each(?)) GROUP BY counter)"
    )
    names = {counter_id: name for name, counter_id in ids.items()}
    folds: dict[str, Fold] = {}
    parameters = (first_us, last_us, to_json(names))
    for counter_id, clears, high, low in one_json(connection, sql, parameters):
        name = names[counter_id]
        folds[name] = to_fold(clears, high, low)
        if clears:
            later_us = _latest_clear(connection, table, counter_id, first_us, last_us) + 1
            after = fold_rows_of(connection, table, {name: counter_id}, later_us, last_us)
            folds[name] = Fold(True, after.get(name, _NO_FOLD).total)
    return folds


def window_folds_of(
    connection: sqlite3.Connection,
    table: str,
    ids: Mapping[str, int],
    span: tuple[int, int],
    size_us: int,
) -> Iterator[tuple[str, int, Fold]]:
    """Return (counter, window, fold) of each window of ``[from, to)`` with events of *ids*, in
    one pass over the table. A window is never split between two tables."""
    sql = (
        "SELECT json_group_array(json_array(counter, start, clears, high, low)) FROM ("
        " SELECT counter, event_time - event_time % ? AS start, count(clear) AS clears,"
        " sum(delta >> 32) AS high, sum(delta & 4294967295) AS low"
        f" FROM {table} WHERE event_time >= ? AND event_time < ?"
        " AND counter IN (SELECT value FROM json_each(?)) GROUP BY counter, start)"
    )
    names = {counter_id: name for name, counter_id in ids.items()}
    for counter_id, start_us, clears, high, low in one_json(
        connection, sql, (size_us, *span, to_json(names))
    ):
        name = names[counter_id]
        if clears:
            last_us = start_us + size_us - 1
            whole = fold_rows_of(connection, table, {name: counter_id}, start_us, last_us)
            yield name, start_us, whole[name]
        else:
            yield name, start_us, to_fold(clears, high, low)


def busiest_of(
    connection: sqlite3.Connection,
    tables: Sequence[str],
    namespace_id: int,
    span: tuple[int, int],
    limit: int,
    events_max: int,
) -> tuple[int, list[tuple[str, int]]]:
    """Return the counters of a namespace with the most events of ``[from, to)``, and the start of
    the span covered.

    *tables* are the latest first. At most *events_max* events are counted per table, of all
    namespaces, and the busiest counters are returned.
    """
    from_us, to_us = span
    counts: dict[str, int] = {}
    for table in tables:
        cut = connection.execute(
            f"SELECT event_time FROM {table} WHERE event_time >= ? AND event_time < ?"
            " ORDER BY event_time DESC LIMIT 1 OFFSET ?",
            (from_us, to_us, events_max),
        ).fetchone()
        # Do not count a part of one instant's events.
        from_us = from_us if cut is None else min(to_us, cut[0] + 1)
        sql = (
            "SELECT json_group_array(json_array(name, n)) FROM (SELECT c.name, e.n FROM ("
            f" SELECT counter, count(*) AS n FROM {table} WHERE event_time >= ? AND event_time < ?"
            " GROUP BY counter) e CROSS JOIN counters c ON c.id = e.counter WHERE c.namespace = ?"
            " ORDER BY e.n DESC LIMIT ?)"
        )
        values = (from_us, to_us, namespace_id, limit + _BUSY_BESIDES)
        for name, events in one_json(connection, sql, values):
            counts[name] = counts.get(name, 0) + events
        if cut is not None:
            break
    order = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return from_us, order[:limit]


def _latest_clear(
    connection: sqlite3.Connection, table: str, counter_id: int, first_us: int, last_us: int
) -> int:
    (time_us,) = connection.execute(
        f"SELECT max(event_time) FROM {table} WHERE counter = ? AND clear = 1"
        " AND event_time BETWEEN ? AND ?",
        (counter_id, first_us, last_us),
    ).fetchone()
    return int(time_us)


def spans_of(
    connection: sqlite3.Connection,
    counter_id: int,
    watermark_us: int,
    size_us: int,
    span: tuple[int, int],
) -> Iterator[tuple[int, int]]:
    """Return the parts of *span* that may contain events of a counter, latest first.

    The part after the watermark is one part; before it, each window with a row is one.
    """
    from_us, to_us = span
    if to_us > watermark_us + 1:
        yield max(from_us, watermark_us + 1), to_us
    starts = connection.execute(
        "SELECT start FROM windows WHERE counter = ? AND start > ? AND start < ?"
        " ORDER BY start DESC",
        (counter_id, from_us - size_us, min(to_us, watermark_us + 1)),
    )
    for (start_us,) in starts:
        yield max(from_us, start_us), min(to_us, start_us + size_us)


def scan_rows(
    connection: sqlite3.Connection,
    table: str,
    key: tuple[str, int],
    span: tuple[int, int],
    before: Event | None,
    limit: int,
) -> list[Event]:
    """Return events of ``[from, to)`` in one table of a counter, given by name and id: latest
    first, those after *before*."""
    counter, counter_id = key
    where = ""
    extra: tuple[Any, ...] = ()
    if before is not None:
        where = " AND (event_time < ? OR (event_time = ? AND (event_id, item) > (?, ?)))"
        extra = (before[1], before[1], before[2], before[3])
    sql = (
        "SELECT json_group_array(json_array(event_time, hex(event_id), item, delta, clear,"
        f" hex(atom))) FROM (SELECT * FROM {table} WHERE event_time >= ? AND event_time < ?"
        f" AND counter = ?{where} ORDER BY event_time DESC, event_id, item LIMIT ?)"
    )
    found = one_json(connection, sql, (*span, counter_id, *extra, limit))
    return [
        Event(counter, t, bytes.fromhex(i), item, d, bool(c), bytes.fromhex(a) if a else None)
        for t, i, item, d, c, a in found
    ]


def tail_rows(
    connection: sqlite3.Connection, table: str, from_us: int, limit: int
) -> list[tuple[int, Event]]:
    """Return (namespace id, event without its id) of at most *limit* events of *from_us* or
    later."""
    sql = (
        "SELECT json_group_array(json_array(c.namespace, c.name, e.event_time, e.delta, e.clear))"
        f" FROM (SELECT * FROM {table} WHERE event_time >= ? LIMIT ?) e"
        " CROSS JOIN counters c ON c.id = e.counter"
    )
    return [
        (namespace_id, Event(name, time_us, b"", 0, delta, bool(clear)))
        for namespace_id, name, time_us, delta, clear in one_json(connection, sql, (from_us, limit))
    ]


def latest_event(connection: sqlite3.Connection, table: str) -> int:
    """Return the time of the latest event of a table; 0 if it is empty."""
    (time_us,) = connection.execute(f"SELECT max(event_time) FROM {table}").fetchone()
    return time_us or 0
