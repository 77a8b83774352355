"""Gets of a hot counter, of one idle counter, and of random ones among a million."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Final

from benchmarks.harness import (
    Background,
    Bench,
    Server,
    check,
    counter_serve,
    new_token,
    wait_until,
)
from benchmarks.loads import Load, check_counts, load
from benchmarks.prepared import BASE, Shape, many_events, name_of, prepare
from benchmarks.results import Report, figure, per_cpu_s, rates, ratios

CONNECTIONS: Final = 64
_ADDS_PER_S: Final = 20
_SAMPLED: Final = 1_000
_TARGET: Final = 1.5


def run(bench: Bench) -> Report:
    """Measure the three kinds of get in turn, over one server."""
    shape = many_events(bench.quick)
    hot_path = f"{BASE}/counters/{name_of(0)}"
    with counter_serve(bench, prepare(bench, shape)) as server:
        before = server.get(hot_path)["count"]
        added = count()

        def heat() -> None:
            server.post(f"{hot_path}/add", {"delta": 1, "idempotency_token": new_token()})
            next(added)

        heater = Background(heat, 1 / _ADDS_PER_S)
        # Until the hot counter is rolled up once, it is as idle as any other.
        wait_until(
            "the hot counter is not rolled up",
            lambda: bool(server.get(hot_path)["count"] != before),
            60.0,
        )
        variants: dict[str, Callable[[], Load]] = {
            "hot counter": lambda: _get(bench, server, 1),
            "one idle counter": lambda: _get(bench, server, 1, only=shape.step + 1),
            "random counters": lambda: _get(bench, server, shape.counters, shape),
        }
        hot, idle, scattered = bench.alternate(variants).values()
        heater.stop()
        expected = shape.count(0) + next(added)
        check_counts(server.counts(BASE, [name_of(0)], "0s"), {name_of(0): expected})
    # By the server's CPU: on a machine with few cores it is wrk that the clock shows.
    return Report(
        subject="gets",
        title="Gets",
        method=(
            f"`GET .../counters/{{c}}` of an EVENTUAL namespace with {shape.counters:,} counters"
            f" and {shape.events:,} events, over {CONNECTIONS} connections, by wrk on the same"
            f" machine. The hot counter is added to {_ADDS_PER_S} times a second meanwhile, and"
            " rolled up. Random ones are spread evenly over all counters: most are in no cache."
            " Compared is the CPU of the server's process, all threads: user and system time."
        ),
        figures=(
            figure("gets a CPU second of a hot counter", per_cpu_s(hot), "/s", note=rates(hot)),
            *(
                figure(
                    f"CPU of a get of {what}, of the hot one's",
                    ratios(per_cpu_s(hot), per_cpu_s(loads)),
                    at_most=_TARGET,
                    note=rates(loads),
                )
                for what, loads in (
                    ("one idle counter again and again", idle),
                    ("random counters", scattered),
                )
            ),
        ),
    )


def _get(
    bench: Bench, server: Server, counters: int, shape: Shape | None = None, only: int = 0
) -> Load:
    """Load with gets; the responses' mean size must be a right answer's."""
    sample = server.client.get(f"{BASE}/counters/{name_of(only)}")
    check(sample.status_code == 200, f"a get failed: {sample.text}")
    measured = load(
        server, "gets.lua", BASE, counters, only, connections=CONNECTIONS, seconds=bench.seconds
    )
    head = "HTTP/1.1 200 OK\r\n" + "".join(f"{k}: {v}\r\n" for k, v in sample.headers.items())
    expected = len(head) + 2 + len(sample.content)
    size = measured.bytes_read / measured.requests
    check(abs(size - expected) <= 0.03 * expected, f"answers of {size} bytes, not {expected}")
    if shape is not None:
        positions = random.sample(range(1, shape.counters), min(_SAMPLED, shape.counters - 1))
        counts = server.counts(BASE, [name_of(each) for each in positions], None)
        check_counts(counts, {name_of(each): shape.count(each) for each in positions})
    return measured
