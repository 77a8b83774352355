"""The cache that several processes share: a Redis or Valkey server."""

from counter import how_to_install
from counter.errors import StartupError

try:
    from counter.storage.redis.cache import RedisCache
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("redis", "hiredis"):
        raise
    raise StartupError(
        f"a cache in Redis needs redis and hiredis: {how_to_install('redis')}"
    ) from None

__all__ = ["RedisCache"]
