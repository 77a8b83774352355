"""The cache that several processes share: a Redis or Valkey server."""

from counter.errors import StartupError

try:
    from counter.storage.redis.cache import RedisCache
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] not in ("redis", "hiredis"):
        raise
    raise StartupError(
        "a cache in Redis needs redis and hiredis: pip install '.[redis]' in its checkout"
    ) from None

__all__ = ["RedisCache"]
