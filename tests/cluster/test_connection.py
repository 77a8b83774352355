"""The connection to a real Cassandra: many statements at once, pages, answers that are lost."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from cassandra import ConsistencyLevel

from counter.errors import (
    OverloadedError,
    SliceMissingError,
    StoreUnavailableError,
    WriteTimeoutError,
)
from counter.limits import MILLISECOND, SECOND
from counter.storage.cassandra.connection import IN_FLIGHT_MAX, CassandraConnection
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import at, connected, options_for
from tests.support.relay import Relay
from tests.support.waiting import eventually

QUORUM = ConsistencyLevel.QUORUM
KEYSPACE = "connections"


@pytest.fixture
async def connection(cassandra: Cluster) -> AsyncIterator[CassandraConnection]:
    async with connected(options_for(cassandra)) as connection:
        yield connection


@pytest.fixture
async def table(connection: CassandraConnection) -> str:
    """A table of its own: rows of a key, one cell each."""
    await connection.ddl(
        f"CREATE KEYSPACE IF NOT EXISTS {KEYSPACE} WITH replication ="
        " {'class': 'NetworkTopologyStrategy', 'replication_factor': 1}"
    )
    table = f"{KEYSPACE}.t_{uuid.uuid4().hex}"
    await connection.ddl(f"CREATE TABLE {table} (k int, n int, v blob, PRIMARY KEY (k, n))")
    return table


async def filled(connection: CassandraConnection, table: str, rows: int) -> None:
    insert = await connection.prepare(f"INSERT INTO {table} (k, n, v) VALUES (?, ?, ?)", QUORUM)
    await connection.rows([insert.bind((0, n, str(n).encode())) for n in range(rows)])


async def test_thousands_of_statements_come_back_in_order(
    connection: CassandraConnection, table: str
) -> None:
    """Never more than the bound are in flight, over all callers."""
    await filled(connection, table, 3_000)
    select = await connection.prepare(f"SELECT n FROM {table} WHERE k = ? AND n = ?", QUORUM)
    most = 0

    async def ask(numbers: range) -> None:
        nonlocal most
        results = await connection.run([select.bind((0, n)) for n in numbers])
        most = max(most, connection._in_flight)
        assert results == [[(n,)] if n < 3_000 else None for n in numbers]

    await asyncio.gather(*(ask(range(first, first + 1_000)) for first in range(0, 4_000, 500)))
    assert most <= IN_FLIGHT_MAX
    assert connection._in_flight == 0


async def test_above_the_bound_only_further_statements_are_refused(
    connection: CassandraConnection, table: str
) -> None:
    select = await connection.prepare(f"SELECT n FROM {table} WHERE k = ?", QUORUM)
    statements = [select.bind((n,)) for n in range(IN_FLIGHT_MAX // 5)]
    with patch("counter.limits.STORE_CALLS_WAITING_MAX", 1):
        found = await asyncio.gather(*(connection.run(statements) for _ in range(7)))
    assert found[:6] == [[None] * len(statements)] * 6
    assert {type(each) for each in found[6]} == {OverloadedError}
    assert await connection.run(statements[:1]) == [None]


async def test_a_cancelled_statement_counts_until_it_is_answered(
    connection: CassandraConnection, table: str
) -> None:
    """A sent statement counts until it is back; a waiting one is not sent."""
    select = await connection.prepare(f"SELECT n FROM {table} WHERE k = ?", QUORUM)
    statements = [select.bind((n,)) for n in range(600)]
    calls = [asyncio.create_task(connection.run(statements)) for _ in range(6)]
    await asyncio.sleep(0)
    for call in calls[1:]:
        call.cancel()
    await calls[0]
    assert all(each.cancelled() for each in calls[1:])
    assert await connection.run(statements) == [None] * 600
    await connection._empty.wait()
    assert connection._in_flight == 0


async def test_all_pages_come(connection: CassandraConnection, table: str) -> None:
    """In one list, each row once, beside other statements."""
    await filled(connection, table, 1_000)
    select = await connection.prepare(f"SELECT n FROM {table} WHERE k = ?", QUORUM)
    select.fetch_size = 7
    found, nothing = await connection.rows([select.bind((0,)), select.bind((1,))])
    assert found == [(n,) for n in range(1_000)]
    assert not nothing


async def test_an_error_is_in_the_place_of_its_result(
    connection: CassandraConnection, table: str
) -> None:
    """The rest is answered."""
    await filled(connection, table, 1)
    gone = f"{table}_gone"
    await connection.ddl(f"CREATE TABLE {gone} (n int PRIMARY KEY)")
    doomed = await connection.prepare(f"SELECT n FROM {gone} WHERE n = ?", QUORUM)
    await connection.ddl(f"DROP TABLE {gone}")
    select = await connection.prepare(f"SELECT n FROM {table} WHERE k = ?", QUORUM)
    good, bad, _ = await connection.run([select.bind((0,)), doomed.bind((0,)), select.bind((0,))])
    assert good == [(0,)]
    assert isinstance(bad, SliceMissingError)
    with pytest.raises(SliceMissingError):
        await connection.rows([select.bind((0,)), doomed.bind((0,))])
    with pytest.raises(SliceMissingError):
        await connection.prepare(f"SELECT n FROM {gone}", QUORUM)


async def test_many_who_prepare_a_statement_at_once_get_one(
    connection: CassandraConnection, table: str
) -> None:
    """Also if the first of them gives up."""
    cql = f"SELECT n FROM {table} WHERE k = ?"
    first = asyncio.create_task(connection.prepare(cql, QUORUM))
    await asyncio.sleep(0)
    first.cancel()
    made = await asyncio.gather(*(connection.prepare(cql, QUORUM) for _ in range(9)))
    assert len({id(each) for each in made}) == 1


async def test_a_node_returns_the_time(connection: CassandraConnection) -> None:
    """It lies between before and after, a millisecond more or less: it is the same machine's."""
    (node,) = connection.near_nodes()
    before_us, node_us, after_us = await connection.clock_of(node, now_us)
    assert before_us - MILLISECOND <= node_us <= after_us


def now_us() -> int:
    return time.time_ns() // 1_000


@pytest.fixture
async def relay(cassandra: Cluster) -> AsyncIterator[Relay]:
    """A bad network before the node."""
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    async with relay.listening():
        yield relay


@pytest.fixture
async def far(cassandra: Cluster, relay: Relay) -> AsyncIterator[CassandraConnection]:
    """A connection through the bad network, which waits for no response long."""
    # Long enough for a busy node: unanswered ones are settled once more.
    options = replace(at(options_for(cassandra), relay.address), read_timeout_us=2 * SECOND)
    async with connected(options) as connection:
        yield connection


class Register:
    """One row that is set by compare-and-set."""

    def __init__(self, connection: CassandraConnection, table: str) -> None:
        self._connection = connection
        self._table = table
        self.settled = 0

    async def prepare(self) -> None:
        connection, table = self._connection, self._table
        self._set = await connection.prepare(
            f"UPDATE {table} SET v = ? WHERE k = 9 AND n = 9 IF v = ?", QUORUM, idempotent=False
        )
        self._read = await connection.prepare(
            f"SELECT v FROM {table} WHERE k = 9 AND n = 9", ConsistencyLevel.SERIAL
        )

    async def value(self) -> bytes | None:
        rows = await self._connection.one(self._read.bind(()))
        return bytes(rows[0][0]) if rows else None

    async def set(self, old: bytes | None, new: bytes, relay: Relay | None = None) -> bool:
        """Replace *old* by *new*. The network of *relay* recovers when its response is given up."""

        async def settle() -> tuple[bytes | None] | None:
            self.settled += 1
            if relay is not None:
                relay.deaf = relay.mute = False
            return (await self.value(),)

        applied, row = await self._connection.compare_and_set(
            self._set.bind((new, old)), settle, new
        )
        assert applied or row == (await self.value(),)
        return applied


@pytest.fixture
async def register(far: CassandraConnection, table: str) -> Register:
    register = Register(far, table)
    await register.prepare()
    assert await register.set(None, b"first")
    return register


async def test_a_compare_and_set_returns_the_stored_row(
    connection: CassandraConnection, table: str
) -> None:
    """Over a connection that waits: a slow response would be settled, too."""
    register = Register(connection, table)
    await register.prepare()
    assert await register.set(None, b"first")
    assert await register.set(b"first", b"second")
    assert register.settled == 0
    assert not await register.set(b"first", b"third")
    assert await register.value() == b"second"


async def test_an_applied_compare_and_set_without_a_response_was_applied(
    register: Register, relay: Relay
) -> None:
    """The response is held on its way until it was given up."""
    relay.mute = True
    assert await register.set(b"first", b"second", relay)
    assert register.settled == 1
    assert await register.value() == b"second"


async def test_a_lost_compare_and_set_is_run_again(register: Register, relay: Relay) -> None:
    """The row shows that it was not applied, so far."""
    relay.deaf = True
    assert await register.set(b"first", b"second", relay)
    assert relay.lost
    assert register.settled == 1
    assert await register.value() == b"second"


async def test_a_rerun_compare_and_set_that_finds_another_row_was_not_applied(
    register: Register, relay: Relay, connection: CassandraConnection, table: str
) -> None:
    """Who came in between did not see it."""
    other = Register(connection, table)
    await other.prepare()
    relay.deaf = True
    late = asyncio.create_task(register.set(b"first", b"second", relay))
    await eventually(relay.has_lost, "the compare-and-set is lost")
    assert await other.set(b"first", b"other")
    assert not await late
    assert await register.value() == b"other"


async def test_a_compare_and_set_without_any_response_is_an_error(
    register: Register, relay: Relay
) -> None:
    """It may have been applied: the error does not deny it."""
    relay.mute = True
    with pytest.raises((WriteTimeoutError, StoreUnavailableError)):
        await register.set(b"first", b"second")
    relay.mute = False


async def test_a_write_without_a_response_may_have_been_made(
    far: CassandraConnection, relay: Relay, table: str
) -> None:
    """A read that is not answered is just not answered."""
    insert = await far.prepare(f"INSERT INTO {table} (k, n, v) VALUES (?, ?, ?)", QUORUM)
    select = await far.prepare(f"SELECT n FROM {table} WHERE k = ?", QUORUM)
    relay.mute = True
    results = await far.run([insert.bind((1, 1, b"")), select.bind((1,))])
    relay.mute = False
    assert [type(each) for each in results] == [WriteTimeoutError, StoreUnavailableError]
