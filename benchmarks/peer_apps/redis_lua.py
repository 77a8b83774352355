"""Redis: a script that remembers the token and counts, in one atomic step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from redis.asyncio import Redis

TOKEN_TTL_S: Final = 24 * 3600
_ADD: Final = """\
if redis.call('SET', KEYS[1], '', 'NX', 'EX', ARGV[2]) then
  redis.call('INCRBY', KEYS[2], ARGV[1])
  return 1
end
return 0
"""


class RedisStore:
    """A key a token, which expires after TOKEN_TTL_S, and a key a counter. redis-py's default
    pool; hiredis parses what Redis says."""

    def __init__(self, url: str) -> None:
        self._redis = Redis.from_url(url)
        # EVALSHA, and EVAL if Redis does not know the script yet.
        self._add = self._redis.register_script(_ADD)

    async def open(self) -> None:
        """Fail at the start if there is no Redis."""
        await self._redis.ping()

    async def close(self) -> None:
        """Close all connections of the pool."""
        await self._redis.aclose()

    async def add(self, counter: str, token: UUID, delta: int) -> bool:
        """Run the script."""
        keys = (f"token:{token.hex}", f"count:{counter}")
        return bool(await self._add(keys=keys, args=(delta, TOKEN_TTL_S)))

    async def counts(self, counters: Sequence[str]) -> list[int]:
        """One MGET."""
        found = await self._redis.mget([f"count:{name}" for name in counters])
        return [int(value or 0) for value in found]
