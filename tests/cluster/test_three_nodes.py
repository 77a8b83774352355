"""What takes three nodes: one schema made through all of them, and some that are down or silent.

No store is reopened after a fault: recovery needs no restart. One module, so that one cluster is
started for all of it.
"""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from counter.clock import SystemClock
from counter.errors import UnavailableError
from counter.limits import SECOND
from counter.quantities import format_duration
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.store import CassandraStore
from counter.storage.cassandra.tables import (
    CONTROL_TABLES,
    DATASET_TABLES,
    SCHEMA_VERSION,
    table_id,
)
from counter.storage.shared.startup_retry import StartupRetry
from counter.testing.cases import SETTINGS, WINDOW, atomic, written_atomic
from counter.types import Event, Mark, Namespace, Slice
from counter.windows import window_of
from scripts.cluster_nodes import Cluster
from scripts.cluster_nodetool import nodetool
from scripts.service_process import free_ports
from tests.rollup.processes import Worker, desk_over, worker
from tests.support.cassandra import (
    DATASET,
    HASTY,
    at,
    connected,
    flags_for,
    have_schema,
    opened,
    options_for,
    settings_over,
    slice_of_now,
    tables,
    with_dataset,
)
from tests.support.waiting import eventually

T = TypeVar("T")
#: How long a process tries to start: the nodes that are left take a while to know who is gone.
_START_US = 60 * SECOND


@pytest.fixture(scope="module")
def made(three_nodes: Cluster) -> tuple[CassandraOptions, list[str]]:
    """A keyspace with three replicas, made by four processes at once; and their output."""
    options = with_dataset(options_for(three_nodes, replicas=3), HASTY)
    options = replace(options, read_timeout_us=2 * SECOND)
    port = three_nodes.shape.cassandra_port
    settings = {
        "PATH": os.environ["PATH"],
        "COUNTER_STORE": "cassandra",
        "COUNTER_KEYSPACE": options.keyspace,
        "COUNTER_REPLICATION": "3",
        "COUNTER_RETENTION": format_duration(DATASET.retention_us),
        "COUNTER_SLICE": format_duration(DATASET.slice_us),
        "COUNTER_TIME_BUCKET": format_duration(DATASET.time_bucket_us),
        "COUNTER_EVENT_BUCKETS": str(DATASET.event_buckets),
        "COUNTER_WRITE_TIMEOUT": format_duration(HASTY.write_timeout_us),
        "COUNTER_CLOCK_SKEW_MAX": format_duration(DATASET.clock_skew_max_us),
    }

    async def apply(contact_point: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "counter", "schema", "apply"),
            env={**settings, "COUNTER_CONTACT_POINTS": f"{contact_point}:{port}"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        return output.decode()

    async def apply_all() -> list[str]:
        nodes = [*three_nodes.contact_points, three_nodes.contact_points[0]]
        return await asyncio.gather(*(apply(each) for each in nodes))

    return options, "".join(asyncio.run(apply_all())).splitlines()


@pytest.fixture(scope="module")
def options(made: tuple[CassandraOptions, list[str]]) -> CassandraOptions:
    """Of that keyspace."""
    return made[0]


async def namespace_in(store: CassandraStore) -> Namespace:
    # Its number is that of whichever process made it: each of those that try takes one.
    (dataset,) = await store.control.datasets()
    await store.control.make_slices(dataset, slice_of_now())
    name = f"n{uuid.uuid4().hex}"
    namespace = await store.control.create_namespace(name, SETTINGS, SystemClock().now_us())
    assert namespace is not None
    return namespace


async def all_works(store: CassandraStore, namespace: Namespace, number: int) -> None:
    """A write of each kind, and it is read back. Each is retried until it succeeds."""
    now_us = slice_of_now().start_us + number
    event = Event(f"c{number}", now_us, number.to_bytes(16, "big"), 0, 1)
    mark = Mark(window_of(now_us, WINDOW), event.counter)
    await retried(store.ping)
    await retried(lambda: marked(store, namespace, mark))
    await retried(lambda: appended(store, namespace, event))
    assert list(await retried(lambda: store.events.find(namespace, [event]))) == [event]
    assert (await retried(lambda: store.control.lease_tokens(1, now_us))).time_us >= now_us
    await retried(lambda: store.leases.heartbeat(f"{number}", 60_000_000))
    assert f"{number}" in await retried(store.leases.workers)
    assert namespace in await retried(store.control.namespaces)
    await retried(store.control.read_clock)


async def marked(store: CassandraStore, namespace: Namespace, mark: Mark) -> None:
    for error in (await store.separate_writes.mark(namespace, [mark])).values():
        raise error


async def appended(store: CassandraStore, namespace: Namespace, event: Event) -> None:
    (written,) = await store.events.append(namespace, [event])
    if isinstance(written, UnavailableError):
        raise written


async def retried(ask: Callable[[], Awaitable[T]]) -> T:
    """The result of *ask*, once the nodes that it asks answer."""

    async def try_it() -> tuple[T] | None:
        try:
            return (await ask(),)
        except UnavailableError:
            return None

    (answer,) = await eventually(try_it, "an answer")
    return answer


def test_many_processes_on_three_nodes_create_one_schema(
    three_nodes: Cluster, made: tuple[CassandraOptions, list[str]]
) -> None:
    """Each asks a node of its own first. A table that two of them create is one table."""
    options, retried = made
    # Whole lines: the audit log, on standard error, repeats them in one line of its own.
    assert retried.count("created dataset default") == 1
    assert retried.count(f"the schema of {options.keyspace} has version {SCHEMA_VERSION}") == 1

    async def tables_at(host: str) -> None:
        async with connected(at(options, (host, three_nodes.shape.cassandra_port))) as connection:
            for keyspace, names in (
                (options.keyspace, CONTROL_TABLES),
                (f"{options.keyspace}_default", DATASET_TABLES),
            ):
                expected = {name: table_id(keyspace, name) for name in names}
                assert await tables(connection, keyspace) == expected

    for host in three_nodes.contact_points:
        asyncio.run(tables_at(host))


async def test_more_replicas_ask_for_a_repair(three_nodes: Cluster) -> None:
    """Of the dataset's keyspace and of the control keyspace."""
    options = options_for(three_nodes)
    await have_schema(options)
    retried = await have_schema(with_dataset(options, placement=Placement((("dc1", 3),))))
    for line, keyspace in zip(
        retried, (options.keyspace, f"{options.keyspace}_default"), strict=True
    ):
        assert f"keyspace {keyspace} had replicas dc1:1 and now has dc1:3" in line
        assert f"`nodetool repair --full {keyspace}` on every node" in line
    async with connected(options) as connection:
        for keyspace in (options.keyspace, f"{options.keyspace}_default"):
            ((replication,),) = await connection.simple(
                "SELECT replication FROM system_schema.keyspaces"
                f" WHERE keyspace_name = '{keyspace}'"
            )
            assert replication["dc1"] == "3"
    # As advised: before that a quorum may be of the new replicas alone, which have no data.
    # Of the dataset's keyspace nothing is read here.
    await asyncio.to_thread(
        nodetool, three_nodes.cassandra[0], "repair", "--full", options.keyspace
    )
    assert await have_schema(with_dataset(options, placement=Placement((("", 3),)))) == [
        "nothing to do: the schema is as it should be"
    ]


async def test_one_node_may_be_down_and_below_a_quorum_requests_fail(
    breakable: Cluster, options: CassandraOptions
) -> None:
    """With one down all goes on; with two requests fail with a reason, and recover."""
    async with opened(options) as store:
        namespace = await namespace_in(store)
        await all_works(store, namespace, 1)
        # Else the nodes would start without the tables, and not replay the events in their logs.
        for node in breakable.cassandra[1:]:
            await asyncio.to_thread(nodetool, node, "flush", "system_schema")
        await asyncio.to_thread(breakable.cassandra[2].kill)
        await all_works(store, namespace, 2)
        start_us = slice_of_now().end_us
        ahead = Slice(start_us, start_us + DATASET.slice_us, DATASET.time_bucket_us, 4)
        await retried(lambda: store.control.make_slices(namespace.dataset, ahead))
        async with opened(options, retry=StartupRetry(_START_US)) as other:
            await all_works(other, namespace, 3)
            assert ahead in await retried(lambda: other.control.slices(namespace.dataset))

        await asyncio.to_thread(breakable.cassandra[1].kill)

        async def says_why() -> bool:
            with pytest.raises(UnavailableError) as caught:
                await store.ping()
            return "1 of the 2 replicas" in caught.value.detail

        await eventually(says_why, "the node that is left knows that it is alone")
        with pytest.raises(UnavailableError):
            await store.control.namespaces()
        with pytest.raises(UnavailableError):
            await store.control.lease_tokens(1, 0)
        with pytest.raises(UnavailableError):
            async with opened(options, retry=StartupRetry(0)):
                pass
        await asyncio.to_thread(breakable.mend)
        await all_works(store, namespace, 4)


async def test_a_silent_node_delays_no_request(
    breakable: Cluster, options: CassandraOptions
) -> None:
    """Statements go to another node; a swallowed compare-and-set is settled by another."""
    async with opened(options) as store:
        namespace = await namespace_in(store)
        await all_works(store, namespace, 1)
        breakable.cassandra[1].pause()
        for number in range(2, 5):
            await all_works(store, namespace, number)
        async with opened(options, retry=StartupRetry(_START_US)) as other:
            await all_works(other, namespace, 5)
        breakable.cassandra[1].resume()
        await all_works(store, namespace, 6)


async def test_atomic_adds_are_answered_while_a_node_is_silent(
    breakable: Cluster, options: CassandraOptions
) -> None:
    """All are sent before the silent node is known to be down."""
    adds = 20
    # A busy machine is slow, and this is no test of time-outs.
    async with opened(replace(options, read_timeout_us=20 * SECOND)) as store:
        namespace = await namespace_in(store)
        await all_works(store, namespace, 1)
        patient = replace(namespace.dataset, write_timeout_us=DATASET.write_timeout_us)
        namespace = replace(namespace, dataset=patient)
        start_us = slice_of_now().start_us
        lists = [
            atomic((f"a{number}", 1), (f"b{number}", 2), at=start_us + number, number=number)
            for number in range(2, adds + 2)
        ]
        # So that each statement is prepared.
        await retried(lambda: written_atomic(store, namespace, lists[0]))
        breakable.cassandra[1].pause()
        outcomes = await asyncio.gather(
            *(written_atomic(store, namespace, events) for events in lists), return_exceptions=True
        )
        refused = [each for each in outcomes if isinstance(each, BaseException)]
        assert not refused, f"{len(refused)} of {adds}: {refused[0]!r}"
        events = [event for each in lists for event in each]
        assert list(await retried(lambda: store.events.find(namespace, events))) == events


async def test_a_worker_survives_an_outage_of_the_whole_cluster(
    breakable: Cluster, tmp_path: Path
) -> None:
    """It says so, and goes on by itself when the cluster answers again."""
    settings = await asyncio.to_thread(settings_over, breakable, 3)
    (port,) = free_ports(1)
    with worker(flags_for(settings), tmp_path / "log", port) as one:
        await one.runs()
        async with desk_over(settings) as desk:
            await desk.shared_by(1)
            await desk.add_many(20)
            await desk.rolled_up(20, 1)
            for node in breakable.cassandra:
                node.pause()
            await answers(one, 503)
            assert one.process.poll() is None
            for node in breakable.cassandra:
                node.resume()
            await answers(one, 200)

            await desk.add_many(20)
            await desk.rolled_up(20, 2)
        one.process.send_signal(signal.SIGTERM)
        assert await one.ended() == 0, one.output()


async def answers(one: Worker, status: int) -> None:
    """Wait until /readyz says so."""

    async def said() -> bool:
        return (await one.get("/readyz")).status_code == status

    await eventually(said, f"/readyz answers {status}")
