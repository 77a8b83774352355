"""Adds at the edges of windows, deletes at an instant of many adds, and windows that close while a
worker is at work."""

from unittest.mock import patch

import pytest

from counter.testing.cases import nonce
from counter.types import Token
from counter.windows import closes_at, window_of
from rollup import batches
from tests.rollup.world import CLOSING, WINDOW, begun
from tests.support.parts import followed


async def test_a_rollup_does_not_reach_into_the_next_window() -> None:
    """Not even by its first instant: an add of that time is still to come, or to be read."""
    world, namespace = await begun(shards=1)
    worker = world.process().worker
    first_us = window_of(world.clock.now_us(), WINDOW)
    await world.add("c", 1)
    world.clock.advance(first_us + WINDOW - world.clock.now_us())
    await world.api.add(namespace, "c", 10, Token(b"edge" * 4, first_us + WINDOW))
    world.clock.advance(closes_at(namespace, first_us) - world.clock.now_us())
    await worker.tick()
    assert await world.rolled_up(namespace) == {"c": 1}
    assert await world.counts(namespace, "c") == [11]
    world.clock.advance(CLOSING)
    await worker.tick()
    assert await world.rolled_up(namespace) == {"c": 11}


async def test_a_window_that_closes_while_marks_are_read_is_left_to_the_next_pass() -> None:
    """Its marks were not asked for."""
    world, namespace = await begun(shards=1)
    worker = world.process().worker
    await world.add("c", 1)
    world.clock.advance(2 * WINDOW)
    await world.add("c", 10)
    first_us = window_of(world.clock.now_us(), WINDOW) - 2 * WINDOW
    world.clock.advance(closes_at(namespace, first_us) - world.clock.now_us())
    with followed(world.store, "dirty", by=lambda: world.clock.advance(CLOSING), times=9):
        await worker.tick()
    for _ in range(2):
        await worker.tick()
    assert await world.rolled_up(namespace) == {"c": 11}


async def test_a_window_that_closes_while_idle_shards_are_asked_for_is_not_passed() -> None:
    """An add may land in it after it was asked for."""
    world, namespace = await begun(shards=2)
    worker = world.process().worker
    world.clock.advance(CLOSING)
    await worker.tick()
    world.clock.advance(2 * WINDOW)

    async def add_and_close() -> None:
        await world.add("c", 10)
        world.clock.advance(CLOSING)

    with followed(world.store, "marked", by=add_and_close):
        await worker.tick()
    assert await world.rolled_up(namespace) == {}
    await worker.tick()
    assert await world.rolled_up(namespace) == {"c": 10}


@pytest.mark.parametrize("number", [0, 2, 5])
@pytest.mark.parametrize(("pages", "listed"), [(100, ["c"]), (5, [])])
async def test_a_delete_has_its_clear_among_many_events_of_its_instant(
    number: int, pages: int, listed: list[str]
) -> None:
    """Regression: only the first page of them was searched, and the name was listed again. With
    more events than are searched, a cancelled delete hides the name."""
    world, namespace = await begun(shards=1)
    now_us = world.clock.now_us()
    tokens = [Token(nonce(each), now_us) for each in range(6)]
    for each in tokens:
        if each is not tokens[number]:
            await world.api.add(namespace, "c", 1, each)
    await world.api.delete(namespace, "c", tokens[number])
    with patch.object(batches, "BATCH_ITEMS_MAX", 1), patch.object(batches, "_PAGES_MAX", pages):
        world.clock.advance(2 * CLOSING)
        await world.process().worker.tick()
        assert await world.rolled_up(namespace) == {}
        await world.api.cancel(namespace, "delete", "c", None, tokens[number])
        world.clock.advance(2 * CLOSING)
        await world.process().worker.tick()
    assert list(await world.rolled_up(namespace)) == listed
