"""What the machine at hand does: loads of our own against processes of our own, and what they show.

Every add is counted once: after the loads each counter is read exactly and compared with what was
acknowledged. Embedded, the data are in a temporary directory; over Cassandra, in a namespace of
their own that is deleted afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import httpx

from benchmarks.capacity.load import Done, Job
from benchmarks.cluster import Worker
from benchmarks.harness import (
    BenchError,
    Child,
    Server,
    check,
    counter_names,
    python_module,
    serving,
)
from counter.config.settings import Settings
from counter.limits import SECOND, WINDOWS_PER_RETENTION_MAX
from counter.quantities import format_duration

COUNTERS: Final = 10_000
#: Windows that may be chosen, the shortest first: retention must hold 100,000 of them at most.
_WINDOWS_S: Final = (1, 2, 5, 10, 15, 20, 30, 60, 300, 600, 1_800, 3_600)
#: What an embedded service runs with here: so short that windows are rolled up while it is loaded.
EMBEDDED: Final = (
    *("--retention=1h", "--slice=10m", "--rollup-window=1s", "--accept-limit=1s"),
    "--write-timeout=250ms",
)
#: The shares of the time that a load may take.
_SHARES: Final[Mapping[str, float]] = {"batches": 0.2, "adds": 0.4, "gets": 0.25, "cache": 0.15}
_BATCH_ITEMS: Final = 1_000
_BATCH_CONNECTIONS: Final = 4
_BUSY: Final = 0.9
_POLL_S: Final = 0.05
#: A worker that uses so much of a core is working, even if it has not reported it yet.
_WORKS: Final = 0.4
_ROLLUP_TIMEOUT_S: Final = 60.0
#: A rollup that nothing more comes of is over.
_QUIET_S: Final = 2.0
_ROLLED_MIN: Final = 1_000
_WORKER_METRIC: Final = "counter_rollup_counters_total"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement, and the conditions to read it with."""

    what: str
    value: float
    unit: str = "/s"
    p50_ms: float | None = None
    p99_ms: float | None = None
    #: Cores that the measured process and the load used; None if unknown.
    cores: float | None = None
    load_cores: float | None = None
    limited_by: str = ""


@dataclass(slots=True)
class Run:
    """One measurement: its method, its reports and its result."""

    settings: Settings
    folder: Path
    env: Mapping[str, str]
    flags: Sequence[str]
    seconds: float
    connections: int
    counters: int
    api_key: str | None
    #: Called with the name of the current step.
    progress: Callable[[str], None]
    figures: list[Figure] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)

    @property
    def shared(self) -> bool:
        return self.settings.store == "cassandra"

    @property
    def events(self) -> int:
        """The adds that were acknowledged."""
        return sum(self.acknowledged)


def measure(run: Run) -> None:
    """Measure all there is to measure. Raises BenchError if a count is wrong, nothing was done, or
    the process does not start."""
    run.acknowledged = [0] * run.counters
    run.unknown = [0] * run.counters
    arguments = ("counter", "serve", "--host=127.0.0.1", "--port=0", "--workers=1", *run.flags)
    log = run.folder / "serve.log"
    with (
        serving(arguments, log, cwd=run.folder, env=run.env, api_key=run.api_key) as server,
        _namespace(run, server) as base,
    ):
        try:
            _load_all(run, server, base)
            _roll_up(run, server)
            run.progress("comparing counts")
            check_counts(run, server, base)
        except BenchError as error:
            # Its log is gone with the directory.
            raise BenchError(f"{error}\nThe measured process says:\n{server.log()}") from error
    if not run.shared:
        size = sum(each.stat().st_size for each in (run.folder / "data").rglob("*"))
        run.figures.append(Figure("event_bytes", size / max(1, run.events), "B"))


@contextmanager
def _namespace(run: Run, server: Server) -> Iterator[str]:
    """The path of a namespace of our own, gone afterwards."""
    base = f"/v1/namespaces/bench-{secrets.token_hex(6)}"
    window = f"{_window_s(run.settings) if run.shared else 1}s"
    try:
        server.create(base, counter_type="EVENTUAL", rollup_window=window, cache_ttl="1h")
        yield base
    finally:
        # Also if it is not known whether it was created.
        answer = server.client.delete(base)
        check(answer.is_success or answer.status_code == 404, f"{base} stays: {answer.text[:300]}")


def _window_s(settings: Settings) -> int:
    """The shortest window that the dataset allows."""
    for each in _WINDOWS_S:
        fits = settings.retention // (each * SECOND) <= WINDOWS_PER_RETENTION_MAX
        if fits and settings.slice % (each * SECOND) == 0:
            return each
    raise BenchError(
        f"no rollup window fits a slice of {format_duration(settings.slice)} and a retention of"
        f" {format_duration(settings.retention)}"
    )


def _load_all(run: Run, server: Server, base: str) -> None:
    """Adds in batches, single adds, gets, and the cache."""
    address = httpx.URL(server.url)
    job = Job("batches", address.host, address.port or 80, base, run.counters, api_key=run.api_key)
    items = min(_BATCH_ITEMS, run.counters)
    batches = replace(job, connections=_BATCH_CONNECTIONS, items=items)
    _loaded(run, "batch_adds", batches, server, weight=items)
    adds = replace(job, kind="adds", connections=run.connections)
    figure = _loaded(run, "api_adds", adds, server)
    if run.shared:
        run.figures.append(_node_figure(run, figure))
    # Reading them once puts them into the cache.
    server.counts(base, counter_names(run.counters), None)
    _loaded(run, "api_gets", replace(adds, kind="gets"), server)
    servers = run.settings.cache_servers() if run.shared else ()
    if servers:
        _loaded(run, "cache_keys", Job("cache", *servers[0]), None)
    if not run.shared:
        # Rolled up during the measurement.
        once = replace(job, items=items, once=True)
        _note(run, _done(once))


def _loaded(run: Run, what: str, job: Job, server: Server | None, weight: int = 1) -> Figure:
    """Do *job*; its figure, which is noted. Raises BenchError if a request failed."""
    run.progress(what)
    before_s = 0.0 if server is None else server.cpu_s()
    idle = _Idle()
    done = _done(replace(job, seconds=run.seconds * _SHARES[job.kind]))
    cores = None if server is None else (server.cpu_s() - before_s) / done.seconds
    _note(run, done)
    check(not done.failed, f"{what}: {done.failed:,} requests failed: {done.first_failure}")
    load_cores = done.cpu_s / done.seconds
    figure = Figure(
        what,
        done.requests * weight / done.seconds,
        p50_ms=done.p50_ms,
        p99_ms=done.p99_ms,
        cores=cores,
        load_cores=load_cores,
        limited_by=limit(cores, load_cores, idle.share()),
    )
    run.figures.append(figure)
    return figure


def _done(job: Job) -> Done:
    """Do *job* in a process of its own. Raises BenchError if it did no work."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = Child(python_module("benchmarks.capacity.load"), **pipes)
    try:
        out, _ = child.process.communicate(json.dumps(asdict(job)))
    finally:
        child.kill()
    check(child.process.returncode == 0, f"the load ended with {child.process.returncode}")
    done = Done(**json.loads(out))
    check(done.requests > 0, f"not one of the {job.kind} succeeded: {done.first_failure}")
    return done


def _note(run: Run, done: Done) -> None:
    for place, number in enumerate(done.acknowledged[: run.counters]):
        run.acknowledged[place] += number
        run.unknown[place] += done.unknown[place]


def limit(cores: float | None, load_cores: float, idle: float | None) -> str:
    """The resource that limited a rate, as far as the CPU shows."""
    if load_cores >= _BUSY:
        return "the load: at least"
    if cores is not None and cores >= _BUSY:
        return "the process"
    all_cores = os.cpu_count() or 1
    if idle is not None and idle <= 1 - _BUSY:
        others = (1 - idle) * all_cores - (cores or 0.0) - load_cores
        return f"all {all_cores} cores, {max(0.0, others):.1f} of them busy with others"
    return "what it waits for"


class _Idle:
    """How much of the machine's cores was idle since this was made."""

    def __init__(self) -> None:
        self._began = self._times()

    def _times(self) -> tuple[int, int] | None:
        """Idle and all ticks so far; None if the system does not show them."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
        except OSError:
            return None
        ticks = [int(each) for each in line.split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    def share(self) -> float | None:
        """From 0 to 1."""
        now = self._times()
        if now is None or self._began is None or now[1] <= self._began[1]:
            return None
        return (now[0] - self._began[0]) / (now[1] - self._began[1])


def _node_figure(run: Run, adds: Figure) -> Figure:
    """The least bytes of a node of Cassandra: copies written, shared among the nodes."""
    from counter.storage.cassandra.connection import CassandraConnection
    from counter.storage.cassandra.settings import CassandraSettings

    settings = cast(CassandraSettings, run.settings)

    async def count_nodes() -> int:
        connection = CassandraConnection(settings.options())
        await connection.open()
        try:
            return sum(connection.nodes_by_datacenter().values())
        finally:
            await connection.close()

    nodes = asyncio.run(count_nodes())
    copies = sum(number for _, number in settings.placements()["default"].replication)
    return Figure(
        "node_adds" if copies == 1 else "node_copies",
        adds.value * copies / nodes,
        limited_by=f"at least: {copies} x single adds / {nodes} node{'' if nodes == 1 else 's'}",
    )


def _roll_up(run: Run, server: Server) -> None:
    """The counters that a worker rolls up a second, while it works."""
    run.progress("rollup")
    if not run.shared:
        _watch_rollup(run, server)
        return
    # The API process rolls nothing up: a worker of our own does, which is gone afterwards.
    worker = Worker(run.flags, run.folder / "rollup.log", cwd=run.folder, env=run.env)
    try:
        _watch_rollup(run, worker)
        worker.stop()
    finally:
        worker.kill()


def _watch_rollup(run: Run, process: Server) -> None:
    """Look on until nothing more is rolled up; the rate holds for the time of work alone."""
    end_s = time.monotonic() + _ROLLUP_TIMEOUT_S
    window_s = _window_s(run.settings) if run.shared else 1
    rolled, busy_s, cpu_s = 0, 0.0, 0.0
    before, at_s, used_s = _rolled_up(process), time.monotonic(), process.cpu_s()
    worked_s = at_s
    while at_s < end_s and at_s - worked_s < _QUIET_S + 2 * window_s:
        time.sleep(_POLL_S)
        now, now_s, now_used_s = _rolled_up(process), time.monotonic(), process.cpu_s()
        if now > before or now_used_s - used_s >= _WORKS * (now_s - at_s):
            busy_s, cpu_s = busy_s + now_s - at_s, cpu_s + now_used_s - used_s
        if now > before:
            rolled, worked_s = rolled + now - before, now_s
        if rolled >= _ROLLED_MIN and now_s - worked_s > _QUIET_S:
            break
        before, at_s, used_s = now, now_s, now_used_s
    if rolled >= _ROLLED_MIN:
        cores = cpu_s / busy_s
        limited_by = limit(cores, 0.0, None)
        run.figures.append(
            Figure("worker_rollups", rolled / busy_s, cores=cores, limited_by=limited_by)
        )


def _rolled_up(process: Server) -> int:
    return int(sum(process.metrics(_WORKER_METRIC).values()))


def check_counts(run: Run, server: Server, base: str) -> None:
    """Each counter is exactly what was acknowledged; one of unknown outcome counts at most once.
    Raises BenchError."""
    found = server.counts(base, counter_names(run.counters), "0s")
    wrong = [
        f"{name} is {found[name]} and should be {least}"
        for name, least, more in zip(found, run.acknowledged, run.unknown, strict=True)
        if not least <= found[name] <= least + more
    ]
    check(not wrong, f"{len(wrong):,} of {run.counters:,} counts are wrong: {''.join(wrong[:1])}")
