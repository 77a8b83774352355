"""How cost grows: servers with stored data of several sizes, and the plots of their figures.

One server runs at a time: the others are stopped where they are.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import httpx

from benchmarks.harness import Bench, Load, Server, check, counter_serve, load
from benchmarks.memory import wait_for_rollup
from benchmarks.plots import Plot, Series
from benchmarks.prepared import BASE, Shape, name_of, prepare
from benchmarks.results import Figure, median, ratios
from counter.clock import SystemClock

CONNECTIONS: Final = 64
SECONDS_MAX: Final = 2.0
_WARM_S: Final = 1.0
_SAMPLED: Final = 200

_Sample = TypeVar("_Sample")


class Standing:
    """A server on a past of its own, and what was added to it since."""

    def __init__(self, bench: Bench, shape: Shape, data: Path, server: Server) -> None:
        self.shape = shape
        self.data = data
        self.server = server
        self._bench = bench
        self._begin_us = SystemClock().now_us()
        self._ended_us = 0
        self._acknowledged = 0
        self._sent = 0

    @contextmanager
    def awake(self) -> Iterator[Server]:
        """The server, running until the caller is done with it."""
        os.kill(self.server.pid, signal.SIGCONT)
        yield self.server
        # A connection that is kept would have expired by the next turn, and be closed under it.
        self.server.client.close()
        self.server.client = httpx.Client(base_url=self.server.url, timeout=60.0, trust_env=False)
        os.kill(self.server.pid, signal.SIGSTOP)

    def adds(
        self, counters: int, *, connections: int = CONNECTIONS, script: str = "adds.lua"
    ) -> Load:
        """Load it with single adds to so many counters, and check every count."""
        loading = partial(self.load, script, counters, connections=connections)
        with self.awake():
            if not self._bench.quick:
                loading(seconds=_WARM_S)
            measured = loading(seconds=min(SECONDS_MAX, self._bench.seconds))
            self.check()
        return measured

    def roll_up(self) -> None:
        """Wait until all that it was loaded with is rolled up: none of that falls into a load."""
        if self._ended_us:
            with self.awake() as server:
                wait_for_rollup(self._bench, server, self._ended_us)

    def load(
        self, script: str, *arguments: int, connections: int, seconds: float, weight: int = 1
    ) -> Load:
        """Load it with so many seconds of a script of adds, *weight* in each request."""
        done = load(
            self.server, script, BASE, *arguments,
            connections=connections, seconds=seconds, weight=weight,
        )  # fmt: skip
        self._acknowledged += done.requests * weight
        self._sent += done.sent * weight
        self._ended_us = SystemClock().now_us()
        return done

    def check(self) -> None:
        """What is on disk is what the server took for new: every acknowledged add, and one without
        an answer at most once. Of some counters the service itself is asked."""
        tally = self.server.settled_tally()
        others = {name: number for name, number in tally.items() if name != "original" and number}
        check(not others, f"all tokens were new, yet some adds were {others}")
        added = self.added()
        total = added.total()
        check(total == tally["original"], f"{total} on disk, {tally['original']} taken for new")
        check(
            self._acknowledged <= total <= self._sent,
            f"{total} counted, {self._acknowledged} acknowledged, {self._sent} sent",
        )
        random_ones = random.sample(sorted(added), min(_SAMPLED, len(added)))
        positions = {0, *random_ones}
        counts = self.server.counts(BASE, [name_of(each) for each in positions], "0s")
        wrong = [
            each
            for each in positions
            if counts[name_of(each)] != self.shape.count(each) + added[each]
        ]
        check(not wrong, f"{len(wrong)} of {len(positions)} counts are wrong: {wrong[:9]}")

    def added(self) -> Counter[int]:
        """What was added since, by the counter's position, from the rows themselves."""
        found: Counter[int] = Counter()
        connection = sqlite3.connect(self.data / "counter.db")
        try:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB 'events_*'")
            for (table,) in tables.fetchall():
                rows = connection.execute(
                    f"SELECT c.name, sum(e.delta) FROM {table} e JOIN counters c"  # noqa: S608
                    " ON c.id = e.counter WHERE e.event_time >= ? GROUP BY e.counter",
                    (self._begin_us,),
                )
                found.update({int(name[1:]): total for name, total in rows})
        finally:
            connection.close()
        return found

    def end(self) -> None:
        """Kill it: what it acknowledged is on disk all the same."""
        self.server.kill()
        total = self.added().total()
        check(
            self._acknowledged <= total <= self._sent,
            f"{total} counted after kill -9, {self._acknowledged} acknowledged",
        )


@contextmanager
def standing(bench: Bench, shapes: Sequence[Shape]) -> Iterator[list[Standing]]:
    """A server for each of *shapes*, none of them running."""
    with ExitStack() as stack:
        made: list[Standing] = []
        for shape in shapes:
            data = prepare(bench, shape)
            server = stack.enter_context(counter_serve(bench, data))
            made.append(Standing(bench, shape, data, server))
            with made[-1].awake():
                server.tally()
        yield made
        for each in made:
            each.end()


@dataclass(frozen=True, slots=True)
class Curve:
    """The rounds at each of some sizes."""

    name: str
    rounds: Mapping[int, Sequence[float]]

    def series(self) -> Series:
        """The line of the medians, and how far the rounds are apart."""
        values = self.rounds.values()
        return Series(
            self.name,
            tuple(map(float, self.rounds)),
            tuple(map(median, values)),
            tuple(map(min, values)),
            tuple(map(max, values)),
        )

    def growth(self, base: int | None = None, top: int | None = None) -> list[float]:
        """The value at *top*, of that at *base*, each round; last and first if not given."""
        sizes = list(self.rounds)
        over = self.rounds[sizes[-1] if top is None else top]
        return ratios(over, self.rounds[sizes[0] if base is None else base])

    def figure(
        self,
        what: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        base: int | None = None,
        top: int | None = None,
        unit: str = "",
    ) -> Figure:
        """The growth as a figure that has a bound; its note holds the values at each size."""
        rounds = self.growth(base, top)
        values = ", ".join(f"{short(median(each))}" for each in self.rounds.values())
        return Figure(
            what,
            median(rounds),
            at_least=at_least,
            at_most=at_most,
            rounds=tuple(rounds),
            note=f"{self.name}: {values} {unit}".rstrip(),
        )


def short(value: float) -> str:
    """*value* in a row of others."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def curve(
    name: str, loads: Mapping[int, Sequence[_Sample]], of: Callable[[_Sample], float]
) -> Curve:
    """One value *of* each sample."""
    return Curve(name, {size: [of(each) for each in some] for size, some in loads.items()})


def plot(name: str, title: str, x: str, y: str, *curves: Curve, log_y: bool = False) -> Plot:
    """Lines over sizes that are powers of each other."""
    return Plot(name, title, x, y, tuple(each.series() for each in curves), log_x=True, log_y=log_y)
