"""Several ``counter serve`` over one real PostgreSQL: killed, restarted, and exact."""

import asyncio
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from counter.storage.postgresql.schema import apply_for
from counter.storage.postgresql.settings import PostgresqlSettings
from scripts.postgresql_server import PostgresqlServer
from scripts.service_process import free_ports
from tests.rollup.processes import LEASE_TIME, TIMES, desk_over, have_their_shares, worker
from tests.support.child import run_python
from tests.support.rest import Rest
from tests.support.server import Server, refused
from tests.support.servers import postgresql_server
from tests.support.waiting import eventually

FLAGS = {
    "store": "postgresql",
    "rollup_window": "200ms",
    "accept_limit": "2s",
    "write_timeout": "3s",
}
ADDS_OF_ONE = 25


def apply_schema() -> subprocess.CompletedProcess[str]:
    dataset = ("--retention=1h", "--slice=10m", "--write-timeout=3s")
    return run_python("-m", "counter", "schema", "apply", "--store=postgresql", *dataset)


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch, child_processes: None) -> Iterator[PostgresqlServer]:
    """A server of the test's own, which it may kill."""
    with postgresql_server() as server:
        monkeypatch.setenv("COUNTER_DSN", server.dsn())
        yield server


async def added(servers: list[Server], counter: str, number: int) -> int:
    """Add until there is a definite answer, at either process; return the counted adds."""
    token = None
    body: dict[str, object] = {"delta": number}
    for attempt in range(400):
        server = servers[(number + attempt) % len(servers)]
        try:
            async with httpx.AsyncClient(
                base_url=server.url, timeout=5, trust_env=False, verify=False
            ) as http:
                if token is None:
                    issued = await http.post("/v1/tokens", json={"count": 1})
                    if issued.status_code == 200:
                        token = body["idempotency_token"] = issued.json()["tokens"][0]
                else:
                    path = f"/v1/namespaces/default/counters/{counter}/add"
                    answer = await http.post(path, json=body)
                    if answer.status_code == 200:
                        return number
                    if answer.json().get("applied") is False:
                        return 0
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.02)
    raise AssertionError(f"{token} of {counter} got no definite answer")


async def test_two_workers_share_and_take_over_from_a_killed_one(
    database: PostgresqlServer, tmp_path: Path
) -> None:
    """No API process, which would roll up too."""
    dsn = SecretStr(database.dsn())
    settings = PostgresqlSettings(store="postgresql", dsn=dsn, shards=16, **TIMES)
    await apply_for(settings)
    flags = ["--store=postgresql", f"--lease-time={LEASE_TIME}"]
    ports = free_ports(2)
    async with AsyncExitStack() as stack:
        desk = await stack.enter_async_context(desk_over(settings))
        one, two = (
            stack.enter_context(
                worker(flags, tmp_path / str(port), port, COUNTER_DSN=database.dsn())
            )
            for port in ports
        )
        await desk.shared_by(2)
        await have_their_shares(one, two)
        await desk.add_many(300)
        await desk.rolled_up(300, 1)
        shares = [await each.metric("counter_rollup_counters_total") for each in (one, two)]
        assert min(shares) > 0, "one did all of it"
        two.kill()
        await desk.add_many(300)
        await desk.rolled_up(300, 2)
        one.process.send_signal(signal.SIGTERM)
        assert await one.ended() == 0, one.output()
        assert "Traceback" not in one.output()


@pytest.mark.slow
async def test_kills_under_load_lose_nothing_and_count_nothing_twice(
    database: PostgresqlServer, tmp_path: Path
) -> None:
    assert apply_schema().returncode == 0
    servers = [Server(tmp_path, tmp_path / f"logs{n}", FLAGS) for n in range(2)]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        expected: Counter[str] = Counter()

        async def adds(counter: str) -> None:
            for number in range(1, ADDS_OF_ONE + 1):
                expected[counter] += await added(servers, counter, number)

        loads = [asyncio.create_task(adds(f"c{n}")) for n in range(8)]

        await eventually(lambda: expected.total() > 100, "adds are counted")
        servers[0].kill()
        await servers[0].start()
        database.kill()
        database.start()
        servers[1].kill()
        await servers[1].start()
        await asyncio.gather(*loads)
        async with servers[0].client() as one, servers[1].client() as other:
            for counter, count in expected.items():
                assert [await one.count(counter), await other.count(counter)] == [count, count]

            async def rolled_up() -> bool:
                found = [await one.get(name, "1h") for name in expected]
                return [each.json()["count"] for each in found] == list(expected.values())

            await eventually(rolled_up, "a worker has rolled up all")
        assert sum(expected.values()) > 0
    finally:
        for server in servers:
            server.clean_up()


@pytest.mark.slow
async def test_processes_agree_on_tokens_conflicts_and_atomic_adds(
    database: PostgresqlServer, tmp_path: Path
) -> None:
    applied = await asyncio.gather(*(asyncio.to_thread(apply_schema) for _ in range(3)))
    assert [each.returncode for each in applied] == [0, 0, 0]
    servers = [Server(tmp_path, tmp_path / f"logs{n}", FLAGS) for n in range(2)]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        async with servers[0].client() as one, servers[1].client() as other:
            assert (await one.add("c", 5, key="k")).json()["replayed"] is False
            assert (await other.add("c", 5, key="k")).json()["replayed"] is True
            assert (await other.add("c", 6, key="k")).status_code == 409
            await atomic_once(one, other)
            assert await other.count("c") == 6
            assert (await other.clear("c", key="clear")).status_code == 200
            assert await one.count("c") == 0
        assert [await server.stop() for server in servers] == [0, 0]
    finally:
        for server in servers:
            server.clean_up()


async def atomic_once(one: Rest, other: Rest) -> None:
    """One atomic add, retried elsewhere."""
    for rest, replayed in ((one, False), (other, True)):
        answer = await rest.atomic_add([("c", 1), ("d", 2)], None, key="atom")
        assert [each["replayed"] for each in answer.json()["results"]] == [replayed] * 2


@pytest.mark.slow
def test_a_start_without_a_schema_names_the_fix(
    database: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = refused(tmp_path, store="postgresql", start_timeout="5m")
    assert code == 2
    assert "run `counter schema apply`" in said
    monkeypatch.setenv("COUNTER_DSN", database.dsn("nowhere"))
    code, said = refused(tmp_path, store="postgresql", start_timeout="0s")
    assert code == 2
    assert 'database "nowhere" does not exist' in said


@pytest.mark.slow
def test_a_server_that_may_lose_adds_is_refused(database: PostgresqlServer, tmp_path: Path) -> None:
    assert apply_schema().returncode == 0
    database.stop()
    database.start(fsync="off")
    code, said = refused(tmp_path, store="postgresql", start_timeout="0s")
    assert code == 2
    assert "fsync = off" in said
