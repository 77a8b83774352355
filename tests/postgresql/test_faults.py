"""Faults of the network and of PostgreSQL: bounded time, unknown outcomes, and exact counts."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, patch

import asyncpg
import httpx
import pytest

from api.app import create_app
from counter.clock import parse_rfc3339
from counter.errors import StoreUnavailableError
from counter.limits import HOUR, SECOND
from counter.storage.postgresql.control import PostgresqlControl
from counter.storage.postgresql.database import PostgresqlDatabase, PostgresqlOptions
from counter.storage.postgresql.schema import apply_for
from counter.storage.postgresql.settings import PostgresqlSettings
from counter.testing.clock import FakeClock
from counter.types import ClockReading
from scripts.postgresql_server import PostgresqlServer
from tests.support.disk import Disk
from tests.support.lifespan import Lifespan
from tests.support.relay import Relay
from tests.support.rest import Rest
from tests.support.servers import postgresql_server
from tests.support.waiting import eventually

WRITE_TIMEOUT = "200ms"
#: Bounds a hang of a request that takes about a second.
BOUND_S = 60.0


def settings(dsn: str, **more: Any) -> PostgresqlSettings:
    given: dict[str, Any] = {"dsn": dsn, "write_timeout": WRITE_TIMEOUT, "drain_timeout": "1s"}
    given |= more
    return PostgresqlSettings(store="postgresql", hosts=("test",), **given)


@asynccontextmanager
async def service(dsn: str, *, rollup: bool = False, **more: Any) -> AsyncIterator[Rest]:
    """A service of this process over the database at *dsn*."""
    app = create_app(settings(dsn, **more), rollup=rollup)
    lifespan = Lifespan(app)
    await lifespan.start()
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Rest(http)
    finally:
        async with asyncio.timeout(BOUND_S):
            await lifespan.stop()


async def fresh_schema(dsn: str, **more: Any) -> None:
    """Make the tables of the service again."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("DROP SCHEMA IF EXISTS counter CASCADE")
    await connection.close()
    await apply_for(settings(dsn, **more))


@asynccontextmanager
async def relayed(server: PostgresqlServer) -> AsyncIterator[tuple[Rest, Relay]]:
    """A service that reaches *server* through a relay."""
    await fresh_schema(server.dsn())
    relay = Relay("127.0.0.1", server.port)
    async with relay.listening():
        dsn = server.dsn().replace(str(server.port), str(relay.address[1]))
        async with service(dsn) as rest:
            yield rest, relay


@pytest.fixture
def own_server(child_processes: None) -> Iterator[PostgresqlServer]:
    """A server of the test's own, which it may stop."""
    with postgresql_server() as server:
        yield server


def is_unknown(answer: httpx.Response) -> bool:
    """Whether *answer* leaves the outcome open, and has retry advice."""
    body = answer.json()
    if answer.status_code != 503:
        return False
    assert (body["applied"], body["retry"]) == (None, "same_token"), body
    assert int(answer.headers["retry-after"]) >= 1
    return True


async def bounded(add: asyncio.Task[httpx.Response]) -> httpx.Response:
    async with asyncio.timeout(BOUND_S):
        return await add


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "held"])
async def test_an_add_is_stopped_at_each_step(postgresql: PostgresqlServer, is_cut: bool) -> None:
    """From the first message of a statement to the last of its response."""
    unknown = 0
    async with relayed(postgresql) as (rest, relay):
        await added(rest, "warm")
        for step in range(100):
            relay.pieces = step
            add = asyncio.create_task(rest.add("c", 1, key=f"k{step}"))
            if is_cut:
                await eventually(_reached(relay, add), "the step is reached")
                relay.cut()
            answer = await bounded(add)
            was_reached = relay.deaf
            relay.pieces, relay.deaf, relay.mute = float("inf"), False, False
            relay.cut()
            unknown += is_unknown(answer)
            await added(rest, f"k{step}")
            assert await rest.count("c") == step + 2
            if not was_reached:
                break
        assert unknown >= 3


def _reached(relay: Relay, add: asyncio.Task[httpx.Response]) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        return relay.deaf or add.done()

    return reached


async def added(rest: Rest, key: str, counter: str = "c") -> None:
    """Send an add until it is acknowledged: the machine may be busy, and the pool may recover."""

    async def acknowledged() -> bool:
        return (await rest.add(counter, 1, key=key)).status_code == 200

    await eventually(acknowledged, "the add is acknowledged")


async def test_a_server_that_stalls_past_write_timeout(own_server: PostgresqlServer) -> None:
    await fresh_schema(own_server.dsn())
    async with service(own_server.dsn()) as rest:
        await added(rest, "before")
        own_server.pause()
        adds = [asyncio.create_task(rest.add("c", 1, key=f"k{n}")) for n in range(30)]
        answers = [await bounded(add) for add in adds]
        assert all(map(is_unknown, answers))
        assert {answer.json()["code"] for answer in answers} == {"write_timeout"}
        own_server.resume()
        await asyncio.gather(*(added(rest, f"k{n}") for n in range(30)))
        assert await rest.count("c") == 31


async def test_a_call_that_is_cancelled_twice_logs_nothing(own_server: PostgresqlServer) -> None:
    """The second time while its connection is released, which a stalled server does not confirm."""
    database = PostgresqlDatabase(PostgresqlOptions(own_server.dsn()))
    await database.open()
    assert database._pool is not None
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))
    call = asyncio.create_task(database.rows("SELECT pg_sleep(60)"))
    watching = await asyncpg.connect(own_server.dsn())
    sleeps = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

    async def sleeping() -> bool:
        return bool(await watching.fetchval(sleeps))

    await eventually(sleeping, "the statement runs")
    own_server.pause()
    call.cancel()
    await asyncio.wait((call,), timeout=0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually(_dropped(database._pool), "the connection is dropped")
    gc.collect()
    assert logged == []
    own_server.resume()
    await watching.close()
    await database.close()


def _dropped(pool: asyncpg.Pool) -> Callable[[], Awaitable[bool]]:
    async def dropped() -> bool:
        return bool(pool.get_size() == 0)

    return dropped


async def test_a_server_that_fails_on_shutdown_leaves_one_line(
    postgresql: PostgresqlServer, caplog: pytest.LogCaptureFixture
) -> None:
    database = PostgresqlDatabase(PostgresqlOptions(postgresql.dsn()))
    await database.open()
    with patch.object(asyncpg.Pool, "close", side_effect=BrokenPipeError("cut")):
        await database.close()
    assert caplog.messages == ["PostgreSQL: its connections were dropped: cut"]


async def test_a_service_ends_while_its_server_stalls(own_server: PostgresqlServer) -> None:
    await fresh_schema(own_server.dsn())
    async with service(own_server.dsn()) as rest:
        await added(rest, "k")
        own_server.pause()


async def test_a_server_that_crashed_and_restarted(own_server: PostgresqlServer) -> None:
    await fresh_schema(own_server.dsn())
    async with service(own_server.dsn()) as rest:
        await added(rest, "before")
        own_server.kill()
        assert is_unknown(await rest.add("c", 1, key="k"))
        own_server.start()
        await added(rest, "k")
        assert await rest.count("c") == 2


async def test_no_count_goes_by_the_clock_of_the_machine(postgresql: PostgresqlServer) -> None:
    """That one is wrong, and the first reading of the server's clock fails."""
    await fresh_schema(postgresql.dsn())
    async with service(postgresql.dsn()):
        pass  # The default namespace exists from now on.
    failure = StoreUnavailableError("PostgreSQL: cut", retry_after_us=SECOND)
    read_clock = PostgresqlControl.read_clock
    fails = iter([failure])

    async def fails_once(control: PostgresqlControl) -> ClockReading:
        for each in fails:
            raise each
        return await read_clock(control)

    now_us = time.time_ns() // 1_000
    with (
        patch("counter.clock.time.time_ns", lambda: (now_us - HOUR) * 1_000),
        patch.object(PostgresqlControl, "read_clock", fails_once),
        patch("rollup.parts.keep_comparing", AsyncMock()),
    ):
        async with service(postgresql.dsn()) as rest:
            answer = await rest.get("c", "0s")
    assert parse_rfc3339(answer.json()["as_of"]) >= now_us


@pytest.mark.usefixtures("child_processes")
async def test_a_full_disk_refuses_adds_and_recovers() -> None:
    with postgresql_server("300m") as server:
        await fresh_schema(server.dsn())
        disk = Disk(server.folder)
        async with service(server.dsn()) as rest:
            await added(rest, "before")
            disk.fill()
            names = [f"{number}{'x' * 200}" for number in range(1_000)]
            tried = []
            for name in names:
                tried.append(name)
                answer = await rest.add(name, 1, key=name)
                if "make room on the disk of the server" in answer.text:
                    break
            assert is_unknown(answer)
            disk.make_room()
            await added(rest, "after")
            assert await rest.count("c") == 2
            for name in tried:
                await added(rest, name, name)
                assert await rest.count(name) == 1


class _Pool:
    """A pool of one connection that nothing uses."""

    async def acquire(self) -> object:
        return self

    async def run(self, work: Callable[[object], Awaitable[object]]) -> object:
        return await work(self)

    async def release(self, _: object, timeout: float) -> None:
        pass


async def test_a_transaction_that_is_always_rolled_back_is_unavailable() -> None:
    """After the last attempt the caller gets an error of the service, not one of its own code."""
    database = PostgresqlDatabase(PostgresqlOptions("postgresql://unused"))
    database._pool = _Pool()
    attempts = AsyncMock(side_effect=asyncpg.SerializationError("a planted fault"))
    with pytest.raises(StoreUnavailableError):
        await database._run(attempts)
    assert attempts.call_count > 1


async def test_a_reading_of_the_servers_clock_begins_before_the_server_is_asked() -> None:
    clock = FakeClock(HOUR)

    async def row(_: str) -> tuple[int, int]:
        clock.advance(2 * SECOND)
        return HOUR + SECOND, 0

    control = PostgresqlControl.__new__(PostgresqlControl)
    for name, value in (("_clock", clock), ("_database", SimpleNamespace(row=row))):
        setattr(control, name, value)
    assert await control.read_clock() == ClockReading(0, SECOND, 0)
