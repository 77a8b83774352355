"""Memory of the served process with a million counters and ten million events on disk."""

from __future__ import annotations

import time
from typing import Final

from benchmarks.harness import Bench, Server, check, counter_names, counter_serve, load
from benchmarks.prepared import BASE, many_events, name_of, prepare
from benchmarks.results import Figure, Report
from counter.clock import SystemClock, to_rfc3339

TARGET_MB: Final = 150
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
            batches = load(
                server, "batches.lua", BASE, counters, 1_000,
                connections=4, seconds=bench.seconds, weight=1_000,
            )  # fmt: skip
            adds = load(server, "adds.lua", BASE, counters, connections=64, seconds=bench.seconds)
            gets = load(
                server, "gets.lua", BASE, shape.counters, 0, connections=64, seconds=bench.seconds
            )
        counted = sum(server.counts(BASE, names, "0s").values()) - loaded
        tally = server.settled_tally()["original"]
        acknowledged = batches.requests * 1_000 + adds.requests
        check(counted == tally, f"{counted} counted, {tally} taken for new")
        check(
            acknowledged <= counted <= batches.sent * 1_000 + adds.sent,
            f"{counted} counted, {acknowledged} acknowledged",
        )
        wait_for_rollup(bench, server, SystemClock().now_us())
        rolled = sum(server.counts(BASE, names, None).values()) - loaded
        check(rolled == counted, f"{rolled} rolled up, {counted} counted")
        end = server.memory_kib()
    bench.say(f"resident: {mb(begin['VmRSS']):.0f} MB at first, {mb(end['VmRSS']):.0f} MB after")
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
                mb(end["VmRSS"]),
                "MB",
                at_most=TARGET_MB,
                note=(
                    f"anonymous {mb(end['RssAnon']):.0f} MB, of files"
                    f" {mb(end['RssFile']):.0f} MB; just started {mb(begin['VmRSS']):.0f} MB"
                ),
            ),
            Figure("the most that was ever resident", mb(end["VmHWM"]), "MB"),
        ),
    )


def mb(kib: int) -> float:
    """Megabytes, of 10^6 bytes."""
    return kib * 1_024 / 1e6


def wait_for_rollup(bench: Bench, server: Server, through_us: int) -> None:
    """Until the watermark has passed an instant. Raises BenchError where that takes too long."""
    wanted = to_rfc3339(through_us)
    path = f"{BASE}/batch/get"
    end_s = time.monotonic() + _ROLLUP_TIMEOUT_S
    with bench.console.status("waiting for the rollup"):
        # A counter never written is answered with the watermark.
        while True:
            probe = f"probe-{time.monotonic_ns()}"
            if server.post(path, {"counters": [probe]})["results"][0]["as_of"] > wanted:
                return
            check(time.monotonic() < end_s, "the rollup does not catch up")
            time.sleep(0.2)
