"""Bugs of adds and of resolutions."""

from counter import windows
from counter.core import adds, service
from counter.core import resolve as resolution
from counter.core import write as writing
from counter.core.clock_guard import ClockGuard
from counter.core.namespaces import Namespaces
from counter.limits import SECOND
from counter.storage.cassandra.decisions import CassandraDecisions
from counter.storage.cassandra.events import CassandraEvents
from counter.storage.shared import directory
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit, Swap

_Writer = writing.EventWriter
_Resolver = resolution.Resolver

BUGS = (
    bug(
        "event-before-mark",
        "the event is written before its mark",
        Edit(
            _Writer.write_admitted,
            "unmarked = await self._mark("
            "separate, namespace, [events[at] for at in wanted], atomic)",
            "unmarked = [None] * len(wanted)",
        ),
        Edit(
            _Writer.write_admitted,
            "self._check_deadline(namespace, began_us)",
            "self._check_deadline(namespace, began_us)\n"
            "    await self._mark(separate, namespace, events, atomic)",
        ),
    ),
    bug(
        "no-second-age-check",
        "no age check between mark and event",
        Edit(
            _Writer.write_admitted,
            "elif self.is_late(namespace, events[at].event_time_us, now_us):",
            "elif False:",
        ),
    ),
    bug(
        "timer-alone",
        "the deadline relies on timers alone, which are late in a suspended process",
        Edit(_Writer._check_deadline, "> timeout_us:", "> 3600 * timeout_us:"),
    ),
    bug(
        "time-out-is-success",
        "a write that timed out is acknowledged",
        Edit(
            service.CounterService._added,
            "if isinstance(outcome, CounterError):",
            "if isinstance(outcome, CounterError) and False:",
        ),
        Edit(
            service.CounterService._added,
            "self.tally.record(namespace.name, (outcome,))",
            "outcome = Written.UNVERIFIED if isinstance(outcome, CounterError) else outcome",
        ),
    ),
    bug(
        "guard-is-proof",
        "a token that the guard knows is answered without writing the event",
        Edit(
            _Writer.write_admitted,
            "results[at] = Written.LATE",
            "results[at] = Written.LATE\n"
            "        elif guarded[at] is Guarded.SAME:\n"
            "            results[at] = Written.REPLAYED",
        ),
    ),
    bug(
        "mark-remembered-early",
        "a mark is remembered before its own write is acknowledged",
        Edit(
            _Writer._mark,
            "failed = await separate.mark(namespace, unknown)",
            "self._marked.remember(namespace.id, unknown)\n"
            "    failed = await separate.mark(namespace, unknown)",
        ),
    ),
    bug(
        "no-write-timeout-in-closing",
        "a window is closed without waiting for the write time-out",
        Edit(
            windows.closing_lag,
            "dataset.write_timeout_us + 2 * dataset.clock_skew_max_us",
            "2 * dataset.clock_skew_max_us",
        ),
    ),
    bug(
        "no-skew-in-closing",
        "a window is closed with no allowance for clocks",
        Edit(
            windows.closing_lag,
            "dataset.write_timeout_us + 2 * dataset.clock_skew_max_us",
            "dataset.write_timeout_us",
        ),
    ),
    bug(
        "one-skew-in-closing",
        "a window is closed with the skew taken once",
        Edit(
            windows.closing_lag,
            "dataset.write_timeout_us + 2 * dataset.clock_skew_max_us",
            "dataset.write_timeout_us + dataset.clock_skew_max_us",
        ),
    ),
    bug(
        "no-clock-guard",
        "a process whose clock is off continues",
        Edit(ClockGuard.check, "self._refuse(self._trouble(dataset.clock_skew_max_us))", "pass"),
    ),
    bug(
        "clock-after-look-up",
        "a resolution reads the clock after it looked the event up",
        Edit(
            _Resolver.resolve,
            "self._check_closed(namespace, events, now_us, cancels=cancels)",
            "self._check_closed(namespace, events, self._clock.now_us(), cancels=cancels)",
        ),
    ),
    bug(
        "no-wait-for-window",
        "a resolution does not wait until the window is closed",
        Edit(_Resolver._check_closed, "if now_us >= closes_us:", "if True:"),
    ),
    bug(
        "no-compare-and-set",
        "the second resolver does not adopt the first decision",
        Edit(CassandraDecisions.decide, "return _decision_of(stored)", "return decision"),
    ),
    bug(
        "cancel-without-comparison",
        "a cancel replaces any decision by what its own look-up found",
        Edit(CassandraDecisions.cancel, "decision.over(stored)", "decision"),
    ),
    bug(
        "cancelled-for-ever",
        "a decision that is cancelled has no time to live",
        Edit(
            CassandraDecisions._set_decision,
            "(ttl_us // SECOND",
            "(0 if seen else ttl_us // SECOND",
        ),
    ),
    bug(
        "void-without-tombstone",
        "a void is decided, and nothing hides the write that lands later",
        Edit(CassandraEvents.void, "await asyncio.gather(", "return\n    await asyncio.gather("),
    ),
    bug(
        "void-by-the-check-of-now",
        "a strict write that was sent before the payload check changed lands after its void",
        Edit(CassandraEvents._void_one, "event.item_key == 0", "_is_strict(namespace, event)"),
    ),
    bug(
        "applied-without-rewrite",
        "what was found is not written again, nor the missing items of an atomic add",
        Edit(_Resolver._carry_out, "await separate.rewrite(namespace, events)", "pass"),
    ),
    bug(
        "no-recount",
        "no recount after a resolution",
        Edit(_Resolver.request_recounts, "while True:", "while not for_readers:"),
    ),
    bug(
        "no-pending-recount",
        "no recount is left for readers, only the worker's mark",
        Edit(_Resolver.request_recounts, "if for_readers:", "if False:"),
    ),
    bug(
        "no-recount-mark",
        "a recount is left for readers, and no mark for the worker",
        Edit(
            _Resolver.request_recounts,
            "await self._store.recounts.write_marks(namespace, marks)",
            "{}",
        ),
    ),
    bug(
        "recount-in-event-window",
        "the mark of a recount is left in the event's window, which was passed",
        Edit(
            _Resolver.request_recounts,
            "Mark(marked_us, counter, each_us)",
            "Mark(each_us, counter, each_us)",
        ),
    ),
    bug(
        "recounts-not-left-again",
        "recounts are left once, however long it took",
        Edit(
            _Resolver.request_recounts,
            "if _is_surely_open(namespace, marked_us, now_us):",
            "if True:",
        ),
    ),
    bug(
        "key-not-voided",
        "a key whose time is too old gets a new one before the old one is resolved",
        Edit(
            service.CounterService._with_token,
            "return await submit(namespace, events, allowance, is_cancelled)",
            "if self._writer.is_late(namespace, void_us, self._clock.now_us()):\n"
            "                raise TokenTooOldError('stale', applied=False)\n"
            "            return await submit(namespace, events, allowance, is_cancelled)",
        ),
    ),
    bug(
        "item-key-by-index",
        "the item key of an atomic add is its place in the list",
        Edit(
            adds.events_of_atomic,
            "earlier[counter] = earlier.get(counter, 0) + 1",
            "earlier[counter] = index + 1",
        ),
    ),
    bug(
        "no-atomic-mark-before-decision",
        "a resolver writes no mark of an atomic add before the decision",
        Edit(
            _Resolver.resolve,
            "if separate is None or not events[0].item_key:",
            "if True:",
        ),
    ),
    bug(
        "atomic-mark-passed",
        "a decision about an atomic add is taken although its mark may have been passed",
        Edit(
            _Resolver._decide_marked,
            "if _is_surely_open(namespace, marked_us, now_us):",
            "if True:",
        ),
    ),
    bug(
        "mark-of-another-decision",
        "a mark of a decision is taken for one of the cancel that has replaced it since",
        Edit(_Resolver._decide_marked, "if decision.sight is sight:", "if True:"),
    ),
    bug(
        "decided-mark-of-a-passed-window",
        "a mark is said to be of a decision although a worker may have passed its window",
        Edit(
            _Resolver._decide_marked,
            "await separate.mark_atomic(namespace, mark)",
            "await separate.mark_atomic(namespace, mark._replace(sight=is_decided))",
        ),
    ),
    bug(
        "atomic-mark-not-awaited",
        "a resolver decides about an atomic add while its mark is still on its way",
        Edit(
            _Resolver._decide_marked,
            "await separate.mark_atomic(namespace, mark)",
            '__import__("asyncio").ensure_future(separate.mark_atomic(namespace, mark))',
        ),
    ),
    bug(
        "rewrite-not-awaited",
        "a token is answered as applied before what was found of it is durable",
        Edit(
            _Resolver._carry_out,
            "await separate.rewrite(namespace, events)",
            '__import__("asyncio").ensure_future(separate.rewrite(namespace, events))',
        ),
    ),
    bug(
        "late-by-one",
        "an event at the very end of the accept limit is taken for late",
        Edit(_Writer.is_late, "time_us < now_us - limit_us", "time_us <= now_us - limit_us"),
    ),
    bug(
        "clocks-compared-at-once",
        "two comparisons with the store's clock run at once, and the older one's result is kept",
        Edit(ClockGuard.measure, "async with self._measuring:", "if True:"),
    ),
    bug(
        "namespace-by-any-clock",
        "a namespace is created by a clock that was not compared with the store's",
        Edit(
            Namespaces.create,
            "now_us = checked_now_us(self._clock, self._guard, dataset)",
            "now_us = self._clock.now_us()",
        ),
    ),
    bug(
        "era-begins-at-once",
        "a changed accept limit holds in the middle of a slice",
        Edit(
            Namespaces._era_start,
            "if made_us > known_us:",
            "return self._clock.now_us()\n    if made_us > known_us:",
        ),
        Edit(Namespaces._announce, "if self._reached_us(", "if False and self._reached_us("),
    ),
    bug(
        "era-not-announced",
        "an accept limit is changed at once, whenever that lands",
        Edit(
            Namespaces.update,
            "namespace = await self._announce(namespace, settings.accept_limit_us, era_from_us)",
            "pass",
        ),
    ),
    bug(
        "era-announced-late",
        "an accept limit is changed however late its announcement landed",
        Edit(Namespaces._announce, "if self._reached_us(", "if False and self._reached_us("),
    ),
    bug(
        "name-free-early",
        "a deleted namespace's name is free after 2 s",
        Swap(directory, "settling_time", lambda _: 2 * SECOND),
    ),
    bug(
        "directory-checked-at-the-door",
        "an event is written by the directory as of its request's arrival",
        Edit(Namespaces.current, "if self._read_at_us is None:", "if True:"),
    ),
)
