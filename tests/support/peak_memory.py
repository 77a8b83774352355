"""A bound on the memory of each test process: the run fails if one grew past it.

Applications that tests leave behind, in a cache or in a cycle, add up over thousands of tests.
"""

import resource
from collections.abc import Iterator
from typing import Any, Final

import pytest

PEAK_MIB_MAX: Final = 1_536
_KEY: Final = "peak_mib"


class PeakMemory:
    """Report the peak of each test process, and fail the run if one is past the bound."""

    def __init__(self) -> None:
        self._peaks: list[int] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take the peak that a worker of xdist reported; one that died reports none."""
        if _KEY in (output := getattr(node, "workeroutput", {})):
            self._peaks.append(output[_KEY])

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_KEY] = peak_mib()
        else:
            self._peaks.append(peak_mib())
            if max(self._peaks) > PEAK_MIB_MAX and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        peaks = ", ".join(str(peak) for peak in self._peaks)
        verdict = "; that is too much" if max(self._peaks) > PEAK_MIB_MAX else ""
        terminalreporter.write_line(
            f"peak memory of the test processes: {peaks} MiB, of at most {PEAK_MIB_MAX}{verdict}"
        )


def peak_mib() -> int:
    """The largest resident memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
