"""Durable single adds beside those of other stores, under the same load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Final

from benchmarks import peer_list
from benchmarks.harness import (
    Bench,
    Server,
    check,
    counter_serve,
    new_token,
    serving,
)
from benchmarks.loads import (
    BASE,
    COUNTERS,
    WARM_S,
    WINDOWS,
    Load,
    check_adds,
    check_counted,
    settled_count,
    single_adds,
)
from benchmarks.peer_list import Peer
from benchmarks.results import Figure, Report, figure, median, p99_ms, per_cpu_s, per_s, ratios

OURS: Final = "ours"
_OUR_PROMISE: Final = (
    "SQLite, WAL, synchronous=FULL: on disk before the answer; knows a retry for 1 day, the"
    " retention of events, which is a setting"
)
_PEER_WARM_S: Final = 1.0
_OF_FLOOR: Final = 0.5


@dataclass(frozen=True, slots=True)
class Taken:
    """The results of one server under load, and the CPU seconds of its store's processes, if
    any."""

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

    def sender(self, server: Server) -> Callable[..., Load]:
        """Loads of *server* with single adds."""
        adds = single_adds(server, BASE, self.counters)
        return partial(adds, connections=self.connections)


@dataclass(frozen=True, slots=True)
class Compared:
    """Ours and the peers in one setting, a sample a round."""

    setting: Setting
    promise: str
    peers: Sequence[Peer]
    targets: Mapping[str, float]
    taken: Mapping[str, list[Taken]]

    def loads(self, name: str) -> list[Load]:
        return [each.load for each in self.taken[name]]


def run(bench: Bench) -> Report:
    """Measure ours and each peer in turn: one hot counter, then many."""
    every, left_out = peer_list.peers(bench)
    for word in left_out:
        bench.say(f"no rows of {word}")
    if bench.quick:
        # Variants that differ in a setting of the store only have the same code.
        every = list({each.app: each for each in every}.values())
    hot = {each.name: each.hot_target for each in every if each.hot_target is not None}
    compared = [compare(bench, Setting(1, 64), every, hot, _ours, _OUR_PROMISE)]
    if not bench.quick:
        floor = peer_list.floor()
        among = [floor, *(each for each in every if each.app == "postgres")]
        setting, targets = Setting(COUNTERS, 64), {floor.name: _OF_FLOOR}
        compared.append(compare(bench, setting, among, targets, _ours, _OUR_PROMISE))
    return Report(
        subject="peers",
        title="Single adds beside peers",
        method=_method(left_out),
        figures=tuple(each for some in compared for each in figures(some)),
    )


def _method(left_out: Sequence[str]) -> str:
    return (
        "`POST .../add` with a fresh token each by wrk on the same machine, to ours (`counter"
        " serve`, while the rollup runs in windows of 2 s) and to servers with the same route,"
        " body and answer: *raw ASGI* parses the body and answers, *FastAPI* checks the body and"
        " makes the answer by models, both without storage; the others put a store behind that."
        " *Redis*: `SET NX EX` and `INCRBY` in one Lua script, the default pool. *PostgreSQL*:"
        " `INSERT ... ON CONFLICT DO NOTHING` of the token and the update of the counter, as one"
        " statement, a pool of 16. *NATS*: a stream with `allow_msg_counter`, `Nats-Incr` and"
        " `Nats-Msg-Id`. Each is one server process under uvicorn"
        f" {version('uvicorn')} (uvloop, httptools), FastAPI {version('fastapi')}, and a store of"
        " its own, new for every round, over TCP on loopback. Before a load each peer that knows"
        " retries must count one that is sent twice once; after it, what it counts is at least"
        " what it acknowledged and at most what it was sent. A peer's rate is that of FastAPI and"
        " of its client library as much as its store's, which is shown beside it; ours has a"
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
        send = setting.sender(server)
        loads = [send(seconds=WARM_S)] if not bench.quick else []
        loads.append(send(seconds=bench.seconds))
        check_adds(bench, server, BASE, data, setting.counters, loads)
        return Taken(loads[-1])


def _theirs(bench: Bench, setting: Setting, peer: Peer) -> Taken:
    log = bench.fresh_folder("peer.log")
    with peer.store(bench) as store:
        arguments = ["benchmarks.peer_apps", peer.app, "--at", store.url if store else ""]
        with serving(arguments, log) as server:
            if peer.horizon:
                _check_retry(server)
            send = setting.sender(server)
            loads = [send(seconds=_PEER_WARM_S)] if not bench.quick else []
            before_s = store.cpu_s() if store else 0.0
            loads.append(send(seconds=bench.seconds))
            store_cpu_s = store.cpu_s() - before_s if store else None
            check_counted(settled_count(server, BASE, setting.counters), loads)
            return Taken(loads[-1], store_cpu_s)


def _check_retry(server: Server) -> None:
    """An add that is sent twice is counted once, and said to be a repetition."""
    body = {"delta": 3, "idempotency_token": new_token()}
    path = f"{BASE}/counters/retried/add"
    replayed = [server.post(path, body)["replayed"] for _ in range(2)]
    check(replayed == [False, True], f"an add sent twice was answered replayed: {replayed}")
    counted = server.counts(BASE, ["retried"], None)["retried"]
    check(counted == 3, f"an add of 3 that was sent twice counts {counted}")


def figures(compared: Compared) -> list[Figure]:
    """The rates of all, and the ratios of ours to each."""
    return [
        _absolute(compared, OURS, compared.promise),
        *(_absolute(compared, each.name, _promise(each)) for each in compared.peers),
        *(_ratio(compared, each.name) for each in compared.peers),
    ]


def _promise(peer: Peer) -> str:
    """The footnote of its row."""
    if not peer.durability:
        return "keeps nothing, knows no retry"
    retries = f"knows a retry {'' if peer.horizon.startswith('for') else 'for '}{peer.horizon}"
    return "; ".join(filter(None, (peer.durability, retries, peer.versions)))


def _absolute(compared: Compared, name: str, promise: str) -> Figure:
    loads = compared.loads(name)
    cpu = f"{median(per_cpu_s(loads)):,.0f} a CPU second of the server"
    of_store = [x.load.requests / x.store_cpu_s for x in compared.taken[name] if x.store_cpu_s]
    if of_store:
        cpu += f", {median(of_store):,.0f} of the store"
    note = f"p99 {median(p99_ms(loads)):.1f} ms; {cpu}; {promise}"
    return figure(f"{compared.setting}: {name}", per_s(loads), "/s", note=note)


def _ratio(compared: Compared, name: str) -> Figure:
    ours, theirs = compared.taken[OURS], compared.taken[name]
    by_cpu = ratios([x.per_cpu_s for x in ours], [x.per_cpu_s for x in theirs])
    return figure(
        f"{compared.setting}: ours, of {name}",
        ratios(per_s(compared.loads(OURS)), per_s(compared.loads(name))),
        at_least=compared.targets.get(name),
        note=f"{median(by_cpu):.3g} a CPU second of all that serves",
    )
