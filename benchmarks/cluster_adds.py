"""Single adds over HTTP over one Cassandra node, and over three."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from benchmarks.cluster import DATASET, Place, Site, conditions, site
from benchmarks.harness import Bench, Server, new_token, wait_until
from benchmarks.loads import Load, check_counted, check_counts, load, single_adds
from benchmarks.results import Figure, Report, rate

#: A few of them are hot, most are rare.
_MANY: Final = 10_000
_KINDS: Final = {"new counters": 0, "many counters": _MANY, "one counter": 1}
_WARM_S: Final = 2.0
_WARM_UP_S: Final = 10.0
_FIRST_ADD_S: Final = 60.0
_SHARDS: Final = 16
_SAMPLED: Final = 200
_METHOD: Final = (
    "`POST .../add` with a fresh token each to `counter serve --store cassandra` over {nodes} and"
    " memcached, by wrk on the same machine; no rollup worker runs. Each load has an EVENTUAL"
    " namespace of its own, so marks and names are new too. *New counters*: each add is the first"
    f" to its counter. *Many counters*: {_MANY:,}, a few hot, most rare. *One counter*: all adds go"
    " to it. Afterwards every row is read back: each acknowledged add is one event, each"
    " unanswered one at most one, and the API counts what the rows say."
)


@dataclass(slots=True)
class _Adds:
    """The loads of one server, each in a namespace of its own."""

    bench: Bench
    site: Site
    server: Server
    made: list[tuple[Place, Sequence[Load]]] = field(default_factory=list)

    def warm_up(self) -> None:
        """Have the nodes compile what the loads need: their first seconds are the slowest, and
        some adds may fail."""
        base = self.site.create(self.server, shards=_SHARDS).base
        with self.bench.console.status("warming up"):
            wait_until("no add succeeds", partial(self._adds_one, base), _FIRST_ADD_S)
            if not self.bench.quick:
                single_adds(self.server, base)(seconds=_WARM_UP_S, may_fail=True)

    def _adds_one(self, base: str) -> bool:
        body = {"delta": 1, "idempotency_token": new_token()}
        return self.server.client.post(f"{base}/counters/first/add", json=body).is_success

    def load(self, counters: int, connections: int) -> Load:
        """Adds to so many counters, or to a new one each for 0."""
        place = self.site.create(self.server, shards=_SHARDS)
        send = partial(load, self.server, connections=connections)
        script = "adds.lua" if counters else "fresh.lua"
        loads = []
        if not self.bench.quick:
            # Names of its own for the warming, or the measured ones would not be new.
            loads.append(send(script, place.base, counters or "w", seconds=_WARM_S))
        loads.append(send(script, place.base, counters or "f", seconds=self.bench.seconds))
        self.made.append((place, loads))
        return loads[-1]

    def check(self) -> None:
        """Each add is one event; the API returns the sums of a sample."""
        self.server.settled_tally()
        counted = {place.id: Counter[str]() for place, _ in self.made}
        with self.bench.console.status("reading all rows back"):
            for namespace, counter, delta in self.site.events():
                counted.setdefault(namespace, Counter())[counter] += delta
        for place, loads in self.made:
            found = counted[place.id]
            check_counted(found.total(), loads, f"{place.name}: ")
            names = sorted(found)
            some = sorted({*names[:10], *random.sample(names, min(_SAMPLED, len(names)))})
            check_counts(self.server.counts(place.base, some, "0s"), found)


def run(bench: Bench) -> Report:
    """Measure over one node, at each number of connections."""
    return Report(
        subject="cluster-adds",
        title="Single adds over Cassandra",
        method=_METHOD.format(nodes="one Cassandra node"),
        figures=_measured(bench, 1, (8,) if bench.quick else (64, 256), list(_KINDS)),
        conditions=conditions(),
    )


def at_quorum(bench: Bench) -> Report:
    """Measure over three nodes; over two in a quick run, which start sooner."""
    kinds = ["many counters", "one counter"]
    return Report(
        subject="cluster-quorum",
        title="Single adds over three Cassandra nodes",
        method=_METHOD.format(nodes="three Cassandra nodes that all keep all data, at QUORUM,"),
        figures=_measured(bench, 2 if bench.quick else 3, (8 if bench.quick else 64,), kinds),
        conditions=conditions(3),
    )


def _measured(
    bench: Bench, nodes: int, connections: Sequence[int], kinds: Sequence[str]
) -> tuple[Figure, ...]:
    with site(bench, *DATASET, nodes=nodes) as where, where.api() as server:
        adds = _Adds(bench, where, server)
        adds.warm_up()
        loads = bench.alternate(
            {
                f"{kind}, {number} connections": partial(adds.load, _KINDS[kind], number)
                for number in connections
                for kind in kinds
            }
        )
        adds.check()
    return tuple(rate(f"adds a second to {what}", some) for what, some in loads.items())
