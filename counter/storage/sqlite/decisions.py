"""Store decisions about late tokens, and the times reserved for keys, in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.events import find_events, has_atomic
from counter.types import OTHER_PAYLOAD, Decision, Event, Namespace, Outcome, Reservation


class SqliteDecisions:
    """See :class:`counter.ports.DecisionStore`. The one writer makes each a compare-and-set."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._db = database

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Do as the port says; VOID only if, in the same transaction, the token is not used. Every
        later write of it is rejected by its age and by ``resolutions``."""

        def change(connection: sqlite3.Connection) -> Decision:
            stored = _select(connection, namespace, events)
            if stored is not None:
                return stored
            outcome, fingerprint = decision
            event = events[0]
            found = find_events(self._db, connection, namespace, events)
            is_atomic = event.item_key > 0
            if any(found) or (is_atomic and has_atomic(self._db, connection, namespace, event)):
                outcome = Outcome.APPLIED
                if not all(a and a.same_payload(b) for a, b in zip(found, events, strict=True)):
                    fingerprint = OTHER_PAYLOAD
            connection.execute(
                "INSERT INTO resolutions VALUES (?, ?, ?, ?, ?, ?)",
                (
                    namespace.id,
                    event.event_time_us,
                    event.event_id,
                    event.scope,
                    outcome,
                    fingerprint,
                ),
            )
            self._db.resolved_through_us = max(self._db.resolved_through_us, event.event_time_us)
            return Decision(outcome, fingerprint)

        return await self._db.write(change)

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
        (namespace.id, events[0].event_time_us, events[0].event_id, events[0].scope),
    ).fetchone()
    return None if row is None else Decision(Outcome(row[0]), row[1])
