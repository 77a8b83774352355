"""Loads of adds on a cluster, each in a namespace of its own, and what must be there after them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from subprocess import run
from typing import Any, Final

from benchmarks.cluster import KEYSPACE, Place, Site, site, wait_until
from benchmarks.harness import ROOT, Bench, Load, Server, check, load, python_module
from counter.clock import to_rfc3339
from counter.limits import HOUR, SECOND
from counter.tokens import TokenGenerator

#: A few of them are hot, most are rare.
MANY: Final = 10_000
WARM_S: Final = 2.0
WARM_UP_S: Final = 10.0
_WINDOW_US: Final = 10 * SECOND
_SLICE_US: Final = 12 * HOUR
DATASET: Final = ("--retention=1d", "--slice=12h", "--time-bucket=1h", "--event-buckets=1")
_SHARDS: Final = 16
_SAMPLED: Final = 200
_FIRST_ADD_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """Which counters are added to: a new one each time (0), or one of so many."""

    counters: int
    prefix: str = "c"

    def names(self, adds: int) -> list[str]:
        """The counters that *adds* adds may have reached."""
        return [f"{self.prefix}{place:07}" for place in range(self.counters or adds)]


FRESH: Final = Target(0, "f")
SKEWED: Final = Target(MANY)
HOT: Final = Target(1)


@dataclass(frozen=True, slots=True)
class Made:
    """What a load did to a namespace of its own."""

    what: str
    place: Place
    target: Target
    acknowledged: int
    sent: int
    server: Server | None


@dataclass(slots=True)
class Adds:
    """One run over one site: the servers, and all that they were asked to add."""

    bench: Bench
    site: Site
    service: Server
    lwt: Server
    native: Server
    made: list[Made] = field(default_factory=list)

    @property
    def warm_s(self) -> float:
        """How long each load lasts before what is measured of it; 0 for none."""
        return 0.0 if self.bench.quick else WARM_S

    def warm_up(self) -> None:
        """Have the nodes compile what the loads need: their first seconds are the slowest, and
        some adds may fail."""
        place = self.site.create(self.service, shards=_SHARDS)
        with self.bench.console.status("warming up"):
            for server in (self.service, self.lwt, self.native):
                wait_until("no add succeeds", partial(_adds_one, server, place), _FIRST_ADD_S)
                if not self.bench.quick:
                    load(
                        server,
                        "adds.lua",
                        place.base,
                        MANY,
                        connections=64,
                        seconds=WARM_UP_S,
                        may_fail=True,
                    )

    def over_http(
        self,
        server: Server,
        target: Target,
        connections: int,
        payload_check: str = "guard",
        *,
        may_fail: bool = False,
    ) -> Load:
        """Load *server* in a namespace of its own."""
        place = self.site.create(self.service, payload_check=payload_check, shards=_SHARDS)
        script: tuple[Any, ...] = ("adds.lua", place.base, target.counters)
        if not target.counters:
            script = ("fresh.lua", place.base, target.prefix)
        # Names of its own for the warming, or the measured ones would not be new.
        warming = script if target.counters else (*script[:2], "w")
        loaded = partial(load, server, connections=connections, may_fail=may_fail)
        warm = [loaded(*warming, seconds=self.warm_s)] if self.warm_s else []
        measured = loaded(*script, seconds=self.bench.seconds)
        self._note(f"over HTTP, {target}", place, target, (*warm, measured), server)
        return measured

    def by_driver(self, target: Target, concurrency: int) -> Load:
        """The same rows from the driver alone, as many at a time."""
        place = self.site.create(self.service, shards=_SHARDS)
        flags = {
            "contact-point": self.site.contact_point,
            "keyspace": KEYSPACE,
            "warm": self.warm_s,
            "seconds": self.bench.seconds,
            "namespace": place.id,
            "shards": _SHARDS,
            "window-us": _WINDOW_US,
            "slice-us": _SLICE_US,
            "time-bucket-us": HOUR,
            "event-buckets": 1,
            "counters": target.counters,
            "prefix": target.prefix,
            "concurrency": concurrency,
        }
        named = [f"--{name}={value}" for name, value in flags.items()]
        command = python_module("benchmarks.driver_alone", *named)
        done = run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), "")
        check(bool(line), f"the driver alone failed: {done.stdout[-500:]}{done.stderr[-1_500:]}")
        found = json.loads(line.removeprefix("RESULT "))
        self.made.append(
            Made(
                f"by the driver, {target}",
                place,
                target,
                found["acknowledged"],
                found["sent"],
                self.service,
            )
        )
        return Load(
            requests=found["requests"],
            sent=found["sent"],
            seconds=found["seconds"],
            bytes_read=0,
            p50_ms=found["p50_ms"],
            p99_ms=found["p99_ms"],
            cpu_s=found["cpu_s"],
            client_cpu_s=0.0,
        )

    def _note(
        self, what: str, place: Place, target: Target, loads: Sequence[Load], server: Server
    ) -> None:
        self.made.append(
            Made(
                what,
                place,
                target,
                sum(each.requests for each in loads),
                sum(each.sent for each in loads),
                None if server is self.native else server,
            )
        )

    def check(self) -> None:
        """Every acknowledged add is one event, one without an answer at most one; the API counts
        as many of a sample of counters as their events say."""
        for server in (self.service, self.lwt, self.native):
            server.settled_tally()
        counted = self._counted()
        for each in self.made:
            found = counted[each.place.id]
            total = found.total()
            check(
                each.acknowledged <= total <= each.sent,
                f"{each.what}: {total} counted, {each.acknowledged} acknowledged, {each.sent} sent",
            )
            if each.server is None:
                continue
            names = each.target.names(each.sent)
            some = {*names[:10], *random.sample(names, min(_SAMPLED, len(names)))}
            read = each.server.counts(each.place.base, sorted(some), "0s")
            wrong = [name for name in some if read[name] != found[name]]
            check(
                not wrong, f"{each.what}: {len(wrong)} of {len(some)} counts are wrong: {wrong[:9]}"
            )

    def _counted(self) -> dict[int, Counter[str]]:
        """The sum of each counter by namespace, from the rows themselves."""
        counted: dict[int, Counter[str]] = {each.place.id: Counter() for each in self.made}
        with self.bench.console.status("reading all rows back"):
            for namespace, counter, delta in self.site.events():
                counted.setdefault(namespace, Counter())[counter] += delta
            for namespace, counter, n in self.site.rows(
                "SELECT namespace, counter, n FROM bench_default.native"
            ):
                counted.setdefault(namespace, Counter())[counter] += n
        return counted


def _adds_one(server: Server, place: Place) -> bool:
    nonce, time_us = TokenGenerator().next()
    token = {"token": nonce.hex(), "generation_time": to_rfc3339(time_us)}
    body = {"delta": 1, "idempotency_token": token}
    return server.client.post(f"{place.base}/counters/first/add", json=body).is_success


@contextmanager
def adds_over(bench: Bench, nodes: int) -> Iterator[Adds]:
    """The service and what it is compared with, warmed up, over so many nodes; checked at the end.
    Raises MissingToolError."""
    with site(bench, *DATASET, nodes=nodes) as place, ExitStack() as stack:
        from benchmarks.rivals import NATIVE_TABLE

        place.rows(NATIVE_TABLE)
        # Idle ones stay while another is measured: all they do is look at the clock now and then.
        adds = Adds(
            bench,
            place,
            service=stack.enter_context(place.api()),
            lwt=stack.enter_context(place.variant("lwt")),
            native=stack.enter_context(place.variant("native")),
        )
        adds.warm_up()
        yield adds
        adds.check()
