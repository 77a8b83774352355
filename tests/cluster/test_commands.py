"""``counter serve`` over a real Cassandra: its requirements, and concurrent starts."""

import asyncio
import json
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from scripts.cluster_nodes import Cluster
from tests.support.child import run_python
from tests.support.cluster import session_of
from tests.support.relay import Relay
from tests.support.rest import Rest, new_token
from tests.support.server import Server, ports_in_a_row, refused, serving
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("child_processes")


PROCESSES = 3
KEY_FLAGS = ("store", "contact_points", "keyspace")
WORKERS = 2
#: Windows that real time passes while a test looks on, in a store that may be slow.
WINDOWS = {
    "write_timeout": "5s",
    "rollup_window": "200ms",
    "accept_limit": "2s",
    "clock_skew_max": "100ms",
}


def flags_of(cluster: Cluster, keyspace: str) -> dict[str, str]:
    (node,) = cluster.contact_points
    return {
        "store": "cassandra",
        "contact_points": f"{node}:{cluster.shape.cassandra_port}",
        "keyspace": keyspace,
        "replication": "1",
        **WINDOWS,
    }


def apply_schema(flags: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """``counter schema apply`` with the settings of the service."""
    windows = {"retention": "1h", "slice": "10m"}
    names = ("store", "contact_points", "keyspace", "replication", "write_timeout")
    given = windows | {name: flags[name] for name in (*names, "clock_skew_max")}
    return run_counter("schema", "apply", **given)


def run_counter(*words: str, **flags: str) -> subprocess.CompletedProcess[str]:
    """A command of ``counter``."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return run_python("-m", "counter", *words, *given, timeout=120)


@pytest.mark.slow
def test_without_its_schema_a_start_names_the_command(cassandra: Cluster, tmp_path: Path) -> None:
    code, said = refused(tmp_path, **flags_of(cassandra, "never_made"))
    assert code == 2
    assert "counter schema apply" in said


@pytest.mark.slow
async def test_a_cluster_that_is_unreachable_is_named_in_the_error(tmp_path: Path) -> None:
    flags = {"store": "cassandra", "contact_points": "127.0.0.1:1", **WINDOWS}
    code, said = await asyncio.to_thread(refused, tmp_path, **flags, start_timeout="1s")
    assert code == 2
    assert "counter: cannot reach Cassandra at 127.0.0.1:1 " in said


@pytest.mark.slow
async def test_a_start_waits_for_a_store_that_is_away(cassandra: Cluster, tmp_path: Path) -> None:
    """It says so once, however often it tries; so does ``schema apply`` before it."""
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    async with relay.listening():
        host, port = relay.address
        flags = flags_of(cassandra, "away") | {"contact_points": f"{host}:{port}"}
        relay.is_away = True
        applying = asyncio.create_task(asyncio.to_thread(apply_schema, flags))
        await eventually(relay.has_refused, "the schema is tried to be applied")
        relay.is_away = False
        applied = await applying
        assert applied.returncode == 0, applied.stderr
        assert applied.stderr.count("waiting up to 30s for the store") == 1
        assert '"act": "schema.apply", "end": "done", "who": "user:' in applied.stderr

        relay.refused = 0
        relay.is_away = True
        server = Server(tmp_path, tmp_path / "logs", flags)
        try:
            starting = asyncio.create_task(server.start())
            await eventually(relay.has_refused, "a start is tried")
            relay.is_away = False
            await starting
            async with server.client() as rest:
                assert (await rest.add("c", 1, key="order-1")).status_code == 200
            assert server.output("err").count("waiting up to 30s for the store") == 1
            assert await server.stop() == 0
        finally:
            server.clean_up()


async def listens(port: int) -> bool:
    """Whether anybody does at *port*."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def sent_to(port: int, counter: str) -> httpx.Response:
    """The response to an add at *port*, over a connection of its own."""
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False
    ) as http:
        http.timeout = httpx.Timeout(60)
        return await Rest(http).add(counter, 1, new_token())


@pytest.mark.slow
async def test_workers_finish_accepted_adds_on_shutdown(cassandra: Cluster, tmp_path: Path) -> None:
    """Each answers its adds, however slow the store is, and accepts no more. All are counted."""
    relay = Relay(cassandra.contact_points[0], cassandra.shape.cassandra_port)
    own = ports_in_a_row(WORKERS)
    slow = {"write_timeout": "20s", "accept_limit": "1m", "drain_timeout": "30s"}
    flags = flags_of(cassandra, "drained") | slow
    assert apply_schema(flags).returncode == 0
    async with relay.listening(), AsyncExitStack() as stack:
        host, port = relay.address
        flags |= {"contact_points": f"{host}:{port}"}
        many = {"workers": str(WORKERS), "metrics_port": str(own)}
        server = await stack.enter_async_context(
            serving(tmp_path, tmp_path / "logs", **flags, **many)
        )
        ports = range(own, own + WORKERS)
        for number, port in enumerate(ports):
            assert (await sent_to(port, f"first-{number}")).status_code == 200

        relay.mute = True
        counters = [f"c{number}" for number in range(3 * WORKERS)]
        adds = [
            asyncio.create_task(sent_to(ports[number % WORKERS], counter))
            for number, counter in enumerate(counters)
        ]
        session = stack.enter_context(session_of(cassandra))

        async def all_under_way() -> bool:
            rows = session.execute("SELECT counter FROM drained_default.dirty")
            return {counter for (counter, *_) in rows} >= set(counters)

        await eventually(all_under_way, "the mark of every add has come to the store")
        server.terminate()
        for port in ports:

            async def closed(port: int = port) -> bool:
                return not await listens(port)

            await eventually(closed, "a worker takes no more requests")
        assert not any(add.done() for add in adds)
        relay.mute = False
        answers = await asyncio.gather(*adds)
        assert [each.status_code for each in answers] == [200] * len(adds), answers[0].text
        assert await server.ended() == 0, server.all_errors()

        await server.start()
        async with server.client() as rest:
            assert [await rest.count(each) for each in counters] == [1] * len(counters)
        assert await server.stop() == 0
        assert "Traceback" not in server.all_errors()


async def keys_hold_in_each(clients: Sequence[Rest], flags: dict[str, str]) -> None:
    """From the first key on each process asks for one, and refuses it soon after it is revoked."""

    async def statuses(key: str) -> set[int]:
        sent = {"Authorization": f"Bearer {key}"} if key else {}
        asked = [each.http.get("/v1/namespaces/default", headers=sent) for each in clients]
        return {answer.status_code for answer in await asyncio.gather(*asked)}

    async def counter(*words: str) -> str:
        ran = await asyncio.to_thread(run_counter, "key", *words, **flags)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    key = await counter("create", "--namespace", "default", "--scope", "read")

    async def is_known() -> bool:
        return (await statuses(""), await statuses(key)) == ({401}, {200})

    await eventually(is_known, "each process asks for a key, and knows the one there is")
    await counter("revoke", key)

    async def is_revoked() -> bool:
        return await statuses(key) == {401}

    await eventually(is_revoked, "each process refuses the key that was revoked")
    assert await statuses("") == {401}


async def counts_are_moved_once(urls: Sequence[str], home: Path) -> None:
    """Imports of one file at several servers at once count each line once."""
    lines = {f"moved-{number}": number - 100 for number in range(250)}
    path = home / "in.csv"
    path.write_text("".join(f"{name},{count}\n" for name, count in lines.items()))
    words = ("import", str(path), "--verify", "--timeout", "2m", "--url")
    done = await asyncio.gather(
        *(asyncio.to_thread(run_counter, *words, each) for each in [*urls, urls[0]])
    )
    assert [each.returncode for each in done] == [0] * len(done), done


async def doctor_finds_nothing_wrong(flags: dict[str, str]) -> None:
    names = ("store", "contact_points", "keyspace", *WINDOWS)
    given = {"retention": "1h", "slice": "10m"} | {name: flags[name] for name in names}
    done = await asyncio.to_thread(run_counter, "doctor", "--json", **given)
    found = {each["part"]: each["state"] for each in json.loads(done.stdout)["checks"]}
    assert (done.returncode, found["store"], found["cache"]) == (0, "ok", "ok"), done.stdout


@pytest.mark.slow
async def test_many_start_at_once_over_an_empty_store(cassandra: Cluster, tmp_path: Path) -> None:
    """Schema, slices and the namespace `default`: each is created once."""
    flags = flags_of(cassandra, "at_once")
    applied = await asyncio.gather(*(asyncio.to_thread(apply_schema, flags) for _ in range(2)))
    assert [each.returncode for each in applied] == [0, 0], applied
    async with AsyncExitStack() as stack:
        servers = await asyncio.gather(
            *(
                stack.enter_async_context(
                    serving(tmp_path, tmp_path / str(number), rollup="true", **flags)
                )
                for number in range(PROCESSES)
            )
        )
        clients = [await stack.enter_async_context(each.client()) for each in servers]
        listed = [(await rest.http.get("/v1/namespaces")).json() for rest in clients]
        assert [each["namespace"] for each in listed[0]["namespaces"]] == ["default"]
        assert listed == [listed[0]] * PROCESSES
        for number, rest in enumerate(clients):
            answer = await rest.add("c", 1, key=f"order-{number}")
            assert answer.status_code == 200, answer.text
            again = await clients[number - 1].add("c", 1, key=f"order-{number}")
            assert again.status_code in (200, 503), again.text
        assert [await rest.count("c") for rest in clients] == [PROCESSES] * PROCESSES

        async def rolled_up() -> bool:
            return await clients[0].count("c", "1h") == PROCESSES

        await eventually(rolled_up, "the embedded rollups count what was added")
        ready = (await clients[0].http.get("/readyz")).json()
        assert ready["rollup"] == "ok", ready
        await counts_are_moved_once([each.url for each in servers[:2]], tmp_path)
        await doctor_finds_nothing_wrong(flags)
        await keys_hold_in_each(clients, {name: flags[name] for name in KEY_FLAGS})
        assert [await server.stop() for server in servers] == [0] * PROCESSES
