"""Bugs of holds: what decides, how one ends, and what is kept of it."""

from counter import bounds
from counter.core.holds import Holds
from counter.holds import Hold
from counter.storage.sqlite import control, rollups
from counter.storage.sqlite.bounds import SqliteBounds, SqliteHolds, _Count
from counter.storage.sqlite.control import SqliteControl
from counter.storage.sqlite.database import SqliteDatabase
from counter.storage.sqlite.decisions import SqliteDecisions
from counter.storage.sqlite.events import SqliteEvents
from rollup import maintenance
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit, Swap


async def _ends_nothing(*_: object) -> tuple[int, None]:
    return 0, None


_IS_ENDED = "if found is None or found.expires_us is None or not found.takes(amount):"
_EXPIRES = "if self._now_us() >= found.expires_us:"
_UNREADABLE = "if isinstance(count, UnavailableError):"

_DECIDING = (
    bug(
        "sqlite-all-holds-held",
        "a bound over SQLite counts what is held the other way, too",
        Edit(_Count.held_beside, "self.held.get(delta > 0, 0)", "sum(self.held.values())"),
    ),
    bug(
        "sqlite-add-without-held",
        "a bounded add over SQLite does not see what is held",
        Edit(
            SqliteBounds._decided,
            "if time_us <= count.erased_us:",
            "if count.held.clear() or time_us <= count.erased_us:",
        ),
    ),
    bug(
        "sqlite-atomic-add-without-held",
        "a bounded atomic add over SQLite does not see what is held",
        Edit(
            SqliteBounds.decided_atomic,
            _UNREADABLE,
            "if isinstance(count, UnavailableError) or count.held.clear():",
        ),
    ),
    bug(
        "sqlite-hold-without-held",
        "a hold over SQLite does not see what others hold",
        Edit(
            SqliteBounds.decided_hold,
            _UNREADABLE,
            "if isinstance(count, UnavailableError) or count.held.clear():",
        ),
    ),
    bug(
        "sqlite-clear-erases-held",
        "a clear over SQLite erases what is held",
        Edit(
            SqliteBounds._add_held,
            "total.count or 0",
            "0 if count.erased_us >= 0 else total.count or 0",
        ),
    ),
    bug(
        "sqlite-holds-forgotten-at-start",
        "SQLite does not know after a start which namespaces have holds",
        Edit(SqliteControl.load, "self._db.holding.update(", "set().update("),
    ),
    bug(
        "refusal-without-held",
        "what is stored of a refusal lacks what was held",
        Edit(bounds.refused_atom, "(why.count, why.held)", "(why.count, 0)"),
    ),
    bug(
        "room-without-held",
        "the room that a refusal names includes what was held",
        Swap(
            bounds.Refusal,
            "room",
            property(
                lambda why: max(0, (why.bound - why.count) * (1 if why.is_most else -1)),
            ),
        ),
    ),
)
_EXPIRY = (
    bug(
        "sqlite-expiry-not-written",
        "SQLite gives the room of an expired hold away without its end",
        Edit(
            SqliteBounds._refusal,
            "self._holds.write_end(connection, namespace, hold, Ending.EXPIRED)",
            "pass",
        ),
    ),
    bug(
        "sqlite-expired-of-both-ways",
        "SQLite ends expired holds that go the other way to make room",
        Edit(SqliteHolds.expired_of, "amount {'>' if way > 0 else '<'} 0", "amount != {way * 0}"),
    ),
    bug(
        "sqlite-expired-at-the-next-instant",
        "a hold over SQLite is open at the instant at which it expires",
        Edit(SqliteHolds.ended, _EXPIRES, "if self._now_us() > found.expires_us:"),
    ),
    bug(
        "sqlite-too-many-expired-refused",
        "SQLite refuses what may have room, if more holds have expired than it ends at once",
        Edit(
            SqliteBounds._refusal,
            "if not self._ends_left:",
            "if not self._ends_left:\n            return refused\n        if not self._ends_left:",
        ),
    ),
    bug(
        "sqlite-ends-rolled-back",
        "SQLite rolls the ends of expired holds back if it could not end all that it has to",
        Edit(SqliteEvents._append_atomic, "return error", "raise error"),
    ),
    bug(
        "sqlite-rolled-back-end-in-the-tail",
        "the live tail keeps what a change wrote that was rolled back alone",
        Edit(SqliteDatabase._run_changes, "self.live.rollback_to(noted)", "pass"),
    ),
    bug(
        "holds-left-to-requests",
        "no worker ends the holds that no request asks about",
        Swap(maintenance, "expire", _ends_nothing),
    ),
    bug(
        "sqlite-extension-shortens",
        "an extension over SQLite lets a hold expire earlier",
        Edit(SqliteHolds.extend, "max(found.expires_us, wanted_us)", "wanted_us"),
    ),
    bug(
        "sqlite-extension-unlimited",
        "a hold over SQLite is extended past its longest life",
        Edit(
            SqliteHolds.extend,
            "min(self._now_us() + lasts_us, latest_us)",
            "self._now_us() + lasts_us",
        ),
    ),
)
_ENDING = (
    bug(
        "sqlite-end-without-reservation",
        "the end of a hold over SQLite reserves no time, so that it is not found",
        Edit(
            SqliteHolds.write_end,
            '"INSERT INTO reservations VALUES (?, ?, ?, ?)"',
            '"SELECT ?, ?, ?, ?"',
        ),
    ),
    bug(
        "sqlite-hold-ends-twice",
        "SQLite settles a hold that was released, and releases one that was settled",
        Edit(SqliteHolds.ended, _IS_ENDED, "if found is None or found.refused is not None:"),
        Edit(SqliteHolds.ended, _EXPIRES, "if self._now_us() >= (found.expires_us or INT64_MAX):"),
        Edit(SqliteHolds.write_end, "invariant({*written} == {Written.NEW}", "invariant(True"),
        Edit(
            SqliteHolds.write_end,
            "INSERT INTO reservations",
            "INSERT OR REPLACE INTO reservations",
        ),
    ),
    bug(
        "sqlite-end-left-in-the-index",
        "a hold over SQLite is listed after its end",
        Edit(
            SqliteHolds.write_end,
            "DELETE FROM holds WHERE",
            "SELECT 1 FROM holds WHERE",
        ),
    ),
    bug(
        "sqlite-end-forgotten-early",
        "the end of a hold over SQLite is forgotten while its events are kept",
        Edit(
            SqliteHolds.write_end,
            "expires_us = last_us + 2 * namespace.dataset.retention_us",
            "expires_us = last_us",
        ),
    ),
    bug(
        "sqlite-end-in-a-passed-window",
        "the end of a hold over SQLite has a time that the rollup has passed",
        Edit(rollups.open_time, "max(int(passed_us) + 1, database", "max(database"),
    ),
    bug(
        "sqlite-end-before-its-hold",
        "the end of a hold over SQLite has a time before the hold's",
        Edit(
            SqliteHolds.write_end,
            "open_time(self._db, connection, namespace, begun_us)",
            "open_time(self._db, connection, namespace, 0)",
        ),
    ),
    bug(
        "ended-hold-is-open-for-a-retry",
        "the retry of a hold that has ended gets it as if it were open",
        Edit(Holds.begun, "self._open(hold,", "self._known(hold,"),
    ),
    bug(
        "settled-with-another-amount",
        "a settle is answered as done although another amount was settled",
        Edit(
            Holds._ended,
            "ended.end[:2] != (how, amount)",
            "ended.end.how is not how",
        ),
    ),
    bug(
        "settled-the-other-way",
        "a hold of a positive amount is settled with a negative one",
        Edit(Hold.takes, "not amount or (amount < 0) == (self.amount < 0)", "True"),
    ),
    bug(
        "sqlite-cancel-removes-a-hold",
        "the cancel of a hold's token over SQLite removes its events",
        Edit(
            SqliteDecisions.cancel,
            "if is_used and not is_refused and is_hold(events):",
            "if False:",
        ),
    ),
    bug(
        "sqlite-cancels-a-settled-hold",
        "the cancel of a hold's token over SQLite succeeds although the hold was settled",
        Edit(
            SqliteDecisions.cancel,
            "if hold is None or hold.end is None or hold.end.how is not Ending.RELEASED:",
            "if False:",
        ),
    ),
)
_KEEPING = (
    bug(
        "sqlite-held-counter-listed",
        "SQLite lists what is held of a counter as a counter",
        Edit(SqliteControl.counters, "after or AFTER_HELD", 'after or ""'),
    ),
    bug(
        "sqlite-holds-of-a-deleted-namespace",
        "SQLite keeps the holds of a namespace that was deleted and purged",
        Edit(control._purge_counters, '("windows", "pending", "holds")', '("windows", "pending")'),
    ),
    bug(
        "sqlite-slice-dropped-with-an-open-hold",
        "SQLite drops a slice with a hold that has not ended",
        Edit(SqliteControl.drop_slice, "if await self._db.read(", "if False and self._db.read("),
    ),
)
BUGS = (*_DECIDING, *_EXPIRY, *_ENDING, *_KEEPING)
