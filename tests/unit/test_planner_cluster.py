"""How many of each part a cluster takes, from which rates, and what is said of it."""

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from counter import limits
from counter.config.namespace_rules import Clients
from counter.ops.cluster_planner import (
    MEASURED,
    RATE_NAMES,
    ClusterNeed,
    ClusterPlan,
    Rate,
    Rates,
    cluster_warnings,
    plan_cluster,
    read_rates,
)
from counter.ops.planner import PlanError
from counter.types import CounterType, PayloadCheck
from tests.unit.test_planner_rules import dataset, settings

#: Round numbers, so that a reader can check a plan in the head.
ROUND = Rates(
    api_adds=Rate(Fraction(5_000), "here"),
    api_gets=Rate(Fraction(20_000), "here"),
    node_adds=Rate(Fraction(10_000), "here"),
    node_copies=Rate(Fraction(3_000), "here"),
    node_rollups=Rate(Fraction(6_000), "here"),
    worker_rollups=Rate(Fraction(4_000), "here"),
    cache_keys=Rate(Fraction(50_000), "here"),
)


def cluster(**changed: Any) -> ClusterNeed:
    """75,000 adds a second to a million counters, with everything used in full."""
    wanted: dict[str, Any] = {
        "adds_per_s": Fraction(75_000),
        "gets_per_s": Fraction(0),
        "counters": 10**6,
        "dataset": dataset(),
        "settings": settings(),
        "load": Fraction(1),
        "disk_use": Fraction(1),
        "disk_bytes": 10**15,
    }
    return ClusterNeed(**(wanted | changed))


def sizes(plan: ClusterPlan) -> tuple[int, int, int, int]:
    """API processes, workers, Cassandra nodes, memcached servers."""
    return (
        plan.api_processes,
        plan.worker_processes,
        plan.cassandra_nodes,
        plan.memcached_servers,
    )


def test_what_is_asked_is_divided_by_what_one_takes() -> None:
    """75,000 / 5,000; 75,000 / 4,000; 225,000 / 3,000 + 225,000 / 6,000; 150,000 / 50,000."""
    assert sizes(plan_cluster(cluster(), ROUND)) == (15, 19, 113, 3)


def test_what_crosses_the_network_is_shown_by_its_parts() -> None:
    """Each event goes to a node, and from there to two others, which receive what it sends."""
    plan = plan_cluster(cluster(adds_per_s=Fraction(10**6), counters=1), ROUND)
    shown = {each.what: each.result for each in plan.steps if each.part == "Network"}
    assert shown == {
        "clients": "529 MB/s",
        "memcached": "87 MB/s",
        "processes and nodes": "473 MB/s",
        "between nodes": "1.098 GB/s",
        "a node, in and out": "2.666 MB/s",
    }


def test_at_half_load_it_takes_twice_as_many() -> None:
    assert sizes(plan_cluster(cluster(load=Fraction(1, 2)), ROUND)) == (30, 38, 225, 6)


def test_gets_take_api_processes_and_memcached_alone() -> None:
    plan = plan_cluster(cluster(gets_per_s=Fraction(100_000)), ROUND)
    assert sizes(plan) == (20, 19, 113, 5)


def test_a_counter_is_rolled_up_once_a_window_however_hot() -> None:
    """100,000 counters in windows of 10 s are 10,000 a second, at 75,000 adds too."""
    plan = plan_cluster(cluster(counters=100_000), ROUND)
    assert sizes(plan) == (15, 3, 80, 2)


def test_one_copy_goes_by_the_rate_of_a_node_alone() -> None:
    """75,000 / 10,000 and 75,000 / 6,000."""
    assert plan_cluster(cluster(replication=1), ROUND).cassandra_nodes == 20


def test_nodes_have_room_for_events_and_rows() -> None:
    """Eight days (a slice is dropped whole) of both, 64 B each, in three copies: 19.9 TB."""
    plan = plan_cluster(cluster(disk_bytes=10**11), ROUND)
    assert plan.cassandra_nodes == 200
    assert (
        plan_cluster(cluster(disk_bytes=10**11, disk_use=Fraction(1, 2)), ROUND).cassandra_nodes
        == 399
    )


def test_memcached_has_room_for_counts_and_tokens() -> None:
    """A million counts and 26 s of tokens, 152 bytes each: 448 MB."""
    assert plan_cluster(cluster(memory_bytes=10**7), ROUND).memcached_servers == 45
    off = cluster(memory_bytes=10**7, settings=settings(payload_check=PayloadCheck.OFF))
    assert plan_cluster(off, ROUND).memcached_servers == 16


def test_nothing_to_do_still_takes_what_survives_a_loss() -> None:
    quiet = cluster(adds_per_s=Fraction(0), counters=1)
    assert sizes(plan_cluster(quiet, ROUND)) == (2, 2, 3, 1)


def test_best_effort_counts_in_memcached() -> None:
    need = cluster(settings=settings(counter_type=CounterType.BEST_EFFORT))
    assert sizes(plan_cluster(need, ROUND)) == (15, 2, 3, 2)


def test_each_number_comes_with_its_arithmetic() -> None:
    steps = {(each.part, each.what): each for each in plan_cluster(cluster(), ROUND).steps}
    nodes = steps["Cassandra nodes", "busy with adds"]
    assert (nodes.arithmetic, nodes.result) == ("225,000/s / 3,000/s", "75")
    disk = steps["Cassandra nodes", "disk for events"]
    assert disk.arithmetic == "75,000/s * (7d + 1d) * 64 B * 3"
    assert disk.result == "9.953 TB"
    assert steps["API processes", "needed"].result == "15"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"adds_per_s": Fraction(10**10)}, "adds is 10,000,000,000/s; it must be from 0/s to"),
        ({"counters": 0}, "counters is 0; it must be from 1 to"),
        ({"replication": 17}, "replication is 17; it must be from 1 to 16"),
        ({"load": Fraction(0)}, "load is 0%; it must be more than 0% and at most 100%"),
        ({"disk_use": Fraction(2)}, "disk_use is 200%; it must be more than 0%"),
        ({"memory_bytes": 0}, "memory_size is 0 B; it must be from 1 B"),
        ({"dataset": dataset(retention_us=1)}, "retention is 1us; it must be from 10m to 365d"),
        ({"dataset": dataset(time_bucket_us=0)}, "time_bucket is 0s; it must be from 1s"),
        ({"dataset": dataset(event_buckets=0)}, "event_buckets is 0; it must be from 1 to 256"),
        ({"settings": settings(rollup_window_us=0)}, "rollup_window is 0s; it must be from 100ms"),
        ({"settings": settings(shards=0)}, "shards is 0; it must be from 1 to 1,024"),
    ],
    ids=range(11),
)
def test_a_value_past_its_bound_is_named_with_it(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match="^" + told):
        plan_cluster(cluster(**changed), ROUND)


def warned(need: ClusterNeed, rates: Rates = ROUND) -> tuple[str, ...]:
    return cluster_warnings(need, plan_cluster(need, rates), Clients(), rates)


def test_workers_without_a_shard_are_warned_of() -> None:
    (idle,) = warned(cluster())
    assert "19 workers share 16 shards" in idle
    assert "at least 19 shards" in idle
    assert warned(cluster(settings=settings(shards=19))) == ()


@pytest.mark.parametrize(
    ("counters", "advice"),
    [
        # 4,000,000 adds in a window of 10 s, and 1,440,000,000 in one of an hour, the longest.
        (10**6 * 4, "lengthen rollup_window"),
        (10**8, "make rollup_window longer than 250s"),
        (10**10, "no rollup_window helps, because each add in it is to another counter"),
    ],
)
def test_more_workers_than_can_share_the_work_are_warned_of(counters: int, advice: str) -> None:
    """Of a longer window only where it saves rollups."""
    many = cluster(adds_per_s=Fraction(400_000), counters=counters, settings=settings(shards=1_024))
    (told,) = warned(many)
    assert "100 workers are needed and 64 at most share the work" in told
    assert f"{advice}, or divide the counters among 2 deployments" in told
    assert plan_cluster(many, ROUND).deployments == 2


def test_rates_that_were_not_measured_here_are_warned_of() -> None:
    need = cluster(adds_per_s=Fraction(0))
    (told,) = warned(need, MEASURED)
    assert all(name in told for name in RATE_NAMES)
    (told,) = warned(need, replace(ROUND, node_adds=MEASURED.node_adds))
    assert "are used for node_adds:" in told


def test_what_contradicts_the_clients_is_reported_with_the_plan() -> None:
    need = cluster(adds_per_s=Fraction(0))
    clients = Clients(retry_us=8 * limits.DAY)
    told = cluster_warnings(need, plan_cluster(need, ROUND), clients, ROUND)
    assert any("clients retry for 8d" in each for each in told)


def figures(*found: object) -> str:
    report = {"subject": "capacity", "measured_at": "2026-12-01T08:00Z", "figures": list(found)}
    return json.dumps([{"subject": "gets", "figures": "of no concern"}, report])


def test_rates_are_read_from_a_file_and_the_others_stay() -> None:
    adds = {"what": "api_adds", "value": 9_000.5, "unit": "/s", "note": "kept by the benchmark"}
    rates = read_rates(figures(adds), "mine.json")
    assert rates.api_adds == Rate(Fraction(18_001, 2), "mine.json, 2026-12-01T08:00Z")
    assert replace(rates, api_adds=MEASURED.api_adds) == MEASURED


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "it is not JSON"),
        ("{}", "no list of reports with one whose subject is 'capacity'"),
        ("[1, {}]", "no list of reports"),
        ('[{"subject": "capacity"}]', "figures is no list"),
        (figures(), "no figure is there; known are: api_adds"),
        (figures(7), "a figure is '7', and no object"),
        (figures({"what": "adds", "value": 1, "unit": "/s"}), "what is 'adds'; known are"),
        (figures({"what": "api_adds", "value": 1, "unit": "s"}), "the unit of api_adds is 's'"),
        (figures({"what": "api_adds", "value": 0, "unit": "/s"}), "api_adds is 0; it must be"),
        (figures({"what": "api_adds", "value": -1, "unit": "/s"}), "api_adds is -1;"),
        (figures({"what": "api_adds", "value": 1e10, "unit": "/s"}), "at most 1,000,000,000/s"),
        (figures({"what": "api_adds", "value": float("nan"), "unit": "/s"}), "api_adds is nan"),
        (figures({"what": "api_adds", "value": float("inf"), "unit": "/s"}), "api_adds is inf"),
        (figures({"what": "api_adds", "value": "5", "unit": "/s"}), "api_adds is 5;"),
        (figures({"what": "api_adds", "value": True, "unit": "/s"}), "api_adds is True"),
        (figures({"what": "api_adds", "value": [], "unit": "/s"}), r"api_adds is \[\]"),
        (figures({"what": "api_adds", "unit": "/s"}), "api_adds is None"),
        (figures({"what": [], "value": 1, "unit": "/s"}), r"what is '\[\]'"),
    ],
    ids=range(18),
)
def test_a_file_that_cannot_be_used_says_why(text: str, told: str) -> None:
    with pytest.raises(PlanError, match="^mine.json: .*" + told):
        read_rates(text, "mine.json")


def test_every_default_says_where_it_was_measured() -> None:
    for name in RATE_NAMES:
        rate = getattr(MEASURED, name)
        assert rate.per_s > 0
        assert "cluster-" in rate.source


def test_what_was_measured_over_sqlite_is_warned_of() -> None:
    """One process over SQLite takes several times what it takes over Cassandra."""
    adds = {"what": "api_adds", "value": 25_000, "unit": "/s"}
    others = [
        {"what": "batch_adds", "value": 150_000, "unit": "/s"},
        {"what": "event_bytes", "value": 47.5, "unit": "B"},
    ]
    report = {"subject": "capacity", "store": "sqlite", "figures": [adds, *others]}
    rates = read_rates(json.dumps([report]), "mine.json")
    assert rates.api_adds == Rate(Fraction(25_000), "mine.json, over SQLite", embedded=True)
    need = cluster(adds_per_s=Fraction(0))
    told = cluster_warnings(need, plan_cluster(need, rates), Clients(), rates)
    assert any("api_adds were measured over SQLite" in each for each in told)
