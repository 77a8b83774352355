"""Partitions by slice: how they are dropped, and which of them a statement looks at."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import patch

import asyncpg
import pytest

from counter.core.read import CountReader
from counter.limits import MINUTE, SECOND
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from counter.storage.postgresql.schema import apply_schema
from counter.storage.shared.memory_cache import MemoryCache
from counter.testing.cases import (
    DATASET,
    FIRST_SLICE,
    NOW,
    SLICE,
    SLICES_END,
    WINDOW,
    add,
    make_namespace,
    make_slices,
)
from counter.testing.clock import FakeClock
from counter.types import EventPage, Namespace, Span, Written
from scripts.postgresql_server import PostgresqlServer
from tests.support.postgresql import FreshStore


class Log:
    """A store with a namespace, and slices of which the last holds now."""

    def __init__(self, store: FreshStore, namespace: Namespace, clock: FakeClock) -> None:
        self.store, self.namespace, self.clock = store, namespace, clock
        self.events, self.rollups, self.control = store.events, store.rollups, store.control


@pytest.fixture
async def log(postgresql: PostgresqlServer) -> AsyncIterator[Log]:
    options = PostgresqlOptions(postgresql.dsn(), schema="kept", timeout_us=60 * SECOND)
    clock = FakeClock(NOW)
    store = FreshStore(options, clock, [DATASET], keeps_schema=True)
    await store.open()
    await make_slices(store)
    yield Log(store, await make_namespace(store, accept_limit_us=WINDOW), clock)
    await store.close()


async def test_no_slice_is_dropped_before_its_retention_is_over(
    postgresql: PostgresqlServer,
) -> None:
    """The service's role can call the function, which has the owner's rights."""
    database = PostgresqlDatabase(PostgresqlOptions(postgresql.dsn(), schema="retained"))
    await database.open()
    await database.rows("DROP SCHEMA IF EXISTS {s} CASCADE")
    await apply_schema(database, [DATASET])
    now_us = await database.value("SELECT {s}.clock_us()")
    over_us = now_us - DATASET.retention_us
    for start_us, end_us in ((over_us - SLICE, over_us), (over_us + MINUTE, now_us)):
        await database.rows(
            "SELECT {s}.make_slice(1, $1, $2, $3, 1)", start_us, end_us, DATASET.time_bucket_us
        )
        await database.rows("SELECT {s}.drop_slice(1, $1)", start_us)
    kept = await database.rows("SELECT start FROM {s}.slices")
    assert [row[0] for row in kept] == [over_us + MINUTE]
    assert await database.value("SELECT dropped_before FROM {s}.datasets") == over_us
    await database.rows("DROP SCHEMA {s} CASCADE")
    await database.close()


async def test_a_slice_that_is_read_is_dropped_later_and_holds_up_no_append(
    postgresql: PostgresqlServer, log: Log
) -> None:
    """A backup may read for hours; a drop that waits for it would block all appends."""
    dataset = log.namespace.dataset
    backup = await asyncpg.connect(postgresql.dsn())
    async with backup.transaction():
        await backup.fetch("SELECT FROM kept.events")
        drop = asyncio.create_task(log.control.drop_slice(dataset, FIRST_SLICE))
        for _ in range(1_000):
            if drop.done() or await backup.fetchval(
                "SELECT count(*) FROM pg_locks WHERE NOT granted"
            ):
                break
        assert await log.events.append(log.namespace, [add()]) == [Written.NEW]
        assert not await drop
        assert (await log.control.slices(dataset))[0].start_us == FIRST_SLICE
        assert await log.control.dropped_before(dataset) == 0
    await backup.close()
    assert await log.control.drop_slice(dataset, FIRST_SLICE)
    assert (await log.control.slices(dataset))[0].start_us == FIRST_SLICE + SLICE


READS: dict[str, Callable[[Log], Awaitable[Any]]] = {
    "tails": lambda log: log.events.tails(log.namespace, [("c", NOW - 1), ("d", NOW)]),
    "a counter that was never rolled up": lambda log: CountReader(
        log.store, MemoryCache(log.clock), log.clock
    ).read_one(log.namespace, "c", None),
    "sums": lambda log: log.events.sums(log.namespace, [("c", NOW), ("d", NOW)]),
    "find": lambda log: log.events.find(log.namespace, [add(), add("d")]),
    "window_folds": lambda log: log.events.window_folds(
        log.namespace, ["c"], Span(NOW, NOW + WINDOW)
    ),
    "scan": lambda log: log.events.scan(
        log.namespace, "c", EventPage(Span(NOW, NOW + WINDOW), limit=9)
    ),
    "dirty": lambda log: log.rollups.dirty(log.namespace, 0, Span.after(NOW - 1, NOW), limit=9),
    "marked": lambda log: log.rollups.marked(log.namespace, [0], Span.after(NOW - 1, NOW)),
}


@pytest.mark.parametrize("read", READS)
async def test_a_read_of_now_opens_no_older_slice(log: Log, read: str) -> None:
    """Each partition that a statement may read is opened and locked: 740 of them take a second."""
    now_slice = max(each for each in range(FIRST_SLICE, SLICES_END, SLICE) if each <= NOW)
    assert now_slice > FIRST_SLICE
    plans: list[str] = []
    rows = PostgresqlDatabase.rows

    async def explained(database: PostgresqlDatabase, sql: str, *arguments: Any) -> Any:
        if "{s}.events" in sql:
            lines = await rows(database, f"EXPLAIN {sql}", *arguments)
            plans.append("\n".join(line[0] for line in lines))
        return await rows(database, sql, *arguments)

    with patch.object(PostgresqlDatabase, "rows", explained):
        await READS[read](log)
    starts = {int(each) for plan in plans for each in re.findall(r"events_\d+_(\d+)", plan)}
    assert starts
    assert min(starts) >= now_slice


async def test_a_replay_opens_no_other_slice(postgresql: PostgresqlServer, log: Log) -> None:
    """Nor does an append, whichever outcome it has."""
    arguments: tuple[Any, ...] = (
        *(log.namespace.dataset.id, log.namespace.id, []),
        *(["c"], [NOW], [add().event_id], [0], [1], [0], [False], [None]),
    )
    opened = []
    for _ in range(8):
        connection = await asyncpg.connect(postgresql.dsn())
        async with connection.transaction():
            await connection.fetch(
                "SELECT kept.append($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)", *arguments
            )
            opened += await connection.fetchval(
                "SELECT ARRAY(SELECT relname FROM pg_locks JOIN pg_class ON pg_class.oid = relation"
                " WHERE pid = pg_backend_pid() AND relname ~ '^events_[0-9]+_[0-9]+$')"
            )
        await connection.close()
    assert set(opened) == {f"events_{log.namespace.dataset.id}_{NOW - NOW % SLICE}"}
