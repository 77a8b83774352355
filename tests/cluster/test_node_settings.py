"""Warnings about settings of Cassandra's nodes that may lose acknowledged adds."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from cassandra.policies import SimpleConvictionPolicy
from cassandra.pool import Host

from counter.clock import SystemClock
from counter.config.report import load
from counter.ops.doctor import examine
from counter.storage.cassandra.connection import CassandraConnection
from counter.storage.cassandra.store import node_warnings
from counter.storage.shared.startup_retry import StartupRetry
from scripts.cluster_nodes import Cluster
from tests.support.cassandra import connected, have_schema, opened, options_for
from tests.support.cluster import session_of
from tests.support.waiting import eventually

PASSWORD = "a password of no one else"


async def test_a_periodic_sync_of_the_commit_log_is_warned_of(
    cassandra: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """At startup and by the doctor, with the loss, its condition, and the setting."""
    options = options_for(cassandra)
    await have_schema(options)
    async with opened(options) as store:
        with caplog.at_level(logging.WARNING, "counter.start"):
            await StartupRetry(0).warn_of_server(store)
    (said,) = caplog.messages
    node = cassandra.contact_points[0]
    assert said.startswith(f"Cassandra at {node}: commitlog_sync = periodic: ")
    assert "within 10000ms of it most of its replicas lose power" in said
    assert "set commitlog_sync: group or batch in cassandra.yaml" in said

    given = {
        "store": "cassandra",
        "contact_points": f"{node}:{cassandra.shape.cassandra_port}",
        "keyspace": options.keyspace,
    }
    found = await examine(load(given), SystemClock())
    (about,) = [each for each in found if each.part == "server"]
    assert (about.state, about.detail) == ("warning", said)
    assert "docs/guarantees.md" in about.do


async def test_a_user_needs_one_permission_to_read_the_settings(
    cassandra_with_passwords: Cluster,
) -> None:
    """Without it the warning says so, and names the permission."""
    options = options_for(cassandra_with_passwords)
    options = replace(options, username="reader", password=PASSWORD)
    with session_of(cassandra_with_passwords, "cassandra") as session:
        session.execute(f"CREATE ROLE reader WITH PASSWORD = '{PASSWORD}' AND LOGIN = true")
        try:
            async with connected(options) as connection:
                (warning,) = await node_warnings(connection)
                assert "commitlog_sync cannot be read" in warning
                assert "GRANT SELECT ON system_views.settings" in warning
                session.execute("GRANT SELECT ON system_views.settings TO reader")

                async def is_read() -> bool:
                    (warning,) = await node_warnings(connection)
                    return "commitlog_sync = periodic" in warning

                # A node caches permissions for a while.
                await eventually(is_read, "the settings are read")
        finally:
            session.execute("DROP ROLE reader")


class Reporting(CassandraConnection):
    """A connection to nodes that report the settings that a test gives them."""

    def __init__(self, *settings: Sequence[tuple[str, str | None]]) -> None:
        self._settings = {
            Host(f"10.0.0.{number}", SimpleConvictionPolicy, host_id=number): each
            for number, each in enumerate(settings, 1)
        }

    def near_nodes(self) -> list[Host]:
        return list(self._settings)

    async def ask(self, node: Host, cql: str) -> Sequence[tuple[Any, ...]]:
        assert "system_views.settings" in cql
        return self._settings[node]


PERIODIC = ("commitlog_sync", "periodic")


@pytest.mark.parametrize("sync", ["batch", "group"])
async def test_a_sync_before_each_answer_is_not_warned_of(sync: str) -> None:
    assert await node_warnings(Reporting([("commitlog_sync", sync)])) == ()


async def test_a_node_that_goes_on_without_a_disk_is_warned_of() -> None:
    found = [("commitlog_sync", "group"), ("disk_failure_policy", "best_effort")]
    (warning,) = await node_warnings(Reporting(found))
    assert "disk_failure_policy = best_effort" in warning
    assert "set disk_failure_policy: stop_paranoid" in warning
    assert await node_warnings(Reporting([found[0], ("disk_failure_policy", "stop")])) == ()


async def test_nodes_that_differ_are_named() -> None:
    """An older version gives the period another name."""
    warnings = await node_warnings(
        Reporting(
            [PERIODIC, ("commitlog_sync_period", "10s")],
            [("commitlog_sync", "group")],
            [PERIODIC, ("commitlog_sync_period_in_ms", "2000")],
            [PERIODIC, ("commitlog_sync_period", "10s")],
            [],
        )
    )
    ten, two, none = warnings
    assert "10.0.0.1, 10.0.0.4: commitlog_sync = periodic" in ten
    assert "within 10s" in ten
    assert "10.0.0.3: commitlog_sync = periodic" in two
    assert "within 2000ms" in two
    assert none == "Cassandra at 10.0.0.5: it does not report commitlog_sync"


async def test_unreachable_nodes_are_reported() -> None:
    (warning,) = await node_warnings(Reporting())
    assert "commitlog_sync is unknown" in warning
