"""The starter of the processes that demo, chaos and benchmarks break."""

from pathlib import Path

import pytest

from scripts.service_process import LOG_TAIL_CHARS, CounterProcess

pytestmark = pytest.mark.usefixtures("child_processes")


async def test_a_process_runs_that_has_written_much_since_it_said_so(tmp_path: Path) -> None:
    """Regression: the sign was expected at the log's end, and busy processes had later lines."""
    process = CounterProcess("one", ["str"], tmp_path / "log", "Help on class str", module="pydoc")
    try:
        await process.start()
        await process.run()
    finally:
        await process.destroy()
    assert len((tmp_path / "log").read_text(encoding="utf-8")) > 2 * LOG_TAIL_CHARS
