"""What a counter did in a span of time: its history in steps, and the change between two
instants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from api.http.calendar import Step
from counter import limits
from counter.clock import to_rfc3339
from counter.core.read import CountReader
from counter.core.service import CounterService
from counter.errors import InvalidParameterError
from counter.ports import EventStore
from counter.quantities import format_duration
from counter.types import Checkpoint, Namespace, Span, WindowRow
from counter.windows import apply_fold, fold_rows


def history_points(
    settled: Checkpoint, rows: Sequence[WindowRow], from_us: int, to_us: int, end_of: Step
) -> list[tuple[int, int, int]]:
    """(instant, count just before it, change since the step began) for each step of [from, to).

    The last step ends at *to_us*. What lies at or before *settled* is known only as one sum: it is
    in the first count, and in no delta.
    """
    at_us = max(from_us, _first_us(settled))
    count = fold_rows(settled.count, (row for row in rows if row.window_us < at_us))
    later = iter([row for row in rows if row.window_us >= at_us])
    row = next(later, None)
    points: list[tuple[int, int, int]] = []
    while at_us < to_us:
        at_us = min(end_of(at_us), to_us)
        before = count
        while row is not None and row.window_us < at_us:
            count = row.total if row.cleared else count + row.total
            row = next(later, None)
        points.append((at_us, count, count - before))
    return points


async def change_between(
    reader: CountReader,
    events: EventStore,
    now_us: int,
    namespace: Namespace,
    counter: str,
    bounds: tuple[int | None, int | None],
) -> tuple[int, int, int]:
    """Return the second of *bounds*, or now, the count just before it, and its change since the
    first of them, or since the beginning.

    Both are exact for all adds that were acknowledged before the call. Raises
    InvalidParameterError if one is not at the end of a window, or earlier than what is kept.
    """
    CounterService.require_events(namespace, "a span of time")
    from_us, to_us = bounds
    if from_us is not None and to_us is not None and to_us <= from_us:
        raise InvalidParameterError(
            f"to {to_rfc3339(to_us)} is not after from {to_rfc3339(from_us)}", field="to"
        )
    settled, rows, through_us = await reader.history(namespace, counter, limits.TIME_MAX_US)
    for name, at_us in zip(("from", "to"), bounds, strict=True):
        if at_us is not None:
            _check_bound(name, at_us, settled, now_us, namespace.settings.rollup_window_us)
    # Bounds in windows that are not rolled up, and all later events, from one read.
    late = [at_us for at_us in bounds if at_us is not None and at_us > through_us + 1]
    after = [(counter, through_us), *((counter, at_us - 1) for at_us in late)]
    tail, *tails = await events.tails(namespace, after, reader.tail_end(namespace))
    # In a thread: a counter may have a row for each window of a week.
    rolled_up, before = await asyncio.to_thread(_counts_before, settled, rows, bounds)
    count_now = apply_fold(rolled_up, tail)
    before |= {at_us: count_now - later.total for at_us, later in zip(late, tails, strict=True)}
    # What a clear erased is in no tail after an instant before it.
    erased = [at_us for at_us, later in zip(late, tails, strict=True) if later.cleared]
    if erased:
        span = Span(through_us + 1, max(erased))
        [folds] = await events.window_folds(namespace, [counter], span)
        known = [WindowRow(start_us, *folds[start_us]) for start_us in sorted(folds)]
        before |= _counts_before(Checkpoint(through_us, rolled_up), known, erased)[1]
    count = count_now if to_us is None else before[to_us]
    end_us = now_us if to_us is None else min(to_us, now_us)
    return end_us, count, count - (0 if from_us is None else before[from_us])


def _counts_before(
    settled: Checkpoint, rows: Sequence[WindowRow], bounds: Iterable[int | None]
) -> tuple[int, dict[int, int]]:
    """Return the count of all *rows*, and that of the rows before each bound."""
    before = {
        at_us: fold_rows(settled.count, (row for row in rows if row.window_us < at_us))
        for at_us in bounds
        if at_us is not None
    }
    return fold_rows(settled.count, rows), before


def _first_us(settled: Checkpoint) -> int:
    """Return the earliest instant as of which the count is known."""
    return settled.time_us + 1 if settled.time_us else 0


def _check_bound(name: str, at_us: int, settled: Checkpoint, now_us: int, size_us: int) -> None:
    """Raise InvalidParameterError unless *at_us* is the end of a window whose events are kept. The
    latest one is that of now: this clock may be behind the caller's."""
    first_us, last_us = _first_us(settled), now_us - now_us % size_us + size_us
    if first_us <= at_us <= last_us and not at_us % size_us:
        return
    low_us = max(first_us, min(at_us - at_us % size_us, last_us))
    near = dict.fromkeys((low_us, min(low_us + size_us, last_us)))
    raise InvalidParameterError(
        f"{name} is {to_rfc3339(at_us)}; the count is known at the ends of windows of"
        f" {format_duration(size_us)} from {to_rfc3339(first_us)} to {to_rfc3339(last_us)}, next to"
        f" it at {' and '.join(map(to_rfc3339, near))}",
        field=name,
    )
