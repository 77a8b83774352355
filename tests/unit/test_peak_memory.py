"""A run of the tests fails if one of its processes grew too large."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.peak_memory import PEAK_MIB_MAX, PeakMemory


def status_with(*peaks: int) -> int:
    """The exit status of a run in which every test passed, and workers reported *peaks*."""
    plugin = PeakMemory()
    for peak in peaks:
        plugin.pytest_testnodedown(SimpleNamespace(workeroutput={"peak_mib": peak}), None)
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)
    finish = plugin.pytest_sessionfinish(cast(Any, session))
    next(finish)
    with pytest.raises(StopIteration):
        next(finish)
    return int(session.exitstatus)


def test_processes_within_the_bound_pass() -> None:
    assert status_with(PEAK_MIB_MAX, 100) == pytest.ExitCode.OK


def test_one_process_past_the_bound_fails_the_run() -> None:
    assert status_with(100, PEAK_MIB_MAX + 1) == pytest.ExitCode.TESTS_FAILED


def test_a_worker_that_died_reported_no_peak() -> None:
    plugin = PeakMemory()
    plugin.pytest_testnodedown(SimpleNamespace(), "crashed")
    assert status_with() == pytest.ExitCode.OK
