"""The service under three times the load that it can bear."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.harness import Bench, Server, check, counter_serve, new_token
from benchmarks.loads import BASE, COUNTERS, Load, check_adds, run_wrk
from benchmarks.results import Figure, Report, figure, median, ratios

_TIMES: Final = 3
#: A stall of the machine must not take all of a short round.
_SECONDS_MIN: Final = 3
#: How long a client waits for its response; twice ``write_wait_max``.
_PATIENCE_S: Final = 1.0
_NO_RATE: Final = 1_000_000
_GOODPUT_TARGET: Final = 0.8
_PROBED_TARGET: Final = 0.99
_RECOVERY_TARGET_S: Final = 5.0
#: Recovered: so many adds, one after the other, are each answered in so much time.
_CALM_ADDS: Final = 20
_CALM_S: Final = 0.1
_PROBE_EVERY_S: Final = 0.03
_COUNTER: Final = "counters/c0000001"


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind: the adds of each, and the connections that they come over."""

    name: str
    adds: int
    at_peak: int
    in_flood: int


_KINDS: Final = (Kind("batches of 1,000", 1_000, 32, 512), Kind("single adds", 1, 256, 1_024))
_METHOD: Final = (
    "`counter serve`, embedded. The peak is what wrk gets through, each connection sending its"
    f" next request when the last one is answered. Then {_TIMES} times as many requests a second"
    " are to go out over 4 to 16 times as many connections, whether answers come or not; one"
    " whose turn finds no connection free is given up by its client. Goodput is what is answered"
    f" 200 within {_PATIENCE_S:g} s, twice `write_wait_max`; a refused request is not sent again."
    " Meanwhile `/healthz` (over new connections), `/readyz`, a get and an accurate get are asked"
    f" for every {_PROBE_EVERY_S * 1e3:.0f} ms. At last single adds are sent, one after the other,"
    f" until {_CALM_ADDS} in a row are answered within {_CALM_S * 1e3:.0f} ms: all is as before"
    " when the first of them is."
)


@dataclass(frozen=True, slots=True)
class Flood:
    """The outcomes of the requests of a load; ``load`` are those with status 200."""

    load: Load
    #: Requests that were to go out, those that were answered 200 in time, and the refused ones.
    offered: int
    good: int
    refused: int

    @property
    def good_per_s(self) -> float:
        """Adds a second that were answered in time."""
        return self.good * self.load.weight / self.load.seconds

    def __str__(self) -> str:
        seconds = self.load.seconds
        return (
            f"{self.good / seconds:,.0f} of {self.offered / seconds:,.0f} requests a second in"
            f" time, {self.refused / seconds:,.0f} refused, p99 {self.load.p99_ms:.0f} ms"
        )


@dataclass(frozen=True, slots=True)
class Round:
    """The peak, a flood, the other requests during it, and the time to recover."""

    peak: Flood
    flood: Flood
    probed: int
    probed_in_time: int
    slowest_probe_s: float
    recovery_s: float

    def __str__(self) -> str:
        return (
            f"{self.peak.good_per_s:,.0f} adds/s at the peak; flooded: {self.flood};"
            f" {self.probed_in_time} of {self.probed} reads in time; recovered in"
            f" {self.recovery_s:.2f} s"
        )


def run(bench: Bench) -> Report:
    """Both kinds of requests."""
    rounds = bench.alternate({kind.name: partial(_round, bench, kind) for kind in _KINDS})
    return Report(
        subject="overload",
        title="Overload",
        method=_METHOD,
        figures=tuple(each for name in rounds for each in _figures(name, rounds[name])),
    )


def _figures(what: str, rounds: Sequence[Round]) -> list[Figure]:
    good, peaks = [x.flood.good_per_s for x in rounds], [x.peak.good_per_s for x in rounds]
    return [
        figure(
            f"adds answered in time at {_TIMES} times the peak load, of the peak; {what}",
            ratios(good, peaks),
            at_least=_GOODPUT_TARGET,
            note=f"{median(good):,.0f}/s of {median(peaks):,.0f}/s",
        ),
        figure(
            f"p99 of those that were let in; {what}",
            [x.flood.load.p99_ms for x in rounds],
            "ms",
            at_most=_PATIENCE_S * 1e3,
        ),
        figure(
            f"gets and health checks answered within {_PATIENCE_S:g} s meanwhile; {what}",
            [x.probed_in_time / x.probed for x in rounds],
            at_least=_PROBED_TARGET,
            note=f"the slowest took {median([x.slowest_probe_s for x in rounds]):.2f} s",
        ),
        figure(
            f"from the end of the flood until all is as before; {what}",
            [x.recovery_s for x in rounds],
            "s",
            at_most=_RECOVERY_TARGET_S,
        ),
    ]


def _round(bench: Bench, kind: Kind) -> Round:
    """A round on a service of its own, embedded."""
    data = bench.fresh_folder("data")
    with counter_serve(bench, data) as server:
        loads = []
        if not bench.quick:
            loads.append(_load(server, kind, kind.at_peak, _NO_RATE, 1.0).load)
        found, added = _flooded(bench, server, kind)
        check_adds(bench, server, BASE, data, COUNTERS, (*loads, *added), may_refuse=True)
    return found


def _flooded(bench: Bench, server: Server, kind: Kind) -> tuple[Round, Sequence[Load]]:
    """The observations, and all sent requests."""
    peak = _load(server, kind, kind.at_peak, _NO_RATE, bench.seconds)
    rate = _TIMES * peak.good_per_s / kind.adds
    with _probing(server) as probes:
        flood = _load(server, kind, kind.in_flood, rate, bench.seconds)
    recovery_s, calm = _recovery(server)
    took = [took_s for took_s in probes if took_s is not None]
    found = Round(
        peak=peak,
        flood=flood,
        probed=len(probes),
        probed_in_time=sum(took_s <= _PATIENCE_S for took_s in took),
        slowest_probe_s=max(took, default=float("inf")),
        recovery_s=recovery_s,
    )
    return found, (peak.load, flood.load, calm)


def _load(server: Server, kind: Kind, connections: int, rate: float, seconds: float) -> Flood:
    """Send *rate* requests a second over *connections*."""
    seconds, patience_ms = max(_SECONDS_MIN, seconds), int(_PATIENCE_S * 1e3)
    arguments = (BASE, COUNTERS, kind.adds, rate, patience_ms)
    found = run_wrk(server, "flood.lua", *arguments, connections=connections, seconds=seconds)
    check(found["accepted"] > 0, f"not one request was answered with success\n{server.log()}")
    load = Load(
        requests=found["accepted"],
        **{key: found[key] for key in ("sent", "seconds", "p50_ms", "p99_ms", "cpu_s")},
        weight=kind.adds,
        failed=found["refused"],
    )
    return Flood(load, found["offered"], found["good"], found["refused"])


@contextmanager
def _probing(server: Server) -> Iterator[list[float | None]]:
    """Ask for what must be answered in a flood too: how long each response took, in seconds; None
    for one that was no success."""
    took: list[float | None] = []
    over = threading.Event()

    def probe(path: str, reconnects: bool) -> None:
        connection = _connection(server)
        while not over.wait(_PROBE_EVERY_S):
            began_s = time.monotonic()
            try:
                if reconnects:
                    connection.close()
                connection.request("GET", path)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                took.append(None)
            else:
                took.append(time.monotonic() - began_s if answer.status == 200 else None)
        connection.close()

    one = f"{BASE}/{_COUNTER}"
    probes = {"/healthz": True, "/readyz": False, one: False, f"{one}?max_staleness=0s": False}
    threads = [threading.Thread(target=probe, args=each) for each in probes.items()]
    for thread in threads:
        thread.start()
    try:
        yield took
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _recovery(server: Server) -> tuple[float, Load]:
    """How long until the first add that is answered as if nothing had been, and so are all after
    it; and those that were sent to find out."""
    began_s = calm_since_s = time.monotonic()
    sent = good = calm = 0
    connection, path = _connection(server), f"{BASE}/{_COUNTER}/add"
    while calm < _CALM_ADDS:
        sent_s = time.monotonic()
        check(sent_s - began_s < 10 * _RECOVERY_TARGET_S, "it does not recover from the flood")
        body = json.dumps({"delta": 1, "idempotency_token": new_token()})
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        sent += 1
        good += answer.status == 200
        answered_s = time.monotonic()
        if answer.status != 200 or answered_s - sent_s > _CALM_S:
            calm = 0
            continue
        calm += 1
        if calm == 1:
            calm_since_s = answered_s
    connection.close()
    seconds = time.monotonic() - began_s
    added = Load(good, sent, seconds, 0.0, 0.0, 0.0, failed=sent - good)
    return calm_since_s - began_s, added


def _connection(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
