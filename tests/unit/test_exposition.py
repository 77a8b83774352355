"""The metrics of several processes on a port, from any of them."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from api.telemetry.exposition import ApiExposition, MetricsDirectory
from counter.limits import SECOND
from counter.metrics import Histogram
from counter.telemetry.families import histogram
from counter.testing.clock import FakeClock
from tests.support.waiting import eventually

_ADDS = re.compile(r'^adds_total\{outcome="original"\} (\S+)$', re.MULTILINE)


def metrics_of(adds: int, depth: int = 0) -> list[Metric]:
    counter = CounterMetricFamily("adds", "Adds.", labels=["outcome"])
    counter.add_metric(["original"], adds)
    tally = Histogram((1, 10))
    tally.observe(adds)
    return [counter, GaugeMetricFamily("depth", "Depth.", value=depth), histogram("h", "", tally)]


def values(families: list[Metric]) -> dict[str, float]:
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


class Port:
    """Two processes on a port."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock(0)
        self._folder = folder
        self.boards = [self.start(number) for number in range(2)]

    def start(self, number: int) -> MetricsDirectory:
        """A process, perhaps in the place of one that died."""
        return MetricsDirectory(self._folder, number, 2, self.clock)


@pytest.fixture
def port(tmp_path: Path) -> Port:
    return Port(tmp_path)


def test_counters_are_summed_and_gauges_bear_their_processs_number(port: Port) -> None:
    port.boards[0].gathered(metrics_of(3, depth=7))
    found = values(port.boards[1].gathered(metrics_of(4, depth=8)))
    assert found["adds_total original"] == 7
    assert (found["depth 0"], found["depth 1"]) == (7, 8)
    assert [found[f"counter_h_bucket {bound}"] for bound in ("1.0", "10.0", "+Inf")] == [0, 2, 2]
    assert (found["counter_h_count"], found["counter_h_sum"]) == (2, 7)
    assert (found["counter_worker_up 0"], found["counter_worker_up 1"]) == (1, 1)


def test_no_sum_goes_back_when_a_process_dies_and_another_takes_its_place(port: Port) -> None:
    """Counters are kept, however often processes die."""
    port.boards[0].gathered(metrics_of(3))
    assert values(port.boards[1].gathered(metrics_of(4)))["adds_total original"] == 7
    for deaths in range(1, 4):
        again = port.start(1)
        assert values(port.boards[0].gathered(metrics_of(3)))["adds_total original"] == 6 + deaths
        assert values(again.gathered(metrics_of(1)))["adds_total original"] == 7 + deaths


def test_a_dead_or_hung_process_reports_no_gauge(port: Port) -> None:
    port.boards[0].gathered(metrics_of(3, depth=7))
    port.clock.advance(6 * SECOND)
    found = values(port.boards[1].gathered(metrics_of(4)))
    assert "depth 0" not in found
    assert (found["counter_worker_up 0"], found["adds_total original"]) == (0, 7)


def test_a_process_that_has_not_started_is_missing(tmp_path: Path) -> None:
    board = MetricsDirectory(tmp_path, 0, 2, FakeClock(0))
    found = values(board.gathered(metrics_of(1)))
    assert (found["counter_worker_up 0"], found["counter_worker_up 1"]) == (1, 0)


async def test_metrics_are_written_regularly_and_at_the_end(port: Port) -> None:
    stop, adds = asyncio.Event(), 5
    collect: Callable[[], list[Metric]] = lambda: metrics_of(adds)  # noqa: E731
    running = asyncio.create_task(port.boards[0].run(collect, stop))

    await eventually(
        lambda: values(port.boards[1].gathered(metrics_of(0))).get("adds_total original") == 5,
        "what is counted is laid down",
    )
    adds = 9
    stop.set()
    await running
    assert values(port.boards[1].gathered(metrics_of(0)))["adds_total original"] == 9


def test_a_disk_that_takes_nothing_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The scrape is answered all the same."""
    board = MetricsDirectory(tmp_path / "gone", 0, 1, FakeClock(0))
    with caplog.at_level(logging.WARNING, "counter.workers"):
        for _ in range(3):
            found = values(board.gathered(metrics_of(1)))
            assert (found["adds_total original"], found["counter_worker_up 0"]) == (1, 1)
    assert len(caplog.records) == 1


async def test_adds_by_outcome_are_those_of_all_processes(port: Port) -> None:
    own = CounterMetricFamily("counter_adds", "Adds.", labels=["outcome"])
    own.add_metric(["original"], 4)
    port.boards[0].gathered([own])
    exposition = ApiExposition((SimpleNamespace(collect=lambda: [own]),))
    assert await exposition.totals("counter_adds", "outcome", {"original": 4}) == {"original": 4}
    exposition.directory = port.boards[1]
    assert await exposition.totals("counter_adds", "outcome", {"original": 4}) == {"original": 8}


async def test_files_are_read_and_written_in_one_thread_that_is_not_the_event_loops(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a hanging disk delayed requests, and older files replaced newer ones."""
    threads: set[int] = set()
    for name in ("write", "_read"):
        noted = _noted(getattr(MetricsDirectory, name), threads)
        monkeypatch.setattr(MetricsDirectory, name, noted)
    adds, stop = 0, asyncio.Event()

    def collect() -> list[Metric]:
        nonlocal adds
        adds += 1
        return metrics_of(adds)

    exposition = ApiExposition((SimpleNamespace(collect=collect),))
    exposition.directory = port.boards[0]
    running = asyncio.create_task(port.boards[0].run(collect, stop))
    texts = await asyncio.gather(*(exposition.text_at(1) for _ in range(20)))
    await exposition.totals("counter_adds", "outcome", {})
    stop.set()
    await running
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    found = [float(_ADDS.findall(text.decode())[0]) for text in texts]
    assert found == sorted(found)
    assert values(port.boards[1].gathered(metrics_of(0)))["adds_total original"] == adds


def _noted(call: Callable[..., Any], threads: set[int]) -> Callable[..., Any]:
    def noted(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return call(*given)

    return noted
