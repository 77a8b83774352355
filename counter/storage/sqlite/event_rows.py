"""Read the event tables of SQLite, and the names of counters, with set-based statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from counter.errors import SliceMissingError
from counter.holds import is_held
from counter.limits import INT64_MAX
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.schema import events_table, from_json, one_json, to_fold, to_json
from counter.storage.sqlite.window_rows import starts_of
from counter.types import Event, Fold, Namespace, Span
from counter.windows import slice_of

#: Further counters of one table that are considered if a time span covers two tables.
_BUSY_BESIDES: Final = 10_000
NO_FOLD: Final = Fold(False, 0)
#: Counters whose sums one pass over a span returns, and how many of them in one text.
_SUMS_AT_ONCE: Final = 100_000
_SUMS_IN_PART: Final = 300
#: Names that one statement looks up.
_LOOKED_UP_AT_ONCE: Final = 1_000
COUNTERS_OF: Final = (
    " FROM json_each(?) j CROSS JOIN counters c ON c.namespace = ? AND c.name = j.value"
)


def find_events(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace: Namespace,
    events: Sequence[Event],
) -> list[Event | None]:
    """Return the stored events of the same identities. Raises SliceMissingError."""
    ids = known_ids(database, connection, namespace.id, {event.counter for event in events})
    found: list[Event | None] = [None] * len(events)
    tables: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        each = slice_of(database.slices[namespace.dataset.id], event.event_time_us)
        if event.counter in ids:
            table = events_table(namespace.dataset.id, each.start_us)
            tables.setdefault(table, []).append(index)
    for table, indices in tables.items():
        keys = [
            (i, ids[events[i].counter], events[i].event_time_us, events[i].event_id,
             events[i].item_key)
            for i in indices
        ]  # fmt: skip
        for index, delta, clear, atom in select_rows(connection, table, keys):
            found[index] = events[index]._replace(
                delta=delta, clear=bool(clear), atom=bytes.fromhex(atom) if atom else None
            )
    return found


def counter_ids(
    connection: sqlite3.Connection, namespace_id: int, names: Sequence[str]
) -> dict[str, int]:
    """Return ids of the counters of *names* that exist."""
    sql = f"SELECT json_group_array(json_array(c.name, c.id)) {COUNTERS_OF}"
    return dict(one_json(connection, sql, (to_json(names), namespace_id)))


def known_ids(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace_id: int,
    names: Collection[str],
) -> dict[str, int]:
    """Return ids of the counters of *names* that exist, most without asking for them."""
    known = database.ids.of(namespace_id)
    # Each name is looked up once, because the writer adds and removes names at the same time.
    found = {name: known.get(name) for name in names}
    missing = [name for name, counter_id in found.items() if counter_id is None]
    ids = {name: counter_id for name, counter_id in found.items() if counter_id is not None}
    for at in range(0, len(missing), _LOOKED_UP_AT_ONCE):
        part = missing[at : at + _LOOKED_UP_AT_ONCE]
        ids |= counter_ids(connection, namespace_id, part)
    return ids


def counter_names(
    connection: sqlite3.Connection, namespace_id: int, ids: Sequence[int]
) -> list[tuple[int, str]]:
    """Return id and name of the counters of *ids* that are in a namespace, in this order."""
    sql = (
        "SELECT json_group_array(json_array(c.id, c.name)) FROM json_each(?) j"
        " CROSS JOIN counters c ON c.id = j.value AND c.namespace = ?"
    )
    rows = one_json(connection, sql, (to_json(ids), namespace_id))
    return [(counter_id, name) for counter_id, name in rows]


def make_counters(connection: sqlite3.Connection, namespace_id: int, names: Sequence[str]) -> None:
    """Create the counters of *names* that do not exist."""
    connection.execute(
        "INSERT OR IGNORE INTO counters (namespace, name) SELECT ?, value FROM json_each(?)",
        (namespace_id, to_json(names)),
    )


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


def has_atomic(
    database: SqliteDatabase, connection: sqlite3.Connection, namespace: Namespace, event: Event
) -> bool:
    """Return whether items of any atomic add have the token of *event*, in whatever counters."""
    each = slice_of(database.slices[namespace.dataset.id], event.event_time_us)
    table = events_table(namespace.dataset.id, each.start_us)
    found = connection.execute(
        f"SELECT 1 FROM {table} e CROSS JOIN counters c ON c.id = e.counter"
        " WHERE e.event_time = ? AND e.event_id = ? AND e.item > 0 AND c.namespace = ? LIMIT 1",
        (event.event_time_us, event.event_id, namespace.id),
    ).fetchone()
    return found is not None


def log_tables(
    database: SqliteDatabase, namespace: Namespace, first_us: int, last_us: int
) -> list[str]:
    """Return the tables with the events of ``[first, last]``, earliest first. Raises
    SliceMissingError if some of them are dropped."""
    return _tables_between(database, namespace.dataset.id, first_us, last_us)


def _tables_between(
    database: SqliteDatabase, dataset_id: int, first_us: int, last_us: int
) -> list[str]:
    if first_us < database.dropped_before[dataset_id]:
        raise SliceMissingError(
            f"the events at {first_us} µs were dropped with their slice", retry_after_us=1_000
        )
    return [
        events_table(dataset_id, each.start_us)
        for each in database.slices[dataset_id]
        if each.start_us <= last_us and each.end_us > first_us
    ]


def fold_spans(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    jobs: Sequence[tuple[Namespace, Sequence[tuple[str, int, int]]]],
) -> list[Any]:
    """Return the folds of each job's (counter, first, last) spans, with one statement per table
    and distinct span."""
    groups: dict[tuple[int, int, int, int], dict[str, None]] = {}
    for namespace, spans in jobs:
        for name, first_us, last_us in spans:
            key = (namespace.id, namespace.dataset.id, first_us, last_us)
            groups.setdefault(key, {})[name] = None
    folds: dict[tuple[int, str, int, int], Fold] = {}
    for (namespace_id, dataset_id, first_us, last_us), wanted in groups.items():
        ids = counter_ids(connection, namespace_id, list(wanted))
        for table in _tables_between(database, dataset_id, first_us, last_us):
            part = fold_rows_of(connection, table, ids, first_us, last_us)
            for name, fold in part.items():
                place = (namespace_id, name, first_us, last_us)
                before = folds.get(place, NO_FOLD)
                total = fold.total if fold.cleared else before.total + fold.total
                folds[place] = Fold(before.cleared or fold.cleared, total)
    return [
        [folds.get((ns.id, name, first, last), NO_FOLD) for name, first, last in spans]
        for ns, spans in jobs
    ]


def number_of_events(
    connection: sqlite3.Connection, tables: Sequence[str], span: tuple[int, int], most: int
) -> int:
    """Return the number of events of *tables* in ``[first, last]``; *most*, or 0 if that is less,
    if there are more."""
    number = 0
    for table in tables:
        (found,) = connection.execute(
            "SELECT count(*) FROM (SELECT 1 FROM"
            f" {table} WHERE event_time BETWEEN ? AND ? LIMIT ?)",
            (*span, max(0, most - number)),
        ).fetchone()
        number += found
    return number


def latest_clears(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace: Namespace,
    counters: Sequence[str],
    from_us: int,
) -> Iterator[tuple[str, int]]:
    """Yield the counters of *counters* that were cleared at or after an instant, each with the time
    of its last clear in a table."""
    names = {each: name for name, each in counter_ids(connection, namespace.id, counters).items()}
    for table in log_tables(database, namespace, from_us, INT64_MAX) if names else ():
        sql = (
            "SELECT json_group_array(json_array(counter, at)) FROM (SELECT counter,"
            f" max(event_time) AS at FROM {table} WHERE event_time >= ? AND clear = 1"
            " AND counter IN (SELECT value FROM json_each(?)) GROUP BY counter)"
        )
        for counter_id, time_us in one_json(connection, sql, (from_us, to_json(names))):
            yield names[counter_id], time_us


def fold_rows_of(
    connection: sqlite3.Connection, table: str, ids: Mapping[str, int], first_us: int, last_us: int
) -> dict[str, Fold]:
    """Return the folds of the counters *ids* over ``[first, last]``, in one pass over its
    events."""
    sql = (
        "SELECT json_group_array(json_array(counter, clears, high, low)) FROM ("
        " SELECT counter, count(clear) AS clears, sum(delta >> 32) AS high,"
        f" sum(delta & 4294967295) AS low FROM {table} WHERE event_time BETWEEN ? AND ?"
        # Most events are those of other counters: a comparison is cheaper than a look-up.
        " AND counter BETWEEN ? AND ?"
        " AND counter IN (SELECT value FROM json_each(?)) GROUP BY counter)"
    )
    names = {counter_id: name for name, counter_id in ids.items()}
    folds: dict[str, Fold] = {}
    if not names:
        return folds
    parameters = (first_us, last_us, min(names), max(names), to_json(names))
    for counter_id, clears, high, low in one_json(connection, sql, parameters):
        name = names[counter_id]
        folds[name] = to_fold(clears, high, low)
        if clears:
            later_us = _latest_clear(connection, table, counter_id, first_us, last_us) + 1
            after = fold_rows_of(connection, table, {name: counter_id}, later_us, last_us)
            folds[name] = Fold(True, after.get(name, NO_FOLD).total)
    return folds


def window_folds_of(
    connection: sqlite3.Connection,
    table: str,
    ids: Mapping[str, int],
    span: Span,
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
    span: Span,
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
            if not is_held(name):
                counts[name] = counts.get(name, 0) + events
        if cut is not None:
            break
    order = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return from_us, order[:limit]


def sums_between(
    connection: sqlite3.Connection,
    table: str,
    first_us: int,
    last_us: int,
    ids: Sequence[int] | None = None,
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield the sums of the counters with events in ``[first, last]``, of all namespaces or those
    of *ids*, in parts."""
    where = "" if ids is None else "counter IN (SELECT value FROM json_each(?))"
    wanted = () if ids is None else (to_json(ids),)
    after_id: int | None = -1
    while after_id is not None:
        span = (first_us, last_us, after_id)
        parts, after_id = some_sums(connection, table, span, where=where, values=wanted)
        for part in parts:
            yield sorted(from_json(part))


def some_sums(
    connection: sqlite3.Connection,
    table: str,
    span: tuple[int, int, int],
    *,
    where: str = "",
    having: str = "",
    values: tuple[str | int, ...] = (),
) -> tuple[list[str], int | None]:
    """Return the sums of counters with events in the first two instants of *span* whose ids come
    after its third, by id: id, clears, and the sums of the deltas' high and low 32 bits. They are
    in parts as JSON, because the interpreter lock is held while one is read. Return also the id
    that the next ones come after, None if there are no more."""
    sql = (
        "SELECT json_group_array(json_array(counter, clears, high, low)), max(counter)"
        " FROM (SELECT counter, count(clear) AS clears, sum(delta >> 32) AS high,"
        " sum(delta & 4294967295) AS low,"
        f" row_number() OVER (ORDER BY counter) / {_SUMS_IN_PART} AS part FROM {table} e"
        " WHERE event_time BETWEEN ? AND ? AND counter > ?"
        + (f" AND {where}" if where else "")
        + " GROUP BY counter"
        + (f" HAVING {having}" if having else "")
        + f" ORDER BY counter LIMIT {_SUMS_AT_ONCE}) GROUP BY part ORDER BY part"
    )
    rows = connection.execute(sql, (*span, *values)).fetchall()
    # Fewer parts than that are all that there are.
    is_full = len(rows) * _SUMS_IN_PART >= _SUMS_AT_ONCE
    return [part for part, _ in rows], rows[-1][1] if is_full else None


def first_event(connection: sqlite3.Connection, table: str, from_us: int) -> int | None:
    """Return the time of the first event at or after an instant; None if there is none."""
    sql = f"SELECT min(event_time) FROM {table} WHERE event_time >= ?"
    time_us: int | None = connection.execute(sql, (from_us,)).fetchone()[0]
    return time_us


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
    key: tuple[int, int],
    watermark_us: int,
    size_us: int,
    span: Span,
) -> Iterator[Span]:
    """Return the parts of *span* that may contain events of a counter, given by the ids of its
    namespace and its own, latest first.

    The part after the watermark is one part; before it, each window with a row is one.
    """
    from_us, to_us = span
    if to_us > watermark_us + 1:
        yield Span(max(from_us, watermark_us + 1), to_us)
    rolled_up = Span(from_us - size_us + 1, min(to_us, watermark_us + 1))
    for start_us in starts_of(connection, *key, rolled_up):
        yield Span(max(from_us, start_us), min(to_us, start_us + size_us))


def scan_rows(
    connection: sqlite3.Connection,
    table: str,
    key: tuple[str, int],
    span: Span,
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


def namespaces_since(
    connection: sqlite3.Connection, tables: Sequence[str], from_us: int
) -> set[int]:
    """Return the ids of the namespaces with events at or after an instant."""
    sql = (
        "SELECT json_group_array(DISTINCT c.namespace) FROM (SELECT counter FROM {table}"
        " WHERE event_time >= ? GROUP BY counter) e CROSS JOIN counters c ON c.id = e.counter"
    )
    found: set[int] = set()
    for table in tables:
        found.update(one_json(connection, sql.format(table=table), (from_us,)))
    return found


def latest_event(connection: sqlite3.Connection, table: str) -> int:
    """Return the time of the latest event of a table; 0 if it is empty."""
    (time_us,) = connection.execute(f"SELECT max(event_time) FROM {table}").fetchone()
    return time_us or 0
