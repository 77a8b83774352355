"""The writer: an event is written when its own mark is known to be durable."""

import asyncio
from collections.abc import Sequence
from unittest.mock import patch

from counter.limits import TIME_MAX_US
from counter.types import Mark, Namespace
from counter.windows import window_of
from tests.rollup.world import WINDOW, World


async def test_a_mark_that_is_on_its_way_is_no_mark_yet() -> None:
    """Another add in the same window of the counter leaves one of its own: the process may die
    before the first one's has arrived."""
    world = World()
    namespace = await world.begin(shards=1)
    works, held, on_its_way = world.store.mark, asyncio.Event(), asyncio.Event()
    left: list[str] = []

    async def mark(of: Namespace, marks: Sequence[Mark]) -> None:
        if not left:
            left.append("never arrives")
            on_its_way.set()
            await held.wait()
        await works(of, marks)

    with patch.object(world.store, "mark", mark):
        first = asyncio.create_task(world.add("c", 1))
        await on_its_way.wait()
        await world.add("c", 2)
        found = await world.store.dirty(
            namespace, 0, after_us=0, through_us=TIME_MAX_US, start=None, limit=9
        )
        assert list(found) == [Mark(window_of(world.clock.now_us(), WINDOW), "c")]
        held.set()
        await first
