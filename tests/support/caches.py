"""Caches over the memcached or the Redis servers of a test's cluster."""

import uuid
from collections.abc import Sequence
from typing import Any

from redis import Redis

from counter.config.values import redis_server
from counter.ports import Clock
from counter.storage.memcached import MemcachedCache
from counter.storage.memcached.connection import MemcachedConnection
from counter.storage.redis import RedisCache
from counter.storage.shared.remote_cache import RemoteCache
from scripts.cluster_nodes import Cluster
from scripts.cluster_process import ServerProcess


def new_cache(
    cluster: Cluster,
    clock: Clock,
    *,
    servers: int = 1,
    prefix: str | None = None,
    timeout_us: int = 2_000_000,
) -> RemoteCache[Any]:
    """A closed cache over the first *servers*, with a unique prefix and a long time-out."""
    prefix = uuid.uuid4().hex if prefix is None else prefix
    if cluster.redis:
        return redis_cache(cluster.redis_url, clock, timeout_us=timeout_us, prefix=prefix)
    places = [each.partition(":") for each in cluster.memcached_addresses[:servers]]
    return MemcachedCache(
        [(host, int(port)) for host, _, port in places], clock, timeout_us=timeout_us, prefix=prefix
    )


def redis_cache(
    url: str, clock: Clock, *, timeout_us: int = 2_000_000, prefix: str = "counter"
) -> RedisCache:
    server = redis_server(url)
    assert server is not None
    return RedisCache(*server, clock, timeout_us=timeout_us, prefix=prefix)


def processes_of(cluster: Cluster) -> Sequence[ServerProcess]:
    """The servers of the cache."""
    return cluster.redis or cluster.memcached


def cache_url(cluster: Cluster) -> str:
    """The setting that names them."""
    return cluster.redis_url if cluster.redis else cluster.memcached_url


def cache_address(cluster: Cluster) -> str:
    """``host:port`` of the first one."""
    return cache_url(cluster).partition("://")[2].partition(",")[0]


def _commands(cluster: Cluster, *commands: bytes) -> bytes:
    """The response of the first memcached to the last of *commands*."""
    host, _, port = cache_address(cluster).partition(":")
    connection = MemcachedConnection(host, int(port), 2.0)
    answers = connection.pipeline(commands)
    connection.close()
    return answers[-1]


def wipe(cluster: Cluster) -> None:
    """Empty the first server."""
    if cluster.redis:
        with Redis.from_url(cluster.redis_url) as client:
            client.flushall()
    else:
        assert _commands(cluster, b"flush_all\r\n") == b"OK"


def store(cluster: Cluster, key: bytes, value: bytes) -> None:
    """Store anything in the first server."""
    if cluster.redis:
        with Redis.from_url(cluster.redis_url) as client:
            client.set(key, value)
    else:
        command = b"set %b 0 0 %d\r\n%b\r\n" % (key, len(value), value)
        assert _commands(cluster, command) == b"STORED"


def ttl_of(cluster: Cluster, key: bytes) -> int:
    """How many more seconds the first server keeps *key*; -1 for ever."""
    if cluster.redis:
        with Redis.from_url(cluster.redis_url) as client:
            ttl = client.ttl(key)
        assert isinstance(ttl, int)
        assert ttl != -2, f"there is no {key!r}"
        return ttl
    answer = _commands(cluster, b"mg %b t\r\n" % key)
    assert answer.startswith(b"HD t"), answer
    return int(answer.removeprefix(b"HD t"))
