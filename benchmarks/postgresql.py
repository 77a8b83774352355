"""Adds over PostgreSQL: beside peers over the same server, in batches, by two processes, and while
appends stall behind the fence of a worker."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from benchmarks import half_load, peer_list, peer_stores, peers, shares
from benchmarks.cluster_workers import processes_of
from benchmarks.half_load import Halved
from benchmarks.harness import (
    ROOT,
    Bench,
    Load,
    MissingToolError,
    Server,
    check,
    counter_names,
    cpu_s_of,
    load,
    python_module,
    serving,
)
from benchmarks.pacing import at_pace
from benchmarks.peer_stores import StoreServer
from benchmarks.peers import Setting, Taken
from benchmarks.results import Figure, Report, by_clock, by_cpu, median, ratio, ratios
from benchmarks.single_adds import BASE, COUNTERS, WARM_S

_DATASET: Final = ("--retention=1d", "--slice=12h", "--write-timeout=2s")
#: So short that the rollup is at work during the measurement, as it is in a long run.
_WINDOWS: Final = ("--rollup-window=2s", "--accept-limit=4s")
_CONNECTIONS: Final = 64
_TARGETS: Final = {"postgres": 3.0, "postgres-transaction": 5.0}
_PROMISE: Final = "on disk before the answer; knows a retry for 1 day, the retention of events"
_BATCH: Final = 1_000
_BATCHES_AT_ONCE: Final = 4
_BATCHED_PER_S: Final = 40_000
_HALF_MS: Final = 20.0
#: Of a core, each API process: the load and PostgreSQL need the rest of two.
_SHARE: Final = 0.2
_OF_ONE: Final = 1.7
_FENCE_S: Final = 0.25
_STALL_S: Final = 0.3
_STALLED: Final = 500
_OF_UNFENCED: Final = 1.2
_PACED_S: Final = 20.0
#: Every so many appends one holds its lock and its clock for a while before it writes.
_STALLING: Final = """\
CREATE SEQUENCE IF NOT EXISTS {s}.stalls CACHE 1;
CREATE OR REPLACE FUNCTION {s}.clock_us() RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    now_us bigint := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
BEGIN
    IF (SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
        AND nextval('{s}.stalls') % {stalled} = 0
    THEN
        PERFORM pg_sleep({stall_s});
    END IF;
    RETURN now_us;
END $$
"""


class _Site:
    """A PostgreSQL server with the schema in it."""

    def __init__(self, bench: Bench, server: StoreServer, flags: Sequence[str]) -> None:
        self.server = server
        self.dsn = f"postgresql://postgres@127.0.0.1:{server.port}/postgres"
        self._bench = bench
        config = bench.fresh_folder("counter.toml")
        config.write_text(f'store = "postgresql"\ndsn = "{self.dsn}"\n', encoding="utf-8")
        self._flags = ("--config", str(config), *_DATASET, *flags)
        schema = python_module("counter", "schema", "apply", "--config", str(config), *_DATASET)
        done = subprocess.run(schema, cwd=ROOT, capture_output=True, text=True, check=False)
        check(done.returncode == 0, f"the schema cannot be applied: {done.stdout}{done.stderr}")

    @contextmanager
    def api(self, *flags: str) -> Iterator[Server]:
        """``counter serve`` over it at a free port; it rolls up too."""
        arguments = ["counter", "serve", "--port", "0", *self._flags, *flags]
        with serving(arguments, self._bench.fresh_folder("serve.log")) as server:
            yield server

    def _events(self) -> int:
        return int(self.query("SELECT sum(delta)::bigint FROM counter.events"))

    def query(self, sql: str) -> Any:
        """Return the first value of what PostgreSQL answers to *sql*."""
        import asyncpg

        async def ask() -> Any:
            connection = await asyncpg.connect(self.dsn)
            try:
                return await connection.fetchval(sql)
            finally:
                await connection.close()

        return asyncio.run(ask())

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Pass the fence, as a worker that closes windows does, four times a second."""
        from counter.storage.postgresql.database import Database, PostgresqlOptions
        from counter.storage.postgresql.fence import pass_fence

        ended = threading.Event()
        passed: list[int] = []

        async def fence() -> None:
            database = Database(PostgresqlOptions(self.dsn))
            await database.open()
            while not ended.is_set():
                passed.append(await pass_fence(database))
                await asyncio.sleep(_FENCE_S)
            await database.close()

        thread = threading.Thread(target=asyncio.run, args=(fence(),))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        check(len(passed) > 1, "no fence was passed")

    def check_adds(self, server: Server, counters: int, loads: Sequence[Load]) -> None:
        """Every acknowledged add is one event, one without an answer at most one, nothing else is;
        and the API counts what the events say. An append that stalls may commit meanwhile, so the
        events are summed before and after the counts are read."""
        server.settled_tally()
        acknowledged = sum(each.requests * each.weight for each in loads)
        sent = sum(each.sent * each.weight for each in loads)
        before = self._events()
        counted = sum(server.counts(BASE, counter_names(counters), "0s").values())
        events = self._events()
        check(before <= counted <= events, f"{counted} counted of {before} to {events} events")
        check(
            acknowledged <= events <= sent,
            f"{events} events, {acknowledged} acknowledged, {sent} sent",
        )


@contextmanager
def _site(bench: Bench, *flags: str) -> Iterator[_Site]:
    if peer_stores.postgres_version() is None:
        raise MissingToolError("there is no `postgres` (apt-get install postgresql)")
    with peer_stores.postgres(bench) as server:
        yield _Site(bench, server, flags)


def adds(bench: Bench) -> Report:
    """Single adds beside FastAPI over a PostgreSQL of the same settings, and batches."""
    every = peer_list.postgres(bench)
    targets = {each.name: _TARGETS[each.app] for each in every}
    compared = [
        peers.compare(bench, Setting(counters, _CONNECTIONS), every, targets, _single, _PROMISE)
        for counters in ((1,) if bench.quick else (1, COUNTERS))
    ]
    (batched,) = bench.alternate({f"batches of {_BATCH:,}": partial(_batches, bench)}).values()
    rates = [each.load.per_s for each in batched]
    return Report(
        subject="postgresql-adds",
        title="Adds over PostgreSQL",
        method=(
            "`POST .../add` with a fresh token each to `counter serve --store postgresql`, one"
            " process, which rolls up meanwhile in windows of 2 s, and to FastAPI over PostgreSQL:"
            " the token's row and the counter's in one statement, or in two between BEGIN and"
            " COMMIT, over a pool of 16. Each has a server of its own of the same settings, new for"
            f" every round, and wrk runs on the same machine. Batches of {_BATCH:,} come over"
            f" {_BATCHES_AT_ONCE} connections. Afterwards every acknowledged add is an event, and"
            " what is counted is what the events say."
        ),
        figures=(
            *(figure for each in compared for figure in peers.figures(each)),
            Figure(
                f"adds a second by the clock, batches of {_BATCH:,}",
                median(rates),
                "/s",
                at_least=_BATCHED_PER_S,
                rounds=tuple(rates),
                note=(
                    f"p99 of a batch {median([x.load.p99_ms for x in batched]):.0f} ms;"
                    f" {median([x.load.per_cpu_s for x in batched]):,.0f} a CPU second of the"
                    f" server, {median([x.per_cpu_s for x in batched]):,.0f} with PostgreSQL's"
                ),
            ),
        ),
        conditions=_conditions(),
    )


def _single(bench: Bench, setting: Setting) -> Taken:
    with _site(bench, *_WINDOWS) as site, site.api() as server:
        warm = peers.warm_up(bench, setting, server, WARM_S)
        before_s = site.server.cpu_s()
        measured = peers.load_adds(setting, server, bench.seconds)
        store_cpu_s = site.server.cpu_s() - before_s
        site.check_adds(server, setting.counters, [*warm, measured])
        return Taken(measured, store_cpu_s)


def _batches(bench: Bench) -> Taken:
    send = partial(_send, connections=_BATCHES_AT_ONCE, weight=_BATCH)
    with _site(bench, *_WINDOWS) as site, site.api() as server:
        warm = send(server, 1.0 if bench.quick else WARM_S, "batches.lua", _BATCH)
        before_s = site.server.cpu_s()
        measured = send(server, bench.seconds, "batches.lua", _BATCH)
        store_cpu_s = site.server.cpu_s() - before_s
        site.check_adds(server, COUNTERS, [warm, measured])
        return Taken(measured, store_cpu_s)


def _send(
    server: Server,
    seconds: float,
    script: str,
    *arguments: object,
    connections: int = _CONNECTIONS,
    weight: int = 1,
) -> Load:
    return load(
        server, script, BASE, COUNTERS, *arguments,
        connections=connections, seconds=seconds, weight=weight,
    )  # fmt: skip


def half(bench: Bench) -> Report:
    """Latency at half of the peak."""

    def measured() -> Halved:
        loads: list[Load] = []
        with _site(bench) as site, site.api() as server:
            if not bench.quick:
                loads.append(_send(server, WARM_S, "adds.lua"))
            found = half_load.halved(bench, server, BASE, loads)
            site.check_adds(server, COUNTERS, loads)
        return found

    (rounds,) = bench.alternate({"PostgreSQL": measured}).values()
    return Report(
        subject="postgresql-half-load",
        title="Adds at half of the peak load over PostgreSQL",
        method=(
            "Single adds over HTTP to `counter serve --store postgresql`, on the same machine as"
            f" PostgreSQL.{half_load.method()}"
        ),
        figures=(half_load.figure("over PostgreSQL", rounds, _HALF_MS),),
        conditions=_conditions(),
    )


def workers(bench: Bench) -> Report:
    """Two API processes behind one port with one, each held to a share of a core."""
    problem = shares.missing()
    if problem:
        bench.say(f"nothing is held to a share: {problem}")

    def measured(number: int) -> Load:
        with _site(bench) as site, site.api("--workers", str(number)) as server:
            warm = _send(server, 1.0 if bench.quick else WARM_S, "adds.lua")
            processes = processes_of(server, number)
            with nullcontext() if problem else shares.capped(processes, _SHARE):
                before_s = sum(map(cpu_s_of, processes))
                found = _send(server, bench.seconds, "adds.lua")
                cpu_s = sum(map(cpu_s_of, processes)) - before_s
            site.check_adds(server, COUNTERS, [warm, found])
            return replace(found, cpu_s=cpu_s)

    one, two = bench.alternate({f"{n} processes": partial(measured, n) for n in (1, 2)}).values()
    return Report(
        subject="postgresql-workers",
        title="Two API processes over PostgreSQL",
        method=(
            f"Single adds to {COUNTERS:,} counters over {_CONNECTIONS} connections to `counter"
            f" serve --workers 1` and `--workers 2`; each process may use {_SHARE:g} of a core and"
            " no more (a quota of its control group), so that the second one finds room."
        ),
        figures=(
            ratio(
                "adds a second with --workers 2, of --workers 1; each process "
                + ("not held" if problem else f"held to {_SHARE:g} of a core"),
                by_clock(two, one),
                at_least=None if problem else _OF_ONE,
                note=(
                    f"{median([x.per_s for x in two]):,.0f}/s against"
                    f" {median([x.per_s for x in one]):,.0f}/s; a CPU second of the processes"
                    f" {median(by_cpu(two, one)):.2f}"
                ),
            ),
        ),
        conditions=_conditions(),
    )


def fence(bench: Bench) -> Report:
    """Latency of adds while some appends stall, with a worker that waits for these and without."""
    seconds = 2.0 if bench.quick else max(_PACED_S, bench.seconds)
    rates: list[float] = []

    def measured(is_fenced: bool) -> Load:
        with _site(bench) as site, site.api() as server:
            loads = [_send(server, 1.0 if bench.quick else WARM_S, "adds.lua")]
            if not rates:
                loads.append(_send(server, bench.seconds, "adds.lua"))
                rates.append(loads[-1].per_s / 2)
            stalling = _STALLING.format(s="counter", stalled=_STALLED, stall_s=_STALL_S)
            for statement in stalling.split(";\n", 1):
                site.query(statement)

            def paced() -> Load:
                loads.append(_send(server, seconds, "adds.lua", rates[0]))
                return loads[-1]

            with site.fenced() if is_fenced else nullcontext():
                found = at_pace(bench, "adds while appends stall", rates[0], paced)
            stalls = site.query("SELECT last_value FROM counter.stalls") // _STALLED
            bench.say(f"{stalls} appends stalled")
            check(bench.quick or stalls > 0, "no append stalled")
            site.check_adds(server, COUNTERS, loads)
        return found

    fenced, unfenced = bench.alternate(
        {"fenced": partial(measured, True), "without a fence": partial(measured, False)}
    ).values()
    found = ratios([x.p99_ms for x in fenced], [x.p99_ms for x in unfenced])
    return Report(
        subject="postgresql-fence",
        title="Adds over PostgreSQL while appends stall",
        method=(
            f"One call of `append` in {_STALLED} sleeps {_STALL_S:g} s between its clock and its"
            f" rows. {_CONNECTIONS} connections send half of the peak, each add at its turn, once"
            f" while a worker passes the fence every {_FENCE_S:g} s, and once without. wrk adds to"
            " its latencies what it could not send in time; adds that share a stalled call are so"
            " few that they lie behind the 99th percentile."
        ),
        figures=(
            Figure(
                "p99 of adds while a worker fences, of without a fence",
                median(found),
                at_most=_OF_UNFENCED,
                rounds=tuple(found),
                note=(
                    f"{median([x.p99_ms for x in fenced]):.1f} ms against"
                    f" {median([x.p99_ms for x in unfenced]):.1f} ms at {rates[0]:,.0f}/s"
                ),
            ),
        ),
        conditions=_conditions(),
    )


def _conditions() -> tuple[tuple[str, str], ...]:
    return (
        ("PostgreSQL", f"{peer_stores.postgres_version()}, Debian's defaults, fsync on"),
        ("asyncpg", version("asyncpg")),
    )
