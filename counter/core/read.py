"""Read counts from the cheapest source that is fresh enough: cache, storage, or storage with the
live tail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from counter import limits
from counter.core.clock_guard import ClockGuard
from counter.errors import SliceMissingError, UnavailableError
from counter.holds import held_name
from counter.ports import Cache, Clock, Store
from counter.types import (
    Accuracy,
    Checkpoint,
    CounterType,
    Head,
    Namespace,
    Span,
    WindowRow,
)
from counter.windows import apply_fold, fold_rows, shard_of

_NEVER: Final = Checkpoint(0, 0)
EMPTY_HEAD: Final = Head(_NEVER, _NEVER)
_ATTEMPTS_MAX: Final = 10


class Count(NamedTuple):
    """A count and the instant it is exact as of.

    An ACCURATE count can also include later events: from a clock that is ahead, or written during
    the read.
    """

    counter: str
    count: int  # type: ignore[assignment]  # no caller uses tuple.count()
    as_of_us: int
    accuracy: Accuracy
    #: What open holds reserve upwards and downwards, of the same moment; 0 if that was not read.
    held: tuple[int, int] = (0, 0)


async def read_heads_and_rows(
    store: Store, namespace: Namespace, counters: Sequence[str], *, through_us: int
) -> list[tuple[Head, list[WindowRow]]]:
    """Return heads with the window rows after ``settled`` up to *through_us*, each of one moment.

    Head and rows are read one after the other. If a settling happened in between, rows may be
    missing, so both are read again.
    """
    heads = await store.rollups.heads(namespace, counters)
    for _ in range(_ATTEMPTS_MAX):
        rows = await store.rollups.rows(namespace, counters, Span(0, through_us + 1))
        again = await store.rollups.heads(namespace, counters)
        found = [
            (head or EMPTY_HEAD, [row for row in part if row.window_us > _settled_us(head)])
            for head, part in zip(heads, rows, strict=True)
        ]
        if all(_settled_us(a) == _settled_us(b) for a, b in zip(heads, again, strict=True)):
            return found
        heads = again
    raise UnavailableError("the counter is being settled again and again", retry_after_us=100_000)


class CountReader:
    """Reads counts; see "The path of one get" in docs/architecture.md."""

    def __init__(
        self, store: Store, cache: Cache, clock: Clock, guard: ClockGuard | None = None
    ) -> None:
        self._store = store
        self._cache = cache
        self._clock = clock
        self._guard = guard
        self._holds = store.capabilities.holds
        #: Cache look-ups of counts, by result.
        self.lookups = dict.fromkeys(("hit", "miss"), 0)

    def peek(
        self, namespace: Namespace, counter: str, max_staleness_us: int | None
    ) -> Count | None:
        """Return the count of *counter* if this process holds one that is fresh enough, without
        I/O; None if :meth:`read` is needed."""
        counter_type = namespace.settings.counter_type
        if counter_type is CounterType.BEST_EFFORT or max_staleness_us == 0:
            return None
        if max_staleness_us is None and counter_type is CounterType.ACCURATE:
            return None
        entry = self._cache.peek(namespace, counter)
        if entry is None:
            return None
        if max_staleness_us is not None:
            oldest_us = self._clock.now_us() - max_staleness_us
            if entry.time_us < oldest_us + namespace.dataset.clock_skew_max_us:
                return None
        self.lookups["hit"] += 1
        return Count(counter, entry.count, entry.time_us, Accuracy.EVENTUAL)

    async def read_one(
        self, namespace: Namespace, counter: str, max_staleness_us: int | None
    ) -> Count:
        """Return what :meth:`read` returns, for one counter and faster."""
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            return (await self.read(namespace, (counter,), max_staleness_us))[0]
        now_us = self._clock.now_us()
        oldest_us = _oldest_us(namespace, max_staleness_us, now_us)
        if oldest_us >= now_us and self._holds is not None and self._holds.may_hold(namespace):
            names = (counter, held_name(counter, 1), held_name(counter, -1))
            count, up, down = await self.read(namespace, names, max_staleness_us)
            return count._replace(held=(up.count, down.count))
        if oldest_us < now_us:
            (entry,) = await self._cache.get_many(namespace, (counter,))
            if entry is not None and entry.time_us >= oldest_us:
                self.lookups["hit"] += 1
                return Count(counter, entry.count, entry.time_us, Accuracy.EVENTUAL)
            self.lookups["miss"] += 1
        watermarks = await self._store.rollups.watermarks(namespace)
        (head,) = await self._store.rollups.heads(namespace, (counter,))
        stored = await self._rolled_up_of(namespace, counter, watermarks, head)
        if oldest_us < now_us:
            await self._cache.put_many(namespace, ((counter, stored),))
            if stored.time_us >= oldest_us:
                return Count(counter, stored.count, stored.time_us, Accuracy.EVENTUAL)
        live = (await self._read_live(namespace, {counter: stored}, now_us))[counter]
        return Count(counter, live.count, live.time_us, Accuracy.ACCURATE)

    async def read(
        self, namespace: Namespace, counters: Sequence[str], max_staleness_us: int | None
    ) -> list[Count]:
        """Return the counts of *counters*, in order, none staler than *max_staleness_us*.

        None means the namespace's default: 0 for ACCURATE, any staleness for EVENTUAL.
        """
        now_us = self._clock.now_us()
        if namespace.settings.counter_type is CounterType.BEST_EFFORT:
            values = await self._cache.best_effort(namespace, counters)
            return [
                Count(counter, value, now_us, Accuracy.BEST_EFFORT)
                for counter, value in zip(counters, values, strict=True)
            ]
        oldest_us = _oldest_us(namespace, max_staleness_us, now_us)
        known: dict[str, Checkpoint] = {}
        if oldest_us < now_us:
            cached = await self._cache.get_many(namespace, counters)
            known = {
                counter: entry
                for counter, entry in zip(counters, cached, strict=True)
                if entry is not None and entry.time_us >= oldest_us
            }
        missing = [counter for counter in dict.fromkeys(counters) if counter not in known]
        if oldest_us < now_us:
            self.lookups["hit"] += len(known)
            self.lookups["miss"] += len(missing)
        live: dict[str, Checkpoint] = {}
        if missing:
            stored = await self.rolled_up(namespace, missing)
            if oldest_us < now_us:
                await self._cache.put_many(namespace, list(stored.items()))
            # An accurate read always gets the tail; otherwise a wrong clock could make it skip the
            # tail.
            stale = {
                name: each
                for name, each in stored.items()
                if each.time_us < oldest_us or oldest_us >= now_us
            }
            live = await self._read_live(namespace, stale, now_us)
            known |= stored
        return [
            Count(counter, live[counter].count, live[counter].time_us, Accuracy.ACCURATE)
            if counter in live
            else Count(counter, known[counter].count, known[counter].time_us, Accuracy.EVENTUAL)
            for counter in counters
        ]

    async def rolled_up(
        self, namespace: Namespace, counters: Sequence[str]
    ) -> dict[str, Checkpoint]:
        """Return the rolled-up count of each of *counters*.

        The watermark is read FIRST: if it is read after the checkpoint, it may include a window
        that the checkpoint does not.
        """
        watermarks = await self._store.rollups.watermarks(namespace)
        heads = await self._store.rollups.heads(namespace, counters)
        return {
            counter: await self._rolled_up_of(namespace, counter, watermarks, head)
            for counter, head in zip(counters, heads, strict=True)
        }

    async def _rolled_up_of(
        self, namespace: Namespace, counter: str, watermarks: Sequence[int], head: Head | None
    ) -> Checkpoint:
        """Return a counter's count from its *head*, which was read after *watermarks*."""
        shards = namespace.settings.shards
        watermark_us = watermarks[0 if shards == 1 else shard_of(counter, shards)]
        if head is None:
            return Checkpoint(watermark_us, 0)
        as_of_us = max(watermark_us, head.checkpoint.time_us)
        if head.pending and head.recounts(as_of_us, 0):
            # Rows are guaranteed to exist only up to the watermark.
            return await self._recount(namespace, counter, watermark_us)
        return Checkpoint(as_of_us, head.checkpoint.count)

    async def _recount(self, namespace: Namespace, counter: str, as_of_us: int) -> Checkpoint:
        """Fold a counter here, because no worker has done its pending recount yet."""
        as_of_us, settled, rows = await self._settled_and_rows(namespace, counter, as_of_us)
        return Checkpoint(as_of_us, fold_rows(settled.count, rows))

    async def _settled_and_rows(
        self, namespace: Namespace, counter: str, as_of_us: int
    ) -> tuple[int, Checkpoint, list[WindowRow]]:
        """Return the instant of the result, a counter's settled fold, and its later rows.

        The instant is *as_of_us*, or ``settled`` if that is later by now. Windows with a pending
        recount are summed again."""
        for _ in range(_ATTEMPTS_MAX):
            dropped_before_us = await self._store.control.dropped_before(namespace.dataset)
            [(head, rows)] = await read_heads_and_rows(
                self._store, namespace, [counter], through_us=as_of_us
            )
            if head.settled.time_us > as_of_us:
                as_of_us = head.settled.time_us
                continue
            recounts = head.recounts(as_of_us, dropped_before_us)
            try:
                sums = await self._store.events.sums(namespace, [(counter, p) for p in recounts])
            except SliceMissingError:
                continue
            merged = {row.window_us: row for row in rows}
            for window_us, fold in zip(recounts, sums, strict=True):
                merged[window_us] = WindowRow(window_us, fold.cleared, fold.total)
            return as_of_us, head.settled, [merged[window_us] for window_us in sorted(merged)]
        raise UnavailableError("slices were dropped during each attempt", retry_after_us=100_000)

    async def _read_live(
        self, namespace: Namespace, stored: Mapping[str, Checkpoint], now_us: int
    ) -> dict[str, Checkpoint]:
        """Return stored counts with the live tail.

        The tail does not end at this reader's now: an event that a fast clock accepted must be
        visible to a reader with a slow clock.
        """
        if not stored:
            return {}
        after = [(counter, each.time_us) for counter, each in stored.items()]
        tails = await self._store.events.tails(namespace, after, self.tail_end(namespace))
        return {
            counter: Checkpoint(max(now_us, each.time_us), apply_fold(each.count, tail))
            for (counter, each), tail in zip(stored.items(), tails, strict=True)
        }

    def tail_end(self, namespace: Namespace) -> int | None:
        """Return an instant later than every event acknowledged by now; None if it is unknown.

        It uses the bound of all future limits, because the namespace's own limit may have been
        another one, or may have changed without this process knowing yet.
        """
        now_us, dataset = self._clock.now_us(), namespace.dataset
        if self._guard is None or not self._guard.is_sure(dataset):
            return None
        return now_us + limits.FUTURE_LIMIT_MAX_US + 2 * dataset.clock_skew_max_us + 1

    async def history(
        self, namespace: Namespace, counter: str, to_us: int
    ) -> tuple[Checkpoint, list[WindowRow], int]:
        """Return the settled fold, the later window rows that start before *to_us*, and the instant
        up to which the rows are exact."""
        watermarks = await self._store.rollups.watermarks(namespace)
        watermark_us = watermarks[shard_of(counter, namespace.settings.shards)]
        as_of_us, settled, rows = await self._settled_and_rows(namespace, counter, watermark_us)
        return settled, [row for row in rows if row.window_us < to_us], as_of_us


def _oldest_us(namespace: Namespace, max_staleness_us: int | None, now_us: int) -> int:
    """Return the earliest acceptable instant of a count; *now_us* or later if no rolled-up count
    is acceptable."""
    if max_staleness_us is None and namespace.settings.counter_type is CounterType.EVENTUAL:
        return 0
    return now_us - (max_staleness_us or 0) + namespace.dataset.clock_skew_max_us


def _settled_us(head: Head | None) -> int:
    return 0 if head is None else head.settled.time_us
