"""What catches each planted bug in every run of the tests.

Some are caught within a few seeds, always the same ones; the others by a test that is directed at
them, wherever it lies: it passes, and fails with the bug planted (see test_directed.py).
"""

from collections.abc import Mapping
from typing import Final

#: How many seeds every run of the tests runs over simulated Cassandra.
SEEDS: Final = 60
#: Bugs that a few seeds catch, so that planting them costs little; the script plants all.
QUICK: Final = (
    "key-not-voided",
    "recount-adjusts",
    "recount-folds-fresh-only",
    "fold-ignores-clear",
    "tail-cut-at-now",
    "cache-holds-tails",
    "sum-wraps",
    "clear-by-arrival",
    "marks-of-one-window",
    "no-leases",
    "cache-trusted-when-accurate",
    "cached-a-window-ahead",
)

_CRASHES: Final = "tests/evidence/test_crashes.py::"
_FAULTS: Final = "tests/http/test_faults.py::"
_DELETING: Final = "tests/http/test_deleting.py::"
_CLOCK_GUARD: Final = "tests/unit/test_clock_guard.py::"
_RESOLUTION: Final = "tests/unit/test_resolve.py::"
_READING: Final = "tests/unit/test_read_moments.py::"
_ROLLER: Final = "tests/unit/test_roller.py::"
_NAMESPACES: Final = "tests/unit/test_namespaces.py::"
_WINDOWS: Final = "tests/properties/test_windows.py::"
_ATOMICS: Final = "tests/rollup/test_atomics.py::"
_EDGES: Final = "tests/rollup/test_edges.py::"
_ERAS: Final = "tests/rollup/test_eras.py::test_a_changed_accept_limit_that_lands_late_loses_no_add"
_SLICES: Final = "tests/rollup/test_maintenance.py::"
_REBIRTH: Final = "tests/simulation/test_rebirth.py::"
_CONTRACTS: Final = "tests/simulation/test_contracts.py::"
_CACHES: Final = "tests/simulation/test_caches.py::"
_REPLICAS: Final = "tests/simulation/test_replicas.py::"
_SERVICE: Final = "tests/unit/test_service.py::"
_SQLITE: Final = "tests/contracts/test_sqlite.py::"
_SQLITE_CANCEL: Final = "tests/unit/test_sqlite_cancel.py::"
_BOUNDS: Final = f"{_SQLITE}TestServiceBounds::"
_SQLITE_BOUNDS: Final = "tests/unit/test_sqlite_bounds.py::"
_HOLDS: Final = f"{_SQLITE}TestServiceHolds::"
_SQLITE_HOLDS: Final = "tests/unit/test_sqlite_holds.py::"

_OPEN: Final = f"{_WINDOWS}test_a_window_is_open_until_the_last_add_of_it_can_have_landed"
_LEFT: Final = f"{_RESOLUTION}test_a_recount_is_left_for_readers_and_for_the_worker"
_LATE: Final = f"{_FAULTS}test_a_write_that_lands_in_a_closed_window_counts_once_it_is_resolved"
_HALVES: Final = f"{_ATOMICS}test_halves_are_made_whole_by_whichever_worker_has_the_shard"
_ACKNOWLEDGED: Final = f"{_REPLICAS}test_every_read_sees_data_of_two_replicas"
_KEY: Final = f"{_SERVICE}test_a_key_that_is_cancelled_while_a_retry_looks_for_a_new_time_gets_none"
_EXACTLY_ONCE: Final = f"{_SQLITE}TestServiceCancels::test_an_add_is_cancelled_exactly_once"
_ROOM: Final = f"{_BOUNDS}test_a_cancel_gives_room_back"
_RETRY: Final = f"{_SQLITE_BOUNDS}test_a_retry_is_not_decided_again"
_CLEARED: Final = f"{_SQLITE_BOUNDS}test_a_clear_of_the_same_transaction_makes_room"
_OPEN_MARK: Final = f"{_SQLITE_CANCEL}test_the_mark_is_left_in_a_window_that_no_worker_has_passed"
_TOGETHER: Final = f"{_HOLDS}test_holds_and_adds_keep_bounds_together"
_MADE_ROOM: Final = f"{_HOLDS}test_expired_holds_make_room"
_AT_ONCE: Final = f"{_HOLDS}test_a_transaction_ends_a_bounded_number_of_holds"
_EXTENDED: Final = f"{_HOLDS}test_a_hold_is_extended"
_SETTLED: Final = f"{_HOLDS}test_a_hold_is_settled_once"
_RELEASED: Final = f"{_HOLDS}test_a_released_hold_counts_nothing"
_RELEASING: Final = f"{_HOLDS}test_a_cancel_releases_a_hold"
_VOIDED: Final = f"{_REPLICAS}test_a_voided_event_stays_hidden_whenever_it_lands[item]"

#: By bug: the test that catches it.
DIRECTED: Final[Mapping[str, str]] = {
    "event-before-mark": f"{_CRASHES}test_an_add_that_is_asked_about_only_later[memory]",
    "no-second-age-check": (
        f"{_FAULTS}test_a_token_that_aged_while_its_mark_was_written_is_not_written"
    ),
    "timer-alone": f"{_FAULTS}test_a_write_past_its_time_is_not_acknowledged_and_counts_once",
    "time-out-is-success": (
        "tests/unit/test_write.py::test_an_add_that_the_store_alone_gave_up_is_not_acknowledged"
    ),
    "mark-remembered-early": ("tests/unit/test_write.py::test_a_mark_in_flight_is_not_durable"),
    "guard-is-proof": (
        "tests/http/test_payload_check.py::test_tokens_known_to_the_guard_are_still_written"
    ),
    "no-write-timeout-in-closing": _OPEN,
    "no-skew-in-closing": _OPEN,
    "one-skew-in-closing": _OPEN,
    "no-clock-guard": (
        f"{_CLOCK_GUARD}test_past_the_bound_nothing_that_depends_on_the_clock_is_done[add]"
    ),
    "clock-after-look-up": (
        f"{_RESOLUTION}test_a_window_that_closes_while_an_event_is_looked_for_was_open"
    ),
    "no-wait-for-window": (
        "tests/http/test_tokens.py::test_a_window_closes_at_its_very_instant[memory]"
    ),
    "no-compare-and-set": f"{_CONTRACTS}TestDecisions::test_the_first_decision_is_final",
    "cancel-without-comparison": (
        f"{_REPLICAS}test_all_that_decide_about_a_token_at_once_agree_that_it_is_cancelled"
    ),
    "cancelled-for-ever": (f"{_REPLICAS}test_a_cancelled_decision_is_forgotten_as_a_whole[UPDATE]"),
    "void-without-tombstone": _VOIDED,
    "void-by-the-check-of-now": (
        f"{_REPLICAS}test_a_strict_write_that_lands_after_its_void_is_late[add]"
    ),
    "applied-without-rewrite": _HALVES,
    "no-recount": _LEFT,
    "no-pending-recount": _LATE,
    "no-recount-mark": _LEFT,
    "recount-in-event-window": _LEFT,
    "recounts-not-left-again": (
        f"{_RESOLUTION}test_a_recount_that_took_long_to_leave_is_left_again"
    ),
    "item-key-by-index": (
        "tests/http/test_atomic.py::"
        "test_a_retry_may_list_the_items_of_one_counter_in_another_order[memory-False]"
    ),
    "no-atomic-mark-before-decision": (
        f"{_RESOLUTION}test_an_atomic_add_is_marked_again_before_anything_is_decided"
    ),
    "atomic-mark-passed": (
        "tests/rollup/test_atomics.py::test_a_resolver_that_pauses_before_it_decides_leaves_no_half"
    ),
    "mark-of-another-decision": (
        f"{_ATOMICS}test_a_mark_of_a_decision_is_none_of_its_cancel[False]"
    ),
    "decided-mark-of-a-passed-window": (
        "tests/rollup/test_atomics.py::test_a_mark_of_a_decision_is_in_a_window_that_was_open"
    ),
    "atomic-mark-not-awaited": (
        f"{_RESOLUTION}test_an_atomic_add_is_marked_again_before_anything_is_decided"
    ),
    "rewrite-not-awaited": (f"{_RESOLUTION}test_a_token_is_answered_after_its_events_are_durable"),
    "late-by-one": (
        "tests/unit/test_write.py::test_an_event_of_the_very_end_of_the_accept_limit_is_written"
    ),
    "clocks-compared-at-once": (
        "tests/unit/test_store_clock.py::test_comparisons_run_one_at_a_time"
    ),
    "written-to-one-replica": (
        f"{_REPLICAS}test_a_write_that_one_replica_has_in_time_is_not_acknowledged"
    ),
    "written-to-the-near-data-center": (
        f"{_REPLICAS}test_a_write_that_a_data_center_did_not_acknowledge_fails[request]"
    ),
    "read-from-one-replica": f"{_ACKNOWLEDGED}[0-events]",
    "namespace-by-any-clock": (
        f"{_CLOCK_GUARD}test_a_namespace_that_a_clock_far_ahead_would_have_created_loses_no_add"
    ),
    "slices-by-any-clock": (
        "tests/rollup/test_clock.py::"
        "test_a_worker_whose_clock_is_wrong_leaves_the_slices_alone[1200000000]"
    ),
    "era-begins-at-once": (
        f"{_NAMESPACES}test_an_accept_limit_changes_from_the_first_slice_that_is_not_made"
    ),
    "era-not-announced": f"{_ERAS}[3000000-60000000-1]",
    "era-announced-late": f"{_ERAS}[60000000-3000000-1]",
    "through-window-end": f"{_EDGES}test_a_rollup_does_not_reach_into_the_next_window",
    "clock-after-marks": (
        f"{_EDGES}test_a_window_that_closes_while_marks_are_read_is_left_to_the_next_pass"
    ),
    "stamped-with-now": f"{_CONTRACTS}TestCounts::test_an_older_batch_changes_nothing",
    "removes-unread-pending": (
        f"{_CONTRACTS}TestCounts::test_pending_recounts_are_removed_exactly"
    ),
    "deletes-not-undone": (
        f"{_DELETING}test_an_add_after_a_delete_counts_from_0_and_is_listed[memory]"
    ),
    "name-outlives-delete": f"{_CRASHES}test_a_rollup_after_a_delete[memory]",
    "delete-hides-what-follows": (
        f"{_DELETING}test_a_retried_delete_deletes_nothing_that_came_later[sqlite]"
    ),
    "names-stamped-with-now": (
        f"{_CONTRACTS}TestCounts::test_a_deleted_counter_is_listed_again_with_a_later_event"
    ),
    "removes-pending-of-open-windows": (
        f"{_ROLLER}test_a_pending_recount_stays_until_the_window_that_it_was_left_in_is_passed"
    ),
    "ignores-pending": (
        f"{_ROLLER}test_a_pending_recount_is_done_whether_a_mark_asks_for_it_or_not"
    ),
    "ignores-recount-marks": (
        f"{_ROLLER}test_marks_of_recounts_are_distinguished_from_marks_of_adds"
    ),
    "half-an-atomic-add": _HALVES,
    "atomic-add-not-found": (
        f"{_ATOMICS}test_an_atomic_add_of_which_nothing_is_found_is_decided_before_its_window_is"
        "_passed"
    ),
    "decision-ignored": (
        f"{_ATOMICS}test_a_decision_that_a_crash_left_half_done_is_done_by_the_worker"
    ),
    "found-decision-not-marked": (
        f"{_ATOMICS}test_a_decision_that_is_found_is_marked_before_it_is_carried_out"
    ),
    "atomic-adds-not-settled": _HALVES,
    "slice-dropped-early": f"{_SLICES}test_a_shard_that_lags_behind_holds_the_slices_back",
    "settled-rows-summed": f"{_CONTRACTS}TestCounts::test_settled_only_moves_forward",
    "tombstone-expires": _VOIDED,
    "checkpoint-before-watermark": (
        f"{_READING}test_a_rollup_between_two_steps_of_a_read_loses_nothing[one]"
    ),
    "reader-ignores-pending": _LATE,
    "cache-claims-watermark": (f"{_READING}test_a_cached_count_has_the_time_of_its_storage"),
    "clear-per-partition": f"{_CONTRACTS}TestFolds::test_a_clear_erases_across_partitions",
    "recount-without-settled": (f"{_READING}test_a_recount_begins_with_the_settled_count"),
    "marks-from-one-replica": f"{_ACKNOWLEDGED}[0-marks]",
    "events-from-one-replica": f"{_ACKNOWLEDGED}[0-events]",
    "counts-from-one-replica": f"{_ACKNOWLEDGED}[0-counts]",
    "no-read-repair": (f"{_REPLICAS}test_a_write_that_one_read_saw_all_later_reads_see[events]"),
    "stamped-in-the-future": _VOIDED,
    "name-free-early": (f"{_REBIRTH}test_adds_to_a_namespace_that_is_created_again_count[4000]"),
    "directory-checked-at-the-door": (
        f"{_NAMESPACES}test_an_add_uses_the_directory_as_of_its_write"
    ),
    "older-count-replaces-newer": f"{_CACHES}TestMemcached::test_the_newest_is_kept",
    "best-effort-of-any-namespace": (
        "tests/contracts/test_memory.py::TestCache::test_namespaces_are_apart"
    ),
    "best-effort-sent-again": (
        f"{_CACHES}test_a_change_whose_response_is_lost_was_made[memcached]"
    ),
    "late-answer-is-the-next": (
        f"{_CACHES}test_a_late_response_is_not_taken_for_the_next_one[redis]"
    ),
    "marks-dropped-early": f"{_CRASHES}test_a_rollup[memory]",
    "watermark-early": f"{_CRASHES}test_a_rollup[memory]",
    "key-not-cancelled": f"{_KEY}[1]",
    "key-cancelled-unseen": f"{_KEY}[2]",
    "cancelled-is-pending": _EXACTLY_ONCE,
    "clear-on-the-first-page": (
        f"{_EDGES}test_a_delete_has_its_clear_among_many_events_of_its_instant[100-listed0-2]"
    ),
    "cancelled-key-replaced": f"{_CONTRACTS}TestCancels::test_a_cancelled_key_keeps_its_time",
    "sqlite-cancelled-key-replaced": (f"{_SQLITE}TestCancels::test_a_cancelled_key_keeps_its_time"),
    "sqlite-cancelled-unseen": (
        f"{_SQLITE_CANCEL}test_a_cancelled_token_of_the_future_is_refused[10000]"
    ),
    "sqlite-cancel-without-mark": _OPEN_MARK,
    "sqlite-cancel-without-pending": _OPEN_MARK,
    "sqlite-cancel-marks-a-passed-window": (
        f"{_SQLITE_CANCEL}"
        "test_a_process_that_starts_with_an_earlier_clock_knows_what_workers_have_passed"
    ),
    "sqlite-cancel-marks-a-window-being-passed": (
        f"{_SQLITE_CANCEL}test_the_mark_is_in_no_window_that_a_worker_is_passing"
    ),
    "sqlite-cancel-marks-too-early": (
        f"{_SQLITE_CANCEL}test_the_mark_is_not_earlier_than_the_window_to_recount"
    ),
    "sqlite-removal-not-expected": (
        f"{_SQLITE_CANCEL}test_a_commit_that_fails_may_be_on_disk[True]"
    ),
    "sqlite-removal-not-noted": _EXACTLY_ONCE,
    "sqlite-removal-counted-twice": _EXACTLY_ONCE,
    "sqlite-bound-without-transaction": (
        f"{_SQLITE_BOUNDS}test_atomic_adds_of_one_transaction_see_each_other"
    ),
    "sqlite-bound-without-append": f"{_BOUNDS}test_adds_of_one_write_see_each_other",
    "sqlite-room-for-each-alone": f"{_BOUNDS}test_adds_of_one_write_share_the_room[1]",
    "sqlite-retry-has-room": f"{_BOUNDS}test_adds_of_one_write_share_the_room[1]",
    "sqlite-bound-before-identity": _RETRY,
    "sqlite-retry-takes-room": _RETRY,
    "sqlite-refusal-decided-again": _RETRY,
    "sqlite-bound-without-recount": _ROOM,
    "sqlite-bound-without-clear": (
        f"{_SQLITE_BOUNDS}test_a_clear_in_the_tail_erases_what_a_rollup_has_summed"
    ),
    "sqlite-bound-of-erased": f"{_BOUNDS}test_a_clear_makes_room",
    "sqlite-bound-without-clear-of-append": _CLEARED,
    "sqlite-rolled-back-tail": (
        f"{_SQLITE_BOUNDS}test_a_commit_that_failed_leaves_nothing_that_counts"
    ),
    "sqlite-landed-unseen": f"{_SQLITE_BOUNDS}test_a_commit_that_failed_and_landed_counts",
    "namespace-bound-in-payload": f"{_BOUNDS}test_the_namespace_has_bounds",
    "sqlite-cancelled-refusal-subtracted": _ROOM,
    "sqlite-cancelled-refusal-counted": _ROOM,
    "sqlite-resolved-refusal-counted": (
        f"{_SQLITE_BOUNDS}test_a_refusal_that_is_resolved_and_cancelled_was_not_counted"
    ),
    "sqlite-half-a-refusal": f"{_BOUNDS}test_an_atomic_add_is_refused_as_a_whole",
    "sqlite-all-holds-held": _TOGETHER,
    "sqlite-add-without-held": _TOGETHER,
    "sqlite-atomic-add-without-held": f"{_SQLITE_HOLDS}test_an_atomic_add_sees_what_is_held",
    "sqlite-hold-without-held": _TOGETHER,
    "sqlite-clear-erases-held": f"{_HOLDS}test_a_clear_leaves_holds_open",
    "sqlite-holds-forgotten-at-start": f"{_SQLITE_HOLDS}test_holds_are_known_after_a_restart",
    "refusal-without-held": _TOGETHER,
    "room-without-held": _TOGETHER,
    "sqlite-expiry-not-written": _MADE_ROOM,
    "sqlite-expired-of-both-ways": _MADE_ROOM,
    "sqlite-expired-at-the-next-instant": f"{_HOLDS}test_a_hold_expires",
    "sqlite-too-many-expired-refused": _AT_ONCE,
    "sqlite-ends-rolled-back": _AT_ONCE,
    "sqlite-rolled-back-end-in-the-tail": (
        f"{_SQLITE_HOLDS}test_an_end_that_is_rolled_back_with_its_change_leaves_the_hold_open"
    ),
    "holds-left-to-requests": f"{_HOLDS}test_a_hold_expires",
    "sqlite-extension-shortens": _EXTENDED,
    "sqlite-extension-unlimited": _EXTENDED,
    "sqlite-end-without-reservation": _SETTLED,
    "sqlite-hold-ends-twice": _RELEASED,
    "sqlite-end-left-in-the-index": _SETTLED,
    "sqlite-end-forgotten-early": _SETTLED,
    "sqlite-end-in-a-passed-window": (
        f"{_SQLITE_HOLDS}test_an_end_is_in_a_window_that_no_worker_has_passed"
    ),
    "sqlite-end-before-its-hold": f"{_HOLDS}test_a_hold_of_the_future_ends_after_it_began",
    "ended-hold-is-open-for-a-retry": _SETTLED,
    "settled-with-another-amount": _SETTLED,
    "settled-the-other-way": f"{_HOLDS}test_invalid_holds_are_refused",
    "sqlite-cancel-removes-a-hold": _RELEASING,
    "sqlite-cancels-a-settled-hold": _RELEASING,
    "sqlite-held-counter-listed": f"{_HOLDS}test_what_is_held_is_no_counter_of_its_own",
    "sqlite-holds-of-a-deleted-namespace": (
        f"{_SQLITE_HOLDS}test_a_deleted_namespace_leaves_no_holds"
    ),
    "sqlite-slice-dropped-with-an-open-hold": (
        f"{_SQLITE_HOLDS}test_a_slice_with_an_open_hold_is_not_dropped"
    ),
}


def caught_by(name: str) -> str:
    """The test that catches the bug *name* in every run, as in docs/guarantees.md."""
    if name in QUICK:
        return "`test_simulation.py`"
    path, _, test = DIRECTED[name].partition("::")
    return f"`{path.rpartition('/')[2]}`: `{test.replace('::', '.')}`"
