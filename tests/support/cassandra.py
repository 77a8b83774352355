"""Ways to a test's Cassandra: options for a keyspace of its own, a connection, an open store."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from counter.clock import SystemClock
from counter.limits import HOUR, MINUTE, SECOND
from counter.ports import Clock
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.control_keyspace import slice_text
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.schema import apply, apply_schema
from counter.storage.cassandra.session import FOR_EVER
from counter.storage.cassandra.settings import CassandraSettings
from counter.storage.cassandra.slices import FORGET, CassandraSlices
from counter.storage.cassandra.store import CassandraStore
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import Dataset, Slice
from counter.windows import slice_start
from scripts.cluster_nodes import Cluster
from tests.rollup.processes import LEASE_TIME, TIMES

DATASET: Final = Dataset(
    id=1,
    name="default",
    retention_us=HOUR,
    slice_us=10 * MINUTE,
    time_bucket_us=2 * MINUTE,
    event_buckets=4,
    # Long: a busy machine is slow, and only tests of time-outs want a short one.
    write_timeout_us=10 * SECOND,
    clock_skew_max_us=0,
)
#: For tests that have nodes fail: a write that waits for one gives up soon.
HASTY: Final = replace(DATASET, write_timeout_us=SECOND)


def options_for(cluster: Cluster, *, replicas: int = 1, keyspace: str = "") -> CassandraOptions:
    """How to reach *cluster*, and a keyspace of its own."""
    port = cluster.shape.cassandra_port
    return CassandraOptions(
        contact_points=[(host, port) for host in cluster.contact_points],
        keyspace=keyspace or f"t_{uuid.uuid4().hex[:12]}",
        # A busy machine is slow: only tests of time-outs want short ones.
        read_timeout_us=20 * SECOND,
        datasets=[(DATASET, Placement((("", replicas),)))],
    )


def at(options: CassandraOptions, *addresses: tuple[str, int]) -> CassandraOptions:
    """The same by other addresses."""
    return replace(options, contact_points=addresses)


@asynccontextmanager
async def connected(options: CassandraOptions) -> AsyncIterator[CassandraConnection]:
    """An open connection."""
    connection = CassandraConnection(options)
    # As a process does: on a busy machine the driver may find no node in its time.
    await StartupRetry(20 * SECOND).run(connection.open)
    try:
        yield connection
    finally:
        await connection.close()


async def have_schema(
    options: CassandraOptions, retry: StartupRetry | None = None
) -> Sequence[str]:
    """Apply the schema and return its report."""
    async with connected(options) as connection:
        return await apply(connection, options, retry)


@asynccontextmanager
async def opened(
    options: CassandraOptions, clock: Clock | None = None, retry: StartupRetry | None = None
) -> AsyncIterator[CassandraStore]:
    """An open store, opened as a process does at its start, for as long as *retry* says."""
    store = CassandraStore(options, clock or SystemClock())
    # On a busy machine the driver may find no node in its time.
    await (retry or StartupRetry(20 * SECOND)).run(store.open)
    try:
        yield store
    finally:
        await store.close()


def slice_of_now() -> Slice:
    """A slice of DATASET that holds now and during the test."""
    start_us = slice_start(SystemClock().now_us(), DATASET.slice_us)
    return Slice(start_us, start_us + 2 * DATASET.slice_us, DATASET.time_bucket_us, 4)


async def forget(store: CassandraStore, *, keep: Sequence[Slice] = ()) -> None:
    """Have the open *store* be as if it were new, but for the slices to *keep*, with their tables.

    To make a new one takes seconds. Data stay, under ids of namespaces that are never used again.
    """
    control = store.session.control

    async def set_(cql: str, *values: object) -> None:
        seen_by = ("SELECT value, op FROM {control}.meta WHERE name = 'schema'", ())
        await control.compare(cql, values, seen_by=seen_by)

    for (number,) in await control.read("SELECT id FROM {control}.departed"):
        # Noted by the tests' clock, which is ahead of the node's: a plain deletion would not do.
        await control.write(FORGET, FOR_EVER, number)
    for (name,) in await control.read("SELECT name FROM {control}.namespaces"):
        await set_("DELETE FROM {control}.namespaces WHERE name = ? IF EXISTS", name)
    for (key_id,) in await control.read("SELECT id FROM {control}.api_keys WHERE everyone = 0"):
        await set_("DELETE FROM {control}.api_keys WHERE everyone = 0 AND id = ? IF EXISTS", key_id)
    for (worker,) in await control.read("SELECT worker FROM {control}.workers"):
        await store.leases.leave(worker)
    kept = {each.start_us: slice_text(each) for each in keep}
    for dataset in await store.control.datasets():
        rows = await control.read(
            "SELECT start, document FROM {control}.slices WHERE dataset = ?", dataset.id
        )
        for start_us, text in rows:
            if start_us is not None and kept.get(start_us) != text:
                await set_(
                    "DELETE FROM {control}.slices WHERE dataset = ? AND start = ? IF EXISTS",
                    *(dataset.id, start_us),
                )
        await set_(
            "UPDATE {control}.slices SET dropped_before = 0 WHERE dataset = ?"
            " IF dropped_before != 0",
            dataset.id,
        )
        for start_us in await standing(store, dataset) - kept.keys():
            await CassandraSlices(store.session).drop_table(
                store.session.state_of(dataset), start_us
            )


async def standing(store: CassandraStore, dataset: Dataset = DATASET) -> set[int]:
    """The starts of the slices with tables."""
    keyspace = store.session.state_of(dataset).keyspace
    cql = f"SELECT table_name FROM system_schema.tables WHERE keyspace_name = '{keyspace}'"
    names = [name for (name,) in await store.session.connection.simple(cql)]
    return {int(name[len("events_") :]) for name in names if name.startswith("events_")}


def with_dataset(
    options: CassandraOptions, dataset: Dataset = DATASET, placement: Placement | None = None
) -> CassandraOptions:
    """*options* with that dataset, and those replicas of it."""
    return replace(options, datasets=[(dataset, placement or options.datasets[0][1])])


async def tables(connection: CassandraConnection, keyspace: str) -> Mapping[str, object]:
    """The id of each table."""
    cql = f"SELECT table_name, id FROM system_schema.tables WHERE keyspace_name = '{keyspace}'"
    return dict(await connection.simple(cql))


def settings_over(cluster: Cluster, copies: int) -> CassandraSettings:
    """A keyspace of its own, with the schema applied."""
    port = cluster.shape.cassandra_port
    given: dict[str, Any] = {
        "store": "cassandra",
        "contact_points": ",".join(f"{each}:{port}" for each in cluster.contact_points),
        "keyspace": f"rollup_{uuid.uuid4().hex[:12]}",
        "replication": str(copies),
        "clock_skew_max": "250ms",
        "shards": 16,
        **TIMES,
    }
    settings = CassandraSettings(**given)
    asyncio.run(apply_schema(settings))
    return settings


def flags_for(settings: CassandraSettings, **more: str) -> list[str]:
    """The command line of a worker."""
    flags: Mapping[str, str] = {
        "store": "cassandra",
        "contact-points": ",".join(settings.contact_points),
        "keyspace": settings.keyspace,
        "lease-time": LEASE_TIME,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return [f"--{name}={value}" for name, value in flags.items()]
