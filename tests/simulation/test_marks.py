"""Marks are dropped a few at a time, however many shards a process takes over at once."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from counter.testing.cases import NOW, WINDOW, dirty_counters, make_namespace
from counter.types import Mark, Namespace, Span
from counter.windows import shard_of
from tests.simulation.processes import Processes
from tests.simulation.store import SimulatedStore

SHARDS = 20
NAMES = [f"c{n}" for n in range(200)]


class Watch:
    """The most statements of a store that were under way at once."""

    def __init__(self, store: SimulatedStore) -> None:
        self._rows = store.session.connection.rows
        self.now = self.most = 0
        store.session.connection.rows = self._watched  # type: ignore[method-assign]

    async def _watched(self, statements: Sequence[Any], timeout_us: int | None = None) -> list[Any]:
        self.now += len(statements)
        self.most = max(self.most, self.now)
        try:
            return await self._rows(statements, timeout_us)
        finally:
            self.now -= len(statements)


@pytest.fixture
def processes() -> Processes:
    return Processes()


async def dirty_shards(store: SimulatedStore, namespace: Namespace) -> int:
    """How many shards hold marks."""
    return sum([bool(await dirty_counters(store, namespace, n)) for n in range(SHARDS)])


async def test_marks_left_by_others_are_searched_in_a_few_shards_at_once(
    processes: Processes,
) -> None:
    """The rollup does not wait for it: the marks are dropped later."""
    one, other = await processes.another(), await processes.another()
    namespace = await make_namespace(one, shards=SHARDS)
    await one.separate_writes.mark(namespace, [Mark(NOW, name) for name in NAMES])
    assert {shard_of(name, SHARDS) for name in NAMES} == set(range(SHARDS))
    processes.clock.advance(WINDOW)
    watch = Watch(other)
    left = [SHARDS]
    while left[-1]:
        await asyncio.gather(*(other.rollups.drop_marks(namespace, n, NOW) for n in range(SHARDS)))
        left.append(await dirty_shards(one, namespace))
        assert left[-1] < left[-2]
    assert watch.most <= 4 * 2
    assert len(left) == 1 + SHARDS // 4


async def test_marks_of_many_windows_are_dropped_a_few_at_a_time(processes: Processes) -> None:
    store = await processes.another()
    namespace = await make_namespace(store)
    windows = range(NOW - 150 * WINDOW, NOW, WINDOW)
    await store.separate_writes.mark(namespace, [Mark(window_us, "c") for window_us in windows])
    found, _ = await store.rollups.dirty(namespace, 0, Span.after(0, NOW), limit=1_000)
    assert len(found) == len(windows)
    watch = Watch(store)
    await store.rollups.drop_marks(namespace, 0, NOW)
    assert watch.most <= 64
    assert await dirty_counters(store, namespace) == set()
