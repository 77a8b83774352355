"""The event log in SQLite: a table a slice, clustered by (counter, event_time, event_id, item)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from counter.errors import NamespaceUnknownError, SliceMissingError, invariant
from counter.limits import INT64_MAX
from counter.partitions import shard_of, slice_of
from counter.ports import Clock
from counter.storage.sqlite.base import ROWS_OF_ANY_NUMBER_MAX, SqliteBase, begin, bulk
from counter.storage.sqlite.log import (
    Row,
    counter_ids,
    fold_rows_of,
    insert_rows,
    make_counters,
    scan_rows,
    select_rows,
)
from counter.storage.sqlite.schema import events_table
from counter.types import AtomicMark, Dataset, Event, Fold, Mark, Namespace, Outcome, Slice, Written
from counter.windows import accept_limit_at, window_of

_NO_FOLD: Final = Fold(False, 0)


class SqliteEvents(SqliteBase):
    """See :class:`counter.ports.EventStore`."""

    transactional = True

    def __init__(self, directory: Path, clock: Clock, datasets: Sequence[Dataset]) -> None:
        super().__init__(directory, clock, datasets)
        # One object for all calls: the lane tells jobs apart by their function.
        self._appending = self._append

    async def mark(self, namespace: Namespace, marks: Sequence[Mark]) -> None:
        await self._write(lambda connection, _: self._leave_marks(connection, namespace, marks))

    async def mark_atomic(self, namespace: Namespace, mark: AtomicMark) -> None:
        """Nothing to do: one transaction writes all of an atomic add or nothing."""

    async def append(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Written]:
        result: Sequence[Written] = await self._writer.call((self._appending, (namespace, events)))
        return result

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        result: Written = await self._write(
            lambda connection, now_us: self._append_atomic(connection, now_us, namespace, events)
        )
        return result

    async def rewrite(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Nothing to do: what was found is committed, and there is one copy of it."""

    async def void(self, namespace: Namespace, events: Sequence[Event]) -> None:
        """Nothing to do: ``decide`` saw, in its own transaction, that nothing is there, and every
        later write is refused by age and by ``resolutions``."""

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        result: Sequence[Event | None] = await self._read(
            self._reader, lambda connection: self._find(connection, namespace, events)
        )
        return result

    async def sums(
        self, namespace: Namespace, windows: Sequence[tuple[str, int]]
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        spans = [(name, start_us, start_us + size_us - 1) for name, start_us in windows]
        for _, start_us in windows:
            slice_of(self._slices[namespace.dataset.id], start_us)
        result: Sequence[Fold] = await self._scanner.call((self._spans, (namespace, spans)))
        return result

    async def tails(self, namespace: Namespace, after: Sequence[tuple[str, int]]) -> Sequence[Fold]:
        spans = [(name, after_us + 1, INT64_MAX) for name, after_us in after]
        result: Sequence[Fold] = await self._reader.call((self._spans, (namespace, spans)))
        return result

    async def scan(
        self,
        namespace: Namespace,
        counter: str,
        *,
        from_us: int,
        to_us: int,
        before: Event | None,
        limit: int,
    ) -> Sequence[Event]:
        def query(connection: sqlite3.Connection) -> list[Event]:
            found: list[Event] = []
            for each in reversed(self._slices[namespace.dataset.id]):
                if each.start_us < to_us and each.end_us > from_us and len(found) < limit:
                    table = events_table(namespace.dataset.id, each.start_us)
                    span = (from_us, to_us)
                    wanted = limit - len(found)
                    found += scan_rows(
                        connection, table, namespace.id, counter, span, before, wanted
                    )
            return found

        result: Sequence[Event] = await self._read(self._scanner, query)
        return result

    # On the writer's thread.

    def _append(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        jobs: Sequence[tuple[Namespace, Sequence[Event]]],
    ) -> list[Any]:
        """The outcomes of each job; one whose slice or namespace is missing spoils no other."""
        try:
            return self._append_together(connection, now_us, jobs)
        except (SliceMissingError, NamespaceUnknownError) as error:
            if len(jobs) == 1:
                return [error]
        return [self._append(connection, now_us, [job])[0] for job in jobs]

    def _append_together(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        jobs: Sequence[tuple[Namespace, Sequence[Event]]],
    ) -> list[Any]:
        """One insert for all the events of all *jobs* that go to one table.

        Raises SliceMissingError and NamespaceUnknownError before anything is written.
        """
        outcomes: list[Written] = []
        groups: dict[int, _Group] = {}
        for namespace, events in jobs:
            group = groups.get(namespace.id)
            if group is None:
                group = groups[namespace.id] = _Group(namespace, [], [], [])
            for position, event in enumerate(events, len(outcomes)):
                group.events.append(event)
                group.positions.append(position)
            outcomes += [Written.LATE] * len(events)
        for group in groups.values():
            self._admit(connection, now_us, group)
        rows: dict[str, list[Row]] = {}
        places: dict[str, list[int]] = {}
        for group in groups.values():
            prepared = self._prepare(connection, group.namespace, group.events, group.tables)
            for table, position, row in zip(group.tables, group.positions, prepared, strict=True):
                rows.setdefault(table, []).append(row)
                places.setdefault(table, []).append(position)
        for table, table_rows in rows.items():
            written = insert_rows(connection, table, table_rows)
            for position, outcome in zip(places[table], written, strict=True):
                outcomes[position] = outcome
        every = iter(outcomes)
        return [[next(every) for _ in events] for _, events in jobs]

    def _admit(self, connection: sqlite3.Connection, now_us: int, group: _Group) -> None:
        """Take out of *group* what is late, and find the tables of the rest."""
        is_late = self._lateness(connection, now_us, group.namespace)
        late = [is_late(event) for event in group.events]
        if any(late):
            group.events = [e for e, out in zip(group.events, late, strict=True) if not out]
            group.positions = [p for p, out in zip(group.positions, late, strict=True) if not out]
        group.tables = self._tables(group.namespace, group.events)

    def _append_atomic(
        self,
        connection: sqlite3.Connection,
        now_us: int,
        namespace: Namespace,
        events: Sequence[Event],
    ) -> Written:
        if any(map(self._lateness(connection, now_us, namespace), events)):
            return Written.LATE
        found = self._find(connection, namespace, events)
        known = [each for each in found if each is not None]
        if any(not a.same_payload(b) for a, b in zip(found, events, strict=True) if a is not None):
            return Written.CONFLICT
        if known:
            invariant(len(known) == len(events), "half an atomic add is committed")
            return Written.REPLAYED
        tables = self._tables(namespace, events)
        prepared = self._prepare(connection, namespace, events, tables)
        # One token, one time: one table.
        insert_rows(connection, tables[0], prepared)
        return Written.NEW

    def _lateness(
        self, connection: sqlite3.Connection, now_us: int, namespace: Namespace
    ) -> Callable[[Event], bool]:
        """Whether an event may no longer be written: by age, by watermark, by a decision.

        Raises NamespaceUnknownError.
        """
        watermarks = self._watermarks.get(namespace.id)
        if watermarks is None:
            raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
        watermark_us = max(watermarks)
        eras = namespace.eras

        def is_late(event: Event) -> bool:
            time_us = event[1]
            limit_us = eras[0][1] if len(eras) == 1 else accept_limit_at(namespace, time_us)
            if time_us < now_us - limit_us or time_us <= watermark_us:
                return True
            return time_us <= self._resolved_through_us and _is_void(connection, namespace, event)

        return is_late

    def _prepare(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        events: Sequence[Event],
        tables: Sequence[str],
    ) -> list[Row]:
        """The row of each event; makes the counters and marks that are not there."""
        ids = self._ids(connection, namespace, events)
        window_us = namespace.settings.rollup_window_us
        prepared: list[Row] = []
        marks: dict[tuple[int, int, int, int, int], None] = {}
        known: Set[int] = frozenset()
        known_window_us = -1
        for name, time_us, event_id, item, delta, clear, atom in events:
            start_us = window_of(time_us, window_us)
            if start_us != known_window_us:
                known = self._known.marked(namespace.id, start_us)
                known_window_us = start_us
            counter_id = ids[name]
            if counter_id not in known:
                shard = shard_of(name, namespace.settings.shards)
                marks[(namespace.id, shard, start_us, counter_id, 0)] = None
            # A clear ignores its delta: it is no part of the payload.
            worth = 0 if clear else delta
            prepared.append((counter_id, time_us, event_id, item, worth, clear or None, atom))
        # One insert of few rows is a transaction by itself, and needs no other.
        if marks or len(events) > ROWS_OF_ANY_NUMBER_MAX or len(set(tables)) > 1:
            begin(connection)
        if marks:
            bulk(connection, "INSERT OR IGNORE INTO marks", list(marks))
            for _, _, start_us, counter_id, _ in marks:
                self._known.learn_mark(namespace.id, start_us, counter_id)
        return prepared

    def _tables(self, namespace: Namespace, events: Sequence[Event]) -> list[str]:
        dataset_id = namespace.dataset.id
        tables: list[str] = []
        start_us = end_us = 0
        table = ""
        for event in events:
            if not start_us <= event[1] < end_us:
                each = slice_of(self._slices[dataset_id], event[1])
                start_us, end_us = each.start_us, each.end_us
                table = events_table(dataset_id, start_us)
            tables.append(table)
        return tables

    def _ids(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> dict[str, int]:
        known = self._known.ids(namespace.id)
        missing = list(dict.fromkeys(event[0] for event in events if event[0] not in known))
        if not missing:
            return known
        begin(connection)
        make_counters(connection, namespace.id, missing)
        found = counter_ids(connection, namespace.id, missing)
        for name, counter_id in found.items():
            self._known.learn_id(namespace.id, name, counter_id)
        return {event[0]: known.get(event[0]) or found[event[0]] for event in events}

    def _leave_marks(
        self, connection: sqlite3.Connection, namespace: Namespace, marks: Sequence[Mark]
    ) -> None:
        names = list(dict.fromkeys(mark.counter for mark in marks))
        make_counters(connection, namespace.id, names)
        ids = counter_ids(connection, namespace.id, names)
        shards = namespace.settings.shards
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

    # On a reader's thread, or the writer's.

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

    def _spans(
        self,
        connection: sqlite3.Connection,
        _now_us: int,
        jobs: Sequence[tuple[Namespace, Sequence[tuple[str, int, int]]]],
    ) -> list[Any]:
        """Folds of (counter, first, last) spans: one statement for each table and equal span."""
        groups: dict[tuple[int, int, int, int], dict[str, None]] = {}
        for namespace, spans in jobs:
            for name, first_us, last_us in spans:
                key = (namespace.id, namespace.dataset.id, first_us, last_us)
                groups.setdefault(key, {})[name] = None
        folds: dict[tuple[int, str, int, int], Fold] = {}
        for (namespace_id, dataset_id, first_us, last_us), wanted in groups.items():
            names = list(wanted)
            for each in self._slices_between(dataset_id, first_us, last_us):
                table = events_table(dataset_id, each.start_us)
                part = fold_rows_of(connection, table, namespace_id, names, first_us, last_us)
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
        slices = self._slices[dataset_id]
        if first_us < self._dropped_before[dataset_id]:
            raise SliceMissingError(
                f"the events at {first_us} µs were dropped with their slice", retry_after_us=1_000
            )
        return [each for each in slices if each.start_us <= last_us and each.end_us > first_us]


@dataclass(slots=True)
class _Group:
    """The events of one namespace in a batch, their places in it and their tables."""

    namespace: Namespace
    events: list[Event]
    positions: list[int]
    tables: list[str]


def _is_void(connection: sqlite3.Connection, namespace: Namespace, event: Event) -> bool:
    outcome = connection.execute(
        "SELECT outcome FROM resolutions WHERE namespace = ? AND event_time = ?"
        " AND event_id = ? AND scope = ?",
        (namespace.id, event.event_time_us, event.event_id, scope_of(event)),
    ).fetchone()
    return outcome is not None and outcome[0] == Outcome.VOID


def scope_of(event: Event) -> str:
    """What is a token's beside time and nonce: the counter, or "" for an atomic add."""
    return event.counter if event.item_key == 0 else ""
