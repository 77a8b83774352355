"""The rollup worker: reads what is dirty and closed, has the roller fold it, writes it back.

It holds nothing that matters: kill it at any instant, and another one does the batch again. Any
number may run; leases spare them doing the same work twice, and it is right where they do.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

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
from counter.types import CounterType, Mark, Namespace
from counter.windows import closed_through, window_of
from rollup.atomics import AtomicSettler
from rollup.audits import Audits
from rollup.batches import BatchRoller
from rollup.leases import MAINTENANCE, Leases, slot_of
from rollup.limiter import Limiter
from rollup.maintenance import Maintenance
from rollup.partitions import Partitions
from rollup.roller import Batch

_log = logging.getLogger("counter.rollup")
#: So many marks of a shard are read at once, and rolled up before more are read.
_MARKS_PER_READ: Final = 1_000
#: Windows of a shard that are rolled up before its watermark moves: twice as many after each
#: success, half as many after a failure, because a failure discards them all.
_WINDOWS_FIRST: Final = 64
_WINDOWS_MAX: Final = 1_024
#: Counters that are written together: a transaction's worth, which adds wait behind, or a share of
#: the store's attention.
_BATCH_TRANSACTIONAL: Final = 500
_BATCH: Final = 32
_SHARDS_AT_ONCE_MAX: Final = 16
_PAUSE_MIN_US: Final = 50 * MILLISECOND
_PAUSE_MAX_US: Final = 500 * MILLISECOND
_MAINTENANCE_EVERY_US: Final = SECOND
_PARTITIONS_EVERY_US: Final = MINUTE
_PARTITIONS: Final = "partitions"
_IDLE: Final = "idle shards"
_SURPRISE: Final = "a pass failed in a way that it should not; see the log"

#: A namespace's id and a shard of it.
_Shard = tuple[int, int]
#: What may be under way, or in trouble.
_Key = _Shard | str
_Task = asyncio.Task[int | Exception]


class _Due(NamedTuple):
    """A shard that has a closed window, its watermark as last seen, its namespace's name."""

    passed_us: int
    key: _Shard
    name: str


class _Some(NamedTuple):
    """A part of a shard's closed windows: the last instant that is done (None: not all of it),
    counters written, and whether there were marks."""

    through_us: int | None
    written: int
    marks: int


class RollupWorker:
    """Rolls up the shards that it has leases for, windows in order; all where it has no leases."""

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
        """*concurrency* counters are read or written at once, at most; in a store of one file one
        batch is: more would only make adds wait longer behind its one writer."""
        batch = batch_counters or (_BATCH_TRANSACTIONAL if store.transactional else _BATCH)
        groups = 1 if store.transactional else max(1, concurrency // batch)
        self._store = store
        self._clock = clock
        self._namespaces = namespaces
        self._leases = leases
        self._guard = guard
        #: What is audited beside the rollup; whoever has it done sets it.
        self.audits: Audits | None = None
        self.limiter = Limiter(clock, limit_max=groups)
        self._lanes = asyncio.Semaphore(1 if store.transactional else _SHARDS_AT_ONCE_MAX)
        #: Passes that wait for a lane.
        self._waiting = 0
        self.partitions = Partitions(store, clock)
        self.batches = BatchRoller(
            store, cache, self.limiter, self.partitions, batch_counters=batch
        )
        self._atomics = AtomicSettler(store, Resolver(store, clock, guard), self.limiter, clock)
        self.maintenance = Maintenance(store, clock, namespaces, self.partitions, guard)
        self._maintained_us = -_MAINTENANCE_EVERY_US
        self._looked_us = clock.boottime_us()
        self._stop = asyncio.Event()
        #: Each shard's watermark as last seen here. It never moves back, so a window that was
        #: passed stays passed, whoever else works on the shard.
        self._passed_us: dict[_Shard, int] = {}
        #: How many windows of each shard the next step may take; _WINDOWS_FIRST where missing.
        self._windows: dict[_Shard, int] = {}
        #: How many shards are this worker's.
        self._shards = 0
        self._under_way: dict[_Key, _Task] = {}
        self._troubles: dict[_Key, str] = {}
        #: Counters written, passes over shards done and failed, since the process began.
        self.tally = dict.fromkeys(("counters", "passes", "failures"), 0)

    @property
    def trouble(self) -> str | None:
        """What keeps the rollup from working; None while it works."""
        if self._leases is not None and self._leases.trouble is not None:
            return f"leases cannot be renewed: {self._leases.trouble}"
        return next(iter(self._troubles.values()), None)

    @property
    def namespaces(self) -> Namespaces:
        """The namespaces whose shards are rolled up."""
        return self._namespaces

    @property
    def unseen(self) -> int:
        """How many shards are this worker's whose watermark it has not seen yet."""
        return max(0, self._shards - len(self._passed_us))

    @property
    def maintains(self) -> bool:
        """Whether it is this worker that looks after slices, for all."""
        return self._holds(MAINTENANCE)

    def passed_through(self) -> Mapping[_Shard, int]:
        """The watermark, as last seen, of each shard that this worker rolls up."""
        return dict(self._passed_us)

    async def run(self, stop: asyncio.Event, drain_us: int = DRAIN_TIMEOUT_US) -> None:
        """Work until *stop* is set; then finish what is under way and give the leases back.

        What is still under way after half of *drain_us* is cancelled, and done again by whoever has
        the shard next: the other half is for the leases and for closing connections.

        Where other processes change namespaces too, :meth:`Namespaces.run` must run beside it.
        """
        self._stop = stop
        enough = asyncio.Event()
        keeping = auditing = None
        if self.audits is not None:
            auditing = asyncio.create_task(self.audits.run(stop, lambda: self.maintains))
        if self._leases is not None:
            keeping = asyncio.create_task(self._leases.keep(enough))
        try:
            while not stop.is_set():
                await self._attempt("look", "all", self._look)
                await self._rest(stop)
            if self._under_way:
                await asyncio.wait(self._under_way.values(), timeout=drain_us / 2 / SECOND)
        finally:
            left = list(self._under_way.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if auditing is not None:
                auditing.cancel()
            enough.set()
            if self._leases is not None and keeping is not None:
                await keeping
                await self._leases.leave()

    async def _rest(self, stop: asyncio.Event) -> None:
        """A pause, which ends when *stop* is set or shards become ours."""
        events = [stop] if self._leases is None else [stop, self._leases.taken]
        waiting = [asyncio.create_task(each.wait()) for each in events]
        try:
            await asyncio.wait(
                waiting, timeout=self._pause_us() / SECOND, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for each in waiting:
                each.cancel()
        if self._leases is not None:
            self._leases.taken.clear()

    async def tick(self) -> int:
        """One pass over slices and shards; how many counters were written.

        Raises the first failure, after all that can be done is done.
        """
        if not self._store.transactional:
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

    async def _look(self) -> int:
        """Start what is due and not under way."""
        now_us = self._clock.boottime_us()
        if self._holds(MAINTENANCE) and now_us - self._maintained_us >= _MAINTENANCE_EVERY_US:
            self._start(MAINTENANCE, MAINTENANCE, self._maintain)
        if now_us - self._looked_us >= _PARTITIONS_EVERY_US:
            self._start(_PARTITIONS, _PARTITIONS, self.look_at_partitions)
        due = self._due()
        # Where it fails, each shard has a pass of its own.
        await self._attempt(_IDLE, _IDLE, partial(self._pass_idle, due))
        self._start_due(due)
        return 0

    async def _maintain(self) -> int:
        await self.maintenance.run_once()
        self._maintained_us = self._clock.boottime_us()
        return 0

    async def look_at_partitions(self) -> int:
        """Share how much was written, and reckon what the next slices must be made for."""
        self._looked_us = self._clock.boottime_us()
        datasets = {each.dataset.id: each.dataset for each in self._namespaces.all()}
        await self.partitions.look(datasets.values(), is_first=self._holds(MAINTENANCE))
        return 0

    def _holds(self, slot: str) -> bool:
        return self._leases is None or self._leases.holds(slot)

    def _holds_shard(self, key: _Shard) -> bool:
        return self._leases is None or self._leases.holds(slot_of(*key))

    def _due(self) -> list[_Due]:
        """The shards that have a closed window and no pass under way, the longest behind first.

        Raises StoreUnavailableError where no window may be closed by what is known of namespaces.
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
        # What is no longer ours is no longer our trouble.
        self._passed_us = {key: at for key, at in self._passed_us.items() if key in ours}
        self._windows = {key: number for key, number in self._windows.items() if key in ours}
        self._shards = len(ours)
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
        now_us = await self._store.fence()
        done = await asyncio.gather(
            *(self._pass_idle_of(name, keys, now_us) for name, keys in shards.items()),
            return_exceptions=True,
        )
        for each in done:
            if each is not None:
                raise each
        return 0

    async def _pass_idle_of(self, name: str, keys: Sequence[_Shard], now_us: int) -> None:
        """The same for one namespace. The order matters: clock, watermark, marks.

        A watermark as last seen here will do: up to it all is rolled up, and it never moves back.
        Of a shard whose watermark was not seen yet all marks are asked for, because a crash may
        have left some to drop.
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
        marked = await self._store.marked(
            namespace, list(passed_us), after_us=after_us, through_us=closed_us
        )
        idle = sorted(passed_us.keys() - set(marked))
        if idle:
            await self._store.advance(namespace, idle, closed_us)
            self._passed_us.update({(namespace.id, shard): closed_us for shard in idle})
            self.tally["passes"] += len(idle)

    def _start(self, key: _Key, name: str, work: Callable[[], Awaitable[int]]) -> _Task:
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._attempt(key, name, work))
            task.add_done_callback(lambda _: self._under_way.pop(key))
        return task

    def _check_namespaces(self) -> None:
        """Raise StoreUnavailableError where their settings may have changed unheard of."""
        if not self._namespaces.is_fresh:
            raise StoreUnavailableError(
                "the namespaces could not be read anew for too long; no window is closed by what"
                " may have changed since"
            )

    async def _pass(self, name: str, key: _Shard) -> int:
        async with self._lane():
            # As it is now: it may have waited for long.
            namespace = self._namespaces.get(name)
            if namespace.id != key[0] or not self._goes_on(key):
                return 0
            return await self.roll_shard(namespace, key[1])

    @asynccontextmanager
    async def _lane(self) -> AsyncIterator[None]:
        """One of the lanes; who waits longest is next."""
        self._waiting += 1
        try:
            await self._lanes.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._lanes.release()

    async def _attempt(
        self, key: _Key, name: str, work: Callable[[], Awaitable[int]]
    ) -> int | Exception:
        """Do *work*; what keeps it from being done is noted, and holds up nothing else."""
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
            # Nothing but a stop may end the rollup: without it the slices run out too.
            _log.exception("the rollup of %s failed in a way that it should not", name)
            return self._failed(key, error, _SURPRISE)
        if self._troubles.pop(key, None) is not None:
            _log.info("the rollup of %s goes on", name)
        return written

    def _failed(self, key: _Key, error: Exception, detail: str) -> Exception:
        self.tally["failures"] += 1
        self._troubles[key] = detail
        if isinstance(key, tuple):
            self._windows[key] = max(1, self._windows_of(key) // 2)
        return error

    async def roll_shard(self, namespace: Namespace, shard: int) -> int:
        """Roll up the closed windows of one shard; how many counters were written.

        It ends after a step when other shards wait for a lane: the next look starts it again.

        The order matters: clock, ``dropped_before``, watermark, marks, checkpoints, events. The
        watermark is read anew each time: another worker may have moved it.
        """
        now_us = await self._store.fence()
        self._check_clock(namespace, now_us)
        dropped_before_us = await self._store.dropped_before(namespace.dataset)
        watermark_us = (await self._store.watermarks(namespace))[shard]
        closed_us = closed_through(namespace, now_us)
        key = (namespace.id, shard)
        written = 0
        while watermark_us < closed_us:
            some = await self._roll_some(key, namespace, dropped_before_us, watermark_us, closed_us)
            self._windows[key] = min(2 * self._windows_of(key), _WINDOWS_MAX)
            written += some.written
            self.tally["counters"] += some.written
            if some.through_us is None:
                break
            watermark_us = some.through_us
            await self._store.advance(namespace, [shard], watermark_us)
            # The first time in any case: a crash may have left some.
            if some.marks or key not in self._passed_us:
                await self._store.drop_marks(namespace, shard, watermark_us)
            if self._waiting or not self._goes_on(key):
                break
        self.tally["passes"] += 1
        self._passed_us[key] = watermark_us
        return written

    def _check_clock(self, namespace: Namespace, now_us: int) -> None:
        """Raise UnavailableError where no window may be closed by *now_us*, which was just read."""
        # A clock that is ahead would close windows that events still land in.
        if checked_now_us(self._clock, self._guard, namespace.dataset) < now_us:
            raise ClockSkewError("the clock was ahead for a moment", retry_after_us=SECOND)
        self._check_namespaces()

    def _windows_of(self, key: _Shard) -> int:
        return self._windows.get(key, _WINDOWS_FIRST)

    def _goes_on(self, key: _Shard) -> bool:
        """Whether to begin more of the shard: not when told to stop, or when it is another's now.
        What was begun may be left at any point: the next one does it again."""
        return not self._stop.is_set() and self._holds_shard(key)

    async def _roll_some(
        self,
        key: _Shard,
        namespace: Namespace,
        dropped_before_us: int,
        after_us: int,
        closed_us: int,
    ) -> _Some:
        """Roll up some whole windows after *after_us*: no more than the shard's bound, nor than a
        bounded read of marks shows, and at least one."""
        _, shard = key
        size_us = namespace.settings.rollup_window_us
        end_us = window_of(after_us, size_us) + (1 + self._windows_of(key)) * size_us
        through_us, is_whole = min(closed_us, end_us - 1), True
        marks = page = await self._marks(namespace, shard, after_us, through_us, None)
        if len(page) == _MARKS_PER_READ:
            # The last window may not be whole: leave it for the next read, or go on within it.
            last_us = page[-1].window_us
            is_whole = page[0].window_us < last_us
            through_us = (last_us if is_whole else last_us + size_us) - 1
        through_us, atomics = await self._atomics.settle(
            namespace, shard, after_us=after_us, through_us=through_us
        )
        marks = page[: bisect_right(page, through_us, key=lambda mark: mark.window_us)]
        # Up to the last mark, not to now: a crash half-way does it again up to the same instant.
        batch_us = marks[-1].window_us + size_us - 1 if marks else through_us
        batch = Batch(batch_us, dropped_before_us, size_us)
        written = await self.batches.roll(namespace, marks, batch)
        while marks and not is_whole and len(page) == _MARKS_PER_READ:
            if not self._goes_on(key):
                return _Some(None, written, len(marks))
            page = await self._marks(namespace, shard, after_us, through_us, page[-1])
            written += await self.batches.roll(namespace, page, batch)
        return _Some(through_us, written, len(marks) + atomics)

    async def _marks(
        self, namespace: Namespace, shard: int, after_us: int, through_us: int, start: Mark | None
    ) -> Sequence[Mark]:
        return await self._store.dirty(
            namespace,
            shard,
            after_us=after_us,
            through_us=through_us,
            start=start,
            limit=_MARKS_PER_READ,
        )

    def _pause_us(self) -> int:
        windows = [each.settings.rollup_window_us for each in self._namespaces.all()]
        shortest_us = min(windows, default=_PAUSE_MAX_US)
        return max(_PAUSE_MIN_US, min(_PAUSE_MAX_US, shortest_us // 4))
