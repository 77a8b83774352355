"""Accurate gets while adds go on: of one hot counter, beside eventual ones, and of a million."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.harness import Bench, Server, check, counter_serve
from benchmarks.loads import WARM_S, WINDOWS, Load, at_pace, check_adds, check_counted, load
from benchmarks.results import Report, figure, p99_ms, rates, ratios

BASE: Final = "/v1/namespaces/hot"
_ADDS_PER_S: Final = 5_000
#: So small that none holds the others up for long, so large that the load is no strain.
_BATCH: Final = 20
_ADD_CONNECTIONS: Final = 16
_GETS_PER_S: Final = 1_000
_GET_CONNECTIONS: Final = 16
#: How far from what it should be the rate of a paced load may be.
_PACE: Final = 0.05
_TARGET: Final = 5.0
_MANY: Final = 1_000_000
_MANY_ADDS_PER_S: Final = 12_000
#: Until windows close and are rolled up as fast as new ones come.
_MANY_WARM_S: Final = 60.0
_MANY_TARGETS_MS: Final = (3.0, 10.0)
_ACCURATE: Final = "?max_staleness=0s"


def run(bench: Bench) -> Report:
    """Measure both kinds of get of one counter in turn, under the same adds; then accurate ones of
    many."""
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        hot = _Fed(bench, server, 1, _ADDS_PER_S)
        if not bench.quick:
            hot.add(WARM_S)
        eventual, accurate = bench.alternate(
            {
                "eventual gets": lambda: hot.get("", "eventual"),
                "accurate gets": lambda: hot.get(_ACCURATE, "accurate"),
            }
        ).values()
        check_adds(bench, server, BASE, data, 1, hot.adds)
    many = _of_many(bench)
    return Report(
        subject="accurate-gets",
        title="Accurate gets",
        method=(
            f"`GET .../counters/{{c}}` of one counter, {_GETS_PER_S:,} times a second, while the"
            f" same counter is added to {_ADDS_PER_S:,} times a second in batches of {_BATCH} under"
            " fresh tokens, by two processes of wrk on the same machine, both paced; the rollup"
            " runs meanwhile in windows of 2 s. *Accurate* is `max_staleness=0s`: the count has"
            " every add in it that was acknowledged before the get began. *Eventual* is what an"
            " EVENTUAL namespace answers to a get without it, from the cache. After each load the"
            " accurate count is compared with what had been acknowledged. Then the same over"
            f" {_MANY:,} counters, evenly, at {_MANY_ADDS_PER_S:,} adds a second, with the default"
            f" windows, after {_MANY_WARM_S:.0f} s of adds."
        ),
        figures=(
            figure(
                "p99 of an accurate get, of an eventual one's",
                ratios(p99_ms(accurate), p99_ms(eventual)),
                at_most=_TARGET,
                note=f"accurate {rates(accurate)}; eventual {rates(eventual)}",
            ),
            figure(
                f"p50 of an accurate get; {_MANY:,} counters",
                [each.p50_ms for each in many],
                "ms",
                at_most=_MANY_TARGETS_MS[0],
                note=rates(many),
            ),
            figure(
                f"p99 of an accurate get; {_MANY:,} counters",
                p99_ms(many),
                "ms",
                at_most=_MANY_TARGETS_MS[1],
            ),
        ),
    )


def _of_many(bench: Bench) -> list[Load]:
    data, counters = bench.fresh_folder("data"), 1_000 if bench.quick else _MANY
    with counter_serve(bench, data) as server:
        many = _Fed(bench, server, counters, _MANY_ADDS_PER_S)
        if not bench.quick:
            many.add(_MANY_WARM_S)
        name = f"accurate gets of {counters:,} counters"
        gets = bench.alternate({name: lambda: many.get(_ACCURATE, "accurate")})[name]
        check_adds(bench, server, BASE, data, counters, many.adds)
    return gets


class _Fed:
    """A namespace whose counters are added to at a rate."""

    def __init__(self, bench: Bench, server: Server, counters: int, per_s: int) -> None:
        self.adds: list[Load] = []
        self._bench, self._server = bench, server
        self._counters, self._per_s = counters, per_s
        server.create(BASE, counter_type="EVENTUAL")

    def add(self, seconds: float) -> Load:
        """Add to the counters, evenly."""
        added = load(
            self._server,
            *("batches.lua", BASE, self._counters, _BATCH, self._per_s // _BATCH, "even"),
            connections=_ADD_CONNECTIONS,
            seconds=seconds,
            weight=_BATCH,
        )
        self.adds.append(added)
        return added

    def get(self, query: str, accuracy: str) -> Load:
        """Gets while the counters are added to; then, of one counter, every acknowledged add must
        be in its count."""
        got: list[Load] = []

        def get_beside_adds() -> Load:
            with ThreadPoolExecutor(1) as beside:
                # Longer than the gets, which begin a little later.
                feeding = beside.submit(self.add, self._bench.seconds + (not self._bench.quick))
                got.append(
                    load(
                        self._server,
                        *("gets.lua", BASE, self._counters, 0, query, _GETS_PER_S),
                        connections=_GET_CONNECTIONS,
                        seconds=self._bench.seconds,
                    )
                )
                return feeding.result()

        at_pace(self._bench, "adds", self._per_s, get_beside_adds, off_by=_PACE)
        path = f"{BASE}/counters/c0000000"
        reported = self._server.get(path + query)["accuracy"]
        check(reported == accuracy, f"a get is {reported}, not {accuracy}")
        if self._counters == 1:
            count = self._server.get(path + _ACCURATE)["count"]
            check_counted(count, self.adds, "an accurate get: ")
        return got[-1]
