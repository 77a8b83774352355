"""Bugs of the rollup."""

from counter.core import read as reading
from counter.core.service import CounterService
from counter.storage.cassandra import slices
from counter.storage.cassandra.rollups import CassandraRollups
from rollup import atomics, roller, worker
from rollup.batches import BatchRoller
from rollup.maintenance import Maintenance
from tests.simulation.bugs import bug
from tests.simulation.mutate import Edit, Swap

_Worker = worker.RollupWorker

BUGS = (
    bug(
        "through-window-end",
        "a batch reaches to the end of its last window, one microsecond too far",
        Edit(
            _Worker._roll_part,
            "marks[-1].window_us + size_us - 1 if marks",
            "marks[-1].window_us + size_us if marks",
        ),
    ),
    bug(
        "watermark-early",
        "the watermark is advanced before the counters are written",
        Edit(
            _Worker.roll_shard,
            "while watermark_us < closed_us:",
            "if watermark_us < closed_us:\n"
            "        await self._store.rollups.advance(namespace, [shard], closed_us)\n"
            "    while watermark_us < closed_us:",
        ),
    ),
    bug(
        "clock-after-marks",
        "a worker takes the windows for closed by a clock that it reads after the marks",
        Edit(
            _Worker._roll_part,
            "batch_us = marks[-1]",
            "through_us = max(through_us, closed_through(namespace, self._clock.now_us()))\n"
            "    batch_us = marks[-1]",
        ),
    ),
    bug(
        "stamped-with-now",
        "checkpoints and rows carry the time of writing",
        Edit(
            CassandraRollups.apply,
            "stamp_us = through_us + 1 + self._draw(namespace.id, through_us, updates[0].counter)",
            "stamp_us = self._session.stamp()",
        ),
    ),
    bug(
        "recount-adjusts",
        "a recount adds the difference to the checkpoint instead of folding it again",
        Edit(
            roller.update,
            "count = fold_rows(head.settled.count, in_order)",
            "olds = {row.window_us: row.total for row in rows}\n"
            "        count = head.checkpoint.count + sum(\n"
            "            row.total - olds.get(row.window_us, 0) for row in fresh\n"
            "        )",
        ),
    ),
    bug(
        "recount-folds-fresh-only",
        "a recount folds only what it summed itself",
        Edit(
            roller.update,
            "merged = {row.window_us: row for row in rows if row.window_us <= target_us}",
            "merged = {}",
        ),
    ),
    bug(
        "fold-ignores-clear",
        "the fold of rows ignores that a window was cleared",
        Swap(roller, "fold_rows", lambda count, rows: count + sum(row.total for row in rows)),
    ),
    bug(
        "removes-unread-pending",
        "a worker removes pending recounts that it did not read",
        Edit(
            CassandraRollups.apply,
            "removed = [",
            "heads = await self.heads(namespace, [each.counter for each in updates])\n"
            "    from dataclasses import replace\n"
            "    updates = [\n"
            "        replace(each, pending_done=head.pending if head else ())\n"
            "        for each, head in zip(updates, heads)\n"
            "    ]\n"
            "    removed = [",
        ),
    ),
    bug(
        "removes-pending-of-open-windows",
        "a worker removes pending recounts whose window is still open",
        Edit(
            roller.update,
            "each.window_us + batch.window_size_us - 1 <= batch.through_us\n            and",
            "",
        ),
    ),
    bug(
        "deletes-not-undone",
        "a worker does not look whether an event followed a delete",
        Edit(BatchRoller._undone, "if deletes:", "if False:"),
    ),
    bug(
        "name-outlives-delete",
        "a delete clears the counter and leaves its name on the list",
        Edit(CounterService._delete, "later = await", "later = True or await"),
    ),
    bug(
        "delete-hides-what-follows",
        "a delete that is sent again takes a name off the list although an add followed",
        Edit(CounterService._delete, "later = await", "later = False and await"),
    ),
    bug(
        "names-stamped-with-now",
        "a name is written at the time of its writing, so a retry of an old add lists it again",
        Edit(
            CassandraRollups._write_listed,
            "(namespace.id, bucket, counter, time_us)",
            "(namespace.id, bucket, counter, self._session.stamp())",
        ),
    ),
    bug(
        "ignores-pending",
        "a worker does not do the pending recounts that it reads",
        Edit(
            roller.plan,
            "recounts = tuple(sorted({*asked, *pending}))",
            "recounts = tuple(sorted({*asked}))",
        ),
    ),
    bug(
        "ignores-recount-marks",
        "a worker takes marks of recounts for marks of adds",
        Edit(roller.group, "if recount_us:", "if False:"),
    ),
    bug(
        "half-an-atomic-add",
        "an atomic add of which some items are found is left as it is",
        Edit(
            atomics.AtomicSettler._resolve_incomplete,
            "if all(exists) and decision is None:",
            "if any(exists) and decision is None:",
        ),
    ),
    bug(
        "atomic-add-not-found",
        "an atomic add of which no item is found is left undecided",
        Edit(
            atomics.AtomicSettler._resolve_incomplete,
            "if all(exists) and decision is None:",
            "if (all(exists) or not any(exists)) and decision is None:",
        ),
    ),
    bug(
        "decision-ignored",
        "an existing decision about an atomic add is ignored if its items are found",
        Edit(
            atomics.AtomicSettler._resolve_incomplete,
            "if all(exists) and decision is None:",
            "if all(exists):",
        ),
    ),
    bug(
        "found-decision-not-marked",
        "a worker that finds a decision about an atomic add leaves no mark of it",
        Edit(
            atomics.AtomicSettler._resolve_incomplete,
            "sight=mark.sight if decision is not None else Sight.NOTHING",
            "sight=Sight.NOTHING if decision is None else decision.sight",
        ),
    ),
    bug(
        "atomic-adds-not-settled",
        "a worker sums windows without looking at their atomic adds",
        Edit(atomics.AtomicSettler._resolve_incomplete, "if not marks:", "if True:"),
    ),
    bug(
        "slices-by-any-clock",
        "slices are made by a clock that was not compared with the store's",
        Edit(
            Maintenance.make_slices,
            "now_us = checked_now_us(self._clock, self._guard, dataset)",
            "now_us = self._clock.now_us()",
        ),
    ),
    bug(
        "slice-dropped-early",
        "a slice is dropped without regard for watermarks and retention",
        Edit(
            Maintenance._drop_slices,
            "due_us = each.end_us + followed_us\n",
            "due_us = each.end_us\n        watermark_us = self._clock.now_us()\n",
        ),
        Edit(
            Maintenance._drop_slices,
            "max(due_us, each.retired_at_us + grace_us + followed_us)",
            "each.end_us",
        ),
    ),
    bug(
        "settled-rows-summed",
        "rows at or before the settled instant are still summed",
        Edit(
            reading.read_heads_and_rows,
            "[row for row in part if row.window_us > _settled_us(head)]",
            "list(part)",
        ),
        Edit(
            CassandraRollups.rows,
            "elif t >= span.from_us and t > settled.get(counter, 0):",
            "else:",
        ),
        Edit(
            CassandraRollups._written,
            "if settled is not None:\n        delete =",
            "if False:\n        delete =",
        ),
    ),
    bug(
        "tombstone-expires",
        "what hides a voided write is purged within seconds",
        Swap(
            slices,
            "create_table",
            of=lambda create: (
                lambda *args: create(*args).replace(
                    "gc_grace_seconds = 864000", "gc_grace_seconds = 1"
                )
            ),
        ),
    ),
)
