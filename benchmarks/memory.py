"""Memory of the served process with a million counters and ten million events on disk."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from benchmarks.harness import Bench, check, counter_names, counter_serve, wait_until
from benchmarks.loads import check_counted, load
from benchmarks.prepared import BASE, many_events, name_of, prepare
from benchmarks.results import Figure, Report
from counter.clock import SystemClock, to_rfc3339

_TARGET_MB: Final = 150
_ROLLUP_TIMEOUT_S: Final = 120.0
#: Counters that are added to: a few hot, most rare.
_COUNTERS: Final = 200_000


def run(bench: Bench) -> Report:
    """Serve batches, adds, random gets and a rollup, then look."""
    shape = many_events(bench.quick)
    counters = min(_COUNTERS, shape.counters)
    names = counter_names(counters)
    loaded = sum(shape.count(position) for position in range(counters))
    with counter_serve(bench, prepare(bench, shape)) as server:
        begin = server.memory_kib()
        server.get(f"{BASE}/counters/{name_of(0)}")
        with bench.console.status("batches, adds, random gets"):
            send = partial(load, server, seconds=bench.seconds)
            batches = send("batches.lua", BASE, counters, 1_000, connections=4, weight=1_000)
            adds = send("adds.lua", BASE, counters, connections=64)
            gets = send("gets.lua", BASE, shape.counters, 0, connections=64)
        counted = sum(server.counts(BASE, names, "0s").values()) - loaded
        tally = server.settled_tally()["original"]
        check(counted == tally, f"{counted} counted, {tally} taken for new")
        check_counted(counted, (batches, adds))
        through = to_rfc3339(SystemClock().now_us())

        def rolled_up() -> bool:
            # A counter never written is answered with the watermark.
            body = {"counters": [f"probe-{time.monotonic_ns()}"]}
            return bool(server.post(f"{BASE}/batch/get", body)["results"][0]["as_of"] > through)

        wait_until("the rollup does not catch up", rolled_up, _ROLLUP_TIMEOUT_S)
        rolled = sum(server.counts(BASE, names, None).values()) - loaded
        check(rolled == counted, f"{rolled} rolled up, {counted} counted")
        end = server.memory_kib()
    bench.say(f"resident: {_mb(begin['VmRSS']):.0f} MB at first, {_mb(end['VmRSS']):.0f} MB after")
    return Report(
        subject="memory",
        title="Memory",
        method=(
            f"Resident set (`VmRSS` of `/proc/PID/status`) of `counter serve` on {shape.counters:,}"
            f" counters and {shape.events:,} events, after {batches.requests * 1_000:,} adds in"
            f" batches, {adds.requests:,} single adds, {gets.requests:,} random gets, and the"
            f" rollup of all that; 1 MB is 10^6 bytes."
        ),
        figures=(
            Figure(
                "resident",
                _mb(end["VmRSS"]),
                "MB",
                at_most=_TARGET_MB,
                note=(
                    f"anonymous {_mb(end['RssAnon']):.0f} MB, of files"
                    f" {_mb(end['RssFile']):.0f} MB; just started {_mb(begin['VmRSS']):.0f} MB"
                ),
            ),
            Figure("the most that was ever resident", _mb(end["VmHWM"]), "MB"),
        ),
    )


def _mb(kib: int) -> float:
    """Megabytes, of 10^6 bytes."""
    return kib * 1_024 / 1e6
