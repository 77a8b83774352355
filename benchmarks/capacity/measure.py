"""What the machine at hand does: loads of our own against processes of our own, and what they show.

Every add is counted once: after the loads each counter is read exactly and compared with what was
acknowledged. Embedded, the data are in a temporary directory; over Cassandra, in a namespace of
their own that is deleted afterwards.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.capacity.load import Done, Job, counter_name
from benchmarks.capacity.processes import Api, BenchError, Process, free_port, load, running
from counter.config.settings import Settings
from counter.durations import format_duration
from counter.limits import SECOND, WINDOWS_PER_RETENTION_MAX

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
_READ_AT_ONCE: Final = 1_000
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
    """One thing that was measured, and beside what it is to be read."""

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
    #: Called with the current step and its progress, 0 to 1.
    progress: Callable[[str, float], None]
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
    """Measure all there is to measure. Raises BenchError where a count is wrong or nothing was
    done, StartupError where what is to be measured does not start."""
    run.acknowledged = [0] * run.counters
    run.unknown = [0] * run.counters
    serve = ("serve", "--host=127.0.0.1", "--port=0", "--workers=1", *run.flags)
    with ExitStack() as stack:
        process = stack.enter_context(running(serve, run.folder, run.env))
        api = Api(process.line("Serving on "), run.api_key)
        stack.callback(api.close)
        base = stack.enter_context(_namespace(run, api))
        try:
            _load_all(run, process, api, base)
            _roll_up(run, process, api, base)
            run.progress("comparing counts", 0.0)
            check_counts(run, api, base)
        except BenchError as error:
            # Its log is gone with the directory.
            raise BenchError(
                f"{error}\nThe process that was measured says:\n{process.log()}"
            ) from error
    if not run.shared:
        size = sum(each.stat().st_size for each in (run.folder / "data").rglob("*"))
        run.figures.append(Figure("event_bytes", size / max(1, run.events), "B"))


@contextmanager
def _namespace(run: Run, api: Api) -> Iterator[str]:
    """The path of a namespace of our own, gone afterwards."""
    base = f"/v1/namespaces/bench-{secrets.token_hex(6)}"
    window = f"{_window_s(run.settings) if run.shared else 1}s"
    body = {"counter_type": "EVENTUAL", "rollup_window": window, "cache_ttl": "1h"}
    try:
        api.call("PUT", base, body)
        yield base
    finally:
        # Also where it is not known whether it was made.
        api.delete(base)


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


def _load_all(run: Run, process: Process, api: Api, base: str) -> None:
    """Adds in batches, single adds, gets, and the cache."""
    batches = Job("batches", api.host, api.port, base, run.counters, items=_BATCH_ITEMS)
    batches = _job(run, batches, connections=_BATCH_CONNECTIONS)
    _loaded(run, "batch_adds", batches, process, weight=_BATCH_ITEMS)
    adds = Job("adds", api.host, api.port, base, run.counters)
    figure = _loaded(run, "api_adds", _job(run, adds, connections=run.connections), process)
    if run.shared:
        run.figures.append(_node_figure(run, figure))
    # Reading them once puts them into the cache.
    _read_all(run, api, base, {})
    gets = Job("gets", api.host, api.port, base, run.counters)
    _loaded(run, "api_gets", _job(run, gets, connections=run.connections), process)
    servers = run.settings.cache_servers() if run.shared else ()
    if servers:
        _loaded(run, "cache_keys", _job(run, Job("cache", *servers[0])), None)


def _job(run: Run, job: Job, connections: int = 1) -> Job:
    return Job(
        *(job.kind, job.host, job.port, job.base, job.counters),
        connections=connections,
        seconds=run.seconds * _SHARES[job.kind],
        items=job.items,
        api_key=run.api_key,
    )


def _loaded(run: Run, what: str, job: Job, process: Process | None, weight: int = 1) -> Figure:
    """Do *job*; its figure, which is noted. Raises BenchError where a request failed."""
    before_s = None if process is None else process.cpu_s()
    idle = _Idle()
    done = load(job, lambda gone_s: run.progress(what, min(1.0, gone_s / job.seconds)))
    after_s = None if process is None else process.cpu_s()
    cores = None
    if before_s is not None and after_s is not None:
        cores = (after_s - before_s) / done.seconds
    _note(run, done)
    if done.failed:
        raise BenchError(f"{what}: {done.failed:,} requests failed: {done.first_failure}")
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


def _note(run: Run, done: Done) -> None:
    for place, number in enumerate(done.acknowledged[: run.counters]):
        run.acknowledged[place] += number
        run.unknown[place] += done.unknown[place]


def limit(cores: float | None, load_cores: float, idle: float | None) -> str:
    """What kept a rate from being higher, as far as the CPU shows."""
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
        """Idle and all ticks so far; None where the system does not tell."""
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
    """What a node of Cassandra takes, at least: copies written, shared among the nodes."""
    from counter.storage.cassandra import options_of
    from counter.storage.cassandra.connection import count_nodes

    nodes = asyncio.run(count_nodes(options_of(run.settings)))
    copies = sum(number for _, number in run.settings.placements()["default"].replication)
    return Figure(
        "node_adds" if copies == 1 else "node_copies",
        adds.value * copies / nodes,
        limited_by=f"at least: {copies} x single adds / {nodes} node{'' if nodes == 1 else 's'}",
    )


def _roll_up(run: Run, process: Process, api: Api, base: str) -> None:
    """How many counters a worker rolls up a second: while it is at work on what was added."""
    if run.shared:
        # The API process rolls nothing up: a worker of our own does, which is gone afterwards.
        port = free_port()
        arguments = ("rollup", "--host=127.0.0.1", f"--metrics-port={port}", *run.flags)
        with running(arguments, run.folder, run.env) as worker:
            worker.line("Rolling up as ")
            told = Api(f"http://127.0.0.1:{port}", None)
            try:
                _watch_rollup(run, worker, told)
            finally:
                told.close()
        return
    job = Job("batches", api.host, api.port, base, run.counters)
    items = min(_BATCH_ITEMS, run.counters)
    once = Job(*(job.kind, job.host, job.port, base, run.counters), items=items, once=True)
    _note(run, load(once, lambda _: None))
    _watch_rollup(run, process, api)


def _watch_rollup(run: Run, process: Process, api: Api) -> None:
    """Look on until nothing more is rolled up; the rate holds for the time of work alone."""
    end_s = time.monotonic() + _ROLLUP_TIMEOUT_S
    window_s = _window_s(run.settings) if run.shared else 1
    rolled, busy_s, cpu_s = 0, 0.0, 0.0
    before, at_s, used_s = api.metric(_WORKER_METRIC), time.monotonic(), process.cpu_s() or 0.0
    worked_s = at_s
    while before is not None and at_s < end_s and at_s - worked_s < _QUIET_S + 2 * window_s:
        run.progress("rollup", min(1.0, rolled / (2 * run.counters)))
        time.sleep(_POLL_S)
        now, now_s = api.metric(_WORKER_METRIC) or 0, time.monotonic()
        now_used_s = process.cpu_s() or 0.0
        if now > before or now_used_s - used_s >= _WORKS * (now_s - at_s):
            busy_s, cpu_s = busy_s + now_s - at_s, cpu_s + now_used_s - used_s
        if now > before:
            rolled, worked_s = rolled + now - before, now_s
        if rolled >= _ROLLED_MIN and now_s - worked_s > _QUIET_S:
            break
        before, at_s, used_s = now, now_s, now_used_s
    if rolled >= _ROLLED_MIN:
        cores = cpu_s / busy_s if used_s else None
        run.figures.append(
            Figure(
                "worker_rollups",
                rolled / busy_s,
                cores=cores,
                limited_by=limit(cores, 0.0, None),
            )
        )


def check_counts(run: Run, api: Api, base: str) -> None:
    """Each counter is exactly what was acknowledged; one of unknown outcome counts at most once.
    Raises BenchError."""
    wrong = []
    for place, each in enumerate(_read_all(run, api, base, {"max_staleness": "0s"})):
        least = run.acknowledged[place]
        if not least <= each["count"] <= least + run.unknown[place]:
            wrong.append(f"{each['counter']} is {each['count']} and should be {least}")
    if wrong:
        raise BenchError(f"{len(wrong):,} of {run.counters:,} counts are wrong: {wrong[0]}")


def _read_all(run: Run, api: Api, base: str, how: Mapping[str, str]) -> list[Any]:
    """The answer to a get of each counter, in order."""
    names = [counter_name(place) for place in range(run.counters)]
    found: list[Any] = []
    for first in range(0, len(names), _READ_AT_ONCE):
        body = {"counters": names[first : first + _READ_AT_ONCE], **how}
        found += api.call("POST", f"{base}/batch/get", body)["results"]
    return found
