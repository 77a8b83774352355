"""Single adds over HTTP to three Cassandra nodes, beside other ways to count there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from benchmarks.cluster import conditions
from benchmarks.cluster_loads import HOT, MANY, SKEWED, Adds, adds_over
from benchmarks.harness import Bench, Load
from benchmarks.results import Figure, Report, median, ratios

_NODES: Final = 3
_CONNECTIONS: Final = 64
#: A quick run: two nodes start sooner, and QUORUM takes both of them; few LWTs contend less.
_NODES_QUICK: Final = 2
_CONNECTIONS_QUICK: Final = 8
#: Spread over many counters, LWTs meet no other: they cost Paxos, and no contention.
_OF_LWT: Final = {"many counters": 6.0, "one counter": 15.0}
_OF_NATIVE: Final = 1.5

_SERVICE: Final = "the service"
_LWT: Final = "an LWT insert an add"
_NATIVE: Final = "a native counter's update an add"
_TARGETS: Final = {"many counters": SKEWED, "one counter": HOT}

_METHOD: Final = (
    "`POST .../add` with a fresh token each to `counter serve --store cassandra` over three"
    f" Cassandra nodes that all keep all data, at QUORUM, from {_CONNECTIONS} connections by wrk,"
    " all on the same machine; no rollup worker runs. *Many counters*: "
    f"{MANY:,}, a few hot, most rare. *One counter*: all adds go to it. The other ways to count are"
    " the servers of cluster-adds: each add an event"
    " by `IF NOT EXISTS`, which takes four round"
    " trips of Paxos among the nodes, or `n = n + 1` on a native counter column, which counts a"
    " retried add twice. A request that fails, as LWTs on one partition do when they contend, is"
    " no part of a rate. Afterwards every row is read back: each acknowledged add is one event,"
    " each unanswered one at most one, and the API counts what the rows say."
)


def run(bench: Bench) -> Report:
    """Measure all servers in turn."""
    with adds_over(bench, _NODES_QUICK if bench.quick else _NODES) as adds:
        variants = _variants(adds)
        samples = bench.alternate(
            {f"{how}, {where}": variants[how, where] for how, where in variants}
        )
        figures = tuple(_figures(dict(zip(variants, samples.values(), strict=True))))
    return Report(
        subject="cluster-quorum",
        title="Single adds over three Cassandra nodes",
        method=_METHOD,
        figures=figures,
        conditions=conditions(_NODES),
    )


def _variants(adds: Adds) -> dict[tuple[str, str], Callable[[], Load]]:
    """What is compared, by how it counts and where."""
    connections = _CONNECTIONS_QUICK if adds.bench.quick else _CONNECTIONS
    servers = {_SERVICE: adds.service, _LWT: adds.lwt, _NATIVE: adds.native}
    return {
        (how, where): partial(adds.over_http, server, target, connections, may_fail=True)
        for where, target in _TARGETS.items()
        for how, server in servers.items()
    }


def _figures(loads: Mapping[tuple[str, str], list[Load]]) -> Iterator[Figure]:
    for where in _TARGETS:
        service = loads[_SERVICE, where]
        for how, at_least in ((_LWT, _OF_LWT[where]), (_NATIVE, _OF_NATIVE)):
            other = loads[how, where]
            rounds = ratios([x.per_s for x in service], [x.per_s for x in other])
            yield Figure(
                f"{where}: {_SERVICE}, of {how}",
                median(rounds),
                at_least=at_least,
                rounds=tuple(rounds),
                note=f"{_rates(service)} against {_rates(other)}",
            )


def _rates(loads: list[Load]) -> str:
    failed = sum(each.failed for each in loads) / sum(x.failed + x.requests for x in loads)
    return (
        f"{median([x.per_s for x in loads]):,.0f}/s (p99"
        f" {median([x.p99_ms for x in loads]):.0f} ms; {failed:.1%} failed)"
    )
