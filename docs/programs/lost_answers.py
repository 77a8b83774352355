"""Four ways to keep a count within bounds, over a network that loses answers.

A proxy passes each request to its server, reads the answer, and closes some connections instead of
passing the answer back: the request was carried out, and the client cannot know that. In each of
the four ways the client sends a request again until it is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from counter_client import AsyncCounterClient, BoundReachedError, Options, Token

SCRIPT = """
    local count = tonumber(redis.call('GET', KEYS[1])) + tonumber(ARGV[1])
    if count < tonumber(ARGV[2]) or count > tonumber(ARGV[3]) then return 0 end
    redis.call('SET', KEYS[1], count)
    return 1
"""
UPDATE = "UPDATE counts SET n = n + $1 WHERE n + $1 BETWEEN $2 AND $3"
_AT_ONCE = 16
_FAILED = (
    *(OSError, TimeoutError, RedisConnectionError),
    *(asyncpg.PostgresConnectionError, asyncpg.InterfaceError),
)


class Network:
    """A proxy before the server on *port* of this machine; it loses a *share* of the answers."""

    def __init__(self, port: int, share: float, seed: int) -> None:
        self._server, self._share, self._random = port, share, random.Random(seed)  # noqa: S311
        self.port = self.lost = 0
        #: The event loop has only weak references to them.
        self._passing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Network]:
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as listener:
            self.port = listener.sockets[0].getsockname()[1]
            yield self

    def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        passing = asyncio.create_task(self._pass(client, to_client))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection("127.0.0.1", self._server)
        except OSError:
            to_client.close()
            return
        requests = asyncio.create_task(_copy(client, to_server))
        with suppress(OSError):
            while answer := await server.read(65_536):
                if self._random.random() < self._share:
                    self.lost += 1
                    break
                to_client.write(answer)
        to_client.close()
        to_server.close()
        await requests


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while request := await reader.read(65_536):
            writer.write(request)
    writer.close()


@dataclass(frozen=True)
class Way:
    """A count within bounds, which begins at *start*.

    ``add`` takes an amount, and an identity of this add; it returns whether the amount was added.
    """

    name: str
    network: Network
    add: Callable[[int, str], Awaitable[bool]]
    count: Callable[[], Awaitable[int]]


async def until_answered(send: Callable[[], Awaitable[Any]]) -> Any:
    """Return the answer of the first attempt that gets one."""
    while True:
        with suppress(*_FAILED):
            return await send()


@dataclass
class Bounded:
    """What all ways are asked for: to count from *start*, from *least* to *most*.

    *settings* are those of the counter's namespace, and *bounds* those of each add.
    """

    start: int
    least: int
    most: int
    settings: Mapping[str, Any]
    bounds: Mapping[str, int]

    async def counter(self, url: str, network: Network, stack: AsyncExitStack) -> Way:
        """An add of the counter service, whose identity is its key."""
        namespace = f"bounded-{uuid4().hex[:8]}"
        # Its retries are limited, for outages, to fewer than such a bad network needs.
        options = Options(retries_at_once=1e6)
        here = f"http://127.0.0.1:{network.port}"
        direct = await stack.enter_async_context(AsyncCounterClient(url, namespace))
        client = await stack.enter_async_context(
            AsyncCounterClient(here, namespace, options=options)
        )
        await direct.create_namespace(counter_type="ACCURATE", **self.settings)
        await direct.add("count", self.start)

        async def add(amount: int, ident: str) -> bool:
            try:
                await client.add("count", amount, **self.bounds, token=Token.from_key(ident))
            except BoundReachedError:
                return False
            return True

        async def count() -> int:
            return (await direct.get("count")).count

        return Way("counter, bounded add under a key", network, add, count)

    async def redis(
        self, url: str, network: Network, stack: AsyncExitStack, *, has_script: bool
    ) -> Way:
        """``INCRBY``, and back again if the count is past a bound; or a script that does both."""
        direct = await stack.enter_async_context(Redis.from_url(url))
        once = Retry(NoBackoff(), 0)
        client = await stack.enter_async_context(Redis(port=network.port, retry=once))
        await direct.set("count", self.start)

        async def add_and_undo(amount: int, _: str) -> bool:
            count = await until_answered(lambda: client.incrby("count", amount))
            if self.least <= count <= self.most:
                return True
            await until_answered(lambda: client.incrby("count", -amount))
            return False

        async def add_by_script(amount: int, _: str) -> bool:
            arguments = ("count", amount, self.least, self.most)
            return bool(await until_answered(lambda: client.eval(SCRIPT, 1, *arguments)))

        async def count() -> int:
            return int(await direct.get("count") or 0)

        name = "Redis, script" if has_script else "Redis, INCRBY checked and undone"
        return Way(name, network, add_by_script if has_script else add_and_undo, count)

    async def sql(self, dsn: str, network: Network, stack: AsyncExitStack) -> Way:
        """An ``UPDATE`` whose condition is that the count stays within the bounds."""
        direct = await asyncpg.connect(dsn)
        stack.push_async_callback(direct.close)
        await direct.execute("DROP TABLE IF EXISTS counts; CREATE TABLE counts (n bigint)")
        await direct.execute("INSERT INTO counts VALUES ($1)", self.start)

        async def keep(_: asyncpg.Connection) -> None:
            """Need no answer to give a connection back."""

        place = {"host": "127.0.0.1", "port": network.port, "ssl": False}
        pool = asyncpg.create_pool(dsn, **place, min_size=0, max_size=_AT_ONCE, reset=keep)
        await stack.enter_async_context(pool)

        async def add(amount: int, _: str) -> bool:
            done = await until_answered(lambda: pool.execute(UPDATE, amount, self.least, self.most))
            return bool(done == "UPDATE 1")

        async def count() -> int:
            return int(await direct.fetchval("SELECT n FROM counts"))

        return Way("PostgreSQL, UPDATE ... WHERE", network, add, count)


async def together(works: Iterable[Awaitable[int]]) -> int:
    """Do *works*, some at a time; return the sum of their results."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def one(work: Awaitable[int]) -> int:
        async with room:
            return await work

    return sum(await asyncio.gather(*map(one, works)))


async def with_each_way(bounded: Bounded, report: Callable[[Way], Awaitable[None]]) -> None:
    """Call *report* with each way whose server the command line names."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--url", default="http://127.0.0.1:8080", help="the counter service")
    flags.add_argument("--redis", help="such as redis://127.0.0.1:6379; its key count is changed")
    flags.add_argument("--postgresql", help="a DSN; its table counts is made again")
    flags.add_argument("--lost", type=float, default=0.2, help="the share of the answers")
    flags.add_argument("--seed", type=int, default=1)
    given = flags.parse_args()
    ways: Mapping[str | None, list[Callable[..., Awaitable[Way]]]] = {
        given.url: [bounded.counter],
        given.redis: [partial(bounded.redis, has_script=each) for each in (False, True)],
        given.postgresql: [bounded.sql],
    }
    for url, way in [(url, way) for url, some in ways.items() if url for way in some]:
        async with AsyncExitStack() as stack:
            network = Network(urlsplit(url).port or 5432, given.lost, given.seed)
            await stack.enter_async_context(network.up())
            await report(await way(url, network, stack))
