"""The disk of one of three nodes is damaged: this is noticed or harmless, counts stay exact, and
the node is repaired as docs/operations.md says.

``DAMAGE_SEED`` repeats a run.
"""

import asyncio
import functools
import random
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from counter.clock import SystemClock
from counter.limits import MINUTE
from counter.types import Token
from scripts.cluster_nodes import Cluster, Shape
from scripts.cluster_nodetool import nodetool
from scripts.cluster_process import ClusterError, ServerProcess
from scripts.cluster_ring import wait_until_all_know_all
from tests.cluster.test_commands import WINDOWS, apply_schema, run_counter
from tests.support.cluster import running_cluster, session_of
from tests.support.rest import Rest, fresh
from tests.support.seeds import seed_of
from tests.support.server import serving
from tests.support.sstables import lose_all_bits, misleads, rename_a_partition
from tests.support.waiting import eventually

KEYSPACE = "damaged"
SPACES = (KEYSPACE, f"{KEYSPACE}_default")
COUNTERS = 5
ADDS = 40
AT_ONCE = 20
FLIPS_PER_FILE = 3
#: How many orders are sent again.
SAMPLE = 10
LATE_TOKENS = 2
#: Before the accept limit, and before any write that may be in flight.
LATE_US = MINUTE


@pytest.fixture
def paranoid_nodes(minutes: None) -> Iterator[Cluster]:
    shape = Shape(nodes=3, memcached=0, quick=True, disk_failure_policy="stop_paranoid")
    with running_cluster(shape) as each:
        yield each


def flags_of(cluster: Cluster) -> dict[str, str]:
    port = cluster.shape.cassandra_port
    return {
        "store": "cassandra",
        "contact_points": ",".join(f"{each}:{port}" for each in cluster.contact_points),
        "keyspace": KEYSPACE,
        "replication": "3",
        **WINDOWS,
    }


async def add(rest: Rest, numbers: Sequence[int]) -> None:
    """One add for each of *numbers*, each sent until it is acknowledged."""

    at_once = asyncio.Semaphore(AT_ONCE)

    async def acknowledged(number: int) -> None:
        async def answered_ok() -> bool:
            answer = await rest.add(f"c{number % COUNTERS}", 1, key=f"order-{number}")
            assert answer.status_code in (200, 503), answer.text
            return answer.status_code == 200

        async with at_once:
            await eventually(answered_ok, f"add {number} is acknowledged")

    await asyncio.gather(*(acknowledged(number) for number in numbers))


async def counts_are(rest: Rest, count: int) -> None:
    """The accurate and the rolled-up counts; reads may fail, but never be wrong."""

    async def answered_ok(name: str, staleness: str) -> int | None:
        answer = await rest.http.get(
            f"/v1/namespaces/default/counters/{name}", params={"max_staleness": staleness}
        )
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["count"] if answer.status_code == 200 else None

    async def exact() -> bool:
        names = [f"c{number}" for number in range(COUNTERS)]
        accurate = [await answered_ok(each, "0s") for each in names]
        assert set(accurate) <= {count, None}
        stale = [await answered_ok(each, "1h") for each in names]
        return accurate == stale == [count] * COUNTERS

    await eventually(exact, f"each counter is {count}")


def audit(flags: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    given = {name: flags[name] for name in ("store", "contact_points", "keyspace")}
    return run_counter("audit", "--all", **given)


async def audit_is_exact(flags: Mapping[str, str]) -> None:
    """It may fail under load, and finds no difference."""

    async def right() -> bool:
        done = await asyncio.to_thread(audit, flags)
        assert done.returncode in (0, 2), done.stdout
        return done.returncode == 0

    await eventually(right, "the audit finds no difference")


def files_of(node: ServerProcess, part: str) -> list[Path]:
    """These files of the service's tables."""
    data = node.folder / "data"
    found = (each for space in data.glob(f"{KEYSPACE}*") for each in space.rglob(f"*-{part}.db"))
    return sorted(each for each in found if each.stat().st_size)


def damage(node: ServerProcess, draw: random.Random, part: str = "Data") -> None:
    for path in files_of(node, part):
        before = path.read_bytes()
        body = before
        while body == before or (part == "Index" and misleads(before, body)):
            flips = bytearray(before)
            for bit in draw.sample(range(8 * len(flips)), FLIPS_PER_FILE):
                flips[bit // 8] ^= 1 << bit % 8
            body = bytes(flips)
        path.write_bytes(body)


def blind(node: ServerProcess) -> None:
    """Damage its Bloom filters, so that it finds no row on its disk, not even Paxos state."""
    filters = [*files_of(node, "Filter"), *node.folder.glob("data/system/paxos-*/*-Filter.db")]
    for path in filters:
        body = bytearray(path.read_bytes())
        lose_all_bits(body)
        path.write_bytes(body)


def answers(cluster: Cluster, number: int) -> bool:
    """Whether that node takes connections of clients."""
    try:
        where = (cluster.contact_points[number], cluster.shape.cassandra_port)
        socket.create_connection(where, timeout=1).close()
    except OSError:
        return False
    return True


def read_every_replica(cluster: Cluster) -> None:
    """Read each row from all reachable replicas, so that every damaged chunk is met."""
    from cassandra import ConsistencyLevel, ReadFailure, ReadTimeout
    from cassandra.cluster import NoHostAvailable
    from cassandra.query import SimpleStatement

    with session_of(cluster) as session:
        for space in SPACES:
            for (table,) in session.execute(
                "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", (space,)
            ):
                every = SimpleStatement(
                    f"SELECT * FROM {space}.{table}", consistency_level=ConsistencyLevel.ALL
                )
                with suppress(NoHostAvailable, ReadFailure, ReadTimeout):
                    list(session.execute(every))


def start(cluster: Cluster, node: ServerProcess) -> None:
    node.start()
    up = [each for at, each in enumerate(cluster.contact_points) if answers(cluster, at)]
    wait_until_all_know_all(up, cluster.shape.cassandra_port, auth=False)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
async def test_a_damaged_node_is_noticed_and_repaired(
    paranoid_nodes: Cluster, tmp_path: Path
) -> None:
    """Another replica had missed half of the writes."""
    seed = seed_of("DAMAGE_SEED")
    cluster = paranoid_nodes
    flags = flags_of(cluster)
    applied = await asyncio.to_thread(apply_schema, flags)
    assert applied.returncode == 0, applied.stderr
    first, second, third = cluster.cassandra
    async with (
        serving(tmp_path, tmp_path / "logs", rollup="true", **flags) as server,
        server.client() as rest,
    ):
        await add(rest, range(ADDS))
        for node in (first, second):
            await asyncio.to_thread(nodetool, node, "disablehandoff")
        await asyncio.to_thread(third.kill)
        # The third one never receives them unless it is repaired.
        await add(rest, range(ADDS, 2 * ADDS))
        await counts_are(rest, 2 * ADDS // COUNTERS)
        await asyncio.to_thread(nodetool, second, "flush")

        await asyncio.to_thread(second.stop)
        damage(second, random.Random(seed))
        await asyncio.to_thread(start, cluster, third)
        # It may stop itself during a search.
        second.launch()
        await counts_are(rest, 2 * ADDS // COUNTERS)
        await audit_is_exact(flags)

        async def is_noticed() -> bool:
            # The service and the audit ask two replicas of three, and may never ask this one.
            await asyncio.to_thread(read_every_replica, cluster)
            is_in_log = "Corrupt" in second.log.read_text(errors="replace")
            return is_in_log and not answers(cluster, 1)

        await eventually(is_noticed, "the damaged node has stopped itself")
        await audit_is_exact(flags)

        await asyncio.to_thread(second.stop)
        await asyncio.to_thread(repair_as_documented, cluster)
        await asyncio.to_thread(first.stop)
        await counts_are(rest, 2 * ADDS // COUNTERS)
        await audit_is_exact(flags)
        answer = await rest.add("c1", 1, key=f"order-{2 * ADDS - COUNTERS + 1}")
        assert answer.json()["replayed"] is True
        assert await server.stop() == 0


def repair_as_documented(cluster: Cluster) -> None:
    """The stopped second node is repaired last: another may have the only other copy."""
    first, second, _ = cluster.cassandra
    hosts = [cluster.contact_points[0], cluster.contact_points[2]]
    between = [word for host in hosts for word in ("-hosts", host)]
    for space in SPACES:
        nodetool(first, "repair", "--full", *between, space)
    for path in files_of(second, "Data"):
        for part in path.parent.glob(path.name.replace("Data.db", "*")):
            part.unlink()
    start(cluster, second)
    for space in SPACES:
        nodetool(second, "repair", "--full", space)
        nodetool(second, "verify", "--force", "--extended-verify", space)


def rebuild_as_documented(node: ServerProcess) -> None:
    for tables in (*((space,) for space in SPACES), ("system", "paxos")):
        nodetool(node, "upgradesstables", "-a", *tables)


async def answered(rest: Rest, number: int, delta: int = 1) -> httpx.Response:
    """The response to an add of an order, sent until it is not one to send again."""
    return await definite(lambda: rest.add(f"c{number % COUNTERS}", delta, key=f"order-{number}"))


async def definite(send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    async def answered_ok() -> httpx.Response | None:
        answer = await send()
        return None if answer.status_code == 503 else answer

    return await eventually(answered_ok, "a definite answer")


async def answers_are_right(rest: Rest, added: Sequence[int], refused: Sequence[Token]) -> None:
    """A token that counts is a replay or a conflict, and one that does not never will."""
    for number in added:
        again = await answered(rest, number)
        assert (again.status_code, again.json()["replayed"]) == (200, True), again.text
        other = await answered(rest, number, delta=2)
        assert (other.status_code, other.json()["code"]) == (409, "token_conflict"), other.text
    for token in refused:
        late = await definite(functools.partial(rest.add, "c0", 1, token))
        assert (late.status_code, late.json()["code"]) == (410, "token_too_old"), late.text


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_damage_beside_the_data_is_noticed_or_harmless(
    paranoid_nodes: Cluster, tmp_path: Path
) -> None:
    """If each write is on the other replicas: reads repair this one."""
    draw = random.Random(seed_of("DAMAGE_SEED"))
    cluster = paranoid_nodes
    flags = flags_of(cluster)
    applied = await asyncio.to_thread(apply_schema, flags)
    assert applied.returncode == 0, applied.stderr
    first, second, _ = cluster.cassandra
    refused: list[Token] = []
    added = 0
    async with (
        serving(tmp_path, tmp_path / "logs", rollup="true", **flags) as server,
        server.client() as rest,
    ):
        for part in ("Filter", "Index", "Summary", "Statistics", "CompressionInfo"):
            await add(rest, range(added, added + ADDS))
            added += ADDS
            refused += [fresh(SystemClock().now_us() - LATE_US) for _ in range(LATE_TOKENS)]
            sample = draw.sample(range(added), SAMPLE)
            await answers_are_right(rest, sample, refused)
            await asyncio.to_thread(nodetool, second, "flush")
            await asyncio.to_thread(second.stop)
            if part == "Filter":
                blind(second)
            else:
                damage(second, draw, part)
            began = second.log.stat().st_size
            second.launch()

            await eventually(
                lambda: second.pid() is None or answers(cluster, 1), "the node is up or gone"
            )
            await counts_are(rest, added // COUNTERS)
            await audit_is_exact(flags)
            refused += [fresh(SystemClock().now_us() - LATE_US) for _ in range(LATE_TOKENS)]
            await answers_are_right(rest, sample, refused)
            is_noticed = b"CorruptSSTableException" in second.log.read_bytes()[began:]
            print(f"{part}: noticed: {is_noticed}, takes clients: {answers(cluster, 1)}")
            if is_noticed:
                await asyncio.to_thread(second.stop)
                await asyncio.to_thread(repair_as_documented, cluster)
            else:
                await asyncio.to_thread(rebuild_as_documented, second)
        await asyncio.to_thread(first.stop)
        await counts_are(rest, added // COUNTERS)
        await audit_is_exact(flags)
        await answers_are_right(rest, range(SAMPLE), refused)
        assert await server.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(1_200)
async def test_an_index_that_leads_to_another_counter_is_found_by_an_audit(
    paranoid_nodes: Cluster, tmp_path: Path
) -> None:
    """Rolled-up counts stay right; a recount, as by ``--repair``, would make them wrong."""
    cluster = paranoid_nodes
    flags = flags_of(cluster)
    applied = await asyncio.to_thread(apply_schema, flags)
    assert applied.returncode == 0, applied.stderr
    _, second, _ = cluster.cassandra
    async with (
        serving(tmp_path, tmp_path / "logs", rollup="true", **flags) as server,
        server.client() as rest,
    ):
        await add(rest, range(ADDS))
        await counts_are(rest, ADDS // COUNTERS)
        await asyncio.to_thread(nodetool, second, "flush")
        await asyncio.to_thread(second.stop)
        events = [each for each in files_of(second, "Index") if "/events_" in str(each)]
        for path in events:
            body = bytearray(path.read_bytes())
            rename_a_partition(body)
            path.write_bytes(body)
        assert events
        await asyncio.to_thread(start, cluster, second)

        async def is_found() -> bool:
            done = await asyncio.to_thread(audit, flags)
            return done.returncode == 1 and "its events make" in done.stdout

        await eventually(is_found, "the audit names a counter")
        await counts_are(rest, ADDS // COUNTERS)
        for path in events:
            verify = ("verify", "--force", "--extended-verify", SPACES[1])
            with pytest.raises(ClusterError):
                await asyncio.to_thread(nodetool, second, *verify, path.parent.name.split("-")[0])
        assert await server.stop() == 0
