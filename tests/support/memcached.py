"""Caches over the memcached servers of a test's cluster."""

import uuid

from counter.ports import Clock
from counter.storage.memcached import MemcachedCache
from scripts.cluster_nodes import Cluster


def new_cache(
    cluster: Cluster,
    clock: Clock,
    *,
    servers: int = 1,
    prefix: str | None = None,
    timeout_us: int = 2_000_000,
) -> MemcachedCache:
    """A cache over the first *servers*, not open yet; by default with a prefix that nobody has.

    Its time-out is long: a busy machine must not look like a server that is down.
    """
    places = [each.partition(":") for each in cluster.memcached_addresses[:servers]]
    return MemcachedCache(
        [(host, int(port)) for host, _, port in places],
        clock,
        timeout_us=timeout_us,
        prefix=uuid.uuid4().hex if prefix is None else prefix,
    )
