"""Append events to SQLite: reject late ones, create counters and marks, insert all in one batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from counter.errors import NamespaceUnknownError, SliceMissingError, invariant
from counter.partitions import shard_of, slice_of
from counter.ports import Clock
from counter.storage.sqlite.base import ROWS_OF_ANY_NUMBER_MAX, SqliteBase, begin, bulk
from counter.storage.sqlite.log import (
    Row,
    counter_ids,
    has_atomic,
    insert_rows,
    make_counters,
    select_rows,
)
from counter.storage.sqlite.schema import events_table
from counter.types import Dataset, Event, Fold, Mark, Namespace, Outcome, Written
from counter.windows import accept_limit_at, window_of

_NO_FOLD: Final = Fold(False, 0)


class SqliteAppends(SqliteBase):
    """The writer thread's part of the event log."""

    def __init__(self, directory: Path, clock: Clock, datasets: Sequence[Dataset]) -> None:
        super().__init__(directory, clock, datasets)
        # One object for all calls, because the lane groups jobs by their function.
        self._appending = self._append

    def _append(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        jobs: Sequence[tuple[Namespace, Sequence[Event]]],
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
                written = iter(self._append_events(connection, now_us, namespace, events))
                for index in indices:
                    results[index] = list(islice(written, len(jobs[index][1])))
            except (SliceMissingError, NamespaceUnknownError) as error:
                # Nothing of the namespace is written yet: the jobs are tried separately, so that
                # one job's missing slice does not fail the others.
                for index in indices:
                    alone = [error] if len(indices) == 1 else None
                    part = alone or self._append(connection, now_us, [jobs[index]])
                    results[index] = part[0]
        return results

    def _append_events(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        namespace: Namespace,
        events: Sequence[Event],
    ) -> Sequence[Written]:
        """Write the events that are on time, with one insert per table.

        Raises SliceMissingError and NamespaceUnknownError before anything is written.
        """
        if not events:
            return ()
        late = self._late(connection, now_us, namespace, events)
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
        self._appended += len(events)
        tables = self._tables(namespace, events)
        rows = self._prepare(connection, namespace, events)
        self._live.expect(namespace, events)
        # One insert of few rows is a transaction by itself.
        if len(tables) > 1 or len(rows) > ROWS_OF_ANY_NUMBER_MAX:
            begin(connection)
        if len(tables) == 1:
            return self._note_new(namespace, events, insert_rows(connection, tables[0], rows))
        outcomes: dict[int, Written] = {}
        for table in tables:
            places = [
                place
                for place, event in enumerate(events)
                if self._table(namespace, event.event_time_us) == table
            ]
            written = insert_rows(connection, table, [rows[place] for place in places])
            outcomes.update(zip(places, written, strict=True))
        return self._note_new(namespace, events, [outcomes[place] for place in range(len(rows))])

    def _note_new(
        self, namespace: Namespace, events: Sequence[Event], outcomes: Sequence[Written]
    ) -> Sequence[Written]:
        """Add the new events to the live tail."""
        if outcomes.count(Written.NEW) < len(outcomes):
            events = [e for e, out in zip(events, outcomes, strict=True) if out is Written.NEW]
        self._live.note(namespace, events)
        return outcomes

    def _append_atomic(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        namespace: Namespace,
        events: Sequence[Event],
    ) -> Written:
        if any(self._late(connection, now_us, namespace, events)):
            return Written.LATE
        found = self._find(connection, namespace, events)
        known = [each for each in found if each is not None]
        if any(not a.same_payload(b) for a, b in zip(found, events, strict=True) if a is not None):
            return Written.CONFLICT
        if known:
            invariant(len(known) == len(events), "half an atomic add is committed")
            return Written.REPLAYED
        table = self._table(namespace, events[0].event_time_us)
        if has_atomic(connection, table, namespace.id, events[0]):
            # The token is used by another atomic add, which has no counter in common with this one.
            return Written.CONFLICT
        self._insert(connection, namespace, events)
        return Written.NEW

    def _late(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        namespace: Namespace,
        events: Sequence[Event],
    ) -> list[bool]:
        """Return whether each event may no longer be written: by age, by watermark, by a decision.

        Raises NamespaceUnknownError.
        """
        watermarks = self._watermarks.get(namespace.id)
        if watermarks is None:
            raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
        resolved_us = self._resolved_through_us
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
        if min(event[1] for event in events) <= resolved_us:
            return [
                out or (event[1] <= resolved_us and _is_void(connection, namespace, event))
                for out, event in zip(late, events, strict=True)
            ]
        return late

    def _prepare(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        events: Sequence[Event],
    ) -> list[Row]:
        """Return the row of each event; create missing counters and marks."""
        ids = self._ids_of(connection, namespace, events)
        window_us = namespace.settings.rollup_window_us
        prepared: list[Row] = []
        marks: dict[tuple[int, int, int, int, int], None] = {}
        marked: Mapping[str, int | None] = {}
        start_us = end_us = 0
        for name, time_us, event_id, item, delta, clear, atom in events:
            if not start_us <= time_us < end_us:
                start_us = window_of(time_us, window_us)
                end_us = start_us + window_us
                marked = self._live.window(namespace.id, start_us)
            counter_id = ids[name]
            if name not in marked:
                shard = shard_of(name, namespace.settings.shards)
                marks[(namespace.id, shard, start_us, counter_id, 0)] = None
            # The payload of a clear does not include its delta.
            worth = 0 if clear else delta
            prepared.append((counter_id, time_us, event_id, item, worth, clear or None, atom))
        if marks:
            self.tally.marks["dirty"] += len(marks)
            begin(connection)
            bulk(connection, "INSERT OR IGNORE INTO marks", list(marks))
        return prepared

    def _tables(self, namespace: Namespace, events: Sequence[Event]) -> list[str]:
        """Return the tables of *events*, usually one. Raises SliceMissingError."""
        times = [event[1] for event in events]
        first, last = self._table(namespace, min(times)), self._table(namespace, max(times))
        if first == last:
            return [first]
        return list(dict.fromkeys(self._table(namespace, time_us) for time_us in times))

    def _table(self, namespace: Namespace, time_us: int) -> str:
        dataset_id = namespace.dataset.id
        return events_table(dataset_id, slice_of(self._slices[dataset_id], time_us).start_us)

    def _ids_of(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Mapping[str, int]:
        known = self._ids.of(namespace.id)
        names = {event[0]: None for event in events}
        if names.keys() <= known.keys():
            return known
        missing = [name for name in names if name not in known]
        # Most of them exist and are only not cached: one look-up avoids a write.
        found = counter_ids(connection, namespace.id, missing)
        if len(found) < len(missing):
            new = [name for name in missing if name not in found]
            begin(connection)
            make_counters(connection, namespace.id, new)
            found |= counter_ids(connection, namespace.id, new)
        for name, counter_id in found.items():
            self._ids.learn(namespace.id, name, counter_id)
        return {name: known.get(name) or found[name] for name in names}

    def _leave_marks(
        self, connection: sqlite3.Connection, namespace: Namespace, marks: Sequence[Mark]
    ) -> None:
        names = list(dict.fromkeys(mark.counter for mark in marks))
        make_counters(connection, namespace.id, names)
        ids = counter_ids(connection, namespace.id, names)
        shards = namespace.settings.shards
        self.tally.mark(mark.recount_us for mark in marks)
        bulk(
            connection,
            "INSERT OR IGNORE INTO marks",
            [
                (
                    namespace.id,
                    shard_of(m.counter, shards),
                    m.window_us,
                    ids[m.counter],
                    m.recount_us,
                )
                for m in marks
            ],
        )

    def _find(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> list[Event | None]:
        ids = counter_ids(connection, namespace.id, list({event.counter: 0 for event in events}))
        found: list[Event | None] = [None] * len(events)
        tables: dict[str, list[int]] = {}
        for index, event in enumerate(events):
            each = slice_of(self._slices[namespace.dataset.id], event.event_time_us)
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


def _is_void(connection: sqlite3.Connection, namespace: Namespace, event: Event) -> bool:
    outcome = connection.execute(
        "SELECT outcome FROM resolutions WHERE namespace = ? AND event_time = ?"
        " AND event_id = ? AND scope = ?",
        (namespace.id, event.event_time_us, event.event_id, scope_of(event)),
    ).fetchone()
    return outcome is not None and outcome[0] == Outcome.VOID


def scope_of(event: Event) -> str:
    """Return a token's scope besides time and nonce: the counter, or "" for an atomic add."""
    return event.counter if event.item_key == 0 else ""
