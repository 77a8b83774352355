"""Adds and accurate gets over Cassandra against the partitions that a counter's events lie in.

SQLite keeps events in one table a slice, in time order: there ``event_buckets`` means nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.cluster import Place, Site, conditions, site
from benchmarks.cluster_feeding import Feeder
from benchmarks.cluster_loads import DATASET, WARM_UP_S
from benchmarks.growth import Curve, curve, plot
from benchmarks.harness import Bench, Load, Server, check, counter_names, load
from benchmarks.results import Figure, Report

_BUCKETS: Final = (1, 4, 16, 64)
_FLAT_TARGET: Final = 0.8
_CONNECTIONS: Final = 64
_READERS: Final = 4
_MANY: Final = 10_000
#: Events of a counter of its own that no rollup has taken: what an accurate get has to sum.
_TAIL: Final = 1_000
_SAMPLED: Final = 20
_SECONDS_MAX: Final = 2.0


@dataclass(slots=True)
class Bucketed:
    """A namespace in a dataset of so many event buckets, and what it was loaded with."""

    server: Server
    buckets: int
    place: Place
    acknowledged: int = 0
    sent: int = 0

    @property
    def dataset(self) -> str:
        return _dataset(self.buckets)

    def adds(self, counters: int, seconds: float) -> Load:
        """Adds to so many counters, a few hot and most rare."""
        done = load(
            self.server, "adds.lua", self.place.base, counters,
            connections=_CONNECTIONS, seconds=seconds,
        )  # fmt: skip
        self.acknowledged += done.requests
        self.sent += done.sent
        return done

    def gets(self, seconds: float) -> Load:
        """Accurate gets of the counter with a tail."""
        path = f"{self.place.base}/counters/{counter_names(1)[0]}?max_staleness=0s"
        check(self.server.get(path)["count"] == _TAIL, f"not {_TAIL} events in the tail")
        return load(
            self.server, "gets.lua", self.place.base, 1, 0, "?max_staleness=0s",
            connections=_READERS, seconds=seconds,
        )  # fmt: skip

    def check(self, where: Site) -> None:
        """Each acknowledged add is one event, one without an answer at most one; of some counters
        the API counts what the events say."""
        found: Counter[str] = Counter()
        for namespace, counter, delta in where.events(self.dataset):
            if namespace == self.place.id:
                found[counter] += delta
        total = found.total()
        check(
            self.acknowledged <= total <= self.sent,
            f"{total} counted in {self.dataset}, {self.acknowledged} acknowledged,"
            f" {self.sent} sent",
        )
        some = random.sample(sorted(found), min(_SAMPLED, len(found)))
        names = sorted({counter_names(1)[0], *some})
        counts = self.server.counts(self.place.base, names, "0s")
        wrong = [name for name in names if counts[name] != found[name]]
        check(not wrong, f"{self.dataset}: {len(wrong)} counts are wrong: {wrong[:9]}")


def run(bench: Bench) -> Report:
    """The same loads on datasets of more and more event buckets, in turn."""
    buckets = _BUCKETS[:2] if bench.quick else _BUCKETS
    config = bench.fresh_folder("datasets.toml")
    config.write_text(
        "".join(f"[datasets.{_dataset(each)}]\nevent_buckets = {each}\n" for each in buckets[1:]),
        encoding="utf-8",
    )
    seconds = min(_SECONDS_MAX, bench.seconds)
    with site(bench, *DATASET, f"--config={config}") as where, where.api() as server:
        adding, reading = ([_made(where, server, each) for each in buckets] for _ in "12")
        _prepare(bench, adding, reading)
        points = {
            **{
                f"{each.buckets} buckets, {kind}": partial(_adds, each, counters, seconds)
                for kind, counters in (("one counter", 1), ("many counters", _MANY))
                for each in adding
            },
            **{
                f"{each.buckets} buckets, accurate gets": partial(each.gets, 1.0)
                for each in reading
            },
        }
        samples = iter(bench.alternate(points).values())
        one, many, gets = ({each: next(samples) for each in buckets} for _ in "123")
        server.settled_tally()
        with bench.console.status("reading all rows back"):
            for each in (*adding, *reading):
                each.check(where)
    return _report(one, many, gets)


def _dataset(buckets: int) -> str:
    return "default" if buckets == 1 else f"b{buckets}"


def _made(where: Site, server: Server, buckets: int) -> Bucketed:
    return Bucketed(server, buckets, where.create(server, dataset=_dataset(buckets)))


def _prepare(bench: Bench, adding: Sequence[Bucketed], reading: Sequence[Bucketed]) -> None:
    """Have the node compile what the loads need, and give the counters that are read a tail."""
    with bench.console.status("warming up"):
        for each in reading:
            Feeder(each.server, each.place).feed(counter_names(1) * _TAIL)
            each.acknowledged = each.sent = _TAIL
        for each in adding:
            each.adds(_MANY, 1.0 if bench.quick else WARM_UP_S / len(adding))


def _adds(bucketed: Bucketed, counters: int, seconds: float) -> Load:
    return bucketed.adds(counters, seconds)


_Loads = dict[int, list[Load]]


def _report(one: _Loads, many: _Loads, gets: _Loads) -> Report:
    most = max(one)
    hot = curve("one counter", one, lambda each: each.per_s)
    spread = curve("many counters", many, lambda each: each.per_s)
    read = curve("accurate get", gets, lambda each: each.p50_ms)
    return Report(
        subject="cluster-growth-buckets",
        title="Growth: adds and gets against event buckets",
        method=(
            f"`POST .../add` with a fresh token each over {_CONNECTIONS} connections, and accurate"
            f" gets of a counter with {_TAIL:,} events that no rollup has taken, over {_READERS},"
            " by wrk on the same machine; `counter serve --store cassandra` over one Cassandra node"
            " and memcached, a dataset for each number of event buckets, no rollup worker. An event"
            f" goes to a bucket by a hash. *Many counters*: {_MANY:,}, a few hot, most rare. Flat"
            " is promised where adds go to many counters: most rows have a partition of their own"
            " in any case. One counter's adds share a batch for each partition, so more buckets"
            " make smaller batches, and a get that sums what is not rolled up asks every bucket:"
            " that is what buckets cost, and why there is one unless a counter has more than 65,000"
            " events a time bucket. Afterwards all rows are read back. Bands are the rounds' range."
        ),
        figures=tuple(_figures(most, hot, spread, read)),
        conditions=conditions(),
        plots=(
            plot("growth-buckets-rate", "Adds against event buckets, over Cassandra",
                 "event buckets", "adds a second", hot, spread),
            plot("growth-buckets-get", "Accurate get of 1,000 live events, over Cassandra",
                 "event buckets", "ms", curve("p50", gets, lambda each: each.p50_ms),
                 curve("p99", gets, lambda each: each.p99_ms)),
        ),
    )  # fmt: skip


def _figures(most: int, hot: Curve, spread: Curve, read: Curve) -> Iterator[Figure]:
    yield spread.figure(
        f"adds a second to many counters in {most} event buckets, of 1", at_least=_FLAT_TARGET
    )
    yield hot.figure(f"adds a second to one counter in {most} event buckets, of 1")
    yield read.figure(f"p50 of an accurate get in {most} event buckets, of 1", unit="ms")
