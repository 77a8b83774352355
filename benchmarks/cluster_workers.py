"""One API process and two behind one port: what the second one adds where a core is free for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import shares
from benchmarks.cluster import Site, conditions, site
from benchmarks.cluster_gets import fill_cache
from benchmarks.cluster_loads import DATASET, WARM_UP_S
from benchmarks.harness import Bench, Load, Server, check, counter_names, cpu_s_of, load
from benchmarks.results import Figure, Report, by_clock, by_cpu, median, ratio

_COUNTERS: Final = 10_000
_CONNECTIONS: Final = 64
_WORKERS: Final = (1, 2)
#: Of a core, each process: two of them, the load and the servers behind them then find all the
#: room that they ask for on two cores.
_SHARE: Final = 0.25
_TARGET: Final = 1.7
#: The cores are full with one worker already: two shall not be slower.
_NOT_HELD_TARGET: Final = 1.0

_GETS: Final = "gets from the cache"
_ADDS: Final = "adds"
#: What is loaded, how many processes, and whether each is held to its share.
_Variant = tuple[str, int, bool]
_METHOD: Final = (
    "`GET .../counters/{{c}}` of {counters:,} counters whose counts are in memcached, and"
    " `POST .../add` to as many, over {connections} connections to `counter serve --store"
    " cassandra` with `--workers 1` and with `--workers 2`, over one Cassandra node, by wrk on the"
    " same machine. The cores are shared with all of these, so a second worker finds none that is"
    " free. *Held to a share*: the kernel lets each worker process use {share:g} of a core and no"
    " more (a quota of its control group), so that room is left for the second one, and for what"
    " is behind them. *Not held*: by the clock the workers compete with the load and with"
    " Cassandra; what a worker gets done in a CPU second shows that two do not hinder each other."
    " Afterwards every count is compared with what had been acknowledged."
)


def run(bench: Bench) -> Report:
    """Measure both numbers of processes in turn, with each kind of request."""
    with site(bench, *DATASET) as where, ExitStack() as stack:
        counters = 500 if bench.quick else _COUNTERS
        servers = {
            number: stack.enter_context(where.api("--workers", str(number))) for number in _WORKERS
        }
        made = _Made(bench, where, servers, counters)
        made.fill()
        variants = made.variants()
        samples = bench.alternate({_name(key): each for key, each in variants.items()})
        loads = dict(zip(variants, samples.values(), strict=True))
        made.check()
    return Report(
        subject="cluster-workers",
        title="Two API processes behind one port",
        method=_METHOD.format(counters=counters, connections=_CONNECTIONS, share=_SHARE),
        figures=tuple(_figures(loads)),
        conditions=conditions(),
    )


class _Made:
    """The servers, what they were asked to add, and what must be there after it."""

    def __init__(
        self, bench: Bench, where: Site, servers: dict[int, Server], counters: int
    ) -> None:
        self._bench = bench
        self._where = where
        self._servers = servers
        self._counters = counters
        self._adds: list[Load] = []
        first = servers[_WORKERS[0]]
        self._read = where.create(first, cache_ttl="1d", rollup_window="1s", accept_limit="1s")
        self._added = where.create(first, shards=16)

    def fill(self) -> None:
        """Have counts in the cache, and warm up."""
        first = self._servers[_WORKERS[0]]
        fill_cache(self._bench, self._where, first, self._read, counter_names(self._counters))
        seconds = 1.0 if self._bench.quick else WARM_UP_S / len(_WORKERS)
        for server in self._servers.values():
            self._adds.append(self._load(server, _ADDS, seconds))

    def variants(self) -> dict[_Variant, Callable[[], Load]]:
        """What is compared. Nothing is held where this process may not."""
        problem = shares.missing()
        if problem:
            self._bench.say(f"nothing is held to a share: {problem}")
        return {
            (what, number, held): partial(self._measure, what, number, held)
            for held in ([False] if problem else [True] if self._bench.quick else [True, False])
            for what in (_GETS, _ADDS)
            for number in _WORKERS
        }

    def _measure(self, what: str, number: int, held: bool) -> Load:
        server = self._servers[number]
        processes = processes_of(server, number)
        with shares.capped(processes, _SHARE) if held else nullcontext():
            before_s = sum(map(cpu_s_of, processes))
            measured = self._load(server, what, self._bench.seconds)
            cpu_s = sum(map(cpu_s_of, processes)) - before_s
        if what == _ADDS:
            self._adds.append(measured)
        return replace(measured, cpu_s=cpu_s)

    def _load(self, server: Server, what: str, seconds: float) -> Load:
        if what == _ADDS:
            script: tuple[object, ...] = ("adds.lua", self._added.base, self._counters)
        else:
            script = ("gets.lua", self._read.base, self._counters, 0)
        return load(server, str(script[0]), *script[1:], connections=_CONNECTIONS, seconds=seconds)

    def check(self) -> None:
        """Every acknowledged add is counted once, one without an answer at most once; and what was
        read is what had been rolled up."""
        names = counter_names(self._counters)
        acknowledged = sum(each.requests for each in self._adds)
        sent = sum(each.sent for each in self._adds)
        for server in self._servers.values():
            server.settled_tally()
            counted = sum(server.counts(self._added.base, names, "0s").values())
            check(
                acknowledged <= counted <= sent,
                f"{counted} counted, {acknowledged} acknowledged, {sent} sent",
            )
            read = server.counts(self._read.base, names, None)
            check(set(read.values()) == {1}, f"counts of 1 are {sorted(set(read.values()))}")


def processes_of(server: Server, number: int) -> list[int]:
    """The processes that answer requests: one is the server itself, several are its children."""
    if number == 1:
        return [server.pid]
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text(encoding="ascii")
    found = [
        int(child)
        for child in children.split()
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    check(len(found) == number, f"{len(found)} worker processes where {number} were started")
    return found


def _name(variant: _Variant) -> str:
    what, number, held = variant
    return f"{what}, --workers {number}, {'held to a share' if held else 'not held'}"


def _figures(loads: dict[_Variant, list[Load]]) -> Iterator[Figure]:
    for what in (_GETS, _ADDS):
        for held in (True, False):
            if (what, 1, held) not in loads:
                continue
            one, two = loads[what, 1, held], loads[what, 2, held]
            how = f"each process held to {_SHARE:g} of a core" if held else "not held"
            yield ratio(
                f"{what} a second with --workers 2, of --workers 1; {how}",
                by_clock(two, one),
                at_least=_TARGET if held else _NOT_HELD_TARGET,
                note=f"{_rates(two)} against {_rates(one)}",
            )
            if not held:
                yield ratio(
                    f"{what} a CPU second of the workers with --workers 2, of --workers 1; {how}",
                    by_cpu(two, one),
                )


def _rates(loads: list[Load]) -> str:
    return (
        f"{median([x.per_s for x in loads]):,.0f}/s"
        f" (p99 {median([x.p99_ms for x in loads]):.0f} ms,"
        f" {median([x.cpu_s / x.seconds for x in loads]):.2f} of a core,"
        f" {median([x.per_cpu_s for x in loads]):,.0f} a CPU second)"
    )
