"""Fixtures over real servers: one Cassandra node, three of them, memcached.

They are started once a test run (once a worker under ``-n``), at free addresses of their own, and
end with it, even if it is killed. Where Java, Maven or memcached is missing, a test that asks for
one is skipped at a desk and fails in the gate.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts import cluster_jars, cluster_servers
from scripts.cluster_nodes import Cluster, Shape, dies_with_us, make_temporary
from tests.support.needs import miss

#: Three nodes take most of a minute to start on a small machine, and the first start fetches jars.
TIMEOUT_S = 600
SLOW_FIXTURES = frozenset({"cassandra", "cassandra_with_passwords", "three_nodes", "breakable"})


@contextmanager
def running_cluster(shape: Shape) -> Iterator[Cluster]:
    """A cluster like *shape*, started, at free addresses; gone at the end."""
    needed = cluster_jars.missing() if shape.nodes else None
    if shape.memcached:
        needed = needed or cluster_servers.memcached_missing()
    if needed:
        miss(needed)
    directory = Path(tempfile.mkdtemp(prefix="counter-cluster-"))
    cluster = make_temporary(directory, shape)
    with dies_with_us(directory):
        cluster.start()
        yield cluster


@pytest.fixture(scope="session")
def cassandra() -> Iterator[Cluster]:
    """One Cassandra node. Never to be broken: use ``breakable``."""
    with running_cluster(Shape(nodes=1, memcached=0)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cassandra_with_passwords() -> Iterator[Cluster]:
    """One node that asks for a password: cassandra/cassandra."""
    with running_cluster(Shape(nodes=1, memcached=0, auth=True)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[Cluster]:
    """Three nodes and a memcached, for tests that break nothing."""
    with running_cluster(Shape(nodes=3, memcached=1)) as cluster:
        yield cluster


@pytest.fixture
def breakable(three_nodes: Cluster) -> Iterator[Cluster]:
    """The same three nodes, to be killed and paused: they are mended afterwards."""
    yield three_nodes
    three_nodes.mend()


@pytest.fixture(scope="session")
def memcached() -> Iterator[Cluster]:
    """Two memcached servers. Never to be broken: use ``breakable_memcached``."""
    with running_cluster(Shape(nodes=0, memcached=2)) as cluster:
        yield cluster


@pytest.fixture
def breakable_memcached(memcached: Cluster) -> Iterator[Cluster]:
    """The same two servers, to be killed and paused: they are mended afterwards."""
    yield memcached
    memcached.mend()


def allow_time_to_start(items: list[pytest.Item]) -> None:
    """Whichever test comes first waits for the servers: give all of them the time."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        if not SLOW_FIXTURES.isdisjoint(names) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
