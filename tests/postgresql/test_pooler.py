"""The store behind a real PgBouncer in transaction mode: a session for each statement."""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from counter.errors import StartupError
from counter.limits import SECOND
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from counter.storage.postgresql.fence import pass_fence
from counter.storage.postgresql.store import PostgresqlStore
from counter.testing.cases import DATASET, NOW, add, atomic, make_namespace, make_slices
from counter.testing.clock import FakeClock
from counter.types import Decision, Outcome, Written
from scripts.postgresql_server import PostgresqlServer
from tests.support.needs import miss
from tests.support.postgresql import FreshStore
from tests.support.waiting import eventually

_SETTINGS = """[databases]
postgres = host=127.0.0.1 port={port} user=counter
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
"""


def _started(directory: Path, server: PostgresqlServer, own: int) -> subprocess.Popen[bytes]:
    settings = directory / "pgbouncer.ini"
    settings.write_text(_SETTINGS.format(port=server.port, own=own), encoding="utf-8")
    settings.chmod(0o644)
    directory.chmod(0o755)
    user = ["-u", "postgres"] if os.geteuid() == 0 else []
    return subprocess.Popen(["pgbouncer", "-q", *user, str(settings)], stderr=subprocess.DEVNULL)


@asynccontextmanager
async def pooler(server: PostgresqlServer) -> AsyncIterator[int]:
    """A PgBouncer with two sessions of the server; its port."""
    if shutil.which("pgbouncer") is None:
        miss("PgBouncer is not installed (apt-get install pgbouncer)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as directory:
        process = _started(Path(directory), server, own)

        async def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", own)) == 0

        try:
            await eventually(listens, "PgBouncer listens")
            yield own
        finally:
            process.terminate()
            process.wait()


async def test_the_store_works_behind_a_pooler_in_transaction_mode(
    postgresql: PostgresqlServer,
) -> None:
    fresh = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await fresh.open()
    await make_slices(fresh)
    namespace = await make_namespace(fresh)
    await fresh.rollups.fence()
    async with pooler(postgresql) as port:
        dsn = postgresql.dsn().replace(str(postgresql.port), str(port))
        store = PostgresqlStore(PostgresqlOptions(dsn), FakeClock(NOW))
        await store.open()
        for expected in (Written.NEW, Written.REPLAYED):
            outcomes = await asyncio.gather(
                *(store.events.append(namespace, [add(f"c{n}", number=n)]) for n in range(40))
            )
            assert [each for [each] in outcomes] == [expected] * 40
        items = atomic(("a", 1), ("b", 2), number=99)
        assert await store.events.append_atomic(namespace, items) is Written.NEW
        void = Decision(Outcome.VOID, b"f")
        decisions = (store.decisions.decide(namespace, [add("late")], void) for _ in range(5))
        assert await asyncio.gather(*decisions) == [void] * 5
        assert await pass_fence(store._database) == NOW
        assert await store._database.value("SHOW statement_timeout") == "0"
        assert [each.total for each in await store.events.tails(namespace, [("c7", NOW - 1)])] == [
            1
        ]
        await store.close()
    await fresh.close()


async def test_a_server_ends_a_statement_that_takes_too_long(postgresql: PostgresqlServer) -> None:
    """Whatever became of its client."""
    database = PostgresqlDatabase(PostgresqlOptions(postgresql.dsn(), timeout_us=9 * SECOND))
    await database.open()
    assert await database.value("SHOW statement_timeout") == "9s"
    await database.close()


async def test_a_transaction_that_was_cut_off_is_undone(postgresql: PostgresqlServer) -> None:
    database = PostgresqlDatabase(PostgresqlOptions(postgresql.dsn(), connections_max=1))
    await database.open()
    pool = database._pool
    assert pool is not None
    connection = await pool.acquire()
    process = await connection.fetchval("SELECT pg_backend_pid()")
    await connection.execute("BEGIN")
    await pool.release(connection)
    state = "SELECT state, pid FROM pg_stat_activity WHERE pid = $1"
    other = await asyncpg.connect(postgresql.dsn())
    assert tuple(await other.fetchrow(state, process)) == ("idle", process)
    await other.close()
    await database.close()


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_another_isolation_than_read_committed_is_refused(
    postgresql: PostgresqlServer, isolation: str
) -> None:
    """A check would then use the snapshot of the transaction's start, before it had the lock."""
    fresh = FreshStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW), [DATASET])
    await fresh.open()
    namespace = await make_namespace(fresh)
    await fresh._database.rows(
        f"ALTER ROLE counter SET default_transaction_isolation='{isolation}'"
    )
    store = PostgresqlStore(PostgresqlOptions(postgresql.dsn()), FakeClock(NOW))
    try:
        with pytest.raises(StartupError, match=f"default_transaction_isolation = {isolation}"):
            await store.open()
        # A pooler, or a later ALTER ROLE, may change it.
        await store._database.open()
        with pytest.raises(Exception, match=f"need read committed, not {isolation}"):
            await store.events.append(namespace, [add()])
        await store.close()
    finally:
        await fresh._database.rows("ALTER ROLE counter RESET default_transaction_isolation")
        await fresh.close()
