"""Gets: of a hot counter against a bare route, and of random ones among a million idle counters."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import httpx

from benchmarks.harness import (
    Bench,
    BenchError,
    Load,
    Server,
    check,
    counter_serve,
    load,
    variant,
)
from benchmarks.prepared import BASE, Shape, many_events, name_of, prepare
from benchmarks.results import Figure, Report, median, ratios
from counter.clock import to_rfc3339
from counter.tokens import TokenGenerator

CONNECTIONS: Final = 64
_ADDS_PER_S: Final = 20
_SAMPLED: Final = 1_000
_HOT_TARGET: Final = 0.85
_RANDOM_TARGET: Final = 1.5


class Heater:
    """Adds to one counter now and then, so that it stays a hot one, and counts its own adds."""

    def __init__(self, server: Server, counter: str) -> None:
        self.added = 0
        self._stop = threading.Event()
        self._failed = ""
        self._url = f"{server.url}{BASE}/counters/{counter}/add"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        tokens = TokenGenerator()
        with httpx.Client(trust_env=False, timeout=30.0) as client:
            while not self._stop.wait(1 / _ADDS_PER_S):
                nonce, time_us = tokens.next()
                token = {"token": nonce.hex(), "generation_time": to_rfc3339(time_us)}
                answer = client.post(self._url, json={"delta": 1, "idempotency_token": token})
                if answer.status_code != 200:
                    self._failed = answer.text
                    return
                self.added += 1

    def stop(self) -> int:
        """How many adds were acknowledged. Raises BenchError if one was not."""
        self._stop.set()
        self._thread.join()
        if self._failed or not self.added:
            raise BenchError(f"the hot counter could not be added to: {self._failed}")
        return self.added


def run(bench: Bench) -> Report:
    """Measure the four kinds of get in turn, over one server and one with a bare route."""
    shape = many_events(bench.quick)
    with _serving_both(bench, shape) as (server, bare):
        heater = Heater(server, name_of(0))
        # Until the hot counter was rolled up once, it is as idle as the others.
        _warm(bench, server)
        variants: dict[str, Callable[[], Load]] = {
            "bare route": lambda: _get(bench, bare, 1),
            "hot counter": lambda: _get(bench, server, 1),
            "one idle counter": lambda: _get(bench, server, 1, only=shape.step + 1),
            "random counters": lambda: _get(bench, server, shape.counters, shape),
        }
        bare_loads, hot, idle, scattered = bench.alternate(variants).values()
        added = heater.stop()
        count = server.get(f"{BASE}/counters/{name_of(0)}?max_staleness=0s")["count"]
        check(count == shape.count(0) + added, f"the hot counter holds {count}, {added} were added")
    return Report(
        subject="gets",
        title="Gets",
        method=(
            f"`GET .../counters/{{c}}` of an EVENTUAL namespace with {shape.counters:,} counters"
            f" and {shape.events:,} events, over {CONNECTIONS} connections, by wrk on the same"
            " machine."
            f" The hot counter is added to {_ADDS_PER_S} times a second meanwhile, and rolled up."
            " The bare route answers a constant of the same size through the same server and front."
            " Random ones are spread evenly over all counters: most are in no cache. Compared is"
            " the CPU of the server's process, all threads: user and system time."
        ),
        figures=tuple(_figures(bare_loads, hot, idle, scattered)),
    )


def _figures(
    bare: list[Load], hot: list[Load], idle: list[Load], scattered: list[Load]
) -> Iterator[Figure]:
    of_bare = _cpu(hot, bare)
    yield Figure(
        "gets a CPU second of a hot counter, of a bare route",
        median(of_bare),
        at_least=_HOT_TARGET,
        rounds=tuple(of_bare),
        note=f"hot {_rates(hot)}; bare {_rates(bare)}",
    )
    of_idle = _cpu(hot, idle)
    yield Figure(
        "CPU of a get of one idle counter again and again, of the hot one's",
        median(of_idle),
        at_most=_RANDOM_TARGET,
        rounds=tuple(of_idle),
        note=_rates(idle),
    )
    of_random = _cpu(hot, scattered)
    yield Figure(
        "CPU of a get of random counters, of the hot one's",
        median(of_random),
        at_most=_RANDOM_TARGET,
        rounds=tuple(of_random),
        note=_rates(scattered),
    )


def _cpu(over: list[Load], under: list[Load]) -> list[float]:
    """By the server's CPU: on a machine with few cores it is wrk that the clock shows."""
    return ratios([x.per_cpu_s for x in over], [x.per_cpu_s for x in under])


def _rates(loads: list[Load]) -> str:
    return (
        f"{median([x.per_cpu_s for x in loads]):,.0f} a CPU second,"
        f" {median([x.per_s for x in loads]):,.0f}/s by the clock"
        f" (p99 {median([x.p99_ms for x in loads]):.1f} ms)"
    )


@contextmanager
def _serving_both(bench: Bench, shape: Shape) -> Iterator[tuple[Server, Server]]:
    with counter_serve(bench, prepare(bench, shape)) as server:
        size = len(server.client.get(f"{BASE}/counters/{name_of(0)}").content)
        with variant(bench, "bare", "--size", str(size)) as bare:
            yield server, bare


def _warm(bench: Bench, server: Server) -> None:
    """Wait until the hot counter's first adds are rolled up."""
    path = f"{BASE}/counters/{name_of(0)}"
    before = server.get(path)["count"]
    end_s = time.monotonic() + 60.0
    with bench.console.status("waiting for the first rollup of the hot counter"):
        while server.get(path)["count"] == before:
            check(time.monotonic() < end_s, "the hot counter is not rolled up")
            time.sleep(0.2)


def _get(
    bench: Bench, server: Server, counters: int, shape: Shape | None = None, only: int = 0
) -> Load:
    """Load with gets; the answers' mean size must be a right answer's."""
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
        wrong = [each for each in positions if counts[name_of(each)] != shape.count(each)]
        check(not wrong, f"{len(wrong)} of {len(positions)} counts are wrong: {wrong[:10]}")
    return measured
