"""Single adds over HTTP to one Cassandra node: beside the driver alone, and beside other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from benchmarks.cluster import conditions
from benchmarks.cluster_loads import FRESH, HOT, MANY, SKEWED, Adds, adds_over
from benchmarks.harness import Bench, Load
from benchmarks.results import Figure, Report, median, ratios

_CONNECTIONS: Final = (64, 256)
#: LWTs on one counter get in each other's way: of few, some succeed however slow the machine is.
_CONNECTIONS_QUICK: Final = (8,)
_OF_DRIVER: Final = 0.8
_NEW_OF_DRIVER: Final = 0.7
_HOT: Final = 2.0
_OF_NATIVE: Final = 1.5

_DRIVER: Final = "the driver alone"
_SERVICE: Final = "the service"
_UNGUARDED: Final = "the service without the guard"
_LWT: Final = "an LWT insert an add"
_NATIVE: Final = "a native counter's update an add"

_Loads = Mapping[tuple[str, str], list[Load]]

_METHOD: Final = (
    "`POST .../add` with a fresh token each to `counter serve --store cassandra` over one Cassandra"
    " node and memcached, by wrk on the same machine; no rollup worker runs. Each load has an"
    " EVENTUAL namespace of its own, so marks and names are new too. *New counters*: each add is"
    f" the first to its counter. *Many counters*: {MANY:,}, a few hot, most rare. *One counter*:"
    " all adds go to it. The driver alone is one Python process without HTTP that writes the same"
    " rows (mark, name, event) through the same driver with the same settings, as many at a time as"
    " there are connections; marks and names that come together in a batch for each partition,"
    " events one by one. The service has more of them share a statement, those of up to ten"
    " partitions that come together: it pays for HTTP, for the guard and for knowing each add's end"
    " with what that saves. The other ways to count are servers of the same process set-up, front,"
    " parsing and driver bridge, and write a turn's adds together too; they do one statement an add"
    " and leave no marks: the event by `IF NOT EXISTS`, or `n = n + 1` on a native counter column,"
    " which counts a retried add twice. An LWT costs most where several nodes must agree: its"
    " target is that of cluster-quorum, and what it costs on one node is shown beside."
    " After all of it every row is read back: each acknowledged add is one"
    " event, each unanswered one at most one, and the API counts what the rows say."
)


def run(bench: Bench) -> Report:
    """Measure at each number of connections, all servers in turn."""
    with adds_over(bench, nodes=1) as adds:
        figures: list[Figure] = []
        for connections in _CONNECTIONS_QUICK if bench.quick else _CONNECTIONS:
            variants = {
                f"{how}, {where}, {connections} connections": each
                for (how, where), each in _variants(adds, connections).items()
            }
            samples = bench.alternate(variants).values()
            loads = dict(zip(_variants(adds, connections), samples, strict=True))
            figures += _figures(connections, loads)
    return Report(
        subject="cluster-adds",
        title="Single adds over Cassandra",
        method=_METHOD,
        figures=tuple(figures),
        conditions=conditions(),
    )


def _variants(adds: Adds, connections: int) -> dict[tuple[str, str], Callable[[], Load]]:
    """What is compared, by how it counts and where."""
    http, driver = adds.over_http, adds.by_driver
    return {
        (_DRIVER, "new counters"): partial(driver, FRESH, connections),
        (_SERVICE, "new counters"): partial(http, adds.service, FRESH, connections),
        (_UNGUARDED, "new counters"): partial(http, adds.service, FRESH, connections, "off"),
        (_SERVICE, "one counter"): partial(http, adds.service, HOT, connections),
        (_DRIVER, "many counters"): partial(driver, SKEWED, connections),
        (_SERVICE, "many counters"): partial(http, adds.service, SKEWED, connections),
        (_LWT, "many counters"): partial(http, adds.lwt, SKEWED, connections),
        (_NATIVE, "many counters"): partial(http, adds.native, SKEWED, connections),
        (_LWT, "one counter"): partial(http, adds.lwt, HOT, connections),
        (_NATIVE, "one counter"): partial(http, adds.native, HOT, connections),
    }


def _figures(connections: int, loads: _Loads) -> Iterator[Figure]:
    def compared(
        over: tuple[str, str], under: tuple[str, str], at_least: float | None = None
    ) -> Figure:
        where = over[1] if over[1] == under[1] else f"{over[1]} with {under[1]}"
        rounds = ratios([x.per_s for x in loads[over]], [x.per_s for x in loads[under]])
        return Figure(
            f"{where}, {connections} connections: {over[0]}, of {under[0]}",
            median(rounds),
            at_least=at_least,
            rounds=tuple(rounds),
            note=f"{_rates(loads[over])} against {_rates(loads[under])}",
        )

    new, many, one = "new counters", "many counters", "one counter"
    yield compared((_SERVICE, new), (_DRIVER, new), _NEW_OF_DRIVER)
    yield compared((_UNGUARDED, new), (_DRIVER, new))
    yield compared((_SERVICE, many), (_DRIVER, many), _OF_DRIVER)
    yield compared((_SERVICE, one), (_SERVICE, new), _HOT)
    yield compared((_SERVICE, one), (_DRIVER, new))
    yield compared((_SERVICE, many), (_LWT, many))
    yield compared((_SERVICE, one), (_LWT, one))
    yield compared((_SERVICE, many), (_NATIVE, many), _OF_NATIVE)
    yield compared((_SERVICE, one), (_NATIVE, one), _OF_NATIVE)


def _rates(loads: list[Load]) -> str:
    return (
        f"{median([x.per_s for x in loads]):,.0f}/s (p99"
        f" {median([x.p99_ms for x in loads]):.0f} ms;"
        f" {median([x.cpu_s / x.seconds for x in loads]):.2f} of a core)"
    )
