"""Keep bounds and holds in SQLite: adds are decided one after the other, in the transaction that
writes them.

The count that decides is that of an accurate read: checkpoint, pending recounts, and the tail, with
all that this transaction has written before. The live tail has the sums of what is committed; what
it does not have, such as a tail with a clear, is read from the log. What is held is a count, too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from counter.bounds import NO_BOUNDS, Bounds, Refusal, bounds_of, is_refusal, refusal, refused_atom
from counter.errors import UnavailableError, invariant
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
from counter.limits import INT64_MAX, SECOND
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.event_rows import (
    find_events,
    fold_spans,
    known_ids,
    latest_clears,
    log_tables,
    number_of_events,
)
from counter.storage.sqlite.live import LiveTail
from counter.storage.sqlite.rollups import open_time, select_heads
from counter.storage.sqlite.schema import one_json, to_json
from counter.storage.sqlite.window_rows import read_rows
from counter.types import Event, Fold, Head, Namespace, Span, Token, WindowRow, Written
from counter.windows import apply_fold, fold_rows, shard_of, slice_of

#: The most events of the log, of all counters, that a transaction reads to decide adds: the other
#: writes wait for it.
_LOG_EVENTS_MAX: Final = 1_000_000

#: Writes events that are new; returns the outcome of each.
Insert = Callable[[sqlite3.Connection, Namespace, Sequence[Event]], Sequence[Written]]


@dataclass(slots=True)
class _Count:
    """A count as this transaction sees it. Adds up to *erased_us* change nothing."""

    #: None after a clear that is not written yet: it must be read from the log.
    count: int | None
    erased_us: int = -1
    #: Times and deltas of what is accepted, but not written yet.
    accepted: list[tuple[int, int]] = field(default_factory=list)
    #: What open holds reserve upwards and downwards.
    held: dict[bool, int] = field(default_factory=dict)

    def held_beside(self, delta: int) -> int:
        """Return what the open holds that go the way of *delta* reserve."""
        return self.held.get(delta > 0, 0)

    def apply(self, event: Event) -> None:
        """Take in an accepted add, or a clear."""
        _, time_us, _, _, delta, is_clear, _ = event
        if time_us <= self.erased_us:
            return
        if is_clear:
            self.count, self.erased_us = None, time_us
        else:
            self.accepted.append((time_us, delta))
            self.count = None if self.count is None else self.count + delta


#: By counter; an error where a count cannot be read.
Counts = dict[str, _Count | UnavailableError]


class SqliteBounds:
    """Decides adds in a namespace with bounds, adds that have bounds, and holds. For the writer
    alone."""

    def __init__(self, database: SqliteDatabase, holds: SqliteHolds) -> None:
        self._db = database
        self._holds = holds
        #: What the transaction has written, the sums of it as far as they were needed, and how many
        #: events of the log it may still read.
        self._written: Sequence[tuple[Namespace, Sequence[Event]]] = ()
        self._summed = 0
        self._sums = LiveTail()
        self._left = 0
        #: How many expired holds the transaction may still end.
        self._ends_left = 0

    def counts(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        events: Sequence[Event],
        default: Bounds,
    ) -> Counts:
        """Return the counts that decide *events*; *default* are the bounds of the namespace."""
        all_are = default != NO_BOUNDS
        return self._counts(
            connection,
            namespace,
            {event[0] for event in events if (all_are or event[6] is not None) and not event[5]},
        )

    def decided(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        events: Sequence[Event],
        counts: Counts,
        default: Bounds,
        known: Sequence[Event | None],
    ) -> list[Event | UnavailableError]:
        """Return *events* as they are to be stored, each of a token of its own, and an error for
        each that cannot be decided. What is *known*, or comes twice, is not decided again. Only
        ends of expired holds are written."""
        all_are = default != NO_BOUNDS
        decided: list[Event | UnavailableError] = []
        seen: set[tuple[object, ...]] = set()
        for event, stored in zip(events, known, strict=True):
            count, found = counts.get(event.counter), event
            if stored is None and event[:4] not in seen and count is not None:
                try:
                    if not event.clear and (all_are or event.atom is not None):
                        found = self._decided(connection, namespace, event, count, default)
                    elif isinstance(count, _Count):
                        count.apply(event)
                except UnavailableError as error:
                    decided.append(error)
                    continue
                seen.add(event[:4])
            decided.append(found)
        return decided

    def _decided(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        event: Event,
        count: _Count | UnavailableError,
        default: Bounds,
    ) -> Event:
        """Return a new *event* as it is to be stored. Raises UnavailableError."""
        if isinstance(count, UnavailableError):
            raise count
        name, time_us, _, _, delta, _, atom = event
        if time_us <= count.erased_us:
            return event
        if count.count is None:
            spans = [(name, count.erased_us + 1, INT64_MAX)]
            [later] = self._folds(connection, namespace, spans)
            accepted = (each for at_us, each in count.accepted if at_us > count.erased_us)
            count.count = later.total + sum(accepted)
        if why := self._refusal(
            connection, namespace, name, delta, count, bounds_of(atom), default
        ):
            return _refused([event], why)[0]
        count.apply(event)
        return event

    def _refusal(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        name: str,
        delta: int,
        count: _Count,
        own: Bounds,
        default: Bounds,
    ) -> Refusal | None:
        """Return why an add, or a hold, of *delta* is refused. If there is no room, expired holds
        that go the same way are ended until there is. Raises UnavailableError if they are too many
        for one transaction."""

        def why() -> Refusal | None:
            return refusal(count.count or 0, delta, own, default, count.held_beside(delta))

        if (refused := why()) is None or not count.held_beside(delta):
            return refused
        for hold in self._holds.expired_of(connection, namespace, name, delta):
            if not self._ends_left:
                raise UnavailableError(
                    f"more than {ENDED_AT_ONCE_MAX} holds of counter {name!r} have expired, and"
                    " must be ended before it is known whether there is room; nothing was written:"
                    " send it again",
                    retry_after_us=SECOND,
                )
            self._ends_left -= 1
            self._holds.write_end(connection, namespace, hold, Ending.EXPIRED)
            count.held[delta > 0] -= hold.amount
            if (refused := why()) is None:
                break
        return refused

    def decided_hold(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Event]:
        """Return the *events* of a hold, which is not known, as they are to be stored. Only ends of
        expired holds are written. Raises UnavailableError."""
        default = self._db.bounds(connection).get(namespace.id, NO_BOUNDS)
        hold, amount, _, own = request_of(events)
        count = self._counts(connection, namespace, {hold.counter})[hold.counter]
        if isinstance(count, UnavailableError):
            raise count
        name = hold.counter
        if why := self._refusal(connection, namespace, name, amount, count, own, default):
            # The held counter comes first in the order of counters.
            return _refused(events, why._replace(item=1))
        return events

    def decided_atomic(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> Sequence[Event]:
        """Return the *events* of one token, which is not known, as they are to be stored: refused,
        if the sum of those of any counter is. Only ends of expired holds are written. Raises
        UnavailableError."""
        default = self._db.bounds(connection).get(namespace.id, NO_BOUNDS)
        counts = self._counts(connection, namespace, {each.counter for each in events})
        sums: dict[str, tuple[int, Bounds, int]] = {}
        in_order = sorted(events, key=lambda each: (each.counter, each.item_key))
        for place, event in enumerate(in_order):
            total, own, first = sums.get(event.counter, (0, NO_BOUNDS, place))
            own = own.tightest(bounds_of(event.atom))
            sums[event.counter] = (total + event.delta, own, first)
        for name, (delta, own, first) in sums.items():
            count = counts[name]
            if isinstance(count, UnavailableError):
                raise count
            if events[0].event_time_us <= count.erased_us or count.count is None:
                continue
            if why := self._refusal(connection, namespace, name, delta, count, own, default):
                return _refused(events, why._replace(item=first))
        return events

    def _counts(
        self, connection: sqlite3.Connection, namespace: Namespace, names: Collection[str]
    ) -> Counts:
        """Return the counts of *names* with all that this transaction has written, and what is held
        of them; or why they cannot be read."""
        found = self._without_held(connection, namespace, names)
        self._add_held(connection, namespace, found)
        return found

    def _without_held(
        self, connection: sqlite3.Connection, namespace: Namespace, names: Collection[str]
    ) -> Counts:
        """Return counts without what is held of them."""
        size_us, shards = namespace.settings.rollup_window_us, namespace.settings.shards
        watermarks = self._db.watermarks[namespace.id]
        sums = self._written_sums(namespace.id)
        ids = self._db.ids.of(namespace.id)
        heads = select_heads(connection, namespace.id, {name: ids.get(name) for name in names})
        found: Counts = {}
        after: list[tuple[str, int]] = []
        rolled_up: dict[str, int] = {}
        for name in names:
            as_of_us, count = watermarks[shard_of(name, shards)], 0
            if (head := heads.get(name)) is not None:
                as_of_us = max(as_of_us, head.checkpoint.time_us)
                count = head.checkpoint.count
                if head.pending:
                    try:
                        count = self._recounted(connection, namespace, name, head, as_of_us)
                    except UnavailableError as error:
                        found[name] = error
                        continue
            rolled_up[name] = count
            after.append((name, as_of_us))
        not_held: list[tuple[str, int]] = []
        for each, held, written in zip(
            after,
            _tails_of(self._db.live, namespace.id, size_us, after),
            _tails_of(sums, namespace.id, size_us, after),
            strict=True,
        ):
            if held is None or written is None:
                not_held.append(each)
            else:
                found[each[0]] = _Count(rolled_up[each[0]] + held.total + written.total)
        try:
            found |= self._read_log(connection, namespace, not_held, rolled_up)
        except UnavailableError as error:
            found |= dict.fromkeys((name for name, _ in not_held), error)
        return found

    def _add_held(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        found: Counts,
    ) -> None:
        """Add what is held to the counts that were *found*."""
        holding = self._holds.holding(connection, namespace, found)
        of = {held_name(name, way): (name, way > 0) for name in holding for way in (1, -1)}
        sums = self._without_held(connection, namespace, of) if of else {}
        for held, (name, is_up) in of.items():
            count, total = found[name], sums[held]
            if isinstance(total, UnavailableError):
                found[name] = total
            elif isinstance(count, _Count):
                count.held[is_up] = total.count or 0

    def _written_sums(self, namespace_id: int) -> LiveTail:
        """Return the sums of what this transaction has written."""
        written = self._db.live.written
        if written is not self._written:
            self._written, self._summed, self._sums = written, 0, LiveTail()
            self._left, self._ends_left = _LOG_EVENTS_MAX, ENDED_AT_ONCE_MAX
        for namespace, events in written[self._summed :]:
            self._sums.add(namespace.id, namespace.settings.rollup_window_us, events)
        self._summed = len(written)
        self._sums.begin(namespace_id, 0)
        return self._sums

    def _read_log(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        after: Sequence[tuple[str, int]],
        rolled_up: Mapping[str, int],
    ) -> dict[str, _Count]:
        """Return counts with their tails from the log, which has what this transaction has written.
        Raises UnavailableError."""
        if not after:
            return {}
        tails = self._folds(
            connection, namespace, [(name, after_us + 1, INT64_MAX) for name, after_us in after]
        )
        found = {
            name: _Count(apply_fold(rolled_up[name], tail))
            for (name, _), tail in zip(after, tails, strict=True)
        }
        cleared = [name for (name, _), tail in zip(after, tails, strict=True) if tail.cleared]
        first_us = min(after_us for _, after_us in after) + 1
        for name, time_us in latest_clears(self._db, connection, namespace, cleared, first_us):
            found[name].erased_us = max(found[name].erased_us, time_us)
        return found

    def _recounted(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        name: str,
        head: Head,
        as_of_us: int,
    ) -> int:
        """Return the count of a counter up to *as_of_us*, with its pending recounts done. Raises
        UnavailableError."""
        dropped_us, settled = self._db.dropped_before[namespace.dataset.id], head.settled
        [rows] = read_rows(connection, namespace.id, [name], Span(0, as_of_us + 1))
        merged = {each.window_us: each for each in rows if each.window_us > settled.time_us}
        size_us = namespace.settings.rollup_window_us
        for at_us in head.recounts(as_of_us, dropped_us):
            spans = [(name, at_us, at_us + size_us - 1)]
            [fold] = self._folds(connection, namespace, spans)
            merged[at_us] = WindowRow(at_us, fold.cleared, fold.total)
        return fold_rows(settled.count, [merged[at_us] for at_us in sorted(merged)])

    def _folds(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        spans: Sequence[tuple[str, int, int]],
    ) -> Sequence[Fold]:
        """Return the folds of (counter, first, last) spans from the log. Raises UnavailableError if
        the transaction would have read too many events then."""
        first_us, last_us = min(each[1] for each in spans), max(each[2] for each in spans)
        tables = log_tables(self._db, namespace, first_us, last_us)
        self._left -= number_of_events(connection, tables, (first_us, last_us), self._left + 1)
        if self._left < 0:
            raise UnavailableError(
                "bounded adds to counters that were just cleared, or corrected, had to read more"
                f" than {_LOG_EVENTS_MAX} events of the log in one transaction; nothing was"
                " written: send it again when the rollup has caught up",
                retry_after_us=SECOND,
            )
        [folds] = fold_spans(self._db, connection, [(namespace, spans)])
        return list(folds)


def have_room(events: Sequence[Event], counts: Counts, default: Bounds) -> bool:
    """Return whether *events*, if they all are new, are adds that are accepted in any order."""
    sums: dict[tuple[str, bool], int] = {}
    for name, _, _, _, delta, is_clear, _ in events:
        if is_clear or isinstance(counts.get(name), UnavailableError):
            return False
        sums[name, delta > 0] = sums.get((name, delta > 0), 0) + delta
    for name, _, _, _, delta, _, atom in events:
        count = counts.get(name)
        if isinstance(count, _Count):
            others = (count.count or 0) + sums[name, delta > 0] - delta
            if refusal(others, delta, bounds_of(atom), default, count.held_beside(delta)):
                return False
    return True


def _refused(events: Sequence[Event], why: Refusal) -> list[Event]:
    """Return *events* as they are stored if they are refused."""
    return [
        each._replace(delta=0, atom=refused_atom(each.delta, each.atom, why)) for each in events
    ]


def _tails_of(
    tail: LiveTail, namespace_id: int, size_us: int, after: Sequence[tuple[str, int]]
) -> Sequence[Fold | None]:
    """Return the tail of each counter; None for one that is not held."""
    folds = tail.tails(namespace_id, size_us, after)
    if folds is not None:
        return folds
    each_alone = (tail.tails(namespace_id, size_us, (each,)) for each in after)
    return [None if alone is None else alone[0] for alone in each_alone]


class SqliteHolds:
    """See :class:`counter.capabilities.HoldStore`."""

    def __init__(self, database: SqliteDatabase, insert: Insert) -> None:
        self._db = database
        self._insert = insert

    def may_hold(self, namespace: Namespace) -> bool:
        return namespace.id in self._db.holding

    async def find(self, namespace: Namespace, hold: HoldId) -> Hold | None:
        return await self._db.read(lambda connection: self.found(connection, namespace, hold))

    async def end(
        self, namespace: Namespace, hold: HoldId, how: Ending, amount: int = 0
    ) -> Hold | None:
        return await self._db.write(
            lambda connection: self.ended(connection, namespace, hold, how, amount)
        )

    async def extend(
        self, namespace: Namespace, hold: HoldId, lasts_us: int, latest_us: int
    ) -> Hold | None:
        def change(connection: sqlite3.Connection) -> Hold | None:
            found = self.ended(connection, namespace, hold, Ending.EXPIRED)
            if found is None or found.expires_us is None:
                return found
            wanted_us = min(self._now_us() + lasts_us, latest_us)
            expires_us = max(found.expires_us, wanted_us)
            connection.execute(
                "UPDATE holds SET expires = ? WHERE counter = ? AND time = ? AND nonce = ?",
                (expires_us, *self._key(connection, namespace, hold)),
            )
            return found._replace(expires_us=expires_us)

        return await self._db.write(change)

    async def open(
        self, namespace: Namespace, counter: str, after: Place, limit: int
    ) -> Sequence[Hold]:
        def query(connection: sqlite3.Connection) -> list[Hold]:
            return _select_holds(
                connection, namespace, counter, "(expires, time, nonce) > (?, ?, ?)", after, limit
            )

        return await self._db.read(query)

    async def expired(self, limit: int) -> Sequence[tuple[int, str]]:
        sql = (
            "SELECT DISTINCT namespace, name FROM (SELECT c.namespace, c.name FROM holds h"
            " CROSS JOIN counters c ON c.id = h.counter CROSS JOIN namespaces n"
            " ON n.id = c.namespace WHERE h.expires <= ? AND n.name IS NOT NULL"
            " ORDER BY h.expires LIMIT ?)"
        )
        return await self._db.read(
            lambda connection: connection.execute(sql, (self._now_us(), limit)).fetchall()
        )

    async def expire(self, namespace: Namespace, counter: str) -> int:
        def change(connection: sqlite3.Connection) -> int:
            most, now_us = ENDED_AT_ONCE_MAX, (self._now_us(),)
            due = _select_holds(connection, namespace, counter, "expires <= ?", now_us, most)
            for each in due:
                self.write_end(connection, namespace, each, Ending.EXPIRED)
            return len(due)

        return await self._db.write(change)

    def _now_us(self) -> int:
        return max(self._db.clock.now_us(), self._db.fenced_us)

    def _key(
        self, connection: sqlite3.Connection, namespace: Namespace, hold: HoldId
    ) -> tuple[int, int, bytes]:
        """Return the key of a hold in the index of open ones."""
        ids = known_ids(self._db, connection, namespace.id, [hold.counter])
        return ids[hold.counter], hold.token.generation_time_us, hold.token.nonce

    def found(
        self, connection: sqlite3.Connection, namespace: Namespace, hold: HoldId
    ) -> Hold | None:
        """Return a hold as this transaction sees it."""
        [stored] = find_events(self._db, connection, namespace, [first_event(hold)])
        if stored is None:
            return None
        # Before the reservation of its end, which is made when this row is deleted: a read may not
        # be of one moment.
        expires_us = connection.execute(
            "SELECT expires FROM holds WHERE counter = ? AND time = ? AND nonce = ?",
            self._key(connection, namespace, hold),
        ).fetchone()
        ended_us = connection.execute(
            "SELECT time FROM reservations WHERE namespace = ? AND nonce = ?",
            (namespace.id, nonce_of_end(hold)),
        ).fetchone()
        if ended_us is not None:
            [ended] = find_events(self._db, connection, namespace, [end_event(hold, *ended_us)])
            invariant(ended is not None, "the end of a hold has no events")
            return hold_of(stored, None, ended)
        return hold_of(stored, expires_us and expires_us[0], None)

    def ended(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        hold: HoldId,
        how: Ending,
        amount: int = 0,
    ) -> Hold | None:
        """End a hold if it is open, as the port says; return it as it is then."""
        found = self.found(connection, namespace, hold)
        if found is None or found.expires_us is None or not found.takes(amount):
            return found
        if self._now_us() >= found.expires_us:
            how, amount = Ending.EXPIRED, 0
        elif how is Ending.EXPIRED:
            return found
        return self.write_end(connection, namespace, found, how, amount)

    def write_end(
        self,
        connection: sqlite3.Connection,
        namespace: Namespace,
        hold: Hold,
        how: Ending,
        amount: int = 0,
    ) -> Hold:
        """End a hold that is open; return it."""
        begun_us = hold.id.token.generation_time_us
        last_us = slice_of(self._db.slices[namespace.dataset.id], begun_us).end_us
        end = End(how, amount, open_time(self._db, connection, namespace, begun_us))
        events = events_of_end(hold.id, hold.amount, end)
        written = self._insert(connection, namespace, events)
        invariant({*written} == {Written.NEW}, "the end of an open hold exists")
        connection.execute(
            "DELETE FROM holds WHERE counter = ? AND time = ? AND nonce = ?",
            self._key(connection, namespace, hold.id),
        )
        # It must not be found open while its events are kept.
        expires_us = last_us + 2 * namespace.dataset.retention_us
        connection.execute(
            "INSERT INTO reservations VALUES (?, ?, ?, ?)",
            (namespace.id, nonce_of_end(hold.id), end.time_us, expires_us),
        )
        return hold._replace(expires_us=None, end=end)

    def begin(
        self, connection: sqlite3.Connection, namespace: Namespace, events: Sequence[Event]
    ) -> None:
        """List a hold, whose *events* are written, as open, unless it was refused."""
        if is_refusal(events[0].atom):
            return
        hold, amount, lasts_us, _ = request_of(events)
        connection.execute(
            "INSERT INTO holds VALUES (?, ?, ?, ?, ?)",
            (*self._key(connection, namespace, hold), amount, self._now_us() + lasts_us),
        )
        self._db.holding.add(namespace.id)

    def holding(
        self, connection: sqlite3.Connection, namespace: Namespace, names: Collection[str]
    ) -> Sequence[str]:
        """Return those of *names* that have open holds."""
        if namespace.id not in self._db.holding:
            return ()
        sql = (
            "SELECT json_group_array(c.name) FROM json_each(?) j CROSS JOIN counters c"
            " ON c.namespace = ? AND c.name = j.value"
            " WHERE EXISTS (SELECT 1 FROM holds h WHERE h.counter = c.id)"
        )
        found: list[str] = one_json(connection, sql, (to_json(names), namespace.id))
        return found

    def expired_of(
        self, connection: sqlite3.Connection, namespace: Namespace, name: str, way: int
    ) -> Sequence[Hold]:
        """Return the expired holds of a counter that are open and go the way of *way*, earliest
        first: one more than may be ended at once, if there are so many."""
        where = f"expires <= ? AND amount {'>' if way > 0 else '<'} 0"
        most = ENDED_AT_ONCE_MAX + 1
        return _select_holds(connection, namespace, name, where, (self._now_us(),), most)


def _select_holds(
    connection: sqlite3.Connection,
    namespace: Namespace,
    name: str,
    where: str,
    values: tuple[Any, ...],
    limit: int,
) -> list[Hold]:
    rows = connection.execute(
        "SELECT nonce, time, amount, expires FROM holds WHERE counter ="
        f" (SELECT id FROM counters WHERE namespace = ? AND name = ?) AND {where}"
        " ORDER BY expires, time, nonce LIMIT ?",
        (namespace.id, name, *values, limit),
    )
    return [
        Hold(HoldId(name, Token(nonce, time_us)), amount, expires_us)
        for nonce, time_us, amount, expires_us in rows
    ]
