"""Store decisions about late tokens, and the times reserved for keys, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from counter.errors import InvariantError
from counter.storage.postgresql.database import PostgresqlDatabase, within
from counter.storage.postgresql.events import token_of
from counter.storage.postgresql.fence import wait_for_appends
from counter.types import OTHER_PAYLOAD, Decision, Event, Namespace, Outcome, Reservation

_WHERE: Final = "namespace = $1 AND event_time = $2 AND event_id = $3 AND scope = $4"


class PostgresqlDecisions:
    """See :class:`counter.ports.DecisionStore`.

    A decision that an event may contradict is noted as open first: later appends see it and refuse
    the token. After the appends that were under way then have ended, what is found is final. Any
    later caller continues an open decision that a crash left.
    """

    def __init__(self, database: PostgresqlDatabase) -> None:
        self._database = database

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Do as the port says; VOID only if no event is found behind the fence. Every later append
        of the token is refused."""
        async with within(namespace.dataset.write_timeout_us):
            token = token_of(namespace, events[0])
            outcome, fingerprint = await self._database.row(
                "WITH noted AS (INSERT INTO {s}.resolutions VALUES ($1, $2, $3, $4, $5, $6)"
                " ON CONFLICT (namespace, event_time, event_id, scope)"
                " DO UPDATE SET fingerprint = resolutions.fingerprint"
                " RETURNING outcome, fingerprint),"
                " seen AS (UPDATE {s}.datasets SET resolved_through = $2 WHERE id = $7"
                " AND resolved_through < $2) SELECT outcome, fingerprint FROM noted",
                *token,
                decision.outcome if decision.outcome is Outcome.APPLIED else None,
                decision.fingerprint,
                namespace.dataset.id,
            )
            if outcome is None:
                await wait_for_appends(self._database, namespace.dataset.id)
                await self._settle(namespace, events, decision.fingerprint)
                settled = await self.decided(namespace, events)
                if settled is None:
                    raise InvariantError("a decision that was settled is gone")
                return settled
        return Decision(Outcome(outcome), fingerprint)

    async def _settle(
        self, namespace: Namespace, events: Sequence[Event], fingerprint: bytes
    ) -> None:
        """Close the open decision about the token of *events*, whose payload has *fingerprint*.

        A token is used if an event has its scope as counter: a single add, or the header of an
        atomic one, whichever counters that has.
        """
        event = events[0]
        await self._database.rows(
            "UPDATE {s}.resolutions r SET (outcome, fingerprint) = (SELECT"
            " CASE WHEN u.same IS NULL THEN 'void' ELSE 'applied' END,"
            " CASE WHEN u.same IS FALSE THEN $9::bytea ELSE $6::bytea END"
            " FROM (SELECT 1) one LEFT JOIN (SELECT e.clear = $7 AND (e.clear OR e.delta = $8)"
            " AND e.atom IS NOT DISTINCT FROM $10 AS same FROM {s}.events e WHERE e.dataset = $5"
            " AND e.namespace = $1 AND e.event_time = $2 AND e.event_id = $3 AND e.counter = $4"
            f" AND e.item = 0) u ON true) WHERE {_WHERE} AND outcome IS NULL",
            *token_of(namespace, event),
            namespace.dataset.id,
            fingerprint,
            event.clear,
            0 if event.item_key else event.delta,
            OTHER_PAYLOAD,
            event.atom,
        )

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        row = await self._database.row(
            "SELECT outcome, fingerprint, {s}.wait_as_a_write() FROM {s}.resolutions"
            f" WHERE {_WHERE} AND outcome IS NOT NULL",
            *token_of(namespace, events[0]),
        )
        return None if row is None else Decision(Outcome(row[0]), row[1])

    async def reserve(self, namespace: Namespace, nonce: bytes, wanted: Reservation) -> int:
        async with within(namespace.dataset.write_timeout_us):
            time_us: int = await self._database.value(
                "INSERT INTO {s}.reservations AS r VALUES ($1, $2, $3, $4)"
                " ON CONFLICT (namespace, nonce) DO UPDATE SET"
                " time = CASE WHEN r.expires > $5::bigint"
                " AND r.time IS DISTINCT FROM $6::bigint THEN r.time ELSE $3 END,"
                " expires = CASE WHEN r.expires > $5::bigint"
                " AND r.time IS DISTINCT FROM $6::bigint THEN r.expires ELSE $4 END"
                " RETURNING time",
                *(namespace.id, nonce, wanted.time_us, wanted.expires_us),
                *(wanted.expired_us, wanted.replaces_us),
            )
        return time_us
