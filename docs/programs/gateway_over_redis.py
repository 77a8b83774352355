"""The same gateway, with its budgets in Redis: ``uvicorn gateway_over_redis:app``.

A hash for each team has what is spent and what is held. One script holds, if there is room, and one
settles; each is atomic.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from gateway import BUDGET, Hold, Model, RefusedError, gateway
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError

HOLD = """
    local spent = tonumber(redis.call('HGET', KEYS[1], 'spent') or 0)
    local held = tonumber(redis.call('HGET', KEYS[1], 'held') or 0)
    if spent + held + ARGV[1] > tonumber(ARGV[2]) then return 0 end
    redis.call('HINCRBY', KEYS[1], 'held', ARGV[1])
    return 1
"""
SETTLE = """
    redis.call('HINCRBY', KEYS[1], 'held', -ARGV[1])
    redis.call('HINCRBY', KEYS[1], 'spent', ARGV[2])
    return 1
"""
#: Whether a script is sent again until it is answered; it may have run each time.
AGAIN = os.environ.get("AGAIN") == "yes"


class Scripts:
    """Budgets in Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def run(self, script: str, team: str, *arguments: int) -> bool:
        """Run a script. Without AGAIN, what is not answered is taken as done."""
        while True:
            try:
                return bool(await self._redis.eval(script, 1, team, *arguments))
            except LostError:
                if not AGAIN:
                    return True

    @asynccontextmanager
    async def hold(self, team: str, call: str, most: int) -> AsyncIterator[Hold]:
        """Hold *most*, until it is settled."""
        if not await self.run(HOLD, team, most, BUDGET):
            raise RefusedError("the budget is spent, or held")
        held = Held(self, team, most)
        try:
            yield held
        finally:
            if not held.is_settled:
                await held.settle(0)

    async def settle_left(self, model: Model) -> None:
        """Do nothing: it is not known what is held for which call."""


@dataclass
class Held:
    """An amount that is held."""

    scripts: Scripts
    team: str
    most: int
    is_settled: bool = False

    def __post_init__(self) -> None:
        self.id = uuid4().hex

    async def settle(self, cost: int, /) -> object:
        """Count *cost*, and give the rest back."""
        self.is_settled = True
        return await self.scripts.run(SETTLE, self.team, self.most, cost)


@asynccontextmanager
async def scripts() -> AsyncIterator[Scripts]:
    """Connect to Redis."""
    once: Any = Retry(NoBackoff(), 0)
    async with Redis.from_url(os.environ["REDIS_URL"], retry=once) as redis:
        yield Scripts(redis)


app = gateway(scripts)
