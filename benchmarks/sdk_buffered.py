"""Adds of one client process through the SDK's buffer, with and without a server that is killed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.harness import Bench, Server, check, counter_names
from benchmarks.loads import BASE, check_counts
from benchmarks.results import Figure, Report, figure, median
from counter_client import Buffer, CounterClient, Options

_TARGET_PER_S: Final = 500_000
_COUNTERS: Final = 1_000
#: Adds between two looks at the clock.
_STRIDE: Final = 10_000
#: How long the end of a buffer may take: longer than a server takes to come back.
_DRAIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Adds:
    """The result of one client process, from its first add to the last acknowledgement."""

    adds: int
    items: int
    #: Until the last add was taken, and until all of them were acknowledged.
    adding_s: float
    seconds: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.adds / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.per_s:,.0f}/s until all were acknowledged ({self.adds:,} adds became"
            f" {self.items:,} items of batches); {self.adds / self.adding_s:,.0f}/s while adding,"
            f" {self.adds / self.cpu_s:,.0f} a CPU second of the client"
        )


def run(bench: Bench) -> Report:
    """Add to few counters with the server killed half way, without, and to many counters."""
    cases = {
        "where the server is killed half way, and started again": True,
        "where nothing fails": False,
    }
    found = bench.alternate(
        {
            f"buffered adds {name}": partial(_buffered, bench, crash=crash)
            for name, crash in cases.items()
            if crash or not bench.quick
        }
    )
    return Report(
        subject="sdk-buffered",
        title="The SDK's buffered adds",
        method=(
            f"One client process calls `buf.add(counter, 1)` in one thread, over {_COUNTERS:,}"
            " counters in a random order; the buffer merges the adds of a counter and sends them"
            " every 0.1 s, by `batch/add` under a token for each item, to `counter serve` on the"
            " same machine (SQLite, durable). The time runs from the first add until the buffer"
            " is closed: all adds are acknowledged by then. Afterwards every counter must be"
            " exactly what was added, and where the server was killed half way, again after"
            " another kill -9."
        ),
        figures=tuple(each for name, adds in found.items() for each in _figures(name, adds)),
    )


def _figures(name: str, found: list[Adds]) -> tuple[Figure, Figure]:
    merged = median([each.adds / each.items for each in found])
    adding = median([each.adds / each.adding_s for each in found])
    return (
        figure(
            f"{name}, a second, until all are acknowledged",
            [each.per_s for each in found],
            "/s",
            at_least=_TARGET_PER_S,
            note=f"{merged:,.0f} adds an item; {adding:,.0f}/s while adding",
        ),
        figure(
            f"{name}, a CPU second of the client", [each.adds / each.cpu_s for each in found], "/s"
        ),
    )


def _buffered(bench: Bench, crash: bool) -> Adds:
    names = counter_names(_COUNTERS)
    order = random.Random(_COUNTERS).choices(names, k=_STRIDE)
    flushed: list[int] = []
    options = Options(trust_env=False, on_flush=lambda flush: flushed.append(flush.items))
    with _served(bench) as site:
        cpu_s, begin_s = time.process_time(), time.perf_counter()
        with CounterClient(site.url, options=options) as client:
            buffer = client.buffer()
            try:
                rounds = _add(buffer, order, bench.seconds, site, crash)
                adding_s = time.perf_counter() - begin_s
            finally:
                buffer.close(timeout=_DRAIN_S)
        end_s = time.perf_counter()
        cpu_s = time.process_time() - cpu_s
        expected = {name: number * rounds for name, number in Counter(order).items()}
        check_counts(site.server.counts(BASE, names, "0s"), expected)
        if crash:
            site.crash()
            check_counts(site.server.counts(BASE, names, "0s"), expected)
    return Adds(rounds * len(order), sum(flushed), adding_s, end_s - begin_s, cpu_s)


def _add(buffer: Buffer, order: list[str], seconds: float, site: _Site, crash: bool) -> int:
    """Add all of *order* again and again for *seconds*; how often."""
    add = buffer.add
    end_s = time.perf_counter() + seconds
    crashing = threading.Timer(seconds / 2, site.crash)
    if crash:
        crashing.start()
    rounds = 0
    while time.perf_counter() < end_s:
        for name in order:
            add(name, 1)
        rounds += 1
    if crash:
        crashing.join()
        check(site.crashes == 1, "the server was not killed and started again")
    return rounds


class _Site:
    """``counter serve`` that may be killed, and comes back at the same address."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._data: Path = bench.fresh_folder("data")
        self._port = 0
        self.crashes = 0
        self.start()
        self.url = self.server.url
        self._port = int(self.url.rpartition(":")[2])

    def start(self) -> None:
        port, data = str(self._port), str(self._data)
        arguments = ["counter", "serve", "--port", port, "--data", data]
        self.server = Server(arguments, self._bench.fresh_folder("serve.log"))

    def crash(self) -> None:
        """kill -9, and a new one."""
        self.server.kill()
        self.server.client.close()
        self.start()
        self.crashes += 1


@contextmanager
def _served(bench: Bench) -> Iterator[_Site]:
    site = _Site(bench)
    try:
        yield site
        site.server.stop()
    finally:
        site.server.kill()
