"""Store decisions about late tokens, and the times reserved for keys, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from counter.errors import InvariantError
from counter.holds import is_hold
from counter.storage.postgresql.database import PostgresqlDatabase, within
from counter.storage.postgresql.events import token_of
from counter.storage.postgresql.fence import wait_for_appends
from counter.storage.postgresql.holds import PostgresqlHolds
from counter.types import Decision, Event, Namespace, Outcome, Reservation
from counter.windows import fingerprint as fingerprint_of

_WHERE: Final = "namespace = $1 AND event_time = $2 AND event_id = $3 AND scope = $4"
_NOTE: Final = (
    "WITH noted AS (INSERT INTO {s}.resolutions AS r VALUES ($1, $2, $3, $4, $5, $6)"
    " ON CONFLICT (namespace, event_time, event_id, scope) DO UPDATE SET %s"
    " RETURNING outcome, fingerprint),"
    " seen AS (UPDATE {s}.datasets SET resolved_through = $2 WHERE id = $7"
    " AND resolved_through < $2) SELECT outcome, fingerprint FROM noted"
)
#: Any decision stays.
_DECIDE: Final = _NOTE % "fingerprint = r.fingerprint"
#: An open decision is of no payload yet. One with OTHER_PAYLOAD may be about this one's event: what
#: settles the cancel compares them.
_CANCEL: Final = _NOTE % (
    "(outcome, fingerprint) = (SELECT CASE WHEN r.outcome IS NULL OR r.outcome = 'void' AND same"
    " THEN 'cancelling' WHEN r.outcome = 'applied' AND same THEN 'cancelling_applied'"
    " ELSE r.outcome END, CASE WHEN r.outcome IS NULL OR r.outcome = 'applied' AND same"
    " THEN excluded.fingerprint ELSE r.fingerprint END"
    " FROM (SELECT r.fingerprint IN (excluded.fingerprint, '') AS same) s)"
)


class PostgresqlDecisions:
    """See :class:`counter.ports.DecisionStore`.

    A decision that an event may contradict is noted as open first: later appends see it and refuse
    the token. After the appends that were under way then have ended, what is found is final. Any
    later caller continues an open decision that a crash left, as a cancel if it is one.
    """

    def __init__(self, database: PostgresqlDatabase, holds: PostgresqlHolds) -> None:
        self._database = database
        self._holds = holds

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Do as the port says; VOID only if no event is found behind the fence. Every later append
        of the token is refused."""
        outcome = decision.outcome if decision.outcome is Outcome.APPLIED else None
        return await self._note(_DECIDE, namespace, events, outcome, decision.fingerprint)

    async def cancel(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Do as the port says. Another payload may leave a decision with OTHER_PAYLOAD, which a
        cancel of the right one replaces. That of a hold waits for no appends."""
        if is_hold(events):
            return await self._holds.cancel(namespace, events, decision)
        return await self._note(_CANCEL, namespace, events, "cancelling", decision.fingerprint)

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        row = await self._database.row(
            "SELECT outcome, fingerprint, {s}.wait_as_a_write() FROM {s}.resolutions"
            f" WHERE {_WHERE} AND outcome IS NOT NULL",
            *token_of(namespace, events[0]),
        )
        if row is None:
            return None
        if row[0].startswith("cancelling"):
            async with within(namespace.dataset.write_timeout_us):
                return await self._settle(namespace, events, fingerprint_of(events))
        return Decision(Outcome(row[0]), row[1])

    async def _note(
        self,
        note: str,
        namespace: Namespace,
        events: Sequence[Event],
        outcome: str | None,
        fingerprint: bytes,
    ) -> Decision:
        """Return the decision about the token of *events* after *note* has changed it."""
        async with within(namespace.dataset.write_timeout_us):
            outcome, stored = await self._database.row(
                note,
                *token_of(namespace, events[0]),
                *(outcome, fingerprint, namespace.dataset.id),
            )
            if outcome is None or outcome.startswith("cancelling"):
                return await self._settle(namespace, events, fingerprint)
        return Decision(Outcome(outcome), stored)

    async def _settle(
        self, namespace: Namespace, events: Sequence[Event], fingerprint: bytes
    ) -> Decision:
        """Close the open decision about the token of *events*, whose payload has *fingerprint*."""
        await wait_for_appends(self._database, namespace.dataset.id)
        event = events[0]
        outcome, stored = await self._database.row(
            "SELECT outcome, fingerprint"
            " FROM {s}.settle($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
            namespace.dataset.id,
            *token_of(namespace, event),
            fingerprint,
            0 if event.item_key or event.clear else event.delta,
            event.clear,
            event.atom,
            [event.scope, *(each.counter for each in events)],
            [0, *(each.item_key for each in events)],
            namespace.settings.rollup_window_us,
        )
        if outcome is None:
            raise InvariantError("a decision that was settled is gone")
        return Decision(Outcome(outcome), stored)

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
