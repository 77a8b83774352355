"""Run a test within a test, with a bug planted."""

import io
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.simulation.bugs import Bug

_ROOT = Path(__file__).resolve().parents[2]


class _Planting:
    """Plants a bug around each test of a run of pytest within this one, and notes the outcomes."""

    def __init__(self, bug: Bug) -> None:
        self._bug = bug
        self.outcomes: list[str] = []
        self.error: BaseException | None = None
        self.text = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with self._bug.plant():
            try:
                return (yield)
            except BaseException as error:
                self.error = error
                raise

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.append(f"{report.when} {report.outcome}")
            self.text = str(report.longrepr)


def outcomes_with(bug: Bug, test: str, monkeypatch: pytest.MonkeyPatch) -> _Planting:
    """The outcome of *test*, run in this process with *bug* planted."""
    planting = _Planting(bug)
    # The run within keeps its notes of which test runs in the environment, as the run around it.
    monkeypatch.setenv("PYTEST_CURRENT_TEST", os.environ.get("PYTEST_CURRENT_TEST", ""))
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--capture=no", "-p", "no:xdist"]
    # At the end of a run it collects garbage ten times; the run around this one has it, too.
    options += ["-p", "no:unraisableexception"]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        pytest.main([*options, f"--rootdir={_ROOT}", str(_ROOT / test)], plugins=[planting])
    return planting
