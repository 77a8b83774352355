"""Run the rollup worker: read dirty, closed windows, fold them with the roller, and write the
result.

It is stateless: if it is killed, another one repeats the batch. Any number may run; leases avoid
duplicate work, and duplicate work is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

from counter.background import pause
from counter.core.clock_guard import ClockGuard, checked_now_us
from counter.core.namespaces import Namespaces
from counter.core.resolve import Resolver
from counter.errors import (
    ClockSkewError,
    NamespaceUnknownError,
    StoreUnavailableError,
    TokenPendingError,
    UnavailableError,
)
from counter.limits import DRAIN_TIMEOUT_US, MILLISECOND, MINUTE, ROLLUP_CONCURRENCY, SECOND
from counter.ports import Cache, Clock, Store
from counter.types import CounterType, Namespace, Span
from counter.windows import closed_through, window_of
from rollup.atomics import AtomicSettler
from rollup.audits import Audits
from rollup.batches import BatchRoller
from rollup.leases import MAINTENANCE, Leases, slot_of
from rollup.limiter import Limiter
from rollup.maintenance import Maintenance
from rollup.partitions import Partitions
from rollup.roller import BatchTimes

_log = logging.getLogger("counter.rollup")
#: Marks of a shard that one read returns, and that are rolled up before the next read. If each
#: read passes over all events of its windows, it returns _MARKS_PER_PASS times as many.
_MARKS_PER_READ: Final = 1_000
_MARKS_PER_PASS: Final = 20
#: Windows of a shard that are rolled up before its watermark moves: doubled after each success,
#: halved after a failure, because a failure discards them all.
_WINDOWS_FIRST: Final = 64
_WINDOWS_MAX: Final = 1_024
#: Counters per write batch: a transaction that adds wait behind, or a share of the store's
#: capacity.
_BATCH_TRANSACTIONAL: Final = 500
_BATCH: Final = 32
_SHARDS_AT_ONCE_MAX: Final = 16
_PAUSE_MIN_US: Final = 50 * MILLISECOND
_PAUSE_MAX_US: Final = 500 * MILLISECOND
_MAINTENANCE_EVERY_US: Final = SECOND
_PARTITIONS_EVERY_US: Final = MINUTE
_PARTITIONS: Final = "partitions"
_IDLE: Final = "idle shards"
_UNEXPECTED: Final = "a pass failed unexpectedly; see the log"

#: A namespace's id and a shard of it.
_Shard = tuple[int, int]
#: Work that may be in progress, or failing.
_Key = _Shard | str
_Task = asyncio.Task[int | Exception]


class _Due(NamedTuple):
    """A shard with a closed window that is not rolled up."""

    #: Its watermark as last seen.
    passed_us: int
    key: _Shard
    #: The name of its namespace.
    name: str


class _Rolled(NamedTuple):
    """What was rolled up of a shard's closed windows."""

    #: The last instant that is done; None if the part was not finished.
    through_us: int | None
    #: Counters written.
    written: int
    marks: int
    #: How many windows the part could have.
    windows: int


class RollupWorker:
    """Rolls up the shards of its leases, windows in order; all shards if it has no leases."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        clock: Clock,
        namespaces: Namespaces,
        *,
        batch_counters: int | None = None,
        concurrency: int = ROLLUP_CONCURRENCY,
        leases: Leases | None = None,
        guard: ClockGuard | None = None,
    ) -> None:
        """At most *concurrency* counters are read or written at once; in a store of one file
        only one batch, because more would make adds wait longer behind its one writer."""
        can, separate = store.capabilities, store.separate_writes
        batch = batch_counters or (_BATCH_TRANSACTIONAL if separate is None else _BATCH)
        groups = 1 if can.embedded else max(1, concurrency // (batch_counters or _BATCH))
        self._store = store
        self._clock = clock
        self._namespaces = namespaces
        self._leases = leases
        self._guard = guard
        #: Audits that run beside the rollup; set by the caller.
        self.audits: Audits | None = None
        self.limiter = Limiter(clock, limit_max=groups)
        self._pass_permits = asyncio.Semaphore(
            1 if store.capabilities.embedded else _SHARDS_AT_ONCE_MAX
        )
        #: Passes that wait for a permit.
        self._passes_waiting = 0
        self.partitions = Partitions(store, clock)
        self.batches = BatchRoller(
            store, cache, self.limiter, self.partitions, batch_counters=batch
        )
        self._atomics = None
        if separate is not None:
            resolver = Resolver(store, clock, guard)
            self._atomics = AtomicSettler(store, separate, resolver, self.limiter, clock)
        self.maintenance = Maintenance(store, clock, self.partitions, guard)
        self._maintained_us = -_MAINTENANCE_EVERY_US
        self._partitions_checked_us = clock.boottime_us()
        self._stop = asyncio.Event()
        #: Set when this worker got slots, or is to stop.
        self._wake = asyncio.Event() if leases is None else leases.taken
        #: Each shard's watermark as last seen here. It never moves back, so a window that was
        #: passed stays passed, even if another worker works on the shard.
        self._passed_us: dict[_Shard, int] = {}
        #: How many windows of each shard are rolled up at once; _WINDOWS_FIRST if missing.
        self._windows: dict[_Shard, int] = {}
        #: The number of this worker's shards.
        self._shard_count = 0
        self._under_way: dict[_Key, _Task] = {}
        self._troubles: dict[_Key, str] = {}
        #: Counters written, passes over shards done and failed, since the process began.
        self.tally = dict.fromkeys(("counters", "passes", "failures"), 0)

    @property
    def trouble(self) -> str | None:
        """Why the rollup does not work; None if it works."""
        if self._leases is not None and self._leases.trouble is not None:
            return f"leases cannot be renewed: {self._leases.trouble}"
        return next(iter(self._troubles.values()), None)

    @property
    def namespaces(self) -> Namespaces:
        """The namespaces whose shards are rolled up."""
        return self._namespaces

    @property
    def shards_unread(self) -> int:
        """The number of this worker's shards whose watermark was not read yet."""
        return max(0, self._shard_count - len(self._passed_us))

    @property
    def maintains(self) -> bool:
        """Whether this worker maintains the slices, for all workers."""
        return self._holds(MAINTENANCE)

    def passed_through(self) -> Mapping[_Shard, int]:
        """The watermark, as last seen, of each shard that this worker rolls up."""
        return dict(self._passed_us)

    async def run(self, stop: asyncio.Event, drain_us: int = DRAIN_TIMEOUT_US) -> None:
        """Work until *stop* is set; then finish the work in flight and release the lease.

        After half of *drain_us* the remaining work is cancelled, and the next worker of the shard
        repeats it: the other half is for the lease and for closing connections.

        If other processes change namespaces, too, :func:`rollup.parts.keep_reading` must run
        beside it.
        """
        self._stop = stop
        leases_end = asyncio.Event()
        keeping = auditing = None
        waking = asyncio.create_task(self._wake_on(stop))
        if self.audits is not None:
            auditing = asyncio.create_task(self.audits.run(stop, lambda: self.maintains))
        if self._leases is not None:
            keeping = asyncio.create_task(self._leases.keep(leases_end))
        try:
            while not stop.is_set():
                await self._attempt("schedule", "all", self._schedule)
                # One event for both, because this waits several times a second.
                await pause(self._wake, self._pause_us() / SECOND)
                self._wake.clear()
            if self._under_way:
                await asyncio.wait(self._under_way.values(), timeout=drain_us / 2 / SECOND)
        finally:
            left = list(self._under_way.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if auditing is not None:
                auditing.cancel()
            waking.cancel()
            leases_end.set()
            if self._leases is not None and keeping is not None:
                await keeping
                await self._leases.leave()

    async def _wake_on(self, stop: asyncio.Event) -> None:
        """Wake the worker when *stop* is set."""
        await stop.wait()
        self._wake.set()

    async def tick(self) -> int:
        """Do one pass over slices and shards; return how many counters were written.

        Raises the first failure, after everything else is done. :meth:`run` does the same steps at
        their own intervals and logs failures: this is for tests and benchmarks, which need one pass
        that has ended and its failure.
        """
        if not self._store.capabilities.embedded:
            await self._namespaces.refresh()
        done: list[int | Exception] = []
        if self._holds(MAINTENANCE):
            done.append(await self._attempt(MAINTENANCE, MAINTENANCE, self._maintain))
        due = self._due()
        done.append(await self._attempt(_IDLE, _IDLE, partial(self._pass_idle, due)))
        done += await asyncio.gather(*self._start_due(due))
        for each in done:
            if isinstance(each, Exception):
                raise each
        return sum(each for each in done if isinstance(each, int))

    async def _schedule(self) -> int:
        """Start what is due and not in progress."""
        now_us = self._clock.boottime_us()
        if self._holds(MAINTENANCE) and now_us - self._maintained_us >= _MAINTENANCE_EVERY_US:
            self._start(MAINTENANCE, MAINTENANCE, self._maintain)
        if now_us - self._partitions_checked_us >= _PARTITIONS_EVERY_US:
            self._start(_PARTITIONS, _PARTITIONS, self.check_partitions)
        due = self._due()
        # If it fails, each shard gets its own pass.
        await self._attempt(_IDLE, _IDLE, partial(self._pass_idle, due))
        self._start_due(due)
        return 0

    async def _maintain(self) -> int:
        await self.maintenance.run_once()
        self._maintained_us = self._clock.boottime_us()
        return 0

    async def check_partitions(self) -> int:
        """Share how much was written, and compute the event buckets of the next slices."""
        self._partitions_checked_us = self._clock.boottime_us()
        datasets = {each.dataset.id: each.dataset for each in self._namespaces.all()}
        await self.partitions.check(datasets.values(), is_first=self._holds(MAINTENANCE))
        return 0

    def _holds(self, slot: str) -> bool:
        return self._leases is None or self._leases.holds(slot)

    def _holds_shard(self, key: _Shard) -> bool:
        return self._leases is None or self._leases.holds(slot_of(*key))

    def _due(self) -> list[_Due]:
        """Return the shards with a closed window and no pass in progress, the longest behind first.

        Raises StoreUnavailableError if the copy of the namespaces is too old to close windows.
        """
        self._check_namespaces()
        now_us = self._clock.now_us()
        ours: set[_Key] = set()
        due: list[_Due] = []
        for namespace in self._namespaces.all():
            if namespace.settings.counter_type is CounterType.BEST_EFFORT:
                continue
            closed_us = closed_through(namespace, now_us)
            for shard in range(namespace.settings.shards):
                key = (namespace.id, shard)
                if not self._holds_shard(key):
                    continue
                ours.add(key)
                passed_us = self._passed_us.get(key, 0)
                if passed_us < closed_us and key not in self._under_way:
                    due.append(_Due(passed_us, key, namespace.name))
        # Forget the failures of shards that other workers hold now.
        self._passed_us = {key: at for key, at in self._passed_us.items() if key in ours}
        self._windows = {key: number for key, number in self._windows.items() if key in ours}
        self._shard_count = len(ours)
        for key in [key for key in self._troubles if key not in ours and isinstance(key, tuple)]:
            del self._troubles[key]
        due.sort(key=lambda each: each.passed_us)
        return due

    def _start_due(self, due: Sequence[_Due]) -> list[_Task]:
        """Start a pass over each shard of *due* that :meth:`_pass_idle` did not pass."""
        return [
            self._start(key, f"{name}/{key[1]}", partial(self._pass, name, key))
            for passed_us, key, name in due
            if self._passed_us.get(key, 0) == passed_us
        ]

    async def _pass_idle(self, due: Sequence[_Due]) -> int:
        """Pass the shards of *due* that have no marks, those of a namespace together."""
        shards: dict[str, list[_Shard]] = {}
        for _, key, name in due:
            shards.setdefault(name, []).append(key)
        if not shards:
            return 0
        # A fence is permanent, so a wrong clock must not write it.
        checked_now_us(self._clock, self._guard)
        now_us = await self._store.rollups.fence()
        done = await asyncio.gather(
            *(self._pass_idle_of(name, keys, now_us) for name, keys in shards.items()),
            return_exceptions=True,
        )
        for each in done:
            if each is not None:
                raise each
        return 0

    async def _pass_idle_of(self, name: str, keys: Sequence[_Shard], now_us: int) -> None:
        """Do :meth:`_pass_idle` for one namespace. The order matters: clock, watermark, marks.

        The watermark as last seen suffices, because it never moves back. If a shard's watermark was
        not read yet, all its marks are read, because a crash may have left some to delete.
        """
        namespace = self._namespaces.get(name)
        self._check_clock(namespace, now_us)
        closed_us = closed_through(namespace, now_us)
        passed_us = {
            shard: self._passed_us.get((namespace_id, shard), 0)
            for namespace_id, shard in keys
            if namespace_id == namespace.id
            and self._passed_us.get((namespace_id, shard), 0) < closed_us
        }
        if not passed_us:
            return
        after_us = min(passed_us.values())
        span = Span.after(after_us, closed_us)
        marked = await self._store.rollups.marked(namespace, list(passed_us), span)
        idle = sorted(passed_us.keys() - set(marked))
        if idle:
            await self._store.rollups.advance(namespace, idle, closed_us)
            self._passed_us.update({(namespace.id, shard): closed_us for shard in idle})
            self.tally["passes"] += len(idle)

    def _start(self, key: _Key, name: str, work: Callable[[], Awaitable[int]]) -> _Task:
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._attempt(key, name, work))
            task.add_done_callback(lambda _: self._under_way.pop(key))
        return task

    def _check_namespaces(self) -> None:
        """Raise StoreUnavailableError if settings may have changed unnoticed."""
        if not self._namespaces.is_fresh:
            raise StoreUnavailableError(
                "the namespaces could not be read for too long; no window is closed by what"
                " may have changed since"
            )

    async def _pass(self, name: str, key: _Shard) -> int:
        async with self._pass_permit():
            # Look it up again: this may have waited for long.
            namespace = self._namespaces.get(name)
            if namespace.id != key[0] or not self._may_continue(key):
                return 0
            return await self.roll_shard(namespace, key[1])

    @asynccontextmanager
    async def _pass_permit(self) -> AsyncIterator[None]:
        """Limit the passes that run at once; the one that has waited longest is next."""
        self._passes_waiting += 1
        try:
            await self._pass_permits.acquire()
        finally:
            self._passes_waiting -= 1
        try:
            yield
        finally:
            self._pass_permits.release()

    async def _attempt(
        self, key: _Key, name: str, work: Callable[[], Awaitable[int]]
    ) -> int | Exception:
        """Do *work*; record its failure, which does not stop other work."""
        try:
            written = await work()
        except NamespaceUnknownError:
            _log.info("the namespace of %s was deleted under the rollup", name)
            self._troubles.pop(key, None)
            return 0
        except (UnavailableError, TokenPendingError) as error:
            if key not in self._troubles:
                _log.warning("the rollup of %s waits: %s", name, error.detail)
            return self._failed(key, error, error.detail)
        except Exception as error:
            # The worker must keep running: it also makes the slices.
            _log.exception("the rollup of %s failed unexpectedly", name)
            return self._failed(key, error, _UNEXPECTED)
        if self._troubles.pop(key, None) is not None:
            _log.info("the rollup of %s goes on", name)
        return written

    def _failed(self, key: _Key, error: Exception, detail: str) -> Exception:
        self.tally["failures"] += 1
        self._troubles[key] = detail
        if isinstance(key, tuple):
            self._windows[key] = max(1, self._windows_at_once(key) // 2)
        return error

    async def roll_shard(self, namespace: Namespace, shard: int) -> int:
        """Roll up the closed windows of one shard; return how many counters were written.

        It ends after one part if other passes wait: :meth:`_schedule` starts it again.

        The order matters: clock, ``dropped_before``, watermark, marks, checkpoints, events. The
        watermark is read each time, because another worker may have moved it.
        """
        checked_now_us(self._clock, self._guard, namespace.dataset)
        now_us = await self._store.rollups.fence()
        self._check_clock(namespace, now_us)
        dropped_before_us = await self._store.control.dropped_before(namespace.dataset)
        watermark_us = (await self._store.rollups.watermarks(namespace))[shard]
        closed_us = closed_through(namespace, now_us)
        key = (namespace.id, shard)
        written = 0
        while watermark_us < closed_us:
            part = await self._roll_part(key, namespace, dropped_before_us, watermark_us, closed_us)
            self._windows[key] = min(2 * part.windows, _WINDOWS_MAX)
            written += part.written
            self.tally["counters"] += part.written
            if part.through_us is None:
                break
            watermark_us = part.through_us
            await self._store.rollups.advance(namespace, [shard], watermark_us)
            # Always the first time: a crash may have left part.
            if part.marks or key not in self._passed_us:
                await self._store.rollups.drop_marks(namespace, shard, watermark_us)
            if self._passes_waiting or not self._may_continue(key):
                break
        self.tally["passes"] += 1
        self._passed_us[key] = watermark_us
        return written

    def _check_clock(self, namespace: Namespace, now_us: int) -> None:
        """Raise UnavailableError if *now_us*, which was just read, must not close windows."""
        # A clock that is ahead would close windows that still get events.
        if checked_now_us(self._clock, self._guard, namespace.dataset) < now_us:
            raise ClockSkewError(
                "the clock was briefly ahead; the reading is discarded", retry_after_us=SECOND
            )
        self._check_namespaces()

    @property
    def _marks_per_read(self) -> int:
        """How many marks are read at once."""
        store = self._store
        is_pass = store.separate_writes is None and not store.capabilities.embedded
        return _MARKS_PER_READ * _MARKS_PER_PASS if is_pass else _MARKS_PER_READ

    def _windows_at_once(self, key: _Shard) -> int:
        return self._windows.get(key, _WINDOWS_FIRST)

    def _may_continue(self, key: _Shard) -> bool:
        """Return whether to start more work on the shard: not during shutdown, and not if another
        worker has it now. Unfinished work is harmless: the next worker repeats it."""
        return not self._stop.is_set() and self._holds_shard(key)

    async def _roll_part(
        self,
        key: _Shard,
        namespace: Namespace,
        dropped_before_us: int,
        after_us: int,
        closed_us: int,
    ) -> _Rolled:
        """Roll up some whole windows after *after_us*: as many as the shard's bound and one read of
        marks allow, but at least one."""
        _, shard = key
        size_us = namespace.settings.rollup_window_us
        windows = self._windows_at_once(key)
        end_us = window_of(after_us, size_us) + (1 + windows) * size_us
        through_us, is_whole = min(closed_us, end_us - 1), True
        span = Span.after(after_us, through_us)
        done = await self.batches.roll_window(
            namespace, shard, span, dropped_before_us, lambda: self._may_continue(key)
        )
        if done is not None:
            # It has no marks but those that were rolled up.
            return _Rolled(*done, 0, windows)
        dirty = partial(self._store.rollups.dirty, namespace, shard)
        marks, rest = await dirty(span, self._marks_per_read)
        if rest is not None:
            # The last window may be incomplete: leave it for the next read, or continue within it.
            last_us = marks[-1].window_us
            is_whole = marks[0].window_us < last_us
            through_us = (last_us if is_whole else last_us + size_us) - 1
            # The next read asks only for what one read can return.
            windows = max(1, (through_us - after_us) // size_us)
        atomics = 0
        if self._atomics is not None:
            through_us, atomics = await self._atomics.settle(
                namespace, shard, after_us=after_us, through_us=through_us
            )
        marks = marks[: bisect_right(marks, through_us, key=lambda mark: mark.window_us)]
        # Up to the last mark, so that a batch that is repeated after a crash has the same end.
        batch_us = marks[-1].window_us + size_us - 1 if marks else through_us
        batch = BatchTimes(batch_us, dropped_before_us, size_us)
        written = await self.batches.roll(namespace, marks, batch)
        while marks and not is_whole and rest is not None:
            if not self._may_continue(key):
                return _Rolled(None, written, len(marks), windows)
            more, rest = await dirty(Span.after(after_us, through_us), self._marks_per_read, rest)
            written += await self.batches.roll(namespace, more, batch)
        return _Rolled(through_us, written, len(marks) + atomics, windows)

    def _pause_us(self) -> int:
        windows = [each.settings.rollup_window_us for each in self._namespaces.all()]
        shortest_us = min(windows, default=_PAUSE_MAX_US)
        return max(_PAUSE_MIN_US, min(_PAUSE_MAX_US, shortest_us // 4))
