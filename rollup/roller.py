"""Compute what a worker writes from what it has read, with pure functions.

A window row is a pure function of its window's events, a checkpoint a pure function of the rows: a
recount replaces rows and never adjusts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from counter.types import Checkpoint, CounterUpdate, DirtyMark, Fold, Head, Pending, WindowRow
from counter.windows import fold_rows


@dataclass(slots=True)
class Dirt:
    """What the marks of a batch contain about one counter."""

    windows: list[int] = field(default_factory=list)
    recounts: list[int] = field(default_factory=list)
    #: What the store has read together with the marks.
    folds: dict[int, Fold] = field(default_factory=dict)
    #: The store's own for the counter.
    handle: object = None


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The instants of one batch, read once before anything else."""

    through_us: int
    dropped_before_us: int
    window_size_us: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What must be read to roll a counter up."""

    counter: str
    head: Head
    #: Windows that no checkpoint includes yet.
    new: tuple[int, ...]
    #: Windows to recount.
    recounts: tuple[int, ...]
    #: Whether rows up to the last dropped slice are to be folded away.
    settles: bool
    handle: object = None

    @property
    def sums(self) -> tuple[int, ...]:
        """The windows whose events must be summed."""
        return tuple(dict.fromkeys((*self.new, *self.recounts))) if self.recounts else self.new

    @property
    def whole(self) -> bool:
        """Whether all the rows are needed, to fold from ``settled`` on."""
        return bool(self.recounts) or self.settles


def group(found: dict[str, Dirt], marks: Iterable[DirtyMark]) -> None:
    """Add *marks* to *found*, which has them by counter."""
    for window_us, counter, recount_us, fold, handle in marks:
        dirt = found.get(counter)
        if dirt is None:
            dirt = found[counter] = Dirt(handle=handle)
        if recount_us:
            dirt.recounts.append(recount_us)
        else:
            dirt.windows.append(window_us)
            if fold is not None:
                dirt.folds[window_us] = fold


def plan(counter: str, dirt: Dirt, head: Head, batch: BatchTimes) -> Plan | None:
    """Return what to read for *counter*; None if there is nothing to do."""
    done_us = head.checkpoint.time_us
    settles = batch.dropped_before_us - 1 > head.settled.time_us
    if dirt.windows and min(dirt.windows) > done_us and not (dirt.recounts or head.pending):
        # Most counters. The rest of this function would return the same.
        return Plan(counter, head, tuple(sorted(dirt.windows)), (), settles, dirt.handle)
    target_us = max(batch.through_us, done_us)
    new = tuple(sorted(window_us for window_us in dirt.windows if window_us > done_us))
    # A checkpoint can be visible before the rows of its batch: a batch that timed out may exist on
    # one replica only, and reading its checkpoint does not repair its rows. So windows that the
    # checkpoint already includes are summed again, and their rows written again, before the
    # watermark passes them.
    asked = [
        window_us
        for window_us in (*dirt.recounts, *(each for each in dirt.windows if each <= done_us))
        if head.settled.time_us < window_us <= target_us and window_us >= batch.dropped_before_us
    ]
    pending = head.recounts(target_us, batch.dropped_before_us)
    recounts = tuple(sorted({*asked, *pending}))
    if not (new or recounts or head.pending) and done_us >= batch.through_us:
        return None
    return Plan(counter, head, new, recounts, settles, dirt.handle)


def update(
    plan: Plan,
    sums: Mapping[int, Fold],
    rows: Sequence[WindowRow],
    batch: BatchTimes,
    undone: Collection[Pending] = (),
) -> CounterUpdate:
    """Return the batch to write for a counter.

    *sums* has the fold of each window of ``plan.sums``; *rows* the partition's rows after
    ``settled`` if ``plan.whole``, else nothing; *undone* the deletes that something has followed.
    """
    head = plan.head
    target_us = max(batch.through_us, head.checkpoint.time_us)
    fresh = [WindowRow(at, sums[at].cleared, sums[at].total) for at in plan.sums]
    settled: Checkpoint | None = None
    if plan.whole:
        merged = {row.window_us: row for row in rows if row.window_us <= target_us}
        merged |= {row.window_us: row for row in fresh}
        in_order = [merged[at] for at in sorted(merged)]
        count = fold_rows(head.settled.count, in_order)
        if plan.settles:
            settled_us = batch.dropped_before_us - 1
            old = (row for row in in_order if row.window_us <= settled_us)
            settled = Checkpoint(settled_us, fold_rows(head.settled.count, old))
    else:
        # New windows only, in order.
        count = fold_rows(head.checkpoint.count, fresh)
    done = tuple(
        each
        for each in head.pending
        if (
            each in undone
            if each.is_delete
            else each.window_us + batch.window_size_us - 1 <= batch.through_us
            and each.recount_us <= target_us
        )
    )
    return CounterUpdate(
        counter=plan.counter,
        rows=tuple(fresh),
        checkpoint=Checkpoint(target_us, count),
        settled=settled,
        pending_done=done,
        handle=plan.handle,
    )
