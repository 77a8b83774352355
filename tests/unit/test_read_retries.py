"""Interrupted reads: they are retried, and fail in the end with a response."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import pytest

from counter.core.read import read_heads_and_rows
from counter.errors import SliceMissingError, UnavailableError
from counter.limits import HOUR, MINUTE
from counter.ports import Store
from counter.types import Checkpoint, Head, Namespace, Pending, WindowRow
from counter.windows import window_of
from tests.rollup.world import WINDOW, World, begun

NAMESPACE = cast(Namespace, None)
ROWS = [WindowRow(window_us, False, 1) for window_us in (10, 20, 30)]


class Settling:
    """A store that settles a counter between two reads of its head."""

    def __init__(self, settled_us: Sequence[int]) -> None:
        self.rollups = self
        self._settled_us = iter(settled_us)

    async def heads(self, _: Namespace, counters: Sequence[str]) -> list[Head]:
        settled = Checkpoint(next(self._settled_us), 5)
        return [Head(Checkpoint(30, 9), settled) for _ in counters]

    async def rows(self, *_: Any, **__: Any) -> list[list[WindowRow]]:
        return [list(ROWS)]


async def read(settled_us: Sequence[int]) -> tuple[Head, list[WindowRow]]:
    store = cast(Store, Settling(settled_us))
    [found] = await read_heads_and_rows(store, NAMESPACE, ["c"], through_us=30)
    return found


async def test_rows_are_read_again_after_a_concurrent_settling() -> None:
    head, rows = await read([0, 15, 15])
    assert (head.settled.time_us, [row.window_us for row in rows]) == (15, [20, 30])


async def test_a_counter_that_is_settled_again_and_again_is_given_up() -> None:
    with pytest.raises(UnavailableError, match="settled again"):
        await read(range(100))


async def recounted() -> tuple[World, Namespace]:
    """A counter of 7 in storage, with a recount that is pending."""
    world, namespace = await begun(shards=1)
    await world.add("c", 7)
    window_us = window_of(world.clock.now_us(), WINDOW)
    world.clock.advance(MINUTE)
    await world.process().worker.tick()
    await world.store.recounts.write_pending(
        namespace, [("c", Pending(window_us, window_us + MINUTE))]
    )
    return world, namespace


@contextmanager
def sums_that_miss(world: World, times: int) -> Iterator[None]:
    """A slice that vanishes under the next scans of the store."""
    works, misses = world.store.events.sums, iter(range(times))

    async def sums(*arguments: Any) -> Any:
        if next(misses, None) is not None:
            raise SliceMissingError("a fault that a test planted")
        return await works(*arguments)

    with patch.object(world.store.events, "sums", sums):
        yield


async def test_a_recount_restarts_after_a_slice_was_dropped() -> None:
    world, namespace = await recounted()
    with sums_that_miss(world, 2):
        [count] = await world.api.reader.read(namespace, ["c"], HOUR)
    assert count.count == 7


async def test_a_recount_under_which_slices_vanish_for_ever_is_given_up() -> None:
    world, namespace = await recounted()
    with sums_that_miss(world, 1_000), pytest.raises(UnavailableError, match="during each attempt"):
        await world.api.reader.read(namespace, ["c"], HOUR)


async def test_a_recount_continues_from_the_settled_instant() -> None:
    """A concurrently settled part is exact as of a later instant than requested."""
    world, namespace = await recounted()
    watermark_us = world.clock.now_us() - MINUTE // 2
    as_of_us, settled, rows = await world.api.reader._settled_and_rows(namespace, "c", watermark_us)
    assert (as_of_us, settled.time_us, [row.total for row in rows]) == (watermark_us, 0, [7])
    head = await world.head(namespace)
    later = Head(head.checkpoint, Checkpoint(watermark_us + 1, 7))

    async def heads(*_: Any) -> list[Head]:
        return [later]

    with patch.object(world.store.rollups, "heads", heads):
        as_of_us, settled, rows = await world.api.reader._settled_and_rows(
            namespace, "c", watermark_us
        )
    assert (as_of_us, settled.count, rows) == (watermark_us + 1, 7, [])
