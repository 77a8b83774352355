"""Fixtures over real servers: one Cassandra node, three of them, memcached, Redis.

They are started once a test run (three nodes once a module), at free addresses of their own, and
end with it, even if it is killed. Where Java, Maven, memcached or Redis is missing, a test that
asks for one is skipped at a desk and fails in the gate.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from scripts import cluster_jars, cluster_servers
from scripts.cluster_nodes import Cluster, Shape, dies_with_us, make_temporary
from tests.support.levels import Level, level_of
from tests.support.needs import miss

_LOGIN_TIMEOUT_S = 180.0
#: Fixtures whose tests one process runs, by its group: a server of a kind is started once. Groups
#: begin in this order, and at most five nodes run at once.
_GROUPS: Final = {
    "three_nodes": "three nodes",
    "two_datacenters": "three nodes",
    "paranoid_nodes": "three nodes",
    "cassandra": "one node",
    "cassandra_with_passwords": "one node",
    "postgresql": "postgresql",
    "dynamodb": "dynamodb",
    "memcached": "caches",
    "redis": "caches",
    "any_cache": "caches",
}


@contextmanager
def running_cluster(
    shape: Shape, around: Callable[[Cluster], AbstractContextManager[object]] = nullcontext
) -> Iterator[Cluster]:
    """A started cluster like *shape* at free addresses, below *around*; gone at the end."""
    needed = cluster_jars.missing() if shape.nodes else None
    if shape.memcached:
        needed = needed or cluster_servers.memcached_missing()
    if shape.redis:
        needed = needed or cluster_servers.redis_missing()
    if needed:
        miss(needed)
    directory = Path(tempfile.mkdtemp(prefix="counter-cluster-"))
    cluster = make_temporary(directory, shape)
    with dies_with_us(directory), around(cluster):
        cluster.start()
        yield cluster


@contextmanager
def session_of(cluster: Cluster, password: str | None = None) -> Iterator[Any]:
    """The bare driver, connected to the first node, as ``cassandra`` if there is a password."""
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, ExecutionProfile
    from cassandra.cluster import Cluster as Driver
    from cassandra.policies import WhiteListRoundRobinPolicy

    first = cluster.contact_points[:1]
    profile = ExecutionProfile(load_balancing_policy=WhiteListRoundRobinPolicy(first))
    driver = Driver(
        first,
        port=cluster.shape.cassandra_port,
        auth_provider=PlainTextAuthProvider("cassandra", password) if password else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        protocol_version=5,
    )
    with driver, driver.connect() as session:
        yield session


def _wait_for_login(cluster: Cluster) -> None:
    """A node makes its first user a moment after it answers."""
    from cassandra.cluster import NoHostAvailable

    deadline_s = time.monotonic() + _LOGIN_TIMEOUT_S
    while True:
        try:
            with session_of(cluster, "cassandra"):
                return
        except NoHostAvailable:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="session")
def cassandra(child_processes: None) -> Iterator[Cluster]:
    """One Cassandra node. Never to be broken: use ``breakable``."""
    shape = Shape(nodes=1, memcached=0, quick=True, durable_schema=False)
    with running_cluster(shape) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cassandra_with_passwords(child_processes: None) -> Iterator[Cluster]:
    """One node that asks for a password: cassandra/cassandra can log in."""
    shape = Shape(nodes=1, memcached=0, auth=True, quick=True, durable_schema=False)
    with running_cluster(shape) as cluster:
        _wait_for_login(cluster)
        yield cluster


@pytest.fixture(scope="module")
def three_nodes(minutes: None) -> Iterator[Cluster]:
    """Three nodes and a memcached, for tests that break nothing; all of them in one module."""
    shape = Shape(nodes=3, memcached=1, quick=True, durable_schema=False)
    with running_cluster(shape) as cluster:
        yield cluster


@pytest.fixture
def breakable(three_nodes: Cluster) -> Iterator[Cluster]:
    """The same three nodes, to be killed and paused: they are mended afterwards."""
    yield three_nodes
    three_nodes.mend()


@pytest.fixture(scope="session")
def memcached(child_processes: None) -> Iterator[Cluster]:
    """Two memcached servers. Never to be broken: use ``breakable_memcached``."""
    with running_cluster(Shape(nodes=0, memcached=2)) as cluster:
        yield cluster


@pytest.fixture
def breakable_memcached(memcached: Cluster) -> Iterator[Cluster]:
    """The same two servers, to be killed and paused: they are mended afterwards."""
    yield memcached
    memcached.mend()


@pytest.fixture(scope="session")
def redis(child_processes: None) -> Iterator[Cluster]:
    """One Redis. Never to be broken: use ``breakable_redis``."""
    with running_cluster(Shape(nodes=0, memcached=0, redis=1)) as cluster:
        yield cluster


@pytest.fixture
def breakable_redis(redis: Cluster) -> Iterator[Cluster]:
    """The same server, to be killed, paused and set otherwise: a new one replaces it afterwards."""
    yield redis
    redis.redis[0].kill()
    redis.mend()


@pytest.fixture(params=["memcached", "redis"])
def any_cache(request: pytest.FixtureRequest, child_processes: None) -> Cluster:
    """The servers of each kind of cache. Never to be broken: use ``breakable_cache``."""
    cluster: Cluster = request.getfixturevalue(request.param)
    return cluster


@pytest.fixture
def breakable_cache(any_cache: Cluster) -> Iterator[Cluster]:
    """The same servers, to be killed and paused: they are mended afterwards."""
    yield any_cache
    any_cache.mend()


def group_of(item: pytest.Item) -> str:
    """Return the group of a test: that of a server that it uses, or its file and level."""
    names = set(getattr(item, "fixturenames", ()))
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "storage" in callspec.params:
        names.add(callspec.params["storage"])
    groups = (group for fixture, group in _GROUPS.items() if fixture in names)
    return next(groups, f"{item.nodeid.partition('::')[0]} {level_of(item)}")


def schedule(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run first what takes longest, and in one test process what shares a server.

    Under ``--dist=loadgroup`` a group is run by one process, so each server is started once, at
    the beginning. Other tests are grouped by file; those that run alone come last, because they
    fill the cores.
    """
    first = list(dict.fromkeys(_GROUPS.values()))
    groups = {item: group_of(item) for item in items}
    # Benchmarks come last in their group: a cluster that has just started is slow.
    items.sort(
        key=lambda item: (
            first.index(groups[item]) if groups[item] in first else len(first),
            level_of(item) is Level.ALONE,
            item.nodeid.startswith("tests/benchmarks/"),
        )
    )
    if hasattr(config, "workerinput"):
        for item in items:
            # The scheduler reads the group off the end of the id. pytest-xdist 3.8 writes it where
            # pytest 9.2 no longer looks, so that its mark has no effect.
            setattr(item, "_id", type(item.id).parse(f"{item.nodeid}@{groups[item]}"))  # noqa: B010
