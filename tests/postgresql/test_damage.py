"""A page of PostgreSQL that the disk damaged is noticed when it is read, and is repaired."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import asyncpg
import pytest

from counter.errors import UnavailableError
from counter.storage.postgresql import PostgresqlOptions
from counter.types import Event
from scripts.cluster_process import ClusterError
from scripts.demo_process import HOST
from scripts.postgresql_server import PostgresqlServer, postgresql_missing
from tests.contracts.cases import DATASET, NOW, make_namespace, make_slices
from tests.postgresql.test_failover import Pair, pair
from tests.postgresql.test_faults import added, service
from tests.support.clock import FakeClock
from tests.support.needs import miss
from tests.support.postgresql import FreshStore

__all__ = ["pair"]

PAGE = 8_192


async def test_a_flipped_bit_in_an_event_is_an_error() -> None:
    """And the count is not answered."""
    if problem := postgresql_missing():
        miss(problem)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        server = PostgresqlServer(Path(folder) / "server")
        server.start()
        try:
            store = FreshStore(PostgresqlOptions(server.dsn()), FakeClock(NOW), [DATASET])
            await store.open()
            await make_slices(store)
            namespace = await make_namespace(store)
            event = Event("c", NOW, bytes(16), 0, 7)
            await store.events.append(namespace, [event])
            assert await store.events.find(namespace, [event]) == [event]
            (table,) = [
                path
                for (path,) in await store._database.rows(
                    "SELECT pg_relation_filepath(tableoid) FROM {s}.events LIMIT 1"
                )
            ]
            await store._database.rows("CHECKPOINT")
            server.stop()
            path = server.data / table
            page = bytearray(path.read_bytes())
            assert len(page) == PAGE
            # Rows lie at the end of a page.
            page[-1 - event.delta] ^= 1
            path.write_bytes(page)
            server.start()
            # The first of them finds its connection closed.
            for _ in range(3):
                with pytest.raises(UnavailableError) as raised:
                    await store.events.find(namespace, [event])
            assert "invalid page" in str(raised.value)
            await store.close()
        finally:
            server.stop()


async def test_a_damaged_primary_is_replaced_by_its_standby_and_rebuilt_from_it(pair: Pair) -> None:
    """As docs/how-to/use-postgresql.md says. The counts are exact afterwards."""
    await pair.begin()
    async with service(pair.primary.dsn()) as rest:
        for number in range(20):
            await added(rest, f"key {number}", f"c{number % 3}")
    connection = await asyncpg.connect(pair.primary.dsn())
    [table] = await connection.fetchrow(
        "SELECT pg_relation_filepath(tableoid) FROM counter.events LIMIT 1"
    )
    await connection.execute("CHECKPOINT")
    await connection.close()
    pair.primary.stop()
    path = pair.primary.data / table
    page = bytearray(path.read_bytes())
    page[-40] ^= 1
    path.write_bytes(page)
    with pytest.raises(ClusterError, match="checksum verification failed"):
        pair.primary.run("pg_checksums", "--check", "-D", str(pair.primary.data))
    await asyncio.to_thread(pair.fail_over)
    async with service(pair.standby.dsn()) as rest:
        assert [await rest.count(f"c{number}") for number in range(3)] == [7, 7, 6]
        await added(rest, "key 20", "c2")
    shutil.rmtree(pair.primary.data)
    pair.standby.run(
        *("pg_basebackup", "-h", HOST, "-p", str(pair.standby.port), "-U", "counter", "--no-sync"),
        *("-D", str(pair.primary.data), "--checkpoint=fast"),
    )
    pair.standby.stop()
    (pair.primary.data / "postgresql.auto.conf").write_text("")
    await asyncio.to_thread(pair.primary.start)
    async with service(pair.primary.dsn()) as rest:
        assert [await rest.count(f"c{number}") for number in range(3)] == [7, 7, 7]
        again = await rest.add("c0", 1, key="key 0")
        assert again.json()["replayed"] is True
