"""Takeover: how stale a counter gets when the worker that rolls it up is killed."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

from benchmarks.cluster import Place, Site, Worker, conditions, site
from benchmarks.cluster_feeding import Background, Feeder
from benchmarks.cluster_loads import DATASET
from benchmarks.harness import Bench, Server, check, counter_names
from benchmarks.results import Figure, Report, median
from counter.clock import SystemClock, parse_rfc3339
from counter.limits import MILLISECOND, SECOND

_WORKERS: Final = 2
_COUNTERS: Final = 400
_ADDS_EVERY_S: Final = 0.5
_SAMPLE_EVERY_S: Final = 0.1
_WINDOW_US: Final = 2 * SECOND
_ACCEPT_US: Final = SECOND
_WRITE_TIMEOUT_US: Final = SECOND
_SKEW_US: Final = 250 * MILLISECOND
_LAG_US: Final = _ACCEPT_US + _WRITE_TIMEOUT_US + 2 * _SKEW_US
_LEASE_US: Final = 6 * SECOND
_SLACK_US: Final = 2 * SECOND
_BOUND_US: Final = _WINDOW_US + _LAG_US + _LEASE_US + _SLACK_US
_SCHEMA: Final = (*DATASET, "--write-timeout=1s", "--clock-skew-max=250ms")
_KILLS_A_ROUND: Final = 3
_TIMEOUT_S: Final = 120.0


class Sampler:
    """Reads all counters again and again, and keeps the worst staleness that it saw."""

    def __init__(self, server: Server, place: Place, names: Sequence[str]) -> None:
        self._server = server
        self._path = f"{place.base}/batch/get"
        self._names = list(names)
        self._clock = SystemClock()
        self.worst_us = 0
        self.samples = 0

    def sample(self) -> None:
        """Look once. The clock is read after the answer: what took long to come is older."""
        found = self._server.post(self._path, {"counters": self._names})["results"]
        oldest = min(each["as_of"] for each in found)
        self.worst_us = max(self.worst_us, self._clock.now_us() - parse_rfc3339(oldest))
        self.samples += 1

    def worst_for(self, seconds: float) -> float:
        """The worst staleness, in seconds, of so many seconds from now on."""
        self.worst_us = 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            self.sample()
            time.sleep(max(0.0, _SAMPLE_EVERY_S - (time.monotonic() - began_s)))
        return self.worst_us / SECOND


def run(bench: Bench) -> Report:
    """Kill workers under load, one after the other, and watch all counters meanwhile."""
    names = counter_names(_COUNTERS)
    kills = 1 if bench.quick else _KILLS_A_ROUND * bench.rounds
    with site(bench, *_SCHEMA) as where, where.api() as server:
        place = where.create(server, rollup_window="2s", accept_limit="1s", cache_ttl="1s")
        workers = [_start(where) for _ in range(_WORKERS)]
        try:
            where.wait_for_shares(_WORKERS)
            feeder = Feeder(server, place)
            adds = 0

            def add() -> None:
                nonlocal adds
                feeder.feed(names)
                adds += 1

            load = Background(add, _ADDS_EVERY_S)
            sampler = Sampler(server, place, names)
            sampler.worst_for(1.0 if bench.quick else (_WINDOW_US + _LAG_US + _SLACK_US) / SECOND)
            calm = [sampler.worst_for(1.0 if bench.quick else 10.0)]
            bench.say(f"both workers run: {calm[0]:.2f} s at the worst")
            after: list[float] = []
            for number in range(1, kills + 1):
                after.append(_kill_one(bench, where, workers, sampler))
                load.check()
                bench.say(f"kill {number} of {kills}: {after[-1]:.2f} s at the worst")
            load.stop()
            where.wait_for_rollup(place, SystemClock().now_us(), _TIMEOUT_S)
            counts = server.counts(place.base, names, None)
            wrong = [name for name in names if counts[name] != adds]
            check(not wrong, f"of {adds} adds each, {len(wrong)} counts are wrong: {wrong[:9]}")
            for each in workers:
                each.stop()
        finally:
            for each in workers:
                each.kill()
    return _report(calm, after, sampler.samples)


def _start(where: Site) -> Worker:
    return where.worker(f"--lease-time={_LEASE_US // SECOND}s")


def _kill_one(bench: Bench, where: Site, workers: list[Worker], sampler: Sampler) -> float:
    """Kill one worker at some instant of its lease; how stale a counter gets until the others have
    its shards. Afterwards another one is in its place."""
    time.sleep(random.uniform(0, 1.0 if bench.quick else _LEASE_US / SECOND))
    at = random.randrange(len(workers))
    workers[at].kill()
    worst_s = sampler.worst_for(1.0 if bench.quick else (_BOUND_US + SECOND) / SECOND)
    workers[at] = _start(where)
    where.wait_for_shares(_WORKERS)
    return worst_s


def _report(calm: Sequence[float], after: Sequence[float], samples: int) -> Report:
    bound = (
        f"window {_WINDOW_US / SECOND:g} s, lag {_LAG_US / SECOND:g} s (accept limit, write"
        f" time-out, twice the skew), lease {_LEASE_US / SECOND:g} s, and 2 s"
    )
    return Report(
        subject="cluster-takeover",
        title="Takeover",
        method=(
            f"{_WORKERS} `counter rollup` processes over one Cassandra node share the 16 shards of"
            f" an EVENTUAL namespace; {_COUNTERS} counters are added to"
            f" {round(_COUNTERS / _ADDS_EVERY_S):,} times a second altogether. One worker at a time"
            " is ended by SIGKILL at a random instant, and replaced later. The staleness is now"
            " less the oldest `as_of` of all counters, as the API answers it by default, about ten"
            f" times a second ({samples:,} samples); `cache_ttl` is 1 s, so it holds what a cached"
            " count adds. Afterwards every count is what was acknowledged."
        ),
        figures=(
            Figure(
                f"the worst staleness after a kill, of {len(after)}",
                max(after),
                "s",
                at_most=_BOUND_US / SECOND,
                rounds=tuple(after),
                note=f"median of the kills {median(after):.2f} s; {bound}",
            ),
            Figure("the worst staleness while all workers run", max(calm), "s"),
        ),
        conditions=conditions(),
    )
