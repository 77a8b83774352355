"""A store over a real PostgreSQL with a clock of the test."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import asyncpg
import pytest

from counter.storage.postgresql.database import PostgresqlOptions
from counter.storage.postgresql.fence import STILL
from counter.testing.cases import DATASET, NOW, WINDOW, make_namespace, make_slices
from counter.testing.clock import FakeClock
from counter.types import Event
from scripts.postgresql_server import PostgresqlServer
from tests.postgresql.pair import Pair
from tests.support.postgresql import FreshStore
from tests.support.servers import postgresql_server

LIMIT = 2 * WINDOW


class World:
    """A store on a server with the test's clock, and an append as one statement."""

    def __init__(self, store: FreshStore, clock: FakeClock, dsn: str) -> None:
        self.store, self.clock, self.dsn = store, clock, dsn
        self.database = store._database

    async def begin(self) -> None:
        await make_slices(self.store)
        self.namespace = await make_namespace(self.store, accept_limit_us=LIMIT)

    async def stalled(self, event: Event) -> tuple[asyncpg.Connection, asyncpg.transaction]:
        """An append of *event* that has done everything but commit."""
        connection = await asyncpg.connect(self.dsn)
        transaction = connection.transaction()
        await transaction.start()
        await self.append_over(connection, event)
        return connection, transaction

    async def append_over(self, connection: asyncpg.Connection, event: Event) -> None:
        """Append *event* in the transaction of *connection*."""
        await connection.fetch(
            "SELECT counter.append($1, $2, $3, $3, $4, $5, ARRAY[0], ARRAY[1::bigint], ARRAY[0],"
            " ARRAY[false], ARRAY[NULL::bytea])",
            *(self.namespace.dataset.id, self.namespace.id, [event.counter]),
            *([event.event_time_us], [event.event_id]),
        )

    async def waits(self, task: asyncio.Task[Any]) -> bool:
        """Return whether *task*, which has not begun, waits for an append; False if it ends."""
        rows, looks_again = self.database.rows, asyncio.Event()

        async def watched(sql: str, *arguments: Any) -> Sequence[Any]:
            if sql == STILL:
                looks_again.set()
            return await rows(sql, *arguments)

        looking = asyncio.create_task(looks_again.wait())
        with patch.object(self.database, "rows", watched):
            await asyncio.wait((task, looking), return_when=asyncio.FIRST_COMPLETED)
        looking.cancel()
        return not task.done()

    async def until(self, sql: str) -> None:
        """Wait until *sql* counts anything."""
        for _ in range(10_000):
            if await self.database.value(sql):
                return
        raise AssertionError(sql)

    async def breaks(self, old: str, new: str, function: str = "late") -> None:
        """Plant a bug in a function, by default in that which admits appends."""
        text = await self.database.value(f"SELECT pg_get_functiondef('{{s}}.{function}'::regproc)")
        assert old in text
        await self.database.rows(text.replace(old, new))


@pytest.fixture
async def world(postgresql: PostgresqlServer) -> AsyncIterator[World]:
    clock = FakeClock(NOW)
    store = FreshStore(PostgresqlOptions(postgresql.dsn()), clock, [DATASET])
    await store.open()
    world = World(store, clock, postgresql.dsn())
    await world.begin()
    yield world
    await store.close()


@pytest.fixture
def pair(child_processes: None) -> Iterator[Pair]:
    with postgresql_server() as primary:
        standby = PostgresqlServer(primary.folder.parent / "standby", "standby")
        yield Pair(primary, standby)
        standby.stop()
