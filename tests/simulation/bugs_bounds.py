"""Bugs of bounds: in the transaction of SQLite, and in what is stored of an add."""

from counter import bounds
from counter.storage.sqlite import events
from counter.storage.sqlite.bounds import SqliteBounds, _Count, have_room
from counter.storage.sqlite.decisions import SqliteDecisions
from counter.storage.sqlite.events import SqliteEvents
from counter.storage.sqlite.live import LiveTail
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit

BUGS = (
    bug(
        "sqlite-bound-without-transaction",
        "a bounded add over SQLite does not see what its transaction has written before",
        Edit(SqliteBounds._written_sums, "written[self._summed :]:", "written[:0]:"),
    ),
    bug(
        "sqlite-bound-without-append",
        "a bounded add over SQLite does not see the adds before it in the same append",
        Edit(_Count.apply, "else self.count + delta", "else self.count"),
    ),
    bug(
        "sqlite-room-for-each-alone",
        "each add of one append over SQLite takes the same last room",
        Edit(
            have_room,
            "(count.count or 0) + sums[name, delta > 0] - delta",
            "count.count or 0",
        ),
    ),
    bug(
        "sqlite-retry-has-room",
        "a retry over SQLite is answered as new if there is room",
        Edit(
            SqliteEvents._insert_new,
            "except sqlite3.IntegrityError:\n        return False",
            "except sqlite3.IntegrityError:\n        pass",
        ),
    ),
    bug(
        "sqlite-bound-before-identity",
        "a retry over SQLite is decided like a new add, and answered by that",
        Edit(
            SqliteBounds.decided,
            "if stored is None and event[:4] not in seen and count is not None:",
            "if count is not None:",
        ),
        Edit(events._outcome_of, "written is Written.NEW and is_refusal(", "is_refusal("),
    ),
    bug(
        "sqlite-retry-takes-room",
        "a retry over SQLite takes room from the adds after it",
        Edit(
            SqliteBounds.decided,
            "if stored is None and event[:4] not in seen and count is not None:",
            "if count is not None:",
        ),
    ),
    bug(
        "sqlite-refusal-decided-again",
        "the retry of an atomic add that SQLite refused is decided again",
        Edit(
            SqliteEvents._append_atomic, "if known:", "if known and not is_refusal(known[0].atom):"
        ),
    ),
    bug(
        "sqlite-bound-without-recount",
        "a bounded add over SQLite does not see what a pending recount changes",
        Edit(SqliteBounds._without_held, "if head.pending:", "if False:"),
    ),
    bug(
        "sqlite-bound-without-clear",
        "a bounded add over SQLite does not see a clear in the tail",
        Edit(
            SqliteBounds._read_log,
            "_Count(apply_fold(rolled_up[name], tail))",
            "_Count(rolled_up[name] + tail.total)",
        ),
    ),
    bug(
        "sqlite-bound-of-erased",
        "SQLite refuses an add that a later clear has erased already",
        Edit(
            SqliteBounds._read_log,
            "found[name].erased_us = max(found[name].erased_us, time_us)",
            "pass",
        ),
    ),
    bug(
        "sqlite-bound-without-clear-of-append",
        "a bounded add over SQLite does not see a clear before it in the same append",
        Edit(
            _Count.apply,
            "if time_us <= self.erased_us:",
            "if is_clear or time_us <= self.erased_us:",
        ),
    ),
    bug(
        "sqlite-rolled-back-tail",
        "the live tail keeps what a transaction wrote that was rolled back",
        Edit(LiveTail.rollback, "self._forget(namespace.id,", "print(end='') or (namespace.id,"),
        Edit(LiveTail.rollback, "self.written, self._expected = [], []", "self._expected = []"),
    ),
    bug(
        "sqlite-landed-unseen",
        "the live tail lacks what a transaction wrote whose commit failed and landed",
        Edit(LiveTail.rollback, "in self._expected:", "in ():"),
    ),
    bug(
        "namespace-bound-in-payload",
        "the payload of an add that the namespace's bound refused has that bound",
        Edit(
            bounds.refused_atom,
            "atom += terms_of(delta, NO_BOUNDS)",
            "atom += terms_of(delta, Bounds(why.bound, why.bound))",
        ),
    ),
    bug(
        "sqlite-cancelled-refusal-subtracted",
        "the cancel of a refusal takes its delta off the live tail",
        Edit(
            SqliteDecisions.cancel,
            "stored_events = [each for each in found if each is not None]",
            "stored_events = list(events)",
        ),
    ),
    bug(
        "sqlite-cancelled-refusal-counted",
        "the cancel of a refusal says that it was counted",
        Edit(
            SqliteDecisions.cancel, "was_counted=is_used and not is_refused", "was_counted=is_used"
        ),
    ),
    bug(
        "sqlite-resolved-refusal-counted",
        "the cancel of a refusal that was resolved says that it was counted",
        Edit(SqliteDecisions.cancel, ".over(None if is_refused else stored)", ".over(stored)"),
    ),
    bug(
        "sqlite-half-a-refusal",
        "a refused atomic add counts on the counters that had room",
        Edit(
            SqliteBounds.decided_atomic,
            "_refused(events, why._replace(item=first))",
            "[_refused([x], why)[0] if x.counter == name else x for x in events]",
        ),
    ),
)
