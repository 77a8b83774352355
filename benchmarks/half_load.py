"""How long adds take at half of the load that the service can bear."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.cluster import Place, Site, conditions, site
from benchmarks.cluster_loads import DATASET, SKEWED, WARM_UP_S
from benchmarks.harness import (
    Bench,
    Load,
    Server,
    check,
    check_adds,
    counter_serve,
    load,
)
from benchmarks.pacing import at_pace
from benchmarks.results import Figure, Report, median
from benchmarks.single_adds import BASE, COUNTERS, WARM_S

CONNECTIONS: Final = 64
_HALF_S: Final = 20.0
_EMBEDDED_MS: Final = 10.0
_CLUSTER_MS: Final = 20.0
_SAMPLED: Final = 200
_METHOD: Final = (
    " The peak is what {connections} connections of wrk, each sending its next add when the last"
    " one is answered, get through; then the same connections send half as many a second, each add"
    " at its turn, for {seconds:.0f} s, and the rate must be kept within 10 %. wrk adds to its"
    " latencies what it could not send in time. Adds go to {counters:,} counters, a few hot, most"
    " rare; the rollup runs meanwhile in windows of 10 s, the default."
)


@dataclass(frozen=True, slots=True)
class Halved:
    """The load at its peak, and half of it."""

    peak: Load
    half: Load

    def __str__(self) -> str:
        return f"at its peak {self.peak}; at half of it {self.half}"


def run(bench: Bench) -> Report:
    """Embedded: a server of its own for each round."""
    (rounds,) = bench.alternate({"embedded": partial(_embedded, bench)}).values()
    return Report(
        subject="half-load",
        title="Adds at half of the peak load",
        method=f"Durable single adds over HTTP to `counter serve`, embedded.{method()}",
        figures=(figure("embedded", rounds, _EMBEDDED_MS),),
    )


def over_cassandra(bench: Bench) -> Report:
    """Over one Cassandra node and memcached; a worker process rolls up."""
    with site(bench, *DATASET) as where, where.api() as server:
        place = where.create(server, shards=16)
        worker = where.worker()
        try:
            loads = [_adds(server, place.base, 1.0 if bench.quick else WARM_UP_S)]
            variants = {"one node": lambda: halved(bench, server, place.base, loads)}
            (rounds,) = bench.alternate(variants).values()
            check_events(where, server, place, loads)
            rolled_up = worker.counters()
            check(bench.quick or rolled_up > 0, "the worker rolled nothing up meanwhile")
            worker.stop()
        finally:
            worker.kill()
    return Report(
        subject="cluster-half-load",
        title="Adds at half of the peak load over Cassandra",
        method=(
            "Single adds over HTTP to `counter serve --store cassandra` over one Cassandra node and"
            f" memcached, with one `counter rollup`, all on the same machine.{method()} Afterwards"
            " every row is read back: each acknowledged add is one event, each unanswered one at"
            " most one, and the API counts what the rows say."
        ),
        figures=(figure("one Cassandra node", rounds, _CLUSTER_MS),),
        conditions=conditions(),
    )


def method() -> str:
    """How the peak is found, and half of it kept."""
    return _METHOD.format(connections=CONNECTIONS, seconds=_HALF_S, counters=COUNTERS)


def figure(where: str, rounds: list[Halved], target_ms: float) -> Figure:
    """The p99 at half of the peak."""
    p99 = [each.half.p99_ms for each in rounds]
    return Figure(
        f"p99 of adds at half of the peak load, {where}",
        median(p99),
        "ms",
        at_most=target_ms,
        rounds=tuple(p99),
        note=(
            f"at {median([x.half.per_s for x in rounds]):,.0f}/s, p50"
            f" {median([x.half.p50_ms for x in rounds]):.1f} ms; the peak is"
            f" {median([x.peak.per_s for x in rounds]):,.0f}/s with a p99 of"
            f" {median([x.peak.p99_ms for x in rounds]):.1f} ms"
        ),
    )


def _embedded(bench: Bench) -> Halved:
    data = bench.fresh_folder("data")
    loads: list[Load] = []
    with counter_serve(bench, data) as server:
        if not bench.quick:
            loads.append(_adds(server, BASE, WARM_S))
        found = halved(bench, server, BASE, loads)
        check_adds(bench, server, BASE, data, COUNTERS, loads)
    return found


def halved(bench: Bench, server: Server, base: str, loads: list[Load]) -> Halved:
    """Find the peak and load with half of it; all that was added is noted in *loads*."""
    peak = _adds(server, base, bench.seconds)
    loads.append(peak)
    rate = peak.per_s / 2
    seconds = 1.0 if bench.quick else max(_HALF_S, bench.seconds)

    def paced() -> Load:
        loads.append(_adds(server, base, seconds, rate))
        return loads[-1]

    return Halved(peak, at_pace(bench, "adds at half of the peak", rate, paced))


def _adds(server: Server, base: str, seconds: float, rate: float | None = None) -> Load:
    paced = () if rate is None else (rate,)
    return load(
        server, "adds.lua", base, COUNTERS, *paced, connections=CONNECTIONS, seconds=seconds
    )


def check_events(where: Site, server: Server, place: Place, loads: list[Load]) -> None:
    """Every acknowledged add is one event, one without an answer at most one; the API counts as
    many of a sample of counters as their events say."""
    server.settled_tally()
    counted: Counter[str] = Counter()
    for namespace, counter, delta in where.events():
        if namespace == place.id:
            counted[counter] += delta
    acknowledged, sent = sum(x.requests for x in loads), sum(x.sent for x in loads)
    check(
        acknowledged <= counted.total() <= sent,
        f"{counted.total()} counted, {acknowledged} acknowledged, {sent} sent",
    )
    names = SKEWED.names(0)
    some = sorted({*names[:10], *random.sample(names, _SAMPLED)})
    read = server.counts(place.base, some, "0s")
    wrong = [name for name in some if read[name] != counted[name]]
    check(not wrong, f"{len(wrong)} of {len(some)} counts are wrong: {wrong[:9]}")
