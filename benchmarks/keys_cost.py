"""What keys, limits and metrics cost a single add: with all of them, against the same with none."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.harness import (
    ROOT,
    Bench,
    Load,
    Server,
    check,
    check_adds,
    counter_serve,
    load,
    python_module,
    variant,
)
from benchmarks.results import Figure, Report, median, ratios
from benchmarks.single_adds import BASE, COUNTERS, WARM_S, WINDOWS

_CONNECTIONS: Final = (64, 256)
_AT_LEAST: Final = 0.95
#: Starts of both, a round. Many: what is measured is smaller than what the machine does from one to
#: the next.
_STARTS: Final = 4
#: So high that no add is rejected; each add takes from the buckets all the same.
_PER_S: Final = 1_000_000
_LIMITS: Final = (
    *(f"--requests-per-s={_PER_S}", f"--adds-per-s={_PER_S}"),
    *(f"--reservations-per-s={_PER_S}", f"--resolutions-per-s={_PER_S}"),
)


@dataclass(frozen=True, slots=True)
class _Served:
    """A service, where its data are, and the keys of who administers it and of who adds."""

    server: Server
    data: Path
    admin: str = ""
    writer: str = ""

    def add(self, connections: int, seconds: float) -> Load:
        """Load it with single adds."""
        if self.writer:
            self.server.use_key(self.writer)
        return load(
            self.server, "adds.lua", BASE, COUNTERS, connections=connections, seconds=seconds
        )

    def check(self, bench: Bench, loads: Sequence[Load]) -> None:
        """Every add is counted once, after a kill too."""
        if self.admin:
            self.server.use_key(self.admin)
        check_adds(bench, self.server, BASE, self.data, COUNTERS, loads)


@dataclass(frozen=True, slots=True)
class _Both:
    """Loads of the two, in the order in which they were made."""

    on: list[Load] = field(default_factory=list)
    off: list[Load] = field(default_factory=list)


def run(bench: Bench) -> Report:
    """Load both in turn, many times for a short while, at each number of connections."""
    made = {connections: _Both() for connections in _CONNECTIONS}
    for number in range(bench.rounds if bench.quick else _STARTS * bench.rounds):
        bench.say(f"start {number + 1}")
        _load_both(bench, made)
    figures = [each for number, both in made.items() for each in _figures(number, both)]
    return Report(
        subject="operating-cost",
        title="What keys, limits and metrics cost",
        method=(
            f"`POST .../add` with a fresh token each, over {COUNTERS:,} counters (a few hot, most"
            " rare), by wrk on the same machine, in turn to two servers that run at the same time"
            " and are restarted for each ratio; they roll up meanwhile in windows of 2 s."
            " *With*: every request shows an API key of"
            " scope write, which is looked up among the valid ones, and takes from the buckets of"
            " requests and of adds of its key and of its namespace, which allow"
            f" {_PER_S:,} a second, more than come; metrics are kept, as they always are."
            " *Without*: no key is on record, nothing is limited, and nothing is counted or timed"
            " for metrics, but what becomes of adds."
        ),
        figures=tuple(figures),
    )


def _load_both(bench: Bench, made: Mapping[int, _Both]) -> None:
    """Restart both: where its memory lies makes a process faster or slower for all its life."""
    with _with_keys(bench) as on, _without(bench) as off:
        loads: dict[_Served, list[Load]] = {on: [], off: []}
        for served, own in loads.items():
            own.append(served.add(_CONNECTIONS[0], 1.0 if bench.quick else WARM_S / 2))
        for connections, both in made.items():
            # Each goes first in one turn: what one leaves to be rolled up the other one feels.
            for turn in range(1 if bench.quick else 2):
                for served in (on, off) if turn else (off, on):
                    loads[served].append(served.add(connections, bench.seconds))
                both.on.append(loads[on][-1])
                both.off.append(loads[off][-1])
        for served, own in loads.items():
            served.check(bench, own)


def _figures(connections: int, both: _Both) -> list[Figure]:
    on, off = both.on, both.off
    cpu = ratios(_by_two([x.per_cpu_s for x in on]), _by_two([x.per_cpu_s for x in off]))
    wall = ratios(_by_two([x.per_s for x in on]), _by_two([x.per_s for x in off]))
    return [
        Figure(
            f"adds a CPU second with all three, {connections} connections, of without",
            median(cpu),
            at_least=_AT_LEAST,
            rounds=tuple(cpu),
            note=(
                f"{median([x.per_cpu_s for x in on]):,.0f}/s against"
                f" {median([x.per_cpu_s for x in off]):,.0f}/s"
            ),
        ),
        Figure(
            f"adds a second with all three, {connections} connections, of without",
            median(wall),
            at_least=_AT_LEAST,
            rounds=tuple(wall),
            note=(
                f"{median([x.per_s for x in on]):,.0f}/s (p99"
                f" {median([x.p99_ms for x in on]):.1f} ms) against"
                f" {median([x.per_s for x in off]):,.0f}/s (p99"
                f" {median([x.p99_ms for x in off]):.1f} ms)"
            ),
        ),
    ]


def _by_two(rates: Sequence[float]) -> list[float]:
    """The rate of each two turns, in one of which it went first: who does is slower for it."""
    pairs = (rates[start : start + 2] for start in range(0, len(rates), 2))
    return [len(pair) / sum(1 / rate for rate in pair) for pair in pairs]


@contextmanager
def _with_keys(bench: Bench) -> Iterator[_Served]:
    data = bench.fresh_folder("data")
    # What the metrics tell is of all namespaces, and takes a key for all of them.
    admin, writer = _new_key(data, "admin", "*"), _new_key(data, "write", "default")
    with counter_serve(bench, data, *WINDOWS, *_LIMITS) as server:
        check(server.client.get(BASE).status_code == 401, "no key is required")
        server.use_key(admin)
        answer = server.client.put(BASE, json={"requests_per_s": _PER_S, "adds_per_s": _PER_S})
        check(answer.is_success, f"no limits: {answer.status_code} {answer.text[:300]}")
        yield _Served(server, data, admin, writer)


@contextmanager
def _without(bench: Bench) -> Iterator[_Served]:
    data = bench.fresh_folder("data")
    with variant(bench, "unmetered", "--port=0", f"--data={data}", *WINDOWS) as server:
        yield _Served(server, data)


def _new_key(data: Path, scope: str, namespace: str) -> str:
    """A key, made as an operator makes one."""
    flags = [f"--namespace={namespace}", f"--scope={scope}", f"--data={data}", "--json"]
    command = python_module("counter", "key", "create", *flags)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"no key: {done.stdout}{done.stderr}")
    return str(json.loads(done.stdout)["key"])
