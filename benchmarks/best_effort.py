"""Adds to best-effort counters, in the process and in memcached, against the same without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from benchmarks.cluster import wait_until
from benchmarks.harness import (
    Bench,
    Load,
    Server,
    check,
    check_answers,
    counter_names,
    counter_serve,
    load,
    variant,
)
from benchmarks.results import Figure, Report, by_clock, median, ratio
from benchmarks.single_adds import COUNTERS
from scripts.cluster_nodes import Shape, dies_with_us, make_temporary
from scripts.cluster_servers import memcached_missing

BASE: Final = "/v1/namespaces/views"
CONNECTIONS: Final = 64
_WARM_S: Final = 1.0
_EMBEDDED: Final = "in the process"
_MEMCACHED: Final = "in memcached"
_NONE: Final = "no storage"
_TARGETS: Final = ((_EMBEDDED, 0.9), (_MEMCACHED, 0.7))


def run(bench: Bench) -> Report:
    """Measure all of them in turn; without memcached, where it is not installed."""
    variants: dict[str, Callable[[], Load]] = {
        _NONE: partial(_no_storage, bench),
        _EMBEDDED: partial(_embedded, bench),
    }
    if problem := memcached_missing():
        bench.say(f"nothing in memcached: {problem}")
    else:
        variants[_MEMCACHED] = partial(_in_memcached, bench)
    loads = bench.alternate(variants)
    return Report(
        subject="best-effort",
        title="Best-effort adds",
        method=(
            f"`POST .../add` over {COUNTERS:,} counters (a few hot, most rare) of a BEST_EFFORT"
            f" namespace, over {CONNECTIONS} connections, by wrk on the same machine. Counters are"
            " in the memory of the process, or in a memcached that shares the cores. The server"
            " without storage has the same process set-up, front, parsing and answers, and counts"
            " nothing. Bodies are those of a counted add, token and all: here it is parsed and not"
            " used. After each load the counts are compared with what had been acknowledged:"
            " nothing failed meanwhile, so nothing may be lost."
        ),
        figures=tuple(_figures(loads)),
    )


def _figures(loads: dict[str, list[Load]]) -> Iterator[Figure]:
    none = loads[_NONE]
    for where, target in _TARGETS:
        if where not in loads:
            continue
        found = loads[where]
        yield ratio(
            f"best-effort adds a second {where}, of a route without storage",
            by_clock(found, none),
            at_least=target,
            note=f"{rates(found)} against {rates(none)}",
        )


def rates(loads: Sequence[Load]) -> str:
    """The medians of *loads*, for a note."""
    return (
        f"{median([x.per_s for x in loads]):,.0f}/s"
        f" (p99 {median([x.p99_ms for x in loads]):.1f} ms;"
        f" {median([x.per_cpu_s for x in loads]):,.0f} a CPU second)"
    )


def loaded(bench: Bench, server: Server) -> list[Load]:
    """Warm *server* up and measure it last, in a namespace made for it."""
    answer = server.client.put(BASE, json={"counter_type": "BEST_EFFORT"})
    check(answer.status_code == 201, f"no namespace: {answer.status_code} {answer.text[:300]}")
    adds = partial(load, server, "adds.lua", BASE, COUNTERS, connections=CONNECTIONS)
    warm = [] if bench.quick else [adds(seconds=_WARM_S)]
    return [*warm, adds(seconds=bench.seconds)]


def _no_storage(bench: Bench) -> Load:
    with variant(bench, "no-storage") as server:
        loads = loaded(bench, server)
        check_answers(server, loads)
        return loads[-1]


def _embedded(bench: Bench) -> Load:
    with counter_serve(bench, bench.fresh_folder("data")) as server:
        return counted(server, loaded(bench, server))


def _in_memcached(bench: Bench) -> Load:
    with cached_serve(bench, "memcached") as server:
        return counted(server, loaded(bench, server))


def counted(server: Server, loads: list[Load]) -> Load:
    """The last of *loads*, once every acknowledged add of all is counted, one without an answer
    at most once, and nothing else."""
    names = counter_names(COUNTERS)
    totals = [-1]

    def settled() -> bool:
        totals.append(sum(server.counts(BASE, names, None).values()))
        return totals[-1] == totals[-2]

    wait_until("the server is still processing abandoned adds", settled, 30.0)
    acknowledged, sent = sum(x.requests for x in loads), sum(x.sent for x in loads)
    check(
        acknowledged <= totals[-1] <= sent,
        f"{totals[-1]} counted, {acknowledged} acknowledged, {sent} sent",
    )
    return loads[-1]


@contextmanager
def cached_serve(bench: Bench, kind: str, *flags: str) -> Iterator[Server]:
    """``counter serve`` on an empty folder with its cache in a ``memcached`` or a ``redis``, which
    is gone afterwards."""
    directory = bench.fresh_folder(kind)
    shape = Shape(nodes=0, memcached=int(kind == "memcached"), redis=int(kind == "redis"))
    cluster = make_temporary(directory, shape)
    data = bench.fresh_folder("data")
    with dies_with_us(directory):
        cluster.start()
        url = cluster.redis_url if cluster.redis else cluster.memcached_url
        cache = ("--cache", url, "--cache-timeout=1s")
        with counter_serve(bench, data, *cache, *flags) as server:
            yield server
