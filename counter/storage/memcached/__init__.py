"""The cache that several processes share: one or more memcached servers."""

from counter import how_to_install
from counter.errors import StartupError

try:
    from counter.storage.memcached.cache import MemcachedCache
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "pymemcache":
        raise
    raise StartupError(
        f"a cache in memcached needs pymemcache: {how_to_install('memcached')}"
    ) from None

__all__ = ["MemcachedCache"]
