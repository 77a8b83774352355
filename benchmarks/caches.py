"""Gets of cached counts and best-effort adds: through Redis, against the same through memcached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Final

from benchmarks.best_effort import CONNECTIONS, cached_serve, counted, loaded, rates
from benchmarks.cluster import Place, wait_until
from benchmarks.cluster_feeding import Feeder
from benchmarks.harness import Bench, Load, MissingToolError, Server, check, counter_names, load
from benchmarks.results import Figure, Report, by_clock, by_cpu, ratio
from benchmarks.single_adds import COUNTERS
from scripts.cluster_servers import memcached_missing, redis_missing

_KINDS: Final = ("memcached", "redis")
_TARGET: Final = 0.9
_NAME: Final = "cached"
_WINDOWS: Final = ("--retention=1h", "--slice=10m", "--accept-limit=1s", "--rollup-window=1s")
_ROLLUP_TIMEOUT_S: Final = 60.0
_WARM_S: Final = 1.0
_MISSES: Final = 'counter_cache_lookups_total{result="miss"}'


def run(bench: Bench) -> Report:
    """Measure both kinds of load over both caches in turn. Raises MissingToolError."""
    if problem := memcached_missing() or redis_missing():
        raise MissingToolError(problem)
    variants: dict[str, Callable[[], Load]] = {}
    for kind in _KINDS:
        variants[f"adds in {kind}"] = partial(_adds, bench, kind)
        variants[f"gets from {kind}"] = partial(_gets, bench, kind)
    loads = bench.alternate(variants)
    return Report(
        subject="caches",
        title="Redis and memcached",
        method=(
            f"`POST .../add` to {COUNTERS:,} counters of a BEST_EFFORT namespace, and"
            " `GET .../counters/{c}` of as many of an EVENTUAL one whose counts are in the cache,"
            f" over {CONNECTIONS} connections, by wrk, to `counter serve --cache redis://...` and"
            " `--cache memcached://...` over SQLite; one server of each cache, on the same machine."
            " After the adds the counts are compared with what had been acknowledged; no get may"
            " miss the cache."
        ),
        figures=tuple(_figures(loads)),
        conditions=(("redis-py", version("redis")), ("pymemcache", version("pymemcache"))),
    )


def _figures(loads: dict[str, list[Load]]) -> Iterator[Figure]:
    for label, name in (("adds in", "best-effort adds"), ("gets from", "gets of cached counts")):
        theirs, ours = (loads[f"{label} {kind}"] for kind in _KINDS)
        yield ratio(
            f"{name} a second through Redis, of those through memcached",
            by_clock(ours, theirs),
            at_least=_TARGET,
            note=f"{rates(ours)} against {rates(theirs)}",
        )
        yield ratio(
            f"{name} a CPU second of the service through Redis, of those through memcached",
            by_cpu(ours, theirs),
        )


def _adds(bench: Bench, kind: str) -> Load:
    with cached_serve(bench, kind) as server:
        return counted(server, loaded(bench, server))


def _gets(bench: Bench, kind: str) -> Load:
    names = counter_names(500 if bench.quick else COUNTERS)
    place = Place(_NAME, 0, 1)
    with cached_serve(bench, kind, *_WINDOWS) as server:
        answer = server.client.put(place.base, json={"counter_type": "EVENTUAL", "cache_ttl": "1d"})
        check(answer.status_code == 201, f"no namespace: {answer.status_code} {answer.text[:300]}")
        Feeder(server, place).feed(names)

        def cached() -> bool:
            return set(server.counts(place.base, names, None).values()) == {1}

        wait_until("the counts are not rolled up", cached, _ROLLUP_TIMEOUT_S)
        gets = partial(load, server, "gets.lua", place.base, len(names), 0, connections=CONNECTIONS)
        if not bench.quick:
            gets(seconds=_WARM_S)
        before = _misses(server)
        measured = gets(seconds=bench.seconds)
        missed = _misses(server) - before
        check(missed == 0, f"{missed:.0f} gets missed the cache")
        return measured


def _misses(server: Server) -> float:
    """The lookups so far that did not find a count in the cache."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(x.split()[1]) for x in lines if x.startswith(_MISSES))
