"""The disk of one of three nodes is damaged: it is noticed, counts stay exact, and it is repaired
as docs/operations.md says. Another replica had missed half of the writes.

``DAMAGE_SEED`` repeats a run.
"""

import asyncio
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from scripts.cluster_nodes import Cluster, Shape
from scripts.cluster_nodetool import nodetool
from scripts.cluster_process import ServerProcess
from scripts.cluster_ring import wait_until_all_know_all
from tests.cli.test_over_cassandra import WINDOWS, apply_schema, run_counter
from tests.support.cluster import TIMEOUT_S, running_cluster
from tests.support.rest import Rest
from tests.support.server import serving
from tests.support.waiting import eventually

KEYSPACE = "damaged"
COUNTERS = 5
ADDS = 40
AT_ONCE = 20
FLIPS_PER_FILE = 3
#: A damaged chunk is read within the time that a node on a busy machine takes to be noticed.
PATIENCE_S = 90


@pytest.fixture
def paranoid_nodes() -> Iterator[Cluster]:
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
        async def told() -> bool:
            answer = await rest.add(f"c{number % COUNTERS}", 1, key=f"order-{number}")
            assert answer.status_code in (200, 503), answer.text
            return answer.status_code == 200

        async with at_once:
            await eventually(told, f"add {number} is acknowledged", seconds=PATIENCE_S)

    await asyncio.gather(*(acknowledged(number) for number in numbers))


async def counts_are(rest: Rest, count: int) -> None:
    """Each counter's accurate count and its rolled-up one; reads may fail meanwhile, never be
    wrong."""

    async def told(name: str, staleness: str) -> int | None:
        answer = await rest.http.get(
            f"/v1/namespaces/default/counters/{name}", params={"max_staleness": staleness}
        )
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["count"] if answer.status_code == 200 else None

    async def exact() -> bool:
        names = [f"c{number}" for number in range(COUNTERS)]
        accurate = [await told(each, "0s") for each in names]
        assert set(accurate) <= {count, None}
        stale = [await told(each, "1h") for each in names]
        return accurate == stale == [count] * COUNTERS

    await eventually(exact, f"each counter is {count}", seconds=PATIENCE_S)


async def audit_is_exact(flags: Mapping[str, str]) -> None:
    """It may fail meanwhile, and finds no difference."""
    given = {name: flags[name] for name in ("store", "contact_points", "keyspace")}

    async def right() -> bool:
        done = await asyncio.to_thread(run_counter, "audit", "--all", **given)
        assert done.returncode in (0, 2), done.stdout
        return done.returncode == 0

    await eventually(right, "the audit finds no difference", seconds=PATIENCE_S)


def tables_of(node: ServerProcess) -> list[Path]:
    """The files with the data of the service's tables."""
    data = node.folder / "data"
    return sorted(each for space in data.glob(f"{KEYSPACE}*") for each in space.rglob("*-Data.db"))


def damage(node: ServerProcess, draw: random.Random) -> None:
    for path in tables_of(node):
        body = bytearray(path.read_bytes())
        for bit in draw.sample(range(8 * len(body)), FLIPS_PER_FILE):
            body[bit // 8] ^= 1 << bit % 8
        path.write_bytes(body)


def answers(cluster: Cluster, number: int) -> bool:
    """Whether that node takes connections of clients."""
    try:
        where = (cluster.contact_points[number], cluster.shape.cassandra_port)
        socket.create_connection(where, timeout=1).close()
    except OSError:
        return False
    return True


def start(cluster: Cluster, node: ServerProcess) -> None:
    node.start()
    up = [each for at, each in enumerate(cluster.contact_points) if answers(cluster, at)]
    wait_until_all_know_all(up, cluster.shape.cassandra_port, auth=False)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
async def test_a_damaged_node_is_noticed_and_repaired(
    paranoid_nodes: Cluster, tmp_path: Path
) -> None:
    seed = int(os.environ.get("DAMAGE_SEED", random.randrange(2**32)))
    print(f"DAMAGE_SEED={seed}")
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
        # It may stop itself while others still look for it.
        second.launch()
        await counts_are(rest, 2 * ADDS // COUNTERS)
        await audit_is_exact(flags)

        async def is_noticed() -> bool:
            await audit_is_exact(flags)
            is_in_log = "corruption detected" in second.log.read_text(errors="replace")
            return is_in_log and second.pid() is not None and not answers(cluster, 1)

        await eventually(is_noticed, "the damaged node has stopped itself", seconds=PATIENCE_S)

        await asyncio.to_thread(second.stop)
        await asyncio.to_thread(repair_as_documented, cluster)
        await asyncio.to_thread(first.stop)
        await counts_are(rest, 2 * ADDS // COUNTERS)
        await audit_is_exact(flags)
        answer = await rest.add("c1", 1, key=f"order-{2 * ADDS - COUNTERS + 1}")
        assert answer.json()["replayed"] is True
        assert await server.stop() == 0


def repair_as_documented(cluster: Cluster) -> None:
    """Of the second node, which is stopped. The others first: one of them may be the only other one
    with an acknowledged write."""
    first, second, _ = cluster.cassandra
    hosts = [cluster.contact_points[0], cluster.contact_points[2]]
    spaces = (KEYSPACE, f"{KEYSPACE}_default")
    between = [word for host in hosts for word in ("-hosts", host)]
    for space in spaces:
        nodetool(first, "repair", "--full", *between, space)
    for path in tables_of(second):
        for part in path.parent.glob(path.name.replace("Data.db", "*")):
            part.unlink()
    start(cluster, second)
    for space in spaces:
        nodetool(second, "repair", "--full", space)
        nodetool(second, "verify", "--force", "--extended-verify", space)
