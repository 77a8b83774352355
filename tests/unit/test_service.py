"""A key's reserved time that does not get fresh: the add is refused, and counts nowhere."""

from unittest.mock import AsyncMock, patch

import pytest

from counter.errors import OverloadedError, TokenTooOldError
from counter.limits import MINUTE
from tests.rollup.world import DATASET, World


async def test_a_key_whose_time_goes_stale_again_and_again_is_refused() -> None:
    """Each time was voided before the next was asked for: sent again, the key counts once."""
    world = World()
    namespace = await world.begin(shards=1)
    stale = [world.clock.now_us() + each for each in range(4)]
    world.clock.advance(MINUTE)
    with (
        patch.object(world.store, "reserve", AsyncMock(return_value=stale[0])),
        patch.object(world.store, "rereserve", AsyncMock(side_effect=stale[1:])),
        pytest.raises(OverloadedError, match="again and again"),
    ):
        await world.api.add(namespace, "c", 1, "order:1")
    assert (await world.api.get_one(namespace, "c", 0)).count == 0
    await world.api.add(namespace, "c", 1, "order:1")
    assert (await world.api.get_one(namespace, "c", 0)).count == 1


async def test_a_key_whose_time_is_past_knowing_gets_no_new_one() -> None:
    """It may have counted: a new time could make it count twice."""
    world = World()
    namespace = await world.begin(shards=1)
    old_us = world.clock.now_us()
    rereserve = AsyncMock()
    world.clock.advance(DATASET.retention_us)
    with (
        patch.object(world.store, "reserve", AsyncMock(return_value=old_us)),
        patch.object(world.store, "rereserve", rereserve),
        pytest.raises(TokenTooOldError) as caught,
    ):
        await world.api.add(namespace, "c", 1, "order:1")
    assert caught.value.applied is None
    rereserve.assert_not_awaited()
