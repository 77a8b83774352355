"""Adapters that implement the ports of :mod:`counter.ports`, each over one technology.

They are imported lazily, so a process needs only the drivers that it uses. Stores are found by
:func:`counter.config.store_kinds.store_kind`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counter.config.settings import Settings
    from counter.ports import Cache, Clock


def open_cache(settings: Settings, clock: Clock) -> Cache:
    """Return the configured cache, not yet open. Raises StartupError if its driver is missing."""
    # Deployments may share a server; each has its own keyspace.
    prefix, timeout_us = settings.keyspace, settings.cache_timeout
    if server := settings.redis_server():
        from counter.storage.redis import RedisCache

        return RedisCache(*server, clock, timeout_us=timeout_us, prefix=prefix)
    if servers := settings.cache_servers():
        from counter.storage.memcached import MemcachedCache

        return MemcachedCache(servers, clock, timeout_us=timeout_us, prefix=prefix)
    from counter.storage.shared.memory_cache import MemoryCache

    return MemoryCache(clock, entries_max=settings.cache_entries_max)
