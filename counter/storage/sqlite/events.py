"""Store the event log in SQLite: a table per slice, clustered by (time, counter, id, item).

An append rejects late events, creates counters, and inserts all events of its batch; each
step is one set-based statement.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, Final

from counter.bounds import NO_BOUNDS, bounds_of, is_refusal, payload_of
from counter.errors import (
    NamespaceUnknownError,
    SliceMissingError,
    UnavailableError,
    invariant,
)
from counter.holds import is_hold
from counter.limits import INT64_MAX
from counter.ports import Counted
from counter.storage.sqlite.bounds import SqliteBounds, SqliteHolds, have_room
from counter.storage.sqlite.database import (
    ROWS_OF_ANY_NUMBER_MAX,
    SqliteDatabase,
    begin,
    bulk,
    chunks,
    insert,
)
from counter.storage.sqlite.event_rows import (
    COUNTERS_OF,
    busiest_of,
    counter_ids,
    find_events,
    fold_spans,
    has_atomic,
    log_tables,
    make_counters,
    scan_rows,
    select_rows,
    spans_of,
    window_folds_of,
)
from counter.storage.sqlite.schema import events_table, one_json, to_json
from counter.types import DELETED, Event, EventPage, Fold, Namespace, Outcome, Span, Written
from counter.windows import accept_limit_at, shard_of, slice_of

Row = tuple[int, int, bytes, int, int, int | None, bytes | None]
_ATOM: Final = itemgetter(6)
_PLAIN_COLUMNS: Final = " (counter, event_time, event_id, item, delta)"


class SqliteEvents:
    """See :class:`counter.ports.EventStore`."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._db = database
        self.holds = SqliteHolds(database, self._insert)
        self._bounds = SqliteBounds(database, self.holds)
        # One object for all calls, because the queues group jobs by their function.
        self._appending = self._append
        self._folding = partial(fold_spans, database)

    async def append(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Written]:
        result: Sequence[Written] = await self._db.writer.call(
            (self._appending, (namespace, events)), len(events)
        )
        return result

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        outcome = await self._db.write(
            lambda connection: self._append_atomic(connection, namespace, events)
        )
        if isinstance(outcome, UnavailableError):
            raise outcome
        return outcome

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
        result: Sequence[Fold] = await self._db.scanner.call((self._folding, (namespace, spans)))
        return result

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Mapping[int, Fold]]:
        size_us = namespace.settings.rollup_window_us
        tables = log_tables(self._db, namespace, span.from_us, span.to_us - 1)

        def query(connection: sqlite3.Connection) -> list[Mapping[int, Fold]]:
            ids = counter_ids(connection, namespace.id, counters)
            found: dict[str, dict[int, Fold]] = {name: {} for name in ids}
            for table in tables:
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
        """Do :func:`fold_spans` as of one commit, however many statements it takes."""
        connection.execute("BEGIN")
        try:
            return fold_spans(self._db, connection, jobs)
        finally:
            connection.execute("ROLLBACK")

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
    ) -> Sequence[Written | UnavailableError]:
        """Write the events that are on time, with one insert per table.

        Raises SliceMissingError and NamespaceUnknownError before anything is written.
        """
        if not events:
            return ()
        late = self._are_late(connection, namespace, events)
        if not any(late):
            return self._write(connection, namespace, events)
        fresh = [event for event, out in zip(events, late, strict=True) if not out]
        written = iter(self._write(connection, namespace, fresh))
        return [Written.LATE if out else next(written) for out in late]

    def _write(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        """Write events that are on time, those without room for them as refusals."""
        default = self._db.bounds(connection).get(namespace.id, NO_BOUNDS)
        if not events or (default == NO_BOUNDS and not any(map(_ATOM, events))):
            return self._insert(connection, namespace, events)
        # Raises if a slice is missing, before the log is read.
        self._tables(namespace, events)
        counts = self._bounds.counts(connection, namespace, events, default)
        if have_room(events, counts, default) and self._insert_new(connection, namespace, events):
            return [Written.NEW] * len(events)
        begin(connection)
        known = find_events(self._db, connection, namespace, events)
        decided = self._bounds.decided(connection, namespace, events, counts, default, known)
        to_write = [each for each in decided if not isinstance(each, UnavailableError)]
        written = iter(self._insert(connection, namespace, to_write))
        return [
            each if isinstance(each, UnavailableError) else _outcome_of(each, next(written))
            for each in decided
        ]

    def _insert_new(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> bool:
        """Insert *events* if they all are new, and so few that one statement does; return whether
        they are."""
        tables = self._tables(namespace, events)
        if len(tables) > 1 or len(events) > ROWS_OF_ANY_NUMBER_MAX:
            return False
        rows = self._rows_of(connection, namespace, events)
        self._db.live.expect(namespace, events)
        try:
            insert(connection, f"INSERT INTO {tables[0]}", rows)
        except sqlite3.IntegrityError:
            return False
        self._db.appended += len(events)
        self._db.live.note(namespace, events)
        return True

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
    ) -> Written | UnavailableError:
        if any(self._are_late(connection, namespace, events)):
            return Written.LATE
        found = find_events(self._db, connection, namespace, events)
        known = [each for each in found if each is not None]
        if any(not a.same_payload(b) for a, b in zip(found, events, strict=True) if a is not None):
            return Written.CONFLICT
        if known:
            invariant(len(known) == len(events), "half an atomic add is committed")
            return Written.BOUND_REACHED if is_refusal(known[0].atom) else Written.REPLAYED
        if has_atomic(self._db, connection, namespace, events[0]):
            # The token is used by another atomic add, which has no counter in common with this one.
            return Written.CONFLICT
        is_bounded = any(bounds_of(each.atom) != NO_BOUNDS for each in events)
        try:
            if is_hold(events):
                events = self._bounds.decided_hold(connection, namespace, events)
            elif is_bounded or namespace.id in self._db.bounds(connection):
                events = self._bounds.decided_atomic(connection, namespace, events)
            self._insert(connection, namespace, events)
        except UnavailableError as error:
            # Not raised: the ends of expired holds are written, and stay.
            return error
        if is_hold(events):
            self.holds.begin(connection, namespace, events)
        return Written.BOUND_REACHED if is_refusal(events[0].atom) else Written.NEW

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


def _is_refused(connection: sqlite3.Connection, namespace: Namespace, event: Event) -> bool:
    outcome = connection.execute(
        "SELECT outcome FROM resolutions WHERE namespace = ? AND event_time = ?"
        " AND event_id = ? AND scope = ?",
        (namespace.id, event.event_time_us, event.event_id, event.scope),
    ).fetchone()
    return outcome is not None and outcome[0] != Outcome.APPLIED


def _ids_and_deletes(
    connection: sqlite3.Connection, namespace_id: int, names: Sequence[str]
) -> tuple[dict[str, int], list[tuple[str, int, int]]]:
    """Return ids of the counters of *names* that exist; and (name, id, instant) of their pending
    deletes."""
    sql = (
        "SELECT json_group_array(json_array(c.name, c.id, p.start))"
        f" {COUNTERS_OF} LEFT JOIN pending p ON p.counter = c.id AND p.recount = {DELETED}"
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
        elif _payload(there) != _payload(row[4:]):
            outcomes.append(Written.CONFLICT)
        else:
            outcomes.append(Written.BOUND_REACHED if is_refusal(there[2]) else Written.REPLAYED)
    bulk(connection, f"INSERT INTO {table}", new)
    return outcomes


def _outcome_of(event: Event, written: Written) -> Written:
    """Return the outcome of *event*, which was *written* as it is."""
    is_new_refusal = written is Written.NEW and is_refusal(event.atom)
    return Written.BOUND_REACHED if is_new_refusal else written


def _payload(cells: tuple[Any, ...]) -> bytes | None:
    """Return the payload in the last three cells of a row; None if it is a clear's."""
    delta, clear, atom = cells
    return None if clear else payload_of(delta, atom)
