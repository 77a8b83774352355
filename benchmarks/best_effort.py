"""Adds to best-effort counters, in the process, in memcached and in Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from benchmarks.harness import Bench, Server, counter_serve
from benchmarks.loads import COUNTERS, Load, check_counted, settled_count, single_adds
from benchmarks.results import Report, rate
from scripts.cluster_nodes import Shape, dies_with_us, make_temporary
from scripts.cluster_servers import memcached_missing, redis_missing

_BASE: Final = "/v1/namespaces/views"
_WARM_S: Final = 1.0


def run(bench: Bench) -> Report:
    """Measure all of them in turn; without a cache that is not installed."""
    variants: dict[str, Callable[[], Load]] = {"in the process": partial(_embedded, bench)}
    for kind, problem in (("memcached", memcached_missing()), ("redis", redis_missing())):
        if problem:
            bench.say(f"nothing in {kind}: {problem}")
        else:
            variants[f"in {kind}"] = partial(_in_cache, bench, kind)
    loads = bench.alternate(variants)
    return Report(
        subject="best-effort",
        title="Best-effort adds",
        method=(
            f"`POST .../add` over {COUNTERS:,} counters (a few hot, most rare) of a BEST_EFFORT"
            " namespace, over 64 connections, by wrk on the same machine. Counters are in the"
            " memory of the process, or in a cache that shares the cores. Bodies are those of a"
            " counted add, token and all: here it is parsed and not used. After each load the"
            " counts are compared with what had been acknowledged: nothing failed meanwhile, so"
            " nothing may be lost."
        ),
        figures=tuple(
            rate(f"best-effort adds a second {where}", found) for where, found in loads.items()
        ),
    )


def _embedded(bench: Bench) -> Load:
    with counter_serve(bench, bench.fresh_folder("data")) as server:
        return _loaded(bench, server)


def _in_cache(bench: Bench, kind: str) -> Load:
    with _cache(bench, kind) as url:
        flags = ("--cache", url, "--cache-timeout=1s")
        with counter_serve(bench, bench.fresh_folder("data"), *flags) as server:
            return _loaded(bench, server)


def _loaded(bench: Bench, server: Server) -> Load:
    """Load *server*; every acknowledged add is counted, one without a response at most once."""
    server.create(_BASE, counter_type="BEST_EFFORT")
    send = single_adds(server, _BASE)
    loads = [send(seconds=each) for each in ([] if bench.quick else [_WARM_S])]
    loads.append(send(seconds=bench.seconds))
    check_counted(settled_count(server, _BASE, COUNTERS), loads)
    return loads[-1]


@contextmanager
def _cache(bench: Bench, kind: str) -> Iterator[str]:
    """The address of a ``memcached`` or a ``redis`` that is gone afterwards."""
    directory = bench.fresh_folder(kind)
    shape = Shape(nodes=0, memcached=int(kind == "memcached"), redis=int(kind == "redis"))
    cluster = make_temporary(directory, shape)
    with dies_with_us(directory):
        cluster.start()
        yield cluster.redis_url if cluster.redis else cluster.memcached_url
