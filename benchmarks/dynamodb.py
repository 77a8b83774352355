"""Single adds over HTTP over Amazon's local DynamoDB: beside the driver alone, and with few
counters."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from random import sample
from typing import Final

from benchmarks.harness import (
    ROOT,
    Bench,
    Load,
    MissingToolError,
    check,
    counter_names,
    cpu_s_of,
    load,
    python_module,
    serving,
)
from benchmarks.results import Figure, Report, by_clock, by_cpu, median, ratio
from benchmarks.single_adds import BASE, COUNTERS
from scripts.cluster_jars import DYNAMODB
from scripts.dynamodb_server import DynamodbServer

_CONNECTIONS: Final = (64, 256)
#: An engine whose code is not compiled yet takes seconds for more.
_CONNECTIONS_QUICK: Final = (8,)
_OF_DRIVER: Final = 0.7
_FEW: Final = 100
_DATASET: Final = ("--retention=1d", "--slice=12h", "--write-timeout=5s")
#: A whole window; a rollup begins at latest 20 s after the first add.
_SECONDS: Final = 10.0
_WARM_S: Final = 14.0
_DRIVER_WARM_S: Final = 4.0
_SAMPLED: Final = 200
#: The name follows the namespace and the bucket in the partition key of an event.
_EVENT_NAME_AT: Final = 10

_METHOD: Final = (
    "`POST .../add` with a fresh token each to `counter serve --store dynamodb`, by wrk, over"
    " Amazon's local engine, which keeps its tables in memory; all on the same machine. *Many"
    f" counters*: {COUNTERS:,}, a few hot, most rare; *few*: {_FEW}. Windows are the default ones"
    f" of 10 s, and each load lasts {_SECONDS:.0f} s, so that it has the first adds of one window,"
    " which leave marks. No rollup runs, or the one of the same process, which is the default. The"
    " driver alone is one"
    " Python process without HTTP, which does one conditional `PutItem` an add by aiobotocore, as"
    " many at a time as there are connections: it leaves no marks, lists no names, and rolls"
    " nothing up. Each load has tables of its own; the engine is the same, and its code is compiled"
    " before. Afterwards every acknowledged add is one item, and the API counts of a sample what"
    " the items say. The engine is no measure of DynamoDB, whose latency and limits it does not"
    " have."
)


@dataclass(frozen=True, slots=True)
class _Taken:
    """What was measured, and the CPU that the engine used meanwhile."""

    load: Load
    engine_cpu_s: float

    def __str__(self) -> str:
        return f"{self.load}; the engine {self.engine_cpu_s / self.load.seconds:.0%}"


class _Site:
    """One engine, and loads over it, each with tables of its own."""

    def __init__(self, bench: Bench, engine: DynamodbServer) -> None:
        self._bench = bench
        self._engine = engine
        self._made = 0

    def service(
        self, counters: int, rolls_up: bool, connections: int, *, warm_s: float, seconds: float
    ) -> _Taken:
        """Single adds over HTTP to *counters*."""
        prefix = self._prefix()
        flags = (
            *("--store=dynamodb", f"--dynamodb-endpoint={self._engine.endpoint}"),
            *("--dynamodb-region=local", f"--keyspace={prefix}"),
            *(f"--dynamodb-connections={connections}", *_DATASET),
        )
        schema = python_module("counter", "schema", "apply", *flags)
        done = subprocess.run(schema, cwd=ROOT, capture_output=True, text=True, check=False)
        check(done.returncode == 0, f"the schema cannot be applied: {done.stdout}{done.stderr}")
        log = self._bench.fresh_folder("serve.log")
        command = ["counter", "serve", "--port", "0", "--rollup" if rolls_up else "--no-rollup"]
        with serving([*command, *flags], log) as server:
            # An add that waits too long may fail: it is no part of the rate.
            send = partial(load, server, "adds.lua", BASE, counters, may_fail=True)
            send = partial(send, connections=connections)
            warm = send(seconds=warm_s)
            before_s = self._cpu_s()
            measured = send(seconds=seconds)
            engine_cpu_s = self._cpu_s() - before_s
            server.settled_tally()
            found = self._sums(f"{prefix}.default.events.", _EVENT_NAME_AT)
            _check((warm, measured), sum(found.values()))
            names = sample(counter_names(counters), min(counters, _SAMPLED))
            read = server.counts(BASE, names, "0s")
            wrong = [name for name in names if read[name] != found.get(name, 0)]
            check(not wrong, f"{len(wrong)} of {len(names)} counts are wrong: {wrong[:9]}")
        return _Taken(measured, engine_cpu_s)

    def driver(self, connections: int, *, warm_s: float, seconds: float) -> _Taken:
        """Conditional puts by the driver alone."""
        prefix = self._prefix()
        flags = {
            "endpoint": self._engine.endpoint,
            "table": f"{prefix}_adds",
            "counters": COUNTERS,
            "concurrency": connections,
            "warm": warm_s,
            "seconds": seconds,
        }
        named = [f"--{name}={value}" for name, value in flags.items()]
        command = python_module("benchmarks.dynamodb_alone", *named)
        before_s = self._cpu_s()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        engine_cpu_s = self._cpu_s() - before_s
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), "")
        check(bool(line), f"the driver alone failed: {done.stdout[-500:]}{done.stderr[-1_500:]}")
        found = json.loads(line.removeprefix("RESULT "))
        items = sum(self._sums(f"{prefix}_adds", 0).values())
        wanted = found["acknowledged"]
        check(items == wanted, f"{items} items, {wanted} acknowledged")
        measured = Load(
            requests=found["requests"],
            sent=found["sent"],
            seconds=found["seconds"],
            bytes_read=0,
            p50_ms=found["p50_ms"],
            p99_ms=found["p99_ms"],
            cpu_s=found["cpu_s"],
            client_cpu_s=0.0,
        )
        # The warming up is a part of the whole.
        return _Taken(measured, engine_cpu_s * seconds / (seconds + warm_s))

    def _prefix(self) -> str:
        self._made += 1
        return f"bench{self._made}"

    def _cpu_s(self) -> float:
        return cpu_s_of(self._engine.pid() or 0)

    def _sums(self, prefix: str, name_at: int) -> dict[str, int]:
        """Return the sum of each counter's items in the tables that begin with *prefix*; its name
        begins in the partition key at *name_at*."""
        from benchmarks.dynamodb_alone import client_of

        async def summed() -> dict[str, int]:
            found: Counter[str] = Counter()
            async with client_of(self._engine.endpoint, 1) as client:
                pages = client.get_paginator("scan")
                names = (await client.list_tables())["TableNames"]
                for table in (each for each in names if each.startswith(prefix)):
                    async for page in pages.paginate(TableName=table, ConsistentRead=True):
                        for item in page["Items"]:
                            found[item["pk"]["B"][name_at:].decode()] += int(item["d"]["N"])
            return found

        return asyncio.run(summed())


def _check(loads: Sequence[Load], events: int) -> None:
    """Every acknowledged add is one event, one without an answer at most one."""
    acknowledged = sum(each.requests for each in loads)
    sent = sum(each.sent for each in loads)
    check(
        acknowledged <= events <= sent,
        f"{events} events, {acknowledged} acknowledged, {sent} sent",
    )


def missing() -> str | None:
    """What to install before the engine can run here; None where all of it is there."""
    if find_spec("aiobotocore") is None:
        return "the Python package aiobotocore is needed: pip install '.[dynamodb]' in its checkout"
    return DYNAMODB.missing()


def run(bench: Bench) -> Report:
    """Measure at each number of connections, all in turn."""
    figures: list[Figure] = []
    with _site(bench) as site:
        for connections in _CONNECTIONS_QUICK if bench.quick else _CONNECTIONS:
            figures += _figures(
                connections, *bench.alternate(_variants(bench, site, connections)).values()
            )
    return Report(
        subject="dynamodb-adds",
        title="Single adds over DynamoDB",
        method=_METHOD,
        figures=tuple(figures),
        conditions=(
            ("Amazon's local engine", f"DynamoDB local {DYNAMODB.version}, in memory"),
            ("aiobotocore", version("aiobotocore")),
        ),
    )


def _variants(bench: Bench, site: _Site, connections: int) -> dict[str, Callable[[], _Taken]]:
    seconds = bench.seconds if bench.quick else max(_SECONDS, bench.seconds)
    warm_s, driver_warm_s = (1.0, 1.0) if bench.quick else (_WARM_S, _DRIVER_WARM_S)
    service = partial(site.service, connections=connections, warm_s=warm_s, seconds=seconds)
    driver = partial(site.driver, connections, warm_s=driver_warm_s, seconds=seconds)
    return {
        f"the driver alone, {connections} connections": driver,
        f"many counters, {connections} connections": partial(service, COUNTERS, False),
        f"many counters, rolled up, {connections} connections": partial(service, COUNTERS, True),
        f"few counters, rolled up, {connections} connections": partial(service, _FEW, True),
    }


def _figures(
    connections: int,
    driver: list[_Taken],
    many: list[_Taken],
    many_rolled_up: list[_Taken],
    few_rolled_up: list[_Taken],
) -> Iterator[Figure]:
    alone = [each.load for each in driver]
    for what, taken, at_least in (
        ("many counters", many, _OF_DRIVER),
        ("many counters, which are rolled up,", many_rolled_up, None),
        ("few counters, which are rolled up,", few_rolled_up, None),
    ):
        loads = [each.load for each in taken]
        yield ratio(
            f"adds a second to {what} at {connections} connections, of the driver alone",
            by_clock(loads, alone),
            at_least=at_least,
            note=(
                f"{_rates(taken)} against {_rates(driver)}; a CPU second of the process"
                f" {median(by_cpu(loads, alone)):.2f}"
            ),
        )


def _rates(taken: list[_Taken]) -> str:
    loads = [each.load for each in taken]
    failed = sum(each.failed for each in loads)
    return (
        f"{median([x.per_s for x in loads]):,.0f}/s (p99"
        f" {median([x.p99_ms for x in loads]):.0f} ms;"
        f" {median([x.cpu_s / x.seconds for x in loads]):.2f} of a core, the engine"
        f" {median([x.engine_cpu_s / x.load.seconds for x in taken]):.2f}"
        + (f"; {failed:,} failed)" if failed else ")")
    )


@contextmanager
def _site(bench: Bench) -> Iterator[_Site]:
    """One engine, whose compiler is warm. Raises MissingToolError."""
    if problem := missing():
        raise MissingToolError(problem)
    # The engine asks for some, and takes any.
    os.environ |= {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
    engine = DynamodbServer(bench.fresh_folder("dynamodb"))
    engine.start()
    try:
        site = _Site(bench, engine)
        if not bench.quick:
            with bench.console.status("warming up"):
                site.driver(max(_CONNECTIONS), warm_s=0.0, seconds=_WARM_S)
        yield site
    finally:
        # It is no child of this process, and no other program.
        bench.cluster_cpu_s += cpu_s_of(pid) if (pid := engine.pid()) else 0
        engine.stop()
