"""Durable single adds beside what a user might pick instead, under the same load."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Final

from benchmarks import peer_list
from benchmarks.harness import (
    Bench,
    BenchError,
    Load,
    Server,
    check,
    check_adds,
    counter_names,
    counter_serve,
    load,
    serving,
)
from benchmarks.peer_list import Peer
from benchmarks.plots import Plot, Series
from benchmarks.results import Figure, Report, median, ratios
from benchmarks.single_adds import BASE, COUNTERS, WARM_S, WINDOWS
from counter.clock import to_rfc3339
from counter.tokens import TokenGenerator

OURS: Final = "ours"
_OUR_PROMISE: Final = (
    "SQLite, WAL, synchronous=FULL: on disk before the answer; knows a retry for 1 day, the"
    " retention of events, which is a setting"
)
_PEER_WARM_S: Final = 1.0
_SETTLE_TIMEOUT_S: Final = 30.0
#: Of raw ASGI, by the number of connections.
_FLOOR_TARGETS: Final[Mapping[int, float]] = {64: 0.5, 256: 0.65}


@dataclass(frozen=True, slots=True)
class Taken:
    """What one server did under load, and the CPU seconds of its store's processes, if any."""

    load: Load
    store_cpu_s: float | None = None

    def __str__(self) -> str:
        if self.store_cpu_s is None:
            return str(self.load)
        return f"{self.load}; the store used {self.store_cpu_s / self.load.seconds:.0%}"

    @property
    def per_cpu_s(self) -> float:
        """Adds a CPU second of the server's process and of its store's together."""
        return replace(self.load, cpu_s=self.load.cpu_s + (self.store_cpu_s or 0.0)).per_cpu_s


@dataclass(frozen=True, slots=True)
class Setting:
    """How the load is spread, and over how many connections."""

    counters: int
    connections: int

    def __str__(self) -> str:
        spread = "one counter" if self.counters == 1 else f"{self.counters:,} counters"
        return f"{spread}, {self.connections} connections"


@dataclass(frozen=True, slots=True)
class Compared:
    """Ours and the peers in one setting, a sample a round."""

    setting: Setting
    promise: str
    peers: Sequence[Peer]
    targets: Mapping[str, float]
    taken: Mapping[str, list[Taken]]

    def rates(self, name: str) -> list[float]:
        return [each.load.per_s for each in self.taken[name]]

    def cpu_rates(self, name: str) -> list[float]:
        """Adds a CPU second of the server's process and of its store's together."""
        return [each.per_cpu_s for each in self.taken[name]]

    def p99_ms(self, name: str) -> float:
        return median([each.load.p99_ms for each in self.taken[name]])


def run(bench: Bench) -> Report:
    """Measure ours and each peer in turn: one hot counter, then many."""
    every, left_out = peer_list.peers(bench)
    for word in left_out:
        bench.say(f"no rows of {word}")
    if bench.quick:
        # What differs in a setting of the store only is the same code.
        every = list({each.app: each for each in every}.values())
    hot = {each.name: each.hot_target for each in every if each.hot_target is not None}
    compared = [compare(bench, Setting(1, 64), every, hot, _ours, _OUR_PROMISE)]
    if not bench.quick:
        floor = peer_list.floor()
        relational = [each for each in every if each.app.startswith("postgres")]
        for connections, target in _FLOOR_TARGETS.items():
            among = [floor, *relational] if connections == 64 else [floor]
            setting = Setting(COUNTERS, connections)
            targets = {floor.name: target}
            compared.append(compare(bench, setting, among, targets, _ours, _OUR_PROMISE))
    return Report(
        subject="peers",
        title="Single adds beside peers",
        method=_method(left_out),
        figures=tuple(figure for each in compared for figure in figures(each)),
        plots=(_plot(compared[0]),),
    )


def _method(left_out: Sequence[str]) -> str:
    return (
        "`POST .../add` with a fresh token each by wrk on the same machine, to ours (`counter"
        " serve`, while the rollup runs in windows of 2 s) and to servers with the same route,"
        " body and answer: *raw ASGI* parses the body and answers, *FastAPI* checks the body and"
        " makes the answer by models, both without storage; the others put a store behind that."
        " *Redis*: `SET NX EX` and `INCRBY` in one Lua script, the default pool. *PostgreSQL*:"
        " `INSERT ... ON CONFLICT DO NOTHING` of the token and the update of the counter, as one"
        " statement or as two in a transaction, a pool of 16. *SQLite*: the same two statements"
        " and a commit a request. *NATS*: a stream with `allow_msg_counter`, `Nats-Incr` and"
        " `Nats-Msg-Id`. Each is one server process under uvicorn"
        f" {version('uvicorn')} (uvloop, httptools), FastAPI {version('fastapi')}, and a store of"
        " its own, new for every round, over TCP on loopback. Before a load each peer that knows"
        " retries must count one that is sent twice once; after it, what it counts is at least"
        " what it acknowledged and at most what it was sent. A peer's rate is that of FastAPI and"
        " of its client library as much as its store's, whose own CPU stands beside it; ours has a"
        " front of its own. How much that makes shows in the row *FastAPI*."
        + "".join(f" Left out: {word}." for word in left_out)
    )


def compare(
    bench: Bench,
    setting: Setting,
    peers: Sequence[Peer],
    targets: Mapping[str, float],
    ours: Callable[[Bench, Setting], Taken],
    promise: str,
) -> Compared:
    """Run *ours*, which makes that *promise*, and each of *peers* in turn."""
    variants: dict[str, Callable[[], Taken]] = {OURS: partial(ours, bench, setting)}
    variants |= {each.name: partial(_theirs, bench, setting, each) for each in peers}
    bench.say(f"{setting}:")
    return Compared(setting, promise, peers, targets, bench.alternate(variants))


def _ours(bench: Bench, setting: Setting) -> Taken:
    data = bench.fresh_folder("data")
    with counter_serve(bench, data, *WINDOWS) as server:
        warm = warm_up(bench, setting, server, WARM_S)
        measured = load_adds(setting, server, bench.seconds)
        check_adds(bench, server, BASE, data, setting.counters, [*warm, measured])
        return Taken(measured)


def _theirs(bench: Bench, setting: Setting, peer: Peer) -> Taken:
    log = bench.fresh_folder("peer.log")
    with peer.place(bench) as place:
        arguments = ["benchmarks.peer_apps", peer.app, "--at", place.at]
        with serving(arguments, log) as server:
            if peer.horizon:
                _check_retry(server)
            warm = warm_up(bench, setting, server, _PEER_WARM_S)
            before_s = place.server.cpu_s() if place.server else 0.0
            measured = load_adds(setting, server, bench.seconds)
            store_cpu_s = place.server.cpu_s() - before_s if place.server else None
            check_counts(server, setting.counters, [*warm, measured])
            return Taken(measured, store_cpu_s)


def warm_up(bench: Bench, setting: Setting, server: Server, seconds: float) -> list[Load]:
    """The load before the one that is measured; a quick run has none."""
    return [] if bench.quick else [load_adds(setting, server, seconds)]


def load_adds(setting: Setting, server: Server, seconds: float) -> Load:
    """Single adds by wrk."""
    return load(
        server,
        "adds.lua",
        BASE,
        setting.counters,
        connections=setting.connections,
        seconds=seconds,
    )


def _check_retry(server: Server) -> None:
    """An add that is sent twice is counted once, and said to be a repetition."""
    nonce, time_us = TokenGenerator().next()
    token = {"token": nonce.hex(), "generation_time": to_rfc3339(time_us)}
    body = {"delta": 3, "idempotency_token": token}
    path = f"{BASE}/counters/retried/add"
    replayed = [server.post(path, body)["replayed"] for _ in range(2)]
    check(replayed == [False, True], f"an add sent twice was answered replayed: {replayed}")
    counted = server.counts(BASE, ["retried"], None)["retried"]
    check(counted == 3, f"an add of 3 that was sent twice counts {counted}")


def check_counts(server: Server, counters: int, loads: Sequence[Load]) -> None:
    """Every acknowledged add of *loads* is counted, and nothing that was not sent."""
    counted = _settled_count(server, counters)
    acknowledged = sum(each.requests for each in loads)
    sent = sum(each.sent for each in loads)
    check(
        acknowledged <= counted <= sent,
        f"{counted} counted, {acknowledged} acknowledged, {sent} sent",
    )


def _settled_count(server: Server, counters: int) -> int:
    """What is counted once nothing is under way: requests that wrk left behind end too."""
    names = counter_names(counters)
    end_s = time.monotonic() + _SETTLE_TIMEOUT_S
    latest = -1
    while time.monotonic() < end_s:
        before, latest = latest, sum(server.counts(BASE, names, None).values())
        if before == latest:
            return latest
        time.sleep(0.2)
    raise BenchError("the server is still processing abandoned adds")


def figures(compared: Compared) -> list[Figure]:
    """The rates of all, and the ratios of ours to each."""
    return [
        _absolute(compared, OURS, compared.promise),
        *(_absolute(compared, each.name, _promise(each)) for each in compared.peers),
        *(_ratio(compared, each.name) for each in compared.peers),
    ]


def _promise(peer: Peer) -> str:
    """What its row must be read with."""
    if not peer.durability:
        return "keeps nothing, knows no retry"
    retries = f"knows a retry {'' if peer.horizon.startswith('for') else 'for '}{peer.horizon}"
    return "; ".join(filter(None, (peer.durability, retries, peer.versions)))


def _absolute(compared: Compared, name: str, promise: str) -> Figure:
    taken = compared.taken[name]
    cpu = f"{median([each.load.per_cpu_s for each in taken]):,.0f} a CPU second of the server"
    of_store = [each.load.requests / each.store_cpu_s for each in taken if each.store_cpu_s]
    if of_store:
        cpu += f", {median(of_store):,.0f} of the store"
    return Figure(
        f"{compared.setting}: {name}",
        median(compared.rates(name)),
        "/s",
        rounds=tuple(compared.rates(name)),
        note=f"p99 {compared.p99_ms(name):.1f} ms; {cpu}; {promise}",
    )


def _ratio(compared: Compared, name: str) -> Figure:
    by_clock = ratios(compared.rates(OURS), compared.rates(name))
    by_cpu = ratios(compared.cpu_rates(OURS), compared.cpu_rates(name))
    return Figure(
        f"{compared.setting}: ours, of {name}",
        median(by_clock),
        at_least=compared.targets.get(name),
        rounds=tuple(by_clock),
        note=f"{median(by_cpu):.3g} a CPU second of all that serves",
    )


def _plot(compared: Compared) -> Plot:
    names = (OURS, *(each.name for each in compared.peers))

    def series(title: str, rates: Callable[[str], list[float]]) -> Series:
        return Series(title, names, tuple(median(rates(name)) for name in names))

    return Plot(
        name="peers",
        title=f"Adds, {compared.setting}",
        x="",
        y="adds a second",
        series=(
            series("by the clock", compared.rates),
            series("of the CPU of server and store", compared.cpu_rates),
        ),
        kind="bars",
    )
