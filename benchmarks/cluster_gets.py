"""Gets of counts that are in memcached: how many share a look-up, how long the slow ones take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.cluster import Place, Site, conditions, site
from benchmarks.cluster_feeding import Feeder
from benchmarks.cluster_loads import DATASET
from benchmarks.harness import Bench, Load, Server, check, counter_names, load
from benchmarks.results import Figure, Report, median
from counter.clock import SystemClock

_COUNTERS: Final = 10_000
_CONNECTIONS: Final = (64, 256)
_SLOW_OF_MEDIAN: Final = 3.0
_ROLLUP_TIMEOUT_S: Final = 120.0
_METRIC: Final = "bench_get_many_"


@dataclass(frozen=True, slots=True)
class Asked:
    """A load, and what memcached was asked meanwhile."""

    load: Load
    calls: int
    keys: int

    @property
    def keys_per_call(self) -> float:
        return self.keys / self.calls

    @property
    def slow_of_median(self) -> float:
        return self.load.p99_ms / self.load.p50_ms

    def __str__(self) -> str:
        return f"{self.load}; {self.keys:,} counts in {self.calls:,} calls"


def run(bench: Bench) -> Report:
    """Fill the cache by a rollup, then load the service with gets."""
    counters = 500 if bench.quick else _COUNTERS
    with site(bench, *DATASET) as where, where.variant("counting") as server:
        place = where.create(server, cache_ttl="1d", rollup_window="1s", accept_limit="1s")
        fill_cache(bench, where, server, place, counter_names(counters))
        load(server, "gets.lua", place.base, counters, 0, connections=64, seconds=2.0)
        samples = bench.alternate(
            {
                f"{connections} connections": partial(
                    _get, bench, where, server, place, counters, connections
                )
                for connections in _CONNECTIONS
            }
        )
    return Report(
        subject="cluster-gets",
        title="Gets from memcached",
        method=(
            f"`GET .../counters/{{c}}` of random ones among {counters:,} counters, whose counts a"
            " rollup worker put into memcached, by wrk on the same machine; nothing else runs. The"
            " server is `counter serve --store cassandra --cache memcached://...` with a tally of"
            " its calls to memcached's multi-key get: requests of one turn of the event loop, and"
            " those that come while a call is out, share the next call. memcached's own `get_hits`"
            " and `get_misses` must agree with the tally, and no get may miss."
        ),
        figures=tuple(_figures(samples.values())),
        conditions=conditions(),
    )


def _figures(samples: Iterable[list[Asked]]) -> Iterator[Figure]:
    for connections, asked in zip(_CONNECTIONS, samples, strict=True):
        loads = [each.load for each in asked]
        rates = (
            f"{median([x.per_s for x in loads]):,.0f}/s,"
            f" {median([x.per_cpu_s for x in loads]):,.0f} a CPU second"
        )
        sharing = [each.keys_per_call for each in asked]
        yield Figure(
            f"requests that share one get_many, {connections} connections",
            median(sharing),
            rounds=tuple(sharing),
            note=rates,
        )
        slow = [each.slow_of_median for each in asked]
        yield Figure(
            f"p99 of the p50, {connections} connections",
            median(slow),
            at_most=_SLOW_OF_MEDIAN,
            rounds=tuple(slow),
            note=(
                f"p99 {median([x.p99_ms for x in loads]):.1f} ms, p50"
                f" {median([x.p50_ms for x in loads]):.1f} ms"
            ),
        )


def fill_cache(
    bench: Bench, where: Site, server: Server, place: Place, names: Sequence[str]
) -> None:
    """Add once to each of *names*, and have a worker roll it up, which fills the cache."""
    worker = where.worker()
    try:
        Feeder(server, place).feed(names)
        with bench.console.status("waiting for the rollup"):
            where.wait_for_rollup(place, SystemClock().now_us(), _ROLLUP_TIMEOUT_S)
        worker.stop()
    finally:
        worker.kill()
    counts = server.counts(place.base, names, None)
    wrong = [name for name in names if counts[name] != 1]
    check(not wrong, f"{len(wrong)} of {len(names)} counts are wrong: {wrong[:9]}")


def _get(
    bench: Bench, where: Site, server: Server, place: Place, counters: int, connections: int
) -> Asked:
    before, stats = _tally(server), where.memcached_stats()
    measured = load(
        server, "gets.lua", place.base, counters, 0, connections=connections, seconds=bench.seconds
    )
    after, stats_after = _tally(server), where.memcached_stats()
    calls, keys = after["calls"] - before["calls"], after["keys"] - before["keys"]
    hits = stats_after["get_hits"] - stats["get_hits"]
    misses = stats_after["get_misses"] - stats["get_misses"]
    check(misses == 0, f"{misses} gets missed the cache")
    # A counter that is asked for twice at once is one key.
    check(
        hits <= keys <= measured.sent, f"{keys} counts asked for, {hits} hits, {measured.sent} sent"
    )
    check(keys >= measured.requests, f"{keys} counts asked for by {measured.requests} requests")
    return Asked(measured, calls, keys)


def _tally(server: Server) -> Mapping[str, int]:
    """The variant's own metrics."""
    lines = [x.split() for x in server.client.get("/metrics").text.splitlines()]
    return {
        each[0].removeprefix(_METRIC).removesuffix("_total"): int(float(each[1]))
        for each in lines
        if each and each[0].startswith(_METRIC) and each[0].endswith("_total")
    }
