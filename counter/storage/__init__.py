"""Adapters that implement the ports of :mod:`counter.ports`, each over one technology.

They are imported lazily, so a process needs only the drivers that it uses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from counter.clock import StoreClock, SystemClock
from counter.core.clock_guard import ClockGuard, guard_of
from counter.storage.shared.startup_retry import StartupRetry

if TYPE_CHECKING:
    from counter.config.settings import Settings
    from counter.ports import Cache, Clock, KeyStore, Store


def clock_of(settings: Settings) -> Clock:
    """Return the clock of a process: the machine's, or one that follows the store's."""
    return StoreClock() if settings.store == "postgresql" else SystemClock()


def open_store(settings: Settings, clock: Clock, *, checks_all: bool = False) -> Store:
    """Return the configured store, not yet open. Raises StartupError if its driver is missing.

    With *checks_all*, a data directory is read completely before it is opened.
    """
    if settings.store == "cassandra":
        from counter.storage.cassandra import CassandraStore, options_of

        return CassandraStore(options_of(settings), clock)
    if settings.store == "postgresql":
        from counter.storage.postgresql import PostgresqlStore, postgresql_options

        return PostgresqlStore(postgresql_options(settings), clock)
    if settings.store == "dynamodb":
        from counter.storage.dynamodb import DynamodbStore, dynamodb_options

        return DynamodbStore(dynamodb_options(settings), clock)
    from counter.storage.sqlite import ALL_PAGES, SqliteStore

    wal_bytes_max = settings.wal_bytes_max
    store = SqliteStore(settings.data, clock, settings.datasets(), wal_bytes_max=wal_bytes_max)
    if checks_all:
        store.database.pages_checked = ALL_PAGES
    return store


@asynccontextmanager
async def opened_keys(
    settings: Settings, clock: Clock
) -> AsyncIterator[tuple[KeyStore, ClockGuard | None]]:
    """Open the API keys of the configured store, which a running service may be using.

    Also yields a guard of *clock*, not yet measured, if the store has its own clock. Raises
    StartupError and UnavailableError."""
    if settings.store == "cassandra":
        from counter.storage.cassandra import KeysAlone, options_of

        alone = KeysAlone(options_of(settings), clock)
        await StartupRetry(settings.start_timeout).run(alone.open)
        try:
            yield alone.keys, ClockGuard(alone.session, clock)
        finally:
            await alone.close()
        return
    if settings.store != "sqlite":
        store = open_store(settings, clock)
        await StartupRetry(settings.start_timeout).run(store.open)
        try:
            yield store.keys, guard_of(store, clock)
        finally:
            await store.close()
        return
    from counter.storage.sqlite import SqliteKeys

    yield SqliteKeys(settings.data), None


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
    from counter.storage.memory import MemoryCache

    return MemoryCache(clock, entries_max=settings.cache_entries_max)
