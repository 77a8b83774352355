"""A window that is rolled up within SQLite becomes what a worker would have made of it."""

import asyncio
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from counter.core.namespaces import Namespaces
from counter.errors import StoreUnavailableError
from counter.limits import HOUR, INT64_MAX, INT64_MIN, MINUTE, SECOND
from counter.storage.shared.memory_cache import MemoryCache
from counter.storage.sqlite import SqliteStore, event_rows, rollups, window_rollup
from counter.storage.sqlite.window_rollup import SqliteWindowRollup
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SLICE,
    SLICES_END,
    WINDOW,
    add,
    clear,
    make_namespace,
    marks,
    slice_at,
    write,
)
from counter.testing.clock import FakeClock
from counter.types import DELETED, Mark, Namespace, Pending, Span
from counter.windows import window_of
from rollup.batches import BatchRoller
from rollup.worker import RollupWorker

NAMES = [f"c{number}" for number in range(5)]
#: Parts of so many counters, so that a rollup can end between two.
PART = 2
names = st.sampled_from(NAMES)
deltas = st.one_of(st.integers(-3, 3), st.sampled_from([INT64_MIN, INT64_MAX, 2**61, -(2**61)]))
#: Where in a window an event lies.
places = st.integers(0, 3)
acts = st.one_of(
    st.tuples(st.just("add"), names, deltas, places),
    st.tuples(st.just("clear"), names, places),
    st.tuples(st.just("recount"), names, st.integers(0, 5)),
    st.tuples(st.just("delete"), names, st.just(0)),
    # As a request for a recount leaves it that ends halfway.
    st.tuples(st.just("pending"), names),
    # In another namespace.
    st.tuples(st.just("other"), names),
    st.tuples(st.just("drop")),
    # After how many parts it fails, if it does.
    st.tuples(st.just("roll"), st.none() | st.integers(0, 3)),
)


class Side:
    """A store, its worker, and whether the store or the worker rolls up."""

    def __init__(self, folder: Path, clock: FakeClock, *, in_store: bool) -> None:
        self.store = SqliteStore(folder, clock, [DATASET])
        self.cache = MemoryCache(clock)
        self.worker = RollupWorker(self.store, self.cache, clock, Namespaces(self.store, clock))
        #: What the store rolled up.
        self.parts = 0
        self._least = patch.object(window_rollup, "_COUNTERS_MIN", 1 if in_store else 10**9)

    async def open(self) -> None:
        await self.store.open()
        (dataset,) = await self.store.control.datasets()
        slices = map(slice_at, range(FIRST_SLICE, SLICES_END + HOUR, SLICE))
        await self.store.control.make_slices(dataset, *slices)
        self.namespace = await make_namespace(self.store, accept_limit_us=SECOND)
        self.other = await make_namespace(self.store, "other", accept_limit_us=SECOND)

    async def do(self, number: int, window_us: int, kind: str, *rest: Any) -> None:
        """Do an act that belongs into the window that is open."""
        store, namespace = self.store, self.namespace
        if kind == "add":
            name, delta, place = rest
            await write(store, namespace, add(name, window_us + place, number, delta))
        elif kind == "clear":
            name, place = rest
            await write(store, namespace, clear(name, window_us + place, number))
        elif kind == "pending":
            pending = Pending(window_us - WINDOW, window_us)
            await store.recounts.write_pending(namespace, [(rest[0], pending)])
        elif kind == "other":
            await write(store, self.other, add(rest[0], window_us, number))
        elif kind in ("recount", "delete"):
            name, back = rest
            recount_us = window_us - back * WINDOW
            is_delete = kind == "delete"
            pending = Pending(DELETED if is_delete else recount_us, window_us)
            await store.recounts.write_pending(namespace, [(name, pending)])
            await store.recounts.write_marks(namespace, [Mark(window_us, name, recount_us)])
        elif kind == "drop":
            dropped_us = await store.control.dropped_before(namespace.dataset) or FIRST_SLICE
            if dropped_us + SLICE <= window_us:
                await store.control.drop_slice(namespace.dataset, dropped_us)

    async def roll(self, fails_after: int | None = None) -> None:
        """Roll up; again if it fails after so many parts."""
        left = iter(range(10**9 if fails_after is None else fails_after))
        works = SqliteWindowRollup._roll_part

        async def fails(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise StoreUnavailableError("planted")
            self.parts += 1
            return await works(*arguments)

        with (
            self._least,
            patch.object(event_rows, "_SUMS_IN_PART", PART),
            patch.object(SqliteWindowRollup, "_roll_part", fails),
        ):
            with suppress(StoreUnavailableError):
                await self.worker.roll_shard(self.namespace, 0)
            left = iter(range(10**9))
            await self.worker.roll_shard(self.namespace, 0)

    async def stored(self) -> Any:
        """All that is rolled up, and all that is left to be."""
        store, namespace = self.store, self.namespace
        return (
            await store.rollups.heads(namespace, NAMES),
            await store.rollups.heads(self.other, NAMES),
            await store.rollups.rows(namespace, NAMES, Span(FIRST_SLICE, SLICES_END + HOUR)),
            await store.rollups.watermarks(namespace),
            await marks(store, namespace, through=SLICES_END + HOUR),
            await store.control.counters(namespace, prefix="", after=None, limit=99),
            await self.cache.get_many(namespace, NAMES),
        )


async def play(folder: Path, script: Sequence[tuple[Any, ...]]) -> list[int]:
    """Do the same on both sides; return how many parts each store rolled up."""
    clock = FakeClock(NOW)
    sides = [Side(folder / str(in_store), clock, in_store=in_store) for in_store in (True, False)]
    async with AsyncExitStack() as stack:
        for side in sides:
            await side.open()
            stack.push_async_callback(side.store.close)
        for number, (kind, *rest) in enumerate([*script, ("roll", None)], 1):
            if kind != "roll":
                for side in sides:
                    await side.do(number, window_of(clock.now_us(), WINDOW), kind, *rest)
                continue
            # The window of now is closed by then.
            clock.advance(MINUTE)
            for side in sides:
                await side.roll(*rest)
            ours, expected = [await side.stored() for side in sides]
            assert ours == expected
    return [side.parts for side in sides]


BIG = ("add", "c0", INT64_MAX, 0)
ROLL = ("roll", None)


@given(st.lists(acts, max_size=24))
@example([BIG, ROLL, BIG, ROLL, ("add", "c0", INT64_MIN, 0)])
@example([BIG, BIG, BIG, ROLL, ("add", "c0", 1, 0)])
@example([BIG, ROLL, ("add", "c0", 1, 0)])
@example([BIG, ROLL, BIG, ROLL, ("add", "c0", 1, 0)])
@example([("add", "c0", 1, 0), ROLL, ("pending", "c0"), ("add", "c0", 1, 0)])
@example([("other", "c0"), ("add", "c0", 1, 0)])
@example([("add", name, 1, 0) for name in NAMES] + [("roll", 1), ("add", "c0", 1, 0)])
@example([("add", "c0", 1, 0), ROLL, ("clear", "c0", 1), ("add", "c0", 2, 0), ("add", "c1", 1, 2)])
@example(
    [("add", "c0", 1, 0), ROLL, ("recount", "c0", 6), ("add", "c0", 1, 0), ("add", "c1", 1, 0)]
)
@example([("add", "c0", 1, 0), ("drop",), ROLL, ("add", "c0", 1, 0), ("add", "c1", 1, 0)])
def test_the_store_rolls_a_window_up_as_a_worker_does(script: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), script))


async def test_a_window_without_anything_unusual_is_rolled_up_in_the_store(tmp_path: Path) -> None:
    """Else the property would compare the worker with itself."""
    script = [("add", name, 2, 0) for name in NAMES]
    assert await play(tmp_path, [*script, ROLL, *script]) == [6, 0]


async def test_counters_of_other_namespaces_cost_a_window_no_part(tmp_path: Path) -> None:
    """Regression: with many large namespaces in a dataset, each rollup had parts of all of them."""
    script = [("add", name, 2, 0) for name in NAMES] + [("other", name) for name in NAMES]
    assert await play(tmp_path, script) == [3, 0]


async def test_what_a_window_leaves_to_the_worker_comes_in_parts_and_outside_of_transactions(
    tmp_path: Path,
) -> None:
    """Regression: all of it was one batch, and clears were looked for while all adds waited."""
    threads, sizes = set[str](), list[int]()
    fold, roll = event_rows.fold_rows_of, BatchRoller.roll

    def folds(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return fold(*arguments)

    async def rolls(roller: BatchRoller, namespace: Namespace, marks: Any, batch: Any) -> int:
        if marks:
            sizes.append(len(marks))
        return await roll(roller, namespace, marks, batch)

    script = [each for name in NAMES for each in (("add", name, 2, 0), ("clear", name, 1))]
    with patch.object(rollups, "fold_rows_of", folds), patch.object(BatchRoller, "roll", rolls):
        assert await play(tmp_path, script) == [3, 0]
    assert threads == {"counter-scanner"}
    # Three of the store's window, and the other side's.
    assert sorted(sizes) == [1, 2, 2, 5]
