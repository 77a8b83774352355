"""Holds over SQLite: what a hold and its settle cost, and what open ones cost a get."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from api.app import create_app
from benchmarks.bounded import sender
from benchmarks.harness import Bench, Server, check, counter_names, counter_serve, wait_until
from benchmarks.loads import (
    BASE,
    COUNTERS,
    WARM_S,
    WINDOWS,
    Load,
    check_adds,
    load,
    load_of,
    run_wrk,
)
from benchmarks.prepared import settings_for
from benchmarks.results import Figure, Report, figure, median, per_cpu_s, rates, ratios
from counter.bounds import Bounds
from counter.holds import HoldId, events_of_hold
from counter.limits import HOUR, INT64_MAX
from counter.types import Token, Written

_CONNECTIONS: Final = 64
_OPEN: Final = 1_000_000
_AT_ONCE: Final = 2_000
_GET_TARGET: Final = 1.1
_ROLLUP_TIMEOUT_S: Final = 300.0
_BOUNDS: Final = Bounds(at_most=INT64_MAX)
_ACCURATE: Final = "?max_staleness=0s"
#: A hold and its settle are two requests.
_PAIR: Final = 2


def run(bench: Bench) -> Report:
    """Holds that are settled beside plain adds; then gets of a counter with many open holds."""
    opened = 1_000 if bench.quick else _OPEN
    return Report(
        subject="holds",
        title="Holds",
        method=(
            "`POST .../holds` with a fresh token each and an `at_most` that none reaches, and a"
            " settle of each about a thousand holds later, by wrk over"
            f" {_CONNECTIONS} connections on the same machine, in turn with single adds; the rollup"
            " runs meanwhile in windows of 2 s. Each load has a server of its own. Then, when the"
            f" rollup has caught up, accurate gets of a counter with {opened:,} open holds, of"
            " another one of the same namespace, and of one in a namespace that never had a hold."
        ),
        figures=(*(_pairs(bench, each) for each in (COUNTERS, 1)), *_gets(bench, opened)),
    )


def _pairs(bench: Bench, counters: int) -> Figure:
    """Return what a hold and its settle cost, of a plain add."""
    adds, pairs = bench.alternate(
        {
            "plain adds": partial(_measured, bench, counters, _adds),
            "requests of holds": partial(_measured, bench, counters, _holds),
        }
    ).values()
    cost = [_PAIR * each for each in ratios(per_cpu_s(adds), per_cpu_s(pairs))]
    return figure(
        f"CPU of a hold and its settle over {counters:,} counter{'s' * (counters > 1)},"
        " of a plain add's",
        cost,
        note=(
            f"{median(per_cpu_s(pairs)) / _PAIR:,.0f} pairs a CPU second, and"
            f" {median(per_cpu_s(adds)):,.0f} plain adds"
        ),
    )


def _measured(bench: Bench, counters: int, measure: Callable[..., Load]) -> Load:
    with counter_serve(bench, data := bench.fresh_folder("data"), *WINDOWS) as server:
        return measure(bench, server, data, counters)


def _adds(bench: Bench, server: Server, data: Path, counters: int) -> Load:
    send = sender(counters, "plain", server)
    loads = [send(seconds=each) for each in _seconds(bench)]
    check_adds(bench, server, BASE, data, counters, loads)
    return loads[-1]


def _holds(bench: Bench, server: Server, data: Path, counters: int) -> Load:
    """Every settle counts once, and what it has left over is not held any more."""
    runs = [
        run_wrk(server, "holds.lua", BASE, counters, connections=_CONNECTIONS, seconds=each)
        for each in _seconds(bench)
    ]
    server.settled_tally()
    names = counter_names(counters)
    counted = sum(server.counts(BASE, names, "0s").values())
    ended = sum(each["ended"] for each in runs)
    answered = sum(each["requests"] - each["begun"] for each in runs)
    check(
        answered <= counted <= ended, f"{counted} counted, of {ended} settles {answered} answered"
    )
    server.kill()
    with counter_serve(bench, data) as again:
        recounted = sum(again.counts(BASE, names, "0s").values())
    check(recounted == counted, f"{counted} counted, {recounted} after kill -9 and a restart")
    return load_of(server, runs[-1])


def _seconds(bench: Bench) -> tuple[float, float]:
    return (1.0 if bench.quick else WARM_S), bench.seconds


def _gets(bench: Bench, opened: int) -> tuple[Figure, Figure]:
    data = bench.fresh_folder("data")
    asyncio.run(_open(data, opened))
    with counter_serve(bench, data) as server:
        server.create("/v1/namespaces/none", counter_type="ACCURATE")
        shown = server.get(f"{BASE}/counters/{counter_names(1)[0]}{_ACCURATE}")
        check(shown.get("held") == opened, f"{shown} is held, not {opened}")
        # Until then each get reads the events of the holds, as it would read as many recent adds.
        wait_until(
            "the rollup has not caught up with the holds",
            lambda: (
                server.get(f"{BASE}/counters/{counter_names(1)[0]}?max_staleness=1d")["as_of"]
                > shown["as_of"]
            ),
            _ROLLUP_TIMEOUT_S,
        )
        get = partial(load, server, "gets.lua", connections=_CONNECTIONS, seconds=bench.seconds)
        many, one, none = bench.alternate(
            {
                f"{opened:,} open holds": lambda: get(BASE, 1, 0, _ACCURATE),
                "no open hold": lambda: get(BASE, 1, 1, _ACCURATE),
                "a namespace without holds": lambda: get("/v1/namespaces/none", 1, 1, _ACCURATE),
            }
        ).values()
    return (
        figure(
            f"CPU of an accurate get of a counter with {opened:,} open holds, of one without",
            ratios(per_cpu_s(one), per_cpu_s(many)),
            at_most=_GET_TARGET,
            note=f"with them {rates(many)}; without {rates(one)}",
        ),
        figure(
            "CPU of an accurate get in a namespace with open holds, of one without",
            ratios(per_cpu_s(none), per_cpu_s(one)),
            note=f"in a namespace without holds {rates(none)}",
        ),
    )


async def _open(data: Path, opened: int) -> None:
    """Open so many holds of the first counter, and none of the second one."""
    application = create_app(settings_for(data))
    async with application.running(rollup=False):
        namespace = application.service.namespaces.get("default")
        append = application.store.events.append_atomic
        for start in range(0, opened, _AT_ONCE):
            now_us = time.time_ns() // 1_000
            holds = [
                HoldId(counter_names(1)[0], Token(number.to_bytes(16, "big"), now_us))
                for number in range(start, min(start + _AT_ONCE, opened))
            ]
            outcomes = await asyncio.gather(
                *(append(namespace, events_of_hold(each, 1, HOUR, _BOUNDS)) for each in holds)
            )
            check({*outcomes} == {Written.NEW}, "not every hold was opened")
