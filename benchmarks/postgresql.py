"""Adds over PostgreSQL: beside FastAPI over the same server, and in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from benchmarks import peer_list, peer_stores, peers
from benchmarks.harness import (
    Bench,
    MissingToolError,
    Server,
    check,
    counter_names,
    run_module,
    serving,
)
from benchmarks.loads import BASE, COUNTERS, WARM_S, Load, check_counted, load
from benchmarks.peer_stores import StoreServer
from benchmarks.peers import Setting, Taken
from benchmarks.results import Report, figure, median, rates

_DATASET: Final = ("--retention=1d", "--slice=12h", "--write-timeout=2s")
#: So short that the rollup is at work during the measurement, as it is in a long run.
_WINDOWS: Final = ("--rollup-window=2s", "--accept-limit=4s")
_OF_PEER: Final = 3.0
_PROMISE: Final = "on disk before the answer; knows a retry for 1 day, the retention of events"
_BATCH: Final = 1_000
_BATCHES_AT_ONCE: Final = 4
_BATCHED_PER_S: Final = 40_000


class _Site:
    """A PostgreSQL server with the schema in it."""

    def __init__(self, bench: Bench, server: StoreServer) -> None:
        self._dsn = server.url
        self._bench = bench
        config = bench.fresh_folder("counter.toml")
        config.write_text(f'store = "postgresql"\ndsn = "{self._dsn}"\n', encoding="utf-8")
        self._flags = ("--config", str(config), *_DATASET)
        run_module("counter", "schema", "apply", *self._flags)

    @contextmanager
    def api(self) -> Iterator[Server]:
        """``counter serve`` over it at a free port; it rolls up too."""
        arguments = ["counter", "serve", "--port", "0", *self._flags, *_WINDOWS]
        with serving(arguments, self._bench.fresh_folder("serve.log")) as server:
            yield server

    def check_adds(self, server: Server, counters: int, loads: Sequence[Load]) -> None:
        """What *loads* added is one event each, nothing else is; and the API counts what the
        events say."""
        server.settled_tally()
        events = int(self._query("SELECT sum(delta)::bigint FROM counter.events"))
        counted = sum(server.counts(BASE, counter_names(counters), "0s").values())
        check(counted == events, f"{counted} counted of {events} events")
        check_counted(events, loads)

    def _query(self, sql: str) -> Any:
        """Return the first value of PostgreSQL's response to *sql*."""
        import asyncpg

        async def ask() -> Any:
            connection = await asyncpg.connect(self._dsn)
            try:
                return await connection.fetchval(sql)
            finally:
                await connection.close()

        return asyncio.run(ask())


def run(bench: Bench) -> Report:
    """Single adds beside FastAPI over a PostgreSQL of the same settings, and batches."""
    require()
    every = peer_list.postgres(bench)
    targets = {each.name: _OF_PEER for each in every}
    compared = [
        peers.compare(bench, Setting(counters, 64), every, targets, _single, _PROMISE)
        for counters in ((1,) if bench.quick else (1, COUNTERS))
    ]
    (batched,) = bench.alternate({f"batches of {_BATCH:,}": partial(_batches, bench)}).values()
    loads = [each.load for each in batched]
    return Report(
        subject="postgresql-adds",
        title="Adds over PostgreSQL",
        method=(
            "`POST .../add` with a fresh token each to `counter serve --store postgresql`, one"
            " process, which rolls up meanwhile in windows of 2 s, and to FastAPI over PostgreSQL:"
            " the token's row and the counter's in one statement, over a pool of 16. Each has a"
            " server of its own of the same settings, new for every round, and wrk runs on the"
            f" same machine. Batches of {_BATCH:,} come over {_BATCHES_AT_ONCE} connections."
            " Afterwards every acknowledged add is an event, and what is counted is what the"
            " events say."
        ),
        figures=(
            *(each for some in compared for each in peers.figures(some)),
            figure(
                f"adds a second by the clock, batches of {_BATCH:,}",
                [each.per_s for each in loads],
                "/s",
                at_least=_BATCHED_PER_S,
                note=(
                    f"{rates(loads)}; {median([x.per_cpu_s for x in batched]):,.0f} a CPU second"
                    " with PostgreSQL's"
                ),
            ),
        ),
        conditions=conditions(),
    )


def require() -> None:
    """Raise MissingToolError if there is no PostgreSQL."""
    if peer_stores.postgres_version() is None:
        raise MissingToolError("there is no `postgres` (apt-get install postgresql)")


def conditions() -> tuple[tuple[str, str], ...]:
    """The versions under which adds over PostgreSQL are measured."""
    return (
        ("PostgreSQL", f"{peer_stores.postgres_version()}, Debian's defaults, fsync on"),
        ("asyncpg", version("asyncpg")),
    )


def _single(bench: Bench, setting: Setting) -> Taken:
    return taken(bench, setting.counters, setting.sender)


def _batches(bench: Bench) -> Taken:
    def sender(server: Server) -> Callable[..., Load]:
        send = partial(load, server, "batches.lua", BASE, COUNTERS, _BATCH, weight=_BATCH)
        return partial(send, connections=_BATCHES_AT_ONCE)

    return taken(bench, COUNTERS, sender)


def taken(bench: Bench, counters: int, sender: Callable[[Server], Callable[..., Load]]) -> Taken:
    """Load a server of its own over a PostgreSQL of its own with what *sender* makes."""
    with peer_stores.postgres(bench) as store:
        site = _Site(bench, store)
        with site.api() as server:
            send = sender(server)
            # A process that has not measured its store yet may refuse many requests at once.
            warm = send(seconds=1.0 if bench.quick else WARM_S, may_fail=True)
            before_s = store.cpu_s()
            measured = send(seconds=bench.seconds)
            store_cpu_s = store.cpu_s() - before_s
            site.check_adds(server, counters, [warm, measured])
            return Taken(measured, store_cpu_s)
