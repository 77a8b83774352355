"""Gets of counts that are in memcached: how many a second, and how long the slow ones take."""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.cluster import DATASET, Place, Site, conditions, site
from benchmarks.cluster_rollups import Feeder
from benchmarks.harness import Bench, Server, check, counter_names
from benchmarks.loads import Load, check_counts, load
from benchmarks.results import Report, figure, rate, rates
from counter.clock import SystemClock

_COUNTERS: Final = 10_000
_CONNECTIONS: Final = (64, 256)
_SLOW_OF_MEDIAN: Final = 3.0
_ROLLUP_TIMEOUT_S: Final = 120.0


def run(bench: Bench) -> Report:
    """Fill the cache by a rollup, then load the service with gets."""
    counters = 500 if bench.quick else _COUNTERS
    with site(bench, *DATASET) as where, where.api() as server:
        place = where.create(server, cache_ttl="1d", rollup_window="1s", accept_limit="1s")
        _fill_cache(where, server, place, counter_names(counters))
        send = partial(load, server, "gets.lua", place.base, counters, 0)
        send(connections=64, seconds=2.0)
        samples = bench.alternate(
            {
                f"{number} connections": partial(
                    _get, where, partial(send, connections=number, seconds=bench.seconds)
                )
                for number in _CONNECTIONS
            }
        )
    return Report(
        subject="cluster-gets",
        title="Gets from memcached",
        method=(
            f"`GET .../counters/{{c}}` of random ones among {counters:,} counters, whose counts a"
            " rollup worker put into memcached, by wrk on the same machine; nothing else runs. The"
            " server is `counter serve --store cassandra --cache memcached://...`: requests of one"
            " turn of the event loop, and those that come while a call is out, share the next call"
            " of memcached. By memcached's own statistics no get may miss."
        ),
        figures=tuple(
            each
            for where, loads in samples.items()
            for each in (
                rate(f"gets a second, {where}", loads),
                figure(
                    f"p99 of the p50, {where}",
                    [x.p99_ms / x.p50_ms for x in loads],
                    at_most=_SLOW_OF_MEDIAN,
                    note=rates(loads),
                ),
            )
        ),
        conditions=conditions(),
    )


def _fill_cache(where: Site, server: Server, place: Place, names: list[str]) -> None:
    """Add once to each of *names*, and have a worker roll it up, which fills the cache."""
    worker = where.worker()
    try:
        Feeder(server, place).feed(names)
        where.wait_for_rollup(place, SystemClock().now_us(), _ROLLUP_TIMEOUT_S)
        worker.stop()
    finally:
        worker.kill()
    check_counts(server.counts(place.base, names, None), dict.fromkeys(names, 1))


def _get(where: Site, send: partial[Load]) -> Load:
    before = where.memcached_stats()
    measured = send()
    after = where.memcached_stats()
    misses = after["get_misses"] - before["get_misses"]
    check(misses == 0, f"{misses} gets missed the cache")
    check(after["get_hits"] > before["get_hits"], "memcached was not asked for counts")
    return measured
