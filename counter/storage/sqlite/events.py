"""Store the event log in SQLite: a table per slice, clustered by (time, counter, id, item).

An append rejects late events, creates counters, and inserts all events of its batch; each
step is one set-based statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from counter.errors import NamespaceUnknownError, SliceMissingError, invariant
from counter.limits import INT64_MAX
from counter.partitions import shard_of, slice_of
from counter.ports import Counted
from counter.storage.sqlite.database import (
    ROWS_OF_ANY_NUMBER_MAX,
    SqliteDatabase,
    begin,
    bulk,
    chunks,
    insert,
)
from counter.storage.sqlite.schema import events_table, from_json, one_json, to_fold, to_json
from counter.storage.sqlite.window_rows import starts_of
from counter.types import DELETED, Event, EventPage, Fold, Namespace, Outcome, Slice, Span, Written
from counter.windows import accept_limit_at

Row = tuple[int, int, bytes, int, int, int | None, bytes | None]
#: Further counters of one table that are considered if a time span covers two tables.
_BUSY_BESIDES: Final = 10_000
_NO_FOLD: Final = Fold(False, 0)
#: Counters whose sums one pass over a span returns, and how many of them in one text.
_SUMS_AT_ONCE: Final = 100_000
_SUMS_IN_PART: Final = 300
_PLAIN_COLUMNS: Final = " (counter, event_time, event_id, item, delta)"
_COUNTERS_OF: Final = (
    " FROM json_each(?) j CROSS JOIN counters c ON c.namespace = ? AND c.name = j.value"
)


class SqliteEvents:
    """See :class:`counter.ports.EventStore`."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._db = database
        # One object for all calls, because the writer groups jobs by their function.
        self._appending = self._append

    async def append(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Written]:
        result: Sequence[Written] = await self._db.writer.call(
            (self._appending, (namespace, events)), len(events)
        )
        return result

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        return await self._db.write(
            lambda connection: self._append_atomic(connection, namespace, events)
        )

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        return await self._db.read(
            lambda connection: find_events(self._db, connection, namespace, events)
        )

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        spans = [(name, start_us, start_us + size_us - 1) for name, start_us in windows]
        for start_us in {start_us for _, start_us in windows}:
            slice_of(self._db.slices[namespace.dataset.id], start_us)
        result: Sequence[Fold] = await self._db.scanner.call((self._fold_spans, (namespace, spans)))
        return result

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Mapping[int, Fold]]:
        number, size_us = namespace.dataset.id, namespace.settings.rollup_window_us
        slices = self._slices_between(number, span.from_us, span.to_us - 1)

        def query(connection: sqlite3.Connection) -> list[Mapping[int, Fold]]:
            ids = counter_ids(connection, namespace.id, counters)
            found: dict[str, dict[int, Fold]] = {name: {} for name in ids}
            for each in slices:
                table = events_table(number, each.start_us)
                for name, start_us, fold in window_folds_of(connection, table, ids, span, size_us):
                    found[name][start_us] = fold
            return [found.get(name, {}) for name in counters]

        return await self._db.scan(query)

    async def tails(
        self, namespace: Namespace, after: Sequence[tuple[str, int]], until_us: int | None = None
    ) -> Sequence[Fold]:
        """Return all tails as of one commit: from the writer's live tail, or from the events in
        one transaction."""
        folds = self._db.live.tails(namespace.id, namespace.settings.rollup_window_us, after)
        if folds is not None:
            return folds
        spans = [(name, after_us + 1, INT64_MAX) for name, after_us in after]
        result: Sequence[Fold] = await self._db.reader.call(
            (self._fold_spans_as_of_one_commit, (namespace, spans))
        )
        return result

    async def busiest(
        self, namespace: Namespace, span: Span, limit: int, events_max: int
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        """See :class:`counter.capabilities.CountEvents`: event tables are ordered by time."""
        number = namespace.dataset.id
        slices = [
            each
            for each in self._db.slices[number]
            if span.from_us < each.end_us and each.start_us < span.to_us
        ]
        tables = [events_table(number, each.start_us) for each in reversed(slices)]

        def query(connection: sqlite3.Connection) -> tuple[int, Sequence[tuple[str, int]]]:
            return busiest_of(connection, tables, namespace.id, span, limit, events_max)

        return await self._db.scan(query)

    async def scan(self, namespace: Namespace, counter: str, page: EventPage) -> Sequence[Event]:
        (from_us, to_us), limit, before = page
        shard = shard_of(counter, namespace.settings.shards)
        watermark_us = self._db.watermarks[namespace.id][shard]
        span = Span(from_us, to_us if before is None else min(to_us, before.event_time_us + 1))

        def query(connection: sqlite3.Connection) -> list[Event]:
            ids = counter_ids(connection, namespace.id, [counter])
            if counter not in ids:
                return []
            size_us = namespace.settings.rollup_window_us
            found: list[Event] = []
            key = (namespace.id, ids[counter])
            for part in spans_of(connection, key, watermark_us, size_us, span):
                for each in reversed(self._db.slices[namespace.dataset.id]):
                    if (
                        each.start_us < part.to_us
                        and each.end_us > part.from_us
                        and len(found) < limit
                    ):
                        table = events_table(namespace.dataset.id, each.start_us)
                        named = (counter, ids[counter])
                        wanted = limit - len(found)
                        found += scan_rows(connection, table, named, part, before, wanted)
                if len(found) == limit:
                    break
            return found

        return await self._db.scan(query)

    def _fold_spans_as_of_one_commit(
        self,
        connection: sqlite3.Connection,
        jobs: Sequence[tuple[Namespace, Sequence[tuple[str, int, int]]]],
    ) -> list[Any]:
        """Do :meth:`_fold_spans` as of one commit, however many statements it takes."""
        connection.execute("BEGIN")
        try:
            return self._fold_spans(connection, jobs)
        finally:
            connection.execute("ROLLBACK")

    def _fold_spans(
        self,
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
            for each in self._slices_between(dataset_id, first_us, last_us):
                table = events_table(dataset_id, each.start_us)
                part = fold_rows_of(connection, table, ids, first_us, last_us)
                for name, fold in part.items():
                    place = (namespace_id, name, first_us, last_us)
                    before = folds.get(place, _NO_FOLD)
                    total = fold.total if fold.cleared else before.total + fold.total
                    folds[place] = Fold(before.cleared or fold.cleared, total)
        return [
            [folds.get((ns.id, name, first, last), _NO_FOLD) for name, first, last in spans]
            for ns, spans in jobs
        ]

    def _slices_between(self, dataset_id: int, first_us: int, last_us: int) -> list[Slice]:
        slices = self._db.slices[dataset_id]
        if first_us < self._db.dropped_before[dataset_id]:
            raise SliceMissingError(
                f"the events at {first_us} µs were dropped with their slice", retry_after_us=1_000
            )
        return [each for each in slices if each.start_us <= last_us and each.end_us > first_us]

    def _append(
        self, connection: sqlite3.Connection, jobs: Sequence[tuple[Namespace, Sequence[Event]]]
    ) -> list[Any]:
        """Return the outcomes of each job; the jobs of one namespace are written together."""
        groups: dict[int, list[int]] = {}
        for index, (namespace, _) in enumerate(jobs):
            groups.setdefault(namespace.id, []).append(index)
        if len(groups) > 1:
            begin(connection)
        results: list[Any] = [None] * len(jobs)
        for indices in groups.values():
            namespace = jobs[indices[0]][0]
            try:
                events = [event for index in indices for event in jobs[index][1]]
                written = iter(self._append_events(connection, namespace, events))
                for index in indices:
                    results[index] = list(islice(written, len(jobs[index][1])))
            except (SliceMissingError, NamespaceUnknownError) as error:
                # Nothing of the namespace is written yet: the jobs are tried separately, so that
                # one job's missing slice does not fail the others.
                for index in indices:
                    alone = [error] if len(indices) == 1 else None
                    part = alone or self._append(connection, [jobs[index]])
                    results[index] = part[0]
        return results

    def _append_events(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written]:
        """Write the events that are on time, with one insert per table.

        Raises SliceMissingError and NamespaceUnknownError before anything is written.
        """
        if not events:
            return ()
        late = self._are_late(connection, namespace, events)
        if not any(late):
            return self._insert(connection, namespace, events)
        fresh = [event for event, out in zip(events, late, strict=True) if not out]
        written = iter(self._insert(connection, namespace, fresh))
        return [Written.LATE if out else next(written) for out in late]

    def _insert(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written]:
        if not events:
            return ()
        self._db.appended += len(events)
        tables = self._tables(namespace, events)
        rows = self._rows_of(connection, namespace, events)
        self._db.live.expect(namespace, events)
        # One insert of few rows is a transaction by itself.
        if len(tables) > 1 or len(rows) > ROWS_OF_ANY_NUMBER_MAX:
            begin(connection)
        if len(tables) == 1:
            return self._add_to_live_tail(
                namespace, events, insert_rows(connection, tables[0], rows)
            )
        outcomes: dict[int, Written] = {}
        for table in tables:
            places = [
                place
                for place, event in enumerate(events)
                if self._table(namespace, event.event_time_us) == table
            ]
            written = insert_rows(connection, table, [rows[place] for place in places])
            outcomes.update(zip(places, written, strict=True))
        return self._add_to_live_tail(
            namespace, events, [outcomes[place] for place in range(len(rows))]
        )

    def _add_to_live_tail(
        self, namespace: Namespace, events: Sequence[Event], outcomes: Sequence[Written]
    ) -> Sequence[Written]:
        """Add the new events to the live tail."""
        if outcomes.count(Written.NEW) < len(outcomes):
            events = [e for e, out in zip(events, outcomes, strict=True) if out is Written.NEW]
        self._db.live.note(namespace, events)
        return outcomes

    def _append_atomic(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Written:
        if any(self._are_late(connection, namespace, events)):
            return Written.LATE
        found = find_events(self._db, connection, namespace, events)
        known = [each for each in found if each is not None]
        if any(not a.same_payload(b) for a, b in zip(found, events, strict=True) if a is not None):
            return Written.CONFLICT
        if known:
            invariant(len(known) == len(events), "half an atomic add is committed")
            return Written.REPLAYED
        if has_atomic(self._db, connection, namespace, events[0]):
            # The token is used by another atomic add, which has no counter in common with this one.
            return Written.CONFLICT
        self._insert(connection, namespace, events)
        return Written.NEW

    def _are_late(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> list[bool]:
        """Return for each event whether it is too late: by its age, by the watermark, or because a
        decision voided or cancelled its token. The clock is read inside the transaction.

        Raises NamespaceUnknownError.
        """
        watermarks = self._db.watermarks.get(namespace.id)
        if watermarks is None:
            raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
        resolved_us, now_us = self._db.resolved_through_us, self._db.clock.now_us()
        open_us = max(watermarks) + 1
        if len(namespace.eras) == 1:
            # The usual case: the same bound for all.
            open_us = max(open_us, now_us - namespace.eras[0].accept_limit_us)
            late = [event[1] < open_us for event in events]
        else:
            late = [
                event[1] < max(open_us, now_us - accept_limit_at(namespace, event[1]))
                for event in events
            ]
        cancelled_us = self._db.cancelled_us
        times = [event[1] for event in events]
        if min(times) <= resolved_us or not cancelled_us.isdisjoint(times):
            return [
                out
                or (
                    (time_us <= resolved_us or time_us in cancelled_us)
                    and _is_refused(connection, namespace, event)
                )
                for out, event, time_us in zip(late, events, times, strict=True)
            ]
        return late

    def _rows_of(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> list[Row]:
        """Return the row of each event; create missing counters."""
        ids = self._ids_of(connection, namespace, events)
        # The payload of a clear does not include its delta.
        return [
            (ids[name], time_us, event_id, item, 0 if clear else delta, clear or None, atom)
            for name, time_us, event_id, item, delta, clear, atom in events
        ]

    def _tables(self, namespace: Namespace, events: Sequence[Event]) -> list[str]:
        """Return the tables of *events*, usually one. Raises SliceMissingError."""
        dataset_id, times = namespace.dataset.id, [event[1] for event in events]
        first = slice_of(self._db.slices[dataset_id], min(times))
        if max(times) < first.end_us:
            return [events_table(dataset_id, first.start_us)]
        return list(dict.fromkeys(self._table(namespace, time_us) for time_us in times))

    def _table(self, namespace: Namespace, time_us: int) -> str:
        dataset_id = namespace.dataset.id
        return events_table(dataset_id, slice_of(self._db.slices[dataset_id], time_us).start_us)

    def _ids_of(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Mapping[str, int]:
        known = self._db.ids.of(namespace.id)
        names = {event[0]: None for event in events}
        if names.keys() <= known.keys():
            return known
        missing = [name for name in names if name not in known]
        # Most of them exist and are only not cached: one look-up avoids a write.
        found, deletes = _ids_and_deletes(connection, namespace.id, missing)
        if len(found) < len(missing):
            new = [name for name in missing if name not in found]
            begin(connection)
            make_counters(connection, namespace.id, new)
            found |= counter_ids(connection, namespace.id, new)
        unlisted = _list_again(connection, deletes, events)
        for name, counter_id in found.items():
            if name not in unlisted:
                self._db.ids.learn(namespace.id, name, counter_id)
        return {name: known.get(name) or found[name] for name in names}


def find_events(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace: Namespace,
    events: Sequence[Event],
) -> list[Event | None]:
    """Return the stored events of the same identities. Raises SliceMissingError."""
    ids = counter_ids(connection, namespace.id, list({event.counter: 0 for event in events}))
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


def _is_refused(connection: sqlite3.Connection, namespace: Namespace, event: Event) -> bool:
    outcome = connection.execute(
        "SELECT outcome FROM resolutions WHERE namespace = ? AND event_time = ?"
        " AND event_id = ? AND scope = ?",
        (namespace.id, event.event_time_us, event.event_id, event.scope),
    ).fetchone()
    return outcome is not None and outcome[0] != Outcome.APPLIED


def counter_ids(
    connection: sqlite3.Connection, namespace_id: int, names: Sequence[str]
) -> dict[str, int]:
    """Return ids of the counters of *names* that exist."""
    sql = f"SELECT json_group_array(json_array(c.name, c.id)) {_COUNTERS_OF}"
    return dict(one_json(connection, sql, (to_json(names), namespace_id)))


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


def _ids_and_deletes(
    connection: sqlite3.Connection, namespace_id: int, names: Sequence[str]
) -> tuple[dict[str, int], list[tuple[str, int, int]]]:
    """Return ids of the counters of *names* that exist; and (name, id, instant) of their pending
    deletes."""
    sql = (
        "SELECT json_group_array(json_array(c.name, c.id, p.start))"
        f" {_COUNTERS_OF} LEFT JOIN pending p ON p.counter = c.id AND p.recount = {DELETED}"
    )
    rows = one_json(connection, sql, (to_json(names), namespace_id))
    deletes = [(name, counter_id, at_us) for name, counter_id, at_us in rows if at_us is not None]
    return {name: counter_id for name, counter_id, _ in rows}, deletes


def _list_again(
    connection: sqlite3.Connection, deletes: Sequence[tuple[str, int, int]], events: Sequence[Event]
) -> Collection[str]:
    """List those deleted counters that have a later event among *events*; return the others that
    are deleted: the next event of one must look again."""
    unlisted: set[str] = set()
    for name, counter_id, deleted_us in deletes:
        if any(event[0] == name and event[1] > deleted_us for event in events):
            begin(connection)
            connection.execute(
                "DELETE FROM pending WHERE counter = ? AND recount = ? AND start = ?",
                (counter_id, DELETED, deleted_us),
            )
        else:
            unlisted.add(name)
    return unlisted


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
            outcomes += _insert_missing(connection, table, chunk)
    return outcomes


def _insert_missing(
    connection: sqlite3.Connection, table: str, rows: Sequence[Row]
) -> list[Written]:
    begin(connection)
    keys = [(index, *row[:4]) for index, row in enumerate(rows)]
    known_rows: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for index, delta, clear, atom in select_rows(connection, table, keys):
        stored_atom = bytes.fromhex(atom) if atom else None
        known_rows[rows[index][:4]] = (delta, clear, stored_atom)
    outcomes: list[Written] = []
    new: list[Row] = []
    for row in rows:
        there = known_rows.get(row[:4])
        if there is None:
            known_rows[row[:4]] = row[4:]
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
            folds[name] = Fold(True, after.get(name, _NO_FOLD).total)
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
