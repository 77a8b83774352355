"""Figures and their conditions, and where they are stored."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from benchmarks.harness import ROOT, Bench
from benchmarks.loads import Load

RESULTS: Final = ROOT / "benchmarks" / "results.json"
_LIBRARIES: Final = ("uvicorn", "uvloop", "httptools", "pydantic", "starlette")
_FSYNCS: Final = 50
_PAGE_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value with its bound, if it has one: at least it, or at most."""

    what: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    #: Its parts: absolute values, spread, conditions.
    note: str = ""
    #: The value of each round.
    rounds: tuple[float, ...] = ()

    def meets(self, value: float) -> bool:
        """Whether *value* keeps the bound."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is None or value <= self.at_most

    @property
    def verdict(self) -> str:
        """Whether the target was met, and in how many rounds if they do not agree."""
        if not self.target:
            return ""
        met = self.meets(self.value)
        agree = sum(self.meets(each) == met for each in self.rounds)
        text = "met" if met else "not met"
        return text if agree == len(self.rounds) else f"{text} in {agree} of {len(self.rounds)}"

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"at least {quantity(self.at_least, self.unit)}"
        if self.at_most is not None:
            return f"at most {quantity(self.at_most, self.unit)}"
        return ""


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one subject."""

    subject: str
    title: str
    method: str
    figures: tuple[Figure, ...]
    seconds: float = 0.0
    command: str = ""
    measured_at: str = ""
    #: Their conditions; a subject over another store than SQLite has its own.
    conditions: tuple[tuple[str, str], ...] = ()


def quantity(value: float, unit: str) -> str:
    """*value* with as many digits as mean something."""
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """The ratio of each round: both sides of it saw the machine in much the same state."""
    return [a / b for a, b in zip(over, under, strict=True)]


def figure(
    what: str,
    rounds: Sequence[float],
    unit: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Figure:
    """The median of all *rounds*."""
    return Figure(what, median(rounds), unit, at_least, at_most, note, tuple(rounds))


def per_s(loads: Sequence[Load]) -> list[float]:
    """The rate of each of *loads* by the clock."""
    return [each.per_s for each in loads]


def per_cpu_s(loads: Sequence[Load]) -> list[float]:
    """The rate of each of *loads* by the server's CPU."""
    return [each.per_cpu_s for each in loads]


def p99_ms(loads: Sequence[Load]) -> list[float]:
    return [each.p99_ms for each in loads]


def rates(loads: Sequence[Load]) -> str:
    """The medians of *loads*, for a note."""
    failed = sum(each.failed for each in loads)
    return f"{median(per_s(loads)):,.0f}/s; {_costs(loads)}" + (
        f"; {failed:,} failed" if failed else ""
    )


def rate(what: str, loads: Sequence[Load], *, at_least: float | None = None) -> Figure:
    """How many a second *loads* have; beside it latency and CPU."""
    return figure(what, per_s(loads), "/s", at_least=at_least, note=_costs(loads))


def _costs(loads: Sequence[Load]) -> str:
    return (
        f"p50 {quantity(median([x.p50_ms for x in loads]), 'ms')},"
        f" p99 {quantity(median(p99_ms(loads)), 'ms')};"
        f" {median(per_cpu_s(loads)):,.0f} a CPU second of the server,"
        f" {median([x.cpu_s / x.seconds for x in loads]):.2f} cores"
    )


def table(reports: Sequence[Report]) -> Table:
    """All figures with targets, for a terminal."""
    shown = Table(title="Benchmarks", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("what")
    shown.add_column("measured", justify="right", no_wrap=True)
    shown.add_column("target", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for report in reports:
        shown.add_row(f"[bold]{report.subject}")
        for figure in report.figures:
            style = "green" if figure.meets(figure.value) else "bold red"
            value = quantity(figure.value, figure.unit)
            verdict = Text(figure.verdict, style)
            shown.add_row(f"  {figure.what}", value, figure.target, verdict)
        shown.add_section()
    return shown


class Stamp:
    """Begun before a subject is measured: its duration, and the load of other processes."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._begin_s = time.monotonic()
        self._others_s = _others_cpu_s() - bench.cluster_cpu_s
        self._load = os.getloadavg()[0]

    def on(self, report: Report) -> Report:
        """*report* with the conditions of the measurement."""
        seconds = time.monotonic() - self._begin_s
        others_s = _others_cpu_s() - self._bench.cluster_cpu_s - self._others_s
        return replace(
            report,
            seconds=seconds,
            command=f"./scripts/bench {report.subject}",
            measured_at=datetime.now(UTC).isoformat(timespec="minutes").replace("+00:00", "Z"),
            conditions=(
                ("other processes meanwhile", f"{max(0.0, others_s) / seconds:.2f} cores busy"),
                ("load before", f"{self._load:.1f}"),
                *_machine(),
                *(report.conditions or _disk(self._bench.folder)),
            ),
        )


def store(reports: Sequence[Report], order: Sequence[str]) -> None:
    """Put *reports* in place of their subjects' earlier ones."""
    kept = {report.subject: report for report in stored()}
    kept |= {report.subject: report for report in reports}
    body = [asdict(kept[name]) for name in order if name in kept]
    RESULTS.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def stored() -> list[Report]:
    """The reports of the latest runs, a subject each."""
    if not RESULTS.exists():
        return []
    found: list[Report] = []
    for body in json.loads(RESULTS.read_text(encoding="utf-8")):
        body["figures"] = tuple(
            Figure(**{**each, "rounds": tuple(each["rounds"])}) for each in body["figures"]
        )
        body["conditions"] = tuple((name, value) for name, value in body["conditions"])
        found.append(Report(**body))
    return found


def _machine() -> tuple[tuple[str, str], ...]:
    """The conditions of all figures: machine and versions."""
    return (
        ("machine", f"{_processor()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB"),
        ("system", f"{platform.system()} {platform.release()}"),
        ("Python", platform.python_version()),
        *((name, version(name)) for name in _LIBRARIES),
        ("wrk", _wrk_version()),
    )


def _disk(folder: Path) -> tuple[tuple[str, str], ...]:
    """The conditions of those of SQLite: the sync time of the disk."""
    return (
        ("SQLite", sqlite3.sqlite_version),
        ("durability", "WAL, synchronous=FULL: an add is answered once its commit is on disk"),
        ("a retry is known", "as long as events are retained, by default 7 days"),
        ("fsync of 4 KiB", f"{_fsync_ms(folder):.2f} ms (median of {_FSYNCS}) on {_kind(folder)}"),
    )


def _wrk_version() -> str:
    wrk = shutil.which("wrk")
    if wrk is None:
        return "none"
    # It prints its version and exits with an error code.
    return subprocess.run([wrk, "-v"], capture_output=True, text=True, check=False).stdout.split()[
        1
    ]


def _others_cpu_s() -> float:
    """The CPU time that this run and its servers did not use, of all that was used."""
    with Path("/proc/stat").open(encoding="ascii") as lines:
        user, nice, system, _idle, _wait, *rest = map(int, lines.readline().split()[1:9])
    used_s = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return used_s - sum(os.times()[:4])


def _fsync_ms(folder: Path) -> float:
    taken: list[float] = []
    path = folder / "fsync"
    with path.open("wb", buffering=0) as file:
        for _ in range(_FSYNCS):
            file.write(bytes(_PAGE_BYTES))
            begin_s = time.perf_counter()
            os.fsync(file.fileno())
            taken.append((time.perf_counter() - begin_s) * 1_000)
    path.unlink()
    return median(taken)


def _kind(folder: Path) -> str:
    """The type of the file system that holds *folder*."""
    best = ("", "an unknown file system")
    mounts = Path("/proc/mounts")
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else ():
        _, place, kind, *_ = line.split()
        if folder.resolve().is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


def _processor() -> str:
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
