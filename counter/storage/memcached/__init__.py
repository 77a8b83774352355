"""The cache that several processes share: one or more memcached servers."""

from counter.errors import StartupError

try:
    from counter.storage.memcached.cache import MemcachedCache
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "pymemcache":
        raise
    raise StartupError(
        "a cache in memcached needs pymemcache: pip install '.[memcached]' in its checkout"
    ) from None

__all__ = ["MemcachedCache"]
