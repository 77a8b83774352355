"""Keep holds in PostgreSQL: each call that changes one is one function, which takes the locks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

from counter.holds import (
    ENDED_AT_ONCE_MAX,
    End,
    Ending,
    Hold,
    HoldId,
    Place,
    end_event,
    events_of_end,
    first_event,
    held_name,
    hold_of,
    nonce_of_end,
    request_of,
)
from counter.storage.postgresql.database import PostgresqlDatabase, missing, within
from counter.types import Decision, Event, Namespace, Outcome, Token
from counter.windows import shard_of

_FIND: Final = (
    "SELECT f.*, CASE WHEN f.atom IS NOT NULL THEN {s}.wait_as_a_write() END"
    " FROM {s}.find_hold($1, $2, $3, $4, $5, $6) f"
)
_BEGIN: Final = "SELECT {s}.begin_hold($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
_END: Final = "SELECT expires, ended, has_expired FROM {s}.end_hold($1, $2, $3, $4, $5, $6, $7)"
_EXTEND: Final = (
    "SELECT expires, ended, has_expired FROM {s}.extend_hold($1, $2, $3, $4, $5, $6, $7)"
)
_CANCEL: Final = (
    "SELECT outcome, fingerprint FROM {s}.cancel_hold($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
)
_OPEN: Final = (
    "SELECT nonce, time, amount, expires FROM {s}.holds WHERE namespace = $1 AND counter = $2"
    " AND (expires, time, nonce) > ($3::bigint, $4::bigint, $5::bytea)"
    " ORDER BY expires, time, nonce LIMIT $6"
)
#: The latest clock of any dataset bounds what the index is asked for.
_EXPIRED: Final = (
    "SELECT DISTINCT namespace, counter FROM (SELECT h.namespace, h.counter FROM {s}.holds h"
    " JOIN {s}.namespaces n ON n.id = h.namespace JOIN {s}.datasets d ON d.id = n.dataset"
    " CROSS JOIN (SELECT {s}.clock_us() AS us OFFSET 0) now"
    " WHERE h.expires <= (SELECT pg_catalog.max({s}.hold_clock_us(id)) FROM {s}.datasets)"
    " AND h.expires <= greatest(now.us, d.fence) AND n.name IS NOT NULL"
    " ORDER BY h.expires LIMIT $1) due"
)


class PostgresqlHolds:
    """See :class:`counter.capabilities.HoldStore`."""

    def __init__(self, database: PostgresqlDatabase) -> None:
        self._database = database
        #: Of counters whose holds are being changed.
        self._locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    def may_hold(self, namespace: Namespace) -> bool:
        """Return True: another process may have begun a hold just now."""
        return True

    def _turn(self, namespace: Namespace, counter: str) -> asyncio.Lock:
        """Return the lock of a counter's holds in this process: a call that waited for the server's
        would keep a connection that others need."""
        return self._locks.setdefault((namespace.id, counter), asyncio.Lock())

    async def begin(self, namespace: Namespace, events: Sequence[Event]) -> int:
        """Write the *events* of a hold; return what became of them, as ``append_atomic`` does."""
        hold, amount, lasts_us, _ = request_of(events)
        shards = namespace.settings.shards
        names = (hold.counter, held_name(hold.counter, 1), held_name(hold.counter, -1))
        [expiry, _] = events_of_end(hold, amount, End(Ending.EXPIRED, 0, 0))
        async with self._turn(namespace, hold.counter):
            outcome: int = await self._database.value(
                _BEGIN,
                *(*_key(namespace, hold), amount, lasts_us),
                [shard_of(name, shards) for name in names],
                [each.atom for each in events],
                *(nonce_of_end(hold), expiry.atom),
            )
        return outcome

    async def find(self, namespace: Namespace, hold: HoldId) -> Hold | None:
        """Do as the port says; both events and the row are of one snapshot."""
        nonce = nonce_of_end(hold)
        row = await self._database.row(_FIND, *_key(namespace, hold), nonce)
        has_slice, delta, atom, expires_us, ended_us, settled, end_atom, _ = row
        if not has_slice:
            raise missing(hold.token.generation_time_us)
        if atom is None:
            return None
        ended = None
        if ended_us is not None:
            ended = end_event(hold, ended_us)._replace(delta=settled, atom=end_atom)
        return hold_of(first_event(hold)._replace(delta=delta, atom=atom), expires_us, ended)

    async def end(
        self, namespace: Namespace, hold: HoldId, how: Ending, amount: int = 0
    ) -> Hold | None:
        timeout_us = namespace.dataset.write_timeout_us
        async with within(timeout_us), self._turn(namespace, hold.counter):
            found = await self.find(namespace, hold)
            if found is None or found.expires_us is None or not found.takes(amount):
                return found
            wanted = End(how, amount, 0)
            atom = (
                None if how is Ending.EXPIRED else events_of_end(hold, found.amount, wanted)[0].atom
            )
            row = await self._database.row(_END, *_key(namespace, hold), amount, atom)
            return await self._changed(namespace, found, row, wanted)

    async def extend(
        self, namespace: Namespace, hold: HoldId, lasts_us: int, latest_us: int
    ) -> Hold | None:
        timeout_us = namespace.dataset.write_timeout_us
        async with within(timeout_us), self._turn(namespace, hold.counter):
            found = await self.find(namespace, hold)
            if found is None or found.expires_us is None:
                return found
            row = await self._database.row(_EXTEND, *_key(namespace, hold), lasts_us, latest_us)
            return await self._changed(namespace, found, row, None)

    async def open(
        self, namespace: Namespace, counter: str, after: Place, limit: int
    ) -> Sequence[Hold]:
        rows = await self._database.rows(_OPEN, namespace.id, counter, *after, limit)
        return [
            Hold(HoldId(counter, Token(nonce, time_us)), amount, expires_us)
            for nonce, time_us, amount, expires_us in rows
        ]

    async def expired(self, limit: int) -> Sequence[tuple[int, str]]:
        return [(each, name) for each, name in await self._database.rows(_EXPIRED, limit)]

    async def expire(self, namespace: Namespace, counter: str) -> int:
        async with within(namespace.dataset.write_timeout_us), self._turn(namespace, counter):
            ended: int = await self._database.value(
                "SELECT {s}.expire_holds($1, $2, $3, $4)",
                *(namespace.dataset.id, namespace.id, counter, ENDED_AT_ONCE_MAX),
            )
        return ended

    async def cancel(
        self, namespace: Namespace, events: Sequence[Event], decision: Decision
    ) -> Decision:
        """Cancel the token of a hold, which has *events*, as the decision store says."""
        hold, amount, _, _ = request_of(events)
        [released, _] = events_of_end(hold, amount, End(Ending.RELEASED, 0, 0))
        timeout_us = namespace.dataset.write_timeout_us
        async with within(timeout_us), self._turn(namespace, hold.counter):
            outcome, fingerprint = await self._database.row(
                _CANCEL,
                *(*_key(namespace, hold), held_name(hold.counter, amount), decision.fingerprint),
                *(released.atom, nonce_of_end(hold), namespace.settings.rollup_window_us),
            )
        return Decision(Outcome(outcome), fingerprint)

    async def _changed(
        self, namespace: Namespace, found: Hold, row: Any, wanted: End | None
    ) -> Hold | None:
        """Return a hold that was *found* open after a change of it that returned *row*."""
        expires_us, ended_us, has_expired = row
        if expires_us is None:
            # It has ended meanwhile.
            return await self.find(namespace, found.id)
        if ended_us is None:
            return found._replace(expires_us=expires_us)
        end = End(Ending.EXPIRED, 0, 0) if has_expired or wanted is None else wanted
        return found._replace(expires_us=None, end=end._replace(time_us=ended_us))


def _key(namespace: Namespace, hold: HoldId) -> tuple[Any, ...]:
    nonce, time_us = hold.token
    return namespace.dataset.id, namespace.id, hold.counter, time_us, nonce
