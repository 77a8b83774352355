"""Bounded adds beside plain ones: what it costs to decide each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from benchmarks import postgresql
from benchmarks.harness import Bench, Server, counter_serve
from benchmarks.loads import BASE, COUNTERS, WARM_S, WINDOWS, Load, check_adds, load
from benchmarks.results import Figure, Report, figure, median, ratios

_OF_PLAIN: Final = 0.7
_CONNECTIONS: Final = 64
#: The last arguments of the script; the bound is so high that no add is refused.
_KINDS: Final[Mapping[str, tuple[str, ...]]] = {"plain": (), "bounded": ("-", str(2**62))}
_METHOD: Final = (
    "`POST .../add` with a fresh token each, without a bound and with an `at_most` that none"
    f" reaches, in turn, by wrk over {_CONNECTIONS} connections on the same machine; the rollup"
    " runs meanwhile in windows of 2 s. Each load has a server of its own."
)


def run(bench: Bench) -> Report:
    """Over SQLite: many counters, and a hot one."""
    return Report(
        subject="bounded-adds",
        title="Bounded adds",
        method=_METHOD,
        figures=tuple(
            _figure(bench, counters, partial(_over_sqlite, bench, counters))
            for counters in (COUNTERS, 1)
        ),
    )


def over_postgresql(bench: Bench) -> Report:
    """Over PostgreSQL: many counters."""
    postgresql.require()
    measure = partial(_over_postgresql, bench, COUNTERS)
    return Report(
        subject="postgresql-bounded-adds",
        title="Bounded adds over PostgreSQL",
        method=f"{_METHOD} CPU is that of the server and of PostgreSQL.",
        figures=(_figure(bench, COUNTERS, measure),),
        conditions=postgresql.conditions(),
    )


def _figure(bench: Bench, counters: int, measure: Callable[[str], float]) -> Figure:
    """Return the adds a CPU second of bounded adds, of plain ones; *measure* has those of a
    kind."""
    rounds = bench.alternate({kind: partial(measure, kind) for kind in _KINDS})
    plain, bounded = rounds.values()
    return figure(
        f"bounded adds a CPU second to {counters:,} counter{'s' * (counters > 1)}, of plain ones",
        ratios(bounded, plain),
        at_least=_OF_PLAIN,
        note=f"{median(bounded):,.0f} a CPU second, of {median(plain):,.0f}",
    )


def sender(counters: int, kind: str, server: Server) -> Callable[..., Load]:
    """Loads of single adds of a *kind*: plain, or bounded."""
    return partial(
        load, server, "adds.lua", BASE, counters, *_KINDS[kind], connections=_CONNECTIONS
    )


def _over_sqlite(bench: Bench, counters: int, kind: str) -> float:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        send = sender(counters, kind, server)
        loads = [send(seconds=each) for each in (1.0 if bench.quick else WARM_S, bench.seconds)]
        check_adds(bench, server, BASE, data, counters, loads)
        return loads[-1].per_cpu_s


def _over_postgresql(bench: Bench, counters: int, kind: str) -> float:
    return postgresql.taken(bench, counters, partial(sender, counters, kind)).per_cpu_s
