"""A page of PostgreSQL that the disk damaged is noticed when it is read, if it has a checksum, and
is repaired."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from counter.errors import UnavailableError
from counter.storage.postgresql.database import PostgresqlOptions
from counter.testing.cases import DATASET, NOW, make_namespace, make_slices
from counter.testing.clock import FakeClock
from counter.types import Event
from scripts.cluster_process import ClusterError
from scripts.postgresql_server import PostgresqlServer, postgresql_missing
from scripts.service_process import HOST
from tests.postgresql.pair import Pair
from tests.postgresql.test_faults import added, service
from tests.support.needs import miss
from tests.support.postgresql import FreshStore

DELTA = 0x1234567


class Stored:
    """A server with one event, and data files for a test to damage."""

    def __init__(self, server: PostgresqlServer) -> None:
        self.server = server
        self.store = FreshStore(PostgresqlOptions(server.dsn()), FakeClock(NOW), [DATASET])
        self.event = Event("c", NOW, bytes(16), 0, DELTA)

    async def add(self) -> None:
        await self.store.open()
        await make_slices(self.store)
        self.namespace = await make_namespace(self.store)
        await self.store.events.append(self.namespace, [self.event])
        assert await self.find() == self.event

    async def find(self) -> Event | None:
        (found,) = await self.store.events.find(self.namespace, [self.event])
        return found

    async def damage(self, file: str, *, checksums: bool) -> None:
        """Flip a bit of the row or of its entry in the index of identities; *file* is SQL."""
        [(name,)] = await self.store._database.rows(
            f"SELECT pg_relation_filepath({file}) FROM {{s}}.events LIMIT 1"
        )
        await self.store._database.rows("CHECKPOINT")
        self.server.stop()
        if not checksums:
            self.server.run("pg_checksums", "--disable", "--no-sync", "-D", str(self.server.data))
        path = self.server.data / name
        body = bytearray(path.read_bytes())
        value = DELTA if file == HEAP else NOW
        body[body.index(value.to_bytes(8, "little"))] ^= 1
        path.write_bytes(body)
        self.server.start()

    async def is_refused(self) -> None:
        # The first of them finds its connection closed.
        for _ in range(3):
            with pytest.raises(UnavailableError) as raised:
                await self.find()
        assert "invalid page" in str(raised.value)

    async def is_answered(self) -> Event | None:
        """The result, once the closed connection is noticed."""
        with pytest.raises(UnavailableError):
            await self.find()
        return await self.find()


HEAP = "tableoid"
INDEX = "(SELECT indexrelid FROM pg_index WHERE indrelid = events.tableoid AND indisprimary)"


@pytest.fixture
async def stored(child_processes: None) -> AsyncIterator[Stored]:
    if problem := postgresql_missing():
        miss(problem)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        server = PostgresqlServer(Path(folder) / "server")
        server.start()
        try:
            each = Stored(server)
            await each.add()
            yield each
            await each.store.close()
        finally:
            server.stop()


async def test_a_flipped_bit_in_an_event_is_an_error(stored: Stored) -> None:
    """And the count is not answered."""
    await stored.damage(HEAP, checksums=True)
    await stored.is_refused()


async def test_a_flipped_bit_in_an_index_is_an_error_until_it_is_rebuilt(stored: Stored) -> None:
    await stored.damage(INDEX, checksums=True)
    await stored.is_refused()
    connection = await asyncpg.connect(stored.server.dsn())
    await connection.execute("REINDEX SCHEMA counter")
    await connection.close()
    assert await stored.find() == stored.event


async def test_without_checksums_a_flipped_bit_is_a_wrong_answer(stored: Stored) -> None:
    """This is why the service warns when they are off."""
    await stored.damage(HEAP, checksums=False)
    assert await stored.is_answered() == stored.event._replace(delta=DELTA ^ 1)


async def test_without_checksums_a_flipped_bit_in_an_index_hides_an_event(stored: Stored) -> None:
    await stored.damage(INDEX, checksums=False)
    assert await stored.is_answered() is None


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
