"""The writer: an event is written when its own mark is durable, and acknowledged when it is."""

import asyncio
from collections.abc import Sequence
from unittest.mock import patch

import pytest

from counter.core.results import Add, Added
from counter.errors import UnavailableError, WriteTimeoutError
from counter.limits import TIME_MAX_US
from counter.types import Event, Mark, Namespace, Written
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


async def test_an_add_that_the_store_alone_gave_up_is_not_acknowledged() -> None:
    """A store may fail for one event of many: alone, and in the midst of others."""
    world = World()
    namespace = await world.begin(shards=1)
    gone = WriteTimeoutError("a planted fault", retry_after_us=1)

    async def append(
        of: Namespace, events: Sequence[Event]
    ) -> Sequence[Written | UnavailableError]:
        return [gone if event.delta == 2 else Written.UNTOLD for event in events]

    with patch.object(world.store, "append", append):
        with pytest.raises(WriteTimeoutError):
            await world.add("c", 2)
        adds = [Add("c", delta, world.token()) for delta in (1, 2, 3)]
        told = await world.api.add_many(namespace, adds)
    assert told[1] is gone
    assert [isinstance(each, Added) for each in told] == [True, False, True]
