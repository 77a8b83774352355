"""``counter schema apply``: done once, however often and by however many."""

from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from counter.api_keys import ApiKey, Scope
from counter.clock import SystemClock
from counter.errors import StartupError, StoreUnavailableError
from counter.limits import DAY, MINUTE, SECOND
from counter.security.keys import digest_of, new_id
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.options import CassandraOptions, Placement
from counter.storage.cassandra.store import CassandraStore, KeysAlone
from counter.storage.cassandra.tables import CONTROL_TABLES, SCHEMA_VERSION, create_table, events_of
from counter.storage.shared.startup_retry import StartupRetry
from counter.types import Slice
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import (
    DATASET,
    connected,
    have_schema,
    opened,
    options_for,
    tables,
    with_dataset,
)
from tests.support.cluster import session_of


@pytest.fixture
async def options(cassandra: Cluster) -> AsyncIterator[CassandraOptions]:
    """A keyspace that does not exist, dropped afterwards to free memory of the node."""
    options = options_for(cassandra)
    yield options
    async with connected(options) as connection:
        for suffix in ("", "_default", "_more"):
            await connection.ddl(f"DROP KEYSPACE IF EXISTS {options.keyspace}{suffix}")


async def say_version(options: CassandraOptions, version: int) -> None:
    async with connected(options) as connection:
        await connection.ddl(
            f"UPDATE {options.keyspace}.meta SET value = '{version}' WHERE name = 'schema'"
            " IF EXISTS"
        )


async def test_the_schema_is_created_and_reported_once(options: CassandraOptions) -> None:
    lines = "\n".join(await have_schema(options))
    assert f"created keyspace {options.keyspace}, replicas dc1:1" in lines
    assert f"created keyspace {options.keyspace}_default, replicas dc1:1" in lines
    assert "created dataset default" in lines
    assert f"has version {SCHEMA_VERSION}" in lines
    assert await have_schema(options) == ["nothing to do: the schema is as it should be"]
    async with opened(options) as store:
        await store.ping()
        assert list(await store.control.datasets()) == [DATASET]


async def test_each_read_of_a_table_compares_checksums(
    options: CassandraOptions, cassandra: Cluster
) -> None:
    """Cassandra does so for compressed tables only."""
    await have_schema(options)
    with session_of(cassandra) as session:
        found = [
            each
            for each in session.execute("SELECT * FROM system_schema.tables")
            if each.keyspace_name.startswith(options.keyspace)
        ]
    assert len(found) > 10
    for each in found:
        assert each.crc_check_chance == 1
        assert each.compression["class"].endswith("LZ4Compressor")


async def test_a_run_that_ended_half_way_is_finished_by_the_next(options: CassandraOptions) -> None:
    """The version comes last: until then no store opens."""
    async with connected(options) as connection:
        keyspace = options.keyspace
        replication = "{'class': 'NetworkTopologyStrategy', 'dc1': 1}"
        await connection.ddl(f"CREATE KEYSPACE {keyspace} WITH replication = {replication}")
        for name in ("meta", "slices"):
            await connection.ddl(create_table(keyspace, name, CONTROL_TABLES[name]))
    with pytest.raises(StartupError, match="counter schema apply"):
        async with opened(options):
            pass
    lines = "\n".join(await have_schema(options))
    assert f"created tables of {keyspace}: sequences, datasets" in lines
    async with opened(options) as store:
        await store.ping()


async def test_an_older_schema_is_brought_up_to_date(options: CassandraOptions) -> None:
    """A store names the command; missing tables and columns are added."""
    await have_schema(options)
    await say_version(options, 0)
    async with connected(options) as connection:
        await connection.ddl(f"ALTER TABLE {options.keyspace}.slices DROP op")
        await connection.ddl(f"DROP TABLE {options.keyspace}.api_keys")
    older = rf"version 0; .* needs {SCHEMA_VERSION}: run `counter schema apply`"
    alone = KeysAlone(options, SystemClock())
    for opening in (CassandraStore(options, SystemClock()).open(), alone.open()):
        with pytest.raises(StartupError, match=older):
            await opening
    assert await have_schema(options) == [
        f"created tables of {options.keyspace}: api_keys",
        f"added column op to {options.keyspace}.slices",
        f"the schema of {options.keyspace} has version {SCHEMA_VERSION}",
    ]
    async with opened(options) as store:
        made = Slice(0, DATASET.slice_us, MINUTE, 1)
        await store.control.make_slices(DATASET, made)
        assert list(await store.control.slices(DATASET)) == [made]
        await alone.open()
        key = ApiKey(new_id(), "", digest_of(b""), ("*",), Scope.ADMIN, 1)
        assert await alone.keys.create_api_key(key)
        assert list(await alone.session.datasets()) == list(await store.control.datasets())
        assert abs((await alone.session.read_clock()).offset_us) < MINUTE
        await alone.close()
        assert list(await store.keys.api_keys()) == [key]
        await store.session.connection.ddl(f"DROP TABLE {options.keyspace}.api_keys")
        with pytest.raises(StoreUnavailableError, match="no table of API keys: run `counter sch"):
            await store.keys.api_keys()


async def test_a_newer_schema_is_left_alone(options: CassandraOptions) -> None:
    """By the store, and by ``schema apply``."""
    await have_schema(options)
    await say_version(options, SCHEMA_VERSION + 1)
    newer = (
        rf"has schema version {SCHEMA_VERSION + 1}; this program knows {SCHEMA_VERSION}:"
        " start the newer program"
    )
    with pytest.raises(StartupError, match=newer):
        async with opened(options):
            pass
    more = replace(DATASET, name="more")
    with pytest.raises(StartupError, match=newer):
        await have_schema(with_dataset(options, more))
    async with connected(options) as connection:
        assert not await tables(connection, f"{options.keyspace}_more")


async def test_the_first_settings_of_a_dataset_stay(options: CassandraOptions) -> None:
    """The report names them; partitions of new slices and consistency may change."""
    await have_schema(options)
    asked = replace(DATASET, retention_us=DAY, write_timeout_us=9 * SECOND, event_buckets=9)
    placement = Placement((("", 1),), "QUORUM", "LOCAL_QUORUM")
    changed = with_dataset(options, asked, placement)
    lines = await have_schema(changed)
    assert lines[:2] == [
        "dataset default: retention stays 1h as it was first set, and does not become 1d",
        "dataset default: write_timeout stays 10s as it was first set, and does not become 9s",
    ]
    assert "event_buckets hold from the next slice" in lines[2]
    assert "write_consistency was LOCAL_QUORUM and is now QUORUM: stop every process" in lines[3]
    assert await have_schema(changed) == lines[:2]
    async with opened(options) as store:
        assert list(await store.control.datasets()) == [replace(DATASET, event_buckets=9)]
        await store.ping()


async def test_a_dataset_that_is_not_named_stays(options: CassandraOptions) -> None:
    """Another program may use it; its id is not issued again."""
    await have_schema(options)
    more = replace(DATASET, name="more")
    assert "created dataset more" in await have_schema(with_dataset(options, more))
    async with opened(options) as store:
        assert list(await store.control.datasets()) == [DATASET, replace(more, id=2)]


@pytest.mark.parametrize(
    ("replication", "message"),
    [
        ((("", 3),), "3 replicas in data center 'dc1', which has 1 of the 2 nodes"),
        ((("dc9", 1),), "in data center 'dc9'; the cluster has dc1"),
    ],
    ids=["too-many", "elsewhere"],
)
async def test_a_replication_that_the_cluster_cannot_hold(
    options: CassandraOptions, replication: tuple[tuple[str, int], ...], message: str
) -> None:
    """Nothing is made then."""
    with pytest.raises(StartupError, match=message):
        await have_schema(with_dataset(options, placement=Placement(replication)), StartupRetry(0))
    async with connected(options) as connection:
        assert not await tables(connection, options.keyspace)


async def test_nodes_that_join_at_this_moment_are_waited_for(options: CassandraOptions) -> None:
    seen = [{"dc1": 0}, {"dc1": 1}]
    with patch.object(CassandraConnection, "nodes_by_datacenter", side_effect=seen):
        lines = await have_schema(options)
    assert f"created keyspace {options.keyspace}, replicas dc1:1" in lines


async def test_names_that_are_not_valid_for_a_keyspace(options: CassandraOptions) -> None:
    """Too long, or the same as another's when - becomes _."""
    long = replace(DATASET, name="x" * 48)
    with pytest.raises(StartupError, match="at most 47 more"):
        await have_schema(with_dataset(options, long))
    twins = [(replace(DATASET, name=name), options.datasets[0][1]) for name in ("a-b", "a_b")]
    with pytest.raises(StartupError, match="'a-b' and 'a_b' would both lie"):
        await have_schema(replace(options, datasets=twins))


@pytest.mark.parametrize("retention_us", [10 * MINUTE, 365 * DAY], ids=["short", "long"])
def test_tombstones_of_events_outlive_their_table(retention_us: int) -> None:
    """A write that was voided may land as long as the table is there."""
    dataset = replace(DATASET, retention_us=retention_us)
    assert events_of(dataset).grace_us >= dataset.retention_us + dataset.slice_us
