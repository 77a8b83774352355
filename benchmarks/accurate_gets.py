"""Accurate gets of a counter that is added to all the time, beside eventual ones."""

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
_ACCURATE: Final = "?max_staleness=0s"


def run(bench: Bench) -> Report:
    """Measure both kinds of get in turn, under the same adds."""
    data = bench.fresh_folder("data")
    adds: list[Load] = []
    with counter_serve(bench, data, *WINDOWS) as server:
        server.create(BASE, counter_type="EVENTUAL")
        if not bench.quick:
            _add(server, adds, WARM_S)
        eventual, accurate = bench.alternate(
            {
                "eventual gets": lambda: _get(bench, server, adds, "", "eventual"),
                "accurate gets": lambda: _get(bench, server, adds, _ACCURATE, "accurate"),
            }
        ).values()
        check_adds(bench, server, BASE, data, 1, adds)
    return Report(
        subject="accurate-gets",
        title="Accurate gets of a hot counter",
        method=(
            f"`GET .../counters/{{c}}` of one counter, {_GETS_PER_S:,} times a second, while the"
            f" same counter is added to {_ADDS_PER_S:,} times a second in batches of {_BATCH} under"
            " fresh tokens, by two processes of wrk on the same machine, both paced; the rollup"
            " runs meanwhile in windows of 2 s. *Accurate* is `max_staleness=0s`: the count has"
            " every add in it that was acknowledged before the get began. *Eventual* is what an"
            " EVENTUAL namespace answers to a get without it, from the cache. After each load the"
            " accurate count is compared with what had been acknowledged."
        ),
        figures=(
            figure(
                "p99 of an accurate get, of an eventual one's",
                ratios(p99_ms(accurate), p99_ms(eventual)),
                at_most=_TARGET,
                note=f"accurate {rates(accurate)}; eventual {rates(eventual)}",
            ),
        ),
    )


def _add(server: Server, adds: list[Load], seconds: float) -> Load:
    """Add to the counter, and note it among *adds*."""
    added = load(
        server,
        *("batches.lua", BASE, 1, _BATCH, _ADDS_PER_S // _BATCH),
        connections=_ADD_CONNECTIONS,
        seconds=seconds,
        weight=_BATCH,
    )
    adds.append(added)
    return added


def _get(bench: Bench, server: Server, adds: list[Load], query: str, accuracy: str) -> Load:
    """Gets while the counter is added to; then every acknowledged add must be in its count."""
    got: list[Load] = []

    def get_beside_adds() -> Load:
        with ThreadPoolExecutor(1) as beside:
            # Longer than the gets, which begin a little later.
            seconds = bench.seconds + (0 if bench.quick else 1)
            feeding = beside.submit(_add, server, adds, seconds)
            got.append(
                load(
                    server,
                    *("gets.lua", BASE, 1, 0, query, _GETS_PER_S),
                    connections=_GET_CONNECTIONS,
                    seconds=bench.seconds,
                )
            )
            return feeding.result()

    at_pace(bench, "adds", _ADDS_PER_S, get_beside_adds, off_by=_PACE)
    path = f"{BASE}/counters/c0000000"
    reported = server.get(path + query)["accuracy"]
    check(reported == accuracy, f"a get is {reported}, not {accuracy}")
    count = server.get(path + _ACCURATE)["count"]
    check_counted(count, adds, "an accurate get: ")
    return got[-1]
