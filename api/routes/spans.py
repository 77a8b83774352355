"""What a counter did in a span of time: its history in steps, and the change between two
instants."""

from __future__ import annotations

from collections.abc import Sequence

from api.http.calendar import Step
from counter import limits
from counter.clock import to_rfc3339
from counter.core.read import CountReader
from counter.core.service import CounterService
from counter.durations import format_duration
from counter.errors import InvalidParameterError
from counter.folds import apply_fold, fold_rows
from counter.types import Checkpoint, Namespace, Span, WindowRow


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
    namespace: Namespace,
    counter: str,
    from_us: int,
    to_us: int | None,
) -> tuple[int, int, int]:
    """Return the instant *to_us*, or now, the count just before it, and its change since *from_us*.

    Both are exact for all adds that were acknowledged before the call. Raises
    InvalidParameterError if one is not at the end of a window, or earlier than what is kept.
    """
    CounterService.require_events(namespace, "a span of time")
    size_us, now_us = namespace.settings.rollup_window_us, reader.clock.now_us()
    settled, rows, through_us = await reader.history(namespace, counter, limits.TIME_MAX_US)
    wanted = (("from", from_us), *((("to", to_us),) if to_us is not None else ()))
    for name, at_us in wanted:
        _check_bound(name, at_us, _first_us(settled), now_us - now_us % size_us, size_us)
    if to_us is not None and to_us <= from_us:
        raise InvalidParameterError(
            f"to {to_rfc3339(to_us)} is not after from {to_rfc3339(from_us)}", field="to"
        )
    if max(at_us for _, at_us in wanted) > through_us + 1:
        # Windows that are not rolled up, and all later events, from one read.
        end_us = now_us + limits.FUTURE_LIMIT_MAX_US + 2 * namespace.dataset.clock_skew_max_us
        span = Span(through_us + 1, end_us - end_us % size_us + size_us)
        [folds] = await reader.store.events.window_folds(namespace, [counter], span)
        rows = [*rows, *(WindowRow(at, *folds[at]) for at in sorted(folds))]
    before = fold_rows(settled.count, (row for row in rows if row.window_us < from_us))
    if to_us is not None:
        count = fold_rows(settled.count, (row for row in rows if row.window_us < to_us))
        return to_us, count, count - before
    count = fold_rows(settled.count, rows)
    if from_us <= through_us + 1:
        [tail] = await reader.store.events.tails(namespace, [(counter, through_us)])
        count = apply_fold(count, tail)
    return now_us, count, count - before


def _first_us(settled: Checkpoint) -> int:
    """Return the earliest instant as of which the count is known."""
    return settled.time_us + 1 if settled.time_us else 0


def _check_bound(name: str, at_us: int, first_us: int, last_us: int, size_us: int) -> None:
    if first_us <= at_us <= last_us and not at_us % size_us:
        return
    low_us = max(first_us, min(at_us - at_us % size_us, last_us))
    high_us = min(low_us + size_us, last_us)
    raise InvalidParameterError(
        f"{name} is {to_rfc3339(at_us)}; the count is known at the ends of windows of"
        f" {format_duration(size_us)} from {to_rfc3339(first_us)} to {to_rfc3339(last_us)}, next to"
        f" it at {to_rfc3339(low_us)} and {to_rfc3339(high_us)}",
        field=name,
    )
