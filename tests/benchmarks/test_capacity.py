"""``scripts/capacity`` measures real processes, counts exactly, and leaves nothing behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.capacity import measure
from benchmarks.capacity.measure import Run, check_counts
from benchmarks.harness import BenchError, Server
from counter.config.settings import Settings
from tests.support.server import ROOT
from tests.support.waiting import eventually

Json = dict[str, Any]
LITTLE = ("--counters=2000",)


def start(home: Path, *flags: str) -> "subprocess.Popen[str]":
    """``scripts/capacity`` in *home*."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.capacity", *flags],
        cwd=home,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measured(home: Path, *flags: str) -> Json:
    """The report of a short run."""
    run = start(home, "--seconds=1", "--json", *flags)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    report: Json = json.loads(out)
    assert _left(home) == []
    return report


def values(report: Json) -> dict[str, float]:
    return {each["what"]: each["value"] for each in report["figures"]}


@pytest.mark.usefixtures("child_processes")
def test_an_embedded_service_is_measured(tmp_path: Path) -> None:
    report = measured(tmp_path, *LITTLE)
    found = values(report)
    names = {"batch_adds", "api_adds", "api_gets", "worker_rollups", "event_bytes"}
    assert set(found) == names
    assert min(found.values()) > 0
    assert report["events"] > 2_000
    adds = next(each for each in report["figures"] if each["what"] == "api_adds")
    assert adds["limited_by"]
    assert report["store"] == "sqlite"


def _left(home: Path) -> list[str]:
    return [each.name for each in home.iterdir()]


def _servers_of(home: Path) -> list[int]:
    """The processes that serve from below *home*."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"serve" in words and str(home).encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("child_processes")
async def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    run = start(tmp_path, *LITTLE, "--seconds=60")

    try:
        await eventually(lambda: bool(_servers_of(tmp_path)), "a server runs")
        run.send_signal(number)
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert err == "counter: interrupted; nothing is left\n"
    assert _servers_of(tmp_path) == []
    assert _left(tmp_path) == []


class Miscounting:
    """Has counts, of which one may be wrong."""

    def __init__(self, count: int) -> None:
        self._count = count

    def counts(self, _base: str, names: list[str], _staleness: str) -> dict[str, int]:
        return dict.fromkeys(names, 3) | {"c0000001": self._count}


@pytest.mark.parametrize(("count", "exact"), [(2, False), (3, True), (4, True), (5, False)])
def test_a_wrong_count_fails(count: int, exact: bool, tmp_path: Path) -> None:
    """Three were acknowledged; the outcome of one more is unknown."""
    run = Run(Settings(), tmp_path, {}, (), 1.0, 1, 3, None, lambda _what: None)
    run.acknowledged, run.unknown = [3, 3, 3], [0, 1, 0]
    server = cast(Server, Miscounting(count))
    if exact:
        check_counts(run, server, "/v1/namespaces/n")
        return
    with pytest.raises(BenchError, match=f"1 of 3 counts are wrong: c0000001 is {count}"):
        check_counts(run, server, "/v1/namespaces/n")


@pytest.mark.parametrize(
    ("cores", "load", "idle", "message"),
    [
        (0.2, 0.95, 0.5, "the load: at least"),
        (0.95, 0.3, 0.5, "the process"),
        (0.5, 0.3, 0.0, "cores"),
        (0.5, 0.3, 0.5, "what it waits for"),
        (None, 0.3, None, "what it waits for"),
    ],
)
def test_the_limiting_resource_is_reported(
    cores: float | None, load: float, idle: float | None, message: str
) -> None:
    assert message in measure.limit(cores, load, idle)
