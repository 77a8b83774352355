"""Store decisions about late tokens, and the times reserved for keys, in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from counter.bounds import is_refusal
from counter.errors import NamespaceUnknownError
from counter.holds import Ending, is_hold, request_of
from counter.storage.sqlite.bounds import SqliteHolds
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.event_rows import counter_ids, find_events, has_atomic
from counter.storage.sqlite.rollups import request_recounts
from counter.storage.sqlite.schema import events_table
from counter.types import OTHER_PAYLOAD, Decision, Event, Namespace, Outcome, Reservation
from counter.windows import slice_of

#: Cancelled tokens that are remembered by their times.
_CANCELLED_MAX: Final = 10_000


class SqliteDecisions:
    """See :class:`counter.ports.DecisionStore`. The one writer makes each a compare-and-set."""

    def __init__(self, database: SqliteDatabase, holds: SqliteHolds) -> None:
        self._db = database
        self._holds = holds

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Do as the port says; VOID only if, in the same transaction, the token is not used. Every
        later write of it is rejected by its age and by ``resolutions``."""

        def change(connection: sqlite3.Connection) -> Decision:
            stored = _select(connection, namespace, events)
            if stored is not None:
                return stored
            _, is_used, is_same = self._use(connection, namespace, events)
            decided = decision
            if is_used:
                fingerprint = decision.fingerprint if is_same else OTHER_PAYLOAD
                decided = Decision(Outcome.APPLIED, fingerprint)
            self._insert(connection, namespace, events, decided)
            return decided

        return await self._db.write(change)

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        return await self._db.read(lambda connection: _select(connection, namespace, events))

    async def cancel(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Do as the port says. The marks are left in a window that no worker has passed: the clock
        is read in the transaction, and a worker reads it between two of them."""

        def change(connection: sqlite3.Connection) -> Decision:
            if namespace.id not in self._db.watermarks:
                raise NamespaceUnknownError(f"namespace {namespace.name!r} is deleted")
            found, is_used, is_same = self._use(connection, namespace, events)
            if is_used and not is_same:
                return Decision(Outcome.APPLIED, OTHER_PAYLOAD)
            stored = _select(connection, namespace, events)
            is_refused = found[0] is not None and is_refusal(found[0].atom)
            outcome = Outcome.cancelled(was_counted=is_used and not is_refused)
            # A refusal that was resolved is decided as applied: it is stored, and counts nothing.
            decided = Decision(outcome, decision.fingerprint).over(None if is_refused else stored)
            if decided == stored:
                return stored
            if is_used and not is_refused and is_hold(events):
                hold = self._holds.ended(
                    connection, namespace, request_of(events)[0], Ending.RELEASED
                )
                if hold is None or hold.end is None or hold.end.how is not Ending.RELEASED:
                    return Decision(Outcome.APPLIED, decision.fingerprint)
                self._insert(connection, namespace, events, decided)
                return decided
            self._insert(connection, namespace, events, decided)
            if is_used:
                # As they are stored: a refusal counts 0.
                stored_events = [each for each in found if each is not None]
                request_recounts(self._db, connection, namespace, stored_events)
                # Last: if anything fails, the live tail must not lose them.
                _remove_events(self._db, connection, namespace, stored_events)
            return decided

        return await self._db.write(change)

    def _use(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> tuple[Sequence[Event | None], bool, bool]:
        """Return what is stored of *events*, whether their token is used, and whether for the same
        payload."""
        found = find_events(self._db, connection, namespace, events)
        is_same = all(a and a.same_payload(b) for a, b in zip(found, events, strict=True))
        is_used = any(found) or (
            events[0].item_key > 0 and has_atomic(self._db, connection, namespace, events[0])
        )
        return found, is_used, is_same

    def _insert(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        events: Sequence[Event],
        decision: Decision,
    ) -> None:
        connection.execute(
            "INSERT OR REPLACE INTO resolutions VALUES (?, ?, ?, ?, ?, ?)",
            (*_token_of(namespace, events[0]), *decision),
        )
        # Noted before the commit, because later appends of this transaction must see it.
        time_us, cancelled_us = events[0].event_time_us, self._db.cancelled_us
        if not decision.outcome.is_cancelled:
            self._db.resolved_through_us = max(self._db.resolved_through_us, time_us)
            return
        cancelled_us.add(time_us)
        if len(cancelled_us) > _CANCELLED_MAX:
            # Tokens of the future stay in the set if they can, so that adds of now are not slower.
            now_us = self._db.clock.now_us()
            passed_us = {each for each in cancelled_us if each <= now_us} or set(cancelled_us)
            self._db.resolved_through_us = max(self._db.resolved_through_us, *passed_us)
            cancelled_us -= passed_us

    async def reserve(self, namespace: Namespace, nonce: bytes, wanted: Reservation) -> int:
        def query(connection: sqlite3.Connection) -> int | None:
            row = connection.execute(
                "SELECT time FROM reservations WHERE namespace = ? AND nonce = ? AND expires > ?"
                " AND time IS NOT ?",
                (namespace.id, nonce, wanted.expired_us, wanted.replaces_us),
            ).fetchone()
            return None if row is None else int(row[0])

        def change(connection: sqlite3.Connection) -> int:
            (time_us,) = connection.execute(
                "INSERT INTO reservations VALUES (?, ?, ?, ?) ON CONFLICT (namespace, nonce)"
                " DO UPDATE SET time = iif(expires > ?5 AND time IS NOT ?6, time, ?3),"
                " expires = iif(expires > ?5 AND time IS NOT ?6, expires, ?4) RETURNING time",
                (
                    *(namespace.id, nonce, wanted.time_us, wanted.expires_us),
                    *(wanted.expired_us, wanted.replaces_us),
                ),
            ).fetchone()
            return int(time_us)

        stored: int | None = await self._db.read(query)
        if stored is not None:
            return stored
        return await self._db.write(change)


def _select(
    connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
) -> Decision | None:
    row = connection.execute(
        "SELECT outcome, fingerprint FROM resolutions WHERE namespace = ? AND event_time = ?"
        " AND event_id = ? AND scope = ?",
        _token_of(namespace, events[0]),
    ).fetchone()
    return None if row is None else Decision(Outcome(row[0]), row[1])


def _token_of(namespace: Namespace, event: Event) -> tuple[int, int, bytes, str]:
    return namespace.id, event.event_time_us, event.event_id, event.scope


def _remove_events(
    database: SqliteDatabase,
    connection: sqlite3.Connection,
    namespace: Namespace,
    events: Sequence[Event],
) -> None:
    """Delete *events*, which exist, from the log and from the live tail."""
    ids = counter_ids(connection, namespace.id, list({event.counter: 0 for event in events}))
    database.live.expect(namespace, events)
    for event in events:
        each = slice_of(database.slices[namespace.dataset.id], event.event_time_us)
        connection.execute(
            f"DELETE FROM {events_table(namespace.dataset.id, each.start_us)}"
            " WHERE event_time = ? AND counter = ? AND event_id = ? AND item = ?",
            (event.event_time_us, ids[event.counter], event.event_id, event.item_key),
        )
    database.live.note_removed(namespace, events)
