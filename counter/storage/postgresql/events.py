"""Store the event log in PostgreSQL: a partition per slice; marks of recounts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, cast

import asyncpg

from counter.bounds import NO_BOUNDS, bounds_of, payload_of
from counter.errors import SliceMissingError, UnavailableError
from counter.holds import ENDED_AT_ONCE_MAX, is_hold
from counter.limits import PENDING_WRITES_MAX, SECOND
from counter.metrics import StoreTally
from counter.ports import Counted
from counter.storage.postgresql.database import PostgresqlDatabase, missing, within
from counter.storage.postgresql.holds import PostgresqlHolds
from counter.storage.shared.batching import LINGER_S, Batch, Batcher
from counter.types import Event, EventPage, Fold, Namespace, Span, Written
from counter.windows import shard_of

_OUTCOMES: Final = (
    *(Written.NEW, Written.REPLAYED, Written.CONFLICT, Written.LATE),
    Written.BOUND_REACHED,
)
#: The outcome of an event that could not be decided.
_UNDECIDED: Final = 5
#: An item of an atomic add is stored with another payload; the namespace has bounds.
_ITEM_CONFLICT: Final = "CN003"
_HAS_BOUNDS: Final = "CN004"
_KNOWN_MAX: Final = 100_000
#: A batch of appends has as many events, or one put if that has more.
_EVENTS_MAX: Final = 1_000
#: A batch that takes longer holds back no other. About two commits of a disk.
_PATIENCE_S: Final = 0.01
#: Connections that no append uses.
_CONNECTIONS_KEPT: Final = 2
_ATOM: Final = itemgetter(6)
_LAST: Final = 2**63 - 1
#: The fold of a counter's events in a span: what follows its last clear, which has its own index.
#: The bounds of all spans, $5 and $6, keep the planner from opening every partition.
_FOLD: Final = (
    " LEFT JOIN LATERAL (SELECT max(e.event_time) AS at FROM {s}.events e WHERE e.dataset = $1"
    " AND e.namespace = $2 AND e.counter = k.counter AND e.event_time BETWEEN k.first AND k.last"
    " AND e.event_time BETWEEN $5 AND $6 AND e.clear) c ON true"
    " CROSS JOIN LATERAL (SELECT sum(e.delta) AS total FROM {s}.events e WHERE e.dataset = $1"
    " AND e.namespace = $2 AND e.counter = k.counter AND e.event_time BETWEEN $5 AND $6"
    " AND e.event_time BETWEEN coalesce(c.at + 1, k.first) AND k.last) t"
)
_TAILS: Final = (
    "SELECT c.at IS NOT NULL, t.total, d.dropped_before > k.first"
    " FROM unnest($3::text[], $4::bigint[]) WITH ORDINALITY k (counter, first, place)"
    " CROSS JOIN {s}.datasets d" + _FOLD.replace("k.last", "$6")
    + " WHERE d.id = $1 ORDER BY k.place"
)  # fmt: skip
_SUMS: Final = (
    "SELECT c.at IS NOT NULL, t.total, NOT EXISTS (SELECT FROM {s}.slices s WHERE s.dataset = $1"
    " AND s.start <= k.first AND s.until > k.first)"
    " FROM unnest($3::text[], $4::bigint[], $7::bigint[])"
    " WITH ORDINALITY k (counter, first, last, place)" + _FOLD + " ORDER BY k.place"
)
_WINDOWS: Final = (
    "SELECT w.counter, w.start, max(w.clear_at) IS NOT NULL AS cleared,"
    " coalesce(sum(w.delta) FILTER (WHERE w.clear_at IS NULL OR w.event_time > w.clear_at), 0)"
    " FROM (SELECT e.counter, e.event_time, e.event_time - e.event_time % $6 AS start, e.delta,"
    " max(e.event_time) FILTER (WHERE e.clear) OVER (PARTITION BY e.counter,"
    " e.event_time - e.event_time % $6) AS clear_at"
    " FROM {s}.events e WHERE e.dataset = $1 AND e.namespace = $2 AND e.counter = ANY($3::text[])"
    " AND e.event_time >= $4 AND e.event_time < $5) w GROUP BY w.counter, w.start"
)
_FIND: Final = (
    "SELECT e.event_id IS NOT NULL, e.delta, e.clear, e.atom, EXISTS (SELECT FROM {s}.slices s"
    " WHERE s.dataset = $1 AND s.start <= k.time AND s.until > k.time),"
    " CASE WHEN e.event_id IS NOT NULL THEN {s}.wait_as_a_write() END"
    " FROM unnest($3::text[], $4::bigint[], $5::bytea[], $6::integer[])"
    " WITH ORDINALITY k (counter, time, id, item, place)"
    " LEFT JOIN LATERAL (SELECT * FROM {s}.events e WHERE e.dataset = $1 AND e.namespace = $2"
    " AND e.counter = k.counter AND e.event_time = k.time AND e.event_id = k.id"
    " AND e.item = k.item AND e.event_time BETWEEN $7 AND $8) e ON true ORDER BY k.place"
)
_SCAN: Final = (
    "SELECT event_time, event_id, item, delta, clear, atom FROM {s}.events WHERE dataset = $1"
    " AND namespace = $2 AND counter = $3 AND event_time >= $4 AND event_time < $5"
    " AND ($6::bigint IS NULL OR event_time < $6 OR (event_time = $6 AND (event_id, item)"
    " > ($7::bytea, $8::integer))) ORDER BY event_time DESC, event_id, item LIMIT $9"
)
_BUSIEST: Final = (
    "SELECT counter, count(*) AS n FROM {s}.events WHERE dataset = $1 AND namespace = $2"
    # No headers of atomic adds, and no held counters.
    " AND event_time >= $3 AND event_time < $4 AND item >= 0 AND counter > pg_catalog.chr(2)"
    " GROUP BY counter ORDER BY n DESC, counter LIMIT $5"
)
_BUSIEST_FROM: Final = (
    "SELECT event_time + 1 FROM {s}.events WHERE dataset = $1 AND event_time >= $2"
    " AND event_time < $3 ORDER BY event_time DESC LIMIT 1 OFFSET $4"
)


#: One namespace: the dataset's id, its own, its shards; how long a write may take; and whether
#: bounds are looked at, which adds without any need not wait for.
_Key = tuple[int, int, int, int, bool]
_Appends = Batch[_Key, Event, Written | Exception]


class _Batcher(Batcher[_Key, Event, Written | Exception]):
    def is_serial(self, key: _Key) -> bool:
        """Batches of bounded adds: nearly each needs a lock of the one before."""
        return key[-1]


class PostgresqlEvents:
    """See :class:`counter.ports.EventStore`. The append itself checks age and decisions.

    Events that are put together share a transaction, and the next ones gather meanwhile.
    """

    def __init__(
        self, database: PostgresqlDatabase, tally: StoreTally, holds: PostgresqlHolds
    ) -> None:
        self._database = database
        self._holds = holds
        self._tally = tally
        #: The shards of counters that are known to exist, by namespace; forgetting is safe.
        self._known: dict[int, dict[str, int]] = {}
        self._appending: set[asyncio.Task[None]] = set()
        self._appends = _Batcher(
            self._begin_appends,
            name="PostgreSQL",
            items_max=_EVENTS_MAX,
            waiting_max=PENDING_WRITES_MAX,
            # The rest of the connections is for reads.
            at_once=max(1, database.options.connections_max - _CONNECTIONS_KEPT),
            patience_s=_PATIENCE_S,
            linger_s=LINGER_S,
        )

    @property
    def waiting(self) -> int:
        """The number of events that wait for a connection, or for the batch before theirs."""
        return self._appends.waiting

    async def close(self) -> None:
        """Wait for the appends that are under way."""
        await self._appends.close()

    async def append(
        self, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        if not events:
            return ()
        dataset, timeout_us = namespace.dataset.id, namespace.dataset.write_timeout_us
        keeps_bounds = namespace.settings.bounds != NO_BOUNDS or any(map(_ATOM, events))
        key = (dataset, namespace.id, namespace.settings.shards, timeout_us, keeps_bounds)
        async with within(timeout_us):
            outcomes = await self._appends.put(key, events)
        if isinstance(outcomes[0], Exception) and outcomes.count(outcomes[0]) == len(outcomes):
            raise outcomes[0]
        return cast("Sequence[Written | UnavailableError]", outcomes)

    def _begin_appends(self, batches: Sequence[_Appends]) -> None:
        for batch in batches:
            task = asyncio.get_running_loop().create_task(self._append(batch))
            self._appending.add(task)
            task.add_done_callback(self._appending.discard)

    async def _append(self, batch: _Appends) -> None:
        began_s = time.perf_counter()
        outcomes = await self._append_parts(batch.key, batch.parts)
        took_s = time.perf_counter() - began_s
        self._tally.commit_rows.observe(len(outcomes))
        self._tally.commit_seconds.observe(took_s)
        failed = sum(isinstance(each, UnavailableError) for each in outcomes)
        self._tally.calls["write"].ended(took_s, failed)
        batch.end(outcomes)

    async def _append_parts(
        self, key: _Key, parts: Sequence[Sequence[Event]]
    ) -> Sequence[Written | Exception]:
        """Write *parts*, each of them on its own if a slice is missing; return an outcome, or an
        error, for each event."""
        events = [event for part in parts for event in part]
        try:
            return await self._append_events(key, events)
        except SliceMissingError as error:
            # One event may be the cause, and nothing is written.
            if len(parts) == 1:
                return [error] * len(events)
        except Exception as error:
            return [error] * len(events)
        half = len(parts) // 2
        return [
            *await self._append_parts(key, parts[:half]),
            *await self._append_parts(key, parts[half:]),
        ]

    async def _append_events(
        self, key: _Key, events: Sequence[Event]
    ) -> Sequence[Written | Exception]:
        try:
            return await self._append_as_known(key, events)
        except UnavailableError as error:
            if not _has_state(error, _HAS_BOUNDS):
                raise
        # This process does not know it yet.
        return await self._append_as_known((*key[:4], True), events)

    async def _append_as_known(
        self, key: _Key, events: Sequence[Event]
    ) -> Sequence[Written | Exception]:
        dataset, namespace, shards, timeout_us, keeps_bounds = key
        known = self._known.get(namespace, {})
        counters, times, ids, items, deltas, clears, atoms = zip(*events, strict=True)
        new = {name: shard_of(name, shards) for name in set(counters).difference(known)}
        async with within(timeout_us):
            outcomes = await self._database.value(
                "SELECT {s}.append($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
                dataset,
                namespace,
                list(new),
                counters,
                times,
                ids,
                items,
                # The payload of a clear does not include its delta.
                [0 if clear else delta for delta, clear in zip(deltas, clears, strict=True)],
                [known[name] if name in known else new[name] for name in counters],
                clears,
                atoms,
                keeps_bounds,
            )
        if outcomes is None:
            if new:
                self._learn(namespace, new)
            return [Written.NEW] * len(events)
        if _UNDECIDED not in outcomes:
            return [_OUTCOMES[each] for each in outcomes]
        error = _undecided()
        return [error if each == _UNDECIDED else _OUTCOMES[each] for each in outcomes]

    async def append_atomic(self, namespace: Namespace, events: Sequence[Event]) -> Written:
        keeps_bounds = namespace.settings.bounds != NO_BOUNDS or any(
            bounds_of(each.atom) != NO_BOUNDS for each in events
        )
        async with within(namespace.dataset.write_timeout_us):
            try:
                return await self._append_atomic(namespace, events, keeps_bounds)
            except UnavailableError as error:
                if _has_state(error, _HAS_BOUNDS):
                    return await self._append_atomic(namespace, events, keeps_bounds=True)
                if not _has_state(error, _ITEM_CONFLICT):
                    raise
                # The transaction was undone, so its commit waited for no standby.
                await self._database.confirm()
                return Written.CONFLICT

    async def _append_atomic(
        self, namespace: Namespace, events: Sequence[Event], keeps_bounds: bool
    ) -> Written:
        if is_hold(events):
            outcome = await self._holds.begin(namespace, events)
        else:
            counters, times, ids, items, deltas, _, atoms = zip(*events, strict=True)
            outcome = await self._database.value(
                "SELECT {s}.append_atomic($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
                namespace.dataset.id,
                namespace.id,
                *(counters, times, ids, items, deltas),
                self._shards(namespace, counters),
                payload_of(0, atoms[0]),
                atoms if keeps_bounds else None,
            )
        if outcome == _UNDECIDED:
            raise _undecided()
        return _OUTCOMES[outcome]

    async def find(self, namespace: Namespace, events: Sequence[Event]) -> Sequence[Event | None]:
        times = [event.event_time_us for event in events]
        rows = await self._database.rows(
            _FIND,
            namespace.dataset.id,
            namespace.id,
            [event.counter for event in events],
            times,
            [event.event_id for event in events],
            [event.item_key for event in events],
            *(min(times, default=0), max(times, default=0)),
        )
        for event, row in zip(events, rows, strict=True):
            if not row[4]:
                raise missing(event.event_time_us)
        return [
            event._replace(delta=row[1], clear=row[2], atom=row[3]) if row[0] else None
            for event, row in zip(events, rows, strict=True)
        ]

    async def sums(
        self,
        namespace: Namespace,
        windows: Sequence[tuple[str, int]],
        *,
        counted: Counted | None = None,
    ) -> Sequence[Fold]:
        size_us = namespace.settings.rollup_window_us
        starts = [start_us for _, start_us in windows]
        rows = await self._database.rows(
            _SUMS,
            namespace.dataset.id,
            namespace.id,
            [name for name, _ in windows],
            starts,
            *(min(starts, default=0), max(starts, default=0) + size_us - 1),
            [start_us + size_us - 1 for start_us in starts],
        )
        for (_, start_us), row in zip(windows, rows, strict=True):
            if row[2]:
                raise missing(start_us)
        return [Fold(row[0], int(row[1] or 0)) for row in rows]

    async def window_folds(
        self, namespace: Namespace, counters: Sequence[str], span: Span
    ) -> Sequence[Mapping[int, Fold]]:
        found: dict[str, dict[int, Fold]] = {name: {} for name in counters}
        for name, start_us, cleared, total in await self._database.rows(
            _WINDOWS,
            namespace.dataset.id,
            namespace.id,
            list(found),
            *span,
            namespace.settings.rollup_window_us,
        ):
            found[name][start_us] = Fold(cleared, int(total))
        # Last: a slice that is dropped before or meanwhile has no rows left to find.
        await self._check_dropped(namespace, span.from_us)
        return [found[name] for name in counters]

    async def tails(
        self, namespace: Namespace, after: Sequence[tuple[str, int]], until_us: int | None = None
    ) -> Sequence[Fold]:
        """Return all tails as of one moment: one statement reads them."""
        firsts = [after_us + 1 for _, after_us in after]
        rows = await self._database.rows(
            _TAILS,
            namespace.dataset.id,
            namespace.id,
            [name for name, _ in after],
            firsts,
            *(min(firsts, default=0), _LAST),
        )
        for (_, after_us), row in zip(after, rows, strict=True):
            if row[2]:
                raise _dropped(after_us + 1)
        return [Fold(row[0], int(row[1] or 0)) for row in rows]

    async def scan(self, namespace: Namespace, counter: str, page: EventPage) -> Sequence[Event]:
        key = (None, None, None) if page.before is None else page.before[1:4]
        rows = await self._database.rows(
            _SCAN, namespace.dataset.id, namespace.id, counter, *page.span, *key, page.limit
        )
        return [Event(counter, *row) for row in rows]

    async def busiest(
        self, namespace: Namespace, span: Span, limit: int, events_max: int
    ) -> tuple[int, Sequence[tuple[str, int]]]:
        """See :class:`counter.capabilities.CountEvents`."""
        dataset, (from_us, to_us) = namespace.dataset.id, span
        cut = await self._database.value(_BUSIEST_FROM, dataset, from_us, to_us, events_max)
        from_us = from_us if cut is None else min(to_us, cut)
        rows = await self._database.rows(_BUSIEST, dataset, namespace.id, from_us, to_us, limit)
        return from_us, [(name, events) for name, events in rows]

    async def _check_dropped(self, namespace: Namespace, from_us: int) -> None:
        dropped_us = await self._database.value(
            "SELECT dropped_before FROM {s}.datasets WHERE id = $1", namespace.dataset.id
        )
        if from_us < dropped_us:
            raise _dropped(from_us)

    def _shards(self, namespace: Namespace, counters: Sequence[str]) -> list[int]:
        shards = namespace.settings.shards
        if shards == 1:
            return [0] * len(counters)
        return [shard_of(name, shards) for name in counters]

    def forget(self, namespace: int, counter: str) -> None:
        """Forget that *counter* is listed, so the next append lists it."""
        self._known.get(namespace, {}).pop(counter, None)

    def _learn(self, namespace: int, new: Mapping[str, int]) -> None:
        if sum(map(len, self._known.values())) + len(new) > _KNOWN_MAX:
            self._known.clear()
        self._known.setdefault(namespace, {}).update(new)


def _has_state(error: UnavailableError, state: str) -> bool:
    cause = error.__cause__
    return isinstance(cause, asyncpg.PostgresError) and cause.sqlstate == state


def _undecided() -> UnavailableError:
    return UnavailableError(
        f"more than {ENDED_AT_ONCE_MAX} holds have expired, and must be ended before it is known"
        " whether there is room; nothing was written: send it again",
        retry_after_us=SECOND,
    )


def _dropped(time_us: int) -> SliceMissingError:
    return SliceMissingError(
        f"the events at {time_us} µs were dropped with their slice", retry_after_us=1_000
    )


def token_of(namespace: Namespace, event: Event) -> tuple[Any, ...]:
    """Return the key of *event*'s token in ``resolutions``."""
    return namespace.id, event.event_time_us, event.event_id, event.scope
