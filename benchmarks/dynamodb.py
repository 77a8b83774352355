"""Single adds over HTTP over Amazon's local DynamoDB: to many counters and to few."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from random import sample
from typing import Final

from benchmarks.harness import (
    Bench,
    MissingToolError,
    counter_names,
    cpu_s_of,
    run_module,
    serving,
)
from benchmarks.loads import BASE, COUNTERS, Load, check_counted, check_counts, load
from benchmarks.results import Report, figure, median, per_s, rates
from scripts.cluster_jars import DYNAMODB
from scripts.dynamodb_server import DynamodbServer

_CONNECTIONS: Final = (64, 256)
#: An engine whose code is not compiled yet takes seconds for more.
_CONNECTIONS_QUICK: Final = (8,)
_FEW: Final = 100
_DATASET: Final = ("--retention=1d", "--slice=12h", "--write-timeout=5s")
#: A whole window; a rollup begins at latest 20 s after the first add.
_SECONDS: Final = 10.0
_WARM_S: Final = 14.0
_SAMPLED: Final = 200
#: The name follows the namespace and the bucket in the partition key of an event.
_EVENT_NAME_AT: Final = 10

_METHOD: Final = (
    "`POST .../add` with a fresh token each to `counter serve --store dynamodb`, by wrk, over"
    " Amazon's local engine, which keeps its tables in memory; all on the same machine. *Many"
    f" counters*: {COUNTERS:,}, a few hot, most rare; *few*: {_FEW}. Windows are the default ones"
    f" of 10 s, and each load lasts {_SECONDS:.0f} s, so that it has the first adds of one window,"
    " which leave marks. No rollup runs, or the one of the same process, which is the default."
    " Each load has tables of its own; the engine is the same, and its code is compiled before."
    " Afterwards every acknowledged add is one item, and the API counts of a sample what the items"
    " say. The engine is no measure of DynamoDB, whose latency and limits it does not have."
)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The measurement, and the CPU of the engine during it."""

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

    def adds(self, counters: int, rolls_up: bool, connections: int) -> _Taken:
        """Single adds over HTTP to *counters*."""
        self._made += 1
        prefix = f"bench{self._made}"
        flags = (
            *("--store=dynamodb", f"--dynamodb-endpoint={self._engine.endpoint}"),
            *("--dynamodb-region=local", f"--keyspace={prefix}"),
            *(f"--dynamodb-connections={connections}", *_DATASET),
        )
        run_module("counter", "schema", "apply", *flags)
        command = ["counter", "serve", "--port", "0", "--rollup" if rolls_up else "--no-rollup"]
        quick, seconds = self._bench.quick, self._bench.seconds
        with serving([*command, *flags], self._bench.fresh_folder("serve.log")) as server:
            # An add that waits too long may fail: it is no part of the rate.
            send = partial(load, server, "adds.lua", BASE, counters, may_fail=True)
            send = partial(send, connections=connections)
            warm = send(seconds=1.0 if quick else _WARM_S)
            before_s = cpu_s_of(self._engine.pid() or 0)
            measured = send(seconds=seconds if quick else max(_SECONDS, seconds))
            engine_cpu_s = cpu_s_of(self._engine.pid() or 0) - before_s
            server.settled_tally()
            found = asyncio.run(self._sums(f"{prefix}.default.events."))
            check_counted(sum(found.values()), (warm, measured))
            names = sample(counter_names(counters), min(counters, _SAMPLED))
            check_counts(server.counts(BASE, names, "0s"), found)
        return _Taken(measured, engine_cpu_s)

    async def _sums(self, prefix: str) -> dict[str, int]:
        """Return the sum of each counter's items in the tables that begin with *prefix*."""
        from aiobotocore.session import get_session

        found: Counter[str] = Counter()
        async with get_session().create_client(
            "dynamodb", region_name="local", endpoint_url=self._engine.endpoint
        ) as client:
            pages = client.get_paginator("scan")
            names = (await client.list_tables())["TableNames"]
            for table in (each for each in names if each.startswith(prefix)):
                async for page in pages.paginate(TableName=table, ConsistentRead=True):
                    for item in page["Items"]:
                        name = item["pk"]["B"][_EVENT_NAME_AT:].decode()
                        found[name] += int(item["d"]["N"])
        return found


def missing() -> str | None:
    """The packages to install before the engine can run here; None if all are there."""
    if find_spec("aiobotocore") is None:
        return "the Python package aiobotocore is needed: pip install '.[dynamodb]' in its checkout"
    return DYNAMODB.missing()


def run(bench: Bench) -> Report:
    """Measure at each number of connections, all in turn."""
    kinds = {
        "many counters": (COUNTERS, False),
        "many counters, which are rolled up,": (COUNTERS, True),
        "few counters, which are rolled up,": (_FEW, True),
    }
    with _site(bench) as site:
        taken = bench.alternate(
            {
                f"{what} at {connections} connections": partial(site.adds, *kind, connections)
                for connections in (_CONNECTIONS_QUICK if bench.quick else _CONNECTIONS)
                for what, kind in kinds.items()
            }
        )
    return Report(
        subject="dynamodb-adds",
        title="Single adds over DynamoDB",
        method=_METHOD,
        figures=tuple(
            figure(
                f"adds a second to {what}",
                per_s([each.load for each in some]),
                "/s",
                note=(
                    f"{rates([each.load for each in some])}, the engine"
                    f" {median([x.engine_cpu_s / x.load.seconds for x in some]):.2f}"
                ),
            )
            for what, some in taken.items()
        ),
        conditions=(
            ("Amazon's local engine", f"DynamoDB local {DYNAMODB.version}, in memory"),
            ("aiobotocore", version("aiobotocore")),
        ),
    )


@contextmanager
def _site(bench: Bench) -> Iterator[_Site]:
    """One engine with a warm compiler. Raises MissingToolError."""
    if problem := missing():
        raise MissingToolError(problem)
    # The engine asks for some, and takes any.
    os.environ |= {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "nothing"}
    engine = DynamodbServer(bench.fresh_folder("dynamodb"))
    engine.start()
    try:
        site = _Site(bench, engine)
        if not bench.quick:
            with bench.console.status("warming up"):
                site.adds(COUNTERS, False, max(_CONNECTIONS))
        yield site
    finally:
        # It is no child of this process, and no other program.
        bench.cluster_cpu_s += cpu_s_of(pid) if (pid := engine.pid()) else 0
        engine.stop()
