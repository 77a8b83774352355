"""Whether a cluster has the nodes for its replicas, or may have them soon."""

import asyncio

import pytest

from counter.errors import StartupError, StoreUnavailableError
from counter.limits import SECOND
from counter.patience import Patience
from counter.storage.cassandra.placing import Replicas, replicas_of
from counter.types import Placement
from tests.support.virtual import virtually

THREE = Placement((("", 3),))


def test_a_quorum_of_the_nodes_is_enough() -> None:
    assert replicas_of("default", THREE, {"dc1": 2, "dc2": 3}) == {"dc1": 3, "dc2": 3}


def test_nodes_that_are_still_joining_are_waited_for() -> None:
    """Regression: the schema was given up at once where nodes had just been started."""

    async def place() -> Replicas:
        joined = 1 + int(asyncio.get_running_loop().time() // 10)
        return replicas_of("default", THREE, {"dc1": joined})

    assert virtually(Patience(30 * SECOND).through(place)) == {"dc1": 3}


def test_too_few_nodes_are_told_in_the_end() -> None:
    async def place() -> Replicas:
        return replicas_of("default", THREE, {"dc1": 1})

    with pytest.raises(StoreUnavailableError, match=r"1 of the 2 nodes .* smaller --replication"):
        virtually(Patience(30 * SECOND).through(place))


def test_a_data_center_that_is_not_there_is_not_waited_for() -> None:
    with pytest.raises(StartupError, match="'dc9'; the cluster has dc1"):
        replicas_of("default", Placement((("dc9", 1),)), {"dc1": 3})
