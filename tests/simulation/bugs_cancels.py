"""Bugs of cancels: in the core, and in the transaction of SQLite."""

from counter.core.resolve import Resolver
from counter.core.service import CounterService
from counter.storage.sqlite import decisions, live, rollups
from counter.storage.sqlite.events import SqliteEvents
from counter.types import Reservation
from rollup import batches
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit

BUGS = (
    bug(
        "key-not-cancelled",
        "a cancel by an arbitrary key decides the token and leaves the key as it was",
        Edit(
            CounterService._cancelled_key,
            "if await self._key_times.cancel(",
            "if True or await self._key_times.cancel(",
        ),
    ),
    bug(
        "key-cancelled-unseen",
        "a key is cancelled before the payload of its token is compared",
        Edit(
            CounterService._cancelled_key,
            "await self.resolver.check_payload(namespace, events)",
            "pass",
        ),
    ),
    bug(
        "cancelled-is-pending",
        "a retry of a cancelled add has to wait although the decision exists",
        Edit(
            Resolver._check_closed,
            "decision = await self._store.decisions.decided(namespace, events)",
            "decision = None",
        ),
    ),
    bug(
        "clear-on-the-first-page",
        "a worker looks for the clear of a delete on one page of the events of its instant",
        Edit(batches._has_clear, "if len(events) < page.limit:", "if True:"),
    ),
    bug(
        "cancelled-key-replaced",
        "a cancelled key gets a new time if the request saw its token void",
        Edit(
            Reservation.replaces,
            "time_us == self.replaces_us",
            "time_us % CANCELLED_KEY == self.replaces_us",
        ),
    ),
    bug(
        "sqlite-cancelled-key-replaced",
        "SQLite gives a cancelled key a new time if the request saw its token void",
        Edit(
            decisions.SqliteDecisions.reserve,
            '" AND time IS NOT ?"',
            'f" AND time % {2**62} IS NOT ?"',
        ),
        Edit(
            decisions.SqliteDecisions.reserve,
            '" DO UPDATE SET time = iif(expires > ?5 AND time IS NOT ?6, time, ?3),"',
            'f" DO UPDATE SET time = iif(expires > ?5 AND time % {2**62} IS NOT ?6, time, ?3),"',
        ),
    ),
    bug(
        "sqlite-cancelled-unseen",
        "an append to SQLite does not look for the decision about a cancelled token of the future",
        Edit(
            SqliteEvents._are_late,
            "if min(times) <= resolved_us or not cancelled_us.isdisjoint(times):",
            "if min(times) <= resolved_us:",
        ),
    ),
    bug(
        "sqlite-cancel-without-mark",
        "a cancel over SQLite asks no worker for a recount",
        Edit(
            rollups.request_recounts, "_write_marks(database, connection, namespace, marks)", "pass"
        ),
    ),
    bug(
        "sqlite-cancel-without-pending",
        "a cancel over SQLite asks no reader for a recount",
        Edit(
            rollups.request_recounts,
            "_write_pending(database, connection, namespace, pending)",
            "pass",
        ),
    ),
    bug(
        "sqlite-cancel-marks-a-passed-window",
        "a cancel over SQLite leaves its mark in a window that a worker has passed",
        Edit(rollups.open_time, "max(int(passed_us) + 1, database", "max(database"),
    ),
    bug(
        "sqlite-cancel-marks-a-window-being-passed",
        "a cancel over SQLite leaves its mark in a window that a worker is passing",
        Edit(
            rollups.open_time,
            "database.clock.now_us(), database.fenced_us,",
            "database.clock.now_us(),",
        ),
    ),
    bug(
        "sqlite-cancel-marks-too-early",
        "a cancel over SQLite leaves its mark in a window before the one to recount",
        Edit(
            rollups.request_recounts,
            "open_time(database, connection, namespace, events[0].event_time_us)",
            "open_time(database, connection, namespace, 0)",
        ),
    ),
    bug(
        "sqlite-removal-not-expected",
        "the live tail learns of a removal only at the commit, which may fail and land",
        Edit(decisions._remove_events, "database.live.expect(namespace, events)", "pass"),
    ),
    bug(
        "sqlite-removal-not-noted",
        "the live tail keeps the event that a cancel has removed",
        Edit(decisions._remove_events, "database.live.note_removed(namespace, events)", "pass"),
    ),
    bug(
        "sqlite-removal-counted-twice",
        "the live tail adds the event that a cancel has removed once more",
        Edit(live.LiveTail.note_removed, "delta=-event.delta", "delta=event.delta"),
    ),
)
