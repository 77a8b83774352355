"""The compare-and-set tables: decisions about late tokens, times of keys, and leases.

Every write is SERIAL, across data centers too, because a decision is permanent.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final

from counter.errors import UnavailableError
from counter.limits import DAY, HOUR, SECOND
from counter.storage.cassandra.driver import within
from counter.storage.cassandra.session import CassandraSession
from counter.types import Decision, Event, Namespace, Outcome, Reservation

_TOKEN_IS: Final = "namespace = ? AND counter = ? AND event_time = ? AND event_id = ?"  # noqa: S105
# Each sets all cells, so that they expire together, and no row marker, because the one of an INSERT
# may live longer than what replaces its cells: such a row exists and is null.
_DECIDE: Final = (
    "UPDATE {keyspace}.resolutions USING TTL ? SET outcome = ?, fingerprint = ?, op = ?"
    f" WHERE {_TOKEN_IS} IF op = ?"
)
_DECIDED: Final = f"SELECT outcome, fingerprint, op FROM {{keyspace}}.resolutions WHERE {_TOKEN_IS}"
_RESERVE: Final = (
    "UPDATE {keyspace}.keys USING TTL ? SET time = ?, expires = ?, op = ?"
    " WHERE namespace = ? AND nonce = ? IF op = ?"
)
_RESERVED: Final = "SELECT time, expires, op FROM {keyspace}.keys WHERE namespace = ? AND nonce = ?"
#: The content of a key's row says when it expires. The servers delete it this much later.
_TTL_MARGIN_US: Final = HOUR
#: Longer than any key is remembered. The servers reject a time to live of decades.
_TTL_MAX_US: Final = 366 * DAY
_ATTEMPTS_MAX: Final = 5


class CassandraDecisions:
    """:class:`counter.ports.DecisionStore`.

    All attempts and reads of a call together take at most the dataset's ``write_timeout``, like any
    other write; after that the outcome is unknown.
    """

    def __init__(self, session: CassandraSession) -> None:
        self._session = session

    async def decide(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        async with within(namespace.dataset.write_timeout_us):
            applied, stored = await self._set_decision(namespace, events, None, decision)
        if applied:
            return decision
        if stored is None:
            raise _vanished("a decision")
        return _decision_of(stored)

    async def decided(self, namespace: Namespace, events: Sequence[Event]) -> Decision | None:
        token, dataset = _token_of(namespace, events), namespace.dataset
        if not self._session.state_of(dataset).is_spread:
            # Not SERIAL: SERIAL reads of one row contend with each other, and each shard of an
            # atomic add reads its decision at the same moment. A caller is given a decision only
            # after its commit at the write consistency or at a quorum, which this read overlaps.
            select = await self._session.to_read(dataset, _DECIDED)
            rows = await self._session.connection.one(select.bind(token))
        else:
            # A SERIAL read that completes another process's write commits it at a quorum of all
            # data centers, which a quorum of one need not overlap.
            select = await self._session.to_settle(dataset, _DECIDED)
            (rows,) = await self._session.connection.settled((select.bind(token),))
        return _decision_of(rows[0]) if rows else None

    async def cancel(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        stored: Decision | None = None
        seen: bytes | None = None
        async with within(namespace.dataset.write_timeout_us):
            for _ in range(_ATTEMPTS_MAX):
                left = decision.over(stored)
                if left == stored:
                    return left
                applied, row = await self._set_decision(namespace, events, seen, left)
                if applied:
                    return left
                stored, seen = (_decision_of(row), row[-1]) if row else (None, None)
        raise _vanished("a decision")

    async def reserve(self, namespace: Namespace, nonce: bytes, wanted: Reservation) -> int:
        seen: bytes | None = None
        async with within(namespace.dataset.write_timeout_us):
            for _ in range(_ATTEMPTS_MAX):
                applied, stored = await self._set_key(namespace, nonce, seen, wanted)
                if applied:
                    return wanted.time_us
                seen = None
                if stored is not None and stored[0] is not None:
                    time_us, until_us, seen = stored
                    if not wanted.replaces(time_us, until_us):
                        return int(time_us)
        raise _vanished("a reservation")

    async def _set_decision(
        self, namespace: Namespace, events: Sequence[Event], seen: bytes | None, decision: Decision
    ) -> tuple[bool, Sequence[Any] | None]:
        """As :meth:`_set_key`, for a decision."""
        dataset, token = namespace.dataset, _token_of(namespace, events)
        update, op = await self._session.to_compare(dataset, _DECIDE), uuid.uuid4().bytes
        # It outlives the event, which is dropped with its slice at latest when retention is over.
        ttl_us = 2 * dataset.retention_us + dataset.slice_us
        values = (ttl_us // SECOND, decision.outcome.value, decision.fingerprint, op, *token, seen)
        return await self._session.connection.compare_and_set(
            update.bind(values), lambda: self._as_compared(namespace, _DECIDED, token), op
        )

    async def _set_key(
        self, namespace: Namespace, nonce: bytes, seen: bytes | None, wanted: Reservation
    ) -> tuple[bool, Sequence[Any] | None]:
        """Replace what the compare-and-set *seen* wrote, or insert if that is None. Return whether
        it was done, and the row if not."""
        update, op = await self._session.to_compare(namespace.dataset, _RESERVE), uuid.uuid4().bytes
        key = (namespace.id, nonce)
        values = (_ttl_s(wanted), wanted.time_us, wanted.expires_us, op, *key, seen)
        return await self._session.connection.compare_and_set(
            update.bind(values), lambda: self._as_compared(namespace, _RESERVED, key), op
        )

    async def _as_compared(
        self, namespace: Namespace, cql: str, key: Sequence[Any]
    ) -> tuple[Any, ...] | None:
        """Return the row after every compare-and-set so far."""
        select = await self._session.to_settle(namespace.dataset, cql)
        rows = await self._session.connection.one(select.bind(key))
        return rows[0] if rows else None


def _token_of(namespace: Namespace, events: Sequence[Event]) -> tuple[Any, ...]:
    first = events[0]
    return namespace.id, first.scope, first.event_time_us, first.event_id


def _decision_of(row: Sequence[Any]) -> Decision:
    return Decision(Outcome(row[0]), row[1])


def _ttl_s(wanted: Reservation) -> int:
    return min(wanted.lasts_us + _TTL_MARGIN_US, _TTL_MAX_US) // SECOND


def _vanished(what: str) -> UnavailableError:
    return UnavailableError(f"{what} changes while it is read", retry_after_us=100_000)


_HEARTBEAT: Final = (
    "INSERT INTO {control}.workers (everyone, worker) VALUES (0, ?) USING TTL ? AND TIMESTAMP ?"
)
_LEAVE: Final = "DELETE FROM {control}.workers USING TIMESTAMP ? WHERE everyone = 0 AND worker = ?"
_WORKERS: Final = "SELECT worker FROM {control}.workers WHERE everyone = 0"


class CassandraLeases:
    """:class:`counter.capabilities.LeaseStore`. A time is rounded up to whole seconds."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session

    async def heartbeat(self, worker: str, ttl_us: int) -> None:
        ttl_s = max(1, -(-ttl_us // SECOND))
        await self._session.control.write(_HEARTBEAT, worker, ttl_s, self._session.clock.now_us())

    async def leave(self, worker: str) -> None:
        # A heartbeat of the same instant loses against it.
        await self._session.control.write(_LEAVE, self._session.clock.now_us(), worker)

    async def workers(self) -> Sequence[str]:
        return [name for (name,) in await self._session.control.read(_WORKERS)]
