"""One memcached or Redis for several deployments: each sees its own."""

from contextlib import AsyncExitStack

from counter.config.settings import Settings
from counter.storage import open_cache
from counter.testing.cache_cases import namespace_of
from counter.testing.cases import NOW
from counter.testing.clock import FakeClock
from counter.types import Checkpoint
from scripts.cluster_nodes import Cluster
from tests.support.caches import cache_url


async def test_keyspaces_are_separate_in_a_shared_cache(any_cache: Cluster) -> None:
    """Namespaces are numbered from 1 in every keyspace: a count of another one must not show."""
    async with AsyncExitStack() as stack:
        first, again, other = [
            open_cache(Settings(keyspace=keyspace, cache=cache_url(any_cache)), FakeClock(NOW))
            for keyspace in ("shared_a", "shared_a", "shared_b")
        ]
        for cache in (first, again, other):
            await cache.open()
            stack.push_async_callback(cache.close)
        await first.put_many(namespace_of(), [("c", Checkpoint(NOW, 7))])
        assert await again.get_many(namespace_of(), ["c"]) == [Checkpoint(NOW, 7)]
        assert await other.get_many(namespace_of(), ["c"]) == [None]
